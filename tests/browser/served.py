"""A real ComfyUI for the editor: the pack installed as `pipedit`, and the workflows' files with tiny weights.

Needs tests/ and tests/comfy on sys.path.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import official_files
import tiny_wan
from editor import SETTINGS
from server import ComfyServer

ROOT = Path(__file__).resolve().parents[2]


def comfy_folder() -> Path | None:
    """ComfyUI's own folder; None before `make setup`."""
    spec = importlib.util.spec_from_file_location("comfyui_script", ROOT / "scripts" / "comfyui.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found: Path | None = script.locate(ROOT / ".comfyui")
    return found


def serve(comfy: Path, base: Path, arguments: Sequence[str] = ()) -> ComfyServer:
    """Starts it in an empty base folder. arguments: more of ComfyUI's own."""
    tiny_wan.use_worker_site()
    official_files.write(base / "models")
    official_files.write_image(base / "input" / "example.png")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "pipedit").symlink_to(ROOT, target_is_directory=True)
    server = ComfyServer.start(comfy, base, packs=[official_files.TINY_PACK], arguments=arguments)
    with server.client() as client:
        client.request("/api/settings", SETTINGS)
    return server
