"""A solver's table, the state it moves along, and the update of a row: all that a worker needs of a solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One call of the model at `sigma`, and the update after it.

    First base' = base . (x, base, denoised, *history); then x' = x . (x, base', denoised, *history)
    + noise * noises[noise_index]. An empty `base` means that x' reads the old base and none is kept.
    The history after it is (denoised, *history), cut to `keep` tensors.
    """

    sigma: float
    x: tuple[float, ...]
    base: tuple[float, ...] = ()
    keep: int = 0
    noise: float = 0.0
    noise_index: int = -1


@dataclass(frozen=True, slots=True)
class SolverTable:
    """A solver and its sigmas as rows. A step is one or more rows; `sigmas` has one entry more than there are steps."""

    sampler: str
    sigmas: tuple[float, ...]
    steps: tuple[tuple[Row, ...], ...]

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_noises(self) -> int:
        """Noise tensors that the updates add, beyond the one that the clip starts from."""
        return sum(row.noise_index >= 0 for step in self.steps for row in step)

    @property
    def num_state_tensors(self) -> int:
        """The most tensors that the state has at a boundary between steps."""
        return max(self.state_tensors_after(step) for step in range(self.num_steps + 1))

    def state_tensors_after(self, steps: int) -> int:
        """How many tensors the state has once `steps` steps are done."""
        if steps == 0:
            return 1
        last = self.steps[steps - 1][-1]
        return 1 + bool(last.base) + last.keep

    def restore(self, steps: int, tensors: Sequence[Tensor]) -> State:
        """The state after `steps` steps out of what `State.tensors` gave then; further tensors are ignored."""
        has_base = steps > 0 and bool(self.steps[steps - 1][-1].base)
        return State.from_tensors(tensors[: self.state_tensors_after(steps)], has_base)


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """All that a paused clip needs: the model's next input, the latent behind it, earlier denoised latents."""

    x: Tensor
    base: Tensor | None = None
    history: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        """x, then base if there is one, then the history, newest first; all of one shape."""
        return [self.x, *([] if self.base is None else [self.base]), *self.history]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], has_base: bool) -> State:
        """The state that `tensors` took apart."""
        x, *rest = tensors
        return cls(x, rest[0], tuple(rest[1:])) if has_base else cls(x, None, tuple(rest))


def combine(coefficients: Sequence[float], terms: Sequence[Tensor | None]) -> Tensor:
    """The sum of coefficient * term in the order given, as a new tensor; a term whose coefficient is 0 is not read."""
    pairs = [(factor, term) for factor, term in zip(coefficients, terms, strict=False) if factor != 0.0]
    total: Tensor | None = None
    for factor, term in pairs:
        if term is None:
            raise ValueError("this row needs a tensor that the state does not have: it follows another row")
        total = term * factor if total is None else total.add_(term, alpha=factor)
    if total is None:
        raise ValueError("a row without coefficients makes no latent")
    return total


def start(table: SolverTable, noise: Tensor, latent: Tensor | None = None) -> State:
    """The state before the first step: noise and latent mixed at the first sigma, on the device of `noise`.

    latent: float32 like noise; None or all zeros for an empty one (ComfyUI does not normalise an all-zero latent).
    """
    sigma = torch.tensor(table.sigmas[0], dtype=torch.float32)
    if latent is None:
        return State(noise * sigma.item())
    return State(noise * sigma.item() + latent * (1.0 - sigma).item())


def advance(row: Row, state: State, denoised: Tensor, noises: Sequence[Tensor] = ()) -> State:
    """The state after a row. denoised: the guided estimate of the clean latent at state.x, float32, shape of state.x.

    noises: all `table.num_noises` tensors of the clip, needed by the rows that add noise.
    """
    base = combine(row.base, (state.x, state.base, denoised, *state.history)) if row.base else None
    x = combine(row.x, (state.x, state.base if base is None else base, denoised, *state.history))
    if row.noise_index >= 0:
        x.add_(noises[row.noise_index], alpha=row.noise)
    return State(x, base, (denoised, *state.history)[: row.keep])


def finish(table: SolverTable, state: State) -> Tensor:
    """The finished latent in model space: x over what the last sigma left of the signal."""
    return state.x / (1.0 - torch.tensor(table.sigmas[-1], dtype=torch.float32)).item()
