"""What all tests share. ComfyUI is never imported into the process that runs the tests: its top-level names (nodes,
server, utils) would hide this repository's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from dist.ranks import Ranks

# a test run in the background of a shell inherits an ignored SIGINT, and so would every process it interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def world() -> Iterator[Ranks]:
    """Runs functions on n ranks of a torch.distributed world: world.run(n, function, **arguments)."""
    ranks = Ranks()
    yield ranks
    ranks.close()
