"""Aco: idle decode ranks own a share of the heads. Same bits with them, without, and where they come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_wan
import toy
from gates import Alive, MakeGate, until
from torch import Tensor, equal

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import Cancelled, WorkerDied
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.scheduler import LEASES_OUT
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Branch, DecodeRequest, Job, ModelFiles, Span
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.verify_tiny import clip, tiny_models

SECONDS = 60.0
STEPS = 10
SIZE = (3, 8, 8)
HEADS = 4
HELPING = "^helping to denoise up to step"
SHORT = str(Path(__file__).with_name("short_helper.py"))
GROUPS = {"1+1": ((0,), (3,)), "2+1": ((0, 1), (3,)), "3+1": ((0, 1, 2), (3,)), "2+2": ((0, 1), (2, 3)),
          "1+3": ((2,), (0, 1, 3))}


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, ModelFiles]]:
    tiny_wan.use_worker_site()
    with tiny_models() as models:
        yield models


@pytest.fixture(scope="module")
def engine(gate_folder: Path) -> Iterator[Engine]:
    """3 + 1 ranks that help each other, with gates; every test leaves it working."""
    made = Engine(settings(helpers=True))
    yield made
    made.close()


def settings(*preload: str, **more: bool) -> EngineConfig:
    return EngineConfig(devices="cpu:4", split="3+1", preload=(*preload, toy.GATES), ping_interval=0.5,
                        ping_deadline=5.0, **more)


def job(files: dict[str, ModelFiles], name: str = "t2v", seed: int = 1) -> Job:
    """A guided clip; of two guides, the negative branch of VACE gets one."""
    made = clip(name, files[name], SIZE, STEPS)
    made = replace(made, noise=tiny_noise(made, seed), seed=seed, switch_step=5 if name == "two-experts" else None)
    assert made.negative is not None
    extras = {key: tensor[:1] for key, tensor in made.negative.extras.items()}
    return replace(made, negative=Branch(made.negative.text, extras)) if name == "vace" else made


def tiny_noise(made: Job, seed: int) -> Tensor:
    return made.noise.roll(seed - 1, dims=-1)


def result(ticket: Ticket) -> tuple[Tensor, Tensor]:
    """(latent, frames)"""
    assert ticket.frames is not None and ticket.wait(SECONDS) and ticket.frames.wait(SECONDS)
    return ticket.result(), ticket.frames.result()


def run(engine: Engine, made: Job) -> tuple[Tensor, Tensor]:
    return result(engine.submit(made))


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return equal(got[0], expected[0]) and equal(got[1], expected[1])


def spans(engine: Engine, ticket: Ticket, name: str) -> list[Span]:
    return [span for span in engine.spans() if span.job == ticket.id and span.name == name]


References = dict[tuple[str, int], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def references(engine: Engine, files: dict[str, ModelFiles]) -> References:
    """Name of a variant and seed -> the clip by one rank alone."""
    alone = Plan(Group((0,)), Group((0,)))
    wanted = [("t2v", 1), ("t2v", 2), ("vace", 1), ("two-experts", 1)]
    return {key: run(engine, replace(job(files, *key), plan=alone)) for key in wanted}


@pytest.mark.parametrize("split", GROUPS)
def test_helpers_change_no_bits(split: str, engine: Engine, files: dict[str, ModelFiles],
                                references: References) -> None:
    denoise, decode = GROUPS[split]
    for chunks in range(1, HEADS // len(denoise) + 1):
        ticket = engine.submit(replace(job(files), plan=Plan(Group(denoise), Group(decode), chunks)))
        assert same(result(ticket), references["t2v", 1]), f"{chunks} chunks"
        served, denoised = spans(engine, ticket, "help"), spans(engine, ticket, "denoise")
        assert {span.rank for span in served} == set(decode) and {span.rank for span in denoised} == set(denoise)
        assert all(any(one.start < other.end and other.start < one.end for other in denoised) for one in served)


@pytest.mark.parametrize("name", ["vace", "two-experts"])
def test_what_is_exchanged_is_counted_and_not_declared(name: str, engine: Engine, files: dict[str, ModelFiles],
                                                       references: References) -> None:
    """VACE has a column of blocks for each guide; each of two experts is counted by itself."""
    ticket = engine.submit(replace(job(files, name), plan=Plan(Group((0, 1)), Group((3,)), 2)))
    assert same(result(ticket), references[name, 1])
    served = spans(engine, ticket, "help")
    alone = [span for span in spans(engine, ticket, "denoise") if span.rank == 0][len(served):]
    assert served and len(alone) == LEASES_OUT * (2 if name == "two-experts" else 1)


def test_a_rank_that_has_something_to_decode_does_not_help_and_comes_back(
        engine: Engine, files: dict[str, ModelFiles], references: References, gate: MakeGate) -> None:
    decode = gate(3, "^decode piece 2 of")
    first = engine.submit(job(files))
    decode.wait()
    step = gate(0, f"^step 6 of {STEPS}")
    second = engine.submit(job(files, seed=2))
    step.wait()  # five steps without rank 3
    assert not spans(engine, second, "help")
    decode.open()
    assert same(result(first), references["t2v", 1])
    step.open()
    assert same(result(second), references["t2v", 2])
    assert spans(engine, second, "help")


def test_a_decode_waits_for_no_more_than_what_was_promised(
        engine: Engine, files: dict[str, ModelFiles], references: References, gate: MakeGate) -> None:
    hold = gate(3, HELPING)
    clip_ticket = engine.submit(job(files))
    hold.wait()
    before = len(spans(engine, clip_ticket, "help"))
    latent, frames = references["t2v", 2]
    decode = engine.submit(DecodeRequest(files["t2v"].vae, files["t2v"].geometry, latent))
    until(lambda: len(engine.status()["tasks"]) == 2, "the decode is in the line")
    hold.open()
    assert decode.wait(SECONDS) and equal(decode.result(), frames)
    decoded = min(span.start for span in engine.spans() if span.job == decode.id)
    assert same(result(clip_ticket), references["t2v", 1])
    promised = [span for span in spans(engine, clip_ticket, "help")[before:] if span.end <= decoded]
    assert 1 <= len(promised) <= LEASES_OUT


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("split", ["1+1", "3+1"])
def test_a_lost_helper_costs_no_clip(split: str, fault: signal.Signals, engine: Engine, files: dict[str, ModelFiles],
                                     references: References, gate: MakeGate) -> None:
    denoise, decode = map(Group, GROUPS[split])
    hold = gate(3, HELPING)
    ticket = engine.submit(replace(job(files), plan=Plan(denoise, decode)))
    hold.wait()
    pids, generation = engine.pool.pids(), engine.pool.generation
    alive, again = Alive(pids), gate(denoise.leader, f"^step 1 of {STEPS}")  # a step that must not run again
    os.kill(pids[3], fault)
    assert same(result(ticket), references["t2v", 1])
    assert engine.pool.generation == generation + 1 and alive.all_gone() == []
    with pytest.raises(TimeoutError):
        again.wait(0)


def test_a_denoise_rank_killed_while_it_is_helped(engine: Engine, files: dict[str, ModelFiles],
                                                  references: References, gate: MakeGate) -> None:
    hold = gate(3, HELPING)
    ticket = engine.submit(job(files))
    hold.wait()
    alive = Alive(engine.pool.pids())
    os.kill(engine.pool.pids()[1], signal.SIGKILL)
    assert ticket.wait(SECONDS)
    with pytest.raises(WorkerDied, match=rf"^rank 1 .*Step \d of {STEPS} is kept"):
        ticket.result()
    assert alive.all_gone() == []
    assert same(run(engine, job(files)), references["t2v", 1])


def test_a_cancel_waits_for_the_helper(engine: Engine, files: dict[str, ModelFiles], references: References,
                                       gate: MakeGate) -> None:
    hold = gate(3, HELPING)
    ticket, generation = engine.submit(job(files)), engine.pool.generation
    hold.wait()
    ticket.cancel()
    hold.open()
    assert ticket.wait(SECONDS)
    with pytest.raises(Cancelled):
        ticket.result()
    assert same(run(engine, job(files)), references["t2v", 1])
    assert engine.pool.generation == generation


def test_a_helper_without_memory_is_left_out(gate_folder: Path, files: dict[str, ModelFiles],
                                             references: References) -> None:
    engine = Engine(settings(SHORT, helpers=True))
    try:
        ticket = engine.submit(job(files))
        assert same(result(ticket), references["t2v", 1])
        assert engine.pool.generation == 1 and not spans(engine, ticket, "help")
    finally:
        engine.close()


def test_off_by_default(gate_folder: Path, files: dict[str, ModelFiles], references: References) -> None:
    engine = Engine(settings())
    try:
        assert same(run(engine, job(files)), references["t2v", 1])
        assert {span.name for span in engine.spans()} == {"denoise", "decode"}
    finally:
        engine.close()
