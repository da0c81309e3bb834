"""One program a GPU: a lock file in the user's runtime folder tells a second one who works there already.

The lock is the kernel's (flock), so it ends with the process, however that ends; the file stays and says who took it
last. Pools of one process share its locks: they see each other's weights, and take turns by other means.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import DeviceTaken

COMMAND_LENGTH = 120
NO_FILES = "no lock files, so a second program on the same GPU will not be noticed: %s"

log = logging.getLogger("pipedit")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock: process number, command line, and when it took it (seconds of the epoch)."""

    pid: int
    command: str
    since: float

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.getpid(), " ".join(sys.argv)[:COMMAND_LENGTH], time.time())

    def __str__(self) -> str:
        since = time.strftime("%H:%M on %d %b", time.localtime(self.since))
        return f"process {self.pid} ({self.command}), since {since}"


class Locks:
    """The locks of a process, counted: a GPU is free again when its last pool is closed. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where the files lie; None = the user's runtime folder."""
        self._folder = folder
        self._guard = threading.Lock()
        self._held: dict[str, tuple[int, int]] = {}

    def take(self, gpus: Mapping[str, str]) -> None:
        """Locks GPUs, given as device name -> the hardware's own name: all or, with DeviceTaken, none of them."""
        with self._guard:
            folder = self._usable_folder() if gpus else None
            if folder is None:
                return
            try:
                others = {device: holder for device, hardware in gpus.items()
                          if (holder := self._take(folder, hardware)) is not None}
            except OSError as error:
                log.warning(NO_FILES, error)
                return
            if others:
                free = [device for device in gpus if device not in others]
                self._release(gpus[device] for device in free)
                raise DeviceTaken(_who_has_what(others, free))

    def release(self, gpus: Mapping[str, str]) -> None:
        """Gives back what `take` took with the same argument."""
        with self._guard:
            self._release(gpus.values())

    def _usable_folder(self) -> Path | None:
        """None, with a warning, where there can be no lock files: a pool works without them."""
        try:
            return self._folder or runtime_folder()
        except OSError as error:
            log.warning(NO_FILES, error)
            return None

    def _take(self, folder: Path, hardware: str) -> Holder | None:
        """None: the lock is this process's. Otherwise who has it. OSError where there can be no such file."""
        if hardware in self._held:
            fd, uses = self._held[hardware]
            self._held[hardware] = fd, uses + 1
            return None
        fd = os.open(_file(folder, hardware), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(fd)
            os.close(fd)
            return holder
        except OSError:
            os.close(fd)
            raise
        self._held[hardware] = fd, 1
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its holder stays unnamed
            os.truncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(Holder.this_process())).encode(), 0)
        return None

    def _release(self, names: Iterable[str]) -> None:
        for hardware in names:
            if hardware not in self._held:
                continue
            fd, uses = self._held[hardware]
            self._held[hardware] = fd, uses - 1
            if uses == 1:
                del self._held[hardware]
                os.close(fd)


of_this_process = Locks()
"""What every pool of this process takes its GPUs with."""


def runtime_folder() -> Path:
    """A folder of this user alone that is the same for all of the user's programs. OSError if there can be none."""
    user = os.getuid()
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    for base in filter(None, (given, f"/run/user/{user}")):
        if os.path.isdir(base) and os.access(base, os.W_OK):
            return _private(Path(base) / "comfyui_pipedit", user)
    return _private(Path(tempfile.gettempdir()) / f"comfyui_pipedit-{user}", user)


def _private(folder: Path, user: int) -> Path:
    """Makes a folder that nobody else can write to. PermissionError if it is there and another user's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
        raise PermissionError(f"{folder} is not a folder of this user")
    return folder


def _file(folder: Path, hardware: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', hardware)}.lock"


def _read(fd: int) -> Holder:
    """Who wrote the file that another process has locked; pid 0 if it is just being written."""
    try:
        return Holder(**json.loads(os.pread(fd, 4096, 0)))
    except (json.JSONDecodeError, TypeError):
        return Holder(0, "it starts just now", time.time())


def _who_has_what(others: Mapping[str, Holder], free: list[str]) -> str:
    taken = "; ".join(f"{device} is in use by {holder}" for device, holder in others.items())
    instead = f", or set devices to {','.join(free)}" if free else ", or choose other devices"
    return (f"another program's pool has the GPU: {taken}. Close that program{instead} and queue again; two pools on "
            "one GPU would run each other out of memory")
