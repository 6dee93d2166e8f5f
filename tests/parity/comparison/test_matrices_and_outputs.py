"""What `assert_parity` finds out about models of today: orders of axes, outputs that are no arrays, masks of dropout."""

import re
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

from parity.comparison.any_model.assertion import compare_models
from tests.pairs_of_models import perturbed_module, random_variables
from vit_spec import InputError

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((3, 4)).astype(np.float32)
IMAGES = RNG.standard_normal((2, 6, 8, 3)).astype(np.float32)


def compare(flax: Any, other: Any, inputs: Any = ROWS, **options: Any) -> Any:
    """Return the report of a linen model and a module, in float64."""
    return compare_models(flax.apply, random_variables(flax, inputs), other, inputs, **{"level": "function", **options})


# Square matrices ----------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """The layer of GPT-2 in transformers, whose weight is (in, out)."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.nf = n_out
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out)), nn.Parameter(torch.randn(n_out))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Matrix(nn.Module):
    """A layer with a matrix of its own, from the right or from the left."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.matrix, self.is_right = nn.Parameter(torch.randn(4, 4)), is_right

    def forward(self, x: Any) -> Any:
        return x @ self.matrix if self.is_right else x @ self.matrix.T


class Square(linen.Module):
    """A square layer, as a Dense or with a matrix of its own."""

    is_dense: bool = True
    use_bias: bool = False

    @linen.compact
    def __call__(self, x: Any) -> Any:
        if self.is_dense:
            return linen.Dense(4, use_bias=self.use_bias, name="layer")(x)
        return x @ self.param("kernel", linen.initializers.normal(), (4, 4))


def test_the_class_of_a_module_gives_the_order_of_axes_of_a_square_matrix() -> None:
    layer = Square(use_bias=True)
    report = compare(layer, nn.Sequential(Conv1D(4, 4)))
    assert report.passed and "layer/kernel | in out  <->  0.weight | in out\n" in str(report)
    report = compare(layer, nn.Sequential(nn.Linear(4, 4)))
    assert report.passed and "layer/kernel | in out  <->  0.weight | out in\n" in str(report)


class FlaxConv1D(linen.Module):
    """The layer of GPT-2 in Flax, whose kernel is (out, in)."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", linen.initializers.normal(), (4, 4))
        return x @ kernel.T + self.param("bias", linen.initializers.normal(), (4,))


def test_a_trial_finds_a_kernel_of_flax_with_the_other_order_of_axes() -> None:
    report = compare(FlaxConv1D(), nn.Sequential(Conv1D(4, 4)))
    assert report.passed and "kernel | in out  <->  0.weight | out in    (by trial: the other order fails)" in str(report)


class TwoFlaxConv1D(linen.Module):
    """Two such layers, whose lines become one."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return FlaxConv1D(name="layers_1")(jnp.tanh(FlaxConv1D(name="layers_0")(x)))


def test_a_trial_also_finds_the_order_of_axes_of_numbered_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Conv1D(4, 4), Conv1D(4, 4)])

        def forward(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x).tanh())

    report = compare(TwoFlaxConv1D(), Two())
    assert report.passed and "layers_{n}/kernel | in out  <->  layers.{n}.weight | out in" in str(report)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_dense", [True, False])
def test_a_trial_gives_the_order_of_axes_where_nothing_else_does(is_right: bool, is_dense: bool) -> None:
    report = compare(Square(is_dense), Matrix(is_right))
    order = "matrix | in out" if is_right else "matrix | out in"
    assert report.passed and (order in str(report) or not is_dense)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_note_names_a_matrix_of_the_same_name_that_a_trial_transposes(is_right: bool) -> None:
    weights = {"matrix": jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)}
    report = compare_models(lambda params, x: x @ params["matrix"], weights, Matrix(is_right), ROWS, level="function")
    notes = [note for note in report.notes if note.startswith("matrix is used transposed")]
    assert report.passed and len(notes) == (not is_right), str(report)


@pytest.mark.parametrize(("name", "count"), [("kernel", 1), ("w", 0)])
def test_a_note_names_a_kernel_whose_trial_contradicts_the_class(name: str, count: int) -> None:
    weights = {"fc": {name: jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)}}
    layer = nn.Sequential(OrderedDict(fc=nn.Linear(4, 4, bias=False)))
    report = compare_models(lambda params, x: x @ params["fc"][name].T, weights, layer, ROWS, level="function")
    notes = [note for note in report.notes if note.startswith("the order of axes of fc.weight is not that of the class")]
    assert report.passed and len(notes) == count, str(report)


def test_a_trial_does_not_make_a_wrong_model_right() -> None:
    class Twice(Matrix):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 1.001

    report = compare(Square(), Twice(True))
    assert not report.passed and "layer/kernel | in out  <->  matrix | in out    (by trial" in str(report)
    assert report.origin is not None and report.origin.torch is not None and report.origin.torch.operation == "mul"


class Up(linen.Module):
    """A transposed convolution, whose kernel is that of a convolution from the outputs to the inputs, or not."""

    channels: int
    transpose_kernel: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        layer = linen.ConvTranspose(self.channels, (2, 3), (2, 3), transpose_kernel=self.transpose_kernel, name="up")
        return layer(x)


@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_the_kernel_of_a_transposed_convolution_is_reversed_or_not(channels: int, transpose_kernel: bool) -> None:
    other = nn.Sequential(nn.ConvTranspose2d(3, channels, (2, 3), (2, 3)))
    nhwc = "b y x c <-> b c y x"
    report = compare(Up(channels, transpose_kernel), other, IMAGES, input_axes=nhwc, output_axes=nhwc)
    assert report.passed, str(report)
    axes = ("y x in out" if channels == 3 else "y x out in") if transpose_kernel else "-y -x in out"
    assert report.correspondence.pairs[-1].flax_line in (f"up/kernel | {axes}", "up/kernel | y x in out")
    assert ("by trial" in str(report)) == (transpose_kernel and channels == 3)


class WithBias(linen.Module):
    """A layer with a bias, or none, beside one with a table that is rounded to float32."""

    use_bias: bool = True

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4, use_bias=self.use_bias, name="layer")(x)


@pytest.mark.parametrize("of_flax", [False, True])
def test_a_bias_that_one_model_lacks_is_held_at_zero_by_a_line(of_flax: bool) -> None:
    flax, other = WithBias(use_bias=of_flax), nn.Sequential(nn.Linear(4, 4, bias=not of_flax))
    line = "layer/bias | width <-> 0" if of_flax else "0 <-> 0.bias | width"
    report = compare(flax, other, layouts=[line], weights="torch" if of_flax else "flax")
    assert report.passed and line.replace("<->", " <-> ") in str(report)
    with pytest.raises(InputError, match=r"bias of (flax|torch) is held at zero by a line of layouts, and is not zero"):
        compare(flax, other, layouts=[line], weights="flax" if of_flax else "torch")


class Functions(nn.Module):
    """A square layer and a table, and the same as functions of JAX with the table in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)

    def forward(self, x: Any) -> Any:
        return self.mix(x) * torch.exp(-torch.arange(4, dtype=x.dtype) / 3)

    @staticmethod
    def flax(params: Any, x: Any) -> Any:
        return x @ params["mix"]["w"] * np.exp(-np.arange(4) / 3).astype(np.float32)


def test_a_square_matrix_of_a_function_is_found_beside_a_table_that_is_rounded() -> None:
    weights = {"mix": {"w": jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)}}
    report = compare_models(Functions.flax, weights, Functions(), ROWS, level="function")
    assert report.passed and len(report.tables) == 1, str(report)


class OwnLinear(nn.Module):
    """A linear layer with parameters of its own, without a class that says how its matrix is stored."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(n_out, n_in)), nn.Parameter(torch.randn(n_out))

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.w, self.b)


class Layers(nn.Module):
    """A factor, which the same model as a function of JAX does not have, positions, and layers of these widths."""

    def __init__(self, layer: Any, widths: tuple[int, ...], factor: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(*pair) for pair in pairwise(widths)])
        self.pos = nn.Parameter(torch.randn(widths[0], widths[0]))
        self.widths, self.factor = widths, factor

    def forward(self, x: Any) -> Any:
        x = self.factor * x + self.pos
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def compare(self, is_out_in: bool = False) -> Any:
        """Return the report of this model and the function, whose matrices are (in, out), or (out, in)."""

        def flax(params: Any, x: Any) -> Any:
            x = x + params["pos"]
            for layer in params["layers"]:
                x = jnp.tanh(x @ (layer["w"].T if is_out_in else layer["w"]) + layer["b"])
            return x

        shapes = [(b, a) if is_out_in else (a, b) for a, b in pairwise(self.widths)]
        params = {
            "layers": [
                {"w": jnp.zeros(shape), "b": jnp.zeros(n)} for shape, n in zip(shapes, self.widths[1:], strict=True)
            ],
            "pos": jnp.zeros(self.pos.shape),
        }
        x = RNG.standard_normal((3, *self.pos.shape)).astype(np.float32)
        return compare_models(flax, params, self, x, weights="torch", level="function")


ORDERS_OF_A_FUNCTION: dict[str, tuple[Any, tuple[int, ...], bool, str]] = {
    "siblings": (nn.Linear, (4, 6, 6), False, "layers/1/w | in out  <->  layers.1.weight | out in"),
    "class": (nn.Linear, (4, 4), False, "layers/0/w | in out  <->  layers.0.weight | out in"),
    "siblings against the class": (nn.Linear, (4, 6, 6), True, "layers/1/w | in out  <->  layers.1.weight | in out"),
    "class of GPT-2": (lambda a, b: Conv1D(b, a), (4, 4), False, "layers/0/w | in out  <->  layers.0.weight | in out"),
    "siblings without a class": (OwnLinear, (4, 6, 6), False, "layers/1/w | in out  <->  layers.1.w | out in"),
}


@pytest.mark.parametrize("factor", [1.0, 1.001])
@pytest.mark.parametrize("name", ORDERS_OF_A_FUNCTION)
def test_the_order_of_axes_of_a_square_matrix_of_a_function_does_not_depend_on_a_fault(name: str, factor: float) -> None:
    layer, widths, is_out_in, line = ORDERS_OF_A_FUNCTION[name]
    report = Layers(layer, widths, factor).compare(is_out_in)
    assert report.passed == (factor == 1) and line in re.sub(" +<->", "  <->", str(report)), str(report)
    assert "pos | row width" in str(report)


def test_a_trial_finds_a_matrix_of_a_function_with_the_other_order_than_the_class() -> None:
    report = Layers(nn.Linear, (4, 4), 1.0).compare(is_out_in=True)
    assert report.passed and "0.weight | in out    (by trial: the other order fails)" in str(report), str(report)


class MisleadingNames(linen.Module):
    """Two norms whose names are nearer to the wrong norms of the other model."""

    eps: float = 1e-5  # of the second norm

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm(1e-5, name="self_attention_layernorm", use_fast_variance=False)(x)
        return linen.LayerNorm(self.eps, name="feedforward_layernorm", use_fast_variance=False)(jnp.tanh(x))


class OtherNames(nn.Module):
    """The same model."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Any) -> Any:
        return self.post_attention_layernorm(torch.tanh(self.input_layernorm(x)))


def test_the_order_of_use_is_tried_where_names_mislead() -> None:
    report = compare(MisleadingNames(), OtherNames())
    assert report.passed and str(report).count("(by order of use)") == 4, str(report)
    pair = "feedforward_layernorm/bias <-> post_attention_layernorm.bias"
    assert f"note: the order of use overrides more similar names, {pair}" in str(report), str(report)
    report = compare(MisleadingNames(eps=1.001e-5), OtherNames())
    assert not report.passed and "by order of use" in str(report)
    assert report.origin is not None and report.origin.flax.module == "feedforward_layernorm"


class Listed(nnx.Module):
    """Norms in a list, used in an order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.norms = nnx.List([nnx.LayerNorm(4, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0)) for _ in range(3)])
        self.order = order

    def __call__(self, x: Any) -> Any:
        for n in self.order:
            x = jnp.tanh(self.norms[n](x))
        return x


class TorchListed(nn.Module):
    """The same norms in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for norm in self.norms:
            x = norm(x).tanh()
        return x


class Named(linen.Module):
    """Queries and keys by layers with these names."""

    names: tuple[str, str]

    @linen.compact
    def __call__(self, x: Any) -> Any:
        q, k = (linen.Dense(6, name=name)(x) for name in self.names)
        return 2 * q + jnp.tanh(k)


class TorchNamed(nn.Module):
    """The same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Any) -> Any:
        q, k = self.q_proj(x), self.k_proj(x)
        return 2 * q + k.tanh()


@pytest.mark.parametrize("names", [(), ("q_proj", "k_proj"), ("query", "key")])
def test_a_layer_that_is_used_in_the_place_of_another_fails_with_a_hint(names: tuple[str, ...]) -> None:
    def report_of(is_right: bool) -> Any:
        if not names:
            flax = perturbed_module(Listed((0, 1, 2) if is_right else (0, 2, 1)))
            return compare_models(Listed.__call__, flax, TorchListed(), ROWS, level="function")
        return compare(Named(names if is_right else names[::-1]), TorchNamed())

    assert report_of(True).passed
    wrong = report_of(False)
    assert not wrong.passed and not any("by order of use" in line for line in str(wrong.correspondence).splitlines())
    pair = f"{names[0]}/bias <-> k_proj.bias" if names else "norms/1/bias <-> norms.2.bias"
    assert f"hint: the models agree if names do not count: {pair}" in str(wrong), str(wrong)


def test_a_trial_with_unequal_weights_is_no_error() -> None:
    flax, other = MisleadingNames(eps=1e-4), OtherNames()
    variables = random_variables(flax, ROWS)
    norms = variables["params"]
    for layer, name in (
        (other.input_layernorm, "feedforward_layernorm"),
        (other.post_attention_layernorm, "self_attention_layernorm"),
    ):
        layer.weight = nn.Parameter(torch.tensor(np.array(norms[name]["scale"])))
        layer.bias = nn.Parameter(torch.tensor(np.array(norms[name]["bias"])))
    report = compare_models(flax.apply, variables, other, ROWS, weights="equal", level="function")
    assert not report.passed and "by order of use" not in str(report)


class Removed(linen.Module):
    """A layer whose output a norm removes, so that its gradients are zero, beside one with gradients."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        one = linen.Dense(1, name="one")(x)
        y = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(linen.Dense(6, name="fc")(x) + one)
        return linen.Dense(2, name="head")(y)


class TorchRemoved(nn.Module):
    """The same model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.one, self.norm, self.head = nn.Linear(4, 6), nn.Linear(4, 1), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.fc(x) + self.one(x)))


def test_the_gradients_of_a_layer_that_are_all_zero_are_relative_to_those_of_its_parent() -> None:
    report = compare(Removed(), TorchRemoved(), level="precision")
    assert report.passed, str(report)
    rows = {row.name: row for row in report.rows}
    assert float(np.abs(report.runs["torch float64"]["gradient of one.weight"]).max()) < 1e-14
    assert rows["gradient of one.weight"].difference < 1e-12


# Outputs ------------------------------------------------------------------------------------------------------------


@dataclass
class Returned:
    """What a model of transformers returns."""

    logits: Any
    past_key_values: Any
    hidden: Any


class Cache:
    """An object that is no array."""


class WithCache(nn.Module):
    """A layer that also returns a cache, and its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 2), kind

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return Returned(y, Cache(), x) if self.kind == "object" else {"logits": y, "extra": 2 * y}


class Logits(linen.Module):
    """The same layer; `returned` makes its return value."""

    returned: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return self.returned(linen.Dense(2, name="layer")(x), x)


def test_outputs_that_are_no_arrays_are_left_out_and_named() -> None:
    report = compare(Logits(lambda y, x: {"logits": y, "hidden": x}), WithCache("object"))
    assert report.passed and report.skipped_outputs == {"output.past_key_values of torch": "a Cache, which is no array"}
    assert "output.past_key_values of torch: a Cache, which is no array" in str(report)


def test_outputs_that_only_one_model_names_are_left_out_and_named() -> None:
    report = compare(Logits(lambda y, x: {"logits": y}), WithCache("dict"))
    assert report.passed and report.rows[0].name == "output.logits"
    assert report.skipped_outputs == {"output.extra of torch": "not compared"}
    assert "note: output.extra of torch is not compared: only one model returns it" in str(report)


@pytest.mark.parametrize("selected", ["output <-> logits", ["output <-> output.logits"]])
def test_outputs_can_be_selected(selected: Any) -> None:
    report = compare(Logits(lambda y, x: y), WithCache("dict"), outputs=selected)
    assert report.passed and report.rows[0].name == "output" and "only one model returns" not in str(report)


def test_a_selected_output_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch returns no logit.*logits"):
        compare(Logits(lambda y, x: y), WithCache("dict"), outputs="output <-> logit")


def test_models_without_a_common_output_are_refused_with_a_line_that_selects() -> None:
    with pytest.raises(InputError, match=r"flax returns output and torch output\.logits, output\.extra.*output <-> logits"):
        compare(Logits(lambda y, x: y), WithCache("dict"))


# Images -------------------------------------------------------------------------------------------------------------


class Conv(linen.Module):
    """A convolution."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Conv(5, (2, 2), padding="VALID")(x)


def test_images_without_input_axes_give_a_hint() -> None:
    with pytest.raises(InputError, match=r"the torch model raised RuntimeError: .*input_axes, as in 'b y x c <-> b c y x'"):
        compare(Conv(), nn.Conv2d(3, 5, 2), IMAGES)


# Losses and training ------------------------------------------------------------------------------------------------

LABELS = np.array([0, 1, 1])


def test_each_framework_can_have_its_own_loss() -> None:
    def flax_loss(y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(y), LABELS[:, None], 1).mean()

    def torch_loss(y: Any) -> Any:
        return nn.functional.cross_entropy(y, torch.tensor(LABELS))

    report = compare(linen.Dense(2), nn.Linear(4, 2), loss=(flax_loss, torch_loss), level="precision")
    assert report.passed and 0 < report.runs["torch float64"]["loss"] < 5


class Dropped(linen.Module):
    """Two layers with dropout and a batch norm, in training."""

    rate: float = 0.5
    momentum: float = 0.9
    is_evaluated: bool = False

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dropout(self.rate, deterministic=False)(linen.Dense(16)(x))
        x = linen.BatchNorm(self.is_evaluated, momentum=self.momentum, use_fast_variance=False)(x)
        return linen.Dropout(0.25, deterministic=False)(linen.Dense(16)(x))


def compare_in_training(flax: Any = None, mutable: Any = False) -> Any:
    """Return the report of the two layers in training."""
    flax = flax or Dropped()
    x = RNG.standard_normal((7, 4)).astype(np.float32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(flax.init, keys, x)
    variables = jax.tree.map(lambda leaf: jnp.asarray(RNG.uniform(0.5, 1.5, leaf.shape), jnp.float32), shapes)
    other = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Dropout(0.25))

    def apply(variables: Any, x: Any) -> Any:
        returned = flax.apply(variables, x, rngs={"dropout": jax.random.key(5)}, mutable=["batch_stats"])
        return returned if mutable else returned[0]

    options: dict[str, Any] = {"outputs": "0 <-> output"} if mutable else {}
    return compare_models(apply, variables, other, x, train=True, **options)


def test_both_models_train_with_the_same_masks() -> None:
    report = compare_in_training()
    assert report.passed, str(report)
    assert 0.1 < (report.runs["torch float64"]["output"] == 0).mean() < 0.5


def test_another_rate_of_dropout_fails_and_is_named() -> None:
    report = compare_in_training(Dropped(rate=0.4))
    assert not report.passed and "hint: dropout 0: the rate is 0.4 in flax and 0.5 in torch" in str(report)
    (rate,) = (each for each in report.facts()["tensors"] if each["name"] == "rate of dropout 0")
    assert rate["flax"] is rate["torch"] is None


def test_running_statistics_are_compared_with_the_variance_that_pytorch_computes() -> None:
    report = compare_in_training(mutable=True)
    assert report.passed and "note: PyTorch divides the running variance of 2.running_var by n - 1" in str(report)
    assert {row.name for row in report.rows} >= {"statistics 2.running_mean", "statistics 2.running_var"}
    wrong = {row.name for row in compare_in_training(Dropped(momentum=0.99), mutable=True).rows if not row.same_function}
    assert wrong == {"statistics 2.running_mean", "statistics 2.running_var"}


@pytest.mark.parametrize("momentum", [0.1, 0.99])
def test_another_momentum_of_a_batch_norm_is_named(momentum: float) -> None:
    report = compare_in_training(Dropped(momentum=momentum), mutable=True)
    hint = f"2.running_mean: the momentum is {momentum} in flax and 0.1 in torch"
    assert [each for each in report.hints if each.startswith(hint) and each.endswith("give flax 0.9")], report.hints
    assert not compare_in_training(mutable=True).hints


@pytest.mark.parametrize("flax", [Dropped(is_evaluated=True), Dropped(momentum=1)])
def test_a_batch_norm_that_flax_does_not_update_is_named(flax: Any) -> None:
    (hint,) = compare_in_training(flax, mutable=True).hints
    assert hint.startswith("2.running_mean: flax does not update it")
    assert hint.endswith("give flax use_running_average=False and momentum=0.9")


class TorchTwoOutputs(nn.Module):
    """Two layers of the same shape, and their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.q(x), self.k(x)


class TwoOutputs(linen.Module):
    """The same layers, and their outputs in the other order."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        q, k = linen.Dense(4, name="q")(x), linen.Dense(4, name="k")(x)
        return k, q


def test_swapped_outputs_are_named_and_no_layouts_are_advised() -> None:
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    report = compare_models(TwoOutputs().apply, random_variables(TwoOutputs(), x), TorchTwoOutputs(), x)
    assert not report.passed and report.hints == (
        "output.0 of flax is output.1 of torch: return the outputs in the same order",
        "output.1 of flax is output.0 of torch: return the outputs in the same order",
    )


class Three(nn.Module):
    """Three matrices of its own, of which the second one is square, and a fault."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(4, 6), (6, 6), (6, 2)]
        self.first, self.second, self.third = (nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Any) -> Any:
        return 1.01 * (x @ self.first @ self.second @ self.third)


class FlaxThree(linen.Module):
    """The same matrices."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for name, width in (("first", 6), ("second", 6), ("third", 2)):
            x = linen.Dense(width, use_bias=False, name=name)(x)
        return x


def test_the_other_matrices_give_the_order_of_axes_of_a_square_one_also_if_the_models_differ() -> None:
    report = compare(FlaxThree(), Three())
    assert not report.passed and report.origin is not None and report.origin.torch is not None
    assert "second/kernel | in out  <->  second | in out    (square: as the other matrices)" in str(report)
    assert report.origin.torch.operation == "mul"


# Frozen parameters --------------------------------------------------------------------------------------------------


class FrozenPositions(nn.Module):
    """A layer with frozen positions, as transformers has them for sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.arange(12.0).reshape(3, 4).sin(), requires_grad=False)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x + self.positions)


class ConstantPositions(linen.Module):
    """The same layer with a table."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2, name="layer")(x + jnp.asarray(np.sin(np.arange(12.0)).reshape(3, 4), jnp.float32))


def test_a_frozen_parameter_without_a_counterpart_keeps_its_values() -> None:
    report = compare(ConstantPositions(), FrozenPositions(), level="precision")
    assert report.passed, str(report)
    assert "positions: a buffer or frozen parameter without a counterpart" in str(report)
    assert "gradient of positions" not in {row.name for row in report.rows}


class Masked(nnx.Module):
    """A layer and an array of its own that is no parameter."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.scale = nnx.data(jnp.linspace(1.0, 2.0, 2))

    def __call__(self, x: Any) -> Any:
        return self.layer(x) * self.scale


class TorchMasked(nn.Module):
    """The same layer, which computes the array."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * torch.linspace(1, 2, 2, dtype=x.dtype)


@pytest.mark.parametrize("weights", ["flax", "torch"])
def test_an_array_of_an_nnx_module_that_is_no_variable_needs_no_counterpart(weights: Any) -> None:
    report = compare_models(Masked.__call__, Masked(), TorchMasked(), ROWS, weights=weights, level="function")
    assert report.passed, str(report)
    assert report.correspondence.skipped == {"scale of flax": "a constant without a counterpart: it keeps its own values"}


class Constants(linen.Module):
    """The same layer with the array in a collection of constants."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        scale = self.variable("constants", "scale", lambda: jnp.linspace(1.0, 2.0, 2))
        return linen.Dense(2, name="layer")(x) * scale.value


def test_a_collection_of_constants_needs_no_counterpart() -> None:
    flax = Constants()
    variables = flax.init(jax.random.key(0), ROWS)
    report = compare_models(flax.apply, variables, TorchMasked(), ROWS, level="function")
    assert report.passed and "constants/scale of flax" in report.correspondence.skipped, str(report)


class TwoConv1D(nn.Module):
    """Two layers with the matrix of GPT-2, the second of which is square."""

    def __init__(self, after: Any = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.after = Conv1D(6, 4), Conv1D(6, 6), after

    def forward(self, x: Any) -> Any:
        return self.after(self.second(self.first(x)))


class FlaxTwoConv1D(linen.Module):
    """The same layers, whose kernels are (out, in)."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for name, shape in (("first", (6, 4)), ("second", (6, 6))):
            kernel = self.param(f"{name}/kernel", linen.initializers.normal(1.0), shape)
            x = x @ kernel.T + self.param(f"{name}/bias", linen.initializers.normal(1.0), shape[:1])
        return jnp.tanh(x)


def test_the_other_layers_of_a_class_give_the_order_of_axes_of_a_square_one_also_if_the_models_differ() -> None:
    assert compare(FlaxTwoConv1D(), TwoConv1D()).passed
    report = compare(FlaxTwoConv1D(), TwoConv1D(torch.sin))
    assert not report.passed and report.origin is not None and report.origin.torch is not None
    assert report.origin.torch.operation == "sin", str(report)
