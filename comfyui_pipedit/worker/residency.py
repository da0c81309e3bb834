"""Networks that are resident in a rank, and the one place where weights get their device and dtype.

On the CPU a tensor whose dtype is right stays a view of the mapped file; the others lie once in a buffer that all ranks
of the host map. On a GPU tensors are copied there and converted there. Weights in fp8 stay in fp8 (models/fp8.py).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import loaders, models
from ..errors import LoadError, OutOfStep
from ..job import Expert, LoraUse, Weights
from ..loaders import precision
from ..loaders.lora import LoraFile, fit, read_lora
from ..loaders.precision import FP8, Rules, Slot, true_values
from ..models import fp8
from ..models.lora import LoraState
from ..parallel import sequence
from ..parallel.sequence import Context
from .device import Device

log = logging.getLogger(__name__)


class PlacedWeights:
    """A component's weights as the family wants them (models.family.WeightSource). Reads nothing before it is asked.

    buffer: flat uint8, shared by all ranks of the host; the `writer` fills it.
    """

    def __init__(self, weights: Weights, device: Device, buffer: Tensor | None, writer: bool) -> None:
        self.weights, self._device, self._buffer, self._writer = weights, device, buffer, writer
        self.in_fp8: dict[str, Tensor | None] = {}
        """Scale (None for 1) of each weight that `tensors` gave out in fp8."""

    @property
    def root(self) -> Path:
        return Path(self.weights.path)

    @property
    def config(self) -> dict[str, Any]:
        return self._files.config

    @property
    def device(self) -> torch.device:
        return self._device.torch

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        return {name: entry.shape for name, entry in self._files.entries.items()}

    @property
    def compute(self) -> torch.dtype:
        """What the network computes in."""
        return self._rules.compute

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) on the device, in the dtype to be held in. Scales of what comes in fp8 go into `in_fp8`."""
        for name, stored, held in self._placed(self._files.entries):
            if held.dtype in FP8:
                scale = self._scales.get(name)
                self.in_fp8[name] = scale if self._rules.stays(name, stored, scale is not None) else None
            yield name, held

    def again(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """What `tensors` gave for these names, for a network that is resident: nothing shared is written."""
        self._writer = False
        return ((name, held) for name, _, held in self._placed(names))

    def _placed(self, names: Collection[str]) -> Iterator[tuple[str, torch.dtype, Tensor]]:
        """(name, stored dtype, tensor to be held) in the files' order."""
        wanted = ((name, tensor) for name, tensor in self._files.mapped() if name in names)
        for name, tensor in self._device.bring(wanted):
            scale = self._scales.get(name)
            if name in self._layout:
                yield name, tensor.dtype, self._shared(self._layout[name], tensor, scale)
            else:
                yield name, tensor.dtype, self._held(name, tensor, scale)

    @cached_property
    def _layout(self) -> dict[str, Slot]:
        return {} if self._buffer is None else loaders.buffer_layout(self.weights, self._files, self._rules.compute)

    @cached_property
    def _files(self) -> loaders.WeightFiles:
        return loaders.open_weights(self.weights)

    @cached_property
    def _rules(self) -> Rules:
        weights = self.weights
        compute = self._device.compute_dtype(*precision.computed_as(weights.dtype, self._files.stored_dtype))
        return precision.rules(weights.family, weights.part, weights.dtype, compute)

    @cached_property
    def _scales(self) -> dict[str, Tensor]:
        """Weight name -> its scale, float32 without dimensions, on the CPU."""
        return self._files.scale_values()

    def _held(self, name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
        """The tensor itself where it is right as stored, else its true values in the dtype to be held in."""
        if self._rules.stays(name, tensor.dtype, scale is not None):
            return tensor
        return true_values(tensor, scale, self._rules.target(name, tensor.dtype))

    def _shared(self, slot: Slot, tensor: Tensor, scale: Tensor | None) -> Tensor:
        assert self._buffer is not None
        converted = slot.view(self._buffer)
        if self._writer:
            converted.copy_(tensor if scale is None else true_values(tensor, scale, slot.dtype))
        return converted


class Adapted:
    """A resident transformer whose weights hold the LoRAs of one expert after the other (models/lora.py)."""

    def __init__(self, network: nn.Module, source: PlacedWeights, on_phase: Callable[[str], None], *,
                 shared: bool) -> None:
        """shared: other ranks see the same weights, so that these are never written to."""
        self.network, self._on_phase = network, on_phase
        self._uses: tuple[LoraUse, ...] | None = ()
        self._state = LoraState(network, source.again, shared=shared, compute=source.compute)

    def take(self, uses: tuple[LoraUse, ...]) -> nn.Module:
        """The network with these LoRAs. LoadError if one has no effect, does not fit, or was changed."""
        if uses != self._uses:
            self._uses = None
            self._on_phase("changing LoRAs")
            self._state.go([(lora_as_read(use), use.strength) for use in uses])
            self._uses = uses
        return self.network


def lora_as_read(use: LoraUse) -> LoraFile:
    """The file of a use. LoadError if it is not the one that the graph read."""
    file = read_lora(use.path)
    if file.stamp != use.stamp:
        raise LoadError(f"{use.path} was changed after the graph had read it; queue again to use what is there now")
    return file


class Residency:
    """Weights key -> network. Transformers get the exchange hooked in once, when they are loaded."""

    def __init__(self, device: Device, context: Context, on_phase: Callable[[str], None]) -> None:
        self._device, self._context, self._on_phase = device, context, on_phase
        self._networks: dict[Weights, Any] = {}
        self._sources: dict[Weights, PlacedWeights] = {}
        self._adapted: dict[Weights, Adapted] = {}
        self._sizes: dict[Weights, int] = {}

    def load(self, weights: Weights, buffer: Tensor | None = None, writer: bool = True) -> int:
        """Makes a network resident; its bytes, mapped or not. LoadError if files are missing or misfit."""
        if weights not in self._networks:
            self._on_phase(f"loading {weights.part}")
            with torch.inference_mode(False), torch.no_grad():
                source = PlacedWeights(weights, self._device, buffer, writer)
                self._networks[weights], self._sources[weights] = self._build(weights, source), source
            self._device.synchronize()
            parameters = self._networks[weights].parameters()
            self._sizes[weights] = sum(tensor.numel() * tensor.element_size() for tensor in parameters)
        return self._sizes[weights]

    @property
    def num_bytes(self) -> int:
        """Bytes of all resident networks."""
        return sum(self._sizes.values())

    def get(self, weights: Weights) -> Any:
        """The resident network. OutOfStep if nobody loaded it."""
        if weights not in self._networks:
            raise OutOfStep(f"{weights.part} of {weights.path} was asked for before it was loaded")
        return self._networks[weights]

    def check(self, expert: Expert) -> Any:
        """The resident transformer of an expert, whatever LoRAs it holds now. LoadError if one of the expert's has no
        effect, does not fit, or was changed."""
        network = self.get(expert.weights)
        if expert.loras:
            source = self._sources[expert.weights]
            for use in expert.loras:
                fit(lora_as_read(use), source.shapes, source.in_fp8)
        return network

    def take(self, expert: Expert) -> Any:
        """The resident transformer of an expert, holding its LoRAs."""
        network = self.get(expert.weights)
        if not expert.loras and expert.weights not in self._adapted:
            return network
        if expert.weights not in self._adapted:
            self._adapted[expert.weights] = Adapted(network, self._sources[expert.weights], self._on_phase,
                                                    shared=not self._device.on_gpu)
        return self._adapted[expert.weights].take(expert.loras)

    def unload(self, keys: tuple[Weights, ...]) -> None:
        """Forgets networks and gives their memory back."""
        for weights in keys:
            for held in (self._networks, self._sources, self._adapted, self._sizes):
                held.pop(weights, None)
        gc.collect()  # hooks know their modules, so that a network goes with the collector only
        self._context.exchange.scratch.clear()
        self._device.release_cached()

    def _build(self, weights: Weights, source: PlacedWeights) -> Any:
        family = models.family(weights.family)
        builders = {"transformer": family.load_transformer, "vae": family.load_vae, "text": family.load_text}
        if weights.part not in builders:
            raise LoadError(f"{weights.path}: a model has no part {weights.part!r}")
        network: Any = builders[weights.part](source)
        if source.in_fp8:
            self._hold_fp8(network, source)
        if weights.part == "transformer":
            sequence.install(network, family.sequence_plan, self._context)
        return network

    def _hold_fp8(self, network: Any, source: PlacedWeights) -> None:
        """Linear layers that compute from fp8, in the place of those that cannot."""
        fast = source.weights.dtype == precision.FAST and self._device.on_gpu
        why_not = fp8.multiplies(self._device.torch) if fast else ""
        if why_not:
            log.warning("%s: no products in fp8 on %s (%s); it computes in 16 bits from the fp8 weights",
                        source.root.name, self._device.label, why_not)
        module: nn.Module = network if isinstance(network, nn.Module) else network.model
        fp8.install(module, source.in_fp8, fast and not why_not)
