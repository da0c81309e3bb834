"""What a caller holds while the pool works: result, progress, cancel. Safe from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import PipeDiTError
from ..job import Progress, Stage
from ..plan import Plan


class Ticket:
    """A request in the engine. `frames` is the ticket of the decode that follows a clip, if one was asked for."""

    def __init__(self, job: str, cancel: Callable[[str], None], frames: Ticket | None = None) -> None:
        self.id = job
        self.frames = frames
        self.plan: Plan | None = None
        self._cancel = cancel
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: PipeDiTError | None = None
        self._progress = Progress(Stage.WAITING)
        self._timings: dict[str, float] = {}
        self._callbacks: list[Callable[[Ticket], None]] = []

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the end, at most `timeout` seconds; whether it ended."""
        return self._ended.wait(timeout)

    def result(self) -> Any:
        """The result (see Engine.submit); raises the error the job ended with. Only after the end."""
        if not self._ended.is_set():
            raise RuntimeError(f"{self.id} has not ended yet: wait() first")
        if self._error is not None:
            raise self._error
        return self._result

    def progress(self) -> Progress:
        """The latest news."""
        return self._progress

    def timings(self) -> dict[str, float]:
        """Seconds a stage took, by its name, so far."""
        return dict(self._timings)

    def cancel(self) -> None:
        """Asks for the end; the pool stops at the next boundary and the ticket ends with Cancelled."""
        self._cancel(self.id)

    def add_done_callback(self, function: Callable[[Ticket], None]) -> None:
        """Calls `function(ticket)` at the end, in the engine's thread; at once if it is over."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(function)
                return
        function(self)

    def report(self, progress: Progress) -> None:
        """Engine only: news."""
        self._progress = progress

    def note_time(self, stage: str, seconds: float) -> None:
        """Engine only: adds to a stage's time."""
        self._timings[stage] = self._timings.get(stage, 0.0) + seconds

    def succeed(self, result: Any) -> None:
        """Engine only: ends well."""
        self._end(result, None, Stage.DONE)

    def fail(self, error: PipeDiTError, stage: Stage = Stage.FAILED) -> None:
        """Engine only: ends with an error; a decode that would have followed ends with the same one."""
        if self.frames is not None:  # first, so that whoever waits for the clip finds its frames decided
            self.frames.fail(error, stage)
        self._end(None, error, stage)

    def _end(self, result: Any, error: PipeDiTError | None, stage: Stage) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._result, self._error = result, error
            self._progress = Progress(stage, self._progress.done, self._progress.total)
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            function(self)
