"""The learning rate of every step, against numbers worked out by hand."""

from functools import partial

import numpy as np
import pytest

from train.schedule import warmup_cosine

rate = partial(warmup_cosine, peak=2.0, warmup=4, total=12)
TABLE = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 6: 1 + 0.5**0.5, 8: 1.0, 10: 1 - 0.5**0.5, 12: 0.0, 20: 0.0}


@pytest.mark.parametrize("step", TABLE)
def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine(step: int) -> None:
    assert rate(step) == pytest.approx(TABLE[step], abs=1e-15)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert warmup_cosine(0, peak=2.0, warmup=0, total=10) == 2.0


def test_an_array_of_steps_gives_an_array_of_rates() -> None:
    assert np.allclose(rate(np.array([*TABLE])), [*TABLE.values()], rtol=0, atol=1e-15)


def test_a_traced_step_gives_the_same_rate_to_float32() -> None:
    jax = pytest.importorskip("jax")
    traced = jax.jit(rate)
    assert [float(traced(step)) for step in TABLE] == pytest.approx([*TABLE.values()], abs=5e-7)
