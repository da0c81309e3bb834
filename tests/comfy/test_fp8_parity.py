"""fp8 single files: one evaluation by us against core's, on the same file in each layout that core 0.3.75 knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_fp8 import LAYOUTS
from inprocess import run
from reference import Reference
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4

Results = tuple[dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def results(comfy_folder: Path, reference: Reference, repository: Path,
            tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(core's, ours) by layout."""
    out = tmp_path_factory.mktemp("fp8")
    run("core_fp8.py", comfy_folder, reference.model_file, out, repository / ".workers")
    return load_file(out / "core.safetensors"), load_file(out / "ours.safetensors")


def error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|"""
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", ["exact", *LAYOUTS])
def test_ours_is_cores(results: Results, name: str) -> None:
    core, ours = (side[name] for side in results)
    assert error(ours, core) < TOLERANCE


def test_scales_that_were_dropped_would_be_seen(results: Results) -> None:
    core, _ = results
    assert all(10 * TOLERANCE < error(core[name], core["exact"]) < 0.2 for name in LAYOUTS)
