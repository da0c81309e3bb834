"""install.py fills the private folder whole or not at all; the files that name dependencies agree."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
FAKE_PIP = """
import sys
from pathlib import Path
arguments = sys.argv[1:]
assert "--no-deps" in arguments, "dependencies would be installed as well"
folder = Path(arguments[arguments.index("--target") + 1])
for name in ("diffusers", "tests", "bin"):
    (folder / name).mkdir()
    (folder / name / "file.py").write_text("new")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """install.py as it stands in a pack of its own, with a package installer that needs no network."""
    spec = importlib.util.spec_from_file_location("pipedit_install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements-workers.txt").write_text("diffusers==1\n")
    (tmp_path / "fake_pip.py").write_text(FAKE_PIP)
    for name, value in (("PACK", tmp_path), ("REQUIREMENTS", tmp_path / "requirements-workers.txt"),
                        ("TARGET", tmp_path / ".workers"),
                        ("installer", lambda: [sys.executable, str(tmp_path / "fake_pip.py")])):
        monkeypatch.setattr(module, name, value)
    return module


def test_it_fills_the_folder_without_strays(install: ModuleType) -> None:
    install.main()
    assert sorted(path.name for path in install.TARGET.iterdir()) == ["diffusers", install.STAMP]
    assert [path.name for path in install.PACK.glob(".workers-*")] == []


def test_a_second_run_changes_nothing(install: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    install.main()
    (install.TARGET / "diffusers" / "file.py").write_text("untouched")
    install.main()
    assert (install.TARGET / "diffusers" / "file.py").read_text() == "untouched"
    assert "up to date" in capsys.readouterr().out


def test_other_requirements_replace_the_folder(install: ModuleType) -> None:
    install.main()
    (install.TARGET / "diffusers" / "file.py").write_text("old")
    install.REQUIREMENTS.write_text("diffusers==2\n")
    install.main()
    assert (install.TARGET / "diffusers" / "file.py").read_text() == "new"


def test_a_failed_install_names_the_command_and_keeps_the_old_folder(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.main()
    install.REQUIREMENTS.write_text("diffusers==2\n")
    monkeypatch.setattr(install, "installer", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(SystemExit, match=re.escape("--no-deps --target")):
        install.main()
    assert (install.TARGET / "diffusers").is_dir()


def test_pyproject_and_requirements_name_the_same_packages_without_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()
    assert [line for line in project["dependencies"] if not line.isalpha()] == []


def test_workers_requirements_are_pinned() -> None:
    lines = (ROOT / "requirements-workers.txt").read_text().splitlines()
    named = [line for line in lines if not line.startswith("#")]
    assert named and [line for line in named if not re.fullmatch(r"[a-z_]+==[\d.]+", line)] == []
