"""A preload file that says in each rank's log which device was bound, and whether the world was there before it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Noted:
    """The rank's device, whose `bind` is written down."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def bind(self) -> None:
        print(f"bound {self._device.label}, in a world: {dist.is_initialized()}", flush=True)
        self._device.bind()


def configure(runtime: Any) -> None:
    """Called in every rank before it joins the world."""
    runtime.device = Noted(runtime.device)
