"""What can go wrong, named by what the caller can do about it.

    PipeDiTError
    ├── JobError                the job ends; the pool goes on
    │   ├── InvalidJob          a value is wrong: the text names it, the allowed ones and the nearest legal choice
    │   ├── Unplannable         no plan of this pool fits the job
    │   ├── LoadError           a file is missing, damaged or of a kind that is not handled
    │   ├── OutOfMemory         a device or the host has too little memory for this job
    │   ├── StorageFull         a mapped buffer or an output file could not be written
    │   └── Cancelled           someone asked for it
    └── PoolError               running jobs stop; the pool forks its ranks anew, kept latents survive
        ├── WorkerDied          a process ended
        ├── WorkerStuck         a process does not answer, or its work passed the deadline
        ├── OutOfStep           a rank saw messages in the wrong order
        ├── SetupError          the workers cannot start here (missing packages, no such device)
        │   └── DeviceTaken     another program's pool has the GPU
        └── PoolClosed          the engine was closed

Errors cross the wire as (class name, text): `describe` and `rebuild`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PipeDiTError(Exception):
    """Root of every error this package raises on purpose."""


class JobError(PipeDiTError):
    """The job ends, the pool goes on."""


class InvalidJob(JobError, ValueError):
    """A value of the job is wrong."""


class Unplannable(JobError):
    """No plan of this pool fits the job."""


class LoadError(JobError):
    """A model file is missing, damaged or of an unknown kind."""


class OutOfMemory(JobError):
    """Too little memory for this job."""


class StorageFull(JobError, OSError):
    """A buffer or an output file could not be written."""


class Cancelled(JobError):
    """The job was cancelled."""


class PoolError(PipeDiTError):
    """Running jobs stop; the pool is built anew."""


class WorkerDied(PoolError):
    """A worker process ended."""


class WorkerStuck(PoolError):
    """A worker process does not answer, or passed a deadline."""


class OutOfStep(PoolError):
    """A rank received messages in the wrong order."""


class SetupError(PoolError):
    """The workers cannot start on this machine."""


class DeviceTaken(SetupError):
    """Another program's pool has the GPU; nothing was started."""


class PoolClosed(PoolError):
    """The engine was closed."""


WIRE_ERRORS: dict[str, type[PipeDiTError]] = {
    cls.__name__: cls
    for cls in (InvalidJob, Unplannable, LoadError, OutOfMemory, StorageFull, Cancelled, JobError,
                WorkerDied, WorkerStuck, OutOfStep, SetupError, PoolClosed, PoolError)
}


def describe(error: BaseException) -> tuple[str, str]:
    """(class name, text) of an error for the wire; a foreign exception is a JobError that names its own class."""
    name = type(error).__name__
    return (name, str(error)) if name in WIRE_ERRORS else ("JobError", f"{name}: {error}")


def rebuild(name: str, text: str) -> PipeDiTError:
    """The error that `describe` took apart."""
    return WIRE_ERRORS.get(name, JobError)(text)


def explained(error: PoolError, *sentences: str) -> PoolError:
    """The same kind of error with sentences after its first line; the lines after that are a process's log."""
    first, newline, log = str(error).partition("\n")
    return type(error)(" ".join((f"{first}.", *(f"{sentence}." for sentence in sentences))) + newline + log)


def not_one_of(what: str, value: object, allowed: Iterable[object], hint: str = "") -> InvalidJob:
    """An InvalidJob that names the value, the allowed ones and the nearest of them."""
    names = [str(item) for item in allowed]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    nearest = f"; nearest: {near[0]!r}" if near else ""
    return InvalidJob(f"{what} {value!r} is not available here; allowed: {', '.join(names)}{nearest}{hint}")
