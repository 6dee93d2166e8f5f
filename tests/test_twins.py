"""The twins compute the same function (G0, float64) with equal accuracy (G1, float32): see `parity.comparison.twins`."""

import itertools
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import vit_spec
import vit_torch
from parity.comparison.report import Report
from parity.comparison.tolerances import ErrorBudget, ErrorNorms
from parity.comparison.twins import compare
from tests.random_configs import RESAMPLING, config_of_choices, configs
from tests.twins import NO_KERNEL_FUSION, perturbed_params, random_images, small_config, small_models
from vit_jax import layers as jax_layers
from vit_spec import InputError, ViTConfig
from vit_spec.positions import TABLES
from vit_torch import layers as torch_layers

# Each program runs once, so it is compiled with few optimizations; XLA still fuses operations.  benchmarks/full_size.py
# uses the default optimizations.
QUICK = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize("names", small_models())
def test_a_named_model_passes_g0_and_g1_in_training(names: str) -> None:
    """Both twins have the same stochastic-depth masks; kernels are not fused."""
    config = small_models()[names]
    options = {**QUICK, **NO_KERNEL_FUSION}
    report = compare(config, perturbed_params(config), images=random_images(config), drop_path=0.6, xla_options=options)
    assert report.passed, report.verdict


# One model of each kind of block, positions and head; benchmarks/full_size.py takes any model.
INFERENCE = ("vit_s16", "vit_22b14", "deit_s16_distilled", "dinov2_g14", "dinov3_s16", "clip_b16", "siglip_b16")


@pytest.mark.parametrize("name", INFERENCE)
def test_a_named_model_passes_g0_and_g1_in_inference(name: str) -> None:
    """Kernels are fused, as they are by default."""
    report = inference_report(small_config(vit_spec.get(name)))
    assert report.passed, report.verdict


@cache
def inference_report(config: ViTConfig) -> Report:
    return compare(config, perturbed_params(config), images=random_images(config), xla_options=QUICK)


PLAIN = small_config(vit_spec.get("vit_s16"))


# The twins apply matrices of vit_spec, which has the modes; the second mode crops those of a square grid.
@pytest.mark.parametrize("mode", ["timm", "timm naflex"])
def test_another_image_size_passes_g0_and_g1(mode: str) -> None:
    config = PLAIN.replace(resampling=RESAMPLING[mode])
    report = compare(config, perturbed_params(config), images=random_images(config, (80, 16)), xla_options=QUICK)
    assert report.passed, report.verdict


def test_a_padded_image_passes_g0_and_g1() -> None:
    config = PLAIN.replace(tokens={"pad": True})
    report = compare(config, perturbed_params(config), images=random_images(config, (37, 50)), xla_options=QUICK)
    assert report.passed, report.verdict


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.integers(0, 2**16))
def test_a_random_config_is_the_same_function_in_both_twins(config: ViTConfig, seed: int) -> None:
    ph, pw = config.patch_size
    size = (ph * 4, pw * 2) if config.positions.relative == "none" else config.image_size
    images = random_images(config, size, seed)
    report = compare(config, perturbed_params(config, seed), images=images, level="function", xla_options=QUICK)
    differing = [measure for measure in report.measures if not measure.same_function]
    assert not differing, differing[0]


def test_each_activation_is_one_function_in_both_twins_and_no_two_are_the_same() -> None:
    """A kind may be another function of the same name in one of the twins."""
    kinds = typing.get_args(typing.get_type_hints(vit_spec.Mlp)["activation"])
    x = np.linspace(-9, 9, 64).reshape(16, 2, 2)
    with jax.enable_x64():
        in_jax = {kind: np.asarray(jax_layers.activation(jax.numpy.asarray(x), kind)) for kind in kinds}
    for kind in kinds:
        in_torch = torch_layers.activation(torch.from_numpy(x), kind).numpy()
        np.testing.assert_allclose(in_jax[kind], in_torch, rtol=1e-12, atol=1e-14, err_msg=kind)
    assert len({value.tobytes() for value in in_jax.values()}) == len(kinds)


def test_an_unknown_activation_is_refused_by_both_twins_alike() -> None:
    with pytest.raises(ValueError, match="unknown activation 'spiral'") as in_jax:
        jax_layers.activation(jax.numpy.ones(2), "spiral")
    with pytest.raises(ValueError, match="unknown activation 'spiral'") as in_torch:
        torch_layers.activation(torch.ones(2), "spiral")
    assert str(in_jax.value) == str(in_torch.value)


# Fields that random configs leave at their default, because they do not change what a model computes in inference.
NOT_DRAWN = ("pixels", "tokens.init", "head.init", "regularisation")


@cache
def drawn_configs() -> list[ViTConfig]:
    """Return configs of the strategy; the seed is fixed, and more than 50 of them have the rarest value."""
    choice = Random(0).choice
    return [config_of_choices(lambda *values: choice(values)) for _ in range(2000)]


def missing_values(configs: list[ViTConfig]) -> list[str]:
    """Return what no config has: values of a Literal, True or False, None or another value, or a second value."""
    missing = []
    for name, hint in dotted_fields(ViTConfig):
        found = {attrgetter(name)(config) for config in configs}
        if is_choice(hint):
            wanted = (True, False) if hint is bool else typing.get_args(hint)
            missing += [f"{name}={value!r}" for value in wanted if value not in found]
        elif type(None) in typing.get_args(hint):
            missing += [f"{name}=None"] * (None not in found) + [f"{name} other than None"] * (found == {None})
        elif len(found) < 2:
            missing.append(f"a second value of {name}")
    return missing


def dotted_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of each field that random configs should vary."""
    for name, hint in typing.get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from dotted_fields(hint, f"{name}.") if name not in NOT_DRAWN else ()
        elif prefix + name not in NOT_DRAWN:
            yield prefix + name, hint


def is_choice(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal or hint is bool


def test_random_configs_have_every_choice_of_the_config() -> None:
    assert missing_values(drawn_configs()) == []


@pytest.mark.parametrize(
    ("has_value", "missing"),
    [
        (lambda c: c.norms.kind == "rms", ["norms.kind='rms'"]),
        (lambda c: c.norms.order == "res_post", ["norms.order='res_post'"]),
        (lambda c: c.tokens.pad, ["tokens.pad=True"]),
        (lambda c: c.mlp.bias, ["mlp.bias=True"]),
        (lambda c: c.head.hidden is not None, ["head.hidden other than None"]),
        (lambda c: c.tokens.registers, ["a second value of tokens.registers"]),
    ],
)
def test_a_choice_that_random_configs_lack_is_reported(has_value: Callable[[ViTConfig], Any], missing: list[str]) -> None:
    assert missing_values([config for config in drawn_configs() if not has_value(config)]) == missing


# Values that no random config has, and that a field needs to change what a model computes.
FURTHER_VALUES: dict[str, tuple[Any, ...]] = {"positions.table": TABLES, "positions.relative_dim": (6,)}


@pytest.mark.parametrize(("name", "hint"), list(dotted_fields(ViTConfig)))
def test_every_field_changes_what_the_pytorch_twin_computes(name: str, hint: Any) -> None:
    """The JAX twin reads the same fields: tests/test_skeleton.py.  Every two choices of a field are different functions."""
    values = {attrgetter(name)(config) for config in drawn_configs()} | {*FURTHER_VALUES.get(name, ())}
    same = [pair for pair in itertools.combinations(sorted(values, key=repr), 2) if not changes_function(name, *pair)]
    assert not same if is_choice(hint) else len(same) < math.comb(len(values), 2), f"{name}: no model differs by {same}"


def test_a_field_that_the_pytorch_twin_does_not_read_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes_function("mlp.activation", "gelu", "relu")
    monkeypatch.setattr("vit_torch.model.activation", lambda x, kind: torch_layers.activation(x, "gelu"))
    assert not changes_function("mlp.activation", "gelu", "relu")


def changes_function(name: str, value: Any, other: Any) -> bool:
    """Return whether two values of a field give a random config other parameters or other outputs."""
    for config in drawn_configs()[:50]:
        try:
            pair = [with_value(config, name, each) for each in (value, other)]
        except InputError:
            continue
        models = [vit_torch.ViT(each).eval() for each in pair]
        one, two = ({key: tensor.shape for key, tensor in model.state_dict().items()} for model in models)
        if one != two or not np.array_equal(*(random_outputs(model, pair) for model in models)):
            return True
    return False


def with_value(config: ViTConfig, name: str, value: Any) -> ViTConfig:
    """Return a config with another value of a field; `relative_dim` follows `relative`, which determines if it is None."""
    follows = {"positions.relative_dim": 5 if value == "mlp" else None} if name == "positions.relative" else {}
    return config.with_fields({name: value, **follows})


def random_outputs(model: vit_torch.ViT, pair: list[ViTConfig]) -> np.ndarray | None:
    """Return the outputs for images of another size, with random parameters; None if the model refuses the images.

    The images fit the patches unless one of the pair of configs pads or crops.
    """
    random = torch.Generator().manual_seed(0)
    height, width = (pair[0].patch_size[0] * 4, pair[0].patch_size[1] * 2)
    if pair[0].positions.relative != "none":
        height, width = pair[0].image_size
    if any(config.tokens.pad or config.tokens.crop for config in pair):
        height += 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
        try:
            return model(torch.randn(2, pair[0].in_channels, height, width, generator=random)).numpy()
        except InputError:
            return None


def test_an_imprecise_twin_fails_only_g1(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vit_torch.ViT

    class Imprecise(original):  # type: ignore[misc, valid-type]
        def encode(self, x, tables, noise):
            factor = 3e-6 if x.dtype.itemsize == 4 else 1e-13
            return super().encode(x + factor * x.clamp(min=0), tables, noise)

    monkeypatch.setattr(vit_torch, "ViT", Imprecise)
    report = compare(PLAIN, perturbed_params(PLAIN), images=random_images(PLAIN), xla_options=QUICK)
    assert report.first is not None
    assert all(measure.same_function for measure in report.measures)
    assert not report.first.same_precision
    # The twins differ in float64 as a function that amplifies rounding errors does, but such errors are measured.
    assert max(measure.difference for measure in report.measures) > 4e-14
    assert {measure.budget.float64_error for measure in report.measures} == {0}


@pytest.mark.parametrize(("in_float64", "passes"), [(1e-15, False), (3e-14, True)])
def test_the_float32_tolerance_grows_with_the_amplification_measured_in_float64(in_float64: float, passes: bool) -> None:
    exact = np.random.default_rng(0).standard_normal(10_000)
    far = exact * (1 + 8e-6)
    error = ErrorNorms.of(far, exact)
    assert ErrorBudget("float32", in_float64).accepts(error, error) is passes


def test_a_report_prints_a_table_and_its_verdict_last() -> None:
    text = str(inference_report(PLAIN))
    assert "blocks.*.attn.q" in text
    assert text.splitlines()[-1].startswith("PASS: ")


def test_nan_in_only_one_twin_is_a_difference() -> None:
    broken = ErrorNorms.of(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert broken.relative_rms(0) == np.inf


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="do not match the config"):
        compare(PLAIN.replace(depth=3), perturbed_params(PLAIN))
