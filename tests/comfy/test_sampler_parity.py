"""Our solvers and schedules give core KSampler's latents with the same network: max|a - b| / max|b| < 1e-4 in float32,
and a wrong solver, shift or cfg misses by at least 100 times that. Measured: 7e-6 at most, 5.5e-2 at least."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_grid import Case, all_cases, wrong_twins
from inprocess import run
from reference import Reference
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
Grid = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def grid(comfy_folder: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Finished latents of core and of our tables by the name of the case; one process runs them all."""
    out = tmp_path_factory.mktemp("grid")
    run("core_grid.py", comfy_folder, reference.model_file, out)
    return {name: load_file(out / f"{name}.safetensors") for name in ("core", "ours")}


def relative_error(ours: Tensor, core: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((ours - core).abs().max() / core.abs().max())


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_equals_core(grid: Grid, case: Case) -> None:
    assert relative_error(grid["ours"][case.name], grid["core"][case.name]) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "what"), [(case, what) for case in all_cases() for what in wrong_twins(case)],
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_anything_wrong_is_seen(grid: Grid, case: Case, what: str) -> None:
    twin = grid["ours"][wrong_twins(case)[what].name]
    assert relative_error(twin, grid["core"][case.name]) > 100 * TOLERANCE
