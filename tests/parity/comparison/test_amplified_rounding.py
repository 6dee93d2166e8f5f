"""Pairs of models that differ by more than 1e-12 in float64, because they amplify rounding errors."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

from torch import nn

from parity.comparison.any_model import torch_runner
from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.report import PairReport
from parity.comparison.tolerances import MAX_UNDIVIDED_TOLERANCE, amplified_float64_tolerance

ROWS, WIDTH = 64, 8


def compare(offset: float, fault: float = 0.0) -> PairReport:
    """Return the report of a product whose columns are then normalized, for rows that nearly equal an offset.

    fault: how much larger than PyTorch's the results of Flax are, relative to themselves.
    """
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.5, 2, (WIDTH, WIDTH)).astype(np.float32)
    x = (offset + rng.standard_normal((ROWS, WIDTH))).astype(np.float32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(weight))

        def forward(self, x: Any) -> Any:
            y = x @ self.weight
            y = y - y.mean(0)
            return y / (y**2).mean(0).sqrt()

    def apply(params: Any, x: Any) -> Any:
        y = x @ params["weight"]
        y = y - y.mean(0)
        return (1 + fault) * y / jax.numpy.sqrt((y**2).mean(0))

    return compare_models(apply, {"weight": weight}, Model(), x, level="function")


def test_rounding_errors_that_a_model_amplifies_are_no_fault() -> None:
    report = compare(offset=1e5)
    worst = max(report.rows, key=lambda row: row.difference)
    assert report.passed and worst.difference > 2e-12
    assert any("amplify rounding errors" in note for note in report.notes)


def test_a_perturbation_that_happens_to_change_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    perturb, seeds = torch_runner._perturb, []

    def change_nothing_at_first(tensors: Any, largest: float, seed: int) -> None:
        if largest:
            seeds.append(seed)
        perturb(tensors, largest if seed else 0.0, seed)

    monkeypatch.setattr(torch_runner, "_perturb", change_nothing_at_first)
    assert compare(offset=1e5).passed
    assert seeds == [0, 1]


def test_a_fault_of_the_same_size_fails_in_a_model_that_does_not_amplify() -> None:
    report = compare(offset=0.0, fault=2e-12)
    assert report.verdict.startswith("FAIL G0, the same function: output differs by 2.0e-12 in float64 (tolerance 1e-12)")
    assert report.origin is not None


def test_a_fault_that_rounding_does_not_explain_fails() -> None:
    assert not compare(offset=1e5, fault=5e-10).passed


def test_amplification_explains_no_difference_above_the_limit() -> None:
    assert amplified_float64_tolerance(1.0) == MAX_UNDIVIDED_TOLERANCE
    assert not compare(offset=1e5, fault=2e-9).passed
