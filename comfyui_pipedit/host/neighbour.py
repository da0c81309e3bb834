"""How a pool asks the rest of its process for memory: requests that wait for the thread that may touch that memory.

ComfyUI's models may be moved by the thread that runs a prompt and by no other, so the engine's thread puts a request
here and goes on; whoever waits for the pool in the prompt's thread looks in a few times a second and answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Held:
    """What somebody still holds on a GPU: a name for people, and bytes."""

    name: str
    num_bytes: int


@dataclass(slots=True)
class Request:
    """`free` bytes should be free on `device` ("gpu:0") for anyone, `missing` more than were. who: the devices of the
    pool that asks."""

    device: str
    free: int
    missing: int
    who: str
    wake: Callable[[], None]
    done: bool = False
    left: tuple[Held, ...] = field(default=())


class Neighbour:
    """The requests of all pools of a process. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: list[Request] = []

    def ask(self, request: Request) -> None:
        """Puts a request in; `wake` is called when it is done."""
        with self._guard:
            self._waiting.append(request)

    def withdraw(self, request: Request) -> None:
        """Nobody needs the answer any more."""
        with self._guard:
            self._waiting = [other for other in self._waiting if other is not request]

    def serve(self, give: Callable[[Request], tuple[Held, ...]]) -> None:
        """Answers everything that was asked, in this thread. `give` frees what is missing and tells what is left."""
        while self._waiting:
            with self._guard:
                request = self._waiting.pop(0) if self._waiting else None
            if request is not None:
                self._answer(request, give)

    def _answer(self, request: Request, give: Callable[[Request], tuple[Held, ...]]) -> None:
        try:
            request.left = give(request)
        finally:
            request.done = True
            request.wake()
