"""Networks that are resident in a rank, and the one place where weights get their device and dtype.

On the CPU a tensor whose dtype is right stays a view of the mapped file; the others lie once in a buffer that all ranks
of the host map. On a GPU tensors are copied there and converted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import loaders, models
from ..errors import LoadError, OutOfStep
from ..job import Weights
from ..loaders.precision import KEEP_FP32, Slot, target_dtype
from ..parallel import sequence
from ..parallel.sequence import Context
from .device import Device


class PlacedWeights:
    """A component's weights as the family wants them (models.family.WeightSource). Reads nothing before it is asked.

    buffer: flat uint8, shared by all ranks of the host; the `writer` fills it.
    """

    def __init__(self, weights: Weights, device: Device, buffer: Tensor | None, writer: bool) -> None:
        self.weights, self._device, self._buffer, self._writer = weights, device, buffer, writer

    @property
    def root(self) -> Path:
        return Path(self.weights.path)

    @property
    def config(self) -> dict[str, Any]:
        return self._files.config

    @property
    def device(self) -> torch.device:
        return self._device.torch

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) on the device, in the dtype to compute in."""
        compute = self._device.compute_dtype(self.weights.dtype, self._files.stored_dtype)
        keep = KEEP_FP32.get((self.weights.family, self.weights.part), ())
        layout = {} if self._buffer is None else loaders.buffer_layout(self.weights, self._files, compute)
        for name, tensor in self._files.mapped():
            if name in layout:
                yield name, self._shared(layout[name], tensor)
            else:
                yield name, tensor.to(self.device).to(target_dtype(name, tensor.dtype, compute, keep))

    @cached_property
    def _files(self) -> loaders.WeightFiles:
        return loaders.open_weights(self.weights)

    def _shared(self, slot: Slot, tensor: Tensor) -> Tensor:
        assert self._buffer is not None
        converted = slot.view(self._buffer)
        if self._writer:
            converted.copy_(tensor)
        return converted


class Residency:
    """Weights key -> network. Transformers get the exchange hooked in once, when they are loaded."""

    def __init__(self, device: Device, context: Context, on_phase: Callable[[str], None]) -> None:
        self._device, self._context, self._on_phase = device, context, on_phase
        self._networks: dict[Weights, Any] = {}

    def load(self, weights: Weights, buffer: Tensor | None = None, writer: bool = True) -> int:
        """Makes a network resident; its bytes, mapped or not. LoadError if files are missing or misfit."""
        if weights not in self._networks:
            self._on_phase(f"loading {weights.part}")
            with torch.inference_mode(False), torch.no_grad():
                self._networks[weights] = self._build(weights, PlacedWeights(weights, self._device, buffer, writer))
            self._device.synchronize()
        return sum(tensor.numel() * tensor.element_size() for tensor in self._networks[weights].parameters())

    def get(self, weights: Weights) -> Any:
        """The resident network. OutOfStep if nobody loaded it."""
        if weights not in self._networks:
            raise OutOfStep(f"{weights.part} of {weights.path} was asked for before it was loaded")
        return self._networks[weights]

    def unload(self, keys: tuple[Weights, ...]) -> None:
        """Forgets networks and gives their memory back."""
        for weights in keys:
            self._networks.pop(weights, None)
        self._device.release_cached()

    def _build(self, weights: Weights, source: PlacedWeights) -> Any:
        family = models.family(weights.family)
        builders = {"transformer": family.load_transformer, "vae": family.load_vae, "text": family.load_text}
        if weights.part not in builders:
            raise LoadError(f"{weights.path}: a model has no part {weights.part!r}")
        network: Any = builders[weights.part](source)
        if weights.part == "transformer":
            sequence.install(network, family.sequence_plan, self._context)
        return network
