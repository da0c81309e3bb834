"""What the pool cannot do for one request ends that request alone, with its reason; ranks and other requests go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from gates import until
from torch import Tensor

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import InvalidJob, OutOfMemory, PoolClosed
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.policies import Candidate
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Job, Tiling, Weights

SECONDS = 30.0
TIGHT = str(Path(__file__).with_name("tight_family.py"))
TIGHT_VAE = Weights("tight", "vae", "")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(toy.config(preload=(toy.TOY, TIGHT)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(engine: Engine) -> tuple[Tensor, Tensor]:
    return clip(engine, toy.job())


def clip(engine: Engine, job: Job) -> tuple[Tensor, Tensor]:
    """(latent, frames) of a clip that must succeed."""
    ticket = engine.submit(job)
    assert ticket.frames is not None
    return ended(ticket).result(), ended(ticket.frames).result()


def ended(ticket: Ticket) -> Ticket:
    assert ticket.wait(SECONDS), f"{ticket.id} did not end: {ticket.progress()}"
    return ticket


def assert_untouched(engine: Engine, pids: Sequence[int], reference: tuple[Tensor, Tensor]) -> None:
    latent, frames = clip(engine, toy.job())
    assert torch.equal(latent, reference[0]) and torch.equal(frames, reference[1])
    assert engine.pool.pids() == pids


def test_out_of_memory_in_a_decode_leaves_the_latent_and_tiles_still_work(
        engine: Engine, reference: tuple[Tensor, Tensor]) -> None:
    pids = engine.pool.pids()
    ticket = engine.submit(replace(toy.job(), decode=TIGHT_VAE))
    assert ticket.frames is not None
    with pytest.raises(OutOfMemory, match=r"1\.5 GiB short"):
        ended(ticket.frames).result()
    assert torch.equal(ticket.result(), reference[0])
    tiled = replace(toy.decode_request(ticket.result()), weights=TIGHT_VAE, tiling=Tiling())
    assert torch.equal(ended(engine.submit(tiled)).result(), reference[1])
    assert_untouched(engine, pids, reference)


def test_a_rank_that_refused_gets_as_much_work_ahead_as_before(
        engine: Engine, reference: tuple[Tensor, Tensor]) -> None:
    whole = replace(toy.decode_request(reference[0]), weights=TIGHT_VAE)
    for _ in range(3):
        assert ended(engine.submit(whole)).failed()
    ended(engine.submit(toy.text_request("idle")))
    assert [engine.scheduler.leases_out(rank) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("steps", [600, 10_000])
def test_a_clip_of_very_many_steps_runs_or_is_refused_alone(
        steps: int, engine: Engine, reference: tuple[Tensor, Tensor]) -> None:
    """600 lcm steps have more noises than a frame takes descriptors; 10,000 rows are more than a frame holds."""
    pids = engine.pool.pids()
    table = sampling.solver_table("lcm", sampling.sigmas("normal", steps, shift=3.0, sampler="lcm"))
    noises = sampling.draw_noises(7, toy.SHAPE, table.num_noises)
    ticket = ended(engine.submit(replace(toy.job(), table=table, noises=tuple(noises), decode=None)))
    if steps == 600:
        assert ticket.result().isfinite().all()
    else:
        with pytest.raises(InvalidJob, match="is too long for the pool, use fewer steps"):
            ticket.result()
    assert_untouched(engine, pids, reference)


def test_a_text_larger_than_a_frame_is_refused_alone(engine: Engine, reference: tuple[Tensor, Tensor]) -> None:
    pids = engine.pool.pids()
    with pytest.raises(InvalidJob, match="is too long for the pool, use fewer steps or less text"):
        ended(engine.submit(toy.text_request("a" * 2**20))).result()
    assert_untouched(engine, pids, reference)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_fails_ends_all_tickets() -> None:
    def broken(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        raise ZeroDivisionError("a policy with a defect")

    made = Engine(toy.config("cpu:1", "1"), broken)
    try:
        with pytest.raises(PoolClosed, match="the engine failed, see ComfyUI's log"):
            ended(made.submit(toy.job())).result()
        with pytest.raises(PoolClosed):
            made.submit(toy.job())
        until(lambda: made.pool.pids() == () and made.pool.launcher_pid is None, "no process is left")
    finally:
        made.close()
