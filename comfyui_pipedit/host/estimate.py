"""How much memory a piece of work takes on each of its GPUs, from file headers and shapes alone.

What is counted is what is alive at the peak: tensors, without kernels' workspaces and an allocator's rounding. So the
numbers are a lower bound, a few per cent low for a transformer; they never refuse what would fit. A peak that ranks
measured takes an estimate's place (host/claims.py). The factors come from walking diffusers' networks on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .. import loaders
from ..job import Geometry, Tiling, Weights
from ..loaders import precision

FAMILY = "wan"

MODULATED = 22
"""Bytes a token and channel while a 16-bit block is normed and modulated, which it is in float32."""
BESIDE_FFN = 4.4
"""Values a token and channel beside the two wide ones of a feed-forward: residual, input, a rest of text and tables."""
EXCHANGED = 14
"""Values a token and channel while ranks exchange: Q, K and V here, packed and there, outputs, residual, input."""
LATENT_STATE = 8
"""float32 latents that a solver, its noise, guidance and a network's padded input take."""
DECODED = 53
"""Values a pixel and channel of Wan 2.1's widest level, for one latent frame: samples, a convolution's input and
output, and its cache of two frames."""
DECODED_RESIDUAL = 85
"""The same for Wan 2.2's VAE, whose levels have a second path."""
ENCODED = 40
"""Values a pixel and channel of an encoder's widest level."""
FRAME_VALUE = 10
"""Bytes a value of the frames that are encoded: as they come, normalised, and in the network's dtype."""
TEXT, TEXT_TOKENS = 24, 512
"""Values a token and channel of a text encoder, and the longest text."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One network by its headers: bytes that a GPU holds, bytes of a value that is computed, and its config."""

    held: int
    value: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work as its memory sees it; equal pieces take equally much. kind: "denoise", "decode", "encode".

    shape: a latent's [1, C, T, h, w], frames' [F, H, W, 3], () for texts. ranks: how many share its tokens.
    """

    kind: str
    weights: Weights
    geometry: Geometry | None = None
    shape: tuple[int, ...] = ()
    ranks: int = 1
    tiling: Tiling | None = None

    @property
    def label(self) -> str:
        """"832x480x81" of a clip; else what is done."""
        if self.geometry is None or not self.shape:
            return "a text" if self.weights.part == "text" else self.kind
        if len(self.shape) == 4:
            length, height, width = self.shape[:3]
            return f"{width}x{height}x{length}"
        length, height, width = self.shape[-3:]
        scale = self.geometry.spatial
        return f"{width * scale}x{height * scale}x{self.geometry.num_frames(length)}"

    def of_length(self, latent_frames: int) -> Work:
        """The same of a clip of another length."""
        return replace(self, shape=(*self.shape[:2], latent_frames, *self.shape[3:]))


@lru_cache(maxsize=64)
def facts(weights: Weights) -> Facts | None:
    """What the headers say; None for weights without files. LoadError if a file is missing or was replaced."""
    if not weights.path:
        return None
    files = loaders.open_weights(weights)
    held = precision.on_a_gpu(weights.family, weights.part, weights.dtype, files.stored_dtype)
    return Facts(precision.held_bytes(files.entries, held), held.compute.itemsize, files.config)


def weight_bytes(weights: Weights) -> int:
    """Bytes that a network takes on a GPU; 0 where no file tells."""
    known = facts(weights)
    return 0 if known is None else known.held


def activation_bytes(work: Work) -> int:
    """Bytes that the work takes on each of its GPUs beside the weights; 0 for a family without a formula."""
    known = facts(work.weights)
    if known is None or work.weights.family != FAMILY:
        return 0
    config, value = known.config, known.value
    if work.weights.part == "text":
        return TEXT * int(config["d_model"]) * TEXT_TOKENS * value
    assert work.geometry is not None
    if work.kind == "denoise":
        return denoising(config, work.geometry, work.shape, work.ranks, value)
    if work.kind == "decode":
        return decoding(config, work.geometry, work.shape, work.tiling, value)
    return encoding(config, work.shape, work.tiling, value)


def denoising(config: Mapping[str, Any], geometry: Geometry, shape: tuple[int, ...], ranks: int, value: int) -> int:
    """tokens / ranks x the widest moment of a block + the latents of a solver. Branches come one after the other.

    A block of width D and feed-forward F is widest in its norms (22 D bytes), in its feed-forward (4.4 D + 2 F values),
    or in the exchange of several ranks (14 D values).
    """
    width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    moments = [MODULATED * width, (BESIDE_FFN * width + 2 * int(config["ffn_dim"])) * value]
    if ranks > 1:
        moments.append(EXCHANGED * width * value)
    tokens = -(-geometry.num_tokens(shape) // ranks)
    return int(tokens * max(moments)) + LATENT_STATE * 4 * math.prod(shape)


def decoding(config: Mapping[str, Any], geometry: Geometry, shape: tuple[int, ...], tiling: Tiling | None,
             value: int) -> int:
    """pixels x base channels x 53 values (85 for Wan 2.2), whatever the length: a decode is a stream of latent frames.
    A tile has fewer pixels, and its frames are held twice while they are put together."""
    patch = int(config.get("patch_size") or 1)
    width = int(config.get("decoder_base_dim") or config["base_dim"])
    factor = DECODED_RESIDUAL if config.get("is_residual") else DECODED
    height, across = (size * geometry.spatial for size in shape[-2:])
    frames = 0
    if tiling is not None:
        height, across = min(height, tiling.tile), min(across, tiling.tile)
        frames = 2 * 3 * value * height * across * min(geometry.num_frames(shape[2]), tiling.temporal_tile)
    return factor * width * value * (height // patch) * (across // patch) + frames


def encoding(config: Mapping[str, Any], shape: tuple[int, ...], tiling: Tiling | None, value: int) -> int:
    """pixels x base channels x 40 values + 10 bytes a value of the frames; of one tile if tiled."""
    patch = int(config.get("patch_size") or 1)
    length, height, width = shape[:3]
    if tiling is not None:
        length, height, width = min(length, tiling.temporal_tile), min(height, tiling.tile), min(width, tiling.tile)
    widest = ENCODED * int(config["base_dim"]) * value * (height // patch) * (width // patch)
    return widest + FRAME_VALUE * 3 * length * height * width


def longest(work: Work, room: int) -> int:
    """Frames of the longest clip of this size for which the work takes at most `room` bytes; 0 = none does."""
    assert work.geometry is not None
    lengths = range(work.shape[2], 0, -1)
    fits = next((length for length in lengths if activation_bytes(work.of_length(length)) <= room), 0)
    return work.geometry.num_frames(fits) if fits else 0
