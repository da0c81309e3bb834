"""Model families by name. A family's module, and with it diffusers, is imported when the family is first asked for."""

from __future__ import annotations

import importlib

from ..config import WORKERS_HINT
from ..errors import SetupError, not_one_of
from .family import Family, Gather, SequencePlan, Split

__all__ = ["Family", "Gather", "SequencePlan", "Split", "family", "preload", "register"]

BUILT_IN = {"wan": ".wan"}
"""Family name -> module of this package with a FAMILY in it."""

_families: dict[str, Family] = {}


def register(name: str, made: Family) -> None:
    """Adds a family, or puts another in its place; for the config's preload files and for tests."""
    _families[name] = made


def family(name: str) -> Family:
    """The family of that name. InvalidJob naming the known ones; SetupError if the workers' packages are missing."""
    if name not in _families:
        if name not in BUILT_IN:
            raise not_one_of("model family", name, sorted({*BUILT_IN, *_families}))
        _families[name] = _import(BUILT_IN[name])
    return _families[name]


def preload() -> None:
    """Imports all built-in families, which takes seconds: the launcher does it once, before it forks."""
    for name in BUILT_IN:
        family(name)


def _import(module: str) -> Family:
    try:
        return importlib.import_module(module, __name__).FAMILY
    except ImportError as error:
        raise SetupError(f"{WORKERS_HINT} ({error})") from error
