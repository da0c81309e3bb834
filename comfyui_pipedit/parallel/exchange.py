"""The one primitive under all attention parallelism: rows in, attention on own heads, rows out, in overlapping chunks.

Ranks that hold tokens send Q, K and V of each chunk of heads to the rank that owns them; it attends over the whole
sequence and sends the output rows back. With owners = holders and one chunk this is Ulysses, with more chunks PipeSP
(PipeDiT section 3.1, but pipelined in both directions), with idle decode ranks among the owners Aco (section 3.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OutOfStep
from ..plan import Segments
from .fabric import Fabric, Transfer
from .kernels import Attention, steady_attention
from .layout import Layout, Move, inward, outward
from .scratch import Scratch

OnPhase = Callable[[str], None]
"""Told what a rank waits for, and "" when the wait is over."""


def quiet(text: str) -> None:
    """An OnPhase that tells nobody."""


class Form(NamedTuple):
    """What attentions must have in common for a rank without tokens to serve them alike. options: of the kernel."""

    batch: int
    heads: int
    size: int
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]


class Exchange:
    """What one rank does in exchanges. All ranks of a layout must call alike, in the same order."""

    def __init__(self, rank: int, fabric: Fabric, attention: Attention = steady_attention,
                 on_phase: OnPhase = quiet) -> None:
        self.rank = rank
        self.fabric = fabric
        self.attention = attention
        self.on_phase = on_phase
        self.scratch = Scratch()
        self.seen: Counter[Form] = Counter()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout | None, **options: Any) -> Tensor:
        """Attention of a holder's rows [B, s_local, H, D] (any strides) to all rows -> [B, s_local, H, D].

        No layout: these are all rows. `options` go to the attention kernel. `seen` counts calls by their form.
        OutOfStep if the shapes are not the layout's, before anything is sent.
        """
        self.seen[Form(query.shape[0], query.shape[2], query.shape[3], query.dtype, tuple(options.items()))] += 1
        if layout is None:
            return self.attention(query, key, value, **options)
        expected = (layout.rows_of(self.rank), layout.heads.num_heads)
        for tensor in (query, key, value):
            if tuple(tensor.shape[1:3]) != expected:
                raise OutOfStep(f"rank {self.rank} brings (rows, heads) = {tuple(tensor.shape[1:3])} to an exchange "
                                f"whose layout says {expected}")
        if layout.ranks == (self.rank,):
            return self.attention(query, key, value, **options)
        return _Pipeline(self, (query, key, value), layout, options).run()

    def serve(self, layout: Layout, shape: tuple[int, int, int], dtype: torch.dtype,
              device: torch.device | str = "cpu", **options: Any) -> None:
        """The same exchange on an owner without tokens (an Aco helper). `shape`: (batch, heads in all, head size)."""
        batch, heads, width = shape
        nothing = torch.empty(batch, 0, heads, width, dtype=dtype, device=device)
        _Pipeline(self, (nothing, nothing, nothing), layout, options).run()

    def gather(self, x: Tensor, segments: Segments, dim: int) -> Tensor:
        """All holders' rows along `dim`, put together on every holder: sharded tokens in order, then the replicated."""
        if segments.holders.ranks == (self.rank,):
            return x
        rows = x.movedim(dim, 0)
        whole = rows.new_empty(segments.num_tokens + segments.replicated, *rows.shape[1:])
        spans = dict(zip(segments.holders.ranks, segments.spans, strict=True))
        start, stop = spans.pop(self.rank)
        own = rows[:stop - start].contiguous()
        transfer = self.fabric.post([(rank, own) for rank in spans],
                                    [(rank, whole[slice(*span)]) for rank, span in spans.items()])
        whole[start:stop] = own
        whole[segments.num_tokens:] = rows[stop - start:]
        self.wait(transfer, f"gather from ranks {', '.join(map(str, spans))}")
        return whole.movedim(0, dim)

    def wait(self, transfer: Transfer, what: str) -> None:
        """Waits for a transfer and says so on the phase board."""
        self.on_phase(what)
        transfer.wait()
        self.on_phase("")


class _Pipeline:
    """One attention over several ranks: the state of its chunks under way.

    All ranks post in(0), in(1), out(0), in(2), out(1), ...: each a batch that holds both ends' messages, so that the
    batches of a communicator that runs them one by one (NCCL) can't wait for each other in a ring.
    """

    def __init__(self, exchange: Exchange, rows: tuple[Tensor, Tensor, Tensor], layout: Layout,
                 options: dict[str, Any]) -> None:
        self.exchange = exchange
        self.rank = exchange.rank
        self.rows = rows
        self.layout = layout
        self.options = options
        self.scratch = exchange.scratch
        self.scratch.enter(layout)
        self.result = torch.empty_like(rows[0], memory_format=torch.contiguous_format)

    def run(self) -> Tensor:
        chunks = self.layout.chunks
        arriving = [self._send_in(0)]
        returning = []
        for chunk in range(chunks):
            if chunk + 1 < chunks:
                arriving.append(self._send_in(chunk + 1))
            sequence, packed, transfer = arriving.pop(0)
            self._wait(transfer, "Q, K, V", chunk)
            returning.append(self._send_out(chunk, self._attend(sequence)))
            self.scratch.give(sequence, *packed)
        for chunk, (pieces, landed, transfer) in enumerate(returning):
            self._wait(transfer, "outputs", chunk)
            self._place(pieces)
            self.scratch.give(*landed)
        return self.result

    def _send_in(self, chunk: int) -> tuple[Tensor, list[Tensor], Transfer]:
        """Posts a chunk's Q, K, V; the sequence, and what was packed to be sent. The sequence of own heads is [rows, 3,
        B, heads, D]: what comes from a rank is one contiguous part of it and needs no copy."""
        moves = inward(self.layout, chunk)
        sequence = self._empty_sequence(chunk)
        sends = [(move.target, self._pack(move)) for move in moves if move.source == self.rank != move.target]
        receives = [(move.source, sequence[slice(*move.target_rows)]) for move in moves
                    if move.target == self.rank != move.source]
        transfer = self.exchange.fabric.post(sends, receives)
        for move in moves:
            if move.source == move.target == self.rank:
                self._pack(move, out=sequence[slice(*move.target_rows)])
        return sequence, [packed for _, packed in sends], transfer

    def _empty_sequence(self, chunk: int) -> Tensor:
        batch, _, _, width = self.result.shape
        first, last = self.layout.heads_of(self.rank, chunk)
        return self.scratch.take(self.result, (self.layout.num_rows, 3, batch, last - first, width))

    def _pack(self, move: Move, out: Tensor | None = None) -> Tensor:
        """A move's part of Q, K, V as one contiguous [rows, 3, B, heads, D]."""
        part = [tensor[:, slice(*move.source_rows), slice(*move.heads)].transpose(0, 1) for tensor in self.rows]
        rows, *rest = part[0].shape
        return torch.stack(part, dim=1, out=self.scratch.take(self.result, (rows, 3, *rest)) if out is None else out)

    def _attend(self, sequence: Tensor) -> Tensor:
        """[rows, 3, B, heads, D] -> [B, rows, heads, D]; the kernel isn't called for no heads."""
        query, key, value = sequence.transpose(0, 2).unbind(1)
        return self.exchange.attention(query, key, value, **self.options) if query.shape[2] else query

    def _send_out(self, chunk: int, output: Tensor) -> tuple[list[tuple[Move, Tensor]], list[Tensor], Transfer]:
        """Posts a chunk's output rows; returns what will be placed in the result once they have arrived, and what they
        arrive in."""
        moves = outward(self.layout, chunk)
        sends = [(move.target, output[:, slice(*move.source_rows)]) for move in moves
                 if move.source == self.rank != move.target]
        coming = [(move, self._landing(move)) for move in moves if move.target == self.rank != move.source]
        transfer = self.exchange.fabric.post(sends, [(move.source, tensor) for move, tensor in coming])
        own = [(move, output[:, slice(*move.source_rows)]) for move in moves if move.source == move.target == self.rank]
        return own + coming, [landing for _, landing in coming], transfer

    def _landing(self, move: Move) -> Tensor:
        batch, _, _, width = self.result.shape
        return self.scratch.take(self.result, (batch, *move.shape, width))

    def _place(self, pieces: list[tuple[Move, Tensor]]) -> None:
        """Puts output rows where their heads belong, by head number: so no chunk order needs PipeDiT's repair (3.1)."""
        for move, piece in pieces:
            self.result[:, slice(*move.target_rows), slice(*move.heads)] = piece

    def _wait(self, transfer: Transfer, what: str, chunk: int) -> None:
        peers = ", ".join(str(rank) for rank in self.layout.ranks if rank != self.rank)
        self.exchange.wait(transfer, f"{what} of chunk {chunk + 1}/{self.layout.chunks} with ranks {peers}")
