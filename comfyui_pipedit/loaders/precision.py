"""Which dtype each tensor of a network is computed in, and where converted copies lie in a shared buffer.

Host and ranks derive the same layout from the file headers alone: the host makes the buffer, any rank can fill it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .safetensors_file import Entry

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

CPU_DEFAULT = torch.float32
"""16-bit matrix products are 100 times slower than float32 on a CPU."""

KEEP_FP32: dict[tuple[str, str], tuple[str, ...]] = {
    ("wan", "transformer"): ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
    ("wan", "text"): ("wo",),
}
"""Per (family, part): modules whose names hold one of these parts stay float32 in a 16-bit network, as in diffusers."""

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a converted tensor lies in the shared buffer: `offset` in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor inside a flat uint8 buffer; storage is shared."""
        return buffer[self.offset:self.offset + self.num_bytes].view(self.dtype).view(self.shape)


def stored_dtype(entries: Iterable[Entry]) -> torch.dtype:
    """The floating dtype that holds most of a network's values (float32 if it has none)."""
    counts: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def target_dtype(name: str, stored: torch.dtype, compute: torch.dtype, keep_fp32: tuple[str, ...]) -> torch.dtype:
    """What one tensor is computed in: integers stay, named modules stay float32, the rest is `compute`."""
    if not stored.is_floating_point:
        return stored
    parts = name.split(".")
    return torch.float32 if any(part in keep_fp32 for part in parts) else compute


def converted_layout(entries: dict[str, Entry], compute: torch.dtype, keep_fp32: tuple[str, ...]) -> dict[str, Slot]:
    """Slots of the tensors whose dtype must change, in name order; the others are read from the mapped file."""
    layout: dict[str, Slot] = {}
    end = 0
    for name in sorted(entries):
        entry = entries[name]
        dtype = target_dtype(name, entry.dtype, compute, keep_fp32)
        if dtype != entry.dtype:
            layout[name] = Slot(dtype, entry.shape, end)
            end += -(-layout[name].num_bytes // ALIGNMENT) * ALIGNMENT
    return layout


def layout_bytes(layout: dict[str, Slot]) -> int:
    """Size of the buffer that a layout needs."""
    return max((slot.offset + slot.num_bytes for slot in layout.values()), default=0)
