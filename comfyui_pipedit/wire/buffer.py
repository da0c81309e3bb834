"""Tensors in memory that processes share: memfds passed over a channel, mapped by whoever gets the descriptor.

Nothing has a name in the file system, so nothing is left to sweep after a crash: the memory goes with its last user.
Room is reserved at creation, so that a full machine is an error with numbers instead of a bus error later.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OutOfStep, StorageFull
from .messages import TensorRef

FALLBACK_FOLDER = "/dev/shm"
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


def create(num_bytes: int, name: str) -> int:
    """A descriptor of `num_bytes` (at least 1) zeroed bytes of shareable memory, which the caller closes.

    `name` shows up in /proc and in errors. StorageFull, with the numbers, if there is no room for it.
    """
    available = _available_memory()
    if num_bytes > available:
        raise _no_room(num_bytes, name, f"{available / 2**20:,.1f} MiB of memory are free")
    descriptor = _open(name)
    try:
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_ROOM:
            raise
        have = f"the system said: {error.strerror}; {available / 2**20:,.1f} MiB are free"
        raise _no_room(num_bytes, name, have) from error
    return descriptor


def _open(name: str) -> int:
    """An anonymous file in memory; an unlinked one in /dev/shm where memfds are not allowed."""
    try:
        return os.memfd_create(f"pipedit:{name}", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile(dir=FALLBACK_FOLDER, prefix="pipedit-") as file:
            return os.dup(file.fileno())


def _available_memory() -> float:
    """Bytes that the system can give without swapping; infinite where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":") for line in lines)
    except OSError:
        return math.inf
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else math.inf


def _no_room(num_bytes: int, name: str, have: str) -> StorageFull:
    return StorageFull(f"no room for the buffer '{name}': {num_bytes / 2**20:,.1f} MiB are needed and {have}; free "
                       f"memory, raise the limit on file sizes (ulimit -f), or use a smaller clip")


def dtype_name(dtype: torch.dtype) -> str:
    """How a TensorRef spells a dtype: "float32", "bfloat16", ..."""
    return str(dtype).removeprefix("torch.")


def at(ref: TensorRef, fd: int) -> TensorRef:
    """The same tensor, found at another place among a frame's descriptors."""
    return dataclasses.replace(ref, fd=fd)


def allocate(shape: Sequence[int], dtype: torch.dtype, name: str) -> tuple[int, TensorRef, Tensor]:
    """A new shared tensor of zeros: (descriptor, which the caller closes; its ref; the tensor)."""
    ref = TensorRef(0, tuple(shape), dtype_name(dtype))
    descriptor = create(math.prod(shape) * dtype.itemsize, name)
    return descriptor, ref, attach(descriptor, ref)


def share(tensor: Tensor, name: str) -> tuple[int, TensorRef]:
    """Copies a tensor of any layout and device into a new buffer: (descriptor, which the caller closes; its ref)."""
    descriptor, ref, copy = allocate(tensor.shape, tensor.dtype, name)
    copy.copy_(tensor)
    return descriptor, ref


def attach(fd: int, ref: TensorRef) -> Tensor:
    """Maps a shared tensor. All who map it see the same bytes; the mapping outlives the descriptor.

    OutOfStep if the buffer is smaller than the ref says.
    """
    dtype = getattr(torch, ref.dtype)
    end = ref.offset + math.prod(ref.shape) * dtype.itemsize
    size = os.fstat(fd).st_size
    if end > size:
        raise OutOfStep(f"a buffer of {size} bytes cannot hold a {ref.dtype} tensor {list(ref.shape)} at {ref.offset}")
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=True, nbytes=size)
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, ref.offset // dtype.itemsize, ref.shape)  # type: ignore[call-overload]


SEQUENCE, STEP, COUNT = range(3)
SLOT_FIELDS = 8
SLOT_HEADERS = TensorRef(0, (2, SLOT_FIELDS), "int64")
SLOTS_OFFSET = 2 * SLOT_FIELDS * 8


class KeptLatent:
    """A job's state at its latest step boundary, in a buffer that outlives the ranks.

    Two slots are written in turns. A slot's sequence number is taken away first and written last, so a writer that is
    killed half way leaves the other slot valid, and the writer never waits for a reader. One process writes at a time.
    """

    def __init__(self, fd: int, ref: TensorRef) -> None:
        self.fd = fd
        self.ref = ref
        self._headers = attach(fd, SLOT_HEADERS)
        self._slots = attach(fd, ref)

    @classmethod
    def create(cls, shape: Sequence[int], num_tensors: int, name: str = "kept latent") -> KeptLatent:
        """Room for `num_tensors` float32 tensors of `shape`, twice. StorageFull if there is none."""
        ref = TensorRef(0, (2, num_tensors, *shape), "float32", SLOTS_OFFSET)
        return cls(create(SLOTS_OFFSET + math.prod(ref.shape) * 4, name), ref)

    @classmethod
    def attach(cls, fd: int, ref: TensorRef) -> KeptLatent:
        """The kept latent behind a descriptor that came with a message; `ref` is the creator's."""
        return cls(fd, ref)

    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Keeps the state after `step` steps: up to num_tensors tensors of the latent's shape, of any device."""
        slot = int(self._headers[:, SEQUENCE].argmin())
        sequence = int(self._headers[:, SEQUENCE].max()) + 1
        header = self._headers[slot]
        header[SEQUENCE] = 0
        for kept, tensor in zip(self._slots[slot], tensors, strict=False):
            kept.copy_(tensor)
        header[STEP] = step
        header[COUNT] = len(tensors)
        header[SEQUENCE] = sequence

    def read(self) -> tuple[int, list[Tensor]] | None:
        """(step, copies of the tensors) of the newest whole slot, or None if nothing was kept yet.

        Reads again if a writer overtook it twice meanwhile; that takes two steps of the solver per try.
        """
        while (slot := self._newest()) is not None:
            sequence, step, count = self._headers[slot, :3].tolist()
            copies = [tensor.clone() for tensor in self._slots[slot, :count]]
            if sequence and self._headers[slot, SEQUENCE] == sequence:
                return step, copies
        return None

    def newest(self) -> tuple[int, TensorRef] | None:
        """(step, where the newest slot's first tensor lies in this buffer): the hand-off without a copy.

        Good as long as nobody writes, so after the last step.
        """
        slot = self._newest()
        if slot is None:
            return None
        shape = self.ref.shape[2:]
        slot_bytes = math.prod(self.ref.shape[1:]) * 4
        offset = self.ref.offset + slot * slot_bytes
        return int(self._headers[slot, STEP]), TensorRef(self.ref.fd, shape, "float32", offset)

    def _newest(self) -> int | None:
        sequences = self._headers[:, SEQUENCE].tolist()
        return sequences.index(max(sequences)) if any(sequences) else None

    def close(self) -> None:
        """Closes the descriptor; the mapping stays until this object is gone."""
        os.close(self.fd)


ENTRY_SIZE = 128


class PhaseBoard:
    """What each rank is doing, as a short text in one shared page: a write is a copy of 128 bytes, no system call.

    The host reads it when a rank has died or does not answer. A text read in the middle of a write may be garbled.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def create(cls, world: int) -> PhaseBoard:
        """A board for `world` ranks."""
        return cls(create(world * ENTRY_SIZE, "phases"))

    def write(self, rank: int, text: str) -> None:
        """Puts up a rank's phase; what is longer than 128 bytes is cut."""
        start = rank * ENTRY_SIZE
        self._page[start:start + ENTRY_SIZE] = text.encode()[:ENTRY_SIZE].ljust(ENTRY_SIZE, b"\0")

    def read(self, rank: int) -> str:
        """A rank's phase, "" if it has not put one up."""
        start = rank * ENTRY_SIZE
        return self._page[start:start + ENTRY_SIZE].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Closes the descriptor; the page can be read until this object is gone."""
        os.close(self.fd)
