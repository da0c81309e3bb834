"""Run a ComfyUI folder's main.py in this interpreter: python scripts/run_comfyui.py COMFY_DIR [ComfyUI's arguments].

PyPI's torchvision next to a CPU build of torch refuses to import, because it gives fake kernels to two operators that
its native library would have declared. Where that library cannot be loaded, the two are declared here first; all of
torchvision that is written in Python then works.

With RUN_COMFYUI_UNTIL_EOF=1 in the environment ComfyUI is interrupted when its standard input ends: whoever started it
with a pipe takes it along, however that process ends.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path


class DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    """Declares torchvision's native operators at the first import of torchvision, if its own library cannot."""

    def __init__(self) -> None:
        self.asked = False
        self.library: object | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Never finds anything; it only uses the moment before torchvision is found."""
        if name == "torchvision" and not self.asked:
            self.asked = True  # first: importing torch looks for torchvision as well
            self.library = declare_ops()
        return None


def native_ops_load() -> bool:
    """Whether torchvision's compiled library is there and fits the torch that is installed."""
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for file in (file for folder in folders for file in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(file))
        except OSError:
            return False
        return True
    return False


def declare_ops() -> object | None:
    """The library object that holds the declarations (it must stay referenced), or None where none are needed."""
    import torch

    if native_ops_load():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def install_torchvision_hook() -> None:
    """Put the hook in front of the import system; a second call changes nothing, nor one from a copy of this module
    (`.venv` loads it once for each time that site reads the .pth file made by setup.py)."""
    if DeclareTorchvisionOps.__name__ not in (type(finder).__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, DeclareTorchvisionOps())


def interrupt_at_eof() -> None:
    """Interrupt this process when its standard input ends. Blocks until then."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1], "main.py").is_file():
        raise SystemExit("usage: run_comfyui.py COMFY_DIR [ComfyUI's arguments]; COMFY_DIR must hold main.py")
    folder = Path(sys.argv[1]).resolve()
    if os.environ.get("RUN_COMFYUI_UNTIL_EOF") == "1":
        threading.Thread(target=interrupt_at_eof, daemon=True).start()
    install_torchvision_hook()
    os.chdir(folder)
    # ComfyUI expects its own folder where Python put the folder of this script.
    scripts = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != scripts)]
    sys.argv = [str(folder / "main.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
