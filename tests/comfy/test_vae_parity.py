"""Decode and encode, whole and tiled, and one evaluation of the transformer: ours against core's on equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_vae import ENCODE_TILES, FRAMES, LATENT, TILES, VELOCITIES
from inprocess import run
from reference import Reference
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
NAMES = ["whole", *(f"tiled-{name}" for name in TILES), *(f"velocity-{name}" for name in VELOCITIES),
         *(f"encode-{name}" for name in FRAMES), "encode-whole", *(f"encode-tiled-{name}" for name in ENCODE_TILES)]

Results = tuple[dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def results(comfy_folder: Path, reference: Reference, repository: Path,
            tmp_path_factory: pytest.TempPathFactory) -> Results:
    """(core's, ours) by name."""
    out = tmp_path_factory.mktemp("vae")
    run("core_vae.py", comfy_folder, reference.models, out, repository / ".workers")
    core, ours = (load_file(out / f"{name}.safetensors") for name in ("core", "ours"))
    return core, ours


def error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|"""
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_cores(results: Results, name: str) -> None:
    core, ours = (side[name] for side in results)
    assert ours.shape == core.shape
    assert error(ours, core) < TOLERANCE


@pytest.mark.parametrize("kind", ["", "encode-"])
def test_a_wrong_tiling_would_be_seen(results: Results, kind: str) -> None:
    """Random weights make tiles differ from the whole, and from other tiles, by far more than the tolerance."""
    core, ours = results
    tiled = [name for name in NAMES if name.startswith(f"{kind}tiled-") and not name.endswith("-one")]
    for name in tiled:
        for other in (f"{kind}whole", *tiled):
            if other != name:
                assert error(ours[name], core[other]) > 100 * TOLERANCE, (name, other)


def test_shapes(results: Results) -> None:
    core, _ = results
    assert core["whole"].shape == (LATENT[2] * 4 - 3, LATENT[3] * 8, LATENT[4] * 8, 3)
    assert core["encode-odd"].shape == (1, 16, 2, 6, 4) and core["encode-tiled-both"].shape == (1, 16, 6, 10, 13)
    assert core["whole"].std() > 0.05 and core["velocity-odd"].std() > 0.1
