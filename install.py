"""Put the workers' own packages into `.workers`, a folder that ComfyUI itself never sees.

ComfyUI-Manager runs this after an install or update, with ComfyUI's python; by hand: `python install.py`.
It changes no installed package: pip writes only into that folder, and takes no dependencies along.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACK = Path(__file__).resolve().parent
REQUIREMENTS = PACK / "requirements-workers.txt"
TARGET = PACK / ".workers"
STAMP = "installed-from.txt"
# Sub-folders that some wheels carry beside their package; as top-level names they would shadow other packages.
STRAYS = ("benchmark", "benchmarks", "bin", "docker", "docs", "entrypoints", "examples", "test", "tests")


def installer() -> list[str]:
    """The command of the package installer for this interpreter: pip, or uv where pip is not installed."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    raise SystemExit(f"PipeDiT: {sys.executable} has neither pip nor uv; install pip and run install.py again.")


def is_current(wanted: str) -> bool:
    """Whether the folder holds exactly what the requirements name now."""
    stamp = TARGET / STAMP
    return stamp.exists() and stamp.read_text() == wanted


def fill(folder: Path) -> None:
    """Install the requirements into `folder`; SystemExit with the command when that fails."""
    command = [*installer(), "--quiet", "--no-deps", "--target", str(folder), "-r", str(REQUIREMENTS)]
    if subprocess.run(command, cwd=PACK).returncode:
        raise SystemExit(f"PipeDiT: the workers' packages could not be installed. The command was: {' '.join(command)}")
    for stray in STRAYS:
        shutil.rmtree(folder / stray, ignore_errors=True)


def swap_in(folder: Path) -> None:
    """Put `folder` in the place of the old one, which stays whole until then and is moved beside `folder`."""
    if TARGET.exists():
        TARGET.rename(folder.with_name("old"))
    folder.rename(TARGET)


def main() -> None:
    """Fill `.workers` unless it is up to date."""
    wanted = REQUIREMENTS.read_text()
    if is_current(wanted):
        print(f"PipeDiT: {TARGET} is up to date.")
        return
    print(f"PipeDiT: installing the workers' packages into {TARGET} (nothing else is changed) ...", flush=True)
    with tempfile.TemporaryDirectory(prefix=".workers-", dir=PACK) as scratch:
        folder = Path(scratch) / "packages"
        folder.mkdir()
        fill(folder)
        (folder / STAMP).write_text(wanted)
        swap_in(folder)
    print("PipeDiT: done.")


if __name__ == "__main__":
    main()
