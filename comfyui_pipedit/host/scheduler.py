"""Decides what each rank does next: reacts to events of the pool, keeps all state, never blocks.

Tasks take ranks in the policy's order. A task first gets its weights resident, then opens (all ranks report that
everything is allocated), then is served by leases. Each rank has at most two leases promised, so a late host does not
starve it and a cancel or a change of plan takes effect within two leases. All messages go out from one thread in one
order, so two ranks never disagree about the order of their exchanges.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..config import EngineConfig
from ..errors import (
    Cancelled,
    InvalidJob,
    JobError,
    OutOfMemory,
    OutOfStep,
    PipeDiTError,
    PoolError,
    WorkerStuck,
    explained,
    rebuild,
)
from ..job import Progress, Span, Stage, Weights
from ..wire.channel import close_all
from ..wire.messages import Close, Encoded, Lease, LeaseDone, Loaded, Measured, Message, Opened, Refused
from . import helping
from .claims import Claims
from .neighbour import Neighbour
from .policies import Candidate, Policy, fcfs
from .pool import FromRank, PoolEvent, PoolLike, PoolReady, RankLost
from .residence import Residence
from .tasks import ClipTask, Task, units_reported

LEASES_OUT = 2
OPEN_CLIPS = 2
ATTEMPTS = 3
SPANS_KEPT = 20_000
RESTARTS = "The pool restarts by itself"

log = logging.getLogger("pipedit")


class Scheduler:
    """All tasks of one pool. Used by one thread (the engine's)."""

    def __init__(self, pool: PoolLike, config: EngineConfig, on_finished: Callable[[Task, Any], None],
                 policy: Policy = fcfs, neighbour: Neighbour | None = None) -> None:
        """neighbour: where to ask for memory that others in this process hold; None = nobody is asked."""
        self.pool, self.config, self.policy = pool, config, policy
        self.tasks: dict[str, Task] = {}
        self.residence = Residence(pool, self._next_seq, lambda rank: self.claims.released(rank))
        self.claims = Claims(pool, self.residence, self._next_seq, neighbour)
        self.spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._on_finished = on_finished
        self._seq = 0
        self._attempts: dict[str, int] = {}

    def add(self, task: Task) -> None:
        """Takes a task into the line."""
        self.tasks[task.id] = task

    def cancel(self, job: str) -> None:
        """Ends a task: now if no rank works on it, else at the boundary after its leases."""
        task = self.tasks.get(job)
        if task is None:
            return
        task.cancelling = True
        if not task.busy:
            self._end(task, Cancelled(f"{job} was cancelled. {task.kept()}"), Stage.CANCELLED)

    def handle(self, event: PoolEvent) -> None:
        """Takes one event of the pool."""
        if isinstance(event, PoolReady):
            log.info("the pool is ready: %d ranks, generation %d", self.pool.world, event.generation)
        elif isinstance(event, RankLost):
            self._lost(event.error, (event.rank,))
        else:
            self._message(event)

    def advance(self) -> None:
        """Gives out everything that can be given out now."""
        if self.pool.state != "ready":
            return
        starved: set[int] = set()
        for candidate in self.policy([self._candidate(task) for task in self.tasks.values()]):
            task = self.tasks[candidate.task]
            if starved.intersection(task.ranks) and (task.busy or not task.in_use):
                continue  # an earlier one waits for memory; a decode goes on, since it gives none back before its end
            if self.residence.is_held_back(task.weights, task.ranks) or self.claims.is_crowded(task):
                starved.update(task.ranks)
            try:
                self._serve(task)
            except JobError as error:
                self._end(task, error)
            except OutOfStep as error:  # larger than a frame may be, and nothing was sent
                text = f"{task.id} is too long for the pool, use fewer steps or less text: {error}"
                self._end(task, InvalidJob(text))

    def check_deadlines(self) -> None:
        """Rebuilds the pool if a rank has owed an answer for longer than the lease deadline."""
        limit = time.monotonic() - self.config.lease_deadline
        for task in self.tasks.values():
            if task.state in ("loading", "opening", "open") and self._owing(task) and task.since < limit:
                names = ", ".join(f"rank {rank} (in phase {self.pool.phase(rank)!r})" for rank in self._owing(task))
                seconds = self.config.lease_deadline
                error = WorkerStuck(f"{task.kind} of {task.id}: no answer for {seconds:g} s from {names}")
                return self._lost(error, self._owing(task))
        return None

    def give_back(self, device: str, num_bytes: int, done: Callable[[int], None]) -> None:
        """Frees memory of a device that nothing uses now; `done` hears how many bytes it was."""
        if self.pool.state != "ready":
            return done(0)
        return self.claims.give_back(self.pool.devices.index(device), num_bytes, self.tasks.values(), done)

    def fail_all(self, error: PipeDiTError) -> None:
        """Ends every task, for a pool that will not come back."""
        for task in list(self.tasks.values()):
            self._end(task, error)
        self.claims.forget()

    @property
    def idle(self) -> bool:
        return not self.tasks

    # -- messages of ranks ------------------------------------------------------------------------------------------

    def _message(self, event: FromRank) -> None:
        message, rank = event.message, event.rank
        if isinstance(message, Loaded):
            self.residence.loaded(rank, message)
        elif isinstance(message, Measured):
            self.claims.measured(rank, message.memory)
        elif isinstance(message, Opened):
            self._opened(rank, message)
        elif isinstance(message, (LeaseDone, Encoded)):
            self._lease_done(rank, message, event.fds)
            close_all(event.fds)
        elif isinstance(message, Refused):
            self._refused(rank, message)

    def _opened(self, rank: int, message: Opened) -> None:
        task = self.tasks.get(message.job)
        if task is None or task.state != "opening":
            return
        task.opened.add(rank)
        task.units = message.units
        if task.opened == set(task.ranks):
            task.state = "open"
            self._finish_if_done(task)

    def _lease_done(self, rank: int, message: LeaseDone | Encoded, fds: tuple[int, ...]) -> None:
        self.spans.extend(message.spans)
        task = self.tasks.get(message.job)
        if task is None or task.state != "open":
            return
        before = task.done
        self.claims.learn(rank, task.work, message.use)
        self.residence.release()
        task.leases[rank] -= 1
        task.reported[rank] = units_reported(message)
        task.accept(message, fds)
        self._learn(task, message, before)
        if task.done > before:
            task.since = time.monotonic()
            task.ticket.report(task.progress(task.ticket.progress().text))
        if task.cancelling and not task.busy:
            self._end(task, Cancelled(f"{task.id} was cancelled. {task.kept()}"), Stage.CANCELLED)
        else:
            self._finish_if_done(task)

    def _learn(self, task: Task, message: LeaseDone | Encoded, before: int) -> None:
        """Seconds a unit takes, for the size of the next lease and the ticket's timings."""
        seconds = sum(span.end - span.start for span in message.spans)
        if message.rank == min(task.ranks):
            task.ticket.note_time(task.kind, seconds)
        if task.done > before:
            task.unit_seconds = seconds / (task.done - before)

    def _finish_if_done(self, task: Task) -> None:
        if task.units is None or task.done < task.units or task.busy:
            return
        try:
            result = task.finish()
        except JobError as error:
            return self._end(task, error)
        self._drop(task)
        return self._on_finished(task, result)

    def _refused(self, rank: int, message: Refused) -> None:
        error = rebuild(message.error, message.text)
        self.claims.released(rank)
        if not message.job:
            return self._load_refused(rank, error)
        task = self.tasks.get(message.job)
        if task is None:
            return None
        started = task.granted > task.first
        helped = not set(task.ranks).issuperset(+task.leases)
        if isinstance(task, ClipTask) and helped and isinstance(error, OutOfMemory):
            task.alone = True  # the room of an exchange was not claimed: it goes on from its kept latent without
        else:
            self._end(task, error)
        if helped or (started and len(task.ranks) > 1):
            # The other ranks wait in an exchange that will never complete: only a new world frees them.
            self._lost(PoolError(f"rank {rank} gave up in mid-step: {message.text}"), ())
        return None

    def _load_refused(self, rank: int, error: PipeDiTError) -> None:
        """Makes room on the rank, now or at the next boundary; ends the tasks that wait for the weights if it can't."""
        asked = self.residence.refused(rank)
        if isinstance(error, OutOfMemory) and self._makes_room(rank, asked):
            return
        for task in list(self.tasks.values()):
            if task.weights in asked and task.state in ("loading", "open") and not task.busy:
                self._end(task, error)

    def _makes_room(self, rank: int, asked: set[Weights]) -> bool:
        used = asked.union(*(task.in_use for task in self.tasks.values()))
        if self.residence.make_room(rank, used):
            return True
        at_work = any(task.busy and rank in task.ranks for task in self.tasks.values())
        if at_work:
            self.residence.hold_back(rank, asked)
        return at_work

    # -- giving out -------------------------------------------------------------------------------------------------

    def _serve(self, task: Task) -> None:
        if task.state == "waiting":
            self._finish_if_done(task)  # an earlier try may have kept the finished latent
        if task.id not in self.tasks:
            return
        if task.state == "waiting":
            self._begin(task)
        if task.state == "loading":
            self._open(task)
        self._grant(task)

    def _candidate(self, task: Task) -> Candidate:
        return Candidate(task.id, task.ordinal, task.kind, task.ranks, task.state == "open")

    def _begin(self, task: Task) -> None:
        clips = sum(1 for other in self.tasks.values() if other.kind == task.kind and other.state != "waiting")
        if task.kind == "denoise" and clips >= OPEN_CLIPS:
            return
        used = {weights for other in self.tasks.values() for weights in other.needs}
        self.residence.drop_replaced(task.weights, used)
        task.state, task.since = "loading", time.monotonic()
        self._report_loading(task)

    def _report_loading(self, task: Task) -> None:
        text = f"loading {task.weights.part} on {len(task.ranks)} ranks"
        task.ticket.report(Progress(Stage.LOADING, task.done, task.units or 0, text))

    def _open(self, task: Task) -> None:
        if not self._has_weights(task):
            return
        message = task.open_message(0)
        task.since = time.monotonic()
        task.ticket.report(task.progress())
        task.state = "opening" if message is not None else "open"
        for rank in task.ranks if message is not None else ():
            opening = task.open_message(self._next_seq())
            assert opening is not None
            self.pool.send(rank, opening, task.fds.numbers)

    def _has_weights(self, task: Task) -> bool:
        """Whether its next unit has its memory and its network on all ranks; asks for what is missing."""
        return self.claims.granted(task, self.tasks.values()) and self.residence.ensure(task.weights, task.ranks)

    def _grant(self, task: Task) -> None:
        while task.state == "open" and not task.cancelling and task.units is not None and task.granted < task.units:
            if max((*map(self.leases_out, task.ranks), *task.leases.values())) >= LEASES_OUT:
                return
            if not self._has_weights(task):
                return self._report_loading(task)
            self.residence.touch(task.weights, task.ranks)
            last = min(task.units, task.granted + task.lease_units())
            if not task.busy:
                task.since = time.monotonic()
            orders, fds = self._orders(task, last)
            task.granted = last
            for rank, message in orders.items():
                self.pool.send(rank, message, fds)
                task.leases[rank] += 1

    def _orders(self, task: Task, last: int) -> tuple[dict[int, Message], Sequence[int]]:
        """What each rank is told for the next lease, and the descriptors that go along."""
        message, fds = task.lease_message(self._next_seq(), task.granted, last)
        if isinstance(task, ClipTask) and isinstance(message, Lease) and self.config.helpers:
            return helping.orders(task, message, self.tasks.values()), fds
        return dict.fromkeys(task.ranks, message), fds

    def leases_out(self, rank: int) -> int:
        """Leases that a rank has and did not answer."""
        return sum(task.leases[rank] for task in self.tasks.values())

    def _owing(self, task: Task) -> tuple[int, ...]:
        if task.state == "loading" or (task.state == "open" and not task.busy):
            if (asked := self.claims.owing(task)) is not None:
                return asked
            return tuple(rank for rank in task.ranks if not self.residence.has(rank, task.weights))
        if task.state == "opening":
            return tuple(rank for rank in task.ranks if rank not in task.opened)
        return tuple(sorted(rank for rank, count in task.leases.items() if count > 0))

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    # -- ends -------------------------------------------------------------------------------------------------------

    def _lost(self, error: PoolError, ranks: tuple[int, ...]) -> None:
        """A rank is gone: its tasks fail and say what is kept, the others go on from kept latents in a new world."""
        log.error("%s", explained(error, RESTARTS))
        self.residence.forget()
        self.claims.forget()
        for task in list(self.tasks.values()):
            if task.state == "waiting":
                continue
            self._attempts[task.id] = self._attempts.get(task.id, 0) + 1
            if set(ranks) & set(task.ranks) or self._attempts[task.id] >= ATTEMPTS:
                self._end(task, explained(error, task.kept(), RESTARTS))
            elif task.cancelling:
                self._end(task, Cancelled(f"{task.id} was cancelled. {task.kept()}"), Stage.CANCELLED)
            else:
                task.reset()
        self.pool.restart(error)

    def _end(self, task: Task, error: PipeDiTError, stage: Stage = Stage.FAILED) -> None:
        self._drop(task)
        task.ticket.fail(error, stage)

    def _drop(self, task: Task) -> None:
        self.tasks.pop(task.id, None)
        self._attempts.pop(task.id, None)
        self.claims.drop(task.id)
        self.residence.release()
        if task.state in ("opening", "open") and self.pool.state == "ready":
            for rank in task.ranks:
                self.pool.send(rank, Close(self._next_seq(), task.id))
        task.fds.close()
