"""Wan 2.2's VAE from a single file: decode and encode against core's own network, on the same small file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_wan
import wan_files
from core_vae22 import FRAMES, LATENT
from inprocess import run
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def results(comfy_folder: Path, repository: Path,
            tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(core's, ours) by name."""
    tiny_wan.use_worker_site()
    out = tmp_path_factory.mktemp("vae22")
    state = wan_files.original_vae(wan_files.vae("2.2"))
    file = wan_files.write(out / "wan2.2_vae.safetensors", state, wan_files.plain("float32"))
    run("core_vae22.py", comfy_folder, file, out, repository / ".workers")
    return load_file(out / "core.safetensors"), load_file(out / "ours.safetensors")


@pytest.mark.parametrize("name", ["decoded", *(f"encoded-{name}" for name in FRAMES)])
def test_ours_is_cores(results: tuple[dict[str, Tensor], dict[str, Tensor]], name: str) -> None:
    core, ours = (side[name] for side in results)
    assert ours.shape == core.shape and core.std() > 0.05
    assert float((ours - core).abs().max() / core.abs().max()) < TOLERANCE


def test_a_cell_is_16_pixels_wide(results: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    core, _ = results
    assert core["decoded"].shape == (LATENT[2] * 4 - 3, LATENT[3] * 16, LATENT[4] * 16, 3)
    assert core["encoded-odd"].shape == (1, 48, 2, 3, 2)
