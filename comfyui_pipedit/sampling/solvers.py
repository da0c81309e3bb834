"""Solvers whose rows fit on a line each: Euler, Heun, DPM-Solver++(2M), LCM."""

from __future__ import annotations

from torch import Tensor

from .table import Row


def euler(levels: Tensor) -> list[tuple[Row, ...]]:
    """Straight along the velocity at each level."""
    pairs = zip(levels.tolist(), levels[1:].tolist(), strict=False)
    return [(Row(here, x=(there / here, 0.0, 1.0 - there / here)),) for here, there in pairs]


def heun(levels: Tensor) -> list[tuple[Row, ...]]:
    """Along the mean of the velocities at both ends of a step; the last step, to 0, is Euler's (Karras 2022)."""
    steps: list[tuple[Row, ...]] = []
    for here, there in zip(levels.tolist(), levels[1:].tolist(), strict=False):
        ratio, half = there / here, 0.5 * (there / here - 1.0)
        if there == 0.0:
            steps.append((Row(here, x=(ratio, 0.0, 1.0 - ratio)),))
            continue
        back = 0.5 * (1.0 - here / there)
        probe = Row(here, x=(ratio, 0.0, 1.0 - ratio), base=(1.0 + half, 0.0, -half))
        steps.append((probe, Row(there, x=(back, 1.0, -back))))
    return steps


def dpmpp_2m(levels: Tensor) -> list[tuple[Row, ...]]:
    """DPM-Solver++(2M): second order from the denoised latent before; first order at both ends."""
    times = [level.log().neg() for level in levels]
    steps: list[tuple[Row, ...]] = []
    for i, (now, after) in enumerate(zip(times, times[1:], strict=False)):
        width = after - now
        ratio = (after.neg().exp() / now.neg().exp()).item()
        gain = -(-width).expm1().item()
        lean = 0.0 if i == 0 or levels[i + 1] == 0 else (1 / (2 * ((now - times[i - 1]) / width))).item()
        keep = 0 if i + 2 == len(levels) else 1
        steps.append((Row(levels[i].item(), x=(ratio, 0.0, gain * (1 + lean), -gain * lean), keep=keep),))
    return steps


def lcm(levels: Tensor) -> list[tuple[Row, ...]]:
    """To the denoised latent, then back up with fresh noise."""
    rows: list[tuple[Row, ...]] = []
    for i, (here, there) in enumerate(zip(levels.tolist(), levels[1:].tolist(), strict=False)):
        noise = {"noise": there, "noise_index": i} if there > 0 else {}
        signal = (1.0 - levels[i + 1]).item()
        rows.append((Row(here, x=(0.0, 0.0, signal), **noise),))
    return rows
