"""A preload file that makes ranks stop at a gate (tests/host/gates.py), where a test kills, stops or cancels them.

PIPEDIT_TEST_GATES names the gates' folder. A rank whose phase matches the gate announces itself, then waits.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any


class GatedBoard:
    """The rank's phase board; a phase that the current gate names is a place to wait."""

    def __init__(self, board: Any, folder: Path) -> None:
        self._board, self._folder, self._passed = board, folder, set[str]()

    def write(self, rank: int, text: str) -> None:
        self._board.write(rank, text)
        try:
            gate = json.loads((self._folder / "gate.json").read_text())
        except FileNotFoundError:
            return
        if gate["rank"] == rank and gate["id"] not in self._passed and re.search(gate["phase"], text):
            self._passed.add(gate["id"])
            (self._folder / f"arrived-{gate['id']}").write_text(text)  # a FIFO: wakes the test
            with (self._folder / f"go-{gate['id']}").open("rb", buffering=0) as go:
                go.read(1)  # a FIFO: waits for the test


def configure(runtime: Any) -> None:
    """Called in every rank before it joins the world."""
    print(f"rank {runtime.rank} runs on {runtime.device.label}")
    runtime.board = GatedBoard(runtime.board, Path(os.environ["PIPEDIT_TEST_GATES"]))
