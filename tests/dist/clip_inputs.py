"""Inputs of a test clip, and its latent computed without worker/: diffusers' network and the formulas by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit.sampling import (
    SolverTable,
    advance,
    draw_noise,
    draw_noises,
    finish,
    sigmas,
    solver_table,
    start,
)

if TYPE_CHECKING:
    from denoise_ranks import Settings

    from comfyui_pipedit.job import Geometry


@dataclass(frozen=True)
class ClipInputs:
    table: SolverTable
    latent: Tensor
    noise: Tensor
    noises: tuple[Tensor, ...]
    positive: Tensor
    negative: Tensor | None


def clip_inputs(settings: Settings) -> ClipInputs:
    shape = (1, 16, *settings.size)
    levels = sigmas("simple", settings.steps, shift=3.0, denoise=settings.denoise, sampler=settings.sampler)
    table = solver_table(settings.sampler, levels)
    texts = draw_noise(11, (2, tiny_wan.TEXT_TOKENS, tiny_wan.TEXT_WIDTH))
    texts[:, 7:] = 0.0
    return ClipInputs(
        table, torch.zeros(shape) if settings.empty else 2.0 * draw_noise(7, shape) + 0.3, draw_noise(5, shape),
        tuple(draw_noises(5, shape, table.num_noises)), texts[:1], texts[1:] if settings.cfg != 1.0 else None)


@torch.inference_mode()
def reference_latent(settings: Settings, geometry: Geometry) -> Tensor:
    """The finished latent in VAE space, on one process."""
    inputs, network = clip_inputs(settings), tiny_wan.transformer()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (geometry.mean, geometry.std))
    state = start(inputs.table, inputs.noise, inputs.latent if settings.empty else (inputs.latent - mean) / std)

    def denoised(x: Tensor, sigma: float, text: Tensor) -> Tensor:
        _, height, width = settings.size
        padded = torch.nn.functional.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
        velocity = network(padded, torch.tensor([sigma]) * 1000, text).sample[..., :height, :width]
        return x - sigma * velocity

    for step in inputs.table.steps:
        for row in step:
            guess = denoised(state.x, row.sigma, inputs.positive)
            if inputs.negative is not None:
                other = denoised(state.x, row.sigma, inputs.negative)
                guess = other + (guess - other) * settings.cfg
            state = advance(row, state, guess, inputs.noises)
    return finish(inputs.table, state) * std + mean
