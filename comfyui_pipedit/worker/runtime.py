"""One rank: takes messages in order, does what they say, answers. The outermost loop is the only one that catches all.

A rank has one main thread for work and one control thread (worker.control) that answers pings and ends the process when
the host is gone. What a message asks for is done by the classes of denoise, decode and encode; this file only routes.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import models
from ..errors import JobError, OutOfMemory, OutOfStep, describe
from ..job import Span
from ..parallel import sequence
from ..parallel.fabric_p2p import PointToPoint
from ..wire import buffer
from ..wire.buffer import PhaseBoard
from ..wire.channel import Channel
from ..wire.messages import (
    Close,
    DecodeOpen,
    Encode,
    Encoded,
    Evaluate,
    Exit,
    Failed,
    Help,
    Lease,
    LeaseDone,
    Load,
    Loaded,
    Measure,
    Measured,
    Message,
    Open,
    Opened,
    Ready,
    Refused,
    Unload,
    Use,
    VaeEncode,
)
from .control import Control
from .decode import Decode
from .denoise import Denoise
from .device import Device
from .evaluate import Evaluate as Evaluation
from .help import serve
from .residency import Residency


class Runtime:
    """Owns the rank's device, world, resident networks and open jobs; everything below gets them as arguments."""

    def __init__(self, *, rank: int, world: int, generation: int, device: str, rendezvous: str, channel: Channel,
                 board: PhaseBoard, deadline: float) -> None:
        self.rank, self.world, self.generation = rank, world, generation
        self.device = Device.parse(device)
        self.channel, self.board, self.rendezvous, self.deadline = channel, board, rendezvous, deadline
        self.jobs: dict[str, Denoise | Decode | Evaluation] = {}
        self._seq = 0
        self._phase = ""
        self._handlers: dict[type, Callable[[Any, Sequence[int]], None]] = {
            Load: self._load, Unload: self._unload, Measure: self._measure, Encode: self._encode,
            VaeEncode: self._vae_encode, Open: self._open, Evaluate: self._open_evaluation,
            DecodeOpen: self._open_decode, Lease: self._lease, Help: self._help, Close: self._close,
        }

    def phase(self, text: str) -> None:
        """Says what this rank is doing, for messages about its death."""
        self._phase = text
        self.board.write(self.rank, text)

    def waiting(self, text: str) -> None:
        """Says what this rank waits for within its phase; "" when it goes on."""
        self.board.write(self.rank, f"{self._phase}: {text}" if text else self._phase)

    def run(self) -> None:
        """Joins the world and serves until the host says Exit or goes away. Ends the process on the unexpected."""
        control = Control(self.channel, self.rank)
        try:
            self._join()
            while True:
                self.phase("idle")
                message, fds = control.inbox.get()
                if isinstance(message, Exit):
                    return
                self._handle(message, fds)
        except Exception as error:
            name, text = describe(error)
            self.channel.send(Failed(self.rank, name, text, traceback.format_exc()))
            raise

    def _join(self) -> None:
        self.phase("joining the world")
        self.device.bind()
        dist.init_process_group(
            self.device.backend, store=dist.FileStore(self.rendezvous, self.world), rank=self.rank,
            world_size=self.world, timeout=datetime.timedelta(seconds=self.deadline))
        fabric = PointToPoint(self.device.torch)
        fabric.warm_up()
        self.context = sequence.Context(self.rank, fabric, self.waiting)
        self.residency = Residency(self.device, self.context, self.phase)
        self.channel.send(Ready(self.rank, self.generation, os.getpid(), self.device.label, self.device.free_memory()))

    def _handle(self, message: Message, fds: Sequence[int]) -> None:
        seq = getattr(message, "seq", self._seq + 1)
        if seq <= self._seq:
            raise OutOfStep(f"rank {self.rank} got message {seq} after {self._seq}")
        self._seq = seq
        try:
            with torch.inference_mode():
                self._handlers[type(message)](message, fds)
        except JobError as error:
            self._refuse(message, error)
        except torch.OutOfMemoryError as error:
            self.context.exchange.scratch.clear()
            self.device.release_cached()
            self._refuse(message, OutOfMemory(f"{self.device.label} is out of memory: {error}"))
        finally:
            for fd in fds:
                os.close(fd)

    def _refuse(self, message: Message, error: JobError) -> None:
        job = getattr(message, "job", "")
        self.jobs.pop(job, None)
        self.channel.send(Refused(self.rank, job, *describe(error)))

    # -- messages ---------------------------------------------------------------------------------------------------

    def _load(self, message: Load, fds: Sequence[int]) -> None:
        self.phase(f"loading {message.weights.part} from {Path(message.weights.path).name}")
        shared = buffer.attach(fds[message.buffer.fd], message.buffer) if message.buffer else None
        size = self.residency.load(message.weights, shared, writer=message.writer)
        self.channel.send(Loaded(self.rank, message.weights, size))

    def _unload(self, message: Unload, fds: Sequence[int]) -> None:
        self.phase("unloading")
        self.residency.unload(message.weights)

    def _measure(self, message: Measure, fds: Sequence[int]) -> None:
        self.channel.send(Measured(self.rank, self.device.memory()))

    def _encode(self, message: Encode, fds: Sequence[int]) -> None:
        self.phase("text encode")
        self.device.start_peak()
        started = time.monotonic()
        encoder = self.residency.get(message.weights)
        tensors = [encoder.encode(text).float().cpu() for text in message.texts]
        self._send_tensors(message.job, tensors, "encode", started)

    def _vae_encode(self, message: VaeEncode, fds: Sequence[int]) -> None:
        self.phase("vae encode")
        self.device.start_peak()
        started = time.monotonic()
        frames = buffer.attach(fds[message.frames.fd], message.frames)
        family, vae = models.family(message.weights.family), self.residency.get(message.weights)
        latent = family.vae_encode(vae, frames, message.tiling, message.geometry)
        self._send_tensors(message.job, [latent.float().cpu()], "encode", started)

    def _send_tensors(self, job: str, tensors: list[torch.Tensor], name: str, started: float) -> None:
        shared = [buffer.share(tensor, name) for tensor in tensors]
        refs = tuple(buffer.at(ref, i) for i, (_, ref) in enumerate(shared))
        answer = Encoded(self.rank, job, refs, (self._span(name, job, started),), self._use())
        self.channel.send(answer, [fd for fd, _ in shared])
        for fd, _ in shared:
            os.close(fd)

    def _open(self, message: Open, fds: Sequence[int]) -> None:
        self.phase("preparing a clip")
        self.jobs[message.job] = Denoise(message, fds, self.residency, self.context, self.device, self.phase)
        self.channel.send(Opened(self.rank, message.job, self.jobs[message.job].units))

    def _open_evaluation(self, message: Evaluate, fds: Sequence[int]) -> None:
        self.phase("preparing an evaluation")
        self.jobs[message.job] = Evaluation(message, fds, self.residency, self.context, self.device, self.phase)
        self.channel.send(Opened(self.rank, message.job, self.jobs[message.job].units))

    def _open_decode(self, message: DecodeOpen, fds: Sequence[int]) -> None:
        self.phase("preparing a decode")
        self.jobs[message.job] = Decode(message, fds, self.residency.get(message.weights), self.device, self.phase)
        self.channel.send(Opened(self.rank, message.job, self.jobs[message.job].units))

    def _lease(self, message: Lease, fds: Sequence[int]) -> None:
        job = self.jobs.get(message.job)
        if job is None:  # closed or refused while this lease was on its way
            return
        if isinstance(job, Denoise):
            job.help_from(message.helpers)
        self.device.start_peak()
        started = time.monotonic()
        frames = job.run(message.first, message.last)
        self.device.synchronize()
        spans = (self._span(job.name, message.job, started),)
        attention = job.attention if isinstance(job, Denoise) else None
        self.channel.send(LeaseDone(self.rank, message.job, message.last, spans, frames, self._use(), attention))

    def _help(self, message: Help, fds: Sequence[int]) -> None:
        self.phase(f"helping to denoise up to step {message.last}")
        self.device.start_peak()
        started = time.monotonic()
        serve(message, self.context.exchange, self.device.torch)
        self.device.synchronize()
        spans = (self._span("help", message.job, started),)
        self.channel.send(LeaseDone(self.rank, message.job, message.last, spans, 0, self._use()))

    def _close(self, message: Close, fds: Sequence[int]) -> None:
        self.jobs.pop(message.job, None)

    def _use(self) -> Use:
        return self.device.use(self.residency.num_bytes)

    def _span(self, name: str, job: str, started: float) -> Span:
        return Span(self.rank, name, job, started, time.monotonic())
