"""Whatever ends the host process, no rank and no launcher outlives it, and nothing of theirs is left on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gates import DEADLINE, Alive

SCRIPT = Path(__file__).with_name("host_script.py")


CASES = {
    "INT": (signal.SIGINT, ()), "TERM": (signal.SIGTERM, ()), "KILL": (signal.SIGKILL, ()),
    "exec": (signal.SIGUSR1, ()), "KILL with a stopped rank": (signal.SIGKILL, ("stopped",)),
}


@pytest.mark.parametrize(("sent", "arguments"), CASES.values(), ids=CASES)
def test_no_child_outlives_the_host(sent: signal.Signals, arguments: tuple[str, ...], tmp_path: Path) -> None:
    gates, temp = tmp_path / "gates", tmp_path / "temp"
    gates.mkdir()
    temp.mkdir()
    environment = os.environ | {"PIPEDIT_TEST_GATES": str(gates), "TMPDIR": str(temp)}
    with subprocess.Popen([sys.executable, str(SCRIPT), *arguments], env=environment, stdout=subprocess.PIPE,
                          stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        line = host.stdout.readline()
        assert line, host.communicate(timeout=DEADLINE)[1]
        said = json.loads(line)
        assert len(said["ranks"]) == 3 and len(said["folders"]) == 1
        alive = Alive((*said["ranks"], said["launcher"]))
        host.send_signal(sent)
        left = alive.all_gone()
        host.kill()
    assert left == []
    assert list(temp.glob("pipedit-*")) == []
