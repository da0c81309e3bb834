"""Does installing this pack leave ComfyUI's environment as it was, and does it run there? `make envs`.

Two environments on top of `.venv`: one of today, and one as ComfyUI users had it a year ago, with another pack's old
diffusers in it. Each gets a copy of the pack installed the way ComfyUI-Manager does it (every line of requirements.txt
by itself, then install.py), and then runs the demo in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class EnvironmentBroken(Exception):
    """The install changed something that is not ours."""


@dataclass(frozen=True)
class Flavour:
    """An environment: what differs from `.venv`. `pins` are installed without dependencies and must pass pip check."""

    name: str
    pins: tuple[str, ...]


FLAVOURS = (
    Flavour("today", ()),
    Flavour("a-year-ago", ("transformers==4.57.3", "huggingface_hub==0.36.2", "tokenizers==0.22.1",
                           "diffusers==0.33.1", "importlib_metadata==8.7.0", "zipp==3.23.0")),
)


@dataclass(frozen=True)
class State:
    """What pip says of an environment."""

    freeze: tuple[str, ...]
    check: str


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder` that sees `.venv`'s packages behind its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @classmethod
    def create(cls, folder: Path, pins: tuple[str, ...]) -> Environment:
        """Seconds instead of minutes: a line in a .pth file lends it everything that is installed in `.venv`."""
        venv.create(folder, with_pip=False)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = folder / "lib" / version / "site-packages"
        (packages / "lent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        environment = cls(folder)
        if pins:
            environment.pip("install", "--quiet", "--no-deps", *pins)
        return environment

    def run(self, *command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
        """Run this environment's python; its output. EnvironmentBroken with all of it when it fails."""
        done = subprocess.run([str(self.python), *map(str, command)], cwd=cwd, env={**os.environ, **variables},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise EnvironmentBroken(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
        return done.stdout

    def pip(self, *arguments: str) -> str:
        """pip of `.venv`, acting on this environment."""
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def state(self) -> State:
        """pip freeze and pip check now; EnvironmentBroken where pip check finds fault."""
        return State(tuple(sorted(self.pip("freeze").splitlines())), self.pip("check"))


def copy_of_the_pack(folder: Path) -> Path:
    """The pack as a clone would have it: files that git tracks or would track, without anything installed."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def requirement_lines(pack: Path) -> list[str]:
    """The lines of requirements.txt that the Manager installs, one by one."""
    lines = (line.split("#")[0].strip() for line in (pack / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


def install_as_the_manager_does(environment: Environment, pack: Path) -> str:
    """Install the pack; what install.py printed."""
    for line in requirement_lines(pack):
        environment.pip("install", line)
    return environment.run(pack / "install.py", cwd=pack)


def check_unchanged(before: State, after: State) -> None:
    """EnvironmentBroken with every package that came, went or changed."""
    if before != after:
        gone, new = sorted(set(before.freeze) - set(after.freeze)), sorted(set(after.freeze) - set(before.freeze))
        raise EnvironmentBroken(f"the install changed the environment: gone {gone}, new {new}\n{after.check}")


LOAD_MODELS = """
import sys
sys.path.insert(0, {root!r})
from comfyui_pipedit.worker.forks import preload
preload({site!r}, ())
import diffusers
print(diffusers.__version__, diffusers.__file__)
"""


def check_model_classes(environment: Environment, pack: Path) -> str:
    """Import the model classes as a worker does; EnvironmentBroken unless they come from the private folder."""
    site = pack / ".workers"
    told = environment.run("-c", LOAD_MODELS.format(root=str(pack), site=str(site))).splitlines()[-1]
    if str(site) not in told:
        raise EnvironmentBroken(f"workers got another diffusers than the pack's own: {told}")
    return told


def check_demo(environment: Environment, pack: Path) -> str:
    """Run the demo with this environment's ComfyUI; its last line."""
    comfy = os.environ.get("COMFYUI") or str(ROOT / ".comfyui" / "ComfyUI")
    out = environment.folder / "demo"
    return environment.run(pack / "scripts" / "demo.py", "--out", out, COMFYUI=comfy).splitlines()[-1]


def check_install(flavour: Flavour, folder: Path) -> tuple[Environment, Path]:
    """Make the environment, install the pack into it and compare; what the demo needs."""
    environment = Environment.create(folder / "venv", flavour.pins)
    pack = copy_of_the_pack(folder / "pack")
    before = environment.state()
    install_as_the_manager_does(environment, pack)
    check_unchanged(before, environment.state())
    check_model_classes(environment, pack)
    return environment, pack


def main() -> None:
    """Check every flavour; exit code 1 with the reason at the first that is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-demo", action="store_true", help="only install and import")
    arguments = parser.parse_args()
    for flavour in FLAVOURS:
        with tempfile.TemporaryDirectory(prefix="pipedit-env-") as folder:
            try:
                environment, pack = check_install(flavour, Path(folder))
                shown = "" if arguments.no_demo else ", demo " + check_demo(environment, pack)
            except EnvironmentBroken as error:
                raise SystemExit(f"{flavour.name}: {error}") from error
        print(f"{flavour.name}: nothing changed, pip check clean{shown}", flush=True)


if __name__ == "__main__":
    main()
