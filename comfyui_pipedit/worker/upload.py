"""Tensors of mapped files to a GPU at the speed of the host's memory.

A plain copy out of a mapping runs on one thread and through a staging buffer of the driver: 7 GiB/s on a machine whose
memory gives 36. Here threads copy pieces into pinned buffers, and the copy engine takes each piece on as soon as it is
full, while the threads fill the next ones.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

THREADS = 12
PIECE_BYTES = 16 << 20
SMALL_BYTES = 1 << 20
"""Smaller tensors are copied plainly: a network has thousands of them and they are nothing."""


@dataclass(slots=True)
class Slot:
    """A pinned buffer of one piece. `taken`: when the copy engine has read it."""

    buffer: Tensor
    taken: torch.cuda.Event | None = None

    def fill(self, source: Tensor) -> None:
        """Copies a piece in, after the one before was taken. source: uint8 [n]."""
        if self.taken is not None:
            self.taken.synchronize()
        self.buffer[: len(source)].copy_(source)


@dataclass(slots=True)
class Piece:
    """A piece on its way: filled by a thread, then copied to `target` on the device."""

    slot: Slot
    target: Tensor
    filled: Future[None]


@dataclass(slots=True)
class Uploader:
    """Copies tensors to one device, several pieces at a time.

    threads, piece_bytes, depth: how many copy, pieces of what size, and how many are under way. pinned: page-locked
    buffers; False is for tests without a GPU.
    """

    device: torch.device
    threads: int = field(default_factory=lambda: min(THREADS, os.cpu_count() or 1))
    piece_bytes: int = PIECE_BYTES
    depth: int = 0
    pinned: bool = True

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, copy on the device) of CPU tensors, in their order, read ahead of the one who takes them.

        A copy may be used on the current stream when it is given out. Whatever ends the iteration, no thread and no
        pinned memory is left.
        """
        slots = deque(Slot(torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=self.pinned))
                      for _ in range(self.depth or 2 * self.threads))
        under_way: deque[Piece] = deque()
        waiting: deque[tuple[str, Tensor, Piece | None]] = deque()
        with ThreadPoolExecutor(self.threads, "pipedit-upload") as pool:
            for name, tensor in tensors:
                copy, last = tensor.to(self.device) if tensor.nbytes < SMALL_BYTES else torch.empty(0), None
                if tensor.nbytes >= SMALL_BYTES:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                    for source, target in self._pieces(tensor, copy):
                        if not slots:
                            slots.append(self._send(under_way.popleft()))
                        slot = slots.popleft()
                        under_way.append(last := Piece(slot, target, pool.submit(slot.fill, source)))
                waiting.append((name, copy, last))
                yield from self._complete(waiting, under_way)
            while under_way:
                self._send(under_way.popleft())
            yield from self._complete(waiting, under_way)

    def _pieces(self, tensor: Tensor, copy: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        flat, target = (one.reshape(-1).view(torch.uint8) for one in (tensor, copy))
        return zip(flat.split(self.piece_bytes), target.split(self.piece_bytes), strict=True)

    def _send(self, piece: Piece) -> Slot:
        """Starts a full piece on its way to the device; its slot may be filled again once that was read."""
        piece.filled.result()
        piece.target.copy_(piece.slot.buffer[: len(piece.target)], non_blocking=self.pinned)
        if self.pinned:
            piece.slot.taken = torch.cuda.Event()
            piece.slot.taken.record()
        return piece.slot

    def _complete(self, waiting: deque[tuple[str, Tensor, Piece | None]],
                  under_way: deque[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Those at the front whose last piece was sent."""
        while waiting and (waiting[0][2] is None or not any(waiting[0][2] is piece for piece in under_way)):
            name, copy, _ = waiting.popleft()
            yield name, copy
