"""A cancel in every phase ends the job alone: no rank is lost, and the same seed gives the same clip afterwards."""

from __future__ import annotations

import pytest
import torch
import toy
from gates import MakeGate, until
from torch import Tensor

from comfyui_pipedit.errors import Cancelled
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Stage

SECONDS = 10.0
CLIP_PHASES = {
    "mid-step": (0, "^step 2 of 4$"),
    "exchange": (1, "^step 3 of 4: gather"),
    "hand-off out": (0, "^keeping the finished latent$"),
}
DECODE_PHASES = {"hand-off in": (2, "^preparing a decode$"), "mid-decode": (2, "^decode piece 2 of 4$")}


@pytest.fixture(scope="module")
def reference(engine: Engine) -> tuple[Tensor, Tensor]:
    return run(engine)


def run(engine: Engine) -> tuple[Tensor, Tensor]:
    """(latent, frames) of the one clip of these tests."""
    ticket = engine.submit(toy.job())
    assert ticket.frames is not None and ticket.frames.wait(SECONDS * 3)
    return ticket.result(), ticket.frames.result()


def cancel(engine: Engine, ticket: Ticket) -> None:
    """Returns when the engine knows of it."""
    ticket.cancel()
    until(lambda: ticket.done() or is_cancelling(engine, ticket), "the engine hears of the cancel")


def is_cancelling(engine: Engine, ticket: Ticket) -> bool:
    """Whether the engine has the task, and knows; it may not have it yet, or no more."""
    task = engine.scheduler.tasks.get(ticket.id)
    return task is not None and task.cancelling


def assert_cancelled(ticket: Ticket) -> None:
    assert ticket.wait(SECONDS)
    with pytest.raises(Cancelled, match=f"^{ticket.id} was cancelled"):
        ticket.result()
    assert ticket.progress().stage is Stage.CANCELLED


def assert_same_pool_and_clip(engine: Engine, pids: tuple[int, ...], reference: tuple[Tensor, Tensor]) -> None:
    latent, frames = run(engine)
    assert torch.equal(latent, reference[0]) and torch.equal(frames, reference[1])
    assert engine.pool.pids() == pids


@pytest.mark.parametrize("name", CLIP_PHASES)
def test_a_clip(name: str, engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    pids = engine.pool.pids()
    hold = gate(*CLIP_PHASES[name])
    ticket = engine.submit(toy.job())
    hold.wait()
    cancel(engine, ticket)
    hold.open()
    assert_cancelled(ticket)
    assert ticket.frames is not None and ticket.frames.progress().stage is Stage.CANCELLED
    assert_same_pool_and_clip(engine, pids, reference)


@pytest.mark.parametrize("name", DECODE_PHASES)
def test_a_decode(name: str, engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    pids = engine.pool.pids()
    hold = gate(*DECODE_PHASES[name])
    ticket = engine.submit(toy.job())
    hold.wait()
    assert ticket.frames is not None
    cancel(engine, ticket.frames)
    hold.open()
    assert_cancelled(ticket.frames)
    assert torch.equal(ticket.result(), reference[0]), "the finished latent outlives its decode"
    assert_same_pool_and_clip(engine, pids, reference)


def test_a_clip_in_the_line(engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    pids = engine.pool.pids()
    hold = gate(0, "^step 1 of 4$")
    first = engine.submit(toy.job())
    hold.wait()
    waiting = [engine.submit(toy.job(seed)) for seed in (1, 2, 3)]
    cancel(engine, waiting[1])
    hold.open()
    assert_cancelled(waiting[1])
    for ticket in (first, waiting[0], waiting[2]):
        assert ticket.frames is not None and ticket.frames.wait(SECONDS) and not ticket.frames.failed()
    assert torch.equal(first.result(), reference[0])
    assert_same_pool_and_clip(engine, pids, reference)


def test_while_the_pool_starts(engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    made = Engine(toy.config(preload=(toy.TOY, toy.GATES)))
    try:
        hold = gate(1, "^joining the world$")
        ticket = made.submit(toy.job())
        hold.wait()
        cancel(made, ticket)
        assert_cancelled(ticket)
        hold.open()
        latent, frames = run(made)
        assert torch.equal(latent, reference[0]) and torch.equal(frames, reference[1])
    finally:
        made.close()
