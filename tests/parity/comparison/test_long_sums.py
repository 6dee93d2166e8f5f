"""Sums over thousands of rows, whose float32 errors depend on the order in which a library adds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from torch import nn

from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.report import PairReport
from parity.comparison.any_model.trace.choices import Choices, ChoosingEvaluator, choose_in_torch, run_in_jax
from parity.comparison.any_model.trace.rounded_operations import longest_sum
from parity.comparison.any_model.trace.scope import Scope
from parity.comparison.framework_settings import exact_jax
from parity.comparison.tolerances import UNIT_ROUNDOFF, ErrorBudget, ErrorNorms, long_sum_error

ROWS, IN, UNITS, OUT = 8192, 2, 4, 2


class Network(nn.Module):
    """Two layers without biases; `products` multiplies the hidden units with the second matrix."""

    def __init__(self, products: Callable[..., Any] = torch.matmul, between: Callable[..., Any] = torch.tanh) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.first = nn.Parameter(torch.tensor(rng.standard_normal((IN, UNITS)), dtype=torch.float32))
        self.second = nn.Parameter(torch.tensor(rng.standard_normal((UNITS, OUT)), dtype=torch.float32))
        self.products, self.between = products, between

    def forward(self, x: Any) -> Any:
        return self.products(self.between(x @ self.first), self.second)


def compare(module: nn.Module, between: Callable[..., Any] = jnp.tanh, offset: float = 0.0) -> PairReport:
    """Return the report of a network in which `between` is what Flax has between its two products."""
    weights = {key: np.asarray(each.detach()) for key, each in module.named_parameters()}
    x = offset + np.random.default_rng(1).standard_normal((ROWS, IN)).astype(np.float32)
    return compare_models(lambda p, x: between(x @ p["first"]) @ p["second"], weights, module, x)


def test_the_order_of_a_long_sum_is_no_fault() -> None:
    """PyTorch adds the 8,192 terms of each entry of the gradient one after the other, XLA in groups."""
    report = compare(Network())
    gradient = next(row for row in report.rows if row.name == "gradient")
    assert gradient.torch > 5 * gradient.flax  # type: ignore[operator]
    assert report.passed and max(gradient.rounded) < 2e-7
    assert any("sums of up to 16,384 terms have other errors in another order" in note for note in report.notes)


def test_a_formula_that_cancels_is_no_long_sum() -> None:
    """The variance as a difference of means of squares loses the digits of the mean."""

    def exact(y: Any) -> Any:
        centered = y - y.mean(0)
        return centered / (centered**2).mean(0) ** 0.5

    def cancelling(y: Any) -> Any:
        return (y - y.mean(0)) / ((y**2).mean(0) - y.mean(0) ** 2) ** 0.5

    report = compare(Network(between=exact), cancelling, offset=30.0)
    assert report.verdict.startswith("FAIL G1, the same precision: the errors of output")
    assert not any("another order" in note for note in report.notes)
    assert compare(Network(between=exact), exact, offset=30.0).passed


def test_products_in_low_precision_are_no_long_sums() -> None:
    """A kernel that is exact in float64, and in float32 rounds its operands as TF32 does."""

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(a, b)
            return multiply(a, b)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            a, b = ctx.saved_tensors
            return multiply(gradient, b.T.contiguous()), multiply(a.T.contiguous(), gradient)

    @torch.library.custom_op("tests::products", mutates_args=())
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float32:
            a, b = ((each.view(torch.int32) + 4096 & -8192).view(torch.float32) for each in (a, b))
        return a @ b

    report = compare(Network(Products.apply))
    assert not report.passed
    assert not any("another order" in note for note in report.notes)


def test_running_statistics_are_updated_if_operations_are_rounded() -> None:
    norm, x = nn.BatchNorm1d(UNITS), torch.randn(ROWS, UNITS, generator=torch.Generator().manual_seed(0))
    with choose_in_torch(Choices(), "rounded"):
        norm(x)
    assert norm.running_mean is not None and norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, (0.1 * x.double().mean(0)).float(), rtol=0, atol=0)
    torch.testing.assert_close(norm.running_var, (0.9 + 0.1 * x.double().var(0)).float(), rtol=1e-7, atol=0)


def test_operations_that_are_compiled_together_round_as_each_alone() -> None:
    x = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
    function = jax.grad(lambda x: (jax.nn.softmax(x * x + x) @ jnp.maximum(x, 0).T / 3).sum())
    with exact_jax("float32"):
        closed, choices = jax.make_jaxpr(function)(x), Choices()
        run_in_jax(closed, [jnp.asarray(x)], choices, None, "float32")
    with exact_jax("float64"):
        choices.rewind()
        one = ChoosingEvaluator(choices, None, "rounded").run(closed, [jnp.asarray(x)], Scope())
        choices.rewind()
        other = run_in_jax(closed, [jnp.asarray(x)], choices, None, "rounded")
    np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize(
    ("function", "shapes", "terms"),
    [
        (lambda a, b: a @ b, [(3, 7), (7, 5)], 7),
        (lambda a: a.sum((0, 2)), [(3, 5, 7)], 21),
        (lambda a, b: jax.lax.conv(a, b, (1, 1), "SAME"), [(2, 3, 8, 8), (4, 3, 5, 5)], 75),
        (jax.grad(lambda b, a: jnp.vdot(a, jax.lax.conv(a, b, (1, 1), "SAME"))), [(1, 1, 3, 3), (6, 1, 8, 8)], 6 * 8 * 8),
        (jnp.cumsum, [(9,)], 9),
        (lambda a: jnp.zeros(4).at[jnp.zeros(11, int)].add(a), [(11,)], 11),
        (lambda a: jax.lax.scan(lambda total, row: (total + row, None), a[0], a)[0], [(13, 2)], 13),
        (jax.jit(lambda a: jax.nn.relu(a).mean()), [(6, 4)], 24),
        (jnp.tanh, [(100,)], 1),
    ],
)
def test_the_longest_sum_of_a_function(function: Callable[..., Any], shapes: list[tuple[int, ...]], terms: int) -> None:
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    assert longest_sum(jax.make_jaxpr(function)(*arrays).jaxpr) == terms


def test_the_error_of_a_sum_grows_with_the_root_of_its_terms_and_never_reaches_that_of_tf32() -> None:
    assert long_sum_error(10_000) == 500 * UNIT_ROUNDOFF["float32"]
    assert long_sum_error(10**12) == UNIT_ROUNDOFF["tf32"] / 4
    reference = np.ones(10_000)
    small, large = (ErrorNorms.of(reference * (1 + error), reference) for error in (2e-5, 4e-5))
    assert ErrorBudget().are_of_sums(small, small, terms=10_000)
    assert not ErrorBudget().are_of_sums(small, large, terms=10_000)
