"""One call of the model in the pool: the numbers, what it is told, and that it fails and ends as other requests do."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
import toy
from gates import MakeGate, until
from torch import Tensor

from comfyui_pipedit.errors import Cancelled, InvalidJob, OutOfMemory, Unplannable, WorkerDied
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Branch, EvaluateRequest, Stage
from comfyui_pipedit.models.geometry import to_vae
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.sampling import advance, finish, start

SECONDS = 30.0
TEXT = torch.linspace(-1, 1, 8).view(1, 1, 8)
X = torch.randn(toy.SHAPE, generator=torch.Generator().manual_seed(3))
CALL = "^evaluation at sigma 0.6$"


def request(*texts: Tensor, sigma: float = 0.6, **changes: object) -> EvaluateRequest:
    made = EvaluateRequest(toy.FILES, X, sigma, tuple(map(Branch, texts or (TEXT,))))
    return replace(made, **changes)  # type: ignore[arg-type]


def velocity(x: Tensor, sigma: float, text: Tensor) -> Tensor:
    """The toy network, written out once more."""
    weight, bias = torch.tensor([[0.75, -0.5], [0.25, 0.5]]), torch.tensor([0.125, -0.25])
    mixed = torch.einsum("oc,bcthw->bothw", weight, x) + bias.view(1, 2, 1, 1, 1)
    return mixed + text.mean() * sigma + mixed.mean() * 0.1


def ended(ticket: Ticket) -> Ticket:
    assert ticket.wait(SECONDS), f"{ticket.id} did not end: {ticket.progress()}"
    return ticket


def answer(engine: Engine, asked: EvaluateRequest) -> list[Tensor]:
    found: list[Tensor] = ended(engine.submit(asked)).result()
    return found


def test_it_is_the_networks_velocity_for_each_branch(engine: Engine) -> None:
    found = answer(engine, request(TEXT + 1, TEXT - 2))
    assert len(found) == 2 and all(one.shape == X.shape and one.dtype == torch.float32 for one in found)
    for one, text in zip(found, (TEXT + 1, TEXT - 2), strict=True):
        torch.testing.assert_close(one, velocity(X, 0.6, text), atol=1e-6, rtol=1e-6)


def test_it_sees_x_and_sigma(engine: Engine) -> None:
    changed = request(TEXT + 1, sigma=0.25, x=X * 2)
    torch.testing.assert_close(answer(engine, changed)[0], velocity(X * 2, 0.25, TEXT + 1), atol=1e-6, rtol=1e-6)


def test_all_denoise_ranks_take_part(engine: Engine, gate: MakeGate) -> None:
    hold = gate(1, CALL)
    ticket = engine.submit(request())
    hold.wait()
    assert not ticket.done() and ticket.plan is not None and ticket.plan.denoise.ranks == (0, 1)
    hold.open()
    assert torch.equal(ended(ticket).result()[0], answer(engine, request(plan=Plan(Group((0,)), Group((2,)))))[0])


def test_the_expert_follows_from_sigma() -> None:
    low = toy.weights("transformer")
    files = replace(toy.FILES, transformer=replace(low, path="high"), transformer_low=low, boundary=0.5)
    found = [request(sigma=sigma, files=files).expert.weights.path for sigma in (0.9, 0.5, 0.4999)]
    assert found == ["high", "high", ""]


def test_what_does_not_fit_is_refused_before_the_pool() -> None:
    with pytest.raises(InvalidJob, match="has 3 channels and toy needs 2"):
        request(x=torch.zeros(1, 3, 4, 3, 5))
    with pytest.raises(InvalidJob, match=r"must be a text embedding \[1, L, 8\]"):
        request(torch.zeros(1, 1, 9))


def test_a_plan_for_another_pool_is_refused(engine: Engine) -> None:
    with pytest.raises(Unplannable, match="names rank 7"):
        engine.submit(request(plan=Plan(Group((7,)), Group((2,)))))


def test_a_refusal_of_the_ranks_leaves_the_pool_as_it_is(engine: Engine) -> None:
    expected, pids = answer(engine, request()), engine.pool.pids()
    for branch, error in ((Branch(TEXT, {"image": X}), InvalidJob), (Branch(TEXT, {"too large": X}), OutOfMemory)):
        ticket = ended(engine.submit(request(branches=(Branch(TEXT), branch))))
        with pytest.raises(error, match=r"image|too large"):
            ticket.result()
        assert torch.equal(answer(engine, request())[0], expected[0])
    assert engine.pool.pids() == pids


def test_a_cancel_ends_it_alone(engine: Engine, gate: MakeGate) -> None:
    expected, pids = answer(engine, request()), engine.pool.pids()
    hold = gate(0, CALL)
    ticket = engine.submit(request())
    hold.wait()
    ticket.cancel()
    until(lambda: engine.scheduler.tasks[ticket.id].cancelling, "the engine hears of the cancel")
    hold.open()
    with pytest.raises(Cancelled):
        ended(ticket).result()
    assert ticket.progress().stage is Stage.CANCELLED
    assert torch.equal(answer(engine, request())[0], expected[0]) and engine.pool.pids() == pids


def test_a_killed_rank_ends_it_and_the_next_call_is_the_same(engine: Engine, gate: MakeGate) -> None:
    expected = answer(engine, request())
    hold = gate(0, CALL)
    ticket = engine.submit(request())
    hold.wait()
    os.kill(engine.pool.pids()[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"was killed by SIGKILL.*Nothing was lost but this work"):
        ended(ticket).result()
    assert torch.equal(answer(engine, request())[0], expected[0])


def test_it_waits_while_a_rank_that_it_does_not_need_comes_back(engine: Engine, gate: MakeGate) -> None:
    expected = answer(engine, request())
    hold = gate(0, CALL)
    ticket = engine.submit(request())
    hold.wait()
    os.kill(engine.pool.pids()[2], signal.SIGKILL)
    assert torch.equal(ended(ticket).result()[0], expected[0])


def test_a_clip_by_single_calls_has_the_bits_of_the_pools_own(engine: Engine) -> None:
    job = toy.job(decode=False)
    assert job.negative is not None
    state = start(job.table, job.noise, job.latent)
    for row in (row for step in job.table.steps for row in step):
        asked = EvaluateRequest(toy.FILES, state.x, row.sigma, (job.positive, job.negative))
        one, other = (state.x - found * row.sigma for found in answer(engine, asked))
        state = advance(row, state, other + (one - other) * job.cfg)
    latent = to_vae(finish(job.table, state), toy.GEOMETRY)
    assert torch.equal(latent, ended(engine.submit(job)).result())


def test_it_and_a_clip_take_turns(engine: Engine) -> None:
    latent, expected = ended(engine.submit(toy.job(decode=False))).result(), answer(engine, request())
    tickets = [engine.submit(asked) for asked in (request(), toy.job(decode=False), request(), request())]
    assert torch.equal(ended(tickets[1]).result(), latent)
    assert all(torch.equal(ended(ticket).result()[0], expected[0]) for ticket in (tickets[0], *tickets[2:]))
