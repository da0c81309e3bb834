"""Which VAE and which text encoder go with a transformer's file, out of what lies in the model folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..job import ModelFiles
from .model_files import place

VAE_NAMES = (r"wan[ _.-]?2[ _.-]?[12][ _.-]?vae", r"wan.*vae", r"vae")
TEXT_NAMES = (r"umt5[ _-]?xxl", r"umt5")
"""Well-known names, the likelier ones first; upper case and folders do not matter. The header decides."""


@dataclass(frozen=True, slots=True)
class Companions:
    """Names out of the lists that were searched; None where nothing fits."""

    vae: str | None
    text: str | None


def find_companions(model: ModelFiles, vaes: Mapping[str, Path], texts: Mapping[str, Path]) -> Companions:
    """The VAE and the text encoder that "auto" means for a model. vaes, texts: name in a list -> file.

    Only names that look like Wan's are opened, and only what fits by its header is taken: a VAE with the model's latent
    channels, an encoder of its text width. Among several, the likelier name, then the first in the alphabet.
    """
    geometry = model.geometry
    return Companions(
        _first(vaes, VAE_NAMES, lambda path: _config(path, "vae").get("z_dim") == geometry.channels),
        _first(texts, TEXT_NAMES, lambda path: _config(path, "text").get("d_model") == geometry.text_width))


def _first(files: Mapping[str, Path], patterns: tuple[str, ...], fits: Callable[[Path], bool]) -> str | None:
    def rank(name: str) -> int:
        base = name.replace("\\", "/").rpartition("/")[2].lower()
        return next((i for i, pattern in enumerate(patterns) if re.search(pattern, base)), len(patterns))

    ordered = sorted((rank(name), name) for name in files)
    return next((name for likely, name in ordered if likely < len(patterns) and fits(files[name])), None)


def _config(path: Path, part: str) -> dict[str, Any]:
    """The config of a part; {} for a file that is damaged or has no such part."""
    try:
        return place(path).config(part)
    except LoadError:
        return {}
