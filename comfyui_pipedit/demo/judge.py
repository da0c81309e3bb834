"""Says what a clip shows: colour, shape and direction of the one thing that moves on a flat background."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .words import COLOURS

FILL = {"square": 1.0, "circle": 0.79, "triangle": 0.5}
FILL_TOLERANCE = 0.1
LEAST_WAY = 6.0
LEAST_CONTRAST = 0.15


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a clip shows; "none" where it is nothing that the demo model can be asked for."""

    colour: str
    shape: str
    direction: str


def judge(clip: torch.Tensor) -> Verdict:
    """The verdict on a clip [frames, height, width, 3] of floats in 0..1.

    The colour is the palette entry nearest to the thing's mean colour and must be the same in every frame; the shape is
    told by area over bounding box, the median over the frames; the direction by the way from first to last centroid.
    A frame without one clear thing makes all three "none".
    """
    masks = thing_masks(clip.float())
    if masks is None:
        return Verdict("none", "none", "none")
    return Verdict(_colour(clip.float(), masks), _shape(masks), _direction(masks))


def thing_masks(clip: torch.Tensor) -> torch.Tensor | None:
    """Pixels of the one thing in each frame, bool [frames, height, width]; None if a frame has none or several."""
    pixels = clip.flatten(1, 2)
    distance = (pixels - pixels.median(1, keepdim=True).values).norm(dim=-1)
    contrast = distance.topk(pixels.shape[1] // 200, dim=1).values.mean(1, keepdim=True)
    if (contrast < LEAST_CONTRAST).any():
        return None
    masks = (distance > contrast / 2).unflatten(1, clip.shape[1:3])
    largest = _largest_parts(masks)
    return largest if (largest.sum((1, 2)) >= 0.9 * masks.sum((1, 2))).all() else None


def _largest_parts(masks: torch.Tensor) -> torch.Tensor:
    """The largest 8-connected part of each mask: labels spread to neighbours until none changes."""
    rows, columns = (masks.any(0).any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    box = (slice(None), slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    inside = masks[box]
    labels = torch.arange(1.0, inside[0].numel() + 1, device=masks.device).reshape(inside.shape[1:]) * inside
    spread = F.max_pool2d(labels, 3, stride=1, padding=1) * inside
    while not torch.equal(spread, labels):
        labels, spread = spread, F.max_pool2d(spread, 3, stride=1, padding=1) * inside
    biggest = torch.stack([frame[mask].mode().values for frame, mask in zip(labels, inside, strict=True)])
    parts = torch.zeros_like(masks)
    parts[box] = labels == biggest[:, None, None]
    return parts


def _colour(clip: torch.Tensor, masks: torch.Tensor) -> str:
    palette = torch.tensor(tuple(COLOURS.values()), device=clip.device) / 255
    mean = torch.stack([frame[_interior(mask)].mean(0) for frame, mask in zip(clip, masks, strict=True)])
    seen = set(torch.cdist(mean, palette).argmin(1).tolist())
    return tuple(COLOURS)[seen.pop()] if len(seen) == 1 else "none"


def _interior(mask: torch.Tensor) -> torch.Tensor:
    """The mask without its rim, where colours blend with the background; the mask itself if nothing would be left."""
    inner = F.max_pool2d((~mask).float()[None], 5, stride=1, padding=2)[0] == 0
    return inner if inner.any() else mask


def _shape(masks: torch.Tensor) -> str:
    boxes = masks.any(2).sum(1) * masks.any(1).sum(1)
    fill = (masks.sum((1, 2)) / boxes).median().item()
    name = min(FILL, key=lambda shape: abs(FILL[shape] - fill))
    return name if abs(FILL[name] - fill) <= FILL_TOLERANCE else "none"


def _direction(masks: torch.Tensor) -> str:
    first, last = (mask.nonzero().double().mean(0) for mask in (masks[0], masks[-1]))
    down, right = (last - first).tolist()
    if max(abs(down), abs(right)) < LEAST_WAY or min(abs(down), abs(right)) > max(abs(down), abs(right)) / 2:
        return "none"
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"
