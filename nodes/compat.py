"""One source for ComfyUI 0.3.75 and newer: keywords that this ComfyUI does not know yet are left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def known_keywords(factory: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords a callable takes; None if it takes any."""
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def make(factory: Callable[..., T], *args: Any, **newer: Any) -> T:
    """`factory(*args, **newer)` without those keywords that it does not know.

    Only cosmetic keywords may be dropped this way (`advanced`, `search_aliases`): they came after 0.3.75.
    """
    known = known_keywords(factory)
    cosmetic = ("advanced", "search_aliases", "essentials_category")
    return factory(
        *args, **{key: value for key, value in newer.items() if known is None or key in known or key not in cosmetic}
    )
