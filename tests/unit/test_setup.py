"""scripts/setup.py does each step once, again when its inputs change, and says what a machine lacks."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/setup.py with its stamps in a folder of the test's; what it would install is in `installed`."""
    spec = importlib.util.spec_from_file_location("pipedit_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.installed = []  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "STAMPS", tmp_path / "setup.json")
    monkeypatch.setattr(module, "pip", lambda *arguments: module.installed.append(arguments))
    return module


def test_a_step_is_done_once_for_the_same_inputs(setup: ModuleType) -> None:
    for inputs in ("torch==1", "torch==1", "torch==2", "torch==2"):
        setup.step("torch", inputs, inputs)
    assert setup.installed == [("torch==1",), ("torch==2",)]


def test_a_failed_step_is_tried_again(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: str) -> None:
        raise subprocess.CalledProcessError(1, ["pip", *arguments])

    with monkeypatch.context() as patch:
        patch.setattr(setup, "pip", fail)
        with pytest.raises(subprocess.CalledProcessError):
            setup.step("torch", "torch==1", "torch==1")
    setup.step("torch", "torch==1", "torch==1")
    assert setup.installed == [("torch==1",)]


@pytest.mark.parametrize(("user", "tools", "prefix"), [
    (0, {"apt-get"}, []), (1000, {"apt-get", "sudo"}, ["sudo", "-n"]),
])
def test_a_missing_venv_module_is_installed(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, user: int, tools: set[str], prefix: list[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(setup.os, "geteuid", lambda: user)
    monkeypatch.setattr(setup.shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(setup, "run", lambda *command: ran.append(list(command)))
    setup.install_venv_module()
    assert [command[: len(prefix) + 1] for command in ran] == [[*prefix, "apt-get"]] * 2
    assert ran[-1][-1].endswith("-venv")


@pytest.mark.parametrize(("user", "tools"), [(0, set()), (1000, {"apt-get"})])
def test_where_it_cannot_install_it_names_the_package(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, user: int, tools: set[str]
) -> None:
    monkeypatch.setattr(setup.os, "geteuid", lambda: user)
    monkeypatch.setattr(setup.shutil, "which", lambda name: name if name in tools else None)
    with pytest.raises(SystemExit, match=r"apt-get install python3\.\d+-venv"):
        setup.install_venv_module()


@pytest.mark.parametrize(("tools", "packages"), [({"apt-get"}, ["chromium", "fonts-dejavu-core"]),
                                                 ({"apt-get", "google-chrome"}, []), (set(), [])])
def test_a_browser_is_installed_where_there_is_none(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tools: set[str], packages: list[str]
) -> None:
    ran: list[str] = []
    monkeypatch.delenv("PIPEDIT_CHROMIUM", raising=False)
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0)
    monkeypatch.setattr(setup.shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(setup, "run", lambda *command: ran.extend(command))
    setup.browser()
    assert setup.installed == [(setup.PLAYWRIGHT,)] and ran[len(ran) - len(packages):] == packages


def test_a_browser_that_cannot_be_installed_does_not_stop_the_setup(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: str) -> None:
        raise subprocess.CalledProcessError(100, ["pip", *arguments])

    monkeypatch.setattr(setup, "pip", fail)
    setup.browser()
    assert "the browser tests will fail: pip 'playwright" in capsys.readouterr().out
