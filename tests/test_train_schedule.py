"""The learning rate of every step, against numbers worked out by hand, optax's schedules and big_vision's formulas."""

from functools import partial

import numpy as np
import pytest

from train.schedule import learning_rate

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
