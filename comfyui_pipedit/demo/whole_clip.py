"""The Wan VAE over a whole clip in one pass, for training.

diffusers walks a clip frame group by frame group with cached features, which is right for long clips but leaves a GPU
idle on small ones. The walk equals plain causal convolutions over all frames if only the layers that resample time
treat the first frame as the walk does: it is passed on as it is, and time begins anew behind it.
"""
from __future__ import annotations

import types

import torch
from torch import nn


def encode_whole(vae: nn.Module, clips: torch.Tensor) -> torch.Tensor:
    """Clips [n, 3, frames, height, width] -> means of latents [n, z, 1 + (frames - 1) / 4, height / 8, width / 8]."""
    return vae.quant_conv(vae.encoder(clips)).chunk(2, dim=1)[0]


def decode_whole(vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Clips, not clamped, of latents as `encode_whole` makes them."""
    return vae.decoder(vae.post_quant_conv(latents))


def prepare_whole(vae: nn.Module) -> None:
    """Make the resampling layers of this `AutoencoderKLWan` take whole clips. It can't walk frame groups afterwards."""
    for module in vae.modules():
        if type(module).__name__ == "WanResample":
            module.forward = types.MethodType(_resample, module)


def _resample(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if self.mode == "upsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], _double_time(self.time_conv(x[:, :, 1:]))], dim=2)
    x = _each_frame(self.resample, x)
    if self.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x


def _double_time(pairs: torch.Tensor) -> torch.Tensor:
    """[n, 2 c, t, h, w], the halves being earlier and later frames, -> [n, c, 2 t, h, w]."""
    n, channels, frames, height, width = pairs.shape
    split = pairs.reshape(n, 2, channels // 2, frames, height, width)
    return torch.stack((split[:, 0], split[:, 1]), dim=3).reshape(n, channels // 2, 2 * frames, height, width)


def _each_frame(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    n, _, frames = x.shape[:3]
    out = layer(x.transpose(1, 2).flatten(0, 1))
    return out.unflatten(0, (n, frames)).transpose(1, 2)
