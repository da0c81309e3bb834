"""Engines and gates for pool tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import toy
from gates import Gate, MakeGate

from comfyui_pipedit.host.engine import Engine


@pytest.fixture(scope="module")
def gate_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the ranks of this module's pools look for gates."""
    folder = tmp_path_factory.mktemp("gates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDIT_TEST_GATES", str(folder))
        yield folder


@pytest.fixture(scope="module")
def engine(gate_folder: Path) -> Iterator[Engine]:
    """2 + 1 toy ranks with gates; every test leaves it working."""
    made = Engine(toy.config(preload=(toy.TOY, toy.GATES)))
    yield made
    made.close()


@pytest.fixture
def gate(gate_folder: Path) -> Iterator[MakeGate]:
    """gate(rank, phase pattern): sets the one gate up; it opens at the end of the test at the latest."""
    made: list[Gate] = []

    def make(rank: int, phase: str) -> Gate:
        made.append(Gate(gate_folder, rank, phase))
        return made[-1]

    yield make
    for one in made:
        one.close()
