"""Compiled blocks: one graph without breaks, one exchange op in it, nothing compiled anew for another plan."""

from __future__ import annotations

import wan_cases as cases
from ranks import Ranks

PLANS = [((0, 1), 1), ((0, 1), 4), ((1, 0), 2), ((1, 0), 3)]


def test_a_new_plan_compiles_nothing(world: Ranks):
    """32 tokens on any order of two ranks, any chunk count: all blocks share the one graph of the first."""
    for seen in world.run(2, cases.compiled, size=(2, 8, 8), plans=PLANS, layers=3, dynamic=False):
        assert seen == {"graphs": [1, 1, 1, 1], "exchanges": [1], "worst": 0.0}


def test_nor_does_another_number_of_ranks_with_dynamic_shapes(world: Ranks):
    plans = [((0, 1, 2), 1), ((2, 0, 1), 3), ((0, 1), 2), ((1, 2), 1), ((0, 2), 4)]
    for seen in world.run(3, cases.compiled, size=(3, 6, 10), plans=plans, layers=3, dynamic=True):
        assert set(seen["graphs"]) <= {0, 1} and seen["graphs"][-1] == 1
        assert seen["exchanges"] == [1] and seen["worst"] == 0.0
