"""Tolerances follow from what a function amplifies: right twins pass on any weights, and wrong ones fail on most.

`python -m benchmarks.tolerances` draws 200 pairs, and plants every mistake; here are a few of each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
torch = pytest.importorskip("torch")

import parity.comparison.training.steps
import vit_torch
from parity.checkpoints.weights import held
from parity.comparison.amplification import amplified
from parity.comparison.forward_backward import Subject, TorchTwin
from parity.comparison.monte_carlo_arithmetic import disturbing
from parity.comparison.report import Report
from parity.comparison.tolerances import FEW, FUNCTION, LEAST, ROUNDINGS, TRAJECTORY, UNIT, Budget, Error
from parity.comparison.training import trajectories
from parity.comparison.twins import compare
from parity.comparison.two_files import compare_files
from tests.extreme_weights import CONFIGS, KINDS, drawn, extreme
from tests.faults import FAULTS, planted
from tests.faults.outcomes import named
from tests.twins import perturbed, pictures
from vit_spec import InputError, ViTConfig

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
TINY = CONFIGS["width 2, three blocks"]
SMALL = CONFIGS["small"]


def checked(config: ViTConfig, params: Any, **options: Any) -> Report:
    return compare(config, params, images=pictures(config), xla_options=QUICK, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_right_twins_pass_on_extreme_weights(kind: str) -> None:
    report = checked(TINY, extreme(perturbed(TINY), kind, 3))
    assert report.passed, report.verdict


@pytest.mark.parametrize("factor", [4, 30])
def test_right_twins_pass_where_attention_saturates(factor: int) -> None:
    params = jax.tree.map(lambda array: array * np.float32(factor), perturbed(SMALL))
    report = checked(SMALL, params)
    assert report.passed, report.verdict
    if factor == 30:
        assert report.parts is not None and report.parts < FUNCTION
        assert any(m.difference > FUNCTION and m.tolerance > m.difference for m in report.measures)
        assert "float64, amplified" in report.budgets()


UNLUCKY = {
    49: "outliers in few directions",
    161: "a gradient of norms that rounding swamps",
    180: "two scores nearly equal",
    454: "one row of 204 in which a softmax is undecided",
    641: "tokens of one entry, whose norm has no gradient",
}


@pytest.mark.parametrize("seed", UNLUCKY, ids=UNLUCKY.values())
def test_right_twins_pass_where_one_of_them_is_unlucky(seed: int) -> None:
    _, _, config, params, images = drawn(seed)
    report = compare(config, params, images=images, backward=seed in (161, 641), xla_options=QUICK)
    assert report.passed, report.verdict


@pytest.mark.parametrize("seed", [330, 350, 380, 450])
def test_right_twins_pass_whose_training_amplifies_rounding(seed: int) -> None:
    _, _, config, params, images = drawn(seed)
    found = trajectories(config, params, images=images, steps=5)
    assert found.passed, found.verdict


ON = {
    "queries and keys swapped": "all weights times 10 to 300",
    "biases of linear maps dropped": "a norm's weight times 1000",
    "registers ahead of the class token": "outliers of 10 to 10,000 times",
    "softmax over queries": "attention saturated",
    "layer scale added to one": "tokens far from zero",
}


@pytest.mark.parametrize("name", ON)
def test_a_planted_mistake_is_found_on_extreme_weights(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    params = extreme(fault.params(), ON[name], 0)
    with planted(fault):
        report = compare(fault.config, params, images=fault.images(), level="function", backward=False, xla_options=QUICK)
    assert not report.passed, report.verdict
    assert named(fault, report), report.verdict


def test_how_far_one_side_may_be_by_luck_follows_from_how_many_directions_rounding_points_in() -> None:
    rng, reference = np.random.default_rng(0), np.zeros(10_000)
    row = rng.standard_normal(10_000) * (np.arange(10_000) < 100)
    found = []
    for first, second in (row, -3 * row), rng.standard_normal((2, 10_000)):
        errors = [Error.of(each, reference) for each in (first, second)]
        found.append(errors[0].cosine_with(errors[1], Error.of(second, first)))
    assert found[0] == pytest.approx(-1) and abs(found[1]) < 5 / 100

    exact = rng.standard_normal(10_000)
    near, far = (Error.of(exact * (1 + size * (row != 0)), exact) for size in (1e-7, 1e-5))
    rounding = Error.of(exact * (1 + 2e-5 * (row != 0)), exact)
    for directions, holds in (1, True), (1e4, False):
        assert Budget("float32", rounding=replace(rounding, directions=directions)).equally_near(near, far) == holds


def altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[Any], None]) -> None:
    """Let every object twin be altered as soon as it is made."""

    class Altered(vit_torch.ViT):
        def __init__(self, config: Any, execution: Any = None) -> None:
            super().__init__(config, execution)
            alter(self)

    monkeypatch.setattr(vit_torch, "ViT", Altered)


def test_a_wrong_gradient_cannot_hide_behind_amplified_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model would excuse 1e-8 of a gradient here; the part on its own does not."""

    def wrong(model: Any) -> None:
        if model.execution.attention == "fused":
            model.blocks[0].mlp.fc2.register_full_backward_hook(lambda module, into, out: (into[0] * (1 + 1e-9),))

    altered(monkeypatch, wrong)
    report = checked(SMALL, jax.tree.map(lambda array: array * np.float32(100), perturbed(SMALL)), level="function")
    assert not report.passed
    assert str(report.part).startswith("blocks.0.mlp")


def test_a_part_that_one_twin_computes_a_little_more_coarsely_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5e-6 is within the bar of float32, but the other twin is ten times as near, and rounding makes less of the part."""

    def coarser(module: Any, into: Any, out: Any) -> Any:
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        return out * (1 + 2.5e-6 * noise) if out.dtype is torch.float32 else out

    altered(monkeypatch, lambda model: model.blocks[0].mlp.fc2.register_forward_hook(coarser))
    report = checked(SMALL, jax.tree.map(lambda array: array * np.float32(30), perturbed(SMALL)), backward=False)
    assert not report.passed
    assert str(report.part) == "blocks.0.mlp.fc2" and "torch is the coarser" in report.verdict


def test_a_gelu_far_below_zero_is_not_a_difference() -> None:
    """erf(x) + 1 is zero in PyTorch where JAX's erfc(-x) is 1e-44; with one channel there is nothing else in the tensor."""
    config = CONFIGS["width 1"]
    params = perturbed(config)
    params["blocks"]["mlp"]["fc1"]["kernel"][...] = 0
    params["blocks"]["mlp"]["fc1"]["bias"][...] = -13.9
    report = checked(config, params)
    assert report.passed, report.verdict


def test_numbers_that_float32_cannot_square_are_not_judged_in_it() -> None:
    params = perturbed(TINY)
    params["blocks"]["mlp"]["fc2"]["kernel"][0] *= np.float32(1e25)
    report = checked(TINY, params)
    assert report.passed, report.verdict
    assert report.unjudged[0].names[0] == "blocks.0.mlp.fc2"
    assert "not judged in float32: blocks.0.mlp.fc2 and " in report.verdict
    judged = [m.name for m in report.measures if m.jax is not None]
    assert "blocks.0.norm2" in judged and "blocks.0.mlp.fc2" not in judged and "logits" not in judged
    assert report.facts()["unjudged"][0]["dtype"] == "float32"


def test_gradients_that_float64_cannot_hold_are_refused_in_one_line() -> None:
    params = jax.tree.map(lambda array: array.astype(np.float64) * 1e70, perturbed(TINY))
    with pytest.raises(InputError) as error:
        checked(TINY, params)
    assert "\n" not in str(error.value)


def test_float32_that_is_subnormal_reaches_float64_as_it_is() -> None:
    params = extreme(perturbed(TINY), "all tensors subnormal", 0)
    report = checked(TINY, params, level="function", backward=False)
    assert report.passed and max(m.difference for m in report.measures) <= FUNCTION, report.verdict


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_a_relative_error_needs_no_squares(size: float) -> None:
    exact = np.random.default_rng(0).standard_normal(100) * size
    error = Error.of(exact * (1 + 1e-3), exact)
    assert error.relative_rms() == pytest.approx(1e-3)
    assert error.joined(error).relative_rms() == pytest.approx(1e-3)


def test_an_error_beyond_all_numbers_is_infinite() -> None:
    error = Error.of(np.zeros(100), np.full(100, 1.7e308))
    assert error.norm == error.relative_rms() == np.inf


def test_what_a_twin_draws_at_inference_is_not_taken_for_rounding() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "drop path on in evaluation")
    with planted(fault):
        report = compare(
            fault.config, fault.params(), images=fault.images(), level="function", backward=False, xla_options=QUICK
        )
    assert not report.passed and str(report.part) == "blocks.1: sum", report.verdict


def test_a_disturbance_is_a_few_roundings_of_each_operand() -> None:
    x = torch.linspace(1, 2, 1000, dtype=torch.float64)
    with disturbing("float32", 0):
        moved = x * 1.0
    relative = (moved - x).abs() / x
    assert 0.5 < relative.max() / (ROUNDINGS * UNIT["float32"]) <= 1 + 1e-6
    with disturbing("float32", 0):
        again, viewed, zeros = x * 1.0, x.view(10, 100).flatten(), torch.zeros_like(x) * 2
        subnormal = torch.full_like(x, 1e-40) * 2
        chosen = torch.where(zeros > 0, 1.0, 0.0)
    assert torch.equal(again, moved) and torch.equal(viewed, x) and not zeros.any() and not chosen.any()
    assert LEAST["float32"] < subnormal.abs().max() <= 3 * ROUNDINGS * LEAST["float32"]


def test_the_means_in_the_gradient_of_a_norm_are_rounded() -> None:
    """Of one entry the gradient is its own mean less itself: nothing, but for the rounding of the mean."""
    x, upstream = (torch.full((1000, 1), value, dtype=torch.float64) for value in (0.01, 2.0))
    x.requires_grad_()
    with disturbing("float32", 0):
        (found,) = torch.autograd.grad(torch.nn.functional.layer_norm(x, (1,), eps=1e-6), x, upstream)
    term = 2.0 / 1e-6**0.5
    assert 0.5 < found.abs().max() / (term * ROUNDINGS * UNIT["float32"]) < 1.5


def test_what_cancels_amplifies_what_is_measured() -> None:
    subject = Subject(held(perturbed(SMALL), SMALL, "jax"), pictures(SMALL))
    steep = extreme(perturbed(SMALL), "attention saturated", 1)
    found = [
        amplified(TorchTwin(Subject(held(params, SMALL, "jax"), subject.images)), "float64")["gradient"].relative_rms()
        for params in (perturbed(SMALL), steep)
    ]
    assert 10 * found[0] < 1e-12 < found[1]


def test_measured_rounding_widens_both_gates_of_precision() -> None:
    exact = np.random.default_rng(0).standard_normal(10_000)
    near, far = (Error.of(exact * (1 + relative), exact) for relative in (2e-6, 4e-5))
    rounding = Error.of(exact * (1 + 1e-5), exact)
    assert not Budget().near_enough(near, far)
    assert Budget(rounding=rounding).near_enough(near, far)
    assert not Budget(rounding=rounding).equally_near(near, far)
    assert not Budget(rounding=near).near_enough(near, far)  # rounding explains less than the bar
    assert Budget(rounding=rounding).ceiling == pytest.approx(FEW * 1e-5)


def test_an_infinite_error_is_explained_by_nothing() -> None:
    assert not Error.infinite().explained(Error.infinite(), FEW)
    assert not Budget(rounding=Error.infinite()).holds(Error.infinite(), Error.infinite())


def test_two_files_of_one_function_pass_where_rounding_is_amplified() -> None:
    """A part of the class token that its position takes away again: the same function, another rounding."""
    params = jax.tree.map(lambda array: array.astype(np.float64) / 3, perturbed(SMALL))  # so that no sum is exact
    moved = jax.tree.map(np.copy, params)
    moved["cls_token"] += 1e6
    moved["pos_embed"][:, :1] -= 1e6
    report = compare_files(held(params, SMALL, "jax"), held(moved, SMALL, "jax"))
    assert report.passed, report.verdict
    assert max(report.differences["logits"]) > FUNCTION


def test_another_function_fails_where_rounding_is_amplified() -> None:
    params = jax.tree.map(lambda array: array.astype(np.float64), perturbed(SMALL))
    params["cls_token"] += 1e6
    other = jax.tree.map(np.copy, params)
    other["head"]["bias"] += 1e-5
    assert not compare_files(held(params, SMALL, "jax"), held(other, SMALL, "jax")).passed


def test_training_may_part_by_what_it_amplifies(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**parity.comparison.training.steps.compiler_options(), **QUICK}
    monkeypatch.setattr(parity.comparison.training.steps, "compiler_options", lambda: options)
    params = jax.tree.map(lambda array: array * np.float32(30), perturbed(SMALL))
    found = trajectories(SMALL, params, steps=4)
    assert found.same_function, found.verdict
    assert any(p.difference > TRAJECTORY for p in found.partings)
    assert not found.causes
