"""Which rank is named when several are lost at once, and what the errors say."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from comfyui_pipedit.errors import OutOfStep, PoolError, SetupError, WorkerDied, WorkerStuck, explained
from comfyui_pipedit.host import verdict
from comfyui_pipedit.host.process import Member, how_it_ended
from comfyui_pipedit.wire.messages import Failed

STOPPED_PID = 99
PEER_GONE = WorkerStuck("failed: an exchange with ranks 1 broke: Connection closed by peer")
SILENT = WorkerStuck("has not answered for 6 s")


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "is_stopped", lambda pid: pid == STOPPED_PID)


def member(rank: int, **facts: Any) -> Member:
    made = Member(rank, f"cpu:{rank}", SimpleNamespace(), SimpleNamespace(tail=()), pid=10 + rank)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("losses", "cause"), [
    ({0: {"failure": PEER_GONE, "ended": 1.0, "status": 1}, 1: {"ended": 2.0, "status": -9}}, 1),
    ({0: {"failure": PEER_GONE, "ended": 1.0, "status": 1}, 1: {"pid": STOPPED_PID}}, 1),
    ({0: {"failure": PEER_GONE}, 1: {"ended": 2.0, "status": 3}}, 1),
    ({0: {"failure": PEER_GONE}, 2: {"failure": SILENT, "silent": True}}, 2),
    ({0: {"failure": PEER_GONE}, 2: {"failure": OutOfStep("late"), "ended": 0.5}}, 2),
    ({2: {"failure": PEER_GONE}}, 2),
    ({0: {"failure": SILENT, "silent": True}, 1: {"pid": STOPPED_PID}}, 1),
    ({1: {"ended": 1.0, "status": -11}, 2: {"ended": 0.5, "status": -9}}, 2),
], ids=["killed", "stopped", "exited", "silent", "first to fail", "alone", "stopped before silent", "first killed"])
def test_the_first_cause(losses: dict[int, dict[str, Any]], cause: int) -> None:
    members = [member(rank, **losses.get(rank, {})) for rank in range(3)]
    assert verdict.first_cause(members).rank == cause


@pytest.mark.parametrize(("facts", "kind", "text"), [
    ({"ended": 1.0, "status": -9, "failure": PEER_GONE}, WorkerDied, "was killed by SIGKILL (if nobody sent it"),
    ({"pid": STOPPED_PID}, WorkerStuck, "is stopped (SIGSTOP or a debugger) and does not answer"),
    ({"ended": 1.0, "status": 3}, WorkerDied, "ended with exit code 3"),
    ({"ended": 1.0}, WorkerDied, "closed its connection"),
    ({"failure": SILENT, "silent": True}, WorkerStuck, "has not answered for 6 s"),
    ({"failure": OutOfStep("failed: late"), "ended": 1.0, "status": 1}, OutOfStep, "failed: late"),
])
def test_the_error_of_a_rank(facts: dict[str, Any], kind: type[PoolError], text: str) -> None:
    error = verdict.rank_error(member(1, **facts), "step 3 of 20")
    assert type(error) is kind
    assert str(error).startswith(f"rank 1 (cpu:1, pid {facts.get('pid', 11)}), in phase 'step 3 of 20', {text}")


def test_the_log_comes_after_the_first_line() -> None:
    lost = member(0, ended=1.0, status=1)
    lost.log = SimpleNamespace(tail=["Traceback", "  boom"])
    error = explained(verdict.rank_error(lost, "idle"), "Step 2 of 4 is kept", "The pool restarts by itself")
    assert type(error) is WorkerDied
    assert str(error) == ("rank 0 (cpu:0, pid 10), in phase 'idle', ended with exit code 1. Step 2 of 4 is kept. "
                          "The pool restarts by itself.\nIts last log lines:\n    Traceback\n      boom")


@dataclass
class FakeLauncher:
    launched: bool
    status: int | None
    failure: str = ""
    pid: int = 5
    log: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tail=()))


@pytest.mark.parametrize(("launcher", "kind", "text"), [
    (FakeLauncher(False, 1), SetupError, "ended with exit code 1 while it imported"),
    (FakeLauncher(False, None, "was not ready after 120 s"), SetupError, "was not ready after 120 s while it imported"),
    (FakeLauncher(False, -9), WorkerDied, "was killed by SIGKILL"),
    (FakeLauncher(True, 1), WorkerDied, "ended with exit code 1 and took all ranks along"),
])
def test_the_error_of_a_launcher(launcher: FakeLauncher, kind: type[PoolError], text: str) -> None:
    error = verdict.launcher_error(launcher)
    assert type(error) is kind and text in str(error)


def test_what_a_rank_says_of_itself_is_an_error_of_the_pool() -> None:
    assert type(verdict.failure_of(Failed(0, "OutOfStep", "late", ""))) is OutOfStep
    foreign = verdict.failure_of(Failed(0, "JobError", "KeyError: 'x'", ""))
    assert type(foreign) is PoolError and str(foreign) == "failed: KeyError: 'x'"


def test_every_signal_has_a_name() -> None:
    assert how_it_ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert how_it_ended(-50) == "was killed by signal 50"
