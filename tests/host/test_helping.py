"""What a scripted rank that helps owes, and what is done when it or the clip's own ranks are short of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_gpus import Bench, Gpu, ScriptedPool, expect_real_sizes

from comfyui_pipedit.errors import PoolError
from comfyui_pipedit.host.pool import FromRank
from comfyui_pipedit.host.scheduler import LEASES_OUT
from comfyui_pipedit.host.tasks import ClipTask
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.wire.messages import Attention, DecodeOpen, Help, Lease, LeaseDone, Message, Refused

HEADS = 2
ROW = Attention(6, 1, HEADS, 16, "float32", None, False)
STEPS = 12


class Helpful(ScriptedPool):
    """Counts attentions as ranks do; what was sent to helpers is answered by `answer` alone."""

    def restart(self, reason: PoolError) -> None:
        super().restart(reason)
        for gpu in self.gpus:
            gpu.networks.clear()

    def _answer(self, rank: int, gpu: Gpu, message: Message) -> Message | None:
        if isinstance(message, Help):
            return None
        answer = super()._answer(rank, gpu, message)
        return replace(answer, attention=ROW) if isinstance(answer, LeaseDone) else answer


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Rank 0 denoises, ranks 1 and 2 help and decode."""
    expect_real_sizes(monkeypatch)
    return Bench(Gpu(), Gpu(), Gpu(), pool=Helpful, helpers=True)


def clip(bench: Bench) -> ClipTask:
    made = bench.clip(steps=STEPS)
    assert isinstance(made, ClipTask)
    made.plan = Plan(Group((0,)), Group((1, 2)))
    return made


def answer(bench: Bench, message: Help, rank: int = 1) -> None:
    bench.scheduler.handle(FromRank(rank, LeaseDone(rank, message.job, message.last, ()), ()))
    bench.run()


def test_whoever_counted_is_helped_by_as_many_as_have_heads(bench: Bench) -> None:
    clip(bench)
    bench.run()
    helped = [lease for _, lease in bench.sent(Lease) if lease.helpers]
    told = bench.sent(Help)
    assert [lease.helpers for _, lease in bench.sent(Lease)[:LEASES_OUT]] == [()] * LEASES_OUT
    assert {lease.helpers for lease in helped} == {(1,)} and {rank for rank, _ in told} == {1}, "2 heads, 2 ranks"
    assert [(each.seq, each.last) for _, each in told] == [(lease.seq, lease.last) for lease in helped]
    assert [each.attention.calls for _, each in told] == [6 * (lease.last - lease.first) for lease in helped]


def test_a_helper_is_promised_no_more_than_others_and_a_clip_ends_after_its_answers(bench: Bench) -> None:
    task = clip(bench)
    bench.run()
    answered = 0
    while answered < len(bench.sent(Help)):
        assert len(bench.sent(Help)) - answered <= LEASES_OUT and not task.ticket.done() and task.busy
        answer(bench, bench.sent(Help)[answered][1])
        answered += 1
    assert task.done == STEPS and task.ticket.done() and not task.ticket.failed()


def test_a_decode_is_opened_at_once_and_ends_the_help(bench: Bench) -> None:
    task = clip(bench)
    bench.run()
    bench.decode(rank=1)
    bench.run()
    assert [rank for rank, _ in bench.sent(DecodeOpen)] == [1], "it waits for its turn on the rank itself"
    promised = bench.sent(Help)
    for _, message in promised:
        answer(bench, message)
    later = [rank for rank, _ in bench.sent(Help)[len(promised):]]
    assert 1 not in later and task.plan.decode.ranks[1] in later, "the other decode rank helps now"


def test_a_silent_helper_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    task = clip(bench)
    bench.run()
    task.since -= 2 * bench.scheduler.config.lease_deadline
    bench.scheduler.check_deadlines()
    assert "no answer for 600 s from rank 1 (in phase" in caplog.text
    assert task.state == "waiting" and task.id in bench.scheduler.tasks


@pytest.mark.parametrize("rank", [0, 1])
def test_without_memory_for_an_exchange_a_clip_goes_on_alone(rank: int, bench: Bench) -> None:
    task = clip(bench)
    bench.run(lambda: bool(bench.sent(Help)))
    bench.scheduler.handle(FromRank(rank, Refused(rank, task.id, "OutOfMemory", "no room"), ()))
    helps = len(bench.sent(Help))
    bench.run()
    assert task.ticket.done() and not task.ticket.failed() and len(bench.sent(Help)) == helps
