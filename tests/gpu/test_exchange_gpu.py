"""The exchange on NCCL, as many ranks as there are GPUs. With -s it prints what was measured (docs/exchange.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from dist.ranks import Ranks

from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Group, HeadTable, Segments

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "dist")]
import exchange_cases  # noqa: E402
import exchange_cases_gpu as cases  # noqa: E402
import wan_cases  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def size() -> int:
    return torch.cuda.device_count()


def layouts(size: int) -> list[Layout]:
    """All ranks in order and turned round, all but the first, and one holder with all as owners (Aco)."""
    everyone = tuple(range(size))
    groups = {everyone, everyone[::-1], everyone[1:] or everyone}
    even = [Layout.even(Group(ranks), tokens, 8, chunks)
            for ranks in groups for tokens in (37, 512) for chunks in (1, 2, 8)]
    segments, heads = Segments.even(Group((size - 1,)), 37), HeadTable.even(Group(everyone), 8)
    return even + [Layout(segments, heads, chunks) for chunks in (1, 3)]


def test_every_element_arrives_where_it_belongs(world: Ranks, size: int):
    taken = world.run(size, exchange_cases.exchange_coded, "nccl", layouts=layouts(size), batch=1)
    assert sum(taken) == sum(len(layout.ranks) for layout in layouts(size))


def test_gather(world: Ranks, size: int):
    segments = [Segments.even(Group(tuple(range(size))), 37), Segments.even(Group(tuple(range(size))[::-1]), 12)]
    assert world.run(size, exchange_cases.gather_coded, "nccl", segments=segments, batch=1) == [8] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads"), [(500, 8), (8192, 12), (16384, 12)])
def test_attention_has_one_ranks_bits(world: Ranks, size: int, dtype: torch.dtype, tokens: int, heads: int):
    chunks = (1, 2, 3, heads // size)
    for seen in world.run(size, cases.attention_over_ranks, "nccl", dtype=dtype, tokens=tokens, heads=heads, width=128,
                          chunks=chunks):
        print(f"\n{size} ranks, {tokens} tokens x {heads} heads, {dtype}: ms {seen['ms']}")
        assert seen["bits"] == dict.fromkeys(chunks, True)


def test_a_small_wan_in_fp32(world: Ranks, size: int):
    found = world.run(size, wan_cases.differences, "nccl", sizes=[(3, 6, 10), (5, 14, 10)],
                      groups=[tuple(range(size))], chunks=[1, 2, 4])
    worst = max(error for each in found for error in each.values())
    print(f"\n{size} ranks, fp32, worst relative error {worst:.2e}")
    assert worst <= 1e-4


def test_wan_1b_shapes_in_bf16(world: Ranks, size: int):
    for seen in world.run(size, cases.wan_1b_blocks, "nccl", deadline=240.0, size=(9, 60, 104), layers=4,
                          chunks=(1, 2, 3)):
        print(f"\n{size} ranks, 14,040 tokens, 4 blocks: relative L2 {seen['error']}, ms {seen['ms']}")
        assert max(seen["error"].values()) <= 2e-2
        assert seen["equal"]
