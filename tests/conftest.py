"""What all tests share. ComfyUI is never imported into the process that runs the tests: its top-level names (nodes,
server, utils) would hide this repository's."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this repository."""
    return REPOSITORY
