"""Solvers and schedules by what must hold for any network; equality with ComfyUI is in comfy/test_sampler_parity.py."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.sampling import SolverTable, State

SHAPE = (1, 4, 2, 3, 5)
MEAN, SPREAD = 0.7, 0.4
PARITY_SETTINGS = list(itertools.product(sampling.SAMPLERS, sampling.SCHEDULERS, (2, 4, 30)))


def table_of(
    sampler: str, scheduler: str = "simple", steps: int = 8, shift: float = 3.0, denoise: float = 1.0
) -> SolverTable:
    levels = sampling.sigmas(scheduler, steps, shift=shift, denoise=denoise, sampler=sampler)
    return sampling.solver_table(sampler, levels)


def noises_of(table: SolverTable) -> list[Tensor]:
    return sampling.draw_noises(5, SHAPE, table.num_noises)


def run(table: SolverTable, denoiser: Callable[[Tensor, float], Tensor], state: State, first: int = 0) -> Tensor:
    noises = noises_of(table)
    for row in itertools.chain.from_iterable(table.steps[first:]):
        state = sampling.advance(row, state, denoiser(state.x, row.sigma), noises)
    return sampling.finish(table, state)


def gaussian(x: Tensor, sigma: float) -> Tensor:
    """The exact denoiser of clips whose every value is normal with MEAN and SPREAD."""
    signal = 1.0 - sigma
    gain = signal * SPREAD**2 / (signal**2 * SPREAD**2 + sigma**2)
    return MEAN + gain * (x - signal * MEAN)


def curved(x: Tensor, sigma: float) -> Tensor:
    return torch.tanh(x * (1.0 + sigma)) - 0.3 * sigma


# ---- schedules ----


def test_simple_without_shift_is_even() -> None:
    assert sampling.sigmas("simple", 4, shift=1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_shift_bends_the_schedule() -> None:
    expected = [3 * t / (1 + 2 * t) for t in (1.0, 0.75, 0.5, 0.25, 0.0)]
    assert sampling.sigmas("simple", 4, shift=3.0).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("sampler", "scheduler", "steps"), PARITY_SETTINGS)
def test_schedules_fall_from_one_to_zero(sampler: str, scheduler: str, steps: int) -> None:
    levels = sampling.sigmas(scheduler, steps, shift=8.0, sampler=sampler)
    assert levels.dtype == torch.float32 and len(levels) == steps + 1
    assert levels[0] == pytest.approx(1.0, abs=2e-3) and levels[-1] == 0.0
    assert (levels[1:] < levels[:-1]).all()


def test_uni_pc_leaves_out_the_level_before_the_last() -> None:
    longer = sampling.sigmas("simple", 6, shift=3.0)
    assert sampling.sigmas("simple", 5, shift=3.0, sampler="uni_pc").tolist() == [*longer[:5].tolist(), 0.0]


def test_denoise_keeps_the_end_of_a_longer_schedule() -> None:
    longer = sampling.sigmas("normal", 33, shift=5.0)
    assert sampling.sigmas("normal", 20, shift=5.0, denoise=0.6).tolist() == longer[-21:].tolist()


def test_sgm_uniform_is_normal_without_its_smallest() -> None:
    longer = sampling.sigmas("normal", 5, shift=3.0)
    assert sampling.sigmas("sgm_uniform", 4, shift=3.0).tolist() == pytest.approx([*longer[:4].tolist(), 0.0])


def test_normal_takes_a_tiny_last_level_for_zero() -> None:
    levels = sampling.sigmas("normal", 4, shift=0.05)
    assert len(levels) == 5 and 0.0 < levels[-1] <= 1e-5


def test_linear_quadratic_begins_linear_and_does_not_depend_on_the_shift() -> None:
    levels = sampling.sigmas("linear_quadratic", 8, shift=3.0)
    assert levels[:5].tolist() == pytest.approx([1 - 0.025 * step / 4 for step in range(5)])
    assert sampling.sigmas("linear_quadratic", 8, shift=7.0).tolist() == pytest.approx(levels.tolist())


def test_beta_drops_levels_that_repeat() -> None:
    levels = sampling.sigmas("beta", 900, shift=3.0)
    assert len(levels) < 901 and (levels[1:] < levels[:-1]).all()


def test_beta_without_scipy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InvalidJob, match="pip install scipy"):
        sampling.sigmas("beta", 4, shift=3.0)


# ---- solvers ----


@pytest.mark.parametrize(("sampler", "scheduler", "steps"), PARITY_SETTINGS)
def test_a_certain_network_is_reached_along_a_straight_line(sampler: str, scheduler: str, steps: int) -> None:
    table = table_of(sampler, scheduler, steps, shift=8.0)
    noise, clean = sampling.draw_noise(1, SHAPE), sampling.draw_noise(2, SHAPE)
    away: list[float] = []

    def denoiser(x: Tensor, sigma: float) -> Tensor:
        away.append(float((x - sigma * noise - (1 - sigma) * clean).abs().max()))
        return clean

    finished = run(table, denoiser, sampling.start(table, noise, torch.zeros(SHAPE)))
    assert len(away) == sum(map(len, table.steps))
    assert max(away if sampler != "lcm" else away[:1]) < 2e-4
    # uni_pc stops at 0.001, not at 0: a thousandth of the noise stays, and the scale is set right. Its float32
    # logarithms know that level to 3 % only, in ComfyUI as here.
    expected = clean + noise * 0.001 / 0.999 if sampler == "uni_pc" else clean
    assert torch.allclose(finished, expected, atol=3e-4 if sampler == "uni_pc" else 2e-5)


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2), ("uni_pc", 2)])
def test_error_falls_with_the_solver_s_order(sampler: str, order: int) -> None:
    noise = sampling.draw_noise(1, SHAPE).double()

    def error(steps: int) -> float:
        levels = torch.linspace(0.9, 0.2, steps + 1).tolist()
        table = sampling.solver_table(sampler, levels)
        scale = (((1 - levels[0]) * SPREAD) ** 2 + levels[0] ** 2) ** 0.5
        latent = MEAN + (scale - levels[0]) / (1 - levels[0]) * noise
        end = (((1 - levels[-1]) * SPREAD) ** 2 + levels[-1] ** 2) ** 0.5
        exact = MEAN + end / (1 - levels[-1]) * noise
        return float((run(table, gaussian, sampling.start(table, noise, latent)) - exact).abs().max())

    assert error(32) > 1e-4
    assert error(64) < error(32) / 2 ** (order - 0.35)


def test_euler_is_its_textbook_formula() -> None:
    table = table_of("euler", steps=5)
    x = sampling.draw_noise(1, SHAPE)
    finished = run(table, curved, sampling.start(table, x))
    for here, there in itertools.pairwise(table.sigmas):
        x = x + (x - curved(x, here)) / here * (there - here)
    assert torch.allclose(finished, x, atol=1e-6)


def test_lcm_adds_its_noises_in_order_but_none_at_the_end() -> None:
    table = table_of("lcm", steps=3)
    noises = noises_of(table)
    assert len(noises) == 2
    state = sampling.start(table, sampling.draw_noise(1, SHAPE))
    clean = torch.full(SHAPE, 0.5)
    for (row,), sigma, noise in zip(table.steps, table.sigmas[1:], [*noises, torch.zeros(SHAPE)], strict=True):
        state = sampling.advance(row, state, clean, noises)
        assert torch.allclose(state.x, sigma * noise + (1 - sigma) * clean)


@pytest.mark.parametrize(
    ("sampler", "tensors", "calls"),
    [("euler", 1, 8), ("heun", 1, 15), ("dpmpp_2m", 2, 8), ("lcm", 1, 8), ("uni_pc", 5, 8)],
)
def test_state_and_calls_are_what_the_table_says(sampler: str, tensors: int, calls: int) -> None:
    table = table_of(sampler, steps=8)
    assert (table.num_state_tensors, sum(map(len, table.steps)), table.num_steps) == (tensors, calls, 8)


@pytest.mark.parametrize("sampler", sampling.SAMPLERS)
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_a_clip_stopped_at_any_boundary_goes_on_bit_equal(sampler: str, steps: int) -> None:
    table = table_of(sampler, steps=steps)
    state = sampling.start(table, sampling.draw_noise(1, SHAPE))
    whole = run(table, curved, state)
    noises = noises_of(table)
    for done, step in enumerate(table.steps, start=1):
        for row in step:
            state = sampling.advance(row, state, curved(state.x, row.sigma), noises)
        kept = [tensor.clone() for tensor in state.tensors()]
        assert len(kept) == table.state_tensors_after(done) <= table.num_state_tensors
        kept += [torch.full(SHAPE, float("nan"))] * (table.num_state_tensors - len(kept))
        assert torch.equal(run(table, curved, table.restore(done, kept), first=done), whole)


def test_advance_changes_no_tensor_that_it_is_given() -> None:
    table = table_of("uni_pc", steps=5)
    state = sampling.start(table, sampling.draw_noise(1, SHAPE))
    for (row,) in table.steps:
        denoised = curved(state.x, row.sigma)
        before = [tensor.clone() for tensor in (*state.tensors(), denoised)]
        following = sampling.advance(row, state, denoised)
        assert all(map(torch.equal, before, (*state.tensors(), denoised)))
        state = following


def test_start_mixes_noise_and_latent_at_the_first_level() -> None:
    table = table_of("euler", denoise=0.5)
    noise, latent = sampling.draw_noise(1, SHAPE), sampling.draw_noise(2, SHAPE)
    sigma = table.sigmas[0]
    assert 0.0 < sigma < 1.0
    assert torch.allclose(sampling.start(table, noise, latent).x, sigma * noise + (1 - sigma) * latent)
    assert torch.equal(sampling.start(table, noise).x, sampling.start(table, noise, torch.zeros(SHAPE)).x)


def test_levels_that_end_above_zero_leave_a_noisy_latent_at_full_scale() -> None:
    table = sampling.solver_table("euler", [1.0, 0.5])
    clean, noise = torch.ones(SHAPE), sampling.draw_noise(1, SHAPE)
    assert torch.allclose(run(table, lambda x, sigma: clean, sampling.start(table, noise)), clean + noise, atol=1e-6)


# ---- noise ----


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**64 - 1])
def test_noise_is_comfyui_s_and_leaves_the_global_generator_alone(seed: int) -> None:
    before = torch.get_rng_state()
    drawn = sampling.draw_noise(seed, (2, *SHAPE[1:]))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.randn(2, *SHAPE[1:]))


def test_further_noises_are_not_the_one_a_clip_starts_from() -> None:
    first, second = sampling.draw_noises(7, SHAPE, 2)
    assert torch.equal(first, sampling.draw_noise(8, SHAPE)) and not torch.equal(first, second)
    assert torch.equal(sampling.draw_noises(7, SHAPE, 1, offset=0)[0], sampling.draw_noise(7, SHAPE))


# ---- refusals ----


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sampler": "euler_ancestral"}, r"sampler 'euler_ancestral'.*allowed: euler.*nearest: 'euler'"),
        ({"scheduler": "karras"}, r"scheduler 'karras'.*allowed: simple"),
        ({"sampler": "uni_pc", "steps": 1}, "uni_pc needs 2 steps"),
        ({"steps": 0}, "steps 0 .*1 or more"),
        ({"denoise": 0.0}, r"denoise 0\.0 .*nearest: 0\.01"),
        ({"denoise": 1.5}, r"denoise 1\.5 .*nearest: 1\.0"),
        ({"shift": -1.0}, "shift -1"),
        ({"shift": float("nan")}, "shift nan"),
        ({"cfg": -0.5}, r"cfg -0\.5"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, object], text: str) -> None:
    legal = {"sampler": "euler", "scheduler": "simple", "steps": 4, "shift": 3.0, "denoise": 1.0, "cfg": 5.0}
    sampling.check_settings(**legal)
    with pytest.raises(InvalidJob, match=text):
        sampling.check_settings(**{**legal, **settings})


@pytest.mark.parametrize(
    "levels",
    [
        [1.0],
        [0.5, 0.8, 0.0],
        [1.4, 0.5, 0.0],
        [1.0, -0.1],
        [1.0, 0.0, 0.0],
        [1.0, 0.8, 0.8, 0.5, 0.0],
        [1.0, float("nan"), 0.0],
    ],
)
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_levels_that_do_not_fall_within_zero_and_one_are_refused(sampler: str, levels: list[float]) -> None:
    with pytest.raises(InvalidJob, match="sigmas must fall"):
        sampling.solver_table(sampler, levels)


def test_a_refusal_of_thousands_of_levels_is_a_line_that_names_the_first_wrong_one() -> None:
    levels = sampling.sigmas("simple", 2500, shift=3.0)
    with pytest.raises(InvalidJob) as caught:
        sampling.solver_table("euler", levels)
    text = str(caught.value)
    first = next(i for i in range(len(levels) - 1) if levels[i + 1] >= levels[i])
    assert len(text) < 300 and text.startswith("sigmas must fall")
    assert "2501 levels [1, " in text and f"level {first + 2} is {levels[first + 1]:.6g} after" in text
    with pytest.raises(InvalidJob, match=r"not 20 levels \[1\.5, 1\.4\d*, 1\.3\d*, \.\.\., 0\.0\d*, 0\];"):
        sampling.solver_table("euler", torch.linspace(1.5, 0.0, 20))
    with pytest.raises(InvalidJob, match=r"not \[0\.5, 0\.8, 0\];"):
        sampling.solver_table("euler", [0.5, 0.8, 0.0])


def test_uni_pc_refuses_levels_below_the_one_it_ends_at() -> None:
    with pytest.raises(InvalidJob, match="sigmas must fall"):
        sampling.solver_table("uni_pc", [1.0, 0.5, 0.0005, 0.0])
    with pytest.raises(InvalidJob, match="uni_pc needs 2 steps"):
        sampling.solver_table("uni_pc", [1.0, 0.0])


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    """B16: -1 is no order to draw one at random, which ranks would draw differently."""
    with pytest.raises(InvalidJob, match=rf"seed {seed} is not available here; allowed: 0 to {2**64 - 1}"):
        sampling.draw_noise(seed, SHAPE)
