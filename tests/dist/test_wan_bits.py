"""A Wan transformer of diffusers gives the same bits on 1 to 4 ranks, whatever the chunks. Cases B1, B3, B17, B21."""

from __future__ import annotations

import pytest
import wan_cases as cases
from ranks import Ranks

from comfyui_pipedit.plan import MIN_TOKENS, Group, Plan, shrink

GROUPS = {1: [(0,)], 2: [(0, 1), (1, 0)], 3: [(0, 1, 2), (2, 0)], 4: [(0, 1, 2, 3), (3, 1, 0), (1, 3)]}
SIZES = [(1, 8, 8), (3, 6, 10), (1, 10, 26), (3, 10, 14), (5, 14, 10)]
"""16 to 175 tokens; 65 on 2 and 105 on 3 ranks leave blocks of 1 and 3 rows, which a CPU kernel rounds otherwise."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bit_equal_to_one_rank(world: Ranks, ranks: int):
    groups, chunks = GROUPS[ranks], range(1, cases.HEADS // ranks + 2)
    found = world.run(ranks, cases.differences, sizes=SIZES, groups=groups, chunks=list(chunks))
    assert sum(map(len, found)) == sum(map(len, groups)) * len(chunks) * len(SIZES)
    assert [(rank, plan, worst) for rank, each in enumerate(found) for plan, worst in each.items() if worst] == []


@pytest.mark.parametrize("ranks", [5, 6, 8])
def test_degrees_that_are_offered_beyond_four(world: Ranks, ranks: int):
    """B21: a degree that is offered is verified; 8 heads on 5, 6 and 8 ranks, 45 and 65 tokens."""
    sizes, chunks = [(3, 6, 10), (1, 10, 26)], [1, 2]
    for size in sizes:
        Plan(Group(tuple(range(ranks))), Group((0,))).check(cases.num_tokens(size), cases.HEADS)
    found = world.run(ranks, cases.differences, sizes=sizes, groups=[tuple(range(ranks))], chunks=chunks)
    assert [len(each) for each in found] == [len(chunks) * len(sizes)] * ranks
    assert {worst for each in found for worst in each.values()} == {0.0}


def test_a_timestep_for_each_token_is_cut_too(world: Ranks):
    found = world.run(3, cases.differences, sizes=[(3, 6, 10)], groups=[(0, 1, 2)], chunks=[1, 3], per_token=True)
    assert found == [{f"45 tokens on (0, 1, 2) in {chunks}": 0.0 for chunks in (1, 3)}] * 3


def test_a_wrong_order_of_heads_would_be_seen(world: Ranks):
    found = world.run(2, cases.differences, sizes=[(3, 6, 10)], groups=[(0, 1)], chunks=[2], wrong=True)
    assert min(worst for each in found for worst in each.values()) > 0.01


def test_without_a_layout_or_without_hooks_nothing_changes(world: Ranks):
    same = {"installed": True, "no layout": True, "taken off": True}
    assert world.run(1, cases.untouched, size=(3, 6, 10)) == [same]


def test_a_tiny_clip_on_many_ranks_falls_back_to_fewer(world: Ranks):
    """Trial case B6: 9 tokens on 4 ranks become 2 ranks, each with at least MIN_TOKENS."""
    size = (1, 6, 6)
    plan = shrink(Plan(Group((0, 1, 2, 3)), Group((3,))), cases.num_tokens(size), cases.HEADS)
    assert plan.denoise.ranks == (0, 1) and cases.num_tokens(size) // 2 >= MIN_TOKENS
    found = world.run(4, cases.differences, sizes=[size], groups=[plan.denoise.ranks], chunks=[1, 4])
    assert found == [{f"9 tokens on (0, 1) in {chunks}": 0.0 for chunks in (1, 4)}] * 2 + [{}] * 2
