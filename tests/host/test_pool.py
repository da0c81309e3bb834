"""The pool without jobs: it starts, answers, loses ranks, starts again and ends; what cannot start says why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toy
from gates import DEADLINE, Alive, until

from comfyui_pipedit.errors import PoolClosed, PoolError, SetupError, WorkerDied, WorkerStuck
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.pool import FromRank, Pool, PoolEvent, PoolReady, RankLost
from comfyui_pipedit.host.process import worker_environment
from comfyui_pipedit.wire.messages import Close, Encode, Encoded, Exit, Load, Loaded

DEVICES = ("cpu:0", "cpu:1", "cpu:2")


@pytest.fixture(scope="module")
def pool(gate_folder: Path) -> Iterator[Pool]:
    """Three toy ranks; a test leaves it ready, whatever it did to the ranks."""
    made = Pool(toy.config(preload=(toy.TOY, toy.GATES)), DEVICES)
    made.start()
    assert next_event(made, PoolReady) == PoolReady(0)
    yield made
    made.close()


def next_events(pool: Pool, kind: type[PoolEvent], count: int, seconds: float = DEADLINE) -> list[PoolEvent]:
    """The next events of a kind, one poll may bring several; others are passed over."""
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found += [event for event in pool.poll(1.0) if isinstance(event, kind)]
        if len(found) >= count:
            return found
    raise TimeoutError(f"{len(found)} of {count} {kind.__name__} within {seconds} s")


def next_event(pool: Pool, kind: type[PoolEvent], seconds: float = DEADLINE) -> PoolEvent:
    """The next event of a kind; others are passed over."""
    return next_events(pool, kind, 1, seconds)[0]


def restart(pool: Pool, lost: RankLost) -> None:
    pool.restart(lost.error)
    assert next_event(pool, PoolReady) == PoolReady(lost.generation + 1)


def test_each_rank_has_a_device_of_its_own(pool: Pool) -> None:
    facts = [pool.facts(rank) for rank in range(3)]
    assert [fact.device for fact in facts if fact] == ["CPU rank 0", "CPU rank 1", "CPU rank 2"]
    assert [pool.log_tail(rank)[0] for rank in range(3)] == [f"rank {i} runs on CPU rank {i}" for i in range(3)]
    assert pool.pids() == tuple(fact.pid for fact in facts if fact) and len(set(pool.pids())) == 3


def test_the_launcher_is_the_parent_and_has_one_thread(pool: Pool) -> None:
    for pid in pool.pids():
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(rf"^PPid:\t{pool.launcher_pid}$", status, re.MULTILINE)
    assert len(os.listdir(f"/proc/{pool.launcher_pid}/task")) == 1, "forking is safe from a lone thread only"


def test_messages_reach_a_rank_and_come_back(pool: Pool) -> None:
    seq = 1000 * (pool.generation + 1)
    pool.send(1, Load(seq, toy.weights("text"), None, False))
    pool.send(1, Encode(seq + 1, "texts", toy.weights("text"), ("ab", "cd")))
    loaded, answer = next_events(pool, FromRank, 2)
    assert isinstance(loaded, FromRank) and isinstance(loaded.message, Loaded)
    assert isinstance(answer, FromRank) and isinstance(answer.message, Encoded)
    assert (answer.rank, answer.message.job, len(answer.fds)) == (1, "texts", 2)
    for fd in answer.fds:
        os.close(fd)


def test_pings_are_answered_while_nothing_happens(pool: Pool) -> None:
    end = time.monotonic() + 1.5 * pool.config.ping_deadline
    while time.monotonic() < end:
        assert pool.poll(end - time.monotonic()) == []
    assert pool.state == "ready"


def test_a_host_that_was_busy_does_not_blame_its_ranks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = pool.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # unanswered pings while the host, too, is away for an hour
    end = time.monotonic() + 2 * pool.config.ping_interval
    while time.monotonic() < end:
        assert pool.poll(0.1) == []
    here = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: here() + 3600)
    assert pool.poll(0.0) == []
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    end = time.monotonic() + pool.config.ping_deadline + 1
    while time.monotonic() < end:
        assert pool.poll(0.1) == []
    assert pool.state == "ready" and pool.pids() == pids
    monkeypatch.undo()
    pool.restart(PoolError("the ranks' times are an hour ahead"))
    assert isinstance(next_event(pool, PoolReady), PoolReady)


def test_wake_ends_a_poll() -> None:
    down = Pool(toy.config(), DEVICES)  # without ranks, whose pings would end a poll too
    polling = threading.Thread(target=down.poll, args=(3600.0,), daemon=True)
    polling.start()
    down.wake()
    polling.join(DEADLINE)
    assert not polling.is_alive()
    down.close()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_the_one_that_is_named(pool: Pool, victim: int) -> None:
    pid, alive = pool.pids()[victim], Alive(pool.pids())
    os.kill(pid, signal.SIGSEGV)
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and isinstance(lost.error, WorkerDied)
    assert (lost.rank, lost.generation, lost.phase, pool.state) == (victim, pool.generation, "idle", "down")
    lines = str(lost.error).splitlines()
    assert lines[0] == f"rank {victim} (CPU rank {victim}, pid {pid}), in phase 'idle', was killed by SIGSEGV"
    assert lines[1:3] == ["Its last log lines:", f"    rank {victim} runs on CPU rank {victim}"]
    assert "Segmentation fault" in str(lost.error), "faulthandler wrote where it was"
    assert alive.all_gone() == [], "survivors end before anybody asks for a restart"
    pool.send(victim, Close(1, "nothing"))  # to nobody
    restart(pool, lost)


def test_a_stopped_rank_is_stuck(pool: Pool) -> None:
    os.kill(pool.pids()[1], signal.SIGSTOP)
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and isinstance(lost.error, WorkerStuck) and lost.rank == 1
    alive = Alive(pool.pids())
    restart(pool, lost)
    assert alive.all_gone() == []


def test_a_rank_that_leaves_by_itself_is_lost(pool: Pool) -> None:
    pool.send(2, Exit())
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and lost.rank == 2 and "ended with exit code 0" in str(lost.error)
    restart(pool, lost)


def test_a_killed_launcher_is_replaced(pool: Pool) -> None:
    launcher, alive = pool.launcher_pid, Alive(pool.pids())
    assert launcher is not None
    os.kill(launcher, signal.SIGKILL)
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and f"the launcher of the ranks (pid {launcher}) was killed" in str(lost.error)
    assert alive.all_gone() == []
    restart(pool, lost)
    assert pool.launcher_pid != launcher


def test_close_leaves_nothing_and_may_be_repeated(pool: Pool) -> None:
    made = Pool(toy.config(), DEVICES[:1])
    made.start()
    next_event(made, PoolReady)
    assert made.launcher_pid is not None
    alive = Alive((*made.pids(), made.launcher_pid))
    made.close()
    assert alive.all_gone(0.0) == []
    made.close()
    made.wake()
    with pytest.raises(PoolClosed):
        made.start()


def test_two_pools_at_once_and_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """B35: nothing of a pool depends on torch.distributed's default port, on what the host's environment says of
    another world, or on being the only one."""
    for name, value in {"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody has it already, which is as good
            taken.bind(("0.0.0.0", 29500))
            taken.listen()
        engines = [Engine(toy.config()), Engine(toy.config("cpu:2", "1+1"))]
        try:
            tickets = [engine.submit(toy.job()) for engine in engines]
            frames = [ticket.frames for ticket in tickets if ticket.frames]
            assert all(ticket.wait(DEADLINE) for ticket in frames)
            assert torch.equal(tickets[0].result(), tickets[1].result())
            assert torch.equal(frames[0].result(), frames[1].result())
            assert listening(pids_of(engines)) <= {"127.0.0.1", "::1"}, "only gloo's own sockets, on loopback"
        finally:
            for engine in engines:
                engine.close()


def pids_of(engines: list[Engine]) -> list[int]:
    return [pid for engine in engines for pid in (*engine.pool.pids(), engine.pool.launcher_pid or 0)]


def listening(pids: list[int]) -> set[str]:
    """Addresses on which processes listen, by /proc/net/tcp and their open sockets."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[i:i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, address))
    return found


def test_a_rank_binds_its_own_device_before_it_joins_the_world() -> None:
    """B44: what comes first is the device, so that no rank makes a context on the first one."""
    made = Pool(toy.config(preload=(toy.TOY, str(Path(toy.HERE, "bind_hook.py")))), DEVICES)
    try:
        made.start()
        next_event(made, PoolReady)
        assert [made.log_tail(rank)[0] for rank in range(3)] == [
            f"bound CPU rank {rank}, in a world: False" for rank in range(3)]
    finally:
        made.close()


def test_a_preload_file_that_touches_the_gpu_before_the_fork_is_refused(tmp_path: Path) -> None:
    touching = tmp_path / "touching.py"
    touching.write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n")
    made = Pool(toy.config(preload=(toy.TOY, str(touching))), DEVICES[:1])
    try:
        made.start()
        lost = next_event(made, RankLost)
        assert isinstance(lost, RankLost) and isinstance(lost.error, SetupError)
        assert "CUDA was initialised before the ranks were forked" in str(lost.error)
    finally:
        made.close()


def test_a_rank_that_fails_in_start_tears_all_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """B31: nobody keeps running, and the error has the reason out of the rank's own log."""
    monkeypatch.setenv("TOY_FAILS_IN_START", "1")
    engine = Engine(toy.config())
    ticket = engine.submit(toy.job())
    until(lambda: engine.pool.launcher_pid is not None, "a launcher")
    alive = Alive((engine.pool.launcher_pid or 0,))
    assert ticket.wait(DEADLINE)
    with pytest.raises(SetupError, match=r"cannot start here: rank 1 \(cpu:1, pid \d+\), in phase 'starting', ended "
                                         r"with exit code 1") as caught:
        ticket.result()
    assert "RuntimeError: the toy rank fails in start, as it was told to" in str(caught.value)
    assert engine.pool.pids() == () and engine.pool.launcher_pid is None
    assert alive.all_gone() == []
    engine.close()


@pytest.mark.parametrize(("settings", "said"), [
    ({"preload": (), "worker_site": "/nowhere"}, "mend it with: python install.py"),
    ({"preload": ("/nowhere/family.py",)}, "preload names /nowhere/family.py, which is not a Python file"),
], ids=["no packages", "no preload file"])
def test_a_launcher_that_cannot_import_says_why(settings: dict[str, object], said: str) -> None:
    pool = Pool(toy.config(**settings), DEVICES[:1])
    pool.start()
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and isinstance(lost.error, SetupError)
    assert "ended with exit code 1 while it imported" in str(lost.error) and said in str(lost.error)
    with pytest.raises(SetupError, match="cannot start here"):
        pool.restart(lost.error)
    assert pool.launcher_pid is None
    pool.close()


def test_a_start_that_takes_too_long_is_given_up() -> None:
    pool = Pool(toy.config(start_deadline=0.05), DEVICES[:1])
    pool.start()
    lost = next_event(pool, RankLost)
    assert isinstance(lost, RankLost) and lost.phase == "importing"
    assert "was not ready after 0.05 s while it imported" in str(lost.error)
    pool.close()


def test_the_environment_of_workers(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "MASTER_PORT": "29500", "RANK": "3", "TORCHELASTIC_RUN_ID": "x",
            "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
            "CUDA_VISIBLE_DEVICES": "1", "TRITON_CACHE_DIR": "/mine"}
    made = worker_environment(base, tmp_path)
    assert {"MASTER_PORT", "RANK", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(made)
    assert (made["CUDA_VISIBLE_DEVICES"], made["TRITON_CACHE_DIR"], made["PATH"]) == ("1", "/mine", "/bin")
    assert made["GLOO_SOCKET_IFNAME"] == made["NCCL_SOCKET_IFNAME"] == "lo"
    assert made["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    kept = worker_environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, tmp_path)
    assert kept["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
