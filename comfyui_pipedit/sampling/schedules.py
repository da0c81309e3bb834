"""Noise levels of flow models, by ComfyUI's formulas and in its float32 order of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidJob

NUM_TIMESTEPS = 1000
LINEAR_QUADRATIC_THRESHOLD = 0.025
BETA_SHAPE = 0.6


def shifted(shift: float, t: Tensor) -> Tensor:
    """Sigma at time t in 0..1 of a flow model: float32, in ComfyUI's order of operations."""
    return t if shift == 1.0 else shift * t / (1 + (shift - 1) * t)


def flow_sigmas(shift: float, multiplier: float) -> Tensor:
    """The 1000 sigmas that a flow model with this shift knows, smallest first, float32."""
    times = torch.arange(1, NUM_TIMESTEPS + 1, 1) / NUM_TIMESTEPS * multiplier
    return shifted(shift, times / multiplier)


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow model's noise levels: the known sigmas, and the step between sigma and timestep."""

    shift: float
    multiplier: float
    known: Tensor

    def between(self, count: int) -> list[float]:
        """Sigmas at `count` timesteps spread evenly from the largest known one to the smallest."""
        times = torch.linspace(self.known[-1] * self.multiplier, self.known[0] * self.multiplier, count)
        return [float(shifted(self.shift, time / self.multiplier)) for time in times]


def simple(flow: Flow, steps: int) -> list[float]:
    """Every so many of the known sigmas, from the largest."""
    stride = len(flow.known) / steps
    return [float(flow.known[-(1 + int(step * stride))]) for step in range(steps)] + [0.0]


def normal(flow: Flow, steps: int) -> list[float]:
    """Even timesteps down to the smallest; where that one is as good as 0 it takes the place of the final 0."""
    if flow.between(2)[-1] <= 1e-5:
        return flow.between(steps + 1)
    return [*flow.between(steps), 0.0]


def sgm_uniform(flow: Flow, steps: int) -> list[float]:
    """Even timesteps without the smallest."""
    return [*flow.between(steps + 1)[:-1], 0.0]


def beta(flow: Flow, steps: int) -> list[float]:
    """Timesteps at even quantiles of a beta distribution ("Beta Sampling is All You Need"), repeated ones once."""
    try:
        import numpy
        from scipy import stats
    except ImportError as missing:
        raise InvalidJob(f"scheduler 'beta' needs {missing.name}: pip install scipy, or use 'normal'") from missing
    levels = 1 - numpy.linspace(0, 1, steps, endpoint=False)
    places = numpy.rint(stats.beta.ppf(levels, BETA_SHAPE, BETA_SHAPE) * (len(flow.known) - 1))
    return [float(flow.known[int(place)]) for place in dict.fromkeys(places)] + [0.0]


def linear_quadratic(flow: Flow, steps: int) -> list[float]:
    """Half the steps linear down to 1 - 0.025, the rest a parabola that meets it smoothly and ends at 0 (Movie Gen)."""
    largest = flow.known[-1]
    if steps == 1:
        return (torch.tensor([1.0, 0.0]) * largest).tolist()
    linear = steps // 2
    rest = steps - linear
    slope = LINEAR_QUADRATIC_THRESHOLD / linear
    gap = linear - LINEAR_QUADRATIC_THRESHOLD * steps
    square = gap / (linear * rest**2)
    first = slope - 2 * gap / rest**2
    bent = [square * step**2 + first * step + square * linear**2 for step in range(linear, steps)]
    rising = [slope * step for step in range(linear)] + bent + [1.0]
    return (torch.tensor([1.0 - level for level in rising]) * largest).tolist()


SCHEDULE_OF: dict[str, Callable[[Flow, int], list[float]]] = {
    "simple": simple,
    "sgm_uniform": sgm_uniform,
    "beta": beta,
    "normal": normal,
    "linear_quadratic": linear_quadratic,
}
SCHEDULERS = tuple(SCHEDULE_OF)
