"""A network with LoRAs gives what ComfyUI's LoraLoaderModelOnly gives: max|a - b| / max|b| < 1e-4 in float32, the
merged weights to the bit; and another strength, order or file misses by at least 100 times that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inprocess import run
from lora_grid import CASES, WEIGHTS
from reference import Reference
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
Grid = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def grid(comfy_folder: Path, reference: Reference, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Outputs and merged weights of core and of our state; one process makes them all."""
    out, loras = tmp_path_factory.mktemp("grid"), tmp_path_factory.mktemp("loras")
    run("lora_grid.py", comfy_folder, reference.model_file, reference.folder, loras, repository / ".workers", out)
    return {name: load_file(out / f"{name}.safetensors") for name in ("core", "ours")}


def relative_error(ours: Tensor, core: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((ours - core).abs().max() / core.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_equals_core(grid: Grid, case: str) -> None:
    assert relative_error(grid["ours"][f"{case}/"], grid["core"][f"{case}/"]) < TOLERANCE
    for name in WEIGHTS:
        assert torch.equal(grid["ours"][f"{case}/{name}"], grid["core"][f"{case}/{name}"]), name


@pytest.mark.parametrize("case", [case for case in CASES if case != "zero"])
def test_every_other_chain_is_seen(grid: Grid, case: str) -> None:
    others = [other for other in CASES if other != case and {other, case} != {"none", "zero"}]
    misses = {other: relative_error(grid["ours"][f"{other}/"], grid["core"][f"{case}/"]) for other in others}
    assert min(misses.values()) > 100 * TOLERANCE, misses


def test_strength_zero_is_the_model_itself(grid: Grid) -> None:
    assert torch.equal(grid["ours"]["zero/"], grid["ours"]["none/"])
    assert relative_error(grid["ours"]["whole/"], grid["ours"]["zero/"]) > 100 * TOLERANCE
