"""Multi-GPU Sampler (Advanced): KSamplerAdvanced's widgets, for part of a run and for leftover noise."""

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
from .solving import FAR, Widgets

NAME = "Multi-GPU Sampler (Advanced)"
SWITCH = ("enable", "disable")


class PipeDiTSamplerAdvanced(inputs.SamplerNode):
    """Denoises some steps of a run on the pool."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="PipeDiTSamplerAdvanced",
            display_name=NAME,
            category=CATEGORY,
            description="KSampler (Advanced) on a pool of processes: some steps of a run, with leftover noise for the "
            "next sampler. Two of them with two Loaders are Wan 2.2's two models; one Loader with both does the same.",
            search_aliases=["ksampler advanced", "multi gpu sampler", "parallel sampler", "wan 2.2 sampler"],
            inputs=[
                *inputs.links(),
                io.Combo.Input(
                    "add_noise",
                    options=list(SWITCH),
                    default="enable",
                    tooltip="disable: the latent has its noise already, left over by the sampler before.",
                ),
                inputs.seed("noise_seed"),
                *inputs.solver(),
                io.Int.Input(
                    "start_at_step", default=0, min=0, max=FAR, tooltip="First step that is done, counted from 0."
                ),
                io.Int.Input(
                    "end_at_step", default=FAR, min=0, max=FAR, tooltip="Step before which it stops. Many: all of them."
                ),
                io.Combo.Input(
                    "return_with_leftover_noise",
                    options=list(reversed(SWITCH)),
                    default="disable",
                    tooltip="enable: stop at the noise level of end_at_step, for a sampler that goes on from there. "
                    "disable: the last step goes down to no noise.",
                ),
                inputs.shift(),
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
        add_noise: str,
        noise_seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        start_at_step: int,
        end_at_step: int,
        return_with_leftover_noise: str,
        negative: convert.Conditioning | None = None,
        sigmas: torch.Tensor | None = None,
        plan: Any = UNLINKED,
        shift: float = 0.0,
    ) -> io.NodeOutput:
        """The LATENT after the last of the steps; times of each stage in the node's ui output."""
        asked = Widgets(
            noise_seed,
            steps,
            cfg,
            sampler_name,
            scheduler,
            shift=shift,
            sigmas=sigmas,
            add_noise=add_noise != "disable",
            start=start_at_step,
            end=end_at_step,
            leftover=return_with_leftover_noise == "enable",
        )
        with waiting.naming(NAME):
            inputs.refuse_plan(plan)
            return await run(cls.hidden.prompt or {}, model, positive, negative, latent_image, asked)
