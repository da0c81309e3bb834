"""What carries an exchange: the one thing that differs between gloo, NCCL and, later, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Parcel = tuple[int, "Tensor"]
"""A rank of the world, and the tensor that goes to it or comes from it."""


class Transfer(Protocol):
    """Tensors under way."""

    def wait(self) -> None:
        """Returns when received tensors may be read and sent ones reused (on CUDA, by the current stream)."""
        ...


class Fabric(Protocol):
    """Messages between pairs of ranks. A pair matches them by order: both ends must post them in the same one."""

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Transfer:
        """Starts to send and receive, returns at once. `receives` are contiguous, `sends` may have any strides."""
        ...
