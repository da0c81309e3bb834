"""Fixtures with ComfyUI's editor in Chromium. Without the browser these tests fail, unless PIPEDIT_SKIP_BROWSER=1."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from editor import Editor
    from playwright.sync_api import Browser
    from server import ComfyServer

sys.path.append(str(Path(__file__).resolve().parent.parent / "comfy"))
ADVICE = ("the browser tests need playwright and Chromium: `make browser`; PIPEDIT_CHROMIUM=/path names another "
          "browser; PIPEDIT_SKIP_BROWSER=1 leaves these tests out")


@pytest.fixture(scope="session")
def executable() -> str:
    """Path of the browser."""
    if os.environ.get("PIPEDIT_SKIP_BROWSER"):
        pytest.skip("PIPEDIT_SKIP_BROWSER is set")
    if importlib.util.find_spec("playwright") is None:
        pytest.fail(f"playwright is not installed: {ADVICE}")
    from editor import chromium

    found = chromium()
    if found is None:
        pytest.fail(f"no Chromium found: {ADVICE}")
    return found


@pytest.fixture(scope="module")
def editor_server(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A running ComfyUI with its editor."""
    import served

    comfy = served.comfy_folder()
    if comfy is None:
        pytest.fail("no ComfyUI here: run make setup, or set COMFYUI=/path/to/ComfyUI")
    with served.serve(comfy, tmp_path_factory.mktemp("editor")) as server:
        yield server


@pytest.fixture(scope="module")
def chrome(executable: str) -> Iterator[Browser]:
    """A browser; while it is open, asyncio.run works nowhere in this thread."""
    from editor import browser

    with browser(executable) as opened:
        yield opened


@pytest.fixture
def editor(editor_server: ComfyServer, chrome: Browser) -> Iterator[Editor]:
    """A page with the editor, as at its first start."""
    from editor import opened_editor

    with opened_editor(chrome, editor_server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_editor(editor_server: ComfyServer, chrome: Browser) -> Iterator[Editor]:
    """A page for tests that only open something."""
    from editor import opened_editor

    with opened_editor(chrome, editor_server.url) as opened:
        yield opened
