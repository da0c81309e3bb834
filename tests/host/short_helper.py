"""A preload file: rank 3 never has memory to help."""

from __future__ import annotations

from typing import Any

from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.worker import runtime as module


def refuse(*given: Any) -> None:
    """In the place of worker.help.serve."""
    raise OutOfMemory("rank 3 has no room to help")


def configure(runtime: Any) -> None:
    """Called in every rank before it joins the world."""
    if runtime.rank == 3:
        module.serve = refuse
