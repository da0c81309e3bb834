"""LoRAs on a pool of the real Wan classes: a state of resident weights, the same on every rank, for each expert."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lora_files
import pytest
import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit import loaders
from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.job import LoraUse, ModelFiles
from comfyui_pipedit.loaders.lora import read_lora
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.requests import Settings, make_job

SECONDS = 60.0
SETTINGS = Settings(seed=3, steps=4, cfg=1.0)
SHAPE = (1, 16, 2, 6, 8)
TWO, ONE = Plan(Group((0, 1)), Group((1,))), Plan(Group((0,)), Group((0,)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    tiny_wan.use_worker_site()
    return loaders.inspect(tiny_wan.write_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(EngineConfig(devices="cpu:2"))
    yield made
    made.close()


@pytest.fixture
def use(files: ModelFiles, tmp_path: Path) -> LoraUse:
    """A LoRA of this model at strength 0.8."""
    return read_lora(write(files, tmp_path / "one.safetensors", seed=1)).use(0.8)


def write(files: ModelFiles, path: Path, seed: int) -> Path:
    shapes = {name: entry.shape for name, entry in loaders.open_weights(files.transformer).entries.items()}
    return lora_files.write(path, lora_files.state("comfy", shapes, seed=seed))


def latent(engine: Engine, files: ModelFiles, plan: Plan = TWO, switch_step: int | None = None) -> Tensor:
    text = torch.linspace(-1, 1, 16 * tiny_wan.TEXT_WIDTH).view(1, 16, -1)
    job = replace(make_job(files, [text], SHAPE, SETTINGS, plan=plan), switch_step=switch_step)
    ticket = engine.submit(job)
    assert ticket.wait(SECONDS)
    return ticket.result()


def test_on_off_and_on_again(engine: Engine, files: ModelFiles, use: LoraUse) -> None:
    without, with_it = latent(engine, files), latent(engine, replace(files, loras=(use,)))
    assert (without - with_it).abs().max() > 1e-2
    assert torch.equal(latent(engine, files), without)
    assert torch.equal(latent(engine, replace(files, loras=(use,))), with_it)
    other = latent(engine, replace(files, loras=(replace(use, strength=0.4),)))
    assert (other - with_it).abs().max() > 1e-3
    assert len(engine.status()["resident"]["0"]) == 1, "one copy of the weights for all"


def test_every_rank_has_it(engine: Engine, files: ModelFiles, use: LoraUse) -> None:
    adapted = replace(files, loras=(use,))
    assert torch.equal(latent(engine, adapted, TWO), latent(engine, adapted, ONE))


def test_clips_that_take_turns_do_not_see_each_others(engine: Engine, files: ModelFiles, use: LoraUse) -> None:
    kinds = [files, replace(files, loras=(use,)), files, replace(files, loras=(replace(use, strength=-0.5),))]
    alone = [latent(engine, kind) for kind in kinds]
    text = torch.linspace(-1, 1, 16 * tiny_wan.TEXT_WIDTH).view(1, 16, -1)
    tickets = [engine.submit(make_job(kind, [text], SHAPE, SETTINGS, plan=TWO)) for kind in kinds]
    for ticket, expected in zip(tickets, alone, strict=True):
        assert ticket.wait(SECONDS)
        assert torch.equal(ticket.result(), expected)


@pytest.mark.parametrize("switch", [0, 2, 4])
def test_each_expert_has_its_own(engine: Engine, files: ModelFiles, use: LoraUse, switch: int) -> None:
    """Both experts are one file here: with a LoRA on the low one only, the steps from the switch on have it."""
    both = replace(files, transformer_low=files.transformer, loras_low=(use,))
    found = latent(engine, both, switch_step=switch)
    plain, adapted = latent(engine, files), latent(engine, replace(files, loras=(use,)))
    if switch == 4:
        assert torch.equal(found, plain)
    elif switch == 0:
        assert torch.equal(found, adapted)
    else:
        assert min((found - plain).abs().max(), (found - adapted).abs().max()) > 1e-3


def test_a_file_that_was_changed_is_said_and_the_pool_goes_on(engine: Engine, files: ModelFiles, use: LoraUse) -> None:
    without, generation = latent(engine, files), engine.pool.generation
    stat = Path(use.path).stat()
    os.utime(use.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(LoadError, match="was changed after the graph had read it"):
        latent(engine, replace(files, loras=(use,)))
    assert torch.equal(latent(engine, files), without)
    assert engine.pool.generation == generation
