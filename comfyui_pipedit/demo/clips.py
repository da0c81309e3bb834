"""Procedural clips: one flat shape that moves in a straight line over a flat background, drawn in batches."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .words import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, SPEEDS

FRAMES, SIZE = 17, 96
RADIUS = (10.0, 17.0)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What each clip of a batch shows: indices into the tables of `words.py`, each int64 [clips]."""

    colour: torch.Tensor
    shape: torch.Tensor
    direction: torch.Tensor
    speed: torch.Tensor
    background: torch.Tensor


def random_attributes(clips: int, device: torch.device, generator: torch.Generator | None = None) -> Attributes:
    """Independent, equally likely attributes for a batch."""
    sizes = (len(COLOURS), len(SHAPES), len(DIRECTIONS), len(SPEEDS), len(BACKGROUNDS))
    return Attributes(*(torch.randint(size, (clips,), device=device, generator=generator) for size in sizes))


class Painter:
    """Draws clips on one device. Its tables are made once, so that drawing can be part of a captured CUDA graph."""

    def __init__(self, device: torch.device, size: int = SIZE) -> None:
        self.device, self.size = device, size
        self.colours = _palette(tuple(COLOURS.values()), device)
        self.backgrounds = _palette(tuple(BACKGROUNDS.values()), device)
        self.directions = torch.tensor(tuple(DIRECTIONS.values()), device=device)
        self.speeds = torch.tensor(tuple(SPEEDS.values()), device=device)
        line = torch.arange(size, device=device, dtype=torch.float32)
        self.rows, self.columns = torch.meshgrid(line, line, indexing="ij")

    def paint(self, shown: Attributes, frames: int = FRAMES) -> torch.Tensor:
        """Clips [n, 3, frames, size, size] in -1..1, float32. Radius and path are random; a shape stays in the frame.

        Fewer than FRAMES frames show the beginning of the same motion.
        """
        clips = shown.colour.shape[0]
        radius = RADIUS[0] + (RADIUS[1] - RADIUS[0]) * torch.rand(clips, device=self.device)
        x, y = self._offsets(shown, radius, frames)
        inside = torch.sigmoid(-1.5 * _signed_distance(x, y, radius[:, None, None, None], shown.shape))[:, None]
        colour = self.colours[shown.colour][:, :, None, None, None]
        background = self.backgrounds[shown.background][:, :, None, None, None]
        return inside * colour + (1 - inside) * background

    def _offsets(self, shown: Attributes, radius: torch.Tensor, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Horizontal and vertical distance of each pixel from the shape's centre: two of [n, frames, size, size]."""
        length = (frames - 1) / (FRAMES - 1)
        travel = self.speeds[shown.speed] * (self.size - 2 * radius) * 0.95 * length
        time = torch.linspace(0, 1, frames, device=self.device)
        result = []
        for axis, grid in ((0, self.columns), (1, self.rows)):
            way = self.directions[shown.direction][:, axis] * travel
            room = self.size / 2 - radius - way.abs() / 2
            start = self.size / 2 - way / 2 + room * (2 * torch.rand_like(radius) - 1)
            result.append(grid - (start[:, None] + way[:, None] * time)[:, :, None, None])
        return result[0], result[1]


def _palette(colours: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(colours, device=device, dtype=torch.float32) / 127.5 - 1


def _signed_distance(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """About how many pixels a point lies outside its clip's shape; negative inside."""
    circle = (x * x + y * y).sqrt() - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    slope = 0.866 * x.abs() - 0.5 * y - 0.62 * radius
    triangle = torch.maximum(y - 0.7 * radius, slope)
    pick = shape[:, None, None, None]
    return torch.where(pick == 0, circle, torch.where(pick == 1, square, triangle))
