"""A decode on one rank: pieces of frames go straight into the buffer that the host shows as they come (DeDiVAE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..errors import InvalidJob, OutOfStep
from ..wire import buffer
from ..wire.messages import DecodeOpen
from .device import Device


class Decode:
    """Units: latent frames of a whole decode, boxes of a tiled one. InvalidJob for a latent of another model."""

    name = "decode"

    def __init__(self, message: DecodeOpen, fds: Sequence[int], vae: Any, device: Device,
                 on_phase: Callable[[str], None]) -> None:
        shape, channels = message.latent.shape, message.geometry.channels
        if len(shape) != 5 or shape[0] != 1 or shape[1] != channels:
            raise InvalidJob(f"a latent to decode is [1, {channels}, T, h, w], not {list(shape)}")
        family = models.family(message.weights.family)
        latent = buffer.attach(fds[message.latent.fd], message.latent).to(device.torch, torch.float32)
        self._job, self._on_phase = message.job, on_phase
        self._frames = buffer.attach(fds[message.frames.fd], message.frames)
        self._pieces: Iterator[Tensor] = iter(family.decode_pieces(vae, latent, message.tiling, message.geometry))
        self.units = family.num_pieces(shape, message.tiling, message.geometry)
        self._next = self._done = 0

    def run(self, first: int, last: int) -> int:
        """Decodes pieces [first, last); the frames finished so far. OutOfStep if they do not follow those done."""
        if first != self._next or last > self.units:
            raise OutOfStep(f"{self._job}: pieces {first} to {last} of {self.units} were leased and piece "
                            f"{self._next} is next")
        for piece in range(first, last):
            self._on_phase(f"decode piece {piece + 1} of {self.units}")
            frames = next(self._pieces)
            self._frames[self._done:self._done + len(frames)].copy_(frames)
            self._done += len(frames)
            self._next = piece + 1
        if last == self.units:
            self._pieces = iter(())  # the network's cache is not kept until the job is closed: the next decode needs it
        return self._done
