"""UniPC (arXiv 2302.04867) as rows: each corrects the latent behind it with what the model just said, then predicts on.

It works on the variance-preserving twin of a flow model's latents; the scales between the two are in the coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .table import Row

MAX_ORDER = 3
LAST_SIGMA = 0.001
"""What ComfyUI puts in place of a final 0; the finished latent is divided by 1 - 0.001 for it."""


@dataclass(frozen=True, slots=True)
class Level:
    """A noise level as UniPC sees it, each a float32 tensor [1]: signal, noise and half the log of their ratio."""

    sigma: Tensor
    alpha: Tensor
    std: Tensor
    log_snr: Tensor

    @classmethod
    def at(cls, sigma: Tensor) -> Level:
        """The level of signal + sigma * noise at variance 1. The logarithms lose digits, the same as in ComfyUI."""
        log_alpha = 0.5 * torch.log(1 / (sigma * sigma + 1))
        noise_share = 1.0 - torch.exp(2.0 * log_alpha)
        return cls(sigma, torch.exp(log_alpha), torch.sqrt(noise_share), log_alpha - 0.5 * torch.log(noise_share))


@dataclass(frozen=True, slots=True)
class Stride:
    """UniPC's step of some order from a level to the next (UniPC, arXiv 2302.04867, equations 3 and 9, B(h) = h).

    carry: factor of the latent, in the flow model's scale. decay: expm1(-h). width: h.
    spread: places of the earlier levels in units of the step. predict, correct: weights of the differences.
    """

    carry: float
    decay: float
    width: float
    spread: tuple[float, ...]
    predict: tuple[float, ...]
    correct: tuple[float, ...]

    @classmethod
    def between(cls, earlier: Sequence[Level], target: Level) -> Stride:
        """The step from earlier[0] to target; earlier[1:] are the levels before, newest first: order = len(earlier)."""
        here, order = earlier[0], len(earlier)
        h = target.log_snr - here.log_snr
        spread = [((level.log_snr - here.log_snr) / h)[0] for level in earlier[1:]]
        places = torch.tensor([*spread, 1.0])
        powers = torch.stack([torch.pow(places, power) for power in range(order)])
        moments = unipc_moments(-h[0], order)
        predict = [0.5] if order == 2 else torch.linalg.solve(powers[:-1, :-1], moments[:-1]).tolist()
        correct = [0.5] if order == 1 else torch.linalg.solve(powers, moments).tolist()
        carry = (target.std / here.std).item() * (here.alpha.item() / target.alpha.item())
        ratios = tuple(ratio.item() for ratio in spread)
        return cls(carry, torch.expm1(-h[0]).item(), h.item(), ratios, tuple(predict), tuple(correct))

    def weights(self, rhos: Sequence[float], on_new: float) -> tuple[float, tuple[float, ...]]:
        """Factors of the newest earlier denoised latent and of those before it.

        The step is carry * x - decay * m_0 + width * (sum of rho_k (m_k - m_0) / spread_k + on_new (m_new - m_0)).
        """
        older = tuple(self.width * rho / place for rho, place in zip(rhos, self.spread, strict=False))
        return -self.decay - sum(older) - self.width * on_new, older

    def predictor(self) -> tuple[float, tuple[float, ...]]:
        """Factors of m_0 and of m_1.. in the step that does not know the target's denoised latent yet."""
        return self.weights(self.predict, 0.0)

    def corrector(self) -> tuple[float, float, tuple[float, ...]]:
        """Factors of the target's denoised latent, of m_0, and of m_1.. in the step that knows it."""
        *rhos, on_new = self.correct
        newest, older = self.weights(rhos, on_new)
        return self.width * on_new, newest, older


def unipc_moments(width: Tensor, order: int) -> Tensor:
    """Right side of UniPC's linear system: float32 [order]."""
    moments, factorial = [], 1
    phi = torch.expm1(width) / width - 1
    for index in range(1, order + 1):
        moments.append(phi * factorial / width)
        factorial *= index + 1
        phi = phi / width - 1 / factorial
    return torch.tensor(moments)


def uni_pc(levels: Tensor) -> list[tuple[Row, ...]]:
    """UniPC, multistep, order 3, lower at both ends; a call a step, two steps or more."""
    steps = len(levels) - 1
    known = [Level.at(levels[i : i + 1]) for i in range(steps + 1)]
    orders = orders_of(steps)
    strides = [Stride.between(known[i + 1 - order : i + 1][::-1], known[i + 1]) for i, order in enumerate(orders)]
    rows: list[tuple[Row, ...]] = []
    for i, stride in enumerate(strides):
        newest, older = stride.predictor()
        base = corrected(strides[i - 1]) if i else (1.0,)
        keep = orders[i] if i + 1 < steps else 0
        rows.append((Row(levels[i].item(), x=(0.0, stride.carry, newest, *older), base=base, keep=keep),))
    return rows


def orders_of(steps: int) -> list[int]:
    """The order of the stride to each level but the first: 1, 2, 3, 3 .. 3, 2, 1 where there are steps enough."""
    order = min(MAX_ORDER, steps - 1)
    return [target if target < order else min(order, steps + 1 - target) for target in range(1, steps + 1)]


def corrected(stride: Stride) -> tuple[float, ...]:
    """A row's base coefficients: the stride that led to its x, done again with the denoised latent found there."""
    new, newest, older = stride.corrector()
    return (0.0, stride.carry, new, newest, *older)
