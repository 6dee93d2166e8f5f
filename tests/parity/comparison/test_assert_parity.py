"""`assert_parity` on the twins and on models other than ViTs: correct pairs pass, and the report names a faulty module."""

import copy
import os
import re
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

import vit_jax
import vit_spec
import vit_torch
from parity.comparison.any_model.assertion import assert_parity, compare_models
from parity.comparison.any_model.trace.scope import has_operation
from tests import ROOT
from tests.pairs_of_models import (
    TOKENS,
    VOCABULARY,
    ConvNet,
    Mlp,
    TextTransformer,
    TorchMlp,
    TorchTextTransformer,
    perturbed_module,
    random_variables,
    torch_conv_net,
)
from tests.twins import perturbed_params, random_images, small_config
from twin_vision_transformers_pytest import FOLDER, _golden_path
from vit_spec import InputError

pytest_plugins = ["pytester"]

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((2, 6, 8, 2)).astype(np.float32)
TEXT = RNG.integers(0, VOCABULARY, (2, TOKENS))
ROWS = RNG.standard_normal((3, 4)).astype(np.float32)
NHWC = "b y x c <-> b c y x"


# Models that pass ---------------------------------------------------------------------------------------------------


def test_a_convolutional_network_passes_g0_and_g1() -> None:
    model = ConvNet()
    report = assert_parity(model.apply, random_variables(model, IMAGES), torch_conv_net(), IMAGES, input_axes=NHWC)
    assert {"output", "loss", "gradient of input 0", "gradient of 4.weight", "gradient"} <= {r.name for r in report.rows}
    assert all(0 < row.torch < 1e-5 for row in report.rows)  # it ran in float32


def test_pytorch_gets_images_contiguous_in_its_own_order() -> None:
    images = RNG.standard_normal((4, 66, 66, 3)).astype(np.float32)
    model, other = linen.Conv(16, (1, 1)), nn.Conv2d(3, 16, 1)
    report = assert_parity(model.apply, random_variables(model, images), other, images, input_axes=NHWC, output_axes=NHWC)
    [gradient] = [row for row in report.rows if row.name == "gradient of weight"]
    assert gradient.torch is not None and gradient.torch < 5e-7  # 2e-6 by the kernels for channels last


def test_a_text_transformer_passes_g0_and_g1() -> None:
    model = TextTransformer()
    report = assert_parity(model.apply, random_variables(model, TEXT), TorchTextTransformer(), TEXT)
    assert "lm_head.weight: the same tensor as wte.weight" in str(report)


def test_an_nnx_module_passes_g0_and_g1() -> None:
    assert_parity(Mlp.__call__, perturbed_module(Mlp(nnx.Rngs(0))), TorchMlp(), ROWS)


def test_an_nnx_state_passes() -> None:
    graph, state = nnx.split(perturbed_module(Mlp(nnx.Rngs(0))))
    assert_parity(lambda state, x: nnx.merge(graph, state)(x), state, TorchMlp(), ROWS, level="function")


class Shared(nnx.Module):
    """Two uses of a table of embeddings, of one module or of two."""

    def __init__(self, is_shared: bool) -> None:
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Dict(embed=nnx.Embed(9, 4, rngs=rngs))
        self.decoder = nnx.Dict(embed=self.encoder["embed"] if is_shared else nnx.Embed(9, 4, rngs=rngs))
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.out(jnp.tanh(self.encoder["embed"](ids)) + self.decoder["embed"](ids))


class TorchShared(nn.Module):
    """The same model."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(9, 4)})
        self.decoder = nn.ModuleDict({"embed": self.encoder["embed"] if is_shared else nn.Embedding(9, 4)})
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Any) -> Any:
        return self.out(torch.tanh(self.encoder["embed"](ids)) + self.decoder["embed"](ids))


@pytest.mark.parametrize("flax_shares", [True, False])
@pytest.mark.parametrize("torch_shares", [True, False])
def test_a_layer_that_an_nnx_module_shares_is_one_layer(flax_shares: bool, torch_shares: bool) -> None:
    pair = Shared.__call__, perturbed_module(Shared(flax_shares)), TorchShared(torch_shares), np.arange(8).reshape(2, 4)
    if flax_shares == torch_shares:
        assert compare_models(*pair, level="function").passed
    else:
        lacking = "in torch as well" if flax_shares else "in flax as well"
        with pytest.raises(InputError, match=f"tie the two {lacking}"):
            compare_models(*pair, level="function")


def test_the_twins_pass() -> None:
    config = small_config(vit_spec.get("vit_s16"))
    params, images = {"params": perturbed_params(config)}, random_images(config)
    assert_parity(vit_jax.ViT(config).apply, params, vit_torch.ViT(config), images, input_axes=NHWC)


class Linear(linen.Module):
    """One layer that returns an array, a tuple or a dict."""

    kind: str = "array"

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.Dense(2)(x)
        return {"array": y, "tuple": (y, (2 * y, None)), "dict": {"b": y, "a": 2 * y}, "both": (y, y.argmax(-1))}[self.kind]


class TorchLinear(nn.Module):
    """The same layer."""

    def __init__(self, kind: str = "array") -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 2), kind

    def forward(self, x: Any) -> Any:
        y = self.fc(x)
        return {
            "array": y,
            "tuple": (y, (2 * y,)),
            "dict": {"a": 2 * y, "b": y},
            "pair": (y, 2 * y),
            "both": (y, y.argmax(-1)),
        }[self.kind]


def compare_linear(kind: str = "array", torch_kind: str | None = None, **options: Any) -> Any:
    """Return the report of one layer in float64."""
    model = Linear(kind)
    other = TorchLinear(torch_kind or kind)
    return compare_models(model.apply, random_variables(model, ROWS), other, ROWS, **{"level": "function", **options})


@pytest.mark.parametrize(
    ("kind", "torch_kind", "names"),
    [
        ("tuple", "tuple", {"output.0", "output.1.0"}),
        ("dict", "dict", {"output.a", "output.b"}),
        ("both", "both", {"output.0", "output.1"}),
        ("dict", "pair", {"output.a", "output.b"}),
    ],
)
def test_outputs_are_matched_by_name_or_position(kind: str, torch_kind: str, names: set[str]) -> None:
    report = compare_linear(kind, torch_kind)
    assert report.passed and {row.name for row in report.rows if row.name.startswith("output")} == names


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_where_the_caller_computes_none(mode: Any) -> None:
    with mode():
        assert compare_models(Mlp.__call__, perturbed_module(Mlp(nnx.Rngs(0))), TorchMlp(), ROWS).passed


def test_settings_of_the_caller_do_not_reach_the_runs() -> None:
    flax, other = perturbed_module(Mlp(nnx.Rngs(0))), TorchMlp()
    with torch.device("meta"), jax.disable_jit():
        assert compare_models(Mlp.__call__, flax, other, ROWS).passed


def test_a_model_that_changes_its_input_in_place_is_compared() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.fc(x.sub_(0.5).div_(0.25))

    model, images = linen.Dense(4), ROWS.copy()
    variables = model.init(jax.random.key(0), ROWS)
    assert compare_models(lambda v, x: model.apply(v, (x - 0.5) / 0.25), variables, InPlace(), images).passed
    assert np.array_equal(images, ROWS)


def test_a_custom_loss_is_differentiated() -> None:
    report = compare_linear(loss=lambda y: (y**3).sum())
    assert report.passed and report.runs["torch float64"]["loss"] == pytest.approx(
        float((report.runs["torch float64"]["output"] ** 3).sum()), rel=1e-14
    )


def test_a_function_with_a_list_of_pairs_is_compared() -> None:
    layers = [(RNG.standard_normal((4, 6)), RNG.standard_normal(6)), (RNG.standard_normal((6, 2)), RNG.standard_normal(2))]

    def apply(params: Any, x: Any) -> Any:
        (w1, b1), (w2, b2) = params
        return jnp.tanh(x @ w1 + b1) @ w2 + b2

    params = [tuple(jnp.asarray(each, jnp.float32) for each in layer) for layer in layers]
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    assert compare_models(apply, params, other, ROWS, level="function").passed


def test_losses_that_differ_on_equal_outputs_are_named_and_no_part_of_the_models() -> None:
    report = compare_linear(loss=(lambda y: (y**2).sum(), lambda y: (y**2).mean()))
    assert not report.passed and report.origin is None
    assert "hint: the outputs agree and the losses do not: look at the functions of loss" in str(report)


def test_an_output_of_another_kind_is_named_as_the_reason_for_other_losses() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.fc(x)
            return {"logits": y, "class": y.argmax(-1).float()}

    def apply(variables: Any, x: Any) -> Any:
        y = linen.Dense(4, name="fc").apply({"params": variables["params"]["fc"]}, x)
        return {"logits": y, "class": jnp.argmax(y, -1)}

    params = {"params": {"fc": linen.Dense(4).init(jax.random.key(0), ROWS)["params"]}}
    report = compare_models(apply, params, Classes(), ROWS, level="function")
    assert not report.passed and report.origin is None
    assert re.search(r"hint: output\.class is int\d+ in flax and float64 in torch", str(report))


@pytest.mark.parametrize("source", ["flax", "torch"])
def test_both_models_run_with_the_weights_of_the_requested_side(source: str) -> None:
    params, other = random_variables(Linear(), ROWS), TorchLinear()
    report = compare_models(Linear().apply, params, other, ROWS, weights=source, level="function")
    kernel = np.asarray(params["params"]["Dense_0"]["kernel"], np.float64)
    kernel = kernel if source == "flax" else other.fc.weight.detach().double().numpy().T
    bias = np.asarray(params["params"]["Dense_0"]["bias"]) if source == "flax" else other.fc.bias.detach().numpy()
    np.testing.assert_allclose(report.runs["flax float64"]["output"], ROWS @ kernel + bias, rtol=1e-12)
    assert report.passed


def test_a_name_with_a_line_break_stays_on_its_line() -> None:
    module = nn.Sequential()
    module.add_module("line\nbreak", nn.Linear(4, 3))
    module.register_buffer("another\nbreak", torch.arange(2))
    nn.init.zeros_(module[0].bias)  # which a note names
    flax = linen.Sequential([linen.Dense(3, name="line\nbreak"), lambda x: 2 * x])
    report = compare_models(flax.apply, flax.init(jax.random.key(0), ROWS), module, ROWS, level="function")
    lines = str(report).splitlines()
    assert not [line for line in lines if line.startswith("break")]
    rows = [line for line in lines if line.startswith(("  output ", "  gradient of line\\nbreak."))]
    assert len(rows) == 3 and len({re.search(r"\de[-+]", row).start() for row in rows}) == 1
    gradients = [row for row in report.rows if row.name == "gradient of line\nbreak.weight"]
    assert "gradient of line\\nbreak.weight differs by" in replace(report, rows=gradients).verdict


def test_weights_equal_requires_equal_weights() -> None:
    params, other = random_variables(Linear(), ROWS), TorchLinear()
    with pytest.raises(AssertionError, match=r"the weights are not equal: Dense_0/bias differs by"):
        compare_models(Linear().apply, params, other, ROWS, weights="equal")
    with torch.no_grad():
        other.fc.weight.copy_(torch.tensor(np.asarray(params["params"]["Dense_0"]["kernel"]).T))
        other.fc.bias.copy_(torch.tensor(np.asarray(params["params"]["Dense_0"]["bias"])))
    assert compare_models(Linear().apply, params, other, ROWS, weights="equal", level="function").passed


def test_neither_the_model_nor_the_parameters_are_changed() -> None:
    model, other = ConvNet(), torch_conv_net()
    params = random_variables(model, IMAGES)
    before, state = jax.tree.map(np.array, params), copy.deepcopy(other.state_dict())
    compare_models(model.apply, params, other, IMAGES, input_axes=NHWC, level="function")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, params)))
    assert all(torch.equal(tensor, state[key]) for key, tensor in other.state_dict().items())
    assert other.training and not any(p.grad is not None for p in other.parameters())
    assert next(other.parameters()).dtype == torch.float32


# Faults that fail ---------------------------------------------------------------------------------------------------

ATTENTION = "layer_{n}/MultiHeadDotProductAttention_0"
SWAPPED = [
    f"{ATTENTION}/{name}/{leaf} | {axes} <-> layers.{{n}}.self_attn.in_proj_{other} | (qkv={n} head dim){rest}"
    for n, name in ((1, "query"), (0, "key"))
    for leaf, axes, other, rest in (("kernel", "in head dim", "weight", " in"), ("bias", "head dim", "bias", ""))
]
TRANSPOSED = [
    "layer_1/{A}/out/kernel | head dim out <-> layers.1.self_attn.out_proj.weight | (head dim) out".replace(
        "{A}", "MultiHeadDotProductAttention_0"
    )
]
FAULTS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "eps": ({"eps": 1e-6}, [], "layers.0.norm1 layer_0/LayerNorm_0"),
    "q and k": ({}, SWAPPED, "layers.0.self_attn layer_0/MultiHeadDotProductAttention_0"),
    "transposed": ({}, TRANSPOSED, "layers.1.self_attn layer_1/MultiHeadDotProductAttention_0/out"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_and_the_report_names_its_module(fault: str) -> None:
    options, layouts, modules = FAULTS[fault]
    model = TextTransformer()
    with pytest.raises(AssertionError) as error:
        assert_parity(
            model.apply,
            random_variables(model, TEXT),
            TorchTextTransformer(**options),
            TEXT,
            layouts=layouts,
            level="function",
        )
    verdict, first, *rest = str(error.value).splitlines()
    assert verdict.startswith("FAIL G0, the same function: output differs by") and "(tolerance 1e-12)" in verdict
    of_torch, of_flax = modules.split()
    assert first.startswith("origin: ") and f" in {of_torch} (" in first and f" in {of_flax} (" in first
    assert any("token_embed/embedding | row width" in line for line in rest)  # the mapping of parameters


def test_a_wrong_eps_of_a_batch_norm_is_named() -> None:
    model = ConvNet(epsilon=1e-3)
    params = random_variables(model, IMAGES)
    report = compare_models(model.apply, params, torch_conv_net(), IMAGES, input_axes=NHWC, level="function")
    assert report.origin is not None and report.origin.torch is not None and report.origin.flax is not None
    assert (report.origin.torch.module, report.origin.flax.module) == ("1", "BatchNorm_0")


def test_a_wrong_gradient_fails_although_the_outputs_are_right() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = Linear().apply(params, x)
        return y + jax.lax.stop_gradient(y) - y  # the same value without a gradient

    report = compare_models(apply, random_variables(Linear(), ROWS), TorchLinear(), ROWS, level="function")
    assert report.first is not None and report.first.name.startswith("gradient of ")


def test_errors_in_float32_that_are_not_measured_are_not_reported() -> None:
    report = compare_models(Linear().apply, random_variables(Linear(), ROWS), TorchLinear(), ROWS, level="function")
    assert "f32" not in str(report) and "float32" not in str(report)
    assert {(each["flax"], each["torch"]) for each in report.facts()["tensors"]} == {(None, None)}


def test_a_large_float32_error_fails_g1_only() -> None:
    def apply(params: Any, x: Any) -> Any:
        return Linear().apply(params, x) * (1 + (1e-4 if x.dtype == jnp.float32 else 0))

    report = compare_models(apply, random_variables(Linear(), ROWS), TorchLinear(), ROWS)
    assert all(row.same_function for row in report.rows)
    verdict, tolerance, *_ = str(report).splitlines()
    assert verdict.startswith("FAIL G1, the same precision: the errors of output in float32 are relRMS 1.0e-04 in flax and")
    assert tolerance.startswith("tolerance: in float32 relRMS 5e-06 from float64")


# Refusals -----------------------------------------------------------------------------------------------------------


def check_refused(
    message: str, apply: Any = None, other: Any = None, params: Any = None, inputs: Any = ROWS, **options: Any
) -> None:
    """Check that a comparison is refused with one line that matches `message`."""
    params = random_variables(Linear(), ROWS) if params is None else params
    with pytest.raises(InputError, match=message) as error:
        compare_models(apply or Linear().apply, params, other or TorchLinear(), inputs, **options)
    assert "\n" not in str(error.value)


class WrappedLinear(TorchLinear):
    """The layer with a function applied to its input, and another one applied to its output."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.before, self.after = before or (lambda x: x), after or (lambda y: y)

    def forward(self, x: Any) -> Any:
        return self.after(super().forward(self.before(x)))


def test_nan_is_refused_and_the_side_is_named() -> None:
    wrong: dict[str, Any] = {"other": WrappedLinear(after=lambda y: y * float("nan"))}
    check_refused("output: the torch model returns NaN and the flax model does not", **wrong)
    wrong["apply"] = lambda p, x: Linear().apply(p, x) * jnp.nan
    check_refused("output: both models return NaN", **wrong)
    check_refused("output: the flax model returns NaN and the torch model does not", apply=wrong["apply"])


def test_outputs_of_different_shapes_are_refused() -> None:
    check_refused(r"flax returns shape \(3, 2\) and torch \(2, 3\).*output_axes", other=WrappedLinear(after=lambda y: y.T))


def test_outputs_of_different_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"flax returns output\.b, output\.a and torch output: return the same from both"):
        compare_linear("dict", "array")


def test_parameters_without_their_collection_are_refused() -> None:
    check_refused(r"give \{'params': params\}", params=random_variables(Linear(), ROWS)["params"])


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda y: y if y.sum() > 0 else -y, r"TracerBoolConversionError: .*; flax_apply runs under jax\.jit"),
        (lambda y: y * float(y.mean()), r"ConcretizationTypeError: .*: use jnp\.where"),
        (lambda y: y[y > 0], r"NonConcreteBooleanIndexError: .*, and fixed shapes$"),
        (lambda y: np.tanh(np.asarray(y)), r"TracerArrayConversionError: .* jax\.numpy for NumPy"),
        (lambda y: y * range(6)[y.argmax()], r"TracerIntegerConversionError: .*; flax_apply runs under"),
        (
            lambda y: jax.lax.while_loop(lambda y: (y < 9).all(), lambda y: y + 1, y),
            r"ValueError: .*; gradients are compared: use jax\.lax\.scan, or jax\.lax\.fori_loop with static bounds$",
        ),
    ],
)
def test_a_flax_model_that_jax_cannot_trace_or_differentiate_is_refused_with_what_to_do(after: Any, message: str) -> None:
    check_refused(f"^the flax model raised {message}", apply=lambda params, x: after(Linear().apply(params, x)))


def test_a_collection_that_params_do_not_have_is_refused_with_what_to_do() -> None:
    class Shifted(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2)(x) + self.variable("state", "shift", jnp.zeros, 2).value

    message = '^the flax model raised ScopeCollectionNotFound: .*"state".*; give this collection in params, and mutable'
    check_refused(message, apply=Shifted().apply)


def test_a_flax_model_that_is_no_function_is_refused() -> None:
    check_refused("flax_apply is a dict: give a function, such as model.apply", apply={"a": 1})
    check_refused("flax_apply is a linen module: give its apply, as in model.apply", apply=Linear())
    module = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    check_refused(r"flax_apply is a module: give Linear\.__call__, a function of model and inputs, and it as", apply=module)


def test_parameters_that_are_not_those_of_the_flax_model_are_refused() -> None:
    module = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    check_refused("params has tensors of PyTorch: give the weights of the Flax model", params=TorchLinear().state_dict())
    for apply in (nnx.Linear.__call__, lambda params, x: x @ params):
        check_refused("params has no floating-point arrays, and torch_module has parameters", apply=apply, params={})
    check_refused("model.apply takes variables with their collections", apply=Linear().apply, params=module)


def test_a_torch_model_that_is_not_a_module_is_refused() -> None:
    check_refused("torch_module is a function: give a torch.nn.Module", other=lambda x: x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that TorchScript is deprecated
        scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 2)))
    check_refused("0 of torch_module is a module of TorchScript.*: give the module that torch.jit", other=scripted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "train"}, "level is 'train': give one of function, precision"),
        ({"weights": "both"}, "weights is 'both': give one of flax, torch, equal"),
        ({"input_axes": "b y x c"}, "write the same axis names on both sides"),
        ({"input_axes": "b y <-> b x"}, "write the same axis names on both sides"),
        ({"input_axes": "b y x c <-> b c y x"}, "input 0 has 2 axes, and the line given for it has 4"),
        ({"input_axes": ["b x <-> b x"] * 2}, "input_axes has 2 lines for 1 inputs: give one for each"),
        ({"train": "yes"}, "train is 'yes': give True or False"),
        ({"seed": "a"}, "seed is 'a': give an integer"),
        ({"seed": -5}, "seed is -5: give an integer that is not negative"),
        ({"input_axes": 3}, "input_axes is 3: give a string, or a list of strings"),
        ({"outputs": [1]}, r"outputs is \[1\]: give a string, or a list of strings"),
        ({"loss": 3}, "loss is 3: give a function, or a pair of functions"),
        ({"loss": (np.mean,) * 3}, "give a function, or a pair of functions, one for flax and one for torch"),
        ({"loss": lambda y: 1.0}, "loss returns float for flax: return a floating-point array without axes"),
        ({"loss": lambda y: y.mean(-1)}, r"loss returns an array of float64 with shape \(3,\) for flax"),
        (
            {"loss": (lambda y: y.mean(), lambda y: y.argmax())},
            r"loss returns an array of torch.int64 with shape \(\) for torch",
        ),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    check_refused(message, **options)


@pytest.mark.parametrize(
    "given", ["abc", None, {"x": ROWS}, [ROWS, [[1.0], [2.0, 3.0]]], jax.random.key(0), torch.zeros(3, 4, device="meta")]
)
def test_an_input_that_is_no_array_of_numbers_is_refused(given: Any) -> None:
    check_refused(r"input \d is a .*, which is no array of numbers: give one array", inputs=given)


def test_tensors_of_any_framework_and_dtype_are_inputs() -> None:
    kinds = [
        torch.tensor(ROWS, requires_grad=True),
        torch.tensor(ROWS, dtype=torch.bfloat16),
        jnp.asarray(ROWS, jnp.bfloat16),
    ]
    for each in (*kinds, ROWS.astype(np.float16), ROWS.astype(np.float64)):
        model = Linear()
        assert_parity(model.apply, random_variables(model, ROWS), nn.Linear(4, 2), each, level="function")


@pytest.mark.parametrize(("name", "parametrized"), [("weight_norm", "original0"), ("spectral_norm", "original")])
def test_a_parametrized_weight_is_refused_with_what_to_do(name: str, parametrized: str) -> None:
    other = nn.Sequential(getattr(nn.utils.parametrizations, name)(nn.Linear(4, 2)))
    message = (
        rf"^no counterpart for torch's 0\.parametrizations\.weight\.{parametrized}, from which the module computes weight: "
        r"compare a copy after torch\.nn\.utils\.parametrize\.remove_parametrizations\(module\.0, 'weight'\)"
    )
    check_refused(message, other=other)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.LazyLinear(2), "^weight of torch has no shape before the first call: call the module once with inputs"),
        (lambda: nn.Linear(4, 2, device="meta"), "^weight of torch is on the device meta, and has no values"),
    ],
)
def test_a_module_without_values_is_refused(layer: Any, message: str) -> None:
    check_refused(message, other=layer())


def test_a_module_that_keeps_its_last_activation_is_compared() -> None:
    class Keeping(TorchLinear):
        def forward(self, x: Any) -> Any:
            self.kept = [super().forward(x)]
            return self.kept[0]

    other = Keeping()
    other(torch.tensor(ROWS))
    assert compare_models(Linear().apply, random_variables(Linear(), ROWS), other, ROWS, level="function").passed
    other.lock = threading.Lock()
    check_refused(r"^torch_module cannot be copied \(cannot pickle .*\): remove the attribute", other=other)


def test_a_model_that_returns_no_array_is_refused() -> None:
    message = "^flax returns output and torch no array: return arrays, or a tuple, list, dict or dataclass of arrays$"
    check_refused(message, other=WrappedLinear(after=lambda y: {y}))


def test_outputs_without_floating_point_entries_are_refused() -> None:
    check_refused(
        r"of what is compared, output \(int64 \(3,\)\), nothing has floating-point entries",
        apply=lambda p, x: Linear().apply(p, x).argmax(-1),
        other=WrappedLinear(after=lambda y: y.argmax(-1)),
    )
    check_refused(r"no output has an entry, output \(float64 \(0, 2\)\): give inputs with at least one", inputs=ROWS[:0])


@pytest.mark.parametrize(("first", "is_same"), [(2**40, True), (2**40 + 1, False)])
def test_integers_are_compared_exactly(first: int, is_same: bool) -> None:
    """Relative to their size, they would be equal to 1e-12."""
    ids = np.arange(2**40, 2**40 + 3)
    report = compare_models(
        lambda p, x: (Linear().apply(p, x), jnp.asarray(ids - 2**40 + first)),
        random_variables(Linear(), ROWS),
        WrappedLinear(after=lambda y: (y, torch.tensor(ids))),
        ROWS,
        level="function",
    )
    assert report.passed == is_same and "another order" not in str(report)


def test_a_table_with_indices_of_numpy_fails_with_a_report() -> None:
    """JAX keeps the dtype of a constant of a live function: the check in float32 must not break the search in float64."""
    indices = np.arange(6).reshape(3, 2) % 2  # int64

    class Indexed(TorchLinear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.fc.bias[torch.tensor(indices)]

    def indexed(params: Any, x: Any) -> Any:
        return 1.001 * Linear().apply(params, x) + params["params"]["Dense_0"]["bias"][indices]

    report = compare_models(indexed, random_variables(Linear(), ROWS), Indexed(), ROWS)
    assert not report.passed and report.origin is not None


def test_all_missing_frameworks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flax", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"^the comparison .* packages flax and torch are not installed: pip install "):
        compare_models(Linear().apply, {}, None, ROWS)


# The plugin ---------------------------------------------------------------------------------------------------------

TEST = """
import flax.linen, jax.numpy as jnp, numpy as np, torch

def test_it(assert_parity):
    params = {"params": {"kernel": jnp.ones((4, 2)) * WEIGHT, "bias": jnp.arange(2.0)}}
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    assert_parity(flax.linen.Dense(2).apply, params, torch.nn.Linear(4, 2), x)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a project with one test; its attribute `golden` is the path of the golden file."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugin is loaded by name, as it may not be installed

    def run(*options: str, weight: float = 1.5) -> Any:
        pytester.makepyfile(test_mine=TEST.replace("WEIGHT", str(weight)))
        result = pytester.runpytest_inprocess(
            "-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider", "-W", "error", *options
        )
        return result.parseoutcomes(), result.stdout.str()

    run.golden = pytester.path / "parity_goldens" / "test_mine.test_it.npz"  # type: ignore[attr-defined]
    return run


def test_wrong_arguments_are_named_as_those_of_the_fixture(pytester: pytest.Pytester, project: Any) -> None:
    pytester.makepyfile(
        test_two="def test_none(assert_parity): assert_parity()\n"
        "def test_misspelled(assert_parity): assert_parity(len, {}, None, 1, inputaxes='b y')\n"
    )
    printed = project("--tb=short", "test_two.py")[1]
    assert "TypeError: assert_parity(): missing a required argument: 'flax_apply'" in printed
    what = "got an unexpected keyword argument 'inputaxes'"
    assert f"TypeError: assert_parity(): {what}; did you mean 'input_axes'?" in printed
    assert "compare_models" not in printed


def edit_golden_file(path: Any, change: Any) -> None:
    """Rewrite a golden file after `change` has edited its header and its arrays."""
    import json

    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    change(header, arrays)
    np.savez(path, **{**arrays, "header": np.array(json.dumps(header))})


def test_no_golden_file_is_written_without_the_option(project: Any) -> None:
    assert project()[0] == {"passed": 1} and not project.golden.exists()


def test_a_golden_file_is_recorded_and_then_verified(project: Any) -> None:
    assert project("--parity-record")[0] == {"passed": 1}
    with np.load(project.golden) as file:
        assert set(file.files) == {"header", "output"} and file["output"].dtype == np.float64
    assert project()[0] == {"passed": 1}


def test_a_missing_golden_file_fails_if_golden_files_are_required(project: Any) -> None:
    outcomes, printed = project("--parity-require-golden")
    assert outcomes == {"failed": 1} and "test_mine.test_it.npz does not exist: record it with --parity-record" in printed
    assert project("--parity-require-golden", "--parity-record")[0] == {"passed": 1}
    outcomes, printed = project("--parity-require-golden")
    assert outcomes == {"passed": 1} and "that no test has used" not in printed


SOME_PASS = """
import pytest

def test_passes(): pass

def test_fails(): raise ValueError

@pytest.mark.skip
def test_skips(): pass
"""
SELECTIONS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "all": ((), {"test_some.test_passes.npz", "test_some.test_passes.1.npz", "test_some.test_gone[a].npz"}),
    "by keyword": (("-k", "skips"), {"test_some.test_gone[a].npz"}),
    "by node id": (("test_some.py::test_passes",), set()),
    "failed": (("--lf",), set()),
    "interrupted": (("test_some.py", "test_broken.py"), set()),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_golden_files_that_no_test_has_used_are_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    options, expected = SELECTIONS[selection]
    pytester.makepyfile(test_some=SOME_PASS, **({"test_broken": "import"} if selection == "interrupted" else {}))
    pytester.mkdir(FOLDER)
    names = ["some.test_passes", "some.test_passes.1", "some.test_fails", "some.test_fails.1", "some.test_skips"]
    for name in [*names, "some.test_gone[a]", "some_more.test_it"]:
        (pytester.path / FOLDER / f"test_{name}.npz").write_bytes(b"")
    if selection == "failed":
        pytester.runpytest_inprocess("-p", "twin_vision_transformers_pytest")
    printed = pytester.runpytest_inprocess("-p", "twin_vision_transformers_pytest", *options).stdout.str()
    found = re.search("golden files of assert_parity that no test has used: (.*): delete them if", printed)
    assert {Path(each).name for each in found[1].split(", ")} == expected if found else not expected


def test_changed_outputs_fail_with_the_framework_and_its_versions(project: Any) -> None:
    project("--parity-record")

    def record_older_versions(header: Any, arrays: Any) -> None:
        header["environment"]["jax"], header["environment"]["torch"] = "0.9.0", "2.0.1"
        arrays["output"] = arrays["output"] * (1 + 1e-9)

    edit_golden_file(project.golden, record_older_versions)
    outcomes, printed = project()
    assert outcomes == {"failed": 1}
    assert (
        "flax has changed: in float64 output differs by 1.0e-09 from the recorded output (tolerance 1e-12); jax 0.9.0 -> "
        in printed
    )
    assert "torch has changed: in float64 output differs by" in printed and "torch 2.0.1 -> " in printed


def test_an_output_of_another_shape_fails_with_both_shapes(project: Any) -> None:
    project("--parity-record")
    edit_golden_file(project.golden, lambda _, arrays: arrays.update(output=arrays["output"][:2]))
    assert "flax has changed: output has the shape (3, 2), and (2, 2) was recorded; the versions" in project()[1]


def test_a_changed_float32_error_fails_with_that_framework_alone(project: Any) -> None:
    project("--parity-record")

    def record_larger_error(header: Any, arrays: Any) -> None:
        header["distances"]["torch"]["output"] = 1e-4

    edit_golden_file(project.golden, record_larger_error)
    printed = project()[1]
    assert "torch has changed: in float32 the error of output is" in printed and "flax has changed" not in printed
    assert "the versions are the same (torch" in printed


DAMAGE: dict[str, Any] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "without a header": lambda path: np.savez(path, header=np.array("{}")),
    "a list as environment": lambda path: edit_golden_file(path, lambda header, _: header.update(environment=[])),
    "text as distance": lambda path: edit_golden_file(
        path, lambda header, _: header.update(distances={"torch": {"output": "x"}})
    ),
    "a distance that is too large": lambda path: edit_golden_file(
        path, lambda header, _: header.update(distances={"torch": {"output": 10**400}})
    ),
    "no distances of a framework": lambda path: edit_golden_file(path, lambda header, _: header["distances"].pop("flax")),
    "a number as fingerprint": lambda path: edit_golden_file(
        path, lambda header, _: header.update(fingerprints={"inputs": {"input 0": 1}})
    ),
    "no distance of an output": lambda path: edit_golden_file(path, lambda header, _: header["distances"].update(flax={})),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_golden_file_is_refused_with_what_to_do(project: Any, how: str) -> None:
    project("--parity-record")
    DAMAGE[how](project.golden)
    outcomes, printed = project()
    assert outcomes == {"failed": 1}
    line = next(line for line in printed.splitlines() if "is not a golden file, or is damaged" in line)
    assert line.endswith(": record it again with --parity-record") and line.count(str(project.golden)) == 1
    assert "write it again" not in line


def test_a_golden_file_of_other_weights_is_refused_with_what_to_do(project: Any) -> None:
    project("--parity-record")
    outcomes, printed = project(weight=2.5)
    assert outcomes == {"failed": 1}
    assert "was recorded with other weights (1 of 2 differs: kernel has other values" in printed
    assert "record it again with --parity-record if the change is intended" in printed
    assert "golden_outputs.py" not in printed  # nor the source of this package


def test_each_call_in_a_test_has_its_own_golden_file(pytester: pytest.Pytester, project: Any) -> None:
    again = "    assert_parity(flax.linen.Dense(2).apply, params, torch.nn.Linear(4, 2), -x)\n"
    pytester.makepyfile(test_two=TEST.replace("WEIGHT", "1.5") + again)
    pytester.runpytest_inprocess(
        "-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider", "--parity-record", "test_two.py"
    )
    names = {path.name for path in (pytester.path / "parity_goldens").iterdir()}
    assert names == {"test_two.test_it.npz", "test_two.test_it.1.npz"}


TWO_TESTS = """
import flax.linen, jax.numpy as jnp, numpy as np, pytest, torch

def compare(assert_parity, weight):
    params = {"params": {"kernel": jnp.ones((4, 2)) * weight, "bias": jnp.arange(2.0)}}
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    assert_parity(flax.linen.Dense(2).apply, params, torch.nn.Linear(4, 2), x)

"""
SAME_NAMES = {
    "classes": """
class TestSmall:
    def test_port(self, assert_parity): compare(assert_parity, 1.5)

class TestLarge:
    def test_port(self, assert_parity): compare(assert_parity, 2.5)
""",
    "parameters": """
@pytest.mark.parametrize("weight", [1.5, 2.5, 3.5], ids=["a/b", "a b", "a_b"])
def test_port(assert_parity, weight): compare(assert_parity, weight)
""",
}
SAME_FILE = """
def test_port(assert_parity): compare(assert_parity, 1.5), compare(assert_parity, 2.5)

def port(assert_parity): compare(assert_parity, 3.5)
globals()["test_port.1"] = port
"""


@pytest.mark.parametrize("tests", SAME_NAMES)
def test_similar_names_of_tests_have_their_own_golden_files(pytester: pytest.Pytester, project: Any, tests: str) -> None:
    pytester.makepyfile(test_two=TWO_TESTS + SAME_NAMES[tests])
    options = ("-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider")
    recorded = pytester.runpytest_inprocess(*options, "--parity-record").parseoutcomes()
    names = {path.name for path in (pytester.path / "parity_goldens").iterdir()}
    assert {"passed": len(names)} == recorded == pytester.runpytest_inprocess(*options).parseoutcomes()
    plain = {"classes": "test_two.TestSmall.test_port.npz", "parameters": "test_two.test_port[a_b].npz"}
    assert plain[tests] in names


@pytest.mark.parametrize("letter", ["x", "\u00e9"])
def test_golden_files_of_tests_with_long_names_can_be_created(tmp_path: Path, letter: str) -> None:
    names = [f"test_it[{letter * length}{end}]" for length in (120, 200, 300) for end in "ab"]
    paths = {_golden_path(tmp_path / "test_two.py", name, call) for name in names for call in (0, 999)}
    assert len(paths) == 2 * len(names)
    (tmp_path / FOLDER).mkdir()
    for path in paths:
        path.write_bytes(b"")
        assert path.name.startswith("test_two.test_it[") and path.suffix == ".npz"


def test_two_tests_do_not_share_a_golden_file(pytester: pytest.Pytester, project: Any) -> None:
    pytester.makepyfile(test_two=TWO_TESTS + SAME_FILE)
    options = ("-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(*options, "--parity-record")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}
    text = "1.npz has just been recorded by test_port, and is also the file of test_port.1: rename a test"
    assert text in result.stdout.str()
    result = pytester.runpytest_inprocess(*options)
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}
    assert "was recorded by test_port, and not by test_port.1: record it again with --parity-record" in result.stdout.str()


def test_a_golden_file_without_the_name_of_its_test_is_verified(project: Any) -> None:
    """Earlier versions did not write it."""
    project("--parity-record")
    edit_golden_file(project.golden, lambda header, _: header.pop("test"))
    assert project()[0] == {"passed": 1}
    edit_golden_file(project.golden, lambda _, arrays: arrays.update(output=2 * arrays["output"]))
    assert project()[0] == {"failed": 1}


def test_the_plugin_imports_neither_framework_nor_parity() -> None:
    code = "import sys, twin_vision_transformers_pytest as _; print(sorted({'jax', 'torch', 'parity'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_a_package_of_the_same_name_is_an_error_of_the_fixture_alone(tmp_path: Path) -> None:
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "__init__.py").touch()
    (tmp_path / "test_it.py").write_text("def test_own(): import parity\ndef test_ours(assert_parity): pass\n")
    options = ["-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider", "-q"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed, 1 error" in done.stdout
    where = tmp_path / "parity" / "__init__.py"
    assert f"{where} is imported as 'parity' instead of the package of twin-vision-transformers" in done.stdout


@pytest.mark.parametrize("layer", [linen.Conv(2, (3, 3)), linen.Dense(2)])
def test_convolutions_are_found_inside_other_functions(layer: Any) -> None:
    """Models with them are compiled with optimizations, since XLA computes their gradients very slowly without."""
    images = np.ones((1, 4, 4, 3), np.float32)
    variables = layer.init(jax.random.key(0), images)

    def add_up(images: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + layer.apply(variables, x).sum(), ()), 0.0, images)

    jaxpr = jax.make_jaxpr(jax.jit(add_up))(images[None]).jaxpr
    assert has_operation(jaxpr, "conv_general_dilated") == isinstance(layer, linen.Conv)
