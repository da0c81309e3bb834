"""Multi-GPU Sampler: KSampler's widgets, and everything behind them in the pool."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from . import convert, inputs, waiting
from .compat import make
from .handles import PoolModel
from .inputs import UNLINKED
from .loader import CATEGORY
from .running import run
from .solving import Widgets

NAME = "Multi-GPU Sampler"


class PipeDiTSampler(inputs.SamplerNode):
    """Denoises on the pool."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="PipeDiTSampler",
            display_name=NAME,
            category=CATEGORY,
            description="KSampler on a pool of processes: GPUs denoise one clip together, and a Decoupled VAE Decode "
            "that is linked here begins right after the last step while the next clip is denoised.",
            search_aliases=["ksampler", "multi gpu sampler", "parallel sampler", "wan sampler"],
            inputs=[
                *inputs.links(),
                inputs.seed("seed"),
                *inputs.solver(),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Below 1 the latent is kept in part and only the last steps are done.",
                ),
                inputs.shift(),
                make(
                    io.Int.Input,
                    "switch_step",
                    default=-1,
                    min=-1,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="Step at which the low-noise model takes over. -1: the model's own boundary.",
                ),
            ],
            outputs=[inputs.latent_output()],
            hidden=[io.Hidden.prompt],
        )

    @classmethod
    async def execute(
        cls,
        model: PoolModel,
        positive: convert.Conditioning,
        latent_image: convert.Latent,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        negative: convert.Conditioning | None = None,
        sigmas: torch.Tensor | None = None,
        plan: Any = UNLINKED,
        shift: float = 0.0,
        switch_step: int = -1,
    ) -> io.NodeOutput:
        """The denoised LATENT; times of each stage in the node's ui output."""
        asked = Widgets(
            seed, steps, cfg, sampler_name, scheduler, denoise, shift, sigmas=sigmas, switch_step=switch_step
        )
        with waiting.naming(NAME):
            inputs.refuse_plan(plan)
            if denoise == 0.0 and sigmas is None:
                return io.NodeOutput(dict(latent_image))
            return await run(cls.hidden.prompt or {}, model, positive, negative, latent_image, asked)
