"""A preload file, after toy_family.py: the family "narrow", of whose transformers a rank has room for one at a time.

A transformer multiplies the toy's velocity by 1, or by 2 where its weights' stamp is "low".
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.job import Branch

toy = models.family("toy")
ALIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Narrow(type(toy)):  # type: ignore[misc]
    """The toy family on a device that is too small for two networks."""

    name = "narrow"

    def load_transformer(self, source: Any) -> nn.Module:
        if source.weights.stamp == "huge":
            raise OutOfMemory("no room for it whatever is unloaded")
        if len(ALIVE):
            raise OutOfMemory("no room for a second network")
        network = super().load_transformer(source)
        network.gain = 2.0 if source.weights.stamp == "low" else 1.0
        ALIVE.add(network)
        return network

    def velocity(self, model: nn.Module, x: Tensor, sigma: float, branch: Branch) -> Tensor:
        return super().velocity(model, x, sigma, branch) * model.gain


models.register("narrow", Narrow())
