"""Who was lost first, and what to say about it. When one rank goes its peers fail too, so consequences come last.

The first line of an error says what happened; the lines after it are the end of the process's log.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PoolError, SetupError, WorkerDied, WorkerStuck, rebuild
from ..wire.messages import Failed
from .process import Launcher, LogPipe, Member, how_it_ended, is_stopped


def failure_of(message: Failed) -> PoolError:
    """What a rank said about its own end. Its traceback is in its log."""
    error = rebuild(message.error, f"failed: {message.text}")
    return error if isinstance(error, PoolError) else PoolError(str(error))


def is_lost(member: Member) -> bool:
    """Whether a rank ended, failed or does not answer."""
    return member.failure is not None or member.ended is not None


def was_killed(member: Member) -> bool:
    """Whether a signal ended it: never the consequence of another rank's loss."""
    return member.status is not None and member.status < 0


def first_cause(members: Sequence[Member]) -> Member:
    """The rank whose loss explains the others': killed, stopped, ended without a word, silent, and last the ones that
    complain of their peers."""
    return min(members, key=lambda member: (_distance(member), member.ended or float("inf"), member.rank))


def _distance(member: Member) -> int:
    """How far from a first cause a rank's loss is."""
    if was_killed(member):
        return 0
    if _is_stopped(member):
        return 1
    if member.ended is not None and member.failure is None:
        return 2
    if member.silent:
        return 3
    return 4 if is_lost(member) else 5


def _is_stopped(member: Member) -> bool:
    return member.ended is None and member.pid > 0 and is_stopped(member.pid)


def rank_error(member: Member, phase: str) -> PoolError:
    """The error for a lost rank: rank, device, pid, how it ended, in which phase, its last log lines."""
    kind, how = _end_of(member)
    return kind(f"{member.label}, in phase '{phase}', {how}{_last_lines(member.log)}")


def _end_of(member: Member) -> tuple[type[PoolError], str]:
    """(kind of error, how it ended in words)."""
    if _is_stopped(member) and not was_killed(member):
        return WorkerStuck, "is stopped (SIGSTOP or a debugger) and does not answer"
    if was_killed(member) or member.failure is None:
        return WorkerDied, how_it_ended(member.status)
    return type(member.failure), str(member.failure)


def launcher_error(launcher: Launcher) -> PoolError:
    """The error for a launcher that ended. SetupError if it gave up by itself, since it would do so again."""
    status = launcher.status
    how = launcher.failure or how_it_ended(status)
    gave_up = not launcher.launched and (status is None or status >= 0)
    where = "and took all ranks along" if launcher.launched else "while it imported what the ranks need"
    return (SetupError if gave_up else WorkerDied)(
        f"the launcher of the ranks (pid {launcher.pid}) {how} {where}{_last_lines(launcher.log)}")


def _last_lines(logs: LogPipe) -> str:
    return "\nIts last log lines:" + "".join(f"\n    {line}" for line in logs.tail) if logs.tail else ""
