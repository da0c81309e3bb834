"""Which ranks do what for a job, and how: values only, no process groups, no torch.

Group, Segments and HeadTable are the data behind every kind of attention parallelism (docs/structures.md): owners =
holders is Ulysses, the same in chunks is PipeSP, owners = holders + idle decode ranks is Aco (PipeDiT, 3.1, 3.3).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import InvalidJob, Unplannable

MIN_TOKENS = 4
"""Fewest tokens a rank may hold: with 1 to 3 rows a linear layer takes another code path and rounds differently."""


def cut(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of `parts` neighbouring spans of `total` items whose sizes differ by at most one."""
    size, extra = divmod(total, parts)
    edges = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(zip(edges[:-1], edges[1:], strict=True))


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered tuple of ranks. (0, 1) and (1, 0) are different groups."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise InvalidJob(f"a group is one or more different ranks from 0, not {self.ranks}")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def leader(self) -> int:
        """The lowest rank: it writes kept latents and speaks for the group."""
        return min(self.ranks)

    def index(self, rank: int) -> int:
        """Position of a rank in the group, -1 if it is not a member."""
        return self.ranks.index(rank) if rank in self.ranks else -1


@dataclass(frozen=True, slots=True)
class Segments:
    """Which rank holds which tokens of a sequence: `spans[i]` of `holders.ranks[i]`, and how many trailing tokens
    every holder has a copy of (joint text)."""

    holders: Group
    spans: tuple[tuple[int, int], ...]
    replicated: int = 0

    @classmethod
    def even(cls, holders: Group, num_tokens: int, replicated: int = 0) -> Segments:
        """Spans whose sizes differ by at most one token."""
        return cls(holders, cut(num_tokens, holders.size), replicated)

    @property
    def num_tokens(self) -> int:
        return self.spans[-1][1]

    def of(self, rank: int) -> tuple[int, int]:
        """The span that a holder has."""
        return self.spans[self.holders.ranks.index(rank)]


@dataclass(frozen=True, slots=True)
class HeadTable:
    """Which rank computes attention for which heads: `spans[i]` (start, stop) of `owners.ranks[i]`; it may be empty."""

    owners: Group
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, owners: Group, num_heads: int) -> HeadTable:
        """Whole heads, counts differing by at most one."""
        return cls(owners, cut(num_heads, owners.size))

    @property
    def num_heads(self) -> int:
        return self.spans[-1][1]

    def chunk(self, chunk: int, chunks: int) -> tuple[tuple[int, int], ...]:
        """For each owner the heads of its `chunk`-th of `chunks` chunks; the last may be empty."""
        spans = []
        for start, stop in self.spans:
            first, last = cut(stop - start, chunks)[chunk]
            spans.append((start + first, start + last))
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranks of one job. `chunks` head chunks are pipelined in each attention (PipeSP); 1 is plain Ulysses."""

    denoise: Group
    decode: Group
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise InvalidJob(f"chunks must be 1 or more, not {self.chunks}")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.denoise.ranks, *self.decode.ranks}))

    @property
    def shared(self) -> bool:
        """Whether a rank does both."""
        return bool(set(self.denoise.ranks) & set(self.decode.ranks))

    def check(self, num_tokens: int, num_heads: int) -> None:
        """Raises Unplannable with the largest legal group if the denoise group is too large for a job's shape."""
        limit = min(num_tokens // MIN_TOKENS, num_heads)
        if self.denoise.size > max(1, limit):
            raise Unplannable(
                f"{self.denoise.size} denoise ranks are too many for {num_tokens} tokens and {num_heads} heads "
                f"(each rank needs {MIN_TOKENS} tokens and a head); at most {max(1, limit)}")

    def sentence(self) -> str:
        """The plan as one sentence for a person."""
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        both = " (it takes turns)" if self.shared and len(self.ranks) > 1 else ""
        together = " together" if self.denoise.size > 1 else ""
        return f"{_who(self.denoise, 'denoise')}{together}{chunks}, {_who(self.decode, 'decode')}{both}"


def _who(group: Group, does: str) -> str:
    names = ", ".join(map(str, group.ranks))
    return f"rank {names} {does}s" if group.size == 1 else f"ranks {names} {does}"


def split_groups(split: str, world: int) -> tuple[Group, Group]:
    """(denoise, decode) groups of a split.

    "auto": 1 or 2 ranks all denoise and the last decodes too, N >= 3 is (N-1)+1. "N": N ranks denoise, the last decodes
    too. "N+M": N denoise, the next M decode. InvalidJob if the text is none of these, Unplannable if it needs more
    ranks than `world`.
    """
    if split == "auto":
        split = str(world) if world < 3 else f"{world - 1}+1"
    match = re.fullmatch(r"([1-9]\d*)(?:\+([1-9]\d*))?", split.replace(" ", ""))
    if not match:
        raise InvalidJob(f"split {split!r} is not 'auto', 'N' (all denoise, the last decodes too) or 'N+M', like '2+1'")
    denoise, decode = int(match[1]), int(match[2] or 0)
    if denoise + decode > world:
        raise Unplannable(f"split {split!r} needs {denoise + decode} ranks and the pool has {world}; "
                          f"nearest: {world - 1}+1" if world > 1 else
                          f"split {split!r} needs more than the one rank here; use '1'")
    first = Group(tuple(range(denoise)))
    return first, Group(tuple(range(denoise, denoise + decode))) if decode else Group((denoise - 1,))


def shrink(plan: Plan, num_tokens: int, num_heads: int) -> Plan:
    """The plan with its denoise group cut to the largest legal size for a shape (a tiny clip on many ranks)."""
    limit = max(1, min(num_tokens // MIN_TOKENS, num_heads, plan.denoise.size))
    return Plan(Group(plan.denoise.ranks[:limit]), plan.decode, plan.chunks)
