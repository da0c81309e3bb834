"""ComfyUI's single files: a transformer, a VAE, a text encoder, or a checkpoint that holds several of them.

Everything is known from the header: names and shapes. Tensors get the names of diffusers' classes on the way out; the
file stays as it is, and so do their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import LoadError
from . import foreign, quantised, umt5_file, wan_transformer, wan_vae_file
from .safetensors_file import Entry, Header, read_header
from .tokens import PieceTokens
from .weight_files import DEFAULT_SHIFT, TextFacts, WeightFiles, digest

PREFIXES: dict[str, tuple[str, ...]] = {
    "transformer": ("", "model.diffusion_model.", "diffusion_model.", "model."),
    "vae": ("", "vae.", "first_stage_model."),
    "text": ("", "text_encoders.umt5xxl.transformer.", "cond_stage_model.umt5xxl.transformer.", "cond_stage_model."),
}
MARKERS = {"transformer": wan_transformer.MARKER, "vae": wan_vae_file.MARKER, "text": umt5_file.MARKER}
TOKENIZERS = (umt5_file.TOKENIZER, f"text_encoders.{umt5_file.TOKENIZER}", f"cond_stage_model.{umt5_file.TOKENIZER}")
SPARE = ("logit_scale", "text_projection")
"""What ComfyUI saves with any text encoder and no umt5 needs."""

NAMED = 3
"""So many tensors of a list are named in an error."""


class Network(Protocol):
    """What a network's file turned out to be."""

    @property
    def kind(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def ours(self, original: str) -> str | None:
        """The class's name of a tensor; None for one that it does not have."""
        ...

    def expected(self) -> set[str]:
        """Original names of the tensors that must be there."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A network inside a file."""

    kind: str
    weights: WeightFiles


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds. unused: tensors that belong to no part and are left alone."""

    path: Path
    parts: dict[str, Part]
    unused: tuple[str, ...]

    def part(self, name: str) -> Part:
        """LoadError if the file has no such part, saying what it has."""
        if name not in self.parts:
            has = " and ".join(part.kind for part in self.parts.values())
            raise LoadError(f"{self.path.name} is a {has}; it has no {LABELS[name]}")
        return self.parts[name]


LABELS = {"transformer": "Wan transformer", "vae": "VAE", "text": "text encoder"}


def read_contents(path: Path) -> Contents:
    """All networks of a file, from its header. LoadError naming what is wrong with it, or what it looks like."""
    foreign.refuse_extension(path)
    header = read_header(path)
    names = {**header.entries, **dict.fromkeys(header.unhandled)}
    found = {part: prefix for part in PREFIXES if (prefix := _prefix(part, names)) is not None}
    if not found:
        raise foreign.refuse_unknown(path, names)
    parts: dict[str, Part] = {}
    unused = set(header.entries).difference(TOKENIZERS)
    for part, prefix in found.items():
        others = tuple(other for other in found.values() if other != prefix and other.startswith(prefix))
        mine = {name for name in unused if name.startswith(prefix) and not (others and name.startswith(others))
                and name.rpartition(".")[2] not in SPARE}
        parts[part] = _read_part(part, {name.removeprefix(prefix): header.entries[name] for name in sorted(mine)},
                                 header, prefix)
        unused -= mine
    header.checked()
    return Contents(path, parts, tuple(sorted(unused)))


def _prefix(part: str, names: Mapping[str, object]) -> str | None:
    return next((prefix for prefix in PREFIXES[part] if prefix + MARKERS[part] in names), None)


def _read_part(part: str, entries: dict[str, Entry], header: Header, prefix: str) -> Part:
    split = quantised.split(entries, header, prefix)
    network = _network(part, split.tensors, header)
    _refuse_misfits(split.tensors, network, header.path)
    ours = {name: network.ours(name) or "" for name in split.tensors}
    scales = {ours[f"{layer}.weight"]: entry for layer, entry in split.scales.items()}
    renamed = {ours[name]: entry for name, entry in split.tensors.items()}
    weights = WeightFiles(header.path, network.config, renamed, scales, split.layout, len(split.inputs))
    return Part(network.kind, weights)


def _network(part: str, tensors: Mapping[str, Entry], header: Header) -> Network:
    if part == "transformer":
        return wan_transformer.variant(tensors, header.metadata, header.path.name)
    return (wan_vae_file.coder if part == "vae" else umt5_file.encoder)(tensors, header.path.name)


def _refuse_misfits(tensors: Mapping[str, Entry], network: Network, path: Path) -> None:
    """LoadError naming tensors that the network does not have, or that it lacks."""
    unknown = sorted(name for name in tensors if network.ours(name) is None)
    missing = sorted(network.expected() - tensors.keys())
    for what, names in (("tensors that it should not have", unknown), ("not all of its tensors; missing", missing)):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise LoadError(f"{path.name} is a {network.kind} with {what}: {', '.join(names[:NAMED])}{more}")


@dataclass(frozen=True)
class SingleFile:
    """A file as a place of weights (weight_files.Place)."""

    path: Path

    @cached_property
    def contents(self) -> Contents:
        """Read from the header when it is first needed. LoadError as `read_contents`."""
        return read_contents(self.path)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.contents.parts)

    def config(self, part: str) -> dict[str, Any]:
        return self.contents.part(part).weights.config

    def open(self, part: str) -> WeightFiles:
        return self.contents.part(part).weights

    def stamp(self, part: str) -> str:
        return digest(self.path.parent, [self.path])

    @property
    def unused(self) -> tuple[str, ...]:
        return self.contents.unused

    @property
    def low(self) -> None:
        return None

    @property
    def boundary(self) -> None:
        return None

    @property
    def shift(self) -> float:
        return DEFAULT_SHIFT

    @property
    def text(self) -> TextFacts:
        self._tokenizer()
        return TextFacts(wan_transformer.TEXT_TOKENS, ())

    def tokens(self) -> PieceTokens:
        return PieceTokens(self._tokenizer().read(), self.path.name, wan_transformer.TEXT_TOKENS)

    def _tokenizer(self) -> Entry:
        """The sentencepiece model in a text encoder's file. LoadError if there is none."""
        entries = read_header(self.path).entries
        held = next((entries[name] for name in TOKENIZERS if name in entries), None)
        if held is None:
            raise LoadError(f"{self.path.name} holds no tokenizer ({umt5_file.TOKENIZER}); take ComfyUI's file of this "
                            "text encoder, such as umt5_xxl_fp8_e4m3fn_scaled.safetensors")
        return held
