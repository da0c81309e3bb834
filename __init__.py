"""The node pack's entry point. Nothing starts here: ComfyUI calls `comfy_entrypoint`, the first prompt starts the pool.

The engine is registered under its plain name, `comfyui_pipedit`, without a change to sys.path: ComfyUI names this
module after its path, and the folder `nodes/` must not hide ComfyUI's own `nodes`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"
ENGINE = Path(__file__).resolve().parent / "comfyui_pipedit"


def register_engine(folder: Path) -> None:
    """Make `import comfyui_pipedit` find `folder`; ImportError if another copy of the pack was there first."""
    name = folder.name
    known = sys.modules.get(name)
    if known is None:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif str(folder) not in [str(Path(place).resolve()) for place in known.__path__]:
        raise ImportError(
            f"two copies of {name} are installed: {list(known.__path__)} and {folder}; remove one of them"
        )


async def comfy_entrypoint() -> ComfyExtension:
    """The extension with the nodes, their routes and the listener for POST /free."""
    register_engine(ENGINE)
    from .nodes.extension import PipeDiTExtension
    from .nodes.routes import add_routes

    add_routes()
    return PipeDiTExtension()
