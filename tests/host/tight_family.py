"""A preload file, after toy_family.py: the family "tight", whose decode has room for two whole frames, or for tiles.

It is out of memory at the third frame of a decode without tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.job import Geometry, Tiling

WHOLE_FRAMES = 2
toy = models.family("toy")


class Tight(type(toy)):  # type: ignore[misc]
    """The toy family with little memory."""

    name = "tight"

    def decode_pieces(self, vae: nn.Module, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        for number, piece in enumerate(super().decode_pieces(vae, latent, tiling, geometry)):
            if tiling is None and number == WHOLE_FRAMES:
                raise OutOfMemory("CPU rank 2 is out of memory: 1.5 GiB short")
            yield piece


models.register("tight", Tight())
