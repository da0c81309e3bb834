"""Holds a rank of a toy pool in a phase, without sleeping: two FIFOs, one that announces and one that lets go."""

from __future__ import annotations

import itertools
import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 30.0


class Gate:
    """`rank` will stop where its phase matches the pattern `phase` (once): `wait` for it, `open` lets it go on."""

    numbers = itertools.count(1)

    def __init__(self, folder: Path, rank: int, phase: str) -> None:
        self._file = folder / "gate.json"
        name = str(next(self.numbers))
        self._arrived, self._go = folder / f"arrived-{name}", folder / f"go-{name}"
        for fifo in (self._arrived, self._go):
            os.mkfifo(fifo)
        self._reader = os.open(self._arrived, os.O_RDONLY | os.O_NONBLOCK)
        self._writer = os.open(self._go, os.O_RDWR)  # open from here on: a rank may come to read after `open`
        ready = folder / "gate.new"
        ready.write_text(json.dumps({"id": name, "rank": rank, "phase": phase}))
        ready.replace(self._file)

    def wait(self, seconds: float = DEADLINE) -> str:
        """The phase in which the rank stopped; nobody else will stop there. TimeoutError if it never got there."""
        readable, _, _ = select.select([self._reader], [], [], seconds)
        if not readable:
            raise TimeoutError(f"no rank came to the gate in {seconds} s")
        self._file.unlink()
        return os.read(self._reader, 4096).decode()

    def open(self) -> None:
        """Lets the rank go on, if it is still there."""
        self._file.unlink(missing_ok=True)
        os.write(self._writer, b"!")

    def close(self) -> None:
        self.open()
        os.close(self._reader)
        os.close(self._writer)


MakeGate = Callable[[int, str], Gate]


def until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Waits for a condition of another thread; the deadline is the failure."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds} s")
        select.select([], [], [], 0.005)


class Alive:
    """Process handles taken while processes live; `all_gone` waits for their ends."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._handles = {pid: os.pidfd_open(pid) for pid in pids}

    def all_gone(self, seconds: float = 10.0) -> list[int]:
        """The pids that still live after the deadline: [] is what a test wants."""
        end = time.monotonic() + seconds
        for pid, handle in list(self._handles.items()):
            if select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                os.close(handle)
                del self._handles[pid]
        return list(self._handles)
