"""Noise drawn as ComfyUI draws it: on the CPU, whole, from the seed; it never depends on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidJob

MAX_SEED = 2**64 - 1


def draw_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Unit normal noise, float32 on the CPU: ComfyUI's for this seed. Draw a whole batch at once, then cut it."""
    return draw_noises(seed, shape, 1, offset=0)[0]


def draw_noises(seed: int, shape: Sequence[int], count: int, offset: int = 1) -> list[Tensor]:
    """`count` further noises of a solver that adds some, in the order it uses them, float32 on the CPU.

    offset: ComfyUI seeds this generator, on the CPU, with the clip's seed + 1 since January 2026; before that with the
    seed itself, so that its first draw was the noise the clip started from.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InvalidJob(f"seed {seed} is not available here; allowed: 0 to {MAX_SEED}")
    generator = torch.Generator("cpu").manual_seed((seed + offset) % (MAX_SEED + 1))
    return [torch.randn(tuple(shape), generator=generator) for _ in range(count)]
