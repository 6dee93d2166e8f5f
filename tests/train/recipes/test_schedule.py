"""The learning rate and the EMA step size, compared with hand-computed values, optax and big_vision's formulas."""

from functools import partial

import numpy as np
import pytest

from train.recipes.schedule import ema_step_size, learning_rate

cosine_rate = partial(learning_rate, peak=2.0, warmup=4, total=12)
COSINE_RATES = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 6: 1 + 0.5**0.5, 8: 1.0, 10: 1 - 0.5**0.5, 12: 0.0, 20: 0.0}


@pytest.mark.parametrize("step", COSINE_RATES)
def test_the_rate_rises_linearly_and_falls_as_half_a_cosine(step: int) -> None:
    assert cosine_rate(step) == pytest.approx(COSINE_RATES[step], abs=1e-15)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, peak=2.0, warmup=0, total=10) == 2.0


def test_an_array_of_steps_gives_an_array_of_rates() -> None:
    assert np.allclose(cosine_rate(np.array([*COSINE_RATES])), [*COSINE_RATES.values()], rtol=0, atol=1e-15)


def test_a_traced_step_gives_the_same_rate_to_float32() -> None:
    jax = pytest.importorskip("jax")
    traced = jax.jit(cosine_rate)
    assert [float(traced(step)) for step in COSINE_RATES] == pytest.approx([*COSINE_RATES.values()], abs=5e-7)


def test_the_rate_in_float32_is_that_of_float64_to_the_last_step_of_a_long_run() -> None:
    jax = pytest.importorskip("jax")
    shapes = ({"shape": "cosine"}, {"shape": "constant", "cooldown": 77.7}, {"shape": "rsqrt", "cooldown": 50.5})
    cases = [(total, offset, shape) for total in (10_000, 100_000, 10**9) for offset in (0.0, -1234.56) for shape in shapes]
    rates = [
        partial(learning_rate, peak=1e-3, warmup=total / 10, total=total, offset=offset, **shape)
        for total, offset, shape in cases
    ]
    steps = [np.array([2000, 2001, total // 2, *(total - n for n in (100, 30, 10, 3, 2, 1))]) for total, _, _ in cases]
    found = jax.jit(lambda steps: [rate(of_run) for rate, of_run in zip(rates, steps, strict=True)])(
        [of_run.astype(np.int32) for of_run in steps]
    )
    for case, rate, of_run, in_float32 in zip(cases, rates, steps, found, strict=True):
        assert in_float32.dtype == np.float32
        assert np.allclose(in_float32, rate(of_run), rtol=1e-6, atol=0), case


def test_a_constant_rate_stays_at_its_peak_until_a_linear_cooldown() -> None:
    steps = np.array([0, 2, 4, 8, 9, 10, 11, 12, 13])
    found = learning_rate(steps, peak=2.0, warmup=4, total=12, shape="constant", cooldown=4)
    assert np.allclose(found, [0, 1, 2, 2, 1.5, 1, 0.5, 0, 0], rtol=0, atol=1e-15)


def test_rsqrt_begins_at_the_peak_and_halves_in_four_times_the_steps() -> None:
    found = learning_rate(np.array([50, 100, 400, 1600]), peak=2.0, warmup=100, total=2000, shape="rsqrt")
    assert np.allclose(found, [1, 2, 1, 0.5], rtol=0, atol=1e-15)


def test_rsqrt_with_a_cooldown_ends_just_above_zero() -> None:
    assert learning_rate(99, peak=1.0, warmup=10, total=100, shape="rsqrt", cooldown=20) == pytest.approx(
        (10 / 99) ** 0.5 / 20
    )


@pytest.mark.parametrize(("warmup", "total"), [(0, 50), (10, 50), (100, 1000)])
def test_the_cosine_matches_optax(warmup: int, total: int) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    steps = np.arange(total + 10)
    with jax.enable_x64(True):
        theirs = np.asarray(optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, total)(steps.astype(np.float64)))
    found = learning_rate(steps, peak=3e-3, warmup=warmup, total=total)
    assert np.allclose(found, theirs, rtol=0, atol=1e-17)


def test_rsqrt_matches_big_vision_with_the_warm_up_as_timescale() -> None:
    """utils.create_learning_rate_schedule: peak / sqrt(1 + (step + shift) / timescale), apart from the warm-up."""
    steps, warmup = np.arange(100, 5000), 100
    theirs = 3e-3 / np.sqrt(1 + (steps - warmup) / warmup)
    assert np.allclose(learning_rate(steps, peak=3e-3, warmup=warmup, total=5000, shape="rsqrt"), theirs, rtol=1e-15)


# The moving average of the weights ------------------------------------------------------------------------------------


def moving_average(values: list[float], memory: float) -> float:
    """Return the moving average of numbers that follow an initial 1e6."""
    mean = 1e6
    for step, value in enumerate(values, 1):
        mean += ema_step_size(step, decay=memory) * (value - mean)
    return mean


@pytest.mark.parametrize("memory", [0.5, 0.9, 0.9999])
def test_the_moving_average_keeps_nothing_of_the_initial_weights(memory: float) -> None:
    assert moving_average([3.0], memory) == pytest.approx(3.0, rel=1e-9)
    assert moving_average([3.0] * 20, memory) == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("steps", [200, 1000, 10_000])
def test_a_high_decay_averages_a_share_of_the_steps_so_far(steps: int) -> None:
    late = [0.0] * (steps * 3 // 4) + [1.0] * (steps // 4)
    assert moving_average(late, 0.9999) > 0.9


def test_after_enough_steps_the_decay_is_the_given_one() -> None:
    assert [ema_step_size(step, decay=0.99) for step in (1, 2, 892, 893, 10**6)] == pytest.approx(
        [1, 0.9, 0.01, 0.01, 0.01]
    )


def test_both_frameworks_have_the_same_ema_step_size() -> None:
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    for step in (1, 2, 50, 5000, 10**9):
        exact = ema_step_size(step, decay=0.999)
        traced = jax.jit(partial(ema_step_size, decay=0.999))(np.float32(step))
        assert float(traced) == pytest.approx(float(exact), rel=2e-7)
        mean, weights = (torch.full((), value, dtype=torch.float64) for value in (0.0, 1.0))
        assert float(mean.lerp(weights, float(exact))) == float(exact)
