"""LoRA as a state of a resident network: which chain of files its weights hold now, and the way to another chain.

    merged = round(original + sum over the chain of strength * alpha / rank * up @ down), in float32, rounded once

always from the original and in the chain's order, as ComfyUI does it, so that on, off and on gives the same bits.
Weights of a rank alone (on a GPU) are written in their own storage: captured graphs stay valid. Weights that ranks
share (on the CPU, through one read-only mapping) are never written: a changed one becomes a private copy, with the same
bits on every rank, and an unchanged one is the mapped original again. A weight in fp8 is left as it is: its module gets
a side path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LoadError
from ..job import LoraUse
from ..loaders.lora import Adapter, LoraFile, LoraReport, fit

Chain = Sequence[tuple[LoraFile, float]]
Originals = Callable[[Sequence[str]], Iterable[tuple[str, Tensor]]]
"""Names of parameters -> (name, original) of each, in any order, on the device and in the dtype that the network has
them in. A stream, so that a reader may fetch ahead; it is asked only for weights that change."""

CHUNK_VALUES = 1 << 24
"""Values of a weight that are in float32 at once: 64 MiB, and as much again for the change."""

SMALLEST_BUCKET = 16


@dataclass(frozen=True, slots=True)
class Change:
    """One link of the chain at one parameter."""

    use: LoraUse
    adapter: Adapter
    read: Callable[[str], Tensor]

    @property
    def factor(self) -> float:
        return self.use.strength * self.adapter.scale

    def tensors(self, device: torch.device) -> list[Tensor]:
        """(down, up) or (difference,) on a device, in the file's dtype."""
        return [self.read(name).to(device) for name in self.adapter.tensors]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        """Rows of the change in float32; `tensors` are its own. A low-rank change is flat: [rows, inputs]."""
        if not self.adapter.low_rank:
            return self.factor * tensors[0][start:stop].float()
        down, up = tensors
        return self.factor * torch.mm(up[start:stop].float().flatten(1), down.float().flatten(1))


class SidePath:
    """y + up(down(x)) behind a module that computes y: a forward hook. The ranks of a chain lie side by side, filled up
    with zeros to a bucket, so that another chain of a similar rank finds the same shapes and the same storage."""

    def __init__(self, module: nn.Module, bucket: int, inputs: int, outputs: int, like: Tensor) -> None:
        self.down, self.up = like.new_zeros(bucket, inputs), like.new_zeros(outputs, bucket)
        self._handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low = F.linear(arguments[0].to(self.down.dtype), self.down)
        return output + F.linear(low, self.up).to(output.dtype)

    @property
    def bucket(self) -> int:
        return self.down.shape[0]

    def fill(self, changes: Sequence[Change]) -> None:
        """Takes the factors of a chain of low-rank changes; `up` holds them times their factors, rounded once."""
        self.down.zero_()
        self.up.zero_()
        end = 0
        for change in changes:
            down, up = (tensor.flatten(1) for tensor in change.tensors(self.down.device))
            place = slice(end, end := end + change.adapter.rank)
            self.down[place].copy_(down)
            self.up[:, place].copy_(change.factor * up.float())

    def remove(self) -> None:
        self._handle.remove()


class LoraState:
    """The chain of LoRAs that a network's weights hold.

    originals: where the weights come from that a change is added to. shared: whether other processes see the network's
    tensors too. compute: dtype of the activations, for side paths.
    """

    def __init__(self, network: nn.Module, originals: Originals, *, shared: bool,
                 compute: torch.dtype = torch.bfloat16) -> None:
        self._network, self._originals, self._shared, self._compute = network, originals, shared, compute
        self._key: tuple[LoraUse, ...] | None = ()
        self._reports: tuple[LoraReport, ...] = ()
        self._holds: dict[str, tuple[LoraUse, ...]] = {}
        self._unsure: set[str] = set()
        self._sides: dict[str, SidePath] = {}
        self.layout = 0
        """Changes when the storage or the shapes of side paths do: graphs captured before are then void."""

    @property
    def key(self) -> tuple[LoraUse, ...] | None:
        """(path, stamp, strength) of each link; None after a change that failed midway."""
        return self._key

    @property
    def side_ranks(self) -> dict[str, int]:
        """Module -> rank of its side path, zeros included."""
        return {name: side.bucket for name, side in self._sides.items()}

    def go(self, chain: Chain) -> tuple[LoraReport, ...]:
        """Makes the weights hold a chain of (file, strength), in this order; links of strength 0 are left out.

        Only the parameters whose links differ are written; nothing happens if the network is there already. LoadError
        if a file has no effect or does not fit: then the weights are as they were. After any failure while weights are
        written the state is unknown (`key` is None), and the next call writes those weights anew.
        """
        links = [(file, float(strength)) for file, strength in chain if strength]
        key = tuple(file.use(strength) for file, strength in links)
        if key == self._key:
            return self._reports
        tensors = self._network.state_dict(keep_vars=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        fp8 = {name for name, tensor in tensors.items() if _in_fp8(tensor)}
        reports = tuple(fit(file, shapes, fp8) for file, _ in links)
        with ExitStack() as files, torch.inference_mode(False), torch.no_grad():
            changes = _changes(links, reports, files)
            holds = {name: tuple(change.use for change in found) for name, found in changes.items()}
            self._unsure |= {name for name in {*holds, *self._holds} if holds.get(name) != self._holds.get(name)}
            self._key = None
            self._write(tensors, fp8, changes)
        self._key, self._reports, self._holds, self._unsure = key, reports, holds, set()
        return reports

    def _write(self, tensors: dict[str, Tensor], fp8: set[str], changes: dict[str, list[Change]]) -> None:
        """Brings every parameter that may hold something else to what it should hold."""
        merged = [name for name in tensors if name in self._unsure and name not in fp8]
        given = 0
        for name, original in self._originals(merged) if merged else ():
            _merge(tensors[name], original, changes.get(name, []), self._shared)
            given += 1
        if given != len(merged):
            raise LoadError(f"{given} of {len(merged)} original weights could be read; the file may have changed")
        for name in sorted(self._unsure & fp8):
            self._side(name.removesuffix(".weight"), tensors[name], changes.get(name, []))

    def _side(self, name: str, weight: Tensor, changes: list[Change]) -> None:
        bucket = _bucket(sum(change.adapter.rank for change in changes))
        side = self._sides.get(name)
        if side is not None and side.bucket != bucket:
            self._sides.pop(name).remove()
            self.layout += 1
            side = None
        if side is None and bucket:
            like = torch.empty(0, dtype=self._compute, device=weight.device)
            side = SidePath(self._network.get_submodule(name), bucket, weight.shape[1], weight.shape[0], like)
            self._sides[name] = side
            self.layout += 1
        if side is not None:
            side.fill(changes)


def _changes(links: Chain, reports: Sequence[LoraReport], files: ExitStack) -> dict[str, list[Change]]:
    """Parameter -> its changes in the chain's order; the files stay mapped until `files` closes."""
    changes: dict[str, list[Change]] = {}
    for (file, strength), report in zip(links, reports, strict=True):
        read = files.enter_context(file.open())
        for adapter in report.matched:
            changes.setdefault(adapter.parameter, []).append(Change(file.use(strength), adapter, read))
    return changes


def _merge(parameter: Tensor, original: Tensor, changes: list[Change], shared: bool) -> None:
    """original + changes into a parameter: in place, or as a private copy where the parameter is shared."""
    assert (original.shape, original.dtype) == (parameter.shape, parameter.dtype), "an original of another kind"
    out = torch.empty_like(original) if shared and changes else parameter.data
    if changes:
        _add_up(original, changes, out)
    elif shared:
        out = original
    else:
        out.copy_(original)
    parameter.data = out


def _add_up(original: Tensor, changes: list[Change], out: Tensor) -> None:
    """out = original + changes, some rows at a time. Each row is summed in float32 and rounded once."""
    loaded = [change.tensors(original.device) for change in changes]
    for start, stop in _row_ranges(original.shape):
        total = original[start:stop].to(torch.float32, copy=True)
        for change, tensors in zip(changes, loaded, strict=True):
            total += change.rows(tensors, start, stop).view_as(total)
        out[start:stop].copy_(total)


def _row_ranges(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    per_row = max(1, torch.Size(shape[1:]).numel())
    step = max(1, CHUNK_VALUES // per_row)
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _bucket(rank: int) -> int:
    """The next power of two, at least SMALLEST_BUCKET; 0 for none."""
    return max(SMALLEST_BUCKET, 1 << (rank - 1).bit_length()) if rank else 0


def _in_fp8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1
