"""The ranks as one thing that starts, answers, loses members and starts again. Knows processes, not jobs.

One thread drives a pool: it calls `poll` and handles what comes back. A lost rank takes its generation down, since its
peers may wait in an exchange for ever; `restart` forks a new generation from the same launcher in milliseconds. The
pool decides which loss was the first cause, because peers of a killed rank fail as well, 50 ms later.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..config import EngineConfig
from ..errors import PoolClosed, PoolError, SetupError, WorkerDied, WorkerStuck
from ..wire.buffer import PhaseBoard
from ..wire.channel import Channel
from ..wire.messages import Failed, Fork, Forked, Launched, Message, Ping, Pong, Ready, Reaped
from .process import Launcher, LogPipe, Member, fork_rank, is_stopped
from .verdict import failure_of, first_cause, is_lost, launcher_error, rank_error, was_killed

SETTLE_SECONDS = 0.4
"""From the first sign of a loss until it is reported: time for the first cause to show up among its consequences."""
EXIT_SECONDS = 3.0
"""How long a launcher that hung up may take to end, and so to say how it ended."""
START_ATTEMPTS = 2

log = logging.getLogger("pipedit")


@dataclass(frozen=True, slots=True)
class FromRank:
    """A message of a rank; its descriptors are the receiver's to close."""

    rank: int
    message: Message
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolReady:
    """All ranks of this generation have their device and their world."""

    generation: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """This generation is over, and this rank is why: `error` names rank, device, pid, how it ended, its phase and its
    last log lines. One such event a generation."""

    rank: int
    generation: int
    error: PoolError
    phase: str


PoolEvent = FromRank | PoolReady | RankLost


class PoolLike(Protocol):
    """What the scheduler needs of a pool (host.pool.Pool, or a scripted one in tests)."""

    @property
    def state(self) -> str: ...
    @property
    def world(self) -> int: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    def send(self, rank: int, message: Message, fds: Any = ()) -> None: ...
    def restart(self, reason: PoolError) -> None: ...
    def phase(self, rank: int) -> str: ...
    def facts(self, rank: int) -> Ready | None: ...
    def wake(self) -> None: ...


class Pool:
    """`world` ranks on `devices`. `state` is "down", "starting", "ready" or "closed".

    `wake`, `send`, `phase`, `log_tail`, `facts` and `pids` may be called by any thread, the rest by the one that polls.
    """

    def __init__(self, config: EngineConfig, devices: Sequence[str], generation: int = 0) -> None:
        self.config = config
        self.devices = tuple(devices)
        self.generation = generation
        self.state = "down"
        self._launcher: Launcher | None = None
        self._members: tuple[Member, ...] = ()
        self._board: PhaseBoard | None = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._started = self._ticked = time.monotonic()
        self._loss_seen: float | None = None
        self._failed_starts = 0

    @property
    def world(self) -> int:
        return len(self.devices)

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the launcher and returns; PoolReady comes out of `poll`. Does nothing if the pool is not down."""
        self._refuse_closed()
        if self.state == "down":
            self._begin()

    def restart(self, reason: PoolError) -> None:
        """Ends all ranks and forks a new generation; returns at once.

        SetupError, with everything torn down, if `reason` is one or the pool was lost START_ATTEMPTS times in a row
        while it started: another try would end the same way.
        """
        self._refuse_closed()
        self._drop_members()
        self.generation += 1
        if isinstance(reason, SetupError) or self._failed_starts >= START_ATTEMPTS:
            self._failed_starts = 0
            self._stop_launcher()
            raise SetupError(f"the workers cannot start here: {reason}") from reason
        log.warning("the pool starts again (generation %d)", self.generation)
        self._begin()

    def close(self) -> None:
        """Ends all processes; none is left when this returns. Idempotent."""
        if self.state == "closed":
            return
        self._drop_members()
        self._stop_launcher()
        self.state = "closed"
        self._wake.close()
        self._woken.close()

    def _refuse_closed(self) -> None:
        if self.state == "closed":
            raise PoolClosed("the pool was closed")

    def _begin(self) -> None:
        self.state, self._started, self._loss_seen = "starting", time.monotonic(), None
        if self._launcher is not None and self._launcher.gone:
            self._stop_launcher()
        if self._launcher is None:
            self._launcher = Launcher(self.config)
        elif self._launcher.launched:
            self._fork_all(self._launcher)

    def _fork_all(self, launcher: Launcher) -> None:
        self._board = board = PhaseBoard.create(self.world)
        rendezvous = str(launcher.folder / f"world-{self.generation}")
        members: list[Member] = []
        try:
            for rank, device in enumerate(self.devices):
                board.write(rank, "starting")
                order = Fork(rank, self.world, self.generation, device, rendezvous, self.config.lease_deadline)
                members.append(fork_rank(launcher, order, board.fd, self.config.ping_deadline))
        finally:
            board.close()
            self._members = tuple(members)

    def _drop_members(self) -> None:
        """Forgets this generation: its ranks end when their sockets close, and the launcher kills what does not."""
        members, self._members = self._members, ()
        for member in members:
            member.close()
        self.state = "down"

    def _stop_launcher(self) -> None:
        if self._launcher is not None:
            self._launcher.stop()
        self._launcher = None

    # -- any thread -------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Makes `poll` return now."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody polls
            self._wake.send(b"w")

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends to a rank. To a rank that is lost nothing is sent: `poll` reports the loss."""
        members = self._members
        if rank < len(members):
            self._send(members[rank], message, fds)

    def _send(self, member: Member, message: Message, fds: Sequence[int] = ()) -> None:
        try:
            member.channel.send(message, fds)
        except WorkerStuck as error:
            member.failure = member.failure or error
        except WorkerDied:
            log.debug("%s was not sent to %s, which is gone", type(message).__name__, member.label)

    def phase(self, rank: int) -> str:
        """What a rank of the newest generation was doing last."""
        launcher, board = self._launcher, self._board
        if launcher is not None and not launcher.launched:
            return "importing"
        return board.read(rank) if board is not None else ""

    def log_tail(self, rank: int) -> list[str]:
        """The last lines that a rank printed."""
        members = self._members
        return list(members[rank].log.tail) if rank < len(members) else []

    def facts(self, rank: int) -> Ready | None:
        """What a rank said about its device when it was ready; None before that."""
        members = self._members
        return members[rank].ready if rank < len(members) else None

    def pids(self) -> tuple[int, ...]:
        """Process numbers of the ranks, in rank order, 0 for one that is being forked; () while there are none."""
        return tuple(member.pid for member in self._members)

    @property
    def launcher_pid(self) -> int | None:
        """Process number of the launcher, which is the parent of all ranks."""
        launcher = self._launcher
        return launcher.pid if launcher is not None else None

    # -- the polling thread -----------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[PoolEvent]:
        """Waits up to `timeout` seconds for something to happen; what the caller must know of it (maybe nothing)."""
        self._wait(timeout)
        events: list[PoolEvent] = []
        try:
            self._hear_launcher()
        except PoolError as error:
            log.error("%s", error)
        for member in self._members:
            events += self._hear(member)
        if self.state == "starting" and self._members and all(member.ready for member in self._members):
            self.state, self._failed_starts = "ready", 0
            events.append(PoolReady(self.generation))
        if self.state in ("starting", "ready"):
            self._tick()
            events += self._losses()
        return events

    def _wait(self, timeout: float) -> None:
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        for source in self._sources():
            poller.register(source, select.POLLIN)
        step = SETTLE_SECONDS / 8 if self._loss_seen else self.config.ping_interval / 4
        poller.poll(min(timeout, step if self.state in ("starting", "ready") else timeout) * 1000)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _sources(self) -> Iterator[Channel | LogPipe]:
        for process in (self._launcher, *self._members):
            if process is not None:
                if not process.channel.closed:
                    yield process.channel
                if process.log.fileno() >= 0:
                    yield process.log

    def _hear_launcher(self) -> None:
        launcher = self._launcher
        if launcher is None:
            return
        launcher.log.drain()
        for message, _ in launcher.channel.drain():
            if isinstance(message, Launched):
                launcher.launched = True
                self._fork_all(launcher)
            elif isinstance(message, (Forked, Reaped)) and message.generation == self.generation and self._members:
                self._note_process(self._members[message.rank], message)

    def _note_process(self, member: Member, message: Forked | Reaped) -> None:
        member.pid = message.pid
        if isinstance(message, Forked):
            member.heard = time.monotonic()
        else:
            member.ended, member.status = member.ended or time.monotonic(), message.status

    def _hear(self, member: Member) -> Iterator[PoolEvent]:
        member.log.drain()
        for message, fds in member.channel.drain():
            if isinstance(message, Pong):
                member.heard, member.asked = time.monotonic(), None
            elif isinstance(message, Ready):
                member.ready = message
            elif isinstance(message, Failed):
                member.failure = member.failure or failure_of(message)
            else:
                yield FromRank(member.rank, message, tuple(fds))
        if member.channel.closed and member.ended is None:
            member.ended = time.monotonic()

    def _tick(self) -> None:
        """Pings who was silent for an interval, and gives up on who should have answered."""
        now = time.monotonic()
        self._forgive_pause(now)
        for member in self._members:
            if member.ended is not None or not member.pid:
                continue
            if member.asked is None and now - member.heard >= self.config.ping_interval:
                member.asked = now
                self._send(member, Ping(self.generation))
            elif member.asked is not None and now - member.asked > self.config.ping_deadline:
                self._give_up(member)
        if self.state == "starting" and now - self._started > self.config.start_deadline:
            self._give_up_start()

    def _forgive_pause(self, now: float) -> None:
        """Time in which this process itself was stopped, or its thread busy elsewhere, does not count against ranks."""
        pause, self._ticked = now - self._ticked, now
        if pause > self.config.ping_interval + 1:
            self._started += pause
            for member in self._members:
                member.asked = None if member.asked is None else member.asked + pause

    def _give_up(self, member: Member) -> None:
        """A ready rank always answers; one that starts may hold its interpreter while a driver loads, unless it is
        stopped."""
        if member.ready is None and not is_stopped(member.pid):
            return
        member.silent = True
        member.failure = member.failure or WorkerStuck(f"has not answered for {self.config.ping_deadline:g} s")

    def _give_up_start(self) -> None:
        for member in self._members:
            if member.ready is None:
                member.failure = member.failure or WorkerStuck(f"was not ready after {self.config.start_deadline:g} s")
        launcher = self._launcher
        if launcher is not None and not launcher.launched:
            launcher.failure = f"was not ready after {self.config.start_deadline:g} s"

    # -- losses -----------------------------------------------------------------------------------------------------

    def _losses(self) -> list[PoolEvent]:
        """At most one event: this generation's loss, at once if somebody was killed, else when its cause could show."""
        launcher = self._launcher
        gone = launcher if launcher is not None and launcher.gone else None
        lost = [member for member in self._members if is_lost(member)]
        if gone is None and not lost:
            return []
        if self._loss_seen is None:
            self._loss_seen = time.monotonic()
        settle = SETTLE_SECONDS if gone is None or gone.failure or gone.status is not None else EXIT_SECONDS
        if time.monotonic() - self._loss_seen < settle and not any(map(was_killed, lost)):
            return []
        return [self._lose(gone)]

    def _lose(self, launcher: Launcher | None) -> RankLost:
        """Takes this generation down. The ranks that still live end when their sockets close."""
        for member in self._members:
            member.log.drain()
        if launcher is not None:
            launcher.log.drain()
            rank, error = 0, launcher_error(launcher)
        else:
            cause = first_cause(self._members)
            rank, error = cause.rank, rank_error(cause, self.phase(cause.rank))
        self._failed_starts += self.state == "starting"
        self.state = "down"
        for member in self._members:
            member.channel.close()
        return RankLost(rank, self.generation, error, self.phase(rank))
