"""Solvers as tables of coefficients: what ComfyUI's samplers compute for flow models, one fused update a model call.

    sigmas(scheduler, steps, shift=...)  ->  solver_table(sampler, sigmas)      # on the host, plain numbers
    start(table, noise, latent)  ->  advance(row, state, denoised) ...  ->  finish(table, state)

Latents are float32 in the model's own (normalised) space. Coefficients are computed in float32, in ComfyUI's order of
operations: UniPC's are differences of nearly equal logarithms, and in float64 its clip differs by 2e-3 after 30 steps.
"""

from __future__ import annotations

from .make import SAMPLERS, check_settings, leads_down, sigmas, solver_table
from .noise import draw_noise, draw_noises
from .schedules import SCHEDULERS
from .table import Row, SolverTable, State, advance, finish, start

__all__ = [
    "SAMPLERS",
    "SCHEDULERS",
    "Row",
    "SolverTable",
    "State",
    "advance",
    "check_settings",
    "draw_noise",
    "draw_noises",
    "finish",
    "leads_down",
    "sigmas",
    "solver_table",
    "start",
]
