"""Wan's causal VAEs, 2.1 and 2.2: decode latent frame by latent frame, tiled decode, encode.

The network walks a clip with a cache of each convolution's last inputs, so its decode can stop after any latent frame.
The cache is ours and not the network's own, so that several decodes may take turns on one network.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

from ..errors import InvalidJob
from ..job import Geometry, Tiling
from . import tiling as tiles
from .family import WeightSource
from .skeleton import assign, on_meta


def load_vae(source: WeightSource) -> AutoencoderKLWan:
    """The network with the source's tensors."""
    vae = on_meta(lambda: AutoencoderKLWan.from_config(source.config))
    assign(vae, source.tensors(), f"{source.root.name}'s vae")
    return vae


def num_pieces(shape: tuple[int, ...], tiling: Tiling | None, geometry: Geometry) -> int:
    """Latent frames of a whole decode, boxes of a tiled one."""
    return shape[2] if tiling is None else tiles.num_tiles(tiles.axes(shape, tiling, geometry))


def decode_pieces(vae: AutoencoderKLWan, latent: Tensor, tiling: Tiling | None, geometry: Geometry) -> Iterator[Tensor]:
    """Pieces of frames float32 [f, H, W, 3] in 0..1 of a latent [1, C, T, h, w] in VAE space, in order."""
    if tiling is None:
        yield from map(to_frames, stream(vae, latent))
        return

    def decode_box(box: Tensor) -> Tensor:
        return torch.cat(list(stream(vae, box)), dim=2)

    yield from map(to_frames, tiles.decode_tiles(decode_box, latent, tiles.axes(tuple(latent.shape), tiling, geometry)))


def stream(vae: AutoencoderKLWan, latent: Tensor) -> Iterator[Tensor]:
    """Samples [1, 3, f, H, W] about -1..1, not clamped, a latent frame at a time: the first gives one frame, the others
    the temporal factor each."""
    cells = vae.post_quant_conv(latent.to(vae.post_quant_conv.weight))
    cache = [None] * vae._cached_conv_counts["decoder"]
    for i in range(cells.shape[2]):
        samples = vae.decoder(cells[:, :, i:i + 1], feat_cache=cache, feat_idx=[0], first_chunk=i == 0)
        yield unpatchify(samples, vae.config.patch_size or 1)


def to_frames(samples: Tensor) -> Tensor:
    """Samples [1, 3, f, H, W] -> frames float32 [f, H, W, 3] in 0..1, by ComfyUI's formula."""
    return ((samples[0].float() + 1.0) / 2.0).clamp_(0.0, 1.0).movedim(0, -1)


def vae_encode(vae: AutoencoderKLWan, frames: Tensor, tiling: Tiling | None, geometry: Geometry) -> Tensor:
    """Frames float32 [F, H, W, 3] in 0..1 -> latent float32 [1, C, T, h, w] in VAE space: the mode of the posterior.

    As ComfyUI does: rows and columns beyond the spatial factor are cut evenly on both sides, frames beyond a multiple
    of the temporal factor plus one at the end. Of a tiled encode only a tile is on the network's device at a time.
    InvalidJob for frames smaller than one latent cell.
    """
    scale = 2 ** (len(vae.config.dim_mult) - 1) * (vae.config.patch_size or 1)
    if frames.dim() != 4 or frames.shape[0] < 1 or min(frames.shape[1:3]) < scale or frames.shape[3] < 3:
        raise InvalidJob(f"frames to encode are [F, H, W, 3], at least one of {scale}x{scale} pixels, "
                         f"not {list(frames.shape)}")
    samples = _cropped(frames[..., :3], scale)

    def encode_box(box: Tensor) -> Tensor:
        signed = box.to(vae.quant_conv.weight.device) * 2.0 - 1.0
        return vae.encode(signed.to(vae.quant_conv.weight)).latent_dist.mode().float()

    whole = samples.movedim(-1, 0)[None]
    if tiling is None:
        return encode_box(whole)
    cut = tiles.encode_axes(tuple(samples.shape), tiling, geometry)
    return tiles.encode_tiles(encode_box, whole, geometry.channels, cut)


def _cropped(frames: Tensor, scale: int) -> Tensor:
    for dim in (1, 2):
        surplus = frames.shape[dim] % scale
        frames = frames.narrow(dim, surplus // 2, frames.shape[dim] - surplus)
    return frames
