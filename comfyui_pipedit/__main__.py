"""`python -m comfyui_pipedit generate|verify|inspect`: the pool and its files without ComfyUI.

Exit code 1 and a sentence when it fails.
"""

from __future__ import annotations

import argparse
import logging
import sys

from . import generate, inspect_file, verify
from .errors import PipeDiTError

COMMANDS = {"generate": generate, "verify": verify, "inspect": inspect_file}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="comfyui_pipedit", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="show the workers' logs")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR, format="%(message)s")
    try:
        return COMMANDS[options.command].run(options)
    except PipeDiTError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
