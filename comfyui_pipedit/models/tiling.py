"""Tiled decode and encode with ComfyUI's tiles and blending; of a decode, finished frames first.

A clip is cut into overlapping boxes of latent cells (time, height, width). What a box gives is weighted with ramps of
(i + 1) / feather at both ends of each axis (feather: the overlap, in frames and pixels for a decode, in cells for an
encode); weighted boxes and weights are summed and divided. Boxes are visited in order of time, so frames in front of
the next box's first one are finished and can be handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        """Frames or pixels of `cells` neighbouring cells."""
        return max(0, cells * self.scale - (self.scale - 1)) if self.first_short else cells * self.scale

    def cells(self, samples: int) -> int:
        """Whole cells in so many frames or pixels."""
        return (samples + self.scale - 1) // self.scale if self.first_short else samples // self.scale

    @property
    def starts(self) -> tuple[int, ...]:
        """First cell of each box."""
        if self.size <= self.tile:
            return (0,)
        return tuple(max(0, min(self.size - self.overlap, start))
                     for start in range(0, self.size - self.overlap, self.tile - self.overlap))

    def box(self, start: int) -> slice:
        """Cells of the box that begins at `start`."""
        return slice(start, min(start + self.tile, self.size))

    def span(self, start: int) -> slice:
        """Frames or pixels of the box that begins at `start`."""
        box = self.box(start)
        return slice(start * self.scale, start * self.scale + self.samples(box.stop - start))


Cut = tuple[Axis, Axis, Axis]


def axes(shape: tuple[int, ...], tiling: Tiling, geometry: Geometry) -> Cut:
    """Axes of a latent [1, C, T, h, w], with the limits that ComfyUI's VAEDecodeTiled puts on widgets."""
    overlap = min(tiling.overlap, tiling.tile // 4)
    short = tiling.temporal_tile < 2 * tiling.temporal_overlap
    temporal_overlap = tiling.temporal_overlap // 2 if short else tiling.temporal_overlap
    time = max(2, tiling.temporal_tile // geometry.temporal)
    time_overlap = max(1, min(time // 2, temporal_overlap // geometry.temporal))
    tile, overlap = max(1, tiling.tile // geometry.spatial), overlap // geometry.spatial
    height, width = (Axis(size, tile, overlap, geometry.spatial) for size in shape[-2:])
    return Axis(shape[-3], time, time_overlap, geometry.temporal, first_short=True), height, width


def encode_axes(shape: tuple[int, ...], tiling: Tiling, geometry: Geometry) -> Cut:
    """Axes of frames [F, H, W, 3], with the limits that ComfyUI's VAE.encode_tiled puts on its sizes."""
    time = Axis(0, 0, 0, geometry.temporal, first_short=True)
    tile = max(2, time.cells(tiling.temporal_tile))
    overlap = max(1, min(tile // 2, time.cells(tiling.temporal_overlap)))
    time = replace(time, size=time.cells(shape[0]), tile=tile, overlap=overlap)
    height, width = (Axis(size // geometry.spatial, tiling.tile // geometry.spatial,
                          tiling.overlap // geometry.spatial, geometry.spatial) for size in shape[1:3])
    return time, height, width


def num_tiles(cut: tuple[Axis, ...]) -> int:
    """Boxes in all."""
    return math.prod(len(axis.starts) for axis in cut)


def decode_tiles(decode: Callable[[Tensor], Tensor], latent: Tensor, cut: Cut) -> Iterator[Tensor]:
    """One piece a box: the frames [1, C, f, H, W] float32 on the CPU that it finished, often none.

    decode: latent box -> samples [1, C, frames, H, W], neither clamped nor rescaled.
    """
    time, height, width = cut
    if num_tiles(cut) == 1:
        yield decode(latent).float().cpu()
        return
    sums = torch.zeros(1, 3, *(axis.samples(axis.size) for axis in cut))
    weights = torch.zeros(1, 1, *sums.shape[2:])
    feathers = [axis.samples(axis.overlap) for axis in cut]
    boxes = list(product(time.starts, height.starts, width.starts))
    done = 0
    for box, following in zip(boxes, [*boxes[1:], None], strict=True):
        cells, place = ([*map(of, cut, box)] for of in (Axis.box, Axis.span))
        _add(decode(latent[(..., *cells)]), place, feathers, sums, weights)
        finished = time.samples(time.size) if following is None else following[0] * time.scale
        yield sums[:, :, done:finished] / weights[:, :, done:finished]
        done = finished


def encode_tiles(encode: Callable[[Tensor], Tensor], samples: Tensor, channels: int, cut: Cut) -> Tensor:
    """The latent float32 [1, channels, T, h, w] on the CPU of samples [1, 3, F, H, W].

    encode: box of samples -> its latent.
    """
    if num_tiles(cut) == 1:
        return encode(samples).float().cpu()
    sums = torch.zeros(1, channels, *(axis.size for axis in cut))
    weights = torch.zeros(1, 1, *sums.shape[2:])
    for box in product(*(axis.starts for axis in cut)):
        cells, place = ([*map(of, cut, box)] for of in (Axis.box, Axis.span))
        _add(encode(samples[(..., *place)]), cells, [axis.overlap for axis in cut], sums, weights)
    return sums / weights


def _add(made: Tensor, place: Sequence[slice], feathers: Sequence[int], sums: Tensor, weights: Tensor) -> None:
    """Adds what came of a box, weighted, and its weights."""
    made = made.float().cpu()
    time, height, width = map(_ramp, made.shape[2:], feathers)
    weight = time[:, None, None] * height[:, None] * width
    sums[(..., *place)] += made * weight
    weights[(..., *place)] += weight


def _ramp(size: int, feather: int) -> Tensor:
    """Weights of a box along one axis: none fades where the ramps would be as long as the box."""
    weights = torch.ones(size)
    if feather < size:
        slope = torch.arange(1, feather + 1) / feather
        weights[:feather] *= slope
        weights[size - feather:] *= slope.flip(0)
    return weights
