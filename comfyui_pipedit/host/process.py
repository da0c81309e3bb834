"""The processes behind a pool, one handle each: the launcher, and a rank as the host sees it.

A handle knows whether its process lives, what it printed last, and how it ended; what follows from that is host.pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import PACKAGE_ROOT, EngineConfig
from ..errors import PoolError
from ..wire.channel import Channel
from ..wire.messages import Fork, Ready

LAUNCHER = PACKAGE_ROOT / "worker" / "launcher.py"
TAIL_LINES = 50
LINE_LIMIT = 2000
STOP_SECONDS = 5.0

NOT_FOR_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Left by torchrun or a notebook; a pool has its own world."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ALWAYS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counts GPUs without a CUDA call, which would spoil the fork
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",  # no thread pools before the fork
    "PYTHONUNBUFFERED": "1",
}

log = logging.getLogger("pipedit")


def worker_environment(base: Mapping[str, str], caches: Path) -> dict[str, str]:
    """The host's environment without what would mislead workers, with loopback interfaces and private compile caches.

    ComfyUI's choice of CUDA's own allocator is taken back: it cannot share or register memory as the exchange needs.
    """
    environment = {name: value for name, value in base.items()
                   if name not in NOT_FOR_WORKERS and not name.startswith("TORCHELASTIC_")}
    for name in ALLOCATOR_SETTINGS:
        if "cudaMallocAsync" in environment.get(name, ""):
            del environment[name]
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environment |= ALWAYS | {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        environment.setdefault(name, str(caches / folder))
    return environment


def cache_folder(fallback: Path) -> Path:
    """Where compiled code is kept between starts, for this user's eyes only; `fallback` where home is read-only."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "comfyui_pipedit"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError:
        return fallback
    return folder


def how_it_ended(status: int | None) -> str:
    """A wait status as os.waitstatus_to_exitcode gives it, in words."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (if nobody sent it, the system had too little memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger); False where /proc does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


class LogPipe:
    """What a process prints: lines go to the log under its name, the last ones are kept for errors."""

    def __init__(self, name: str) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._name = name
        self._rest = b""
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        """The read end; -1 once closed."""
        return self._read

    def close_write_end(self) -> None:
        """To be called once the process has it."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Takes what is there, without waiting. At the end of the pipe an unfinished line counts as a line."""
        while (data := self._take()) is not None:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._note(line)
            if not data:
                return self.close()
        return None

    def _take(self) -> bytes | None:
        if self._read < 0:
            return None
        try:
            return os.read(self._read, 1 << 16)
        except BlockingIOError:
            return None

    def _note(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[:LINE_LIMIT]
        self.tail.append(text)
        log.info("[%s] %s", self._name, text)

    def close(self) -> None:
        """Closes the read end."""
        if self._rest:
            self._note(self._rest)
            self._rest = b""
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


@dataclass(slots=True, eq=False)
class Member:
    """One rank of one generation, as the host knows it. Times are seconds of the monotonic clock."""

    rank: int
    device: str
    channel: Channel
    log: LogPipe
    pid: int = 0
    ready: Ready | None = None
    heard: float = 0.0
    asked: float | None = None
    ended: float | None = None
    status: int | None = None
    failure: PoolError | None = None
    silent: bool = False

    @property
    def label(self) -> str:
        """For messages: "rank 1 (GPU 1 (NVIDIA H200), pid 4711)"."""
        device = self.ready.device if self.ready else self.device
        return f"rank {self.rank} ({device}, pid {self.pid or 'unknown'})"

    def close(self) -> None:
        """Ends the conversation; the rank ends itself when it sees that."""
        self.channel.close()
        self.log.drain()
        self.log.close()


def fork_rank(launcher: Launcher, order: Fork, board: int, timeout: float) -> Member:
    """Asks the launcher for a rank. The member's pid is known once the launcher has answered."""
    ours, theirs = socket.socketpair()
    logs = LogPipe(f"rank {order.rank}")
    try:
        launcher.channel.send(order, (theirs.fileno(), logs.write_end, board))
    finally:
        theirs.close()
        logs.close_write_end()
    return Member(order.rank, order.device, Channel(ours, timeout), logs)


class Launcher:
    """The launcher process: started with a socket, a private folder and a log; all ranks are its children."""

    def __init__(self, config: EngineConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pipedit-"))
        self.log = LogPipe("launcher")
        self.launched = False
        self.failure = ""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, config.ping_deadline)
        try:
            self._process = subprocess.Popen(
                self._command(config, theirs.fileno()), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=self.log.write_end, stderr=self.log.write_end, start_new_session=True, cwd=self.folder,
                env=worker_environment(os.environ, cache_folder(self.folder)))
        finally:
            theirs.close()
            self.log.close_write_end()

    def _command(self, config: EngineConfig, descriptor: int) -> list[str]:
        command = [config.worker_python or sys.executable, str(LAUNCHER), "--socket", str(descriptor),
                   "--folder", str(self.folder), "--worker-site", config.worker_site]
        for file in config.preload:
            command += ["--preload", str(Path(file).resolve())]
        return command

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its wait status, None while it runs."""
        return self._process.poll()

    @property
    def gone(self) -> bool:
        """Whether it ended, hung up and is about to, or was given up."""
        return bool(self.failure) or self.channel.closed or self.status is not None

    def stop(self) -> None:
        """Ends the launcher and every rank; none of them lives when this returns.

        It ends by itself at end of file; after STOP_SECONDS, or if it cannot notice because it is stopped or still
        imports, the whole session is killed.
        """
        self.channel.close()
        try:
            self._process.wait(STOP_SECONDS if self.launched and not is_stopped(self.pid) else 0.0)
        except subprocess.TimeoutExpired:
            # The session's number cannot have been given to others: its leader is not reaped yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self.log.drain()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
