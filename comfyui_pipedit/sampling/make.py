"""From the settings of a sampler node to noise levels and a solver's table; refuses what is not available, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import InvalidJob, not_one_of
from .schedules import SCHEDULE_OF, SCHEDULERS, Flow, flow_sigmas
from .solvers import dpmpp_2m, euler, heun, lcm
from .table import Row, SolverTable
from .unipc import LAST_SIGMA, uni_pc

SOLVER_OF: dict[str, Callable[[Tensor], list[tuple[Row, ...]]]] = {
    "euler": euler,
    "heun": heun,
    "dpmpp_2m": dpmpp_2m,
    "lcm": lcm,
    "uni_pc": uni_pc,
}
SAMPLERS = tuple(SOLVER_OF)
SHOWN = 12
"""Noise levels that a message lists one by one."""


def sigmas(
    scheduler: str,
    steps: int,
    *,
    shift: float,
    denoise: float = 1.0,
    sampler: str = "euler",
    multiplier: float = 1000.0,
) -> Tensor:
    """The noise levels of a run, float32 [steps + 1] (beta may give fewer), largest first, the last one 0.

    denoise < 1 makes the schedule of int(steps / denoise) steps and keeps its end. Raises InvalidJob.
    """
    check_settings(sampler, scheduler, steps, shift=shift, denoise=denoise)
    total = steps if denoise > 0.9999 else int(steps / denoise)
    schedule, flow = SCHEDULE_OF[scheduler], Flow(shift, multiplier, flow_sigmas(shift, multiplier))
    if sampler == "uni_pc":
        levels = schedule(flow, total + 1)
        levels = levels[:-2] + levels[-1:]
    else:
        levels = schedule(flow, total)
    return torch.tensor(levels[-(steps + 1) :], dtype=torch.float32)


def solver_table(sampler: str, sigmas: Tensor | Sequence[float]) -> SolverTable:
    """The table of a solver over noise levels: two or more, strictly falling, within 0..1. Raises InvalidJob."""
    if sampler not in SOLVER_OF:
        raise not_one_of("sampler", sampler, SAMPLERS)
    levels = torch.as_tensor(sigmas, dtype=torch.float32).cpu().clone()
    if sampler == "uni_pc":
        check_unipc_steps(len(levels) - 1)
        levels[-1] = levels[-1] if levels[-1] != 0 else LAST_SIGMA
    check_levels(levels)
    return SolverTable(sampler, tuple(levels.tolist()), tuple(SOLVER_OF[sampler](levels)))


def leads_down(levels: Tensor) -> bool:
    """Whether a table can be made over these noise levels: two or more, strictly falling, within 0..1."""
    falls = levels.dim() == 1 and len(levels) > 1 and bool((levels[1:] < levels[:-1]).all())
    return falls and bool(levels[0] <= 1.0 + 1e-6) and bool(0.0 <= levels[-1] < 1.0)


def check_levels(levels: Tensor) -> None:
    """InvalidJob unless `levels` are noise levels that a flow model can be led down."""
    if not leads_down(levels):
        raise InvalidJob(
            f"sigmas must fall from at most 1 to at least 0 without a repeat, two or more of them, not "
            f"{shortened(levels)}; use fewer steps, or another scheduler"
        )


def shortened(levels: Tensor) -> str:
    """Noise levels for a message: all of a few; of many the first, the last, and the first two that do not fall."""
    flat = levels.flatten()
    values = [f"{value:.6g}" for value in flat.tolist()]
    if len(values) <= SHOWN:
        return f"[{', '.join(values)}]"
    text = f"{len(values)} levels [{', '.join(values[:3])}, ..., {', '.join(values[-2:])}]"
    stays = (~(flat[1:] < flat[:-1])).nonzero().flatten().tolist()
    return f"{text}, where level {stays[0] + 2} is {values[stays[0] + 1]} after {values[stays[0]]}" if stays else text


def check_unipc_steps(steps: int) -> None:
    """InvalidJob for the one step with which ComfyUI's uni_pc returns the noise unchanged."""
    if steps < 2:
        raise InvalidJob(f"uni_pc needs 2 steps, not {steps}; use 2 steps or sampler 'euler'")


def check_settings(
    sampler: str, scheduler: str, steps: int, *, shift: float, denoise: float = 1.0, cfg: float = 1.0
) -> None:
    """InvalidJob for a setting out of range or not available; the text names the value and the legal ones."""
    if sampler not in SOLVER_OF:
        raise not_one_of("sampler", sampler, SAMPLERS)
    if scheduler not in SCHEDULE_OF:
        raise not_one_of("scheduler", scheduler, SCHEDULERS)
    if steps < 1:
        raise InvalidJob(f"steps {steps} is not available here; allowed: 1 or more")
    if sampler == "uni_pc":
        check_unipc_steps(steps)
    if not 0.0 < denoise <= 1.0:
        nearest = "1.0" if denoise > 1.0 else "0.01"
        raise InvalidJob(f"denoise {denoise} is not available here; allowed: more than 0, up to 1; nearest: {nearest}")
    if not 0.0 < shift < math.inf:
        raise InvalidJob(f"shift {shift} is not available here; allowed: more than 0 (Wan's own is 8)")
    if not 0.0 <= cfg < math.inf:
        raise InvalidJob(f"cfg {cfg} is not available here; allowed: 0 or more; 1 means no guidance")
