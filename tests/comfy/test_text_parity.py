"""Texts with and without weights: the pool's embeddings against core's, on the same weights and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_text import TEXTS
from inprocess import run
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
Results = tuple[dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def results(comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(core's, ours) by the text's place."""
    out = tmp_path_factory.mktemp("text")
    run("core_text.py", comfy_folder, out, repository / ".workers")
    return load_file(out / "core.safetensors"), load_file(out / "ours.safetensors")


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("place", range(len(TEXTS)), ids=[text[:30] for text in TEXTS])
def test_ours_is_cores(results: Results, place: int) -> None:
    core, ours = (side[str(place)] for side in results)
    assert ours.shape == core.shape
    assert error(ours, core) < TOLERANCE


def test_a_weight_that_was_ignored_would_be_seen(results: Results) -> None:
    core, _ = results
    assert error(core["2"], core["0"]) > 100 * TOLERANCE
    assert error(core["5"], core["2"]) > 100 * TOLERANCE
