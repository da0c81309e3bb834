"""Buffers that exchanges use again, layer after layer.

What travels on a communicator's own stream must not be given to somebody else before it has arrived, so an allocator
holds it back; the host is many layers ahead of a GPU, and each layer would get memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Key = tuple[tuple[int, ...], torch.dtype, torch.device]


class Scratch:
    """Takes back buffers of one layout's exchanges. A buffer may be given back once all that reads or writes it has
    been waited for, or runs on the current stream."""

    def __init__(self) -> None:
        self._owner: object = None
        self._free: dict[Key, list[Tensor]] = {}

    def enter(self, owner: object) -> None:
        """Buffers are for this owner (a layout) from now on; those of another are forgotten."""
        if owner != self._owner:
            self.clear()
            self._owner = owner

    def take(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """An uninitialised buffer of a shape, with dtype and device of `like`."""
        held = self._free.get((tuple(shape), like.dtype, like.device))
        return held.pop() if held else like.new_empty(tuple(shape))

    def give(self, *buffers: Tensor) -> None:
        """Takes buffers back."""
        for buffer in buffers:
            self._free.setdefault((tuple(buffer.shape), buffer.dtype, buffer.device), []).append(buffer)

    def clear(self) -> None:
        """Forgets all buffers."""
        self._free.clear()
