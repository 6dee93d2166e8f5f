"""Comparisons of the twins: the wrong part is named, results are reproducible, and invalid input is refused in one line."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import vit_spec
import vit_torch
from parity.checkpoints.weights import as_checkpoint
from parity.comparison.disk_cache import DiskCache
from parity.comparison.forward_backward import PassInputs, PassResult, TorchTwin
from parity.comparison.localisation import Part, check_in_isolation
from parity.comparison.report import Report, TensorComparison
from parity.comparison.tolerances import ErrorBudget, ErrorNorms
from parity.comparison.twins import compare
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import InputError, ViTConfig

CONFIG = small_config(vit_spec.get("vit_s16"), depth=4)
QUICK = {"xla_backend_optimization_level": 0}


def compare_small(config: ViTConfig = CONFIG, **options: Any) -> Report:
    options = {"images": random_images(config), "xla_options": QUICK, **options}
    return compare(config, options.pop("params", None) or perturbed_params(config), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_twins_pass_in_half_precision(dtype: Any) -> None:
    report = compare_small(dtype=dtype)
    assert report.passed, report.verdict
    assert all(m.jax and m.jax.relative_rms(m.scale) > 1e-6 for m in report.measures if m.name.endswith("norm1"))


def test_the_verdict_names_the_tensors_of_its_error_in_float32() -> None:
    def tensor(name: str, relative: float) -> TensorComparison:
        exact = np.ones(8)
        error = ErrorNorms.of(exact * (1 + relative), exact)
        return TensorComparison(name, ErrorNorms.of(exact, exact), error, error)

    def verdict(*measures: TensorComparison) -> str:
        return Report(CONFIG, "precision", "float32", measures, {}, (), None, None, (), (), {}).verdict

    forward, single, whole = tensor("embed", 2e-7), tensor("gradient of pos_embed", 3e-6), tensor("gradient", 1e-6)
    within = "both twins are within {} of it in float32 ({})".format
    assert verdict(forward, single, whole).endswith(within("1.0e-06", "the forward pass and the whole gradient"))
    assert verdict(forward).endswith(within("2.0e-07", "the forward pass"))


def test_the_same_comparison_gives_the_same_bytes() -> None:
    one, other = (json.dumps(compare_small().facts(), allow_nan=False) for _ in range(2))
    assert one == other


def test_each_level_adds_to_the_previous_one() -> None:
    function = compare_small(level="function", backward=False)
    train = compare_small(level="train", steps=2)
    assert all(m.jax is None for m in function.measures) and function.training is None
    assert {m.name for m in function.measures} < {m.name for m in train.measures}
    assert train.training is not None and train.training.steps == 2
    assert train.passed, train.verdict


def test_swap_bisection_finds_the_block_that_isolation_names(monkeypatch: pytest.MonkeyPatch) -> None:
    original, weights = vit_torch.ViT, perturbed_params(CONFIG)

    class Wrong(original):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, execution: Any = None) -> None:
            super().__init__(config, execution)
            self.blocks[2].norm2.eps = 1e-3

    monkeypatch.setattr(vit_torch, "ViT", Wrong)
    report = compare_small(params=weights, backward=False)
    assert str(report.part) == "blocks.2.norm2"
    assert {str(origin.part) for origin in report.origins} == {"blocks.2.norm2"}
    assert report.bisection is not None and report.bisection.stage == "blocks.2"
    assert len(report.bisection.runs) <= 3
    assert report.facts()["first_part"] == {
        "name": "blocks.2.norm2",
        "module": "blocks.2.norm2",
        "operation": "",
        "direction": "forward",
    }


def test_a_twin_that_overflows_in_float32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original, weights = vit_torch.ViT, perturbed_params(CONFIG)

    class Overflowing(original):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, execution: Any = None) -> None:
            super().__init__(config, execution)
            factor = torch.inf if execution.dtype == torch.float32 else 1
            self.blocks[2].norm2.register_forward_hook(lambda norm, given, returned: returned * factor)

    monkeypatch.setattr(vit_torch, "ViT", Overflowing)
    report = compare_small(params=weights, backward=False)
    assert report.verdict.startswith(
        "FAIL: the first part that differs is blocks.2.norm2, PyTorch gives NaN or infinities in float32 on the same inputs"
    )
    assert {origin.reason for origin in report.origins} == {"not finite"}
    assert not report.unjudged, "what fails is judged"


def test_an_intermediate_of_one_twin_is_missing_in_the_other() -> None:
    value = np.ones((2, 3))
    one, other = PassResult({"embed": value, "extra": value}), PassResult({"embed": value * np.nan})
    origins = check_in_isolation(one, other, "jax").origins
    assert {origin.name: origin.reason for origin in origins} == {"embed": "not finite", "extra": "missing"}
    assert {origin.error for origin in origins} == {np.inf}


def test_stochastic_depth_changes_the_loss_and_is_the_same_in_both_twins() -> None:
    images = random_images(CONFIG)
    report = compare_small(level="function", drop_path=0.6)
    assert report.passed, report.verdict
    losses = {
        rate: float(
            TorchTwin(PassInputs(as_checkpoint(perturbed_params(CONFIG), CONFIG, "jax"), images, 0, rate))
            .run()
            .values["loss"]
        )
        for rate in (0.0, 0.6)
    }
    assert losses[0.0] != losses[0.6]


def test_parallel_branches_have_one_mask_of_stochastic_depth() -> None:
    config = CONFIG.replace(norms={"order": "parallel"})
    inputs = PassInputs(as_checkpoint(perturbed_params(config), config, "jax"), random_images(config), 0, 0.6)
    assert len(inputs.masks) == config.depth
    assert TorchTwin(inputs).run(backward=False).values  # a mask that nothing reads would be refused


def test_a_model_that_computes_nan_is_refused_in_one_line() -> None:
    params = perturbed_params(CONFIG)
    params["norm"]["scale"][0] = np.nan
    with pytest.raises(InputError, match="NaN or infinities, first at norm: look at its weights") as error:
        compare_small(params=params)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("level", "funktion"), ("dtype", "float64")])
def test_an_unknown_level_or_dtype_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is '{value}': give one of "):
        compare_small(**{name: value})


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1: give a number from 0"):
        compare_small(seed=-1, images=None)


def test_a_checkpoint_of_another_config_is_refused() -> None:
    checkpoint = as_checkpoint(perturbed_params(CONFIG), CONFIG, "jax")
    with pytest.raises(InputError, match="has another config than the one given"):
        compare(CONFIG.replace(norms={"eps": 1e-5}), checkpoint)


INTERMEDIATES = ["patch_embed.proj", "patch_embed", "embed", "blocks.0.norm1", "blocks.0.attn.q", "blocks.0.attn.k"]
INTERMEDIATES += ["blocks.0.attn.scores", "blocks.0.attn.heads", "blocks.0.attn.proj", "blocks.0.attn", "blocks.0", "norm"]
PARTS = {
    "blocks.0.norm1": "blocks.0.norm1",
    "blocks.0.attn.scores": "blocks.0.attn: scores",
    "blocks.0.attn": "blocks.0.attn: output",
    "embed": "embed",
    "norm": "norm",
    "gradient of blocks.0.attn.proj.weight": "blocks.0.attn.proj.weight in the backward pass",
    "gradient at blocks.0.attn.q": "blocks.0.attn: scores in the backward pass",
    "gradient at embed": "blocks.0.norm1 in the backward pass",
}


@pytest.mark.parametrize("name", PARTS)
def test_the_name_of_a_part_includes_its_operation(name: str) -> None:
    assert str(Part.of(name, INTERMEDIATES)) == PARTS[name]


def test_cached_tensors_are_read_back_unchanged() -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.float32(3).reshape(()), "c": np.zeros((0, 2), np.float32)}
    cache = DiskCache(arrays)
    assert list(cache) == list(arrays) and "d" not in cache
    assert all(np.array_equal(cache[name], array) and cache[name].dtype == array.dtype for name, array in arrays.items())


def test_bias_cosine_and_allclose_tolerance_of_an_error() -> None:
    b = np.array([1.0, -2.0, 4.0])
    error = ErrorNorms.of(b + 0.3, b)
    assert error.bias() == pytest.approx(0.3 / np.sqrt(7))
    assert ErrorNorms.of(-b, b).cosine == -1
    np.testing.assert_allclose(b + 0.3, b, rtol=error.allclose_tolerance * (1 + 1e-12), atol=error.allclose_tolerance)
    assert not np.allclose(b + 0.3, b, rtol=error.allclose_tolerance * 0.99, atol=error.allclose_tolerance * 0.99)


def test_the_tolerance_of_half_precision_is_five_unit_roundoffs() -> None:
    assert ErrorBudget("bfloat16").tolerance == 5 * 2**-8
    assert ErrorBudget("bfloat16", 1e-15).tolerance == ErrorBudget("bfloat16").tolerance
    assert ErrorBudget("float32", 2e-14).tolerance == pytest.approx(2e-14 * 2**29)


def test_the_tolerance_is_wider_for_few_entries() -> None:
    def error(relative: float, entries: int) -> ErrorNorms:
        return ErrorNorms.of(np.full(entries, 1 + relative), np.ones(entries))

    assert ErrorBudget().accepts(error(1.2e-5, 2), error(6e-6, 2))
    assert not ErrorBudget().accepts(error(1.2e-5, 1000), error(6e-6, 1000))
    assert not ErrorBudget().accepts(error(2e-4, 2), error(2e-4, 2))
