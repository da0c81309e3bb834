"""A clip on 1 to 4 gloo ranks: the same bits whatever the group, its order, the chunks, and where it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_wan
import torch
from clip_inputs import clip_inputs, reference_latent
from denoise_ranks import CLIPS, WORLD, all_cases
from torch import Tensor

from comfyui_pipedit import loaders
from comfyui_pipedit.job import Geometry

SCRIPT = Path(__file__).with_name("denoise_ranks.py")
DEADLINE = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_wan.use_worker_site()
    return tiny_wan.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the ranks left: NAME.pt = (step, tensors) of each case's kept latent."""
    out = tmp_path_factory.mktemp("results")
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(model), str(out)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return out


@pytest.fixture(scope="module")
def geometry(model: Path) -> Geometry:
    return loaders.inspect(model).geometry


def kept(results: Path, name: str) -> tuple[int, Tensor]:
    step, tensors = torch.load(results / f"{name}.pt")
    assert len(tensors) == 1, "the last write is the finished latent alone"
    return step, tensors[0]


@pytest.mark.parametrize("clip", CLIPS)
def test_one_rank_computes_the_formulas(results: Path, geometry: Geometry, clip: str) -> None:
    step, latent = kept(results, f"{clip}-1x1")
    expected = reference_latent(CLIPS[clip], geometry)
    assert step == CLIPS[clip].steps and latent.shape == (1, 16, *CLIPS[clip].size)
    assert (latent - expected).abs().max() / expected.abs().max() < 1e-5
    assert latent.std() > 0.5


@pytest.mark.parametrize("case", [case.name for case in all_cases() if not case.name.endswith("-1x1")])
def test_every_plan_gives_the_same_bits(results: Path, case: str) -> None:
    _, expected = kept(results, f"{case.split('-')[0]}-1x1")
    _, found = kept(results, case)
    assert torch.equal(found, expected), f"differs by {(found - expected).abs().max():.3g}"


def test_clips_differ_where_settings_do(results: Path) -> None:
    """Equality above would be cheap if guidance, noise or the start latent did nothing."""
    names = [name for name, settings in CLIPS.items() if settings.size == CLIPS["uneven"].size]
    latents = [kept(results, f"{name}-1x1")[1] for name in names]
    for i, latent in enumerate(latents):
        assert all((latent - other).abs().max() > 0.1 for other in latents[:i])


def test_tokens_do_divide_and_do_not(geometry: Geometry) -> None:
    tokens = {name: geometry.num_tokens((1, 16, *settings.size)) for name, settings in CLIPS.items()}
    assert tokens == {"even": 48, "uneven": 35, "odd": 60, "unguided": 35, "noisy": 35}


def test_every_rank_names_its_step(results: Path) -> None:
    for rank in range(WORLD):
        phases = torch.load(results / f"phases-{rank}.pt")
        assert "step 4 of 4" in phases and "loading transformer" in phases


def test_noises_are_used(geometry: Geometry) -> None:
    assert clip_inputs(CLIPS["noisy"]).table.num_noises > 0
