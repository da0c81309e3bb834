"""A pool of eight ranks: every number of them gives the same clip, and a clip too small for all gets fewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import toy
from torch import Tensor

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import Unplannable
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.job import Job
from comfyui_pipedit.plan import Group, Plan

SECONDS = 60.0
RANKS = 8
NINE = (1, 2, 1, 3, 3)
"""A latent of nine tokens."""
ONE = Plan(Group((0,)), Group((0,)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(toy.config(f"cpu:{RANKS}", str(RANKS), ping_deadline=20.0))
    yield made
    made.close()


def run(engine: Engine, job: Job) -> tuple[Tensor, Plan | None]:
    ticket = engine.submit(job)
    assert ticket.wait(SECONDS)
    return ticket.result(), ticket.plan


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Tensor:
    return run(engine, replace(toy.job(decode=False), plan=ONE))[0]


@pytest.mark.parametrize("degree", range(2, RANKS + 1))
def test_every_degree_gives_the_same_clip(degree: int, engine: Engine, reference: Tensor) -> None:
    plan = Plan(Group(tuple(range(degree))), Group((degree - 1,)))
    assert torch.equal(run(engine, replace(toy.job(decode=False), plan=plan))[0], reference)


def test_nine_tokens_on_eight_ranks_run_on_two(engine: Engine) -> None:
    small = replace(toy.job(decode=False), latent=torch.zeros(NINE), noise=sampling.draw_noise(7, NINE))
    expected, _ = run(engine, replace(small, plan=ONE))
    latent, plan = run(engine, small)
    assert plan is not None and plan.denoise.ranks == (0, 1), plan
    assert torch.equal(latent, expected)
    everyone = Plan(Group(tuple(range(RANKS))), Group((0,)))
    with pytest.raises(Unplannable, match=r"8 denoise ranks are too many for 9 tokens and 8 heads.*at most 2"):
        engine.submit(replace(small, plan=everyone))
