"""However ComfyUI ends, in the middle of a step, no process of the pool is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from graphs import clip_graph
from server import ComfyServer

LIMIT = 60.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_comfyui_leaves_nothing(
    number: signal.Signals, comfy_folder: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "tests"))
    import tiny_wan

    tiny_wan.use_worker_site()
    tiny_wan.write_model(tmp_path / "models" / "diffusers" / "tiny")
    with ComfyServer.start(comfy_folder, tmp_path, packs=[repository]) as server:
        with server.client() as client:
            client.queue(clip_graph(model="diffusers/tiny", seed=1, steps=900, width=128, height=128, length=33))
            client.wait_event(lambda event: event["type"] == "progress" and event["data"]["value"] >= 2, LIMIT)
            (pool,) = client.get("/pipedit/status").values()
            family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
            assert set(pool["pids"]) <= set(family) and len(pool["pids"]) == 3
            os.kill(server.pid, number)
        await_gone(family)


def await_gone(pids: list[int]) -> None:
    """Waits until none of the processes lives; a zombie has ended."""
    end = time.monotonic() + 10.0
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"still there: {[psutil.Process(pid).cmdline() for pid in alive]}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
