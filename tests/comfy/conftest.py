"""Fixtures with a real ComfyUI: `comfy_folder`, `comfy_server` (one for the session), `comfy` (a client of it),
`reference` (one random model in both file forms, below that server's models folder)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from reference import Reference, write_reference
from server import Client, ComfyServer

PROBE_PACK = Path(__file__).resolve().parent / "probe_pack"


def load_script(path: Path) -> ModuleType:
    """A script of this repository as a module, without a change to sys.path."""
    spec = importlib.util.spec_from_file_location(path.stem + "_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def comfy_folder(repository: Path) -> Path:
    """ComfyUI's own folder: the one COMFYUI names, else the one `make setup` fetched."""
    found: Path | None = load_script(repository / "scripts" / "comfyui.py").locate(repository / ".comfyui")
    if found is None:
        pytest.fail("no ComfyUI here: run make setup, or set COMFYUI=/path/to/ComfyUI")
    return found


@pytest.fixture(scope="session")
def comfy_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base folder of the session's server: models/, input/, output/ and so on lie in it."""
    return tmp_path_factory.mktemp("comfyui")


@pytest.fixture(scope="session")
def reference(comfy_folder: Path, comfy_base: Path, repository: Path) -> Reference:
    """The reference weights, as single files and as a diffusers folder."""
    return write_reference(comfy_folder, comfy_base / "models", repository / ".workers")


@pytest.fixture(scope="session")
def comfy_server(comfy_folder: Path, comfy_base: Path, repository: Path) -> Iterator[ComfyServer]:
    """A running ComfyUI with this repository and the probe nodes in custom_nodes."""
    with ComfyServer.start(comfy_folder, comfy_base, packs=[repository, PROBE_PACK]) as server:
        yield server


@pytest.fixture
def comfy(comfy_server: ComfyServer) -> Iterator[Client]:
    """A client of the session's server; the end of the server's log is shown when the test fails."""
    with comfy_server.client() as client:
        yield client
