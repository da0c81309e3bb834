"""Runs a function on n ranks of a world, cheaply: a server imports torch and diffusers once and forks the ranks.

    world.run(3, function, key=value)  ->  [function's result on rank 0, 1, 2]

The function is a module-level one, called as function(device, **arguments) in a process that has joined the world, has
one thread, and in which making a process group raises. Whatever ranks raise comes back in one AssertionError.
As a script, this file is the server: requests arrive as JSON lines, results lie as files in the request's folder.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 20.0
"""Seconds after which a rank that waits for another gives up."""


class Ranks:
    """The client's side: owns the server process."""

    def __init__(self) -> None:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                                    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0",
                                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else counting GPUs spoils the fork
        self.server = subprocess.Popen([sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, env=environment, text=True)

    def run(self, world: int, function: Callable[..., Any], backend: str = "gloo", deadline: float = 60.0,
            **arguments: Any) -> list[Any]:
        """Results of all ranks; AssertionError with each failed rank's traceback, or how it ended."""
        import torch

        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            torch.save(arguments, Path(folder, "arguments.pt"))
            endings = self._ask(folder=folder, world=world, backend=backend, deadline=deadline,
                                file=inspect.getsourcefile(function), function=function.__name__)
            outcomes = [_outcome(Path(folder, f"{rank}.pt"), ending) for rank, ending in enumerate(endings)]
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(outcomes) if not good]
        assert not failures, "\n".join(failures)
        return [value for _, value in outcomes]

    def _ask(self, **request: Any) -> list[str]:
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        assert answer, f"the server of the ranks ended with code {self.server.wait(TIMEOUT)}"
        return json.loads(answer)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait(TIMEOUT)


def _outcome(path: Path, ending: str) -> tuple[bool, Any]:
    import torch

    if not path.exists():
        return False, ending
    return torch.load(path, weights_only=False)


def serve() -> None:
    """Answers each request with how its ranks ended, until the client closes the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(Path(__file__).parent)]
    sys.path.append(str(REPOSITORY / ".workers"))
    for heavy in ("torch._dynamo", "torch.distributed", "diffusers.models.transformers.transformer_wan"):
        importlib.import_module(heavy)
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(rank, request) for rank in range(request["world"])]
        endings = _reap(pids, time.monotonic() + request["deadline"])
        print(json.dumps(endings), file=answers, flush=True)
    os._exit(0)


def _fork(rank: int, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _child(rank, request)
    return pid


def _child(rank: int, request: dict[str, Any]) -> None:
    """Never returns: saves the result or the traceback and ends without cleaning up what is its parent's."""
    import torch

    try:
        outcome = True, _call(rank, request)
    except BaseException:  # noqa: BLE001  (whatever it is, the test must show it)
        outcome = False, traceback.format_exc()
    path = Path(request["folder"], f"{rank}.pt")
    torch.save(outcome, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    os._exit(0 if outcome[0] else 1)


def _call(rank: int, request: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = _bind(rank, request["backend"])
    folder, world = request["folder"], request["world"]
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group(request["backend"], store=store, rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=TIMEOUT))
    dist.barrier()
    dist.new_group = _no_group
    function = getattr(_module(request["file"]), request["function"])
    with torch.inference_mode():
        result = function(device, **torch.load(Path(folder, "arguments.pt"), weights_only=False))
    if dist.is_initialized():
        dist.barrier()
    return result


def _bind(rank: int, backend: str) -> Any:
    import torch

    if backend == "gloo":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _no_group(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("somebody makes a process group; groups are values here")


def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _reap(pids: Sequence[int], deadline: float) -> list[str]:
    """How each child ended; those that are there at the deadline are killed."""
    endings = []
    for pid in pids:
        descriptor = os.pidfd_open(pid)
        ended = bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
        os.close(descriptor)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        endings.append(f"ended with code {code}" if ended else "did not end in time and was killed")
    return endings


if __name__ == "__main__":
    serve()
