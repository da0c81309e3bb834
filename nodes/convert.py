"""ComfyUI's LATENT, CONDITIONING and IMAGE to what the engine takes, and back: with conditioning.py, which reads one of
them, the only files that know both.

All checks that need no model are here, so that a graph fails with a clear text before anything is loaded or computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import DecodeRequest, EncodeRequest, Geometry, Job, ModelFiles, Tiling, Weights

from . import conditioning
from .conditioning import Conditioning

Latent = Mapping[str, Any]
RATIO_KEYS = ("downscale_ratio_spacial", "downscale_ratio_temporal")
EMPTY_LATENT = "EmptyHunyuanLatentVideo"
EMPTY_LATENTS = {16: EMPTY_LATENT, 48: "Wan22ImageToVideoLatent"}
"""Core's node for a model's latent channels."""
ALL_FRAMES = 1 << 20
"""Frames of a tile that is longer than any clip."""
SMALL_TILES = Tiling(256, 64, ALL_FRAMES, 1)
"""What ComfyUI's VAE.encode falls back to when memory is too small for the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a clip needs of a sampler node's widgets. levels: noise levels, falling, float32 on the CPU.

    noise_offset: see sampling.draw_noises. add_noise: False goes on from a latent with leftover noise. switch_step: see
    job.Job.
    """

    seed: int
    cfg: float
    sampler: str
    levels: Tensor
    noise_offset: int = 1
    add_noise: bool = True
    switch_step: int | None = None


@dataclass(frozen=True, slots=True)
class FollowUp:
    """How a clip is decoded by the pool right after its last step."""

    vae: Weights
    tiling: Tiling | None


# -- in -------------------------------------------------------------------------------------------------------------


def video_samples(latent: Latent, geometry: Geometry, model: str) -> Tensor:
    """The samples of a LATENT as float32 [B, C, T, h, w] on the CPU; the tensor itself where it is that already."""
    return checked_samples(latent["samples"], geometry, model).to("cpu", torch.float32)


def checked_samples(samples: Any, geometry: Geometry, model: str) -> Tensor:
    """`samples` if it is a latent of this model, else InvalidJob: nested, of another rank, or with other channels."""
    if getattr(samples, "is_nested", False):
        raise InvalidJob(
            f"the latent is a nested tensor (audio with video) and {model} makes video alone; use {EMPTY_LATENT}"
        )
    shape = list(samples.shape)
    if len(shape) != 5:
        raise InvalidJob(
            f"the latent has {len(shape)} dimensions, {shape}, and {model} needs 5: [batch, channels, frames, "
            f"height, width]; use {EMPTY_LATENT}"
        )
    if shape[1] != geometry.channels:
        raise InvalidJob(
            f"the latent has {shape[1]} channels and {model} needs {geometry.channels}; use "
            f"{EMPTY_LATENTS.get(geometry.channels, 'a latent of its own kind')}, and a VAE that belongs to the model"
        )
    if 0 in shape:
        raise InvalidJob(f"the latent is empty: {shape}")
    return samples


def noise_mask(latent: Latent, shape: Sequence[int]) -> Tensor | None:
    """The mask of a LATENT for samples of `shape`, scaled as ComfyUI scales it: float32 [B, 1 or C, T, h, w], CPU.

    A mask of fewer dimensions has a row a frame: [T, h, w], [T, 1, h, w] or [h, w]. InvalidJob for others.
    """
    mask = latent.get("noise_mask")
    if mask is None:
        return None
    if not 2 <= mask.dim() <= 5 or (mask.dim() == 5 and mask.shape[1] > shape[1]) or 0 in mask.shape:
        raise InvalidJob(f"the latent's noise_mask is {list(mask.shape)}, not [h, w], [frames, h, w] or "
                         "[batch, 1, frames, h, w]")
    mask = mask.to("cpu", torch.float32)
    if mask.dim() < 5:
        mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    mask = torch.nn.functional.interpolate(mask, size=tuple(shape[2:]), mode="trilinear")
    channels = range(1) if mask.shape[1] == 1 else range(shape[1])
    items = [item % mask.shape[0] for item in range(shape[0])]
    return mask[items][:, [channel % mask.shape[1] for channel in channels]]


def batch_noise(seed: int, samples: Tensor, batch_index: Sequence[int] | None) -> Tensor:
    """Noise for a whole batch as ComfyUI draws it: at once, or clip by clip up to the highest `batch_index`."""
    if batch_index is None:
        return sampling.draw_noise(seed, samples.shape)
    if len(batch_index) != samples.shape[0]:
        raise InvalidJob(f"the latent's batch_index has {len(batch_index)} entries for {samples.shape[0]} clips")
    one = (1, *samples.shape[1:])
    drawn = sampling.draw_noises(seed, one, max(batch_index) + 1, offset=0)
    return torch.cat([drawn[index] for index in batch_index])


def no_negative(cfg: float) -> InvalidJob:
    return InvalidJob(
        f"negative is not connected and cfg is {cfg}; connect a CLIP Text Encode (an empty text will do), "
        "or set cfg to 1"
    )


def jobs(
    files: ModelFiles,
    positive: Conditioning,
    negative: Conditioning | None,
    latent: Latent,
    settings: Settings,
    follow_up: FollowUp | None = None,
    label: str = "",
) -> list[Job]:
    """One job for each clip of the latent's batch; its noise is drawn whole, then cut."""
    if settings.cfg != 1.0 and negative is None:
        raise no_negative(settings.cfg)
    samples = video_samples(latent, files.geometry, files.name)
    table = sampling.solver_table(settings.sampler, settings.levels)
    noise = batch_noise(settings.seed, samples, latent.get("batch_index"))
    noise = noise if settings.add_noise else torch.zeros_like(noise)
    noises = sampling.draw_noises(settings.seed, samples.shape, table.num_noises, settings.noise_offset)
    count, mask = len(samples), noise_mask(latent, samples.shape)
    told = conditioning.read(positive, "positive", files)
    other = conditioning.read(negative, "negative", files) if negative is not None and settings.cfg != 1.0 else None

    def job(index: int) -> Job:
        clip = slice(index, index + 1)
        return Job(
            files=files,
            positive=told.branch(index, count),
            negative=None if other is None else other.branch(index, count),
            latent=samples[clip],
            noise=noise[clip],
            noises=tuple(whole[clip] for whole in noises),
            mask=None if mask is None else mask[clip],
            table=table,
            cfg=settings.cfg,
            seed=settings.seed,
            switch_step=settings.switch_step,
            decode=follow_up.vae if follow_up else None,
            tiling=follow_up.tiling if follow_up else None,
            label=label,
        )

    return [job(index) for index in range(count)]


def tiling(
    mode: str, geometry: Geometry, tile_size: int, overlap: int, temporal_size: int, temporal_overlap: int
) -> Tiling | None:
    """Decode's widgets with ComfyUI's limits (VAEDecodeTiled); None = whole frames. "auto" begins with whole frames."""
    if mode != "on":
        return None
    if tile_size < 4 * overlap:
        overlap = tile_size // 4
    if temporal_size < 2 * temporal_overlap:
        temporal_overlap //= 2
    frames = max(2, temporal_size // geometry.temporal)
    frames_over = max(1, min(frames // 2, temporal_overlap // geometry.temporal))
    return latent_tiling(geometry, tile_size // geometry.spatial, overlap // geometry.spatial, frames, frames_over)


def latent_tiling(geometry: Geometry, tile: int, overlap: int, frames: int, frames_over: int) -> Tiling:
    """The tiling of `vae.decode_tiled`, whose sizes are in latent pixels and latent frames."""
    return Tiling(
        tile * geometry.spatial, overlap * geometry.spatial, frames * geometry.temporal, frames_over * geometry.temporal
    )


def decodes(
    samples: Tensor, vae: Weights, geometry: Geometry, tiles: Tiling | None, label: str = ""
) -> list[DecodeRequest]:
    """One decode for each clip of a batch [B, C, T, h, w]."""
    clips = samples.to("cpu", torch.float32)
    return [DecodeRequest(vae, geometry, clips[i : i + 1], tiles, label) for i in range(clips.shape[0])]


def encode_tiling(
    tile_x: int | None, tile_y: int | None, overlap: int | None, frames: int | None, frames_over: int | None
) -> Tiling:
    """The tiling of `vae.encode_tiled`, whose sizes are in pixels and frames; None is ComfyUI's default."""
    given, defaults = (tile_x, tile_y, overlap, frames, frames_over), (512, 512, 64, ALL_FRAMES, 1)
    across, down, *others = (default if size is None else size for size, default in zip(given, defaults, strict=True))
    return Tiling(square(across, down), *others)


def square(tile_x: int, tile_y: int) -> int:
    """The side of a tile. InvalidJob if it has two."""
    if tile_x != tile_y:
        raise InvalidJob(f"tiles must be square, not {tile_x} x {tile_y}")
    return tile_x


def encodes(pixels: Tensor, vae: Weights, geometry: Geometry, tiles: Tiling | None = None) -> list[EncodeRequest]:
    """Encodes for IMAGE [F, H, W, C] (one clip) or [B, F, H, W, C], cut to whole latent pixels and frames."""
    if pixels.dim() not in (4, 5):
        raise InvalidJob(
            f"pixels must be [frames, height, width, 3] or [batch, frames, height, width, 3], not {list(pixels.shape)}"
        )
    clips = pixels if pixels.dim() == 5 else pixels.unsqueeze(0)
    for dim in (2, 3):
        size, extra = clips.shape[dim], clips.shape[dim] % geometry.spatial
        if size == extra:
            raise InvalidJob(f"pixels are {list(pixels.shape)}; height and width must be {geometry.spatial} or more")
        clips = clips.narrow(dim, extra // 2, size - extra)
    frames = (clips.shape[1] - 1) // geometry.temporal * geometry.temporal + 1
    clips = clips[:, :frames, ..., :3].to("cpu", torch.float32).contiguous()
    return [EncodeRequest(vae, geometry, clip, tiles) for clip in clips]


# -- out ------------------------------------------------------------------------------------------------------------


def latent_output(latent: Latent, samples: Tensor) -> dict[str, Any]:
    """The LATENT that came in, with other samples; the keys that ComfyUI's KSampler drops are dropped."""
    kept = {key: value for key, value in latent.items() if key not in RATIO_KEYS}
    return {**kept, "samples": samples}


def latent_file(samples: Tensor) -> dict[str, Tensor]:
    """What ComfyUI's Load Latent reads from a safetensors file."""
    return {"latent_tensor": samples.to("cpu").clone().contiguous(), "latent_format_version_0": torch.tensor([])}


def image_output(clips: Sequence[Tensor]) -> Tensor:
    """IMAGE [B * F, H, W, 3] of the clips' frames in order; a lone clip's frames as they are, not copied."""
    return clips[0] if len(clips) == 1 else torch.cat(list(clips))


def conditioning_output(text: Tensor, extra: Mapping[str, Any]) -> list[list[Any]]:
    """CONDITIONING of one plain entry, with the keys that ComfyUI gives Wan's text."""
    return [[text, {"pooled_output": None, **extra}]]
