"""One program a GPU: who has it is named, the kernel frees it, pools of one process share it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy

from comfyui_pipedit.errors import DeviceTaken
from comfyui_pipedit.host import devices, engine, locks
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.locks import Locks, runtime_folder

ROOT = Path(__file__).resolve().parents[2]
ONE, TWO = {"gpu:0": "GPU-a"}, {"gpu:0": "GPU-a", "gpu:1": "GPU-b"}
HOLD = """
import sys
from pathlib import Path
from comfyui_pipedit.host.locks import Locks
Locks(Path(sys.argv[1])).take({"gpu:3": "GPU-a"})
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program that holds GPU-a, which it knows as gpu:3."""
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None and held.stdout.readline() == "held\n"
    yield held
    held.kill()
    held.communicate()


def test_a_second_program_is_told_who_has_the_gpu_and_which_are_free(other: subprocess.Popen[str],
                                                                     tmp_path: Path) -> None:
    mine = Locks(tmp_path)
    with pytest.raises(DeviceTaken) as caught:
        mine.take(TWO)
    text = str(caught.value)
    assert re.search(rf"gpu:0 is in use by process {other.pid} \(-c .*\), since \d\d:\d\d on ", text)
    assert "set devices to gpu:1 and queue again" in text
    mine.take({"gpu:1": "GPU-b"})
    with pytest.raises(DeviceTaken, match="or choose other devices"):
        mine.take(ONE)


def test_a_refused_take_holds_nothing(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(DeviceTaken):
        Locks(tmp_path).take(TWO)
    Locks(tmp_path).take({"gpu:1": "GPU-b"})


def test_the_kernel_frees_what_a_killed_program_had(other: subprocess.Popen[str], tmp_path: Path) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    Locks(tmp_path).take(ONE)


def test_pools_of_one_process_share_a_gpu_until_the_last_is_closed(tmp_path: Path) -> None:
    mine, others = Locks(tmp_path), Locks(tmp_path)
    mine.take(TWO)
    mine.take(ONE)
    mine.release(TWO)
    others.take({"gpu:1": "GPU-b"})
    with pytest.raises(DeviceTaken, match=f"process {os.getpid()} "):
        others.take(ONE)
    mine.release(ONE)
    others.take(ONE)


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        runtime_folder()


def test_a_pool_works_where_there_can_be_no_lock_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "comfyui_pipedit").write_text("")
    Locks().take(ONE)
    assert "no lock files" in caplog.text


def test_a_file_that_cannot_be_opened_is_no_lock_and_no_error(tmp_path: Path,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "GPU-a.lock").mkdir()
    mine = Locks(tmp_path)
    mine.take(TWO)
    mine.release(TWO)
    assert "no lock files" in caplog.text
    Locks(tmp_path).take({"gpu:1": "GPU-b"})


def test_cpu_ranks_take_no_lock() -> None:
    assert devices.hardware(("cpu:0", "cpu:1")) == {}


def test_an_engine_holds_its_gpus_from_its_first_request_until_it_is_closed(monkeypatch: pytest.MonkeyPatch,
                                                                            tmp_path: Path) -> None:
    monkeypatch.setattr(locks, "of_this_process", Locks(tmp_path))
    monkeypatch.setattr(engine, "hardware", lambda names: {"gpu:0": "GPU-a"})
    made, elsewhere = Engine(toy.config()), Locks(tmp_path)
    elsewhere.take(ONE)
    with pytest.raises(DeviceTaken, match="gpu:0 is in use by process"):
        made.submit(toy.text_request("a"))
    assert made.pool.state == "down" and made.pool.launcher_pid is None
    elsewhere.release(ONE)
    ticket = made.submit(toy.text_request("a"))
    with pytest.raises(DeviceTaken):
        elsewhere.take(ONE)
    assert ticket.wait(30) and ticket.result()
    made.close()
    elsewhere.take(ONE)
