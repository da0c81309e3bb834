"""From a path that a person picked to a model: what the host knows of it, and what a rank opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import LoadError, not_one_of
from ..job import Geometry, ModelFiles, Weights
from . import precision, wan_transformer
from .diffusers_dir import DiffusersFolder
from .single_file import SingleFile
from .tokens import TextTokens
from .wan_vae_file import SPATIAL, STATISTICS, TEMPORAL
from .weight_files import Place, TextFacts, WeightFiles

FAMILY = "wan"
NO_TEXT = TextFacts(wan_transformer.TEXT_TOKENS, ())


def place(path: str | Path) -> Place:
    """A folder in diffusers' layout or a single file. Nothing is read yet.

    A link keeps its own name: what it leads to, as in a download cache, may have a name that says nothing.
    """
    whole = Path(path).parent.resolve() / Path(path).name
    return SingleFile(whole) if whole.is_file() else DiffusersFolder(whole)


def inspect(path: str | Path) -> ModelFiles:
    """What the host knows of a folder, a transformer's file or a checkpoint, without loading weights.

    A transformer's file alone gives a model whose vae and text are None: see `combine` and `find_companions`.
    LoadError names the file and what is wrong with it: missing, another model, a variant that is not handled.
    """
    at = place(path)
    vae, text = (at if part in at.parts else None for part in ("vae", "text"))
    return _assembled(at, at.low, vae, text, at.path.name)


def combine(transformer: str | Path, vae: str | Path | None, text: str | Path | None, name: str,
            low: str | Path | None = None) -> ModelFiles:
    """A model out of separate places, each a file or a folder that holds that part. LoadError if they do not fit.

    low: Wan 2.2 A14B's expert for low noise; None = the one that the transformer's own folder has, if any.
    """
    at = place(transformer)
    second, decoder, encoder = (None if path is None else place(path) for path in (low, vae, text))
    return _assembled(at, second or at.low, decoder, encoder, name)


def _assembled(at: Place, low: Place | None, vae: Place | None, text: Place | None, name: str) -> ModelFiles:
    config = at.config("transformer")
    facts = NO_TEXT if text is None else text.text
    if low is not None:
        _same_shape(config, low.config("transformer"), at.path, low.path)
    return ModelFiles(
        name=name,
        geometry=_geometry(at, vae, text, facts.tokens),
        transformer=_weights(at, "transformer"),
        vae=None if vae is None else _weights(vae, "vae"),
        text=None if text is None else _weights(text, "text"),
        shift=at.shift,
        vocabulary=facts.vocabulary,
        transformer_low=None if low is None else _weights(low, "transformer"),
        boundary=at.boundary or wan_transformer.boundary(config),
    )


def _same_shape(config: Mapping[str, Any], other: Mapping[str, Any], path: Path, low: Path) -> None:
    """LoadError if two experts cannot take turns on one clip."""
    for key in ("in_channels", "out_channels", "text_dim", "num_attention_heads", "image_dim", "vace_layers"):
        if config.get(key) != other.get(key):
            raise LoadError(f"{path.name} and {low.name} are no two experts of one model: {key} is {config.get(key)} "
                            f"and {other.get(key)}")


def _weights(at: Place, part: str) -> Weights:
    return Weights(FAMILY, part, str(at.path), stamp=at.stamp(part))


def _geometry(at: Place, vae: Place | None, text: Place | None, tokens: int) -> Geometry:
    transformer = at.config("transformer")
    _need(transformer, at.path, "in_channels", "text_dim", "patch_size", "num_attention_heads")
    wan_transformer.kind(transformer, at.path.name)
    channels = int(transformer.get("out_channels") or transformer["in_channels"])
    width = int(transformer["text_dim"])
    if text is not None and (wide := text.config("text").get("d_model")) != width:
        raise LoadError(f"{text.path.name}: its d_model {wide} is not the transformer's text_dim {width}")
    mean, std, spatial, temporal = _latents(channels, at, vae)
    return Geometry(channels=channels, spatial=spatial, temporal=temporal, patch=tuple(transformer["patch_size"]),
                    text_width=width, text_tokens=tokens, num_heads=int(transformer["num_attention_heads"]),
                    mean=mean, std=std)


def _latents(channels: int, at: Place, vae: Place | None) -> tuple[tuple[float, ...], tuple[float, ...], int, int]:
    """(mean, std, spatial, temporal) of the latents: the VAE's, without one those of Wan's for these channels."""
    if vae is None:
        if channels not in STATISTICS:
            raise LoadError(f"{at.path.name} has {channels} latent channels; Wan's have "
                            f"{' or '.join(map(str, STATISTICS))}")
        return *STATISTICS[channels], SPATIAL[channels], TEMPORAL
    config = vae.config("vae")
    _need(config, vae.path, "latents_mean", "latents_std", "dim_mult", "temperal_downsample")
    mean, std = (tuple(map(float, config[key])) for key in ("latents_mean", "latents_std"))
    z = config.get("z_dim", channels)
    if not len(mean) == len(std) == channels == z:
        raise LoadError(f"{vae.path.name}: the VAE's z_dim {z}, {len(mean)} means and {len(std)} stds do not fit the "
                        f"transformer's {channels} channels ({at.path.name})")
    spatial = 2 ** (len(config["dim_mult"]) - 1) * int(config.get("patch_size") or 1)
    return mean, std, spatial, 2 ** sum(map(bool, config["temperal_downsample"]))


def _need(config: Mapping[str, Any], path: Path, *keys: str) -> None:
    for key in keys:
        if config.get(key) is None:
            raise LoadError(f"the config of {path} has no {key!r}")


def open_weights(weights: Weights) -> WeightFiles:
    """Config and headers of one network. LoadError if a file is missing, damaged, or not the one that is meant."""
    opened = place(weights.path).open(weights.part)
    if weights.stamp not in ("", stamp(Path(weights.path), weights.part)):
        raise LoadError(f"{opened.place} was changed after the graph had read it; queue again to use what is there now")
    return opened


def open_tokens(path: str | Path) -> TextTokens:
    """The tokenizer of a text encoder, for workers. LoadError if it is missing."""
    return place(path).tokens()


def stamp(path: Path, part: str) -> str:
    """The state of one network's files, as their names, sizes and times of change make it: 16 hex digits."""
    return place(path).stamp(part)


def converted_bytes(weights: Weights, *, on_gpu: bool) -> int:
    """Bytes of the shared buffer for a network's converted copy; 0 = ranks use the mapped file as it is.

    GPU ranks convert on the GPU and need none; neither do weights without a path (a family that reads no files).
    """
    if on_gpu or not weights.path:
        return 0
    layout = buffer_layout(weights, open_weights(weights), precision.DTYPES.get(weights.dtype, precision.CPU_DEFAULT))
    return precision.layout_bytes(layout)


def buffer_layout(weights: Weights, files: WeightFiles, compute: torch.dtype) -> dict[str, precision.Slot]:
    """Where the converted tensors of one network lie in the shared buffer."""
    held = precision.rules(weights.family, weights.part, weights.dtype, compute)
    return precision.converted_layout(files.entries, files.scales, held)


def check_dtype(name: str) -> str:
    """A weight dtype that is handled. InvalidJob naming the allowed ones otherwise."""
    allowed = ("default", *precision.DTYPES, *precision.FP8_NAMES)
    if name not in allowed:
        raise not_one_of("weight_dtype", name, allowed)
    return name
