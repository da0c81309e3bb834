"""The fault table (docs/faults.md): every rank killed and stopped in every phase, on the toy family's real pool."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

import pytest
import torch
import toy
from gates import Alive, MakeGate, until
from torch import Tensor

from comfyui_pipedit.errors import PipeDiTError, WorkerDied, WorkerStuck
from comfyui_pipedit.host.engine import Engine

SECONDS = 10.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ENDS = {KILL: (WorkerDied, "was killed by SIGKILL"), STOP: (WorkerStuck, r"is stopped \(SIGSTOP or a debugger\)")}


@dataclass(frozen=True)
class Phase:
    """Where the gate holds a rank; `task` is what then runs ("clip" on ranks 0 and 1, "decode" on rank 2).

    `leader`: how the leader's phase must begin before the fault, since others may be a step ahead of what it kept.
    """

    rank: int
    pattern: str
    task: str
    kept: str
    leader: str = ""


PHASES = {
    "mid-step": Phase(0, "^step 2 of 4$", "clip", "Step 1 of 4 is kept: queue again to continue from there"),
    "exchange": Phase(1, "^step 3 of 4: gather", "clip", "Step 2 of 4 is kept: queue again to continue from there",
                      leader="step 3 of 4"),
    "hand-off out": Phase(0, "^keeping the finished latent$", "clip", "Step 3 of 4 is kept: queue again"),
    "hand-off in": Phase(2, "^preparing a decode$", "decode", "The finished latent is kept: queue again and only the"),
    "mid-decode": Phase(2, "^decode piece 2 of 4$", "decode", "The finished latent is kept: queue again and only the"),
}
AT_WORK = {"clip": (0, 1), "decode": (2,)}


@pytest.fixture(scope="module")
def reference(engine: Engine) -> tuple[Tensor, Tensor]:
    """What the clip is without any fault."""
    return run(engine)


def run(engine: Engine) -> tuple[Tensor, Tensor]:
    """(latent, frames) of the one clip of these tests."""
    ticket = engine.submit(toy.job())
    assert ticket.frames is not None and ticket.frames.wait(SECONDS * 3)
    return ticket.result(), ticket.frames.result()


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def logged(caplog: pytest.LogCaptureFixture, pattern: str) -> bool:
    return any(re.search(pattern, message.splitlines()[0]) for message in caplog.messages if message)


def strike(engine: Engine, victim: int, fault: signal.Signals) -> tuple[int, Alive]:
    """Kills or stops a rank; its pid, and a watch over all ranks of this generation."""
    until(lambda: engine.pool.pids() != () and all(engine.pool.pids()), "all ranks forked")
    pids = engine.pool.pids()
    alive = Alive(pids)
    os.kill(pids[victim], fault)
    return pids[victim], alive


def rank_pattern(victim: int, pid: int, phase: str, fault: signal.Signals) -> str:
    return rf"^rank {victim} \((CPU rank|cpu:)\s?{victim}, pid {pid}\), in phase '{phase}', {ENDS[fault][1]}"


@pytest.mark.parametrize("fault", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["leader", "other", "decoder"])
@pytest.mark.parametrize("name", PHASES)
def test_a_rank_at_work(name: str, victim: int, fault: signal.Signals, engine: Engine, gate: MakeGate,
                        reference: tuple[Tensor, Tensor]) -> None:
    phase = PHASES[name]
    hold = gate(phase.rank, phase.pattern)
    ticket = engine.submit(toy.job())
    held_in = hold.wait()
    until(lambda: engine.pool.phase(0).startswith(phase.leader), "the leader in the step that is struck")
    pid, alive = strike(engine, victim, fault)
    hit = ticket if phase.task == "clip" else ticket.frames
    assert hit is not None
    if victim in AT_WORK[phase.task]:
        assert hit.wait(SECONDS)
        with pytest.raises(ENDS[fault][0]) as caught:
            hit.result()
        seen = re.escape(held_in) if victim == phase.rank else "[^']+"
        first_line = str(caught.value).splitlines()[0]
        assert re.search(rank_pattern(victim, pid, seen, fault), first_line)
        assert phase.kept in first_line and first_line.endswith("The pool restarts by itself.")
    else:  # the work of the others goes on by itself in the new world
        assert ticket.frames is not None and ticket.frames.wait(SECONDS * 2)
        assert_same((ticket.result(), ticket.frames.result()), reference)
    assert alive.all_gone() == []
    assert_same(run(engine), reference)


@pytest.mark.parametrize("fault", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_idle_rank(victim: int, fault: signal.Signals, engine: Engine, reference: tuple[Tensor, Tensor],
                      caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: {engine.pool.phase(rank) for rank in range(3)} == {"idle"}, "all ranks idle")
    pid, alive = strike(engine, victim, fault)
    pattern = rank_pattern(victim, pid, "idle", fault) + r".*The pool restarts by itself\.$"
    until(lambda: logged(caplog, pattern), "the loss in the log", SECONDS)
    assert alive.all_gone() == []
    assert_same(run(engine), reference)


@pytest.mark.parametrize("fault", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_starting_rank(victim: int, fault: signal.Signals, engine: Engine, gate: MakeGate,
                         reference: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    hold = gate(victim, "^joining the world$")
    strike(engine, 0, KILL)
    hold.wait()
    ticket = engine.submit(toy.job())  # waits for the pool, and does not fail with it
    pid, _ = strike(engine, victim, fault)
    pattern = rank_pattern(victim, pid, "joining the world", fault) + r".*The pool restarts by itself\.$"
    until(lambda: logged(caplog, pattern), "the loss in the log", SECONDS)
    assert ticket.frames is not None and ticket.frames.wait(SECONDS * 2)
    assert_same((ticket.result(), ticket.frames.result()), reference)


def test_the_launcher_killed_in_mid_step(engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    hold = gate(0, "^step 2 of 4$")
    ticket = engine.submit(toy.job())
    hold.wait()
    launcher = engine.pool.launcher_pid
    assert launcher is not None
    alive = Alive((launcher, *engine.pool.pids()))
    os.kill(launcher, KILL)
    assert ticket.wait(SECONDS)
    with pytest.raises(WorkerDied, match=rf"the launcher of the ranks \(pid {launcher}\) was killed by SIGKILL.*"
                                         r"Step 1 of 4 is kept: queue again.*The pool restarts by itself"):
        ticket.result()
    assert alive.all_gone() == []
    assert_same(run(engine), reference)
    assert engine.pool.launcher_pid != launcher


def test_a_second_loss_of_the_same_clip_goes_on_from_what_the_first_kept(
        engine: Engine, gate: MakeGate, reference: tuple[Tensor, Tensor]) -> None:
    for step in (2, 4):
        hold = gate(1, f"^step {step} of 4$")
        ticket = engine.submit(toy.job())
        hold.wait()
        strike(engine, 1, KILL)
        assert ticket.wait(SECONDS)
        with pytest.raises(PipeDiTError, match=f"Step {step - 1} of 4 is kept"):
            ticket.result()
    hold = gate(0, "^step [123] of 4$")  # a step that must not run again
    assert_same(run(engine), reference)
    with pytest.raises(TimeoutError):
        hold.wait(0)
