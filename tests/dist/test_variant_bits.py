"""Each variant of Wan gives the same bits on 1 to 3 ranks, whatever the chunks. Case B2: text 512 and image 257."""

from __future__ import annotations

import pytest
import tiny_wan
import variant_cases as cases
from ranks import Ranks

SIZES = [(1, 4, 6), (2, 5, 7), (5, 6, 8), (3, 10, 14)]
"""Latent frames, height, width: 6 to 105 tokens, odd sizes, and blocks of 1 to 3 rows on a rank."""


@pytest.mark.parametrize("variant", tiny_wan.VARIANTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bit_equal_to_one_rank(world: Ranks, variant: str, ranks: int):
    sizes = [size for size in SIZES if cases.geometry(16).num_tokens((1, 16, *size)) >= 4 * ranks]
    found = world.run(ranks, cases.differences, variant=variant, sizes=sizes, groups=[tuple(range(ranks)), (1, 0)],
                      chunks=[1, 2, 3])
    assert sum(map(len, found)) == (ranks + 2) * 3 * len(sizes)
    assert [(rank, plan, worst) for rank, each in enumerate(found) for plan, worst in each.items() if worst] == []
