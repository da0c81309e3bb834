"""What a message's tensors become on a rank, and where the rank stands in the work on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..job import Branch, Geometry
from ..parallel.layout import Layout
from ..plan import Plan
from ..wire import buffer
from ..wire.messages import BranchRef, TensorRef
from .device import Device


class Inputs:
    """The tensors of one message, by the descriptors that came with it; copied to the device as float32."""

    def __init__(self, fds: Sequence[int], device: Device) -> None:
        self._fds, self._device = fds, device

    def tensor(self, ref: TensorRef) -> Tensor:
        return self.mapped(ref).to(self._device.torch, torch.float32)

    def mapped(self, ref: TensorRef) -> Tensor:
        """The shared tensor itself, for what is written."""
        return buffer.attach(self._fds[ref.fd], ref)

    def mask(self, ref: TensorRef | None) -> Tensor | None:
        return None if ref is None else self.tensor(ref)

    def branch(self, ref: BranchRef) -> Branch:
        extras = zip(ref.names, map(self.tensor, ref.extras), strict=True)
        return Branch(self.tensor(ref.text), dict(extras))


def layout(plan: Plan, geometry: Geometry, shape: tuple[int, ...], helpers: tuple[int, ...] = ()) -> Layout | None:
    """Who holds which tokens and heads of a latent; None for one rank alone, which exchanges nothing."""
    if plan.denoise.size == 1 and not helpers:
        return None
    return Layout.even(plan.denoise, geometry.num_tokens(shape), geometry.num_heads, plan.chunks, helpers)
