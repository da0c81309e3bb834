"""One call of a model on one of its denoise ranks, for solvers that run elsewhere (ComfyUI's own, in the host)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import models
from ..parallel.sequence import Context
from ..wire.messages import Evaluate as Message
from .device import Device
from .inputs import Inputs, layout
from .residency import Residency


class Evaluate:
    """Its one unit is the call: every branch on the same latent. The group's leader writes the velocities."""

    name = "evaluate"
    units = 1

    def __init__(self, message: Message, fds: Sequence[int], residency: Residency, context: Context, device: Device,
                 on_phase: Callable[[str], None]) -> None:
        """InvalidJob or LoadError for what the network does not take."""
        inputs, geometry, shape = Inputs(fds, device), message.geometry, message.x.shape
        self._message, self._residency, self._context, self._on_phase = message, residency, context, on_phase
        self._family, model = models.family(message.expert.weights.family), residency.check(message.expert)
        self._x, mask = inputs.tensor(message.x), inputs.mask(message.mask)
        self._branches = [self._family.prepare(model, inputs.branch(ref), shape, mask, geometry)
                          for ref in message.branches]
        self._velocities = inputs.mapped(message.velocities)
        self._layout = layout(message.plan, geometry, shape)

    def run(self, first: int, last: int) -> int:
        """Does the call. Returns 0: frames are the decode's."""
        self._on_phase(f"evaluation at sigma {self._message.sigma:.4g}")
        model = self._residency.take(self._message.expert)
        with self._context.using(self._layout):
            found = [self._family.velocity(model, self._x, self._message.sigma, branch) for branch in self._branches]
        if self._context.rank == self._message.plan.denoise.leader:
            for place, velocity in zip(self._velocities, found, strict=True):
                place.copy_(velocity[0])
        return 0
