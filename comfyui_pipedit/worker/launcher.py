"""Run by path with the interpreter of the workers: `python launcher.py OPTIONS` (host.process writes the options).

This file makes the engine importable under its plain name, without a change to PYTHONPATH (embedded interpreters ignore
it) and without putting this folder on the module path, then hands over to worker.forks.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent


def register_engine(folder: Path) -> None:
    """Makes `folder` importable as a package of the same name."""
    spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py",
                                                  submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ENGINE / "worker"]
    register_engine(ENGINE)
    importlib.import_module(f"{ENGINE.name}.worker.forks").main(sys.argv[1:])
