"""Sampling the demo model without the pool: what training looks at, and a reference that shares nothing with it."""
from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

from .clips import FRAMES, SIZE
from .save import SCHEDULER, SHIFT


def starting_noise(seeds: list[int]) -> torch.Tensor:
    """Noise for 17 x 96 x 96 clips, one seed a clip, as ComfyUI draws it: on the CPU, fp32 [n, 16, 5, 12, 12]."""
    shape = (1, 16, (FRAMES - 1) // 4 + 1, SIZE // 8, SIZE // 8)
    return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def simple_sigmas(steps: int) -> list[float]:
    """ComfyUI's "simple" schedule with the demo's shift: `steps` noise levels from 1 downwards, and 0."""
    times = [(1000 - int(i * 1000 / steps)) / 1000 for i in range(steps)]
    return [SHIFT * t / (1 + (SHIFT - 1) * t) for t in times] + [0.0]


def guided(
    transformer: torch.nn.Module, text: torch.Tensor, empty: torch.Tensor, cfg: float
) -> Callable[..., torch.Tensor]:
    """Velocity under classifier-free guidance as a function of latents and noise level. `empty` has a batch of 1."""
    both = torch.cat([empty.expand_as(text), text])

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        time = torch.full((len(both),), 1000 * sigma, device=x.device)
        without, wanted = transformer(torch.cat([x, x]), time, both, return_dict=False)[0].float().chunk(2)
        return without + cfg * (wanted - without)

    return velocity


@torch.no_grad()
def euler(velocity: Callable[..., torch.Tensor], x: torch.Tensor, steps: int) -> torch.Tensor:
    """Normalised latents by Euler steps over the simple schedule."""
    sigmas = simple_sigmas(steps)
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        x = x + (following - sigma) * velocity(x, sigma)
    return x


@torch.no_grad()
def uni_pc(velocity: Callable[..., torch.Tensor], x: torch.Tensor, steps: int) -> torch.Tensor:
    """Normalised latents by diffusers' UniPC and its own flow schedule."""
    scheduler = UniPCMultistepScheduler(**{name: value for name, value in SCHEDULER.items() if name[0] != "_"})
    scheduler.set_timesteps(steps)
    for index, time in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, scheduler.sigmas[index].item()), time, x, return_dict=False)[0]
    return x


@torch.no_grad()
def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips [n, frames, height, width, 3] in 0..1 of normalised latents."""
    mean, std = (torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
                 for values in (vae.config.latents_mean, vae.config.latents_std))
    return (vae.decode(latents * std + mean).sample.permute(0, 2, 3, 4, 1) + 1) / 2
