"""A clip on one of its denoise ranks: each holds the whole latent and solver state, and computes on its own tokens.

The update of a step is the same few operations on the same numbers on every rank, so nothing but the exchange is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import models
from ..errors import OutOfStep
from ..job import Branch, Expert
from ..models.geometry import to_model, to_vae
from ..parallel.sequence import Context
from ..sampling import Row, State, advance, finish, start
from ..wire.buffer import KeptLatent
from ..wire.messages import Attention, Open
from .device import Device
from .help import alike
from .inputs import Inputs, layout
from .residency import Residency


class Denoise:
    """Units are solver steps. At every boundary the group's leader writes the state to the kept latent; the last write
    is the finished latent alone, in VAE space, as step `units`."""

    name = "denoise"

    def __init__(self, message: Open, fds: Sequence[int], residency: Residency, context: Context, device: Device,
                 on_phase: Callable[[str], None]) -> None:
        """InvalidJob or LoadError for what the first expert does not take, before any rank begins."""
        self._message, self._residency, self._context, self._on_phase = message, residency, context, on_phase
        self._family, inputs = models.family(message.experts[0].weights.family), Inputs(fds, device)
        self._given = [inputs.branch(ref) for ref in (message.positive, message.negative) if ref is not None]
        self._noises = [inputs.tensor(ref) for ref in message.noises]
        self._noise = inputs.tensor(message.noise)
        self._latent = to_model(inputs.tensor(message.latent), message.geometry)
        self._mask = inputs.mask(message.mask)
        self._kept = KeptLatent.attach(fds[message.kept.fd], message.kept)
        self._state = self._resumed(device) if message.first_step else start(message.table, self._noise, self._latent)
        self.help_from(())
        self._next = message.first_step
        self.attention: Attention | None = None
        self._expert = self._expert_of(self._next)
        self._branches = self._prepared(residency.check(self._expert))

    @property
    def units(self) -> int:
        """Steps of the whole clip, those before `first_step` included."""
        return self._message.table.num_steps

    def help_from(self, helpers: tuple[int, ...]) -> None:
        """Ranks that own a share of the heads from now on, and serve every exchange of what is run."""
        message = self._message
        self._layout = layout(message.plan, message.geometry, message.latent.shape, helpers)

    def run(self, first: int, last: int) -> int:
        """Does steps [first, last). OutOfStep if they do not follow those done. Returns 0: frames are the decode's."""
        if first != self._next:
            raise OutOfStep(f"{self._message.job}: step {first} was leased and step {self._next} is next")
        self._context.exchange.seen.clear()
        for step in range(first, last):
            model = self._take(step)
            self._on_phase(f"step {step + 1} of {self.units}")
            for row in self._message.table.steps[step]:
                self._state = advance(row, self._state, self._denoised(model, row), self._noises)
            self._next = step + 1
            self._keep()
        rows = sum(len(self._message.table.steps[step]) for step in range(first, last))
        self.attention = alike(self._context.exchange.seen, rows)
        return 0

    def _take(self, step: int) -> Any:
        """The network of a step. It is not held between leases, so that it can be unloaded."""
        expert = self._expert_of(step)
        model = self._residency.take(expert)
        if expert != self._expert:
            self._expert, self._branches = expert, self._prepared(model)
        return model

    def _expert_of(self, step: int) -> Expert:
        return self._message.experts[-1 if step >= self._message.switch_step else 0]

    def _prepared(self, model: Any) -> list[Branch]:
        """What a network is told in each branch."""
        message = self._message
        return [self._family.prepare(model, branch, message.latent.shape, self._mask, message.geometry)
                for branch in self._given]

    def _denoised(self, model: Any, row: Row) -> Tensor:
        """The guided estimate of the clean latent; where a mask keeps the start latent, that. As ComfyUI does."""
        if self._mask is None:
            return self._guided(model, self._state.x, row.sigma)
        kept = self._family.kept_part(model, self._latent, self._noise, row.sigma)
        seen = self._state.x * self._mask + kept * (1.0 - self._mask)
        return self._guided(model, seen, row.sigma) * self._mask + self._latent * (1.0 - self._mask)

    def _guided(self, model: Any, x: Tensor, sigma: float) -> Tensor:
        """x - sigma * v for each branch, then uncond + (cond - uncond) * cfg, in ComfyUI's order."""
        with self._context.using(self._layout):
            estimates = [x - self._family.velocity(model, x, sigma, branch) * sigma for branch in self._branches]
        if len(estimates) == 1:
            return estimates[0]
        positive, negative = estimates
        return negative + (positive - negative) * self._message.cfg

    def _keep(self) -> None:
        message = self._message
        if self._context.rank != message.plan.denoise.leader:
            return
        done = self._next == self.units
        self._on_phase(f"keeping {'the finished latent' if done else f'step {self._next} of {self.units}'}")
        tensors = [to_vae(finish(message.table, self._state), message.geometry)] if done else self._state.tensors()
        self._kept.write(self._next, tensors)

    def _resumed(self, device: Device) -> State:
        found = self._kept.read()
        if found is None or found[0] != self._message.first_step:
            raise OutOfStep(f"{self._message.job} should go on at step {self._message.first_step}, and step "
                            f"{found[0] if found else 'none'} is kept")
        return self._message.table.restore(found[0], [tensor.to(device.torch) for tensor in found[1]])
