"""The learning rate of every step, against numbers worked out by hand, optax's schedules and big_vision's formulas."""

from functools import partial

import numpy as np
import pytest

from train.recipes.schedule import learning_rate, mean_share

rate = partial(learning_rate, peak=2.0, warmup=4, total=12)
TABLE = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 6: 1 + 0.5**0.5, 8: 1.0, 10: 1 - 0.5**0.5, 12: 0.0, 20: 0.0}


@pytest.mark.parametrize("step", TABLE)
def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine(step: int) -> None:
    assert rate(step) == pytest.approx(TABLE[step], abs=1e-15)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, peak=2.0, warmup=0, total=10) == 2.0


def test_an_array_of_steps_gives_an_array_of_rates() -> None:
    assert np.allclose(rate(np.array([*TABLE])), [*TABLE.values()], rtol=0, atol=1e-15)


def test_a_traced_step_gives_the_same_rate_to_float32() -> None:
    jax = pytest.importorskip("jax")
    traced = jax.jit(rate)
    assert [float(traced(step)) for step in TABLE] == pytest.approx([*TABLE.values()], abs=5e-7)


def test_a_constant_rate_stays_at_its_peak_and_a_cooldown_brings_it_to_zero_in_a_line() -> None:
    steps = np.array([0, 2, 4, 8, 9, 10, 11, 12, 13])
    found = learning_rate(steps, peak=2.0, warmup=4, total=12, shape="constant", cooldown=4)
    assert np.allclose(found, [0, 1, 2, 2, 1.5, 1, 0.5, 0, 0], rtol=0, atol=1e-15)


def test_one_over_the_root_of_the_step_begins_at_the_peak_and_halves_in_four_times_the_steps() -> None:
    found = learning_rate(np.array([50, 100, 400, 1600]), peak=2.0, warmup=100, total=2000, shape="rsqrt")
    assert np.allclose(found, [1, 2, 1, 0.5], rtol=0, atol=1e-15)


def test_a_schedule_does_not_depend_on_steps_after_the_last() -> None:
    assert learning_rate(99, peak=1.0, warmup=10, total=100, shape="rsqrt", cooldown=20) == pytest.approx(
        (10 / 99) ** 0.5 / 20
    )


@pytest.mark.parametrize(("warmup", "total"), [(0, 50), (10, 50), (100, 1000)])
def test_the_cosine_is_that_of_optax(warmup: int, total: int) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    steps = np.arange(total + 10)
    with jax.enable_x64(True):
        theirs = np.asarray(optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, total)(steps.astype(np.float64)))
    found = learning_rate(steps, peak=3e-3, warmup=warmup, total=total)
    assert np.allclose(found, theirs, rtol=0, atol=1e-17)


def test_one_over_the_root_is_big_visions_whose_timescale_is_the_warm_up() -> None:
    """utils.create_learning_rate_schedule: peak / sqrt(1 + (step + shift) / timescale), the steps of the warm-up apart."""
    steps, warmup = np.arange(100, 5000), 100
    theirs = 3e-3 / np.sqrt(1 + (steps - warmup) / warmup)
    assert np.allclose(learning_rate(steps, peak=3e-3, warmup=warmup, total=5000, shape="rsqrt"), theirs, rtol=1e-15)


# The running mean of weights ------------------------------------------------------------------------------------------


def mean_of(values: list[float], memory: float) -> float:
    """The running mean of numbers that follow an initial 1e6."""
    mean = 1e6
    for step, value in enumerate(values, 1):
        mean += mean_share(step, memory=memory) * (value - mean)
    return mean


@pytest.mark.parametrize("memory", [0.5, 0.9, 0.9999])
def test_nothing_of_the_initial_weights_stays_in_the_running_mean(memory: float) -> None:
    assert mean_of([3.0], memory) == pytest.approx(3.0, rel=1e-9)
    assert mean_of([3.0] * 20, memory) == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("steps", [200, 1000, 10_000])
def test_a_long_memory_reaches_back_over_a_share_of_the_steps_so_far(steps: int) -> None:
    late = [0.0] * (steps * 3 // 4) + [1.0] * (steps // 4)
    assert mean_of(late, 0.9999) > 0.9


def test_once_there_were_enough_steps_the_memory_is_the_one_asked_for() -> None:
    assert [mean_share(step, memory=0.99) for step in (1, 2, 892, 893, 10**6)] == pytest.approx([1, 0.9, 0.01, 0.01, 0.01])


def test_both_frameworks_give_the_newest_weights_the_same_share() -> None:
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    for step in (1, 2, 50, 5000):
        exact = mean_share(step, memory=0.999)
        traced = jax.jit(partial(mean_share, memory=0.999))(np.float32(step))
        assert float(traced) == pytest.approx(float(exact), rel=2e-7)
        mean, weights = (torch.full((), value, dtype=torch.float64) for value in (0.0, 1.0))
        assert float(mean.lerp(weights, float(exact))) == float(exact)
