"""Core KSampler against our tables on the same model, in its own process: python core_grid.py COMFY MODEL_FILE OUT.

Writes OUT/core.safetensors and OUT/ours.safetensors: the finished latent of each case, VAE space, by the case's name.
Core runs nodes.common_ksampler behind ModelSamplingSD3; ours calls the same network one branch at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import ROOT, enter, load

if TYPE_CHECKING:
    from torch import Tensor

SAMPLERS = ("euler", "uni_pc", "heun", "dpmpp_2m", "lcm")
SCHEDULERS = ("simple", "normal", "sgm_uniform", "beta", "linear_quadratic")
SHAPE = (1, 16, 2, 4, 8)
TEXT_SHAPE = (1, 12, 4096)
SEED = 7


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one run."""

    sampler: str
    scheduler: str
    steps: int
    cfg: float
    denoise: float
    shift: float

    @property
    def name(self) -> str:
        rest = f"cfg{self.cfg:g}-denoise{self.denoise:g}-shift{self.shift:g}"
        return f"{self.sampler}-{self.scheduler}-{self.steps}-{rest}"


def all_cases() -> list[Case]:
    """Every solver and schedule: all settings at 4 steps, the two most different ones at 2, one each at 20 and 30."""
    every = list(itertools.product((1.0, 5.0), (1.0, 0.6), (3.0, 8.0)))
    strong, weak = (5.0, 1.0, 8.0), (1.0, 0.6, 3.0)
    settings = [(4, *rest) for rest in every] + [(2, *strong), (2, *weak), (20, *weak), (30, *strong)]
    return [Case(*pair, *setting) for pair in itertools.product(SAMPLERS, SCHEDULERS) for setting in settings]


def wrong_twins(case: Case) -> dict[str, Case]:
    """What someone gets who has one thing wrong; only for the whole runs of 4 steps with guidance."""
    if (case.steps, case.cfg, case.denoise, case.shift) != (4, 5.0, 1.0, 8.0):
        return {}
    twins = {
        "solver": dataclasses.replace(case, sampler="euler" if case.sampler != "euler" else "dpmpp_2m"),
        "cfg": dataclasses.replace(case, cfg=1.0),
    }
    if case.scheduler != "linear_quadratic":  # this one does not depend on the shift
        twins["shift"] = dataclasses.replace(case, shift=3.0)
    return twins


@functools.cache
def text(seed: int) -> Tensor:
    """A text embedding: float32, unit normal."""
    import torch

    return torch.randn(TEXT_SHAPE, generator=torch.Generator().manual_seed(seed))


def start_latent(case: Case) -> Tensor:
    """Empty for a whole run, something of order 1 where the run begins from a latent; VAE space."""
    import torch

    if case.denoise == 1.0:
        return torch.zeros(SHAPE)
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def run_core(model: Any, case: Case) -> Tensor:
    """The latent of core KSampler."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    import nodes

    (patched,) = ModelSamplingSD3().patch(model, case.shift)
    positive, negative = ([[text(seed), {"pooled_output": None}]] for seed in (1, 2))
    (out,) = nodes.common_ksampler(
        patched, SEED, case.steps, case.cfg, case.sampler, case.scheduler, positive, negative,
        {"samples": start_latent(case)}, denoise=case.denoise,
    )
    samples: Tensor = out["samples"]
    return samples


def run_ours(model: Any, sampling: Any, case: Case) -> Tensor:
    """The latent of our table with the network of `model`: guidance and the solver are ours."""
    import torch

    levels = sampling.sigmas(case.scheduler, case.steps, shift=case.shift, denoise=case.denoise, sampler=case.sampler)
    table = sampling.solver_table(case.sampler, levels)
    latent = start_latent(case)
    if torch.count_nonzero(latent):
        latent = model.model.process_latent_in(latent)
    noises = sampling.draw_noises(SEED, SHAPE, table.num_noises, offset=noise_offset())
    state = sampling.start(table, sampling.draw_noise(SEED, SHAPE), latent)
    for row in itertools.chain.from_iterable(table.steps):
        state = sampling.advance(row, state, guided(model, state.x, row.sigma, case.cfg), noises)
    finished: Tensor = model.model.process_latent_out(sampling.finish(table, state))
    return finished


def noise_offset() -> int:
    """What this ComfyUI adds to the seed of a sampler's own noise on the CPU: 0, and 1 since January 2026."""
    import torch
    from comfy.k_diffusion.sampling import default_noise_sampler

    drawn = default_noise_sampler(torch.zeros(4), seed=0)(1.0, 0.5)
    return int(not torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(0))))


def guided(model: Any, x: Tensor, sigma: float, cfg: float) -> Tensor:
    """The network's clean estimate, of one branch at cfg 1, else guided."""
    import torch

    level = torch.tensor([sigma])
    positive: Tensor = model.model.apply_model(x, level, c_crossattn=text(1))
    if cfg == 1.0:
        return positive
    negative: Tensor = model.model.apply_model(x, level, c_crossattn=text(2))
    return negative + (positive - negative) * cfg


def main() -> None:
    comfy, model_file, out = map(Path, sys.argv[1:])
    enter(comfy)
    import comfy.model_management
    import comfy.sd
    import comfy.utils
    import torch
    from safetensors.torch import save_file

    comfy.utils.PROGRESS_BAR_ENABLED = False
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    import comfyui_pipedit.sampling as sampling

    model = comfy.sd.load_diffusion_model(str(model_file))
    cases = all_cases()
    twins = {twin for case in cases for twin in wrong_twins(case).values()}
    with torch.inference_mode():
        core = {case.name: run_core(model, case).clone() for case in cases}
        comfy.model_management.load_models_gpu([model])
        ours = {case.name: run_ours(model, sampling, case).contiguous() for case in {*cases, *twins}}
    save_file(core, out / "core.safetensors")
    save_file(ours, out / "ours.safetensors")


if __name__ == "__main__":
    main()
