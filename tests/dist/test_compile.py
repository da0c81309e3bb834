"""Compiled blocks: one graph without breaks, one exchange op in it, nothing compiled anew for another plan."""

from __future__ import annotations

import wan_cases as cases
from ranks import Ranks


def test_a_new_plan_compiles_nothing(world: Ranks):
    """32 tokens on any order of two ranks, any chunk count: all blocks share the one graph of the first."""
    plans = [((0, 1), 1), ((0, 1), 4), ((1, 0), 2), ((1, 0), 3)]
    seen, other = world.run(2, cases.compiled, size=(2, 8, 8), plans=plans, layers=2, dynamic=False)
    assert seen == {"graphs": [1, 1, 1, 1], "exchanges": [1], "worst": 0.0}
    assert other["worst"] == 0.0


def test_nor_do_other_token_counts_with_dynamic_shapes(world: Ranks):
    """45 tokens: 23 + 22, 22 + 23, and all on one rank."""
    plans = [((0, 1), 1), ((1, 0), 3), ((0,), 1)]
    seen, _ = world.run(2, cases.compiled, size=(3, 6, 10), plans=plans, layers=2, dynamic=True)
    assert seen == {"graphs": [1, 1, 1], "exchanges": [1], "worst": 0.0}
