"""A host process for test_host_killed.py: python host_script.py [stopped]. It prints its ranks and waits in mid-step.

SIGUSR1 makes it exec another program, as ComfyUI-Manager's reboot does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]


def main() -> None:
    import toy
    from gates import Gate

    from comfyui_pipedit.host.engine import Engine

    folder = Path(os.environ["PIPEDIT_TEST_GATES"])
    signal.signal(signal.SIGUSR1, lambda *_: os.execv(sys.executable, [sys.executable, "-c", "input()"]))
    engine = Engine(toy.config(preload=(toy.TOY, toy.GATES), ping_deadline=60.0))
    gate = Gate(folder, 0, "^step 2 of 4$")
    ticket = engine.submit(toy.job())
    gate.wait()
    pids = engine.pool.pids()
    if "stopped" in sys.argv:
        os.kill(pids[1], signal.SIGSTOP)
    folders = [str(path) for path in Path(tempfile.gettempdir()).glob("pipedit-*")]
    print(json.dumps({"ranks": pids, "launcher": engine.pool.launcher_pid, "folders": folders}), flush=True)
    ticket.wait()


if __name__ == "__main__":
    main()
