"""A preload file, after toy_family.py: the family "filed", whose VAE multiplies by a number out of its weight file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.job import Geometry, Tiling

toy = models.family("toy")


class Gain(nn.Module):
    """x -> gain * x."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain, requires_grad=False)


class Filed(type(toy)):  # type: ignore[misc]
    """The toy family with a VAE that is read from a folder."""

    name = "filed"

    def load_vae(self, source: Any) -> nn.Module:
        return Gain(dict(source.tensors())["gain"])

    def decode_pieces(self, vae: nn.Module, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        for frame in latent[0].unbind(1):
            yield torch.as_tensor(vae.gain * frame.mean(0))[None, :, :, None].expand(1, -1, -1, 3)


models.register("filed", Filed())
