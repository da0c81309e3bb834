"""Make `.venv`, a real ComfyUI and the workers' private folder; called by `make setup`. With --browser, add what
tests/browser needs to that; called by `make browser`.

Standard library only.  A step whose inputs have not changed since it last succeeded is skipped (the inputs are kept in
`.venv/setup.json`), so a second call takes well under a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "setup.json"
OLDEST = (3, 10)
PLAYWRIGHT = "playwright>=1.50"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run(*command: str | Path) -> None:
    """Run `command` in the checkout and raise CalledProcessError when it fails."""
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def pip(*arguments: str | Path) -> None:
    """Install into `.venv` quietly."""
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def apt_install(*packages: str) -> bool:
    """Install Debian packages; False where there is no apt-get, or no right to use it."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (sudo and shutil.which("sudo") is None):
        return False
    run(*sudo, "apt-get", "update", "-q")
    run(*sudo, "apt-get", "install", "-q", "-y", "--no-install-recommends", *packages)
    return True


def install_venv_module() -> None:
    """Debian splits `ensurepip` off into a package: install it, or say which command does."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if not apt_install(package):
        raise SystemExit(f"Python's venv module is incomplete here. Install it (Debian: apt-get install {package}).")


def make_venv() -> None:
    """Create `.venv` with pip in it."""
    if sys.version_info < OLDEST:
        raise SystemExit(f"Python {sys.version.split()[0]} is too old; 3.10 or newer: make setup PYTHON=python3.11")
    if importlib.util.find_spec("ensurepip") is None:
        install_venv_module()
    run(sys.executable, "-m", "venv", VENV)


def read_stamps() -> dict[str, str]:
    """What each finished step was made from; empty before the first one."""
    return json.loads(STAMPS.read_text()) if STAMPS.exists() else {}


def step(name: str, inputs: str, *arguments: str | Path) -> None:
    """pip-install `arguments` unless the step `name` was already done with the same `inputs`."""
    stamps = read_stamps()
    if stamps.get(name) == inputs:
        return
    print(f"setup: {name} ...", end="", flush=True)
    began = time.monotonic()
    pip(*arguments)
    STAMPS.write_text(json.dumps({**stamps, name: inputs}, indent=1))
    print(f" {time.monotonic() - began:.0f} s", flush=True)


def install_requirements(name: str, path: Path) -> None:
    """Install a requirements file when its text has changed."""
    step(name, path.read_text(), "-r", path)


def mend_torchvision() -> None:
    """Let every interpreter start of `.venv` install the import hook of run_comfyui.py.

    PyPI's torchvision does not import beside a CPU build of torch, and transformers and diffusers import it wherever
    it is installed; the hook declares what is missing, only where it is missing, at the first import of torchvision.
    """
    packages = next((VENV / "lib").glob("python3.*")) / "site-packages"
    source = str(ROOT / "scripts" / "run_comfyui.py")
    line = ("import importlib.util as u, sys; "
            f"s = u.spec_from_file_location('torchvision_hook', {source!r}); m = u.module_from_spec(s); "
            "s.loader.exec_module(m); m.install_torchvision_hook()")
    (packages / "torchvision_hook.pth").write_text(line + "\n")


def setup(torch: str, torchvision: str) -> None:
    """Do all steps in order: torch first, so that nothing after it can choose another build."""
    if not PYTHON.exists():
        print("setup: .venv", flush=True)
        make_venv()
    step("torch", torch, *shlex.split(torch))
    install_requirements("ComfyUI's requirements", ROOT / "scripts" / "comfyui-requirements.txt")
    step("torchvision", torchvision, "--no-deps", *shlex.split(torchvision))
    mend_torchvision()
    install_requirements("requirements.txt", ROOT / "requirements.txt")
    install_requirements("test and lint tools", ROOT / "scripts" / "dev-requirements.txt")
    run(PYTHON, "scripts/comfyui.py", "fetch", "--python", PYTHON, "--into", ".comfyui")
    run(PYTHON, "install.py")


def browser() -> None:
    """playwright in `.venv` and a Chromium of the system's. Where there is none to be had, tests/browser fails."""
    try:
        step("playwright", PLAYWRIGHT, PLAYWRIGHT)
        if not (os.environ.get("PIPEDIT_CHROMIUM") or any(map(shutil.which, BROWSERS))):
            print("setup: chromium", flush=True)
            if not apt_install("chromium", "fonts-dejavu-core"):
                print("setup: no apt-get here that may install chromium; PIPEDIT_CHROMIUM=/path names a browser")
    except subprocess.CalledProcessError as error:
        print(f"setup: the browser tests will fail: {shlex.join(map(str, error.cmd))} (exit code {error.returncode})")


def main() -> None:
    """Parse the command line and set everything up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch==2.13.0", help="pip arguments that install torch")
    parser.add_argument("--torchvision", default="torchvision==0.28.0", help="pip arguments for its torchvision")
    parser.add_argument("--browser", action="store_true", help="add the browser for tests/browser, nothing else")
    arguments = parser.parse_args()
    if arguments.browser:
        browser()
        return
    try:
        setup(arguments.torch, arguments.torchvision)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"setup failed: {shlex.join(error.cmd)} (exit code {error.returncode})") from error


if __name__ == "__main__":
    main()
