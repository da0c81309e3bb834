"""Between VAE space, which ComfyUI's LATENT holds, and the model's normalised space."""

from __future__ import annotations

import torch
from torch import Tensor

from ..job import Geometry


def to_model(latent: Tensor, geometry: Geometry) -> Tensor:
    """(latent - mean) / std by channel; an all-zero latent stays zero, as in ComfyUI. [1, C, T, h, w] float32."""
    return normalised(latent, geometry) if torch.count_nonzero(latent) else latent


def normalised(latents: Tensor, geometry: Geometry) -> Tensor:
    """(latent - mean) / std by channel of one or more latents side by side, [B, k * C, T, h, w], zero or not."""
    mean, std = _statistics(latents, geometry)
    groups = latents.unflatten(1, (-1, geometry.channels))
    return ((groups - mean) / std).flatten(1, 2)


def to_vae(latent: Tensor, geometry: Geometry) -> Tensor:
    """latent * std + mean by channel: the other way."""
    mean, std = _statistics(latent, geometry)
    return latent * std + mean


def _statistics(latent: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, dtype=latent.dtype, device=latent.device).view(1, -1, 1, 1, 1)
                 for values in (geometry.mean, geometry.std))
    return mean, std
