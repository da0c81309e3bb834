"""One rank's device: the only file that asks what kind of device it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidJob, SetupError
from ..wire.messages import Memory, Use
from .upload import Uploader

DType = torch.dtype  # inside of Device the name torch is a property


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU rank ("cpu:0") or a GPU ("gpu:1", ComfyUI's logical number)."""

    kind: str
    index: int

    @classmethod
    def parse(cls, name: str) -> Device:
        """"cpu:I" or "gpu:I" -> Device. InvalidJob otherwise."""
        match = re.fullmatch(r"(cpu|gpu):(\d+)", name)
        if not match:
            raise InvalidJob(f"device {name!r} is neither 'cpu:I' nor 'gpu:I'")
        return cls({"cpu": "cpu", "gpu": "cuda"}[match[1]], int(match[2]))

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        """torch.distributed's backend for this kind."""
        return "nccl" if self.on_gpu else "gloo"

    @property
    def torch(self) -> torch.device:
        return torch.device("cuda", self.index) if self.on_gpu else torch.device("cpu")

    @property
    def label(self) -> str:
        """For people: "GPU 1 (NVIDIA H200)" or "CPU rank 0"."""
        if not self.on_gpu:
            return f"CPU rank {self.index}"
        return f"GPU {self.index} ({torch.cuda.get_device_name(self.index)})"

    def bind(self) -> None:
        """Makes this the process's device; one thread for a CPU rank, so that ranks do not fight for cores."""
        if not self.on_gpu:
            torch.set_num_threads(1)
            return
        count = torch.cuda.device_count()
        if self.index >= count:
            raise SetupError(f"GPU {self.index} was asked for and this machine shows {count} GPUs (0 to {count - 1})")
        torch.cuda.set_device(self.index)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.index)

    def free_memory(self) -> int:
        """Bytes free on the GPU; 0 on the CPU, where nobody counts."""
        return torch.cuda.mem_get_info(self.index)[0] if self.on_gpu else 0

    def memory(self) -> Memory:
        """The GPU now; zeros on the CPU."""
        if not self.on_gpu:
            return Memory(0, 0, 0)
        free, total = torch.cuda.mem_get_info(self.index)
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return Memory(free, total, cached)

    def start_peak(self) -> None:
        """Forgets the most memory that this process had, for `use`."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.index)

    def use(self, weights: int) -> Use:
        """Since `start_peak`, beside so many bytes of weights; zeros on the CPU."""
        if not self.on_gpu:
            return Use()
        peak, held = torch.cuda.max_memory_allocated(self.index), torch.cuda.memory_reserved(self.index)
        return Use(max(0, peak - weights), max(0, held - weights))

    def release_cached(self) -> None:
        """Gives memory that the allocator holds back to the driver."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def bring(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on this device) of CPU tensors, in their order: on the CPU themselves, else copies."""
        return Uploader(self.torch).stream(tensors) if self.on_gpu else iter(tensors)

    def compute_dtype(self, name: str, stored: DType) -> DType:
        """What a network is computed in: by default the file's own dtype, float32 on the CPU, where 16-bit matmul is
        100 times slower."""
        if name == "default":
            return stored if self.on_gpu else torch.float32
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
