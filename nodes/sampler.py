"""Multi-GPU Sampler: makes jobs of a graph's values, waits for their latents, and lets the pool decode right after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.samplers
import torch
from comfy.k_diffusion.sampling import default_noise_sampler
from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from comfyui_pipedit.errors import InvalidJob, not_one_of
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.sampling import SAMPLERS, SCHEDULERS, draw_noise

from . import convert, graph, waiting
from .compat import make
from .convert import FollowUp, Settings
from .handles import PoolModel
from .loader import CATEGORY, Model, Plan
from .pools import Ahead

NAME = "Multi-GPU Sampler"
MAX_SEED = 2**64 - 1
UNLINKED = object()


def refuse_later(values: dict[str, Any]) -> None:
    """InvalidJob for a value whose feature comes later. None = not known yet (a link, at validation)."""
    for name, known, now in (
        ("sampler_name", comfy.samplers.KSampler.SAMPLERS, SAMPLERS),
        ("scheduler", comfy.samplers.KSampler.SCHEDULERS, SCHEDULERS),
    ):
        value = values.get(name)
        if value is not None and value not in now:
            later = " (the others of ComfyUI's list come in a later version)" if value in known else ""
            raise not_one_of(name, value, now, hint=later)
    if values.get("switch_step") not in (None, -1):
        raise InvalidJob(
            f"switch_step {values['switch_step']} is for models with two experts (Wan 2.2), in a later version; use -1"
        )
    for name, instead in (("sigmas", "use scheduler, steps and denoise"), ("plan", "the Loader's devices decide")):
        if values.get(name, UNLINKED) is not UNLINKED:
            raise InvalidJob(f"{name} is connected, and that input comes in a later version; disconnect it ({instead})")


class PipeDiTSampler(io.ComfyNode):
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
                Model.Input("model", tooltip="From PipeDiT Loader."),
                io.Conditioning.Input("positive", tooltip="What the clip shows: one CLIP Text Encode."),
                io.Latent.Input(
                    "latent_image",
                    tooltip="Empty latent video, or a latent to start from with denoise below 1. "
                    "Each clip of a batch is a job of its own.",
                ),
                io.Conditioning.Input(
                    "negative", optional=True, lazy=True, tooltip="What the clip must not show. Not evaluated at cfg 1."
                ),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels of your own. Comes in a later version."),
                Plan.Input("plan", optional=True, tooltip="How the pool is divided. Comes in a later version."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=True,
                    tooltip="Seed of the noise: the same noise as KSampler's, on any number of GPUs.",
                ),
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
                    tooltip=f"Solver. Now: {', '.join(SAMPLERS)}.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    default="simple",
                    tooltip=f"How the noise levels fall. Now: {', '.join(SCHEDULERS)}.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Below 1 the latent is kept in part and only the last steps are done.",
                ),
                make(
                    io.Float.Input,
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="Shift of the noise levels (ModelSamplingSD3's). 0: the model's own.",
                ),
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
            outputs=[
                io.Latent.Output(
                    "latent",
                    display_name="LATENT",
                    tooltip="In VAE space, as KSampler gives it: core VAE Decode and Save Latent work on it.",
                )
            ],
            hidden=[io.Hidden.prompt],
        )

    @classmethod
    def validate_inputs(
        cls,
        sampler_name: str,
        scheduler: str,
        switch_step: int | None = None,
        sigmas: Any = UNLINKED,
        plan: Any = UNLINKED,
    ) -> bool | str:
        """True, or which value this version does not take."""
        try:
            refuse_later(
                {
                    "sampler_name": sampler_name,
                    "scheduler": scheduler,
                    "switch_step": switch_step,
                    "sigmas": sigmas,
                    "plan": plan,
                }
            )
        except InvalidJob as error:
            return str(error)
        return True

    @classmethod
    def check_lazy_status(cls, cfg: float, **inputs: Any) -> list[str]:
        """Asks for a linked negative only where guidance needs it."""
        return ["negative"] if cfg != 1.0 and inputs.get("negative", UNLINKED) is None else []

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
        sigmas: Any = UNLINKED,
        plan: Any = UNLINKED,
        shift: float = 0.0,
        switch_step: int = -1,
    ) -> io.NodeOutput:
        """The denoised LATENT; times of each stage in the node's ui output."""
        with waiting.naming(NAME):
            refuse_later(
                {
                    "sampler_name": sampler_name,
                    "scheduler": scheduler,
                    "switch_step": switch_step,
                    "sigmas": sigmas,
                    "plan": plan,
                }
            )
            if denoise == 0.0:
                return io.NodeOutput(dict(latent_image))
            settings = Settings(seed, steps, cfg, sampler_name, scheduler, denoise, shift, noise_offset())
            node = getattr(get_executing_context(), "node_id", "")
            follow_up = decode_after(cls.hidden.prompt or {}, node, model)
            jobs = convert.jobs(model.files, positive, negative, latent_image, settings, follow_up, f"node {node}")
            tickets = model.submit(*jobs)
            await waiting.follow(tickets, waiting.Reporter(tickets))
        samples = torch.cat([ticket.result() for ticket in tickets])
        frames = tuple(ticket.frames for ticket in tickets if ticket.frames is not None)
        if follow_up is not None and frames:
            model.pools.remember(samples, Ahead(frames, follow_up.vae, follow_up.tiling))
        return io.NodeOutput(convert.latent_output(latent_image, samples), ui=account(model, tickets))


def noise_offset() -> int:
    """What this ComfyUI adds to the seed of a sampler's own noise on the CPU; it changed in January 2026."""
    drawn = default_noise_sampler(torch.zeros(2), seed=0)(1.0, 0.5)
    return 0 if torch.equal(drawn, draw_noise(0, [2])) else 1


def decode_after(prompt: graph.Prompt, node: str, model: PoolModel) -> FollowUp | None:
    """How the pool decodes the clip after its last step; None if the graph does not tell."""
    widgets = graph.direct_decode(prompt, node)
    if widgets is None or model.files.vae is None:
        return None
    mode, *sizes = (widgets[name] for name in graph.DECODE_WIDGETS)
    return FollowUp(model.files.vae, convert.tiling(mode, model.files.geometry, *map(int, sizes)))


def account(model: PoolModel, tickets: Sequence[Ticket]) -> dict[str, list[dict[str, Any]]]:
    """The ui output, for /history: plan, devices and seconds a stage of each clip."""
    return {
        "pipedit": [
            {
                "job": ticket.id,
                "model": model.files.name,
                "devices": model.devices,
                "plan": ticket.plan.sentence() if ticket.plan is not None else "",
                "seconds": {stage: round(seconds, 3) for stage, seconds in ticket.timings().items()},
            }
            for ticket in tickets
        ]
    }
