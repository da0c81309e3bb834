"""What the scheduler schedules. Every request becomes one task with the same life: weights, open, leases, finish.

A task knows its messages and its results; it knows neither sockets nor other tasks. Units are solver steps of a clip,
pieces of a decode, or the whole of an encode.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError
from ..job import Branch, DecodeRequest, EncodeRequest, EvaluateRequest, Job, Progress, Stage, TextRequest, Weights
from ..plan import Plan
from ..wire import buffer
from ..wire.buffer import KeptLatent
from ..wire.messages import (
    Attention,
    BranchRef,
    DecodeOpen,
    Encode,
    Encoded,
    Evaluate,
    Lease,
    LeaseDone,
    Message,
    Open,
    TensorRef,
    VaeEncode,
)
from .estimate import Work
from .ticket import Ticket

EVALUATIONS_OUT = 4
"""Evaluations of one lease; two leases may be out at a time, so at most eight are promised (DESIGN: lease)."""
LEASE_SECONDS = 0.1


class Fds:
    """Descriptors of the mapped buffers that a task owns, in the order in which its frames carry them."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, fd: int, ref: TensorRef) -> TensorRef:
        """Takes a descriptor over; the ref as the frame must spell it."""
        self.numbers.append(fd)
        return buffer.at(ref, len(self.numbers) - 1)

    def share(self, tensor: Tensor, name: str) -> TensorRef:
        """A copy of a tensor in a new buffer."""
        return self.add(*buffer.share(tensor, name))

    def share_all(self, tensors: Sequence[Tensor], name: str) -> tuple[TensorRef, ...]:
        """Copies of tensors of one shape in one new buffer: a frame takes few descriptors, a solver many noises."""
        if not tensors:
            return ()
        fd, ref, whole = buffer.allocate((len(tensors), *tensors[0].shape), tensors[0].dtype, name)
        ref = self.add(fd, ref)
        for place, tensor in zip(whole, tensors, strict=True):
            place.copy_(tensor)
        size = whole[0].nbytes
        return tuple(replace(ref, shape=tuple(whole.shape[1:]), offset=i * size) for i in range(len(tensors)))

    def share_branch(self, branch: Branch, name: str) -> BranchRef:
        """Copies of a branch's tensors in new buffers."""
        extras = tuple(self.share(tensor, key) for key, tensor in branch.extras.items())
        return BranchRef(self.share(branch.text, name), tuple(branch.extras), extras)

    def close(self) -> None:
        while self.numbers:
            os.close(self.numbers.pop())


class Task:
    """Base of all tasks. `ranks` work on every unit together; `ordinal` is the place in the line; `leases` counts those
    that a rank has not answered."""

    kind = ""
    stage = Stage.WAITING

    def __init__(self, ticket: Ticket, ordinal: int, ranks: tuple[int, ...], weights: Weights) -> None:
        self.ticket, self.ordinal, self.ranks, self._weights = ticket, ordinal, ranks, weights
        self.fds = Fds()
        self.units: int | None = None
        self.first = 0
        self.granted = 0
        self.state = "waiting"
        self.cancelling = False
        self.opened: set[int] = set()
        self.reported: dict[int, int] = {}
        self.leases: Counter[int] = Counter()
        self.unit_seconds = 0.0
        self.since = time.monotonic()

    @property
    def id(self) -> str:
        return self.ticket.id

    @property
    def weights(self) -> Weights:
        """What its next unit is computed with."""
        return self._weights

    @property
    def needs(self) -> tuple[Weights, ...]:
        """What it and what follows it are computed with."""
        return (self.weights,)

    @property
    def in_use(self) -> tuple[Weights, ...]:
        """What may not be unloaded now."""
        return (self.weights,) if self.state in ("opening", "open") else ()

    @property
    def done(self) -> int:
        """Units that all ranks finished."""
        return min((self.reported.get(rank, self.first) for rank in self.ranks), default=self.first)

    @property
    def busy(self) -> bool:
        """Whether a rank, a helper too, has a lease that it did not answer."""
        return any(count > 0 for count in self.leases.values())

    @property
    def work(self) -> Work:
        """Its next unit as memory sees it."""
        return Work(self.kind, self.weights)

    def reset(self) -> None:
        """Back to waiting, after the pool was rebuilt; buffers stay."""
        self.state, self.units, self.granted = "waiting", None, self.first
        self.opened.clear()
        self.reported.clear()
        self.leases.clear()

    def open_message(self, seq: int) -> Message | None:
        """What makes a rank prepare; None if the lease itself carries everything."""
        return None

    def lease_message(self, seq: int, first: int, last: int) -> tuple[Message, Sequence[int]]:
        """The order for units [first, last) and the descriptors it carries."""
        return Lease(seq, self.id, first, last), ()

    def lease_units(self) -> int:
        """Units of the next lease: at least LEASE_SECONDS of work, bounded by `max_units`."""
        wanted = 1 if self.unit_seconds <= 0 else int(LEASE_SECONDS / self.unit_seconds) + 1
        return max(1, min(wanted, self.max_units()))

    def max_units(self) -> int:
        return 8

    def accept(self, message: Message, fds: Sequence[int]) -> None:
        """Takes what a LeaseDone or Encoded brings besides progress."""

    def finish(self) -> Any:
        """The result, after the last unit."""
        raise NotImplementedError

    def kept(self) -> str:
        """What a failure now leaves for another try, as a sentence."""
        return "Nothing was lost but this work"

    def progress(self, text: str = "") -> Progress:
        return Progress(self.stage, self.done, self.units or 0, text)


class ClipTask(Task):
    """Denoises one clip; its kept latent is the hand-off to the decode and what a later try resumes from.

    attention: what a row of its table takes by each expert, once its ranks have counted it; alone: it gets no helpers.
    """

    kind = "denoise"
    stage = Stage.DENOISING

    def __init__(self, ticket: Ticket, ordinal: int, job: Job, plan: Plan, kept: KeptLatent) -> None:
        super().__init__(ticket, ordinal, plan.denoise.ranks, job.files.transformer)
        self.job, self.plan, self.kept_latent = job, plan, kept
        self.num_steps = len(job.table.steps)
        self.attention: dict[Weights, Attention] = {}
        self.alone = False
        self._message: Open | None = None
        self._resume()

    @property
    def weights(self) -> Weights:
        return self.job.expert(self.granted).weights

    @property
    def work(self) -> Work:
        job = self.job
        return Work(self.kind, self.weights, job.files.geometry, tuple(job.latent.shape), self.plan.denoise.size)

    @property
    def needs(self) -> tuple[Weights, ...]:
        experts = tuple(expert.weights for expert in self.job.files.experts)
        return experts if self.job.decode is None else (*experts, self.job.decode)

    @property
    def in_use(self) -> tuple[Weights, ...]:
        """Between leases a rank holds nothing of its network."""
        return (self.job.expert(self.done).weights,) if self.busy else ()

    def _resume(self) -> None:
        found = self.kept_latent.read()
        self.first = self.granted = found[0] if found else 0
        self.units = self.num_steps

    def reset(self) -> None:
        super().reset()
        self._resume()

    def open_message(self, seq: int) -> Message:
        if not self.fds.numbers:
            self._message = self._share(seq)
        assert self._message is not None
        return replace(self._message, seq=seq, first_step=self.first)

    def _share(self, seq: int) -> Open:
        job, fds = self.job, self.fds
        return Open(
            seq=seq, job=self.id, experts=job.files.experts, switch_step=job.switch, geometry=job.files.geometry,
            plan=self.plan, table=job.table, cfg=job.cfg, positive=fds.share_branch(job.positive, "positive"),
            negative=fds.share_branch(job.negative, "negative") if job.branches == 2 and job.negative else None,
            latent=fds.share(job.latent, "latent"), noise=fds.share(job.noise, "noise"),
            noises=fds.share_all(job.noises, "noises"),
            mask=None if job.mask is None else fds.share(job.mask, "mask"),
            kept=fds.add(os.dup(self.kept_latent.fd), self.kept_latent.ref), first_step=self.first)

    def max_units(self) -> int:
        """No lease goes beyond the step at which the other expert takes over: its weights may have to be loaded."""
        rows = max(len(step) for step in self.job.table.steps)
        most = max(1, EVALUATIONS_OUT // (rows * self.job.branches))
        ahead = self.job.switch - self.granted
        return min(most, ahead) if ahead > 0 else most

    def accept(self, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, LeaseDone) and message.attention is not None:
            self.attention[self.job.expert(message.last - 1).weights] = message.attention

    def finish(self) -> Tensor:
        """The final latent float32 [1, C, T, h, w] in VAE space."""
        found = self.kept_latent.read()
        if found is None or found[0] != self.num_steps:
            step = found[0] if found else 0
            raise LoadError(f"{self.id}: the kept latent is at step {step}, not at {self.num_steps}")
        return found[1][0].clone()

    def kept(self) -> str:
        found = self.kept_latent.read()
        if not found:
            return "No step was finished yet, so nothing is kept"
        return f"Step {found[0]} of {self.num_steps} is kept: queue again to continue from there"


class EvaluateTask(Task):
    """Calls a model once on the denoise ranks; the leader writes the velocities into the result's buffer."""

    kind = "evaluate"
    stage = Stage.DENOISING

    def __init__(self, ticket: Ticket, ordinal: int, request: EvaluateRequest, plan: Plan) -> None:
        super().__init__(ticket, ordinal, plan.denoise.ranks, request.expert.weights)
        self.request, self.plan = request, plan
        self.velocities: Tensor | None = None
        self._message: Evaluate | None = None

    @property
    def work(self) -> Work:
        request = self.request
        shape = tuple(request.x.shape)
        return Work("denoise", self.weights, request.files.geometry, shape, self.plan.denoise.size)

    def open_message(self, seq: int) -> Message:
        if self._message is None:
            self._message = self._share(seq)
        return replace(self._message, seq=seq)

    def _share(self, seq: int) -> Evaluate:
        request, fds = self.request, self.fds
        shape = (len(request.branches), *request.x.shape[1:])
        fd, ref, self.velocities = buffer.allocate(shape, torch.float32, "velocities")
        return Evaluate(
            seq=seq, job=self.id, expert=request.expert, geometry=request.files.geometry, plan=self.plan,
            x=fds.share(request.x, "x"), sigma=request.sigma,
            branches=tuple(fds.share_branch(branch, "conditioning") for branch in request.branches),
            mask=None if request.mask is None else fds.share(request.mask, "mask"), velocities=fds.add(fd, ref))

    def finish(self) -> list[Tensor]:
        """Velocities float32 [1, C, T, h, w], one a branch; the mapped buffer itself, nothing is copied."""
        assert self.velocities is not None
        return list(self.velocities.split(1))


class DecodeTask(Task):
    """Decodes one latent on one rank; frames appear in the result's buffer piece by piece, in order."""

    kind = "decode"
    stage = Stage.DECODING

    def __init__(self, ticket: Ticket, ordinal: int, request: DecodeRequest, rank: int) -> None:
        super().__init__(ticket, ordinal, (rank,), request.weights)
        self.request = request
        self.frames: Tensor | None = None
        self._message: DecodeOpen | None = None

    @property
    def work(self) -> Work:
        request = self.request
        return Work(self.kind, self.weights, request.geometry, tuple(request.latent.shape), tiling=request.tiling)

    def open_message(self, seq: int) -> Message:
        if self._message is None:
            self._message = self._share(seq)
        return replace(self._message, seq=seq)

    def _share(self, seq: int) -> DecodeOpen:
        request = self.request
        _, _, length, height, width = request.latent.shape
        scale = request.geometry.spatial
        shape = (request.geometry.num_frames(length), height * scale, width * scale, 3)
        latent = self.fds.share(request.latent, "latent")
        fd, ref, self.frames = buffer.allocate(shape, torch.float32, "frames")
        frames = self.fds.add(fd, ref)
        return DecodeOpen(seq, self.id, request.weights, request.geometry, latent, frames, request.tiling)

    def finish(self) -> Tensor:
        """Frames float32 [F, H, W, 3] in 0..1; the mapped buffer itself, nothing is copied."""
        assert self.frames is not None
        return self.frames

    def kept(self) -> str:
        return "The finished latent is kept: queue again and only the decode runs"


class TextTask(Task):
    """Encodes texts on one rank."""

    kind = "encode"
    stage = Stage.ENCODING

    def __init__(self, ticket: Ticket, ordinal: int, request: TextRequest, rank: int) -> None:
        super().__init__(ticket, ordinal, (rank,), request.weights)
        self.request, self.units = request, 1
        self.tensors: list[Tensor] = []

    def reset(self) -> None:
        super().reset()
        self.units = 1

    def lease_message(self, seq: int, first: int, last: int) -> tuple[Message, Sequence[int]]:
        return Encode(seq, self.id, self.weights, self.request.texts), ()

    def accept(self, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, Encoded):
            self.tensors = [buffer.attach(fds[ref.fd], ref).clone() for ref in message.tensors]

    def finish(self) -> list[Tensor]:
        """Embeddings float32 [1, L, D], one a text."""
        return self.tensors


class VaeEncodeTask(TextTask):
    """Encodes frames to a latent on one rank."""

    def __init__(self, ticket: Ticket, ordinal: int, request: EncodeRequest, rank: int) -> None:
        Task.__init__(self, ticket, ordinal, (rank,), request.weights)
        self.frames, self.units = request, 1
        self.tensors = []
        self._ref: TensorRef | None = None

    @property
    def work(self) -> Work:
        request = self.frames
        return Work(self.kind, self.weights, request.geometry, tuple(request.frames.shape), tiling=request.tiling)

    def lease_message(self, seq: int, first: int, last: int) -> tuple[Message, Sequence[int]]:
        request = self.frames
        if self._ref is None:
            self._ref = self.fds.share(request.frames, "frames")
        message = VaeEncode(seq, self.id, self.weights, request.geometry, self._ref, request.tiling)
        return message, self.fds.numbers

    def finish(self) -> Tensor:  # type: ignore[override]
        """The latent float32 [1, C, T, h, w] in VAE space."""
        return self.tensors[0]


def units_reported(message: Message) -> int:
    """How far a rank's answer to a lease says it is."""
    return message.last if isinstance(message, LeaseDone) else 1

