"""What a person is told when memory is short: who, how much, what takes it, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..loaders.precision import FP8_NAMES
from ..wire.messages import Memory
from . import estimate
from .estimate import Work
from .neighbour import Held

GIB = 2.0**30
OTHERS = int(GIB)
"""What other programs have before it is worth a word: a CUDA context alone takes half of it."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a task takes on one rank at its peak, in bytes. missing: the part of the weights that is not there yet;
    others: activations of those that take turns with it on the rank, the most that one of them takes."""

    weights: int
    missing: int
    activations: int
    others: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations

    def short_of(self, memory: Memory) -> int:
        """Bytes that are not there; 0 or less if it fits."""
        return self.missing + max(self.activations, self.others) - memory.free - memory.cached


def gib(num_bytes: int) -> str:
    """"1.9 GiB"."""
    return f"{num_bytes / GIB:.1f} GiB"


def text(device: str, work: Work, need: Need, memory: Memory, pool: int, left: Sequence[Held]) -> str:
    """The sentences. pool: bytes of the pool's other networks on the device; left: what ComfyUI holds there."""
    resident = need.weights - need.missing
    others = max(0, memory.total - memory.free - memory.cached - resident - pool)
    names = f" (of these ComfyUI: {', '.join(f'{held.name} {gib(held.num_bytes)}' for held in left)})" if left else ""
    short = need.total - memory.total if need.total > memory.total else need.short_of(memory)
    return (f"{device}, {gib(memory.total)}, is {gib(short)} short for {work.label}: weights {gib(need.weights)}, "
            f"activations {gib(need.activations)}, the pool's other networks {gib(pool)}, other programs {gib(others)}"
            f"{names}. {_list(list(_advice(work, need, memory, others, left)))}.")


def _advice(work: Work, need: Need, memory: Memory, others: int, left: Sequence[Held]) -> Iterator[str]:
    """What would help, the cheapest first."""
    if left:
        yield "connect PipeDiT Loader's clip and vae, so that ComfyUI loads none of its own"
    elif others > OTHERS:
        yield "close what else uses the GPU"
    if work.kind == "decode" and work.tiling is None:
        yield "set tiling to auto or on"
    elif work.kind != "denoise":
        yield "use a smaller picture" if work.shape else "use a GPU with more memory"
    if work.weights.part == "transformer" and work.weights.dtype not in FP8_NAMES:
        yield "set weight_dtype to fp8_e4m3fn"
    if work.kind == "denoise":
        frames = _shorter(work, need, memory.free + memory.cached - need.missing)
        yield f"use length {frames}" if frames else "use more GPUs or a smaller picture"


def _shorter(work: Work, need: Need, room: int) -> int:
    """Frames of the longest shorter clip that fits; 0 if none does. A measured peak shrinks as the estimate does."""
    assert work.geometry is not None
    expected = estimate.activation_bytes(work)
    frames = estimate.longest(work, int(room * expected / need.activations)) if need.activations else 0
    return frames if frames < work.geometry.num_frames(work.shape[2]) else 0


def _list(parts: Sequence[str]) -> str:
    """"A, b or c"."""
    joined = parts[-1] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
    return joined[:1].upper() + joined[1:]
