"""A preload file: Wan whose decode runs out of memory at its second piece, and its encode at once, unless tiled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.job import Geometry, Tiling

wan = models.family("wan")
SHORT = "CPU rank 2 is out of memory: 1.5 GiB short"


class Tight(type(wan)):  # type: ignore[misc]
    """Wan on a rank with little memory."""

    def decode_pieces(self, vae: nn.Module, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        pieces = super().decode_pieces(vae, latent, tiling, geometry)
        if tiling is not None:
            return pieces
        return self._cut_off(pieces)

    def _cut_off(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        yield from islice(pieces, 1)
        raise OutOfMemory(SHORT)

    def vae_encode(self, vae: nn.Module, frames: Tensor, tiling: Tiling | None, geometry: Geometry) -> Tensor:
        if tiling is None:
            raise OutOfMemory(SHORT)
        return super().vae_encode(vae, frames, tiling, geometry)


models.register("wan", Tight())
