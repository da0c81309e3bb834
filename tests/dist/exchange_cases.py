"""What the ranks do in test_exchange.py. Tensors are coded by position: every element tells what it is and where it
belongs, so that no wrong transpose, order or offset can pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comfyui_pipedit.errors import WorkerStuck
from comfyui_pipedit.parallel.exchange import Exchange
from comfyui_pipedit.parallel.fabric import Parcel
from comfyui_pipedit.parallel.fabric_p2p import PointToPoint, Posted
from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Segments

WIDTH = 4
Q, K, V, OUT = range(4)
DEADLINE = 15.0
"""Seconds for what must arrive by itself."""


def coded(what: int, batch: int, rows: int, heads: int) -> Tensor:
    """[B, S, H, D] whose elements are exact in float32 and all different, in Q, K, V and output alike."""
    place = torch.arange(batch * rows * heads * WIDTH, dtype=torch.float32)
    return (4 * place + what).reshape(batch, rows, heads, WIDTH)


def strided(x: Tensor) -> Tensor:
    """The same values in memory that is not contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class CodedAttention:
    """Takes only the right rows of the right heads in the right order, and answers with coded outputs."""

    def __init__(self, rank: int, layout: Layout, batch: int, device: torch.device) -> None:
        self.expected = [coded(what, batch, layout.num_rows, layout.heads.num_heads).to(device) for what in range(4)]
        alone = layout.ranks == (rank,)
        spans = [(0, layout.heads.num_heads)] if alone else [layout.heads_of(rank, i) for i in range(layout.chunks)]
        self.spans = [span for span in spans if span[0] < span[1]]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, last = self.spans.pop(0)
        for what, got in zip("QKV", (query, key, value), strict=True):
            whole = self.expected["QKV".index(what)]
            assert torch.equal(got, whole[:, :, first:last]), f"{what} of heads {first}..{last} arrived wrong"
        return self.expected[OUT][:, :, first:last]


def own_rows(x: Tensor, rank: int, segments: Segments) -> Tensor:
    start, stop = segments.of(rank)
    return torch.cat((x[:, start:stop], x[:, segments.num_tokens:]), dim=1)


def exchange_coded(device: torch.device, layouts: Sequence[Layout], batch: int) -> int:
    """Runs each layout on its ranks; returns in how many this rank took part."""
    fabric = PointToPoint(device)
    fabric.warm_up()
    return sum(_one(fabric, layout, batch) for layout in layouts if dist.get_rank() in layout.ranks)


def _one(fabric: PointToPoint, layout: Layout, batch: int) -> int:
    rank, heads = dist.get_rank(), layout.heads.num_heads
    attention = CodedAttention(rank, layout, batch, fabric.device)
    exchange = Exchange(rank, fabric, attention)
    if layout.segments.holders.index(rank) < 0:
        exchange.serve(layout, (batch, heads, WIDTH), torch.float32, fabric.device)
    else:
        rows = [own_rows(whole, rank, layout.segments) for whole in attention.expected]
        got = exchange.attend(*(strided(x) for x in rows[:OUT]), layout)
        assert got.is_contiguous() or layout.ranks == (rank,)
        assert torch.equal(got, rows[OUT]), f"rank {rank}: outputs are in wrong places with {layout}"
    assert not attention.spans, f"rank {rank} was not asked for heads {attention.spans} of {layout}"
    return 1


def again_and_again(device: torch.device, layout: Layout, batch: int) -> list[int]:
    """The same exchange three times, its buffers spoilt in between; how many buffers it then had to itself."""
    rank, held = dist.get_rank(), []
    exchange = Exchange(rank, PointToPoint(device))
    for _ in range(3):
        exchange.attention = CodedAttention(rank, layout, batch, torch.device(device))
        rows = [own_rows(whole, rank, layout.segments) for whole in exchange.attention.expected]
        assert torch.equal(exchange.attend(*(strided(x) for x in rows[:OUT]), layout), rows[OUT])
        buffers = [buffer for kept in exchange.scratch._free.values() for buffer in kept]
        assert len({buffer.data_ptr() for buffer in buffers if buffer.numel()}) == sum(b.numel() > 0 for b in buffers)
        for buffer in buffers:
            buffer.fill_(float("nan"))
        held.append(len(buffers))
    return held


def gather_coded(device: torch.device, segments: Sequence[Segments], batch: int) -> int:
    """Gathers coded rows along each dimension in turn, from strided slices; returns how many gathers were right."""
    exchange = Exchange(dist.get_rank(), PointToPoint(device))
    right = 0
    for each in segments:
        if each.holders.index(exchange.rank) < 0:
            continue
        whole = coded(OUT, batch, each.num_tokens + each.replicated, 3).to(device)
        own = own_rows(whole, exchange.rank, each)
        for dim in range(4):
            got = exchange.gather(strided(own).movedim(1, dim), each, dim)
            assert torch.equal(got, whole.movedim(1, dim)), f"gather of {each} along {dim}"
            right += 1
    return right


class Recorder:
    """A fabric that writes down what is posted and waited for, and keeps the tensors that will be received."""

    def __init__(self, fabric: PointToPoint) -> None:
        self.fabric = fabric
        self.log: list[str] = []
        self.messages: list[tuple[int, int]] = []
        self.landing: list[list[Tensor]] = []

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Any:
        number = len(self.landing)
        self.log.append(f"post {number}")
        self.messages.append((len(sends), len(receives)))
        for _, tensor in receives:
            tensor.fill_(float("nan"))
        self.landing.append([tensor for _, tensor in receives])
        return Recorded(self, number, self.fabric.post(sends, receives))


class Recorded:
    def __init__(self, recorder: Recorder, number: int, posted: Posted) -> None:
        self.recorder, self.number, self.posted = recorder, number, posted

    def wait(self) -> None:
        self.recorder.log.append(f"wait {self.number}")
        self.posted.wait()


def pipeline_log(device: torch.device, layout: Layout) -> tuple[list[str], list[tuple[int, int]]]:
    """(what one attention does in which order, (messages out, messages in) of each batch)."""
    recorder = Recorder(PointToPoint(device))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        recorder.log.append("attend")
        return query

    x = torch.zeros(1, layout.rows_of(dist.get_rank()), layout.heads.num_heads, WIDTH)
    Exchange(dist.get_rank(), recorder, attention).attend(x, x, x, layout)
    return recorder.log, recorder.messages


def lands_while_attending(device: torch.device, layout: Layout) -> list[list[int]]:
    """Each chunk's attention ends only once the batches that must be under way have arrived, unwaited for.

    Returns the batches that arrived during each attention.
    """
    recorder = Recorder(PointToPoint(device))
    arrived: list[list[int]] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        waited = {int(line.split()[1]) for line in recorder.log if line.startswith("wait")}
        under_way = [number for number in range(len(recorder.landing)) if number not in waited]
        until = time.monotonic() + DEADLINE
        while any(_missing(recorder, number) for number in under_way):
            assert time.monotonic() < until, f"some of batches {under_way} did not arrive during attention"
            time.sleep(0.001)
        arrived.append(under_way)
        return query

    x = torch.zeros(1, layout.rows_of(dist.get_rank()), layout.heads.num_heads, WIDTH)
    Exchange(dist.get_rank(), recorder, attention).attend(x, x, x, layout)
    return arrived


def _missing(recorder: Recorder, number: int) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in recorder.landing[number])


def phases(device: torch.device, layout: Layout) -> list[str]:
    """What the phase board is told in one attention."""
    told: list[str] = []
    x = torch.zeros(1, layout.rows_of(dist.get_rank()), layout.heads.num_heads, WIDTH)
    exchange = Exchange(dist.get_rank(), PointToPoint(device), on_phase=told.append)
    exchange.attend(x, x, x, layout)
    return told


def peer_goes_away(device: torch.device, layout: Layout, early: bool) -> tuple[str, float]:
    """(what rank 0 raises when rank 1 leaves instead of exchanging, after how many seconds).

    early: rank 1 is gone before rank 0 posts anything; else rank 0 waits for it already.
    """
    x = torch.zeros(1, layout.rows_of(dist.get_rank()), layout.heads.num_heads, WIDTH)
    store = dist.distributed_c10d._get_default_store()
    start, text = time.monotonic(), ""
    if dist.get_rank() == 0:
        exchange = Exchange(0, PointToPoint(device), on_phase=lambda what: store.set("waits", what))
        if early:
            store.wait(["left"])
        try:
            exchange.attend(x, x, x, layout)
        except WorkerStuck as error:
            text = str(error)
    elif not early:
        store.wait(["waits"])
    dist.destroy_process_group()
    store.set("left", "")
    return text, time.monotonic() - start
