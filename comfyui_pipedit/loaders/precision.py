"""Which dtype each tensor of a network is held in, and where converted copies lie in a shared buffer.

Host and ranks derive the same layout from the file headers alone: the host makes the buffer, any rank can fill it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .safetensors_file import Entry

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Weight dtypes that everything is held and computed in."""

FAST = "fp8_e4m3fn_fast"
FP8_NAMES: dict[str, torch.dtype] = {"fp8_e4m3fn": torch.float8_e4m3fn, FAST: torch.float8_e4m3fn,
                                     "fp8_e5m2": torch.float8_e5m2}
"""Weight dtypes that the linear layers of the blocks are held in; they are computed in 16 bits (float32 on the CPU)."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_COMPUTE = torch.bfloat16
"""What a network stored in fp8 is computed in on a GPU."""

CPU_DEFAULT = torch.float32
"""16-bit matrix products are 100 times slower than float32 on a CPU."""

KEEP_FP32: dict[tuple[str, str], tuple[str, ...]] = {
    ("wan", "transformer"): ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
    ("wan", "text"): ("wo",),
}
"""Per (family, part): modules whose names hold one of these parts stay float32 in a 16-bit network, as in diffusers."""

LINEARS: dict[tuple[str, str], str] = {
    ("wan", "transformer"): r"(vace_)?blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)|"
                            r"ffn\.net\.(0\.proj|2)|proj_in|proj_out)\.weight",
    ("wan", "text"): r"encoder\.block\.\d+\.layer\.\d\.(SelfAttention\.[qkvo]|DenseReluDense\.w\w+)\.weight",
}
"""Per (family, part): the weights that may be held in fp8, the linear layers of the blocks. Embeddings, norms, tables,
the patch embedding and the output layer are a small part of a network and never are."""

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """How the tensors of one network are held.

    compute: what the network is computed in. cast: fp8 dtype that the linear layers are brought to; None = those stored
    in fp8 stay so if `keep`. keep_fp32, linears: see KEEP_FP32 and LINEARS.
    """

    compute: torch.dtype
    cast: torch.dtype | None = None
    keep: bool = True
    keep_fp32: tuple[str, ...] = ()
    linears: str = ""

    def target(self, name: str, stored: torch.dtype) -> torch.dtype:
        """What a tensor is held in: integers stay, linear layers may be fp8, named modules are float32, the rest is
        `compute`."""
        if not stored.is_floating_point:
            return stored
        if self.linears and re.fullmatch(self.linears, name):
            if self.cast is not None:
                return self.cast
            if self.keep and stored in FP8:
                return stored
        return torch.float32 if any(part in self.keep_fp32 for part in name.split(".")) else self.compute

    def stays(self, name: str, stored: torch.dtype, scaled: bool) -> bool:
        """Whether the stored tensor is used as it is; a scale stays beside fp8 and is worked into anything else."""
        return self.target(name, stored) == stored and (not scaled or stored in FP8)


def rules(family: str, part: str, weight_dtype: str, compute: torch.dtype) -> Rules:
    """The rules for a network under a weight dtype (job.Weights.dtype)."""
    key = (family, part)
    return Rules(compute, FP8_NAMES.get(weight_dtype), weight_dtype not in DTYPES, KEEP_FP32.get(key, ()),
                 LINEARS.get(key, ""))


def computed_as(weight_dtype: str, stored: torch.dtype) -> tuple[str, torch.dtype]:
    """(weight dtype, stored dtype) to choose a compute dtype by: fp8 is a way of holding weights, not of computing."""
    if weight_dtype == FAST:
        return "default", FP8_COMPUTE
    if weight_dtype in FP8_NAMES:
        return "default", stored if stored in (torch.bfloat16, torch.float16) else FP8_COMPUTE
    return weight_dtype, FP8_COMPUTE if stored in FP8 else stored


def on_a_gpu(family: str, part: str, weight_dtype: str, stored: torch.dtype) -> Rules:
    """The rules for a network on a GPU, where "default" is computed in the dtype that most of it is stored in."""
    name, compute = computed_as(weight_dtype, stored)
    return rules(family, part, weight_dtype, DTYPES.get(name, compute))


def held_bytes(entries: Mapping[str, Entry], held: Rules) -> int:
    """Bytes of all tensors of a network as they are held."""
    return sum(entry.num_values * held.target(name, entry.dtype).itemsize for name, entry in entries.items())


def true_values(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """stored * scale in `dtype`, multiplied in float32 and rounded once.

    scale: float32 without dimensions, on the CPU whatever the device: kernels take it as a number in full precision, so
    that 16-bit copies of fp8 values, which are exact, can be multiplied in place.
    """
    if scale is None:
        return tensor.to(dtype)
    if tensor.dtype in FP8 and dtype not in FP8:
        return tensor.to(dtype, copy=True).mul_(scale)
    return (tensor.float() * scale).to(dtype)


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
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_values
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def converted_layout(entries: Mapping[str, Entry], scaled: Collection[str], held: Rules) -> dict[str, Slot]:
    """Slots of the tensors that are not used as stored, in name order; the others are read from the mapped file.

    scaled: names of the weights that have a scale.
    """
    layout: dict[str, Slot] = {}
    end = 0
    for name in sorted(entries):
        entry = entries[name]
        if not held.stays(name, entry.dtype, name in scaled):
            layout[name] = Slot(held.target(name, entry.dtype), entry.shape, end)
            end += -(-layout[name].num_bytes // ALIGNMENT) * ALIGNMENT
    return layout


def layout_bytes(layout: dict[str, Slot]) -> int:
    """Size of the buffer that a layout needs."""
    return max((slot.offset + slot.num_bytes for slot in layout.values()), default=0)
