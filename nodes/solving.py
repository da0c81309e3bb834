"""What a sampler node's widgets ask for: noise levels, and who leads down them, our tables or ComfyUI's samplers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import torch
from comfy.k_diffusion.sampling import default_noise_sampler
from torch import Tensor

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import InvalidJob, not_one_of
from comfyui_pipedit.job import ModelFiles

from . import bridge, convert
from .handles import PoolModel

FAR = 10_000
"""KSamplerAdvanced's last step: more than there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Widgets:
    """KSampler's widgets, KSamplerAdvanced's steps `start` to `end`, and ours. leftover: stop at the noise level of
    `end`, instead of going down to 0 from the level before. shift 0 = the model's own. sigmas: noise levels in place of
    steps, scheduler, denoise and shift. switch_step -1 = by the model's boundary."""

    seed: int
    steps: int
    cfg: float
    sampler: str
    scheduler: str
    denoise: float = 1.0
    shift: float = 0.0
    sigmas: Tensor | None = None
    add_noise: bool = True
    start: int = 0
    end: int = FAR
    leftover: bool = True
    switch_step: int = -1

    @property
    def evaluates_negative(self) -> bool:
        """cfg 1 leaves the negative out, but for samplers that step with the unguided estimate (CFG++)."""
        return needs_negative(self.cfg, self.sampler)


def needs_negative(cfg: float, sampler: str) -> bool:
    return cfg != 1.0 or "cfg_pp" in sampler


def check(sampler: str | None, scheduler: str | None) -> None:
    """InvalidJob for names that are not in ComfyUI's lists. None = not known yet (a link, at validation)."""
    for name, value, known in (
        ("sampler_name", sampler, comfy.samplers.KSampler.SAMPLERS),
        ("scheduler", scheduler, comfy.samplers.KSampler.SCHEDULERS),
    ):
        if value is not None and value not in known:
            raise not_one_of(name, value, known)


def check_widgets(asked: Widgets, files: ModelFiles) -> None:
    """InvalidJob for a value that no choice of names would make legal."""
    check(str(asked.sampler), str(asked.scheduler))  # null in a graph's JSON is no choice either
    shift = asked.shift or files.shift
    sampling.check_settings("euler", "simple", asked.steps, shift=shift, denoise=asked.denoise, cfg=asked.cfg)
    if asked.switch_step != -1 and files.transformer_low is None:
        raise InvalidJob(
            f"switch_step {asked.switch_step} is for a model with two experts (Wan 2.2 A14B); choose its low-noise "
            "file as PipeDiT Loader's unet_name_low, or use -1"
        )


def noise_levels(asked: Widgets, model: PoolModel) -> Tensor:
    """The noise levels to go down, float32 on the CPU, cut as KSamplerAdvanced cuts them; fewer than two = no step."""
    check_widgets(asked, model.files)
    levels = whole_run(asked, model) if asked.sigmas is None else asked.sigmas.to("cpu", torch.float32)
    if asked.end < len(levels) - 1:
        levels = levels[: asked.end + 1].clone()
        if not asked.leftover:
            levels[-1] = 0.0
    return levels[asked.start :] if asked.start < len(levels) - 1 else levels[:0]


def whole_run(asked: Widgets, model: PoolModel) -> Tensor:
    """All noise levels of a schedule: our own functions for the schedules that we have, else ComfyUI's."""
    if asked.sampler in sampling.SAMPLERS and asked.scheduler in sampling.SCHEDULERS:
        return sampling.sigmas(
            asked.scheduler,
            asked.steps,
            shift=asked.shift or model.files.shift,
            denoise=asked.denoise,
            sampler=asked.sampler,
        )
    core = comfy.samplers.KSampler(
        bridge.patcher(model, asked.shift),
        steps=asked.steps,
        device=torch.device("cpu"),
        sampler=asked.sampler,
        scheduler=asked.scheduler,
        denoise=asked.denoise,
    )
    levels: Tensor = core.sigmas.to("cpu", torch.float32)
    return levels


def by_table(asked: Widgets, levels: Tensor) -> bool:
    """Whether the pool solves by one of our tables. Ours refuse levels of our own schedules that do not fall."""
    if asked.sampler not in sampling.SAMPLERS:
        return False
    return sampling.leads_down(levels) or (asked.sigmas is None and asked.scheduler in sampling.SCHEDULERS)


def settings(asked: Widgets, levels: Tensor) -> convert.Settings:
    """What a clip in the pool needs of the widgets."""
    return convert.Settings(
        asked.seed,
        asked.cfg,
        asked.sampler,
        levels,
        noise_offset=noise_offset(),
        add_noise=asked.add_noise,
        switch_step=None if asked.switch_step == -1 else asked.switch_step,
    )


def noise_offset() -> int:
    """What this ComfyUI adds to the seed of a sampler's own noise on the CPU; it changed in January 2026."""
    drawn = default_noise_sampler(torch.zeros(2), seed=0)(1.0, 0.5)
    return 0 if torch.equal(drawn, sampling.draw_noise(0, [2])) else 1


class CoreRun:
    """ComfyUI's own sampler in this process, with the pool as its model: noise, steps and progress are ComfyUI's."""

    def __init__(self, model: PoolModel, asked: Widgets, levels: Tensor) -> None:
        self.asked, self.levels = asked, levels
        self.model = bridge.patcher(switching(model, asked, levels), asked.shift)

    def samples(
        self, positive: convert.Conditioning, negative: convert.Conditioning | None, latent: convert.Latent
    ) -> Tensor:
        """The finished latent [B, C, T, h, w]. Blocks, and hears a cancel, while the pool evaluates."""
        asked, files = self.asked, self.model.model.pool.files
        if asked.evaluates_negative and negative is None:
            raise convert.no_negative(asked.cfg)
        start = convert.checked_samples(latent["samples"], files.geometry, files.name)
        noise = comfy.sample.prepare_noise(start, asked.seed, latent.get("batch_index"))
        result: Tensor = comfy.sample.sample_custom(
            self.model,
            noise if asked.add_noise else torch.zeros_like(noise),
            asked.cfg,
            comfy.samplers.sampler_object(asked.sampler),
            self.levels,
            positive,
            negative if negative is not None else [],
            start,
            noise_mask=latent.get("noise_mask"),
            callback=latent_preview.prepare_callback(self.model, len(self.levels) - 1),
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=asked.seed,
        )
        return result

    def seconds(self) -> dict[str, float]:
        """What the pool spent, by kind of work."""
        return {kind: round(seconds, 3) for kind, seconds in self.model.model.seconds.items()}


def switching(model: PoolModel, asked: Widgets, levels: Tensor) -> PoolModel:
    """The model with a boundary at the noise level of the switch step, if one is asked for."""
    if asked.switch_step == -1:
        return model
    last = asked.switch_step >= len(levels)
    boundary = 0.0 if last else math.nextafter(float(levels[asked.switch_step]), math.inf)
    return dataclasses.replace(model, files=dataclasses.replace(model.files, boundary=boundary))
