"""A Wan transformer of diffusers gives the same bits on 1, 2, 3 and 4 ranks, whatever the chunks. Trial cases B1, B3, B17, B21."""

from __future__ import annotations

import pytest
import wan_cases as cases
from ranks import Ranks

from comfyui_pipedit.plan import MIN_TOKENS, Plan, shrink
from comfyui_pipedit.plan import Group as G

GROUPS = {1: [(0,)], 2: [(0, 1), (1, 0)], 3: [(0, 1, 2), (2, 0)], 4: [(0, 1, 2, 3), (3, 1, 0), (1, 3)]}
SIZES = [(1, 8, 8), (3, 6, 10), (5, 14, 10), (2, 8, 12)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{cases.num_tokens(size)} tokens")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bit_equal_to_one_rank(world: Ranks, ranks: int, size: tuple[int, int, int]):
    groups, chunks = GROUPS[ranks], range(1, cases.HEADS // ranks + 2)
    found = world.run(ranks, cases.differences, size=size, groups=groups, chunks=list(chunks))
    assert sum(map(len, found)) == sum(map(len, groups)) * len(chunks)
    assert [(rank, plan, worst) for rank, each in enumerate(found) for plan, worst in each.items() if worst] == []


def test_a_timestep_for_each_token_is_cut_too(world: Ranks):
    found = world.run(3, cases.differences, size=(3, 6, 10), groups=[(0, 1, 2)], chunks=[1, 3], per_token=True)
    assert found == [{"(0, 1, 2) in 1": 0.0, "(0, 1, 2) in 3": 0.0}] * 3


def test_a_wrong_order_of_heads_would_be_seen(world: Ranks):
    found = world.run(2, cases.differences, size=(3, 6, 10), groups=[(0, 1)], chunks=[2], wrong=True)
    assert min(worst for each in found for worst in each.values()) > 0.1


def test_without_a_layout_nothing_changes(world: Ranks):
    assert world.run(1, cases.without_layout, size=(3, 6, 10)) == [True]


def test_a_tiny_clip_on_many_ranks_falls_back_to_fewer(world: Ranks):
    """Trial case B6: 9 tokens on 4 ranks become 2 ranks, each with at least MIN_TOKENS."""
    size = (1, 6, 6)
    plan = shrink(Plan(G((0, 1, 2, 3)), G((3,))), cases.num_tokens(size), cases.HEADS)
    assert plan.denoise.ranks == (0, 1) and cases.num_tokens(size) // 2 >= MIN_TOKENS
    found = world.run(4, cases.differences, size=size, groups=[plan.denoise.ranks], chunks=[1, 4])
    assert found == [{"(0, 1) in 1": 0.0, "(0, 1) in 4": 0.0}] * 2 + [{}] * 2
