"""What the sampler nodes share: inputs, and the checks of their values at validation."""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy_api.latest import io

from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.sampling import SAMPLERS

from . import solving
from .compat import make
from .loader import Model, Plan

MAX_SEED = 2**64 - 1
UNLINKED = object()


def links() -> list[io.Input]:
    """What is linked into a sampler node, in the frozen order."""
    return [
        Model.Input("model", tooltip="From PipeDiT Loader."),
        io.Conditioning.Input("positive", tooltip="What the clip shows: CLIP Text Encode, or a node for Wan after it."),
        io.Latent.Input(
            "latent_image",
            tooltip="Empty latent video, or a latent to start from. Each clip of a batch is a job of its own.",
        ),
        io.Conditioning.Input(
            "negative", optional=True, lazy=True, tooltip="What the clip must not show. Not evaluated at cfg 1."
        ),
        io.Sigmas.Input(
            "sigmas", optional=True, tooltip="Noise levels of your own, in place of steps, scheduler and shift."
        ),
        Plan.Input("plan", optional=True, tooltip="How the pool is divided. Comes in a later version."),
    ]


def seed(name: str) -> io.Input:
    return io.Int.Input(
        name,
        default=0,
        min=0,
        max=MAX_SEED,
        control_after_generate=True,
        tooltip="Seed of the noise: the same noise as KSampler's, on any number of GPUs.",
    )


def solver() -> list[io.Input]:
    """steps, cfg, sampler_name and scheduler."""
    return [
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Steps of the solver."),
        io.Float.Input(
            "cfg",
            default=5.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Strength of guidance. 1 skips the negative and takes half the time.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=comfy.samplers.KSampler.SAMPLERS,
            default="euler",
            tooltip=f"Solver. In the pool itself: {', '.join(SAMPLERS)}. The others are ComfyUI's own over the pool.",
        ),
        io.Combo.Input(
            "scheduler",
            options=comfy.samplers.KSampler.SCHEDULERS,
            default="simple",
            tooltip="How the noise levels fall: ComfyUI's schedules.",
        ),
    ]


def shift() -> io.Input:
    return make(
        io.Float.Input,
        "shift",
        default=0.0,
        min=0.0,
        max=100.0,
        step=0.01,
        optional=True,
        advanced=True,
        tooltip="Shift of the noise levels (ModelSamplingSD3's). 0: the model's own.",
    )


def latent_output() -> io.Output:
    return io.Latent.Output(
        "latent",
        display_name="LATENT",
        tooltip="In VAE space, as KSampler gives it: core VAE Decode and Save Latent work on it.",
    )


# -- checks ---------------------------------------------------------------------------------------------------------


def refuse_plan(plan: Any) -> None:
    """InvalidJob where a plan is connected."""
    if plan is not UNLINKED:
        raise InvalidJob(
            "plan is connected, and that input comes in a later version; disconnect it (the Loader's devices decide)"
        )


class SamplerNode(io.ComfyNode):
    """The checks that ComfyUI asks of both sampler nodes."""

    @classmethod
    def validate_inputs(cls, sampler_name: str | None, scheduler: str | None, plan: Any = UNLINKED) -> bool | str:
        """True, or which value this version does not take."""
        try:
            solving.check(sampler_name, scheduler)
            refuse_plan(plan)
        except InvalidJob as error:
            return str(error)
        return True

    @classmethod
    def check_lazy_status(cls, cfg: float, sampler_name: str, **given: Any) -> list[str]:
        """Asks for a negative that is linked and not there yet, only where guidance needs it."""
        needed = solving.needs_negative(cfg, sampler_name)
        return ["negative"] if needed and given.get("negative", UNLINKED) is None else []
