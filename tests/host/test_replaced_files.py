"""A weight file that is replaced under its path while the pool is up: the old weights are served to nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import toy
from gates import MakeGate
from torch import Tensor

from comfyui_pipedit import loaders
from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.host.content import job_key
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.job import DecodeRequest, Weights

SECONDS = 30.0
FILED = str(Path(__file__).with_name("filed_family.py"))
LATENT = torch.linspace(0.0, 1.0, 120).view(toy.SHAPE)
RANK = 2


@pytest.fixture(scope="module")
def engine(gate_folder: Path) -> Iterator[Engine]:
    made = Engine(toy.config(preload=(toy.TOY, FILED, toy.GATES)))
    yield made
    made.close()


def write(root: Path, gain: float, dtype: torch.dtype) -> Weights:
    """Puts a VAE of that gain into the place of the one before, by a rename; files of all gains have one size."""
    folder = root / "vae"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({}))
    safetensors.torch.save_file({"gain": torch.full((4,), gain, dtype=dtype)[:1].clone()}, folder / "newer")
    (folder / "newer").replace(folder / "diffusion_pytorch_model.safetensors")
    return Weights("filed", "vae", str(root), stamp=loaders.stamp(root, "vae"))


def decode(engine: Engine, weights: Weights) -> Tensor:
    ticket = engine.submit(DecodeRequest(weights, toy.GEOMETRY, LATENT))
    assert ticket.wait(SECONDS)
    return ticket.result().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["mapped", "converted copy"])
def test_the_new_file_is_used_and_the_old_weights_are_gone(dtype: torch.dtype, engine: Engine, tmp_path: Path) -> None:
    old = write(tmp_path, 1.0, dtype)
    one = decode(engine, old)
    assert one.max() > 0.4 and torch.equal(decode(engine, old), one)
    new = write(tmp_path, 2.0, dtype)
    assert old.stamp != new.stamp
    assert torch.equal(decode(engine, new), 2 * one)
    assert engine.scheduler.residence.has(RANK, new) and not engine.scheduler.residence.has(RANK, old)


def test_what_a_running_clip_still_needs_is_not_dropped(engine: Engine, gate: MakeGate, tmp_path: Path) -> None:
    old = write(tmp_path, 1.0, torch.float32)
    one = decode(engine, old)
    hold = gate(0, "^step 2 of 4$")
    ticket = engine.submit(replace(toy.job(), decode=old))
    hold.wait()
    new = write(tmp_path, 2.0, torch.float32)
    assert torch.equal(decode(engine, new), 2 * one)
    assert engine.scheduler.residence.has(RANK, old)
    hold.open()
    assert ticket.frames is not None and ticket.frames.wait(SECONDS)
    assert ticket.frames.result().isfinite().all()
    assert torch.equal(decode(engine, new), 2 * one) and not engine.scheduler.residence.has(RANK, old)


def test_a_graph_that_was_read_before_the_change_is_told(engine: Engine, tmp_path: Path) -> None:
    old = write(tmp_path, 1.0, torch.float32)
    write(tmp_path, 2.0, torch.float32)
    with pytest.raises(LoadError, match=r"vae was changed after the graph had read it; queue again"):
        decode(engine, old)
    assert engine.pool.state == "ready"


def test_a_clip_of_other_weights_does_not_go_on_from_a_kept_latent() -> None:
    job = toy.job()
    stamped = replace(job, files=replace(job.files, transformer=replace(job.files.transformer, stamp="other")))
    assert job_key(stamped) != job_key(job) == job_key(toy.job())
