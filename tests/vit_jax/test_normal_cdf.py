"""The distribution function in GELU: its accuracy in float32 and float64, its derivatives, and its ends."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from scipy.special import erfc

from vit_jax.layers import activation
from vit_jax.normal_cdf import POLYNOMIAL, SCALE, normal_cdf


def exact_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * erfc(-x.astype(np.float64) / np.sqrt(2))


def exact_slope(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return exact_cdf(x) + wide * np.exp(-np.square(wide) / 2) / np.sqrt(2 * np.pi)


@pytest.mark.parametrize(
    "least, most, ulps",
    [(0, 6, 8), (-1, 0, 8), (-5, -1, 16), (-12, -5, 96)],
    ids=["above 0", "near 0", "tail", "far tail"],
)
def test_gelu_is_accurate_in_float32(least: float, most: float, ulps: float) -> None:
    """Beyond -5 the rounding of x^2 counts: exp(-x^2 / 2) moves by x^2 / 2 units in the last place, 72 at -12."""
    x = np.linspace(least, most, 200_001, dtype=np.float32)
    exact = x.astype(np.float64) * exact_cdf(x)
    found = np.asarray(jax.jit(lambda x: activation(x, "gelu"))(x), np.float64)
    assert np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))) <= ulps
    slope = np.asarray(jax.jit(jax.vmap(jax.grad(lambda x: activation(x, "gelu"))))(x), np.float64)
    assert np.max(np.abs(slope - exact_slope(x))) <= 3e-7


def test_polynomial_has_the_error_that_is_documented() -> None:
    x = np.linspace(0, 13.3, 100_001)
    value = np.polyval(POLYNOMIAL[::-1], 1 / (1 + SCALE * x))
    assert np.max(np.abs(value / (np.exp(np.square(x) / 2) * exact_cdf(-x)) - 1)) < 3.3e-8


def test_gelu_is_exact_in_float64() -> None:
    x = np.linspace(-13, 6, 1001)
    with jax.enable_x64(True):
        value, slope = jax.vmap(jax.value_and_grad(lambda x: activation(x, "gelu")))(jnp.asarray(x))
        np.testing.assert_allclose(value, x * exact_cdf(x), rtol=1e-13)
        np.testing.assert_allclose(slope, exact_slope(x), rtol=1e-13, atol=1e-16)


def test_second_derivative_is_that_of_the_function_and_not_of_its_polynomial() -> None:
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    wide = x.astype(np.float64)
    exact = (2 - np.square(wide)) * np.exp(-np.square(wide) / 2) / np.sqrt(2 * np.pi)
    found = jax.vmap(jax.grad(jax.grad(lambda x: x * normal_cdf(x))))(x)
    np.testing.assert_allclose(found, exact, atol=5e-7)


def test_ends() -> None:
    x = jnp.asarray([-jnp.inf, -1e30, -40, 40, 1e30, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(normal_cdf(x), [0, 0, 0, 1, 1, 1, np.nan])
    slope = jax.vmap(jax.grad(lambda x: activation(x, "gelu")))(x)
    np.testing.assert_array_equal(slope[1:5], [0, 0, 1, 1])
