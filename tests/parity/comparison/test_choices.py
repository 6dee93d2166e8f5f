"""Gradients at points where float32 chooses otherwise than float64: on the other side of a ReLU, another largest entry."""

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
from parity.comparison.any_model.trace import choices
from parity.comparison.tolerances import FLOAT32_TOLERANCE, ErrorNorms

ROWS, WIDTH, UNITS = 256, 8, 8


def rounded(y: Any) -> Any:
    """Return the argument, which float32 makes a multiple of 5e-7 or more."""
    return (y + 8) - 8


def compare(flax: Callable[..., Any], of_torch: Callable[..., Any], across: int, **options: Any) -> PairReport:
    """Return the report of a function of a matrix product, in which `across` numbers of +-2e-7 are zero in float32."""
    rng = np.random.default_rng(0)
    kernel = rng.uniform(0.5, 2, (WIDTH, UNITS)).astype(np.float32)
    rows = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    signs = np.resize([1, -1], across)
    rows[:across] = 0
    rows[:across, 0] = 0.1 * kernel[1, 0] + signs * 2e-7 / kernel[0, 0]
    rows[:across, 1] = -0.1 * kernel[0, 0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.tensor(kernel))

        def forward(self, x: Any) -> Any:
            return of_torch(rounded(x @ self.kernel))

    def apply(params: Any, x: Any) -> Any:
        return flax(rounded(x @ params["kernel"]))

    return compare_models(apply, {"kernel": kernel}, Model(), rows, **options)


def beside_zero(framework: Any, y: Any) -> Any:
    """Return pairs of an entry and zero, along a new last axis."""
    return framework.stack([y, framework.zeros_like(y)], -1)


def scanned_relu(y: Any) -> Any:
    """Return ReLU, computed in a loop over the units."""
    return jax.lax.scan(lambda zero, unit: (zero, jnp.where(unit > zero, unit, zero)), jnp.zeros(ROWS, y.dtype), y.T)[1].T


def pool(y: Any) -> Any:
    """Return the maximum of each entry and zero, as a pooling of windows."""
    return jax.lax.reduce_window(beside_zero(jnp, y), -jnp.inf, jax.lax.max, (1, 1, 2), (1, 1, 2), "VALID")


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (jax.nn.relu, nn.functional.relu),
    "leaky relu": (lambda y: jax.nn.leaky_relu(y, 0.5), lambda y: nn.functional.leaky_relu(y, 0.5)),
    "abs": (jnp.abs, torch.abs),
    "maximum": (lambda y: jnp.maximum(y, 0.0), lambda y: torch.maximum(y, torch.zeros_like(y))),
    "hardtanh": (lambda y: jnp.clip(y, 0, 1), lambda y: nn.functional.hardtanh(y, 0, 1)),
    "place": (lambda y: jax.lax.top_k(beside_zero(jnp, y), 1)[0], lambda y: beside_zero(torch, y).topk(1)[0]),
    "pool": (pool, lambda y: nn.functional.max_pool1d(beside_zero(torch, y), 2)),
    "loop": (scanned_relu, nn.functional.relu),
}


def every_choice(framework: Any, n: int) -> Callable[..., Any]:
    """Return a function that computes all of `PAIRS`, in "flax" (n=0) or in "torch" (n=1)."""
    return lambda y: framework.stack([pair[n](y).reshape(-1) for pair in PAIRS.values()])


def plain_errors(report: PairReport) -> list[float]:
    """Return the float32 error of the gradient of the kernel in each model, from float64 with its own choices."""
    name = "gradient of kernel"
    exact = report.runs["torch float64"][name]
    return [ErrorNorms.of(report.runs[f"{side} float32"][name], exact).relative_rms() for side in ("flax", "torch")]


def test_gradients_in_float32_are_compared_with_those_of_the_same_choices() -> None:
    report = compare(every_choice(jnp, 0), every_choice(torch, 1), across=2)
    assert max(plain_errors(report)) > 2 * FLOAT32_TOLERANCE
    assert report.passed and any("rounding to float32 changes" in note for note in report.notes)
    assert all(row.flax < 5e-7 and row.torch < 5e-7 for row in report.rows)  # type: ignore[operator]


def test_operations_are_only_rounded_if_the_same_choices_do_not_explain_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "round_in_jax", pytest.fail)
    assert compare(jax.nn.relu, nn.functional.relu, across=1).passed


def test_choices_of_a_part_in_bfloat16_are_made_too() -> None:
    report = compare(
        lambda y: jax.nn.relu(y) + 1e-6 * jnp.abs(jax.nn.relu(y.astype(jnp.bfloat16))).astype(y.dtype),
        lambda y: nn.functional.relu(y) + 1e-6 * nn.functional.relu(y.bfloat16()).abs().to(y.dtype),
        across=2,
    )
    assert report.passed and any("rounding to float32 changes" in note for note in report.notes)


def test_more_choices_than_rounding_changes_are_not_excused() -> None:
    report = compare(jax.nn.relu, nn.functional.relu, across=40)
    assert not report.passed and report.verdict.startswith("FAIL G1, the same precision: the errors of gradient")
    assert not any("choices" in note for note in report.notes)


def test_a_backward_pass_in_low_precision_is_not_excused_by_other_choices() -> None:
    @jax.custom_vjp
    def rounded_relu(y: Any) -> Any:
        return jax.nn.relu(y)

    def forward(y: Any) -> tuple[Any, Any]:
        return jax.nn.relu(y), y > 0

    def backward(is_above: Any, gradient: Any) -> tuple[Any]:
        return (jnp.where(is_above, gradient.astype(jnp.bfloat16).astype(gradient.dtype), 0),)

    rounded_relu.defvjp(forward, backward)
    report = compare(rounded_relu, nn.functional.relu, across=2)
    assert not report.passed and report.verdict.startswith("FAIL G1, the same precision: the errors of gradient")
    row = next(row for row in report.rows if row.name == "gradient")
    assert row.flax > 1e-4 and row.torch < 5e-7  # type: ignore[operator]
