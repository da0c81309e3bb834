"""Tiled decode with ComfyUI's tiles and blending, finished frames first.

A clip is cut into overlapping boxes of latent cells (time, height, width). Each decoded box is weighted with ramps of
(i + 1) / feather at both ends of each axis; weighted boxes and weights are summed and divided. Boxes are visited in
order of time, so frames in front of the next box's first one are finished and can be handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..job import Geometry, Tiling


@dataclass(frozen=True, slots=True)
class Axis:
    """Boxes along one axis, in latent cells. `first_short`: time, whose first cell gives one sample."""

    size: int
    tile: int
    overlap: int
    scale: int
    first_short: bool = False

    def samples(self, cells: int) -> int:
        """Frames or pixels that decode from `cells` neighbouring cells."""
        return max(0, cells * self.scale - (self.scale - 1)) if self.first_short else cells * self.scale

    @property
    def starts(self) -> tuple[int, ...]:
        """First cell of each box."""
        if self.size <= self.tile:
            return (0,)
        return tuple(max(0, min(self.size - self.overlap, start))
                     for start in range(0, self.size - self.overlap, self.tile - self.overlap))

    def length(self, start: int) -> int:
        """Cells of the box that begins at `start`."""
        return min(self.tile, self.size - start)

    def ramp(self, samples: int) -> Tensor:
        """Weights of a decoded box along this axis."""
        weights, feather = torch.ones(samples), self.samples(self.overlap)
        if feather < samples:
            slope = torch.arange(1, feather + 1) / feather
            weights[:feather] *= slope
            weights[samples - feather:] *= slope.flip(0)
        return weights


def axes(shape: tuple[int, ...], tiling: Tiling, geometry: Geometry) -> tuple[Axis, Axis, Axis]:
    """Axes of a latent [1, C, T, h, w], with the limits that ComfyUI's VAEDecodeTiled puts on widgets."""
    overlap = min(tiling.overlap, tiling.tile // 4)
    short = tiling.temporal_tile < 2 * tiling.temporal_overlap
    temporal_overlap = tiling.temporal_overlap // 2 if short else tiling.temporal_overlap
    time = max(2, tiling.temporal_tile // geometry.temporal)
    time_overlap = max(1, min(time // 2, temporal_overlap // geometry.temporal))
    tile, overlap = max(1, tiling.tile // geometry.spatial), overlap // geometry.spatial
    height, width = (Axis(size, tile, overlap, geometry.spatial) for size in shape[-2:])
    return Axis(shape[-3], time, time_overlap, geometry.temporal, first_short=True), height, width


def num_tiles(cut: tuple[Axis, ...]) -> int:
    """Boxes in all."""
    return math.prod(len(axis.starts) for axis in cut)


def decode_tiles(decode: Callable[[Tensor], Tensor], latent: Tensor, cut: tuple[Axis, Axis, Axis]) -> Iterator[Tensor]:
    """One piece a box: the frames [1, C, f, H, W] float32 on the CPU that it finished, often none.

    decode: latent box -> samples [1, C, frames, H, W], neither clamped nor rescaled.
    """
    time, height, width = cut
    if num_tiles(cut) == 1:
        yield decode(latent).float().cpu()
        return
    sums = torch.zeros(1, 3, *(axis.samples(axis.size) for axis in cut))
    weights = torch.zeros(1, 1, *sums.shape[2:])
    boxes = list(product(time.starts, height.starts, width.starts))
    done = 0
    for box, following in zip(boxes, [*boxes[1:], None], strict=True):
        _add_box(decode, latent, cut, box, sums, weights)
        finished = time.samples(time.size) if following is None else following[0] * time.scale
        yield sums[:, :, done:finished] / weights[:, :, done:finished]
        done = finished


def _add_box(decode: Callable[[Tensor], Tensor], latent: Tensor, cut: tuple[Axis, Axis, Axis],
             box: tuple[int, int, int], sums: Tensor, weights: Tensor) -> None:
    """Decodes the box whose first cells are `box`, and adds it and its weights."""
    cells = [slice(start, start + axis.length(start)) for axis, start in zip(cut, box, strict=True)]
    samples = decode(latent[(..., *cells)]).float().cpu()
    ramps = [axis.ramp(size) for axis, size in zip(cut, samples.shape[2:], strict=True)]
    weight = ramps[0][:, None, None] * ramps[1][:, None] * ramps[2]
    place = (..., *(slice(start * axis.scale, start * axis.scale + size)
                    for axis, start, size in zip(cut, box, samples.shape[2:], strict=True)))
    sums[place] += samples * weight
    weights[place] += weight
