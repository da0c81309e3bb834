"""The fork server of a pool: imports everything once, then forks one process a rank whenever the host asks.

Forking happens from the only thread, before any CUDA call, so a rank costs milliseconds and shares the imported code's
memory. The server never touches a device. It ends, and takes its ranks along, when the host's socket closes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

from ..config import WORKERS_HINT
from ..errors import SetupError
from ..wire.buffer import PhaseBoard
from ..wire.channel import Channel
from ..wire.messages import Fork, Forked, Launched, Reaped

PR_SET_PDEATHSIG = 1
PARENT_CHECK_MS = 1000


@dataclass(frozen=True, slots=True)
class Child:
    """A rank that was forked and not yet reaped."""

    rank: int
    generation: int


def main(arguments: Sequence[str]) -> None:
    """Entry of the launcher process; see `_options` for the arguments."""
    options = _options(arguments)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=options.socket))
    try:
        ForkServer(channel, preload(options.worker_site, options.preload)).serve()
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--folder", required=True, help="the pool's private folder, removed at the end")
    parser.add_argument("--worker-site", required=True, help="folder with the workers' own packages")
    parser.add_argument("--preload", action="append", default=[], help="python file to import before the first fork")
    return parser.parse_args(arguments)


def preload(worker_site: str, files: Sequence[str]) -> tuple[ModuleType, ...]:
    """Imports torch, the files and the model classes; the files' modules. SetupError if that initialised CUDA."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, worker_site)  # first: many a ComfyUI has another pack's older diffusers installed
    modules = tuple(_load(Path(file), number) for number, file in enumerate(files))
    from .. import models

    try:
        models.preload()
    except ModuleNotFoundError as error:
        raise SetupError(f"{error}: {WORKERS_HINT}") from error
    from . import runtime  # noqa: F401  (imported now, so that every rank shares it)

    if torch.cuda.is_initialized():
        raise SetupError("CUDA was initialised before the ranks were forked; a preload file must not touch the GPU")
    return modules


def _load(path: Path, number: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pipedit_preload_{number}_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SetupError(f"preload names {path}, which is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class ForkServer:
    """Forks and reaps ranks. `modules` may each define `configure(runtime)`, called in every rank before it runs."""

    def __init__(self, channel: Channel, modules: Sequence[ModuleType]) -> None:
        self._channel, self._modules, self._parent = channel, modules, os.getppid()
        self._children: dict[int, Child] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Serves until the host is gone; all ranks are dead when it returns."""
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wake_write)
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, pages that the ranks share
        self._channel.send(Launched(os.getpid()))
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while not self._host_gone():
                poller.poll(PARENT_CHECK_MS)
                self._turn()
        finally:
            self._kill(list(self._children))

    def _host_gone(self) -> bool:
        """End of file, or another parent: a child of the host may hold the host's end of the socket open."""
        return self._channel.closed or os.getppid() != self._parent

    def _turn(self) -> None:
        for message, fds in self._channel.drain():
            if isinstance(message, Fork):
                self._fork(message, fds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._reap()

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                child = self._children.pop(pid)
                self._channel.send(Reaped(child.rank, child.generation, pid, os.waitstatus_to_exitcode(status)))

    def _kill(self, pids: Sequence[int]) -> None:
        """Ends children and waits for them, so that their devices' memory is free afterwards."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
            del self._children[pid]

    def _fork(self, order: Fork, fds: Sequence[int]) -> None:
        self._kill([pid for pid, child in self._children.items() if child.generation < order.generation])
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, fds, server)
        self._children[pid] = Child(order.rank, order.generation)
        for fd in fds:
            os.close(fd)
        self._channel.send(Forked(order.rank, order.generation, pid))

    def _become(self, order: Fork, fds: Sequence[int], server: int) -> None:
        """The child's life. Never returns into the server's loop, whatever happens."""
        status = 1
        try:
            self._detach(server)
            run_rank(order, fds, self._modules)
            status = 0
        finally:
            if sys.exc_info()[0] is not None:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _detach(self, server: int) -> None:
        """Lets go of what belongs to the server, and makes sure not to outlive it."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            raise SetupError("the launcher ended while it forked this rank")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._channel.close()


def run_rank(order: Fork, fds: Sequence[int], modules: Sequence[ModuleType]) -> None:
    """Builds the rank's runtime and runs it to its end. `fds`: control socket, write end of the log, phase board."""
    from .runtime import Runtime

    control, log, board = fds
    for standard in (sys.stdout, sys.stderr):
        os.dup2(log, standard.fileno())
    os.close(log)
    runtime = Runtime(
        rank=order.rank, world=order.world, generation=order.generation, device=order.device,
        rendezvous=order.rendezvous, channel=Channel(socket.socket(fileno=control)), board=PhaseBoard(board),
        deadline=order.deadline)
    for module in modules:
        if hasattr(module, "configure"):
            module.configure(runtime)
    runtime.run()


def _ignore(number: int, frame: FrameType | None) -> None:
    """SIGCHLD only has to wake the server's poll."""
