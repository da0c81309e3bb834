"""What the places of weights have in common: a folder in diffusers' layout and a single file are read the same way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from . import precision
from .safetensors_file import Entry, mapped_tensors

if TYPE_CHECKING:
    from .tokens import TextTokens

DEFAULT_SHIFT = 8.0
"""ComfyUI's own for Wan, used where a place names none."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """One network: where it lies, its config, and its tensors by the names of diffusers' or transformers' class.

    scales: weight name -> the scale of that weight, true = stored * scale; not among the entries. layout: how the place
    tells its scales ("" = not at all; loaders/quantised.py). input_scales: scales for inputs, which nobody uses.
    """

    place: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    scales: Mapping[str, Entry] = field(default_factory=dict)
    layout: str = ""
    input_scales: int = 0

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that holds most of its values."""
        return precision.stored_dtype(self.entries.values())

    def mapped(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) that view the mapped files: never write to them."""
        return mapped_tensors(self.entries)

    def scale_values(self) -> dict[str, Tensor]:
        """Weight name -> its scale, float32 without dimensions, on the CPU."""
        return {name: tensor.float().reshape(()).clone() for name, tensor in mapped_tensors(self.scales)}


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What the host knows of a text encoder: the length that texts are padded to, and the words of a closed
    vocabulary."""

    tokens: int
    vocabulary: tuple[str, ...]


class Place(Protocol):
    """A folder or a file that holds networks, by part: "transformer", "vae", "text"."""

    @property
    def path(self) -> Path: ...

    @property
    def parts(self) -> tuple[str, ...]:
        """What is there. LoadError if nothing of it is Wan's."""
        ...

    def config(self, part: str) -> dict[str, Any]:
        """A network's config; weights are not looked at in a folder. LoadError if the place has no such part."""
        ...

    def open(self, part: str) -> WeightFiles:
        """A network's config and headers. LoadError if a file is missing or damaged."""
        ...

    def stamp(self, part: str) -> str:
        """The state of a network's files."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that belong to no network."""
        ...

    @property
    def low(self) -> Place | None:
        """Where the second transformer lies, the expert for low noise; None if there is none or it lies apart."""
        ...

    @property
    def boundary(self) -> float | None:
        """The noise level at which that expert takes over; None if the place does not say."""
        ...

    @property
    def shift(self) -> float:
        """The flow shift that the model is sampled with."""
        ...

    @property
    def text(self) -> TextFacts: ...

    def tokens(self) -> TextTokens:
        """The text encoder's tokenizer, for workers. LoadError if it is missing."""
        ...


def digest(root: Path, paths: Iterable[Path]) -> str:
    """The state of files, as their names below `root`, sizes and times of change make it: 16 hex digits."""
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths if path.is_file()]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
