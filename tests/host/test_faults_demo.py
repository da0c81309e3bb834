"""The fault table's short form on the demo model itself: idle, in mid-step and in mid-decode, killed and stopped."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toy
from gates import Alive, MakeGate, until
from torch import Tensor

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import PoolError
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.requests import Clip, Settings, encode_texts, find_model, make_job

SECONDS = 10.0
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
AT_WORK = {
    "mid-step": (0, "^step 2 of 3: ", "Step 1 of 3 is kept"),
    "mid-decode": (2, "^decode piece 2 of 3$", "The finished latent is kept"),
}


@pytest.fixture(scope="module")
def engine(gate_folder: Path) -> Iterator[Engine]:
    made = Engine(EngineConfig(devices="cpu:3", split="2+1", preload=(toy.GATES,), ping_interval=0.5,
                               ping_deadline=3.0))
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[Tensor]:
    return encode_texts(engine, find_model("demo"), ("a red circle moving right on black background", ""))


def submit(engine: Engine, texts: list[Tensor]) -> Ticket:
    files = find_model("demo")
    shape = Clip(64, 64, 9).latent_shape(files)
    return engine.submit(make_job(files, texts, shape, Settings(seed=5, steps=3, sampler="uni_pc"), decode=True))


def result(ticket: Ticket) -> tuple[Tensor, Tensor]:
    assert ticket.frames is not None and ticket.frames.wait(SECONDS * 6)
    return ticket.result(), ticket.frames.result()


@pytest.fixture(scope="module")
def reference(engine: Engine, texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    latent, frames = result(submit(engine, texts))
    return latent, frames.clone()


def assert_the_same_again(engine: Engine, texts: list[Tensor], reference: tuple[Tensor, Tensor]) -> None:
    latent, frames = result(submit(engine, texts))
    assert torch.equal(latent, reference[0]) and torch.equal(frames, reference[1])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", AT_WORK)
def test_at_work(name: str, fault: str, engine: Engine, texts: list[Tensor], gate: MakeGate,
                 reference: tuple[Tensor, Tensor]) -> None:
    rank, pattern, kept = AT_WORK[name]
    hold = gate(rank, pattern)
    ticket = submit(engine, texts)
    phase = hold.wait()
    pids = engine.pool.pids()
    alive = Alive(pids)
    os.kill(pids[rank], FAULTS[fault])
    hit = ticket.frames if name == "mid-decode" else ticket
    assert hit is not None and hit.wait(SECONDS)
    with pytest.raises(PoolError) as caught:
        hit.result()
    text = str(caught.value).splitlines()[0]
    assert text.startswith(f"rank {rank} (CPU rank {rank}, pid {pids[rank]}), in phase '{phase}', ")
    assert fault in text and kept in text and text.endswith("The pool restarts by itself.")
    assert alive.all_gone() == []
    assert_the_same_again(engine, texts, reference)


@pytest.mark.parametrize("fault", FAULTS)
def test_idle(fault: str, engine: Engine, texts: list[Tensor], reference: tuple[Tensor, Tensor],
              caplog: pytest.LogCaptureFixture) -> None:
    rank = 1
    until(lambda: {engine.pool.phase(rank) for rank in range(3)} == {"idle"}, "all ranks idle")
    pids = engine.pool.pids()
    alive = Alive(pids)
    os.kill(pids[rank], FAULTS[fault])
    pattern = rf"^rank {rank} \(CPU rank {rank}, pid {pids[rank]}\), in phase 'idle', (is|was) {fault}.*by itself\."
    until(lambda: any(re.search(pattern, message) for message in caplog.messages), "the loss in the log", SECONDS)
    assert alive.all_gone() == []
    assert_the_same_again(engine, texts, reference)
