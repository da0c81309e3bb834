"""Before its first unit a task claims what it takes at its peak on all of its ranks, weights and activations.

Ranks say what is free; what does not fit is made to fit: first goes what nobody needs, then others in this process are
asked (host/neighbour.py), then goes what is needed later, then whoever works there stops at a boundary. What can't be
made to fit is OutOfMemory before anything has begun. Ranks whose memory nobody counts (CPU ranks) claim nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import OutOfMemory
from ..job import Progress, Stage, Weights
from ..wire.messages import Measure, Memory, Use
from . import estimate, shortage
from .estimate import Work
from .neighbour import Neighbour, Request
from .residence import Residence
from .shortage import Need

if TYPE_CHECKING:
    from .pool import PoolLike
    from .tasks import Task

Tasks = Collection["Task"]


@dataclass(slots=True)
class Claim:
    """One task's claim for one network. crowded: ranks on which others must stop before there can be room; outdated:
    those where they did, since they were measured."""

    weights: Weights
    ranks: tuple[int, ...]
    memory: dict[int, Memory] = field(default_factory=dict)
    measuring: set[int] = field(default_factory=set)
    asked: dict[int, Request] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    crowded: set[int] = field(default_factory=set)
    outdated: set[int] = field(default_factory=set)
    granted: bool = False
    settled: bool = False


class Claims:
    """All claims of one pool. Used by the scheduler's thread; `held` by any."""

    def __init__(self, pool: PoolLike, residence: Residence, next_seq: Callable[[], int],
                 neighbour: Neighbour | None = None) -> None:
        self._pool, self._residence, self._next_seq, self._neighbour = pool, residence, next_seq, neighbour
        self._claims: dict[str, Claim] = {}
        self._answers: dict[int, deque[Callable[[Memory], None]]] = {}
        self._giving: list[Callable[[int], None]] = []
        self._peaks: dict[Work, int] = {}
        self._held: dict[int, int] = {}

    # -- claims -----------------------------------------------------------------------------------------------------

    def granted(self, task: Task, tasks: Tasks) -> bool:
        """Whether the memory for the task's next unit is its own; works towards it. OutOfMemory if it never will be."""
        ranks = tuple(rank for rank in task.ranks if self._counts(rank))
        if not ranks:
            return True
        if self._stands(task, ranks):
            self.drop(task.id)
            return True
        claim = self._claims.get(task.id)
        if claim is None or claim.weights != task.weights or (claim.settled and self._missing(claim)):
            claim = self._begin(task, ranks)
        if claim is None or claim.measuring:
            return False
        if not claim.granted:
            claim.granted = self._fits(claim, task, tasks)
        claim.settled = claim.granted and not self._missing(claim)
        return claim.granted

    def owing(self, task: Task) -> tuple[int, ...] | None:
        """The ranks that were asked how much is free and did not say; None if no claim of the task is under way."""
        claim = self._claims.get(task.id)
        return None if claim is None or claim.granted else tuple(sorted(claim.measuring))

    def is_crowded(self, task: Task) -> bool:
        """Whether it waits for others to stop."""
        claim = self._claims.get(task.id)
        return claim is not None and bool(claim.crowded)

    def drop(self, job: str) -> None:
        """A task ended, or starts over."""
        claim = self._claims.pop(job, None)
        for request in claim.asked.values() if claim is not None and self._neighbour is not None else ():
            assert self._neighbour is not None
            self._neighbour.withdraw(request)

    def forget(self) -> None:
        """The ranks were forked anew: nothing is claimed, and what was to be given back is free."""
        for job in list(self._claims):
            self.drop(job)
        self._answers.clear()
        self._held.clear()
        giving, self._giving = self._giving, []
        for done in giving:
            done(0)

    def learn(self, rank: int, work: Work, use: Use) -> None:
        """A rank did some of this work, and this is what it took: it takes the estimate's place."""
        if use.peak:
            self._peaks[work] = max(use.peak, self._peaks.get(work, 0))
        self._held[rank] = use.held

    def released(self, rank: int) -> None:
        """A rank's allocator gave back what it held."""
        self._held.pop(rank, None)

    def measured(self, rank: int, memory: Memory) -> None:
        """A rank answers the oldest question of this kind."""
        self._answers[rank].popleft()(memory)

    # -- giving memory back -----------------------------------------------------------------------------------------

    def give_back(self, rank: int, num_bytes: int, tasks: Tasks, done: Callable[[int], None]) -> None:
        """Frees so many bytes on a rank's device, if what is unused now is enough for that; `done` hears how many it
        was. First goes what the allocator holds, then networks, the one used longest ago first."""
        if not self._counts(rank):
            return done(0)
        self._giving.append(done)

        def give(before: Memory) -> None:
            idle = self._residence.idle(rank, self._in_use(tasks))
            self._residence.drop(rank, _enough(idle, num_bytes - before.cached))
            self._ask(rank, lambda after: self._gave(done, after.free - before.free))

        return self._ask(rank, give)

    def _gave(self, done: Callable[[int], None], num_bytes: int) -> None:
        self._giving.remove(done)
        done(max(0, num_bytes))

    def held(self, rank: int) -> int:
        """Bytes that a rank holds on its device, as far as is known. Any thread."""
        return self._residence.num_bytes(rank) + self._held.get(rank, 0)

    def peaks(self) -> dict[str, int]:
        """Each kind of work that ranks did -> bytes beside the weights at its peak. Any thread."""
        known = tuple(self._peaks.items())
        return {f"{work.kind} {work.label}, {work.ranks} ranks, {work.weights.path}": peak for work, peak in known}

    # -- inside -----------------------------------------------------------------------------------------------------

    def _counts(self, rank: int) -> bool:
        facts = self._pool.facts(rank)
        return facts is not None and facts.memory > 0

    def _stands(self, task: Task, ranks: Sequence[int]) -> bool:
        """Whether its ranks hold all of it: the network, and what the same work took before in their allocators."""
        peak = self._peaks.get(task.work)
        return peak is not None and all(
            self._residence.has(rank, task.weights) and self._held.get(rank, 0) >= peak for rank in ranks)

    def _missing(self, claim: Claim) -> bool:
        return not all(self._residence.has(rank, claim.weights) for rank in claim.ranks)

    def _begin(self, task: Task, ranks: tuple[int, ...]) -> Claim | None:
        """Asks the ranks how much is free; None while another claim, which will change that, is open on one of them."""
        self.drop(task.id)
        if any(set(claim.ranks) & set(ranks) and not claim.settled for claim in self._claims.values()):
            return None
        claim = self._claims[task.id] = Claim(task.weights, ranks)
        for rank in ranks:
            self._measure(claim, rank)
        task.since = time.monotonic()
        return claim

    def _fits(self, claim: Claim, task: Task, tasks: Tasks) -> bool:
        claim.crowded.clear()
        needs = {rank: self._need(task, rank, tasks) for rank in claim.ranks}
        short = {rank: missing for rank, need in needs.items() if (missing := need.short_of(claim.memory[rank])) > 0}
        for rank, missing in short.items():
            if needs[rank].total > claim.memory[rank].total or not self._makes_room(claim, task, tasks, rank, missing):
                raise OutOfMemory(self._text(claim, task, rank, needs[rank]))
        task.since = time.monotonic()
        return not short

    def _need(self, task: Task, rank: int, tasks: Tasks) -> Need:
        weights = self._residence.size(task.weights)
        weights = estimate.weight_bytes(task.weights) if weights is None else weights
        missing = 0 if self._residence.has(rank, task.weights) else weights
        beside = [other for other in tasks if other is not task and rank in other.ranks and self._is_in(other)]
        return Need(weights, missing, self._activations(task), max(map(self._activations, beside), default=0))

    def _activations(self, task: Task) -> int:
        peak = self._peaks.get(task.work)
        return estimate.activation_bytes(task.work) if peak is None else peak

    def _is_in(self, task: Task) -> bool:
        """Whether it has its memory, taken or not."""
        claim = self._claims.get(task.id)
        return task.state in ("opening", "open") or (claim is not None and claim.granted)

    def _makes_room(self, claim: Claim, task: Task, tasks: Tasks, rank: int, missing: int) -> bool:
        """The next step towards room on a rank; False if no step is left."""
        needed = {weights for other in tasks for weights in other.needs}
        if idle := self._residence.idle(rank, needed | self._in_use(tasks)):
            self._residence.drop(rank, _enough(idle, missing))
            self._measure(claim, rank)
        elif self._neighbour is not None and rank not in claim.asked:
            self._ask_neighbour(claim, task, rank, missing)
        elif rank in claim.asked and not claim.asked[rank].done:
            return True
        elif rank in claim.asked and rank not in claim.answered:
            claim.answered.add(rank)
            self._measure(claim, rank)
        elif idle := self._residence.idle(rank, {task.weights} | self._in_use(tasks)):
            self._residence.drop(rank, _enough(idle, missing))
            self._measure(claim, rank)
        elif any(rank in other.ranks and (other.busy or other.in_use) for other in tasks if other is not task):
            claim.crowded.add(rank)
            claim.outdated.add(rank)
        elif rank in claim.outdated:
            claim.outdated.discard(rank)
            self._measure(claim, rank)
        else:
            return False
        return True

    def _in_use(self, tasks: Tasks) -> set[Weights]:
        """What may not be unloaded now: tasks use it, or a granted claim waits for the rest of its ranks."""
        used = {weights for task in tasks for weights in task.in_use}
        return used | {claim.weights for claim in self._claims.values() if claim.granted and not claim.settled}

    def _ask_neighbour(self, claim: Claim, task: Task, rank: int, missing: int) -> None:
        assert self._neighbour is not None
        device, free = self._pool.devices[rank], claim.memory[rank].free + missing
        request = Request(device, free, missing, ",".join(self._pool.devices), self._pool.wake)
        claim.asked[rank] = request
        self._neighbour.ask(request)
        text = f"making room on {device}: {shortage.gib(free)} are to be free"
        task.ticket.report(Progress(Stage.LOADING, task.done, task.units or 0, text))

    def _measure(self, claim: Claim, rank: int) -> None:
        claim.measuring.add(rank)

        def note(memory: Memory) -> None:
            claim.memory[rank] = memory
            claim.measuring.discard(rank)

        self._ask(rank, note)

    def _ask(self, rank: int, then: Callable[[Memory], None]) -> None:
        self._answers.setdefault(rank, deque()).append(then)
        self._pool.send(rank, Measure(self._next_seq()))

    def _text(self, claim: Claim, task: Task, rank: int, need: Need) -> str:
        facts = self._pool.facts(rank)
        assert facts is not None
        left = claim.asked[rank].left if rank in claim.asked else ()
        pool = self._residence.num_bytes(rank) - (need.weights - need.missing)
        return f"{shortage.text(facts.device, task.work, need, claim.memory[rank], pool, left)} {task.kept()}"


def _enough(idle: Sequence[tuple[Weights, int]], num_bytes: int) -> list[Weights]:
    """The first of these whose bytes are enough together, or all of them; none for no bytes."""
    chosen: list[Weights] = []
    for weights, size in idle:
        if num_bytes <= 0:
            break
        chosen.append(weights)
        num_bytes -= size
    return chosen
