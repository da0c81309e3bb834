"""From a sampler node's values to its LATENT: jobs in the pool, or ComfyUI's own sampler over it; then the decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy_api.latest import io
from comfy_execution.utils import get_executing_context
from torch import Tensor

from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Job

from . import convert, graph, solving, waiting
from .conditioning import is_composed
from .convert import FollowUp
from .handles import PoolModel
from .pools import Ahead
from .solving import Widgets

Account = dict[str, list[dict[str, Any]]]


async def run(
    prompt: graph.Prompt,
    model: PoolModel,
    positive: convert.Conditioning,
    negative: convert.Conditioning | None,
    latent: convert.Latent,
    asked: Widgets,
) -> io.NodeOutput:
    """The denoised LATENT; times of each stage in the node's ui output."""
    levels = solving.noise_levels(asked, model)
    if len(levels) < 2:
        return io.NodeOutput(dict(latent))
    node = getattr(get_executing_context(), "node_id", "")
    follow_up = decode_after(prompt, node, model) if levels[-1] == 0 else None
    told = [positive, *([negative] if negative is not None and asked.evaluates_negative else [])]
    if solving.by_table(asked, levels) and not any(map(is_composed, told)):
        settings = solving.settings(asked, levels)
        jobs = convert.jobs(model.files, positive, negative, latent, settings, follow_up, f"node {node}")
        samples, frames, ui = await in_the_pool(model, jobs)
    else:
        core = solving.CoreRun(model, asked, levels)
        samples = core.samples(positive, negative, latent)
        frames, ui = decodes(model, samples, follow_up), core_account(model, core)
    if follow_up is not None and frames:
        model.pools.remember(samples, Ahead(frames, follow_up.vae, follow_up.tiling))
    return io.NodeOutput(convert.latent_output(latent, samples), ui=ui)


async def in_the_pool(model: PoolModel, jobs: Sequence[Job]) -> tuple[Tensor, tuple[Ticket, ...], Account]:
    """Latents of all clips, the decodes that follow them, and the ui output."""
    tickets = model.submit(*jobs)
    await waiting.follow(tickets, waiting.Reporter(tickets))
    frames = tuple(ticket.frames for ticket in tickets if ticket.frames is not None)
    return torch.cat([ticket.result() for ticket in tickets]), frames, account(model, tickets)


def decodes(model: PoolModel, samples: Tensor, follow_up: FollowUp | None) -> tuple[Ticket, ...]:
    """Decodes of finished latents that begin now."""
    if follow_up is None:
        return ()
    return model.submit(*convert.decodes(samples, follow_up.vae, model.files.geometry, follow_up.tiling))


def decode_after(prompt: graph.Prompt, node: str, model: PoolModel) -> FollowUp | None:
    """How the pool decodes the clip after its last step; None if the graph does not tell."""
    widgets = graph.direct_decode(prompt, node)
    if widgets is None or model.files.vae is None:
        return None
    mode, *sizes = (widgets[name] for name in graph.DECODE_WIDGETS)
    return FollowUp(model.files.vae, convert.tiling(mode, model.files.geometry, *map(int, sizes)))


def account(model: PoolModel, tickets: Sequence[Ticket]) -> Account:
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


def core_account(model: PoolModel, core: solving.CoreRun) -> Account:
    """The same for ComfyUI's own sampler: one entry for the batch."""
    job = f"ComfyUI's {core.asked.sampler}"
    return {
        "pipedit": [
            {"job": job, "model": model.files.name, "devices": model.devices, "plan": "", "seconds": core.seconds()}
        ]
    }
