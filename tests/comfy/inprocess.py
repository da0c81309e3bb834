"""ComfyUI's modules inside a process of their own: scripts of this folder call `enter` before any import of them.

Neither this folder (its server.py) nor the repository's root (its nodes/) may be on sys.path there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def load(name: str, file: Path) -> ModuleType:
    """The module or package of a file, in sys.modules under `name`; sys.path stays as it is."""
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def enter(comfy: Path) -> None:
    """Make `import comfy`, `import nodes` and so on mean ComfyUI's, on the CPU with one thread."""
    sys.path[:] = [str(comfy), *(entry for entry in sys.path if Path(entry or ".").resolve() not in (HERE, ROOT))]
    load("run_comfyui", ROOT / "scripts" / "run_comfyui.py").install_torchvision_hook()
    import torch

    torch.set_num_threads(1)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    # Its own choice on the CPU asks for the free memory before every call.
    comfy.cli_args.args.use_pytorch_cross_attention = True


def run(script: str, *arguments: object, timeout: float = 600.0) -> str:
    """Run a script of this folder in a process of its own; its output. RuntimeError with the output if it fails."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout
