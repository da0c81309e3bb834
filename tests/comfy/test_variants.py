"""Image to video, VACE, TI2V and noise masks: our worker's latents against core KSampler's, on the same weights.

Sizes that the patch does not divide, one to five latent frames, texts of 1 to 600 rows (case B2: 512 and 257 of an
image), and what core makes of missing, superfluous and misfitting conditioning.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import run
from safetensors.torch import load_file
from torch import Tensor
from variants import Case, all_cases

TOLERANCE = 1e-4
Results = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def results(comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Finished latents by case: of core, of ours, and of ours without anything but the text."""
    out = tmp_path_factory.mktemp("variants")
    run("core_variants.py", comfy_folder, out, repository / ".workers")
    return {name: load_file(out / f"{name}.safetensors") for name in ("core", "ours", "without")}


def relative_error(ours: Tensor, core: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((ours - core).abs().max() / core.abs().max())


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_equals_core(results: Results, case: Case) -> None:
    core, ours = results["core"][case.name], results["ours"][case.name]
    assert core.shape == case.shape
    assert relative_error(ours, core) < TOLERANCE


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_what_is_told_counts_where_core_reads_it(results: Results, case: Case) -> None:
    """Else equality could come from random weights that hardly look at images, masks and guides."""
    error = relative_error(results["without"][case.name], results["core"][case.name])
    assert error < TOLERANCE if case.ignored else error > 100 * TOLERANCE
