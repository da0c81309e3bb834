"""A preload file: ranks of the CPU whose memory is numbers out of a file, so that they claim as GPUs do.

PIPEDIT_TEST_MEMORY names a JSON file of {free, total, cached, peak, held} in bytes, read whenever a rank is asked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from comfyui_pipedit.wire.messages import Memory, Use


class Counted:
    """A rank's device, with memory."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @property
    def label(self) -> str:
        return f"GPU {self._device.index} (of numbers)"

    def free_memory(self) -> int:
        return 1

    def memory(self) -> Memory:
        numbers = self._numbers()
        return Memory(numbers["free"], numbers["total"], numbers["cached"])

    def use(self, weights: int) -> Use:
        numbers = self._numbers()
        return Use(numbers["peak"], numbers["held"])

    def _numbers(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(Path(os.environ["PIPEDIT_TEST_MEMORY"]).read_text())
        return found


def configure(runtime: Any) -> None:
    """Called in every rank before it joins the world."""
    runtime.device = Counted(runtime.device)
