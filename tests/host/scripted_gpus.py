"""A pool of scripted GPUs in this process: messages are answered one by one, memory is numbers, in GiB."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import toy

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import PoolError
from comfyui_pipedit.host import estimate
from comfyui_pipedit.host.estimate import Work
from comfyui_pipedit.host.neighbour import Neighbour
from comfyui_pipedit.host.pool import FromRank
from comfyui_pipedit.host.scheduler import Scheduler
from comfyui_pipedit.host.tasks import ClipTask, DecodeTask, Task, TextTask
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import DecodeRequest, TextRequest, Tiling, Weights
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.wire.buffer import KeptLatent
from comfyui_pipedit.wire.messages import (
    Close,
    DecodeOpen,
    Encode,
    Encoded,
    Lease,
    LeaseDone,
    Load,
    Loaded,
    Measure,
    Measured,
    Memory,
    Message,
    Open,
    Opened,
    Ready,
    Refused,
    Unload,
    Use,
)

GIB = 2**30
WEIGHTS = {"transformer": 14, "vae": 1, "text": 6}
"""GiB of each network."""
ACTIVATIONS = {"denoise": 4, "decode": 7, "encode": 1}
"""GiB that each kind of work takes, and is expected to take."""
CACHE = 2
"""GiB of these that a decode holds from its first piece to its last."""
PIECES = 12
"""Units of a decode."""


@dataclass
class Gpu:
    """One GPU, in GiB. others: what is not the pool's; held: what the rank's allocator holds beside weights and open
    decodes; takes: what work really takes, as a part of what is expected."""

    total: float = 24
    others: float = 1
    held: float = 0
    takes: float = 1
    networks: dict[Weights, float] = field(default_factory=dict)
    decodes: set[str] = field(default_factory=set)

    @property
    def free(self) -> float:
        return self.total - self.others - self.held - sum(self.networks.values()) - CACHE * len(self.decodes)

    def load(self, weights: Weights) -> bool:
        size = WEIGHTS[weights.part]
        if size > self.free:
            self.held = 0
        if size > self.free:
            return False
        self.networks[weights] = size
        return True

    def work(self, kind: str) -> Use:
        """Does some work; AssertionError if it has no room, which is what claims are for."""
        size = ACTIVATIONS[kind] * self.takes
        assert size <= self.free + self.held, f"{kind} takes {size} GiB and there are {self.free} and {self.held} held"
        self.held = max(self.held, size)
        return Use(int(size * GIB), int(self.held * GIB))

    def decode(self, lease: Lease) -> Use:
        """Pieces of a decode: its cache is not for others to use until the last one, and the allocator's then."""
        if lease.first == 0:
            self.decodes.add(lease.job)
            self.held = max(0, self.held - CACHE)
        size = ACTIVATIONS["decode"] - CACHE
        assert size <= self.free + self.held, f"a decode takes {size} GiB, there are {self.free} and {self.held} held"
        self.held = max(self.held, size)
        if lease.last == PIECES:
            self.decodes.remove(lease.job)
            self.held += CACHE
        return Use(ACTIVATIONS["decode"] * GIB, int((self.held + CACHE * len(self.decodes)) * GIB))


class ScriptedPool:
    """pool.PoolLike over scripted GPUs; `step` lets the next rank answer its next message."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus, self.state, self.world = gpus, "ready", len(gpus)
        self.devices = tuple(f"gpu:{i}" for i in range(len(gpus)))
        self.inbox: deque[tuple[int, Message]] = deque()
        self.sent: list[tuple[int, Message]] = []
        self.kinds: dict[str, str] = {}
        self.woken = 0

    def send(self, rank: int, message: Message, fds: Any = ()) -> None:
        self.inbox.append((rank, message))
        self.sent.append((rank, message))

    def facts(self, rank: int) -> Ready:
        return Ready(rank, 0, 100 + rank, f"GPU {rank} (RTX 4090)", int(self.gpus[rank].free * GIB) or 1)

    def phase(self, rank: int) -> str:
        return "idle"

    def wake(self) -> None:
        self.woken += 1

    def restart(self, reason: PoolError) -> None:
        self.inbox.clear()

    def step(self) -> FromRank | None:
        """The answer to the oldest message, if it has one."""
        rank, message = self.inbox.popleft()
        answer = self._answer(rank, self.gpus[rank], message)
        return None if answer is None else FromRank(rank, answer, ())

    def _answer(self, rank: int, gpu: Gpu, message: Message) -> Message | None:
        if isinstance(message, Measure):
            return Measured(rank, Memory(int(gpu.free * GIB), int(gpu.total * GIB), int(gpu.held * GIB)))
        if isinstance(message, Load):
            if gpu.load(message.weights):
                return Loaded(rank, message.weights, WEIGHTS[message.weights.part] * GIB)
            return Refused(rank, "", "OutOfMemory", "the driver has none")
        if isinstance(message, Unload):
            gpu.held = 0
            for weights in message.weights:
                del gpu.networks[weights]
        if isinstance(message, (Open, DecodeOpen)):
            self.kinds[message.job] = "denoise" if isinstance(message, Open) else "decode"
            return Opened(rank, message.job, message.table.num_steps if isinstance(message, Open) else PIECES)
        if isinstance(message, Lease):
            kind = self.kinds[message.job]
            use = gpu.decode(message) if kind == "decode" else gpu.work(kind)
            return LeaseDone(rank, message.job, message.last, (), use=use)
        if isinstance(message, Encode):
            return Encoded(rank, message.job, (), (), gpu.work("encode"))
        assert isinstance(message, (Unload, Close)), message
        return None


class Clip(ClipTask):
    """A clip whose latent nobody wrote."""

    def finish(self) -> torch.Tensor:
        return torch.zeros(1)


class Bench:
    """A scheduler on scripted GPUs, driven by hand."""

    def __init__(self, *gpus: Gpu, neighbour: Neighbour | None = None, pool: type[ScriptedPool] = ScriptedPool,
                 helpers: bool = False) -> None:
        self.pool = pool(list(gpus))
        config = EngineConfig(devices=",".join(self.pool.devices), helpers=helpers)
        self.scheduler = Scheduler(self.pool, config, lambda task, result: task.ticket.succeed(result),
                                   neighbour=neighbour)
        self.count = 0

    def clip(self, stamp: str = "", ranks: tuple[int, ...] = (0,), low: str = "",
             steps: int = toy.STEPS) -> Task:
        """low: stamp of an expert that takes over at step 2."""
        second = weights("transformer", low) if low else None
        files = replace(toy.FILES, transformer=weights("transformer", stamp), transformer_low=second)
        job = replace(toy.job(decode=False, steps=steps), files=files, switch_step=2)
        kept = KeptLatent.create(tuple(job.latent.shape), job.table.num_state_tensors)
        return self._add(Clip(self._ticket("clip"), self.count, job, Plan(Group(ranks), Group(ranks[-1:])), kept))

    def decode(self, rank: int = 0, tiling: Tiling | None = None) -> Task:
        request = DecodeRequest(weights("vae"), toy.GEOMETRY, torch.zeros(toy.SHAPE), tiling)
        return self._add(DecodeTask(self._ticket("frames"), self.count, request, rank))

    def text(self, rank: int = 0) -> Task:
        return self._add(TextTask(self._ticket("text"), self.count, TextRequest(weights("text"), ("a",)), rank))

    def _ticket(self, kind: str) -> Ticket:
        self.count += 1
        return Ticket(f"{kind}-{self.count}", lambda job: None)

    def _add(self, task: Task) -> Task:
        self.scheduler.add(task)
        return task

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Lets ranks answer until a condition holds, or nobody has anything to say."""
        self.scheduler.advance()
        while self.pool.inbox and not until():
            event = self.pool.step()
            if event is not None:
                self.scheduler.handle(event)
            self.scheduler.advance()

    def sent(self, kind: type) -> list[tuple[int, Any]]:
        return [(rank, message) for rank, message in self.pool.sent if isinstance(message, kind)]

    def unloaded(self) -> list[str]:
        """What was unloaded, by part and stamp, in order."""
        return [f"{key.part}{key.stamp}" for _, message in self.sent(Unload) for key in message.weights]


def weights(part: str, stamp: str = "") -> Weights:
    return Weights("toy", part, "", stamp=stamp)


def expect_real_sizes(monkeypatch: Any) -> None:
    """Headers and formulas tell what the scripted GPUs will take."""
    monkeypatch.setattr(estimate, "weight_bytes", lambda key: WEIGHTS[key.part] * GIB)
    monkeypatch.setattr(estimate, "activation_bytes", _activations)


def _activations(work: Work) -> int:
    """Linear in the length, as the real ones are; toy clips have four latent frames."""
    share = work.shape[2] / toy.SHAPE[2] if work.kind == "denoise" else 1.0
    return int(ACTIVATIONS[work.kind] * GIB * share)
