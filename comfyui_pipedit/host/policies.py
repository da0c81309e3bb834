"""In which order tasks get leases: pure functions of what waits and runs. The scheduler keeps all state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task as a policy sees it: `ordinal` counts submissions (a decode has its clip's), `ranks` it needs at once."""

    task: str
    ordinal: int
    kind: str
    ranks: tuple[int, ...]
    started: bool


Policy = Callable[[Sequence[Candidate]], Sequence[Candidate]]
"""Candidates in the order in which they may take free ranks; one that is left out gets nothing now."""


def fcfs(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """First come, first served: an older prompt's decode goes before a younger prompt's denoising on a shared rank."""
    return sorted(candidates, key=lambda candidate: candidate.ordinal)
