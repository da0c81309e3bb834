"""Which rows of which heads travel from whom to whom: a pure function of the plan, so that all ranks agree on it.

A sequence is `num_tokens` sharded tokens followed by the replicated ones. A holder's own tensor has its span, then the
replicated tokens. docs/exchange.md draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import InvalidJob, OutOfStep
from ..plan import Group, HeadTable, Segments

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens and heads of one attention are. `chunks`: each owner's heads are exchanged in so many parts.

    InvalidJob if the spans of tokens or heads do not follow each other from 0, or `chunks` is less than 1.
    """

    segments: Segments
    heads: HeadTable
    chunks: int = 1

    def __post_init__(self) -> None:
        _check_spans("tokens", self.segments.holders, self.segments.spans)
        _check_spans("heads", self.heads.owners, self.heads.spans)
        if self.chunks < 1:
            raise InvalidJob(f"chunks must be 1 or more, not {self.chunks}")

    @classmethod
    def even(cls, group: Group, num_tokens: int, num_heads: int, chunks: int = 1,
             helpers: tuple[int, ...] = ()) -> Layout:
        """The members of a group hold the tokens, and own the heads: Ulysses with one chunk, PipeSP with more. Helpers
        own an even share of the heads too (Aco); what does not divide stays with the group."""
        owners = Group((*group.ranks, *helpers))
        return cls(Segments.even(group, num_tokens), HeadTable.even(owners, num_heads), chunks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, holders and owners."""
        return tuple(sorted({*self.segments.holders.ranks, *self.heads.owners.ranks}))

    @property
    def num_rows(self) -> int:
        """Rows that an owner attends to: sharded and replicated tokens."""
        return self.segments.num_tokens + self.segments.replicated

    def rows_of(self, rank: int) -> int:
        """Rows of a holder's own tensors. OutOfStep if the rank holds none of the tokens."""
        if self.segments.holders.index(rank) < 0:
            raise OutOfStep(f"rank {rank} holds no tokens; the holders are {self.segments.holders.ranks}")
        start, stop = self.segments.of(rank)
        return stop - start + self.segments.replicated

    def heads_of(self, rank: int, chunk: int) -> Span:
        """The heads that a rank attends with in a chunk; empty if it owns none."""
        index = self.heads.owners.index(rank)
        return self.heads.chunk(chunk, self.chunks)[index] if index >= 0 else (0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of `heads` that go from a rank's tensor into another's (or stay, when source is target)."""

    source: int
    target: int
    source_rows: Span
    target_rows: Span
    heads: Span

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, heads)"""
        return self.target_rows[1] - self.target_rows[0], self.heads[1] - self.heads[0]


@lru_cache(maxsize=4096)
def inward(layout: Layout, chunk: int) -> tuple[Move, ...]:
    """Moves of Q, K and V from the holders' rows into the owners' sequences.

    Replicated rows never travel between holders; an owner that holds no tokens gets them from the lowest holder.
    """
    moves = []
    for owner in layout.heads.owners.ranks:
        heads = layout.heads_of(owner, chunk)
        text_from = owner if layout.segments.holders.index(owner) >= 0 else layout.segments.holders.leader
        for holder, own, whole in _rows(layout):
            moves.append(Move(holder, owner, own, whole, heads))
            if holder == text_from:
                moves.append(Move(holder, owner, *_replicated_rows(layout, holder), heads))
    return _not_empty(moves)


@lru_cache(maxsize=4096)
def outward(layout: Layout, chunk: int) -> tuple[Move, ...]:
    """Moves of the attention's output from the owners' sequences into the holders' rows; replicated rows go to all."""
    moves = []
    for owner in layout.heads.owners.ranks:
        heads = layout.heads_of(owner, chunk)
        for holder, own, whole in _rows(layout):
            own_text, whole_text = _replicated_rows(layout, holder)
            moves += [Move(owner, holder, whole, own, heads), Move(owner, holder, whole_text, own_text, heads)]
    return _not_empty(moves)


def _rows(layout: Layout) -> list[tuple[int, Span, Span]]:
    """(holder, its rows in its own tensor, the same rows in the whole sequence)."""
    spans = zip(layout.segments.holders.ranks, layout.segments.spans, strict=True)
    return [(rank, (0, stop - start), (start, stop)) for rank, (start, stop) in spans]


def _replicated_rows(layout: Layout, holder: int) -> tuple[Span, Span]:
    """The replicated rows in a holder's own tensor and in the whole sequence."""
    end, count = layout.rows_of(holder), layout.segments.replicated
    return (end - count, end), (layout.num_rows - count, layout.num_rows)


def _not_empty(moves: list[Move]) -> tuple[Move, ...]:
    return tuple(move for move in moves if all(move.shape))


def _check_spans(what: str, ranks: Group, spans: tuple[Span, ...]) -> None:
    edges = [0, *(stop for _, stop in spans)]
    if len(spans) != ranks.size or [start for start, _ in spans] != edges[:-1] or edges != sorted(edges):
        raise InvalidJob(f"spans of {what} {spans} do not follow each other from 0 for ranks {ranks.ranks}")
