"""Installing the pack changes no package of two environments; with the demo as well: `make envs`."""

from __future__ import annotations

from pathlib import Path

import check
import pytest


@pytest.mark.parametrize("flavour", check.FLAVOURS, ids=lambda flavour: flavour.name)
def test_an_install_leaves_the_environment_as_it_was(flavour: check.Flavour, tmp_path: Path) -> None:
    check.check_install(flavour, tmp_path)


def test_a_requirement_that_changes_the_environment_is_noticed(tmp_path: Path) -> None:
    environment = check.Environment.create(tmp_path / "venv", ())
    before = environment.state()
    environment.pip("install", "--quiet", "--no-deps", "huggingface_hub==0.36.2")
    with pytest.raises(check.EnvironmentBroken, match="has requirement huggingface-hub"):
        check.check_unchanged(before, environment.state())
