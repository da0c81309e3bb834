"""Two experts in one clip, on ranks that have room for one network: the other is unloaded when its turn is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from gates import MakeGate
from torch import Tensor

from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.residence import Residence
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Job, ModelFiles, Weights
from comfyui_pipedit.sampling import advance, finish, start
from comfyui_pipedit.wire.messages import Loaded, Message, Unload

SECONDS = 30.0
NARROW = str(Path(__file__).with_name("narrow_family.py"))


@pytest.fixture(scope="module")
def engine(gate_folder: Path) -> Iterator[Engine]:
    made = Engine(toy.config(preload=(toy.TOY, NARROW, toy.GATES)))
    yield made
    made.close()


def files(low: str | None = "low") -> ModelFiles:
    def weights(stamp: str) -> Weights:
        return Weights("narrow", "transformer", "", stamp=stamp)

    return replace(toy.FILES, transformer=weights("high"), transformer_low=weights(low) if low else None)


def job(switch_step: int | None, low: str | None = "low", seed: int = 7) -> Job:
    return replace(toy.job(seed, decode=False), files=files(low), switch_step=switch_step)


def denoise(engine: Engine, *jobs: Job) -> list[Tensor]:
    return [result(ticket) for ticket in [engine.submit(one) for one in jobs]]


def result(ticket: Ticket) -> Tensor:
    assert ticket.wait(SECONDS)
    return ticket.result()


def by_hand(given: Job) -> Tensor:
    """The toy's clip in this process, each step with its expert."""
    gains = [2.0 if given.expert(step).weights.stamp == "low" else 1.0 for step in range(toy.STEPS)]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (toy.GEOMETRY.mean, toy.GEOMETRY.std))
    mix, bias = torch.tensor([[0.75, -0.5], [0.25, 0.5]]), torch.tensor([0.125, -0.25])
    state = start(given.table, given.noise, given.latent)

    def denoised(x: Tensor, sigma: float, text: Tensor, gain: float) -> Tensor:
        mixed = torch.nn.functional.linear(x.movedim(1, -1), mix, bias).movedim(-1, 1)
        return x - sigma * gain * (mixed + text.mean() * sigma + mixed.mean() * 0.1)

    for gain, rows in zip(gains, given.table.steps, strict=True):
        for row in rows:
            texts = (given.positive.text, given.negative.text)
            one, other = (denoised(state.x, row.sigma, text, gain) for text in texts)
            state = advance(row, state, other + (one - other) * given.cfg, given.noises)
    return finish(given.table, state) * std + mean


@pytest.mark.parametrize("switch_step", [0, 1, 3, 4])
def test_each_step_is_computed_by_its_expert(engine: Engine, switch_step: int) -> None:
    given = job(switch_step)
    latent, = denoise(engine, given)
    assert torch.allclose(latent, by_hand(given), atol=1e-5)


def test_the_switch_of_itself_is_where_sigma_falls_below_the_boundary() -> None:
    given = job(None)
    sigmas = [rows[0].sigma for rows in given.table.steps]
    assert sigmas[given.switch - 1] >= given.files.boundary > sigmas[given.switch]
    assert job(None, low=None).switch == toy.STEPS


def test_different_switches_give_different_clips(engine: Engine) -> None:
    latents = denoise(engine, *(job(step) for step in (0, 1, 2, 4)))
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(latents, latents[1:], strict=False))


def test_clips_take_turns_on_the_one_place(engine: Engine) -> None:
    jobs = [job(step, seed=seed) for seed, step in enumerate((1, 3, 0, 4, 2))]
    alone = [denoise(engine, one)[0] for one in jobs]
    together = denoise(engine, *jobs)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_a_network_in_use_is_not_unloaded(engine: Engine, gate: MakeGate) -> None:
    hold = gate(0, "^step 2 of 4$")
    first = engine.submit(job(4))
    hold.wait()
    second = engine.submit(job(0, seed=3))
    hold.open()
    assert torch.allclose(result(first), by_hand(job(4)), atol=1e-5)
    assert torch.allclose(result(second), by_hand(job(0, seed=3)), atol=1e-5)


class Recorder:
    """A pool of one CPU rank that is told things and does nothing."""

    devices = ("cpu:0",)

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, rank: int, message: Message, fds: object = ()) -> None:
        self.sent.append(message)


def test_weights_held_back_are_asked_for_again_when_work_ended() -> None:
    pool, numbers = Recorder(), itertools.count(1)
    residence = Residence(pool, lambda: next(numbers))
    high, low = (expert.weights for expert in files().experts)
    assert not residence.ensure(high, (0,))
    residence.loaded(0, Loaded(0, high, 1))
    assert residence.ensure(high, (0,)) and not residence.ensure(low, (0,))
    assert residence.refused(0) == {low}
    assert not residence.make_room(0, used={high, low})
    residence.hold_back(0, {low})
    assert not residence.ensure(low, (0,)) and len(pool.sent) == 2
    residence.release()
    assert not residence.ensure(low, (0,)) and len(pool.sent) == 3
    assert residence.make_room(0, used={low}) and not residence.has(0, high)
    assert isinstance(pool.sent[-1], Unload) and pool.sent[-1].weights == (high,)


def test_what_never_fits_is_an_error_of_that_clip_alone(engine: Engine) -> None:
    generation = engine.pool.generation
    ticket = engine.submit(job(2, low="huge"))
    assert ticket.wait(SECONDS)
    with pytest.raises(OutOfMemory, match="no room for it"):
        ticket.result()
    assert torch.allclose(denoise(engine, job(4))[0], by_hand(job(4)), atol=1e-5)
    assert engine.pool.generation == generation
