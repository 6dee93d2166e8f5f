"""The origin of a difference: the operation that is fed the same values and differs, not the first module to show it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.trace.origin import Origin
from parity.comparison.any_model.trace.places import Place
from tests.pairs_of_models import perturbed_module, random_variables

RNG = np.random.default_rng(0)
TOKENS = RNG.standard_normal((2, 5, 8)).astype(np.float32)
THIS = __file__


class Mlp(nnx.Module):
    """Two layers with an activation between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(8, 16, rngs=rngs)
        self.fc2 = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any, approximate: bool) -> Any:
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=approximate))


class Block(nnx.Module):
    """A block of an MLP, with every mistake that a test asks for."""

    def __init__(self, mistake: str, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, epsilon=1e-6 if mistake == "eps" else 1e-5, use_fast_variance=False, rngs=rngs)
        self.mlp = Mlp(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mistake = mistake

    def __call__(self, x: Any) -> Any:
        y = self.mlp(self.norm(x), self.mistake == "gelu")
        y = self.dropout(y)
        return y if self.mistake == "residual" else x + y


class Model(nnx.Module):
    """Positions, two blocks and a norm; only the second block has the mistake."""

    def __init__(self, mistake: str = "") -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block("", rngs), Block(mistake, rngs)])
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.mistake = mistake

    def __call__(self, x: Any) -> Any:
        first = 0.0 if self.mistake == "positions" else 1.0
        positions = jnp.cos(first + jnp.arange(5, dtype=x.dtype))
        x = jnp.broadcast_to(positions[:, None], x.shape) if self.mistake == "input" else x + positions[:, None]
        for block in [*self.blocks][: 1 if self.mistake == "block" else 2]:
            x = block(x)
        x = x.max(1) if self.mistake == "pooling" else x.mean(1)
        if self.mistake == "gradient":
            x = jax.lax.stop_gradient(x) + 0 * x
        return self.head(x)


class TorchBlock(nn.Module):
    """The same block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)})

    def forward(self, x: Any) -> Any:
        y = self.mlp["fc1"](self.norm(x))
        return x + self.mlp["fc2"](nn.functional.gelu(y))


class TorchModel(nn.Module):
    """The same model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TorchBlock(), TorchBlock()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = x + torch.arange(1.0, 6.0, dtype=x.dtype).cos()[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def find(mistake: str) -> Any:
    """Return the origin for a mistake in the second block, and the lines that it names of the NNX model."""
    model = perturbed_module(Model(mistake))
    report = compare_models(Model.__call__, model, TorchModel(), TOKENS, level="function")
    assert not report.passed and report.origin is not None, str(report)
    return report.origin


def line_of(text: str) -> int:
    """Return the number of the line of this file that contains a text."""
    with open(THIS) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_the_right_model_passes_and_is_put_into_evaluation() -> None:
    model = perturbed_module(Model())
    report = compare_models(Model.__call__, model, TorchModel(), TOKENS)
    assert report.passed and report.origin is None, str(report)
    assert not model.blocks[0].dropout.deterministic  # only a copy was changed


def test_a_model_in_training_mode_that_cannot_be_changed_is_named() -> None:
    graph, state = nnx.split(perturbed_module(Model()))
    report = compare_models(lambda state, x: nnx.merge(graph, state)(x), state, TorchModel(), TOKENS, level="function")
    assert "hint: blocks/0/dropout, blocks/1/dropout of flax ran in training mode: call model.eval()" in str(report)


def test_a_norm_of_an_nnx_module_is_the_origin() -> None:
    origin = find("eps")
    assert (origin.kind, origin.flax.module, origin.torch.module) == ("operation", "blocks/1/norm", "blocks.1.norm")


def test_a_function_between_modules_is_the_origin_and_not_the_module_after_it() -> None:
    origin = find("gelu")
    assert (origin.kind, origin.flax.module, origin.torch.module) == ("operation", "blocks/1/mlp", "blocks.1")
    assert origin.torch.operation == "gelu" and origin.torch.line == line_of("nn.functional" + ".gelu(y)")
    assert (origin.flax.file, origin.flax.line) == (THIS, line_of("jax.nn" + ".gelu"))
    assert origin.flax.caller[:2] == (THIS, line_of("y = self.mlp(self." + "norm(x)"))
    assert f"called at line {origin.flax.caller.line}" in str(origin)


def test_a_model_whose_output_does_not_depend_on_its_input_has_an_origin() -> None:
    origin = find("input")
    assert (THIS, line_of("x = jnp." + "broadcast_to(")) in origin.flax.lines
    assert (origin.torch.operation, origin.torch.line) == ("add", line_of("x = x + torch." + "arange("))


def test_a_missing_residual_lies_between_the_modules_around_it() -> None:
    origin = find("residual")
    assert (THIS, line_of("y = self.mlp(self." + "norm(x)")) in origin.flax.lines
    assert (origin.torch.operation, origin.torch.module) == ("add", "blocks.1")


def test_positions_are_named_and_not_the_block_after_them() -> None:
    origin = find("positions")
    assert origin.kind == "constant" and origin.flax.module == "" and origin.torch.module == ""
    assert (THIS, line_of("positions = " + "jnp.cos")) in origin.flax.lines


def test_another_pooling_is_named() -> None:
    origin = find("pooling")
    assert (origin.flax.operation, origin.flax.line) == ("reduce_max", line_of("x = x.max(1) if"))
    assert origin.torch.operation == "mean"


def test_a_wrong_gradient_alone_is_named_by_its_parameter() -> None:
    origin = find("gradient")
    assert origin.kind == "gradient" and (origin.flax.module, origin.torch.module) == (
        "blocks/1/mlp/fc2",
        "blocks.1.mlp.fc2",
    )


class Scale(nn.Module):
    """A scale that a mistake leaves out."""

    def __init__(self, is_left_out: bool) -> None:
        super().__init__()
        self.weight, self.is_left_out = nn.Parameter(torch.ones(8)), is_left_out

    def forward(self, x: Any) -> Any:
        return x if self.is_left_out else x * self.weight


class NnxScale(nnx.Module):
    """The same scale."""

    def __init__(self, is_left_out: bool) -> None:
        self.scale, self.is_left_out = nnx.Param(jnp.ones(8)), is_left_out

    def __call__(self, x: Any) -> Any:
        return x if self.is_left_out else x * self.scale


class Scaled(nnx.Module):
    """A layer, a scale and an activation."""

    def __init__(self, is_left_out: bool) -> None:
        self.fc, self.gamma = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), NnxScale(is_left_out)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x + self.gamma(self.fc(x)))


class TorchScaled(nn.Module):
    """The same model."""

    def __init__(self, is_left_out: bool) -> None:
        super().__init__()
        self.fc, self.gamma = nn.Linear(8, 8), Scale(is_left_out)

    def forward(self, x: Any) -> Any:
        return (x + self.gamma(self.fc(x))).tanh()


@pytest.mark.parametrize("side", ["flax", "torch"])
def test_a_module_that_returns_what_it_is_given_is_named(side: str) -> None:
    model = perturbed_module(Scaled(side == "flax"))
    report = compare_models(Scaled.__call__, model, TorchScaled(side == "torch"), TOKENS, level="function")
    place = getattr(report.origin, side)
    assert place.passed == ("gamma",) and f"gamma of {side} returns what it is given" in str(report)


class Ordered(nnx.Module):
    """Two layers, of which only one has a bias."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.plain = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.biased = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.biased(jnp.tanh(self.plain(x)))


class TorchOrdered(nn.Module):
    """The same layers in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.plain(self.biased(x).tanh())


def test_layers_in_another_order_are_named() -> None:
    model = perturbed_module(Ordered())
    report = compare_models(Ordered.__call__, model, TorchOrdered(), TOKENS, level="function")
    origin = report.origin
    assert origin is not None and (origin.kind, origin.flax.module, origin.torch.module) == ("layers", "plain", "biased")
    assert "the weights of different layers follow" in str(origin)


class Norms(linen.Module):
    """Two norms; Flax multiplies the deviation by the scale, and PyTorch the normalized entries."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.LayerNorm(epsilon=1e-5, name="second")(jnp.tanh(linen.LayerNorm(epsilon=1e-5, name="first")(x)))


class TorchNorms(nn.Module):
    """The same norms in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.first(self.second(x).tanh())


def test_norms_in_another_order_are_named_although_one_model_scales_first() -> None:
    report = compare_models(Norms().apply, random_variables(Norms(), TOKENS), TorchNorms(), TOKENS, level="function")
    origin = report.origin
    assert origin is not None and (origin.kind, origin.flax.module, origin.torch.module) == ("layers", "first", "second")


def test_the_module_before_a_missing_step_is_named() -> None:
    origin = find("block")
    assert (origin.torch.module, origin.torch.after, origin.flax.module) == ("blocks.1.norm", "blocks.0", "")
    assert "in blocks.1.norm after blocks.0 (" in str(origin)


def test_an_operation_that_is_missing_at_the_end_lies_after_the_last_one() -> None:
    class Rooted(nnx.Module):
        def __init__(self) -> None:
            self.fc, self.gamma = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), NnxScale(True)

        def __call__(self, x: Any) -> Any:
            return self.gamma(self.fc(x))

    class TorchRooted(TorchScaled):
        def forward(self, x: Any) -> Any:
            return self.gamma(self.fc(x))

    report = compare_models(Rooted.__call__, perturbed_module(Rooted()), TorchRooted(False), TOKENS, level="function")
    assert report.origin is not None and report.origin.flax is not None and report.origin.torch is not None
    assert (report.origin.torch.module, report.origin.torch.operation) == ("gamma", "mul")
    assert (report.origin.flax.operation, report.origin.flax.passed) == ("the end", ("gamma",))
    assert report.origin.kind == "missing" and "one model returns the values with which the other goes on" in str(report)
    assert (THIS, line_of("return self.gamma(self." + "fc(x))")) in report.origin.flax.lines


def test_outputs_in_another_order_are_named() -> None:
    class Reshaped(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(8, name="fc")(x).reshape(2, 8, 5)

    class TorchTransposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.fc(x).transpose(1, 2)

    variables = Reshaped().init(jax.random.key(0), TOKENS)
    report = compare_models(Reshaped().apply, variables, TorchTransposed(), TOKENS, level="function")
    assert report.origin is not None and report.origin.kind == "order" and report.origin.flax is not None
    assert (report.origin.flax.operation, report.origin.flax.file) == ("reshape", THIS)


def test_outputs_that_differ_by_little_more_than_the_tolerance_are_not_called_reordered() -> None:
    class Scaled(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            y = linen.Dense(8, name="fc")(x)
            return y.at[0, 0, :2].add(jnp.array([2e-11, -2e-11], y.dtype))  # the sums of the outputs stay the same

    class TorchLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.fc(x)

    variables = Scaled().init(jax.random.key(0), TOKENS)
    report = compare_models(Scaled().apply, variables, TorchLinear(), TOKENS, level="function")
    assert not report.passed and "order" not in str(report.origin) and "the outputs agree" not in str(report)


def test_the_origin_is_in_the_message() -> None:
    report = compare_models(Model.__call__, perturbed_module(Model("eps")), TorchModel(), TOKENS, level="function")
    second = str(report).splitlines()[1]
    assert second.startswith("origin: ") and "the same values enter, and the results differ by" in second
    assert "of torch and " in second and second.count("blocks") == 2


class Scanned(linen.Module):
    """Layers in nn.scan, one of them with a bias of its own."""

    wrong: bool = False

    @linen.compact
    def __call__(self, x: Any) -> Any:
        layers = linen.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(self.wrong, name="layers")(x, None)[0]


class Layer(linen.Module):
    """One layer of the scan."""

    wrong: bool

    @linen.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        y = linen.Dense(8, name="fc")(x)
        return (jnp.sin if self.wrong else jnp.tanh)(y), None


class TorchLayers(nn.Module):
    """The same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(8, 8)}) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer["fc"](x).tanh()
        return x


def test_modules_inside_a_scan_are_named() -> None:
    from tests.pairs_of_models import random_variables

    variables = random_variables(Scanned(), TOKENS)
    assert compare_models(Scanned().apply, variables, TorchLayers(), TOKENS).passed
    report = compare_models(Scanned(True).apply, variables, TorchLayers(), TOKENS, level="function")
    assert report.origin is not None and report.origin.flax is not None and report.origin.torch is not None
    assert (report.origin.flax.module, report.origin.torch.operation) == ("layers", "tanh")


class Recurrent(nnx.Module):
    """A recurrent layer, which nnx.RNN calls as a copy."""

    def __init__(self, activation: Any) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.SimpleCell(8, 8, activation_fn=activation, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        return self.rnn(self.first(x))


class TorchRecurrent(nn.Module):
    """The same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dense_i, self.dense_h = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Any) -> Any:
        x, h, out = self.first(x), torch.zeros_like(x[:, 0]), []
        for n in range(x.shape[1]):
            h = torch.tanh(self.dense_i(x[:, n]) + self.dense_h(h))
            out.append(h)
        return torch.stack(out, 1)


def test_modules_that_nnx_copies_for_a_scan_are_named() -> None:
    right, wrong = (
        compare_models(Recurrent.__call__, perturbed_module(Recurrent(each)), TorchRecurrent(), TOKENS, level="function")
        for each in (jnp.tanh, jnp.sin)
    )
    assert right.passed, str(right)
    assert wrong.origin.flax.operation == "sin" and wrong.origin.flax.module == "rnn/cell", str(wrong)


def test_modules_of_equinox_are_named() -> None:
    equinox = pytest.importorskip("equinox")
    from tests.parity.comparison.equinox_model import make_model

    model = make_model(eps=1e-6)
    arrays, static = equinox.partition(model, equinox.is_array)

    def apply(params: Any, x: Any) -> Any:
        return jax.vmap(jax.vmap(equinox.combine(params, static)))(x)

    other = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
    layouts = ["norm/weight | width <-> 0.weight | width", "norm/bias | width <-> 0.bias | width"]
    layouts += ["head/weight | out in <-> 1.weight | out in", "head/bias | out <-> 1.bias | out"]
    report = compare_models(apply, arrays, other, TOKENS, layouts=layouts, level="function")
    assert report.origin is not None and report.origin.flax is not None and report.origin.torch is not None
    assert (report.origin.flax.module, report.origin.torch.module) == ("norm", "0")


class Positioned(linen.Module):
    """Tokens plus positions, which are repeated for each example, or minus."""

    is_minus: bool = False

    @linen.compact
    def __call__(self, x: Any) -> Any:
        rows = linen.Embed(5, 8, name="positions")(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
        return linen.Dense(8, name="fc")(x - rows if self.is_minus else x + rows)


class TorchPositioned(nn.Module):
    """The same positions, once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.fc = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.fc(x + self.positions(torch.arange(5)))


def test_positions_that_one_model_repeats_are_not_blamed() -> None:
    from tests.pairs_of_models import random_variables

    variables = random_variables(Positioned(), TOKENS)
    report = compare_models(Positioned(True).apply, variables, TorchPositioned(), TOKENS, level="function")
    assert not report.passed and report.origin.torch.operation == "add", str(report)
    assert report.origin.kind != "constant" and report.origin.torch.module == ""


class Prefixed(nn.Module):
    """Tokens after a class token and registers, or with these two in the other order; only the class token is read."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.cls, self.registers = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 2, 8))
        self.each, self.mix, self.head, self.is_right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3), is_right

    def forward(self, x: Any) -> Any:
        prefix = [each.expand(x.shape[0], -1, -1) for each in (self.cls, self.registers)]
        x = torch.cat([*(prefix if self.is_right else prefix[::-1]), x], 1)
        x = x + self.each(x).tanh()  # of all tokens on one axis
        x = x + self.mix(x.mean(1, keepdim=True)).tanh()
        return self.head(x[:, 0])


class FlaxPrefixed(linen.Module):
    """The same model."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        shapes = (("cls", (1, 1, 8)), ("registers", (1, 2, 8)))
        prefix = [self.param(name, linen.initializers.normal(1.0), shape) for name, shape in shapes]
        x = jnp.concatenate([*(jnp.broadcast_to(each, (x.shape[0], *each.shape[1:])) for each in prefix), x], 1)
        x = x + jnp.tanh(linen.Dense(8, name="each")(x))
        x = x + jnp.tanh(linen.Dense(8, name="mix")(x.mean(1, keepdims=True)))
        return linen.Dense(3, name="head")(x[:, 0])


def test_tokens_in_another_order_are_named_where_they_are_joined() -> None:
    from tests.pairs_of_models import random_variables

    variables = random_variables(FlaxPrefixed(), TOKENS)
    assert compare_models(FlaxPrefixed().apply, variables, Prefixed(True), TOKENS).passed
    report = compare_models(FlaxPrefixed().apply, variables, Prefixed(False), TOKENS, level="function")
    assert not report.passed and report.origin.torch.operation == "cat", str(report)
    assert report.origin.flax.operation == "concatenate"


def test_results_that_differ_in_their_order_alone_are_not_said_to_differ_by_a_rounding_error() -> None:
    origin = Origin(Place("", "concatenate"), Place("", "view"), "operation", 6.7e-16)
    assert str(origin).endswith("the same values enter, and the results are the same numbers in another order")
    assert str(replace(origin, difference=6.7e-12)).endswith("the results differ by 6.7e-12")


class Scores(nn.Module):
    """A softmax of scores with a bias, which is a table times one parameter for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.tensor([1.0, 0.3]))
        self.register_buffer("distances", torch.tensor(DISTANCES))

    def forward(self, x: Any) -> Any:
        q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key))
        scores = q @ k.mT - self.slopes[:, None, None] * self.distances
        return {"mean": scores.softmax(-1).square().mean(1), "best": scores.argmax(-1)}


DISTANCES = RNG.random((5, 5)).astype(np.float32)


def jax_scores(mistake: str) -> Any:
    """Return the same function in JAX, with a mistake."""

    def apply(params: Any, x: Any) -> Any:
        q, k = ((x @ params[name]["kernel"]).reshape(2, 5, 2, 4).swapaxes(1, 2) for name in ("query", "key"))
        q, k = (each + params[name]["bias"].reshape(2, 1, 4) for name, each in (("query", q), ("key", k)))
        distances = np.roll(DISTANCES, 1, 0) if mistake == "table" else DISTANCES
        scores = q @ k.swapaxes(2, 3) - params["slopes"][:, None, None] * distances
        if mistake == "transposed":
            scores = scores.swapaxes(2, 3)
        best = scores.argmin(-1) if mistake == "integers" else scores.argmax(-1)
        return {"mean": jnp.square(jax.nn.softmax(scores, -1)).mean(1), "best": best}

    return apply


def find_in_scores(mistake: str) -> Any:
    """Return the report of the scores with a mistake in JAX."""
    layer = {"kernel": np.zeros((8, 8), np.float32), "bias": np.zeros(8, np.float32)}
    params = {"query": layer, "key": layer, "slopes": np.zeros(2, np.float32)}
    return compare_models(jax_scores(mistake), params, Scores(), TOKENS, weights="torch", level="function")


def test_a_table_in_another_order_is_named_although_a_parameter_multiplies_it() -> None:
    assert find_in_scores("").passed
    assert find_in_scores("table").origin.kind == "constant"


def test_a_table_is_blamed_from_where_it_differs_and_not_where_equal_frequencies_are_computed_otherwise() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            frequencies = 1 / 100 ** (torch.arange(8, dtype=x.dtype) / 8)
            return self.fc(x) * (torch.arange(1, 6, dtype=x.dtype)[:, None] * frequencies).cos()

    def rotated(params: Any, x: Any) -> Any:
        frequencies = 100.0 ** -(jnp.arange(8) / 8)
        angles = (jnp.arange(1, 6) + 0.5)[:, None] * frequencies
        return (x @ params["fc"]["kernel"] + params["fc"]["bias"]) * jnp.cos(angles)

    params = {"fc": {"kernel": np.zeros((8, 8), np.float32), "bias": np.zeros(8, np.float32)}}
    origin = compare_models(rotated, params, Rotated(), TOKENS, weights="torch", level="function").origin
    assert origin is not None and origin.kind == "constant" and origin.flax is not None and origin.torch is not None
    assert (origin.flax.line, origin.torch.line) == (line_of("jnp.arange(1, 6) +"), line_of("torch.arange(1, 6, dtype"))


def test_scores_that_are_transposed_are_said_to_be() -> None:
    origin = find_in_scores("transposed").origin
    assert (origin.kind, origin.torch.operation) == ("operation", "_softmax")
    assert "the same numbers in another order of axes enter, and the results differ" in str(origin)


def test_the_origin_of_wrong_integers_is_the_operation_that_computes_them() -> None:
    origin = find_in_scores("integers").origin
    assert (origin.torch.operation, origin.flax.operation) == ("argmax", "argmin")
    assert str(origin).endswith("the same values enter, and the results differ")


def test_an_input_that_only_one_model_detaches_is_a_hint() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params["kernel"] + params["bias"]

    class Detached(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(torch.tensor(x.detach().numpy()))

    params = {"kernel": np.zeros((8, 3), np.float32), "bias": np.zeros(3, np.float32)}
    report = compare_models(apply, params, Detached(8, 3), TOKENS, weights="torch", level="function")
    assert report.hints == ("no gradient of torch reaches input 0: the model detaches it, or rounds it",)


def test_masked_entries_do_not_hide_that_the_others_differ() -> None:
    mask = np.array([True, False, False])

    class Masked(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return jnp.where(mask, -9e7, 1.00001 * linen.Dense(3, name="fc")(x))

    class TorchMasked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(x).masked_fill(torch.from_numpy(mask), -9e7)

    variables = Masked().init(jax.random.key(0), TOKENS)
    report = compare_models(Masked().apply, variables, TorchMasked(), TOKENS, level="function")
    assert report.origin is not None and report.origin.kind == "operation"
    assert 1e-6 < report.origin.difference < 1e-4, str(report.origin)


class TorchEnsemble(nn.Module):
    """The mean of three MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.fc2 = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        members = zip(self.fc1, self.fc2, strict=True)
        return sum(second(nn.functional.gelu(first(x))) for first, second in members) / 3


@pytest.mark.parametrize("mistake", ["", "gelu", "members"])
def test_an_ensemble_under_vmap_is_compared_member_by_member(mistake: str) -> None:
    def member(first: Any, second: Any, x: Any) -> Any:
        y = jax.nn.gelu(x @ first["kernel"] + first["bias"], approximate=mistake == "gelu")
        return y @ second["kernel"] + second["bias"]

    def apply(params: Any, x: Any) -> Any:
        second = jax.tree.map(lambda each: jnp.roll(each, 1, 0), params["fc2"]) if mistake == "members" else params["fc2"]
        return jax.vmap(member, (0, 0, None))(params["fc1"], second, x).mean(0)

    shapes = {"fc1": {"kernel": (3, 8, 16), "bias": (3, 16)}, "fc2": {"kernel": (3, 16, 4), "bias": (3, 4)}}
    params = {layer: {key: RNG.standard_normal(shape) for key, shape in each.items()} for layer, each in shapes.items()}
    report = compare_models(apply, params, TorchEnsemble(), TOKENS, level="function")
    assert report.passed == (not mistake)
    if mistake:
        assert report.origin is not None and report.origin.kind == "operation", str(report.origin)
        assert report.origin.torch is not None and report.origin.flax is not None
        expected = {"gelu": ("gelu", "integer_pow"), "members": ("mm", "dot_general")}
        assert (report.origin.torch.operation, report.origin.flax.operation) == expected[mistake]


class RmsNorm(nn.Module):
    """A norm without parameters."""

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class TorchScaledEmbedding(nn.Module):
    """Tokens times the root of their width, a norm in a branch, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head = RmsNorm(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = x * 8**0.5
        x = x + self.mix(self.norm(x))
        return self.head(x)


class ScaledEmbedding(linen.Module):
    """The same model, with the scale or without it."""

    is_scaled: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x * 8**0.5 if self.is_scaled else x
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
        return linen.Dense(3, name="head")(x + linen.Dense(8, name="mix")(y))


def test_a_missing_scale_is_named_although_the_sum_in_one_norm_is_the_mean_in_the_other() -> None:
    from tests.pairs_of_models import random_variables

    variables = random_variables(ScaledEmbedding(True), TOKENS)
    assert compare_models(ScaledEmbedding(True).apply, variables, TorchScaledEmbedding(), TOKENS).passed
    report = compare_models(ScaledEmbedding(False).apply, variables, TorchScaledEmbedding(), TOKENS, level="function")
    assert not report.passed and report.origin.torch.line == line_of("x = x * 8**0.5\n"), str(report)


class TorchGrouped(nn.Module):
    """Attention in which two queries share a key and a value, which are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x)))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Grouped(linen.Module):
    """The same attention by groups of queries, or one without a mask."""

    is_causal: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (linen.Dense(width, name=name)(x) for name, width in (("q", 8), ("k", 4), ("v", 4)))
        q, k, v = q.reshape(2, 5, 2, 2, 2), k.reshape(2, 5, 2, 2), v.reshape(2, 5, 2, 2)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) / 2**0.5
        scores = jnp.where(jnp.tri(5, dtype=bool), scores, -jnp.inf) if self.is_causal else scores
        return jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores, axis=-1), v).reshape(2, 5, 8)


def test_values_that_one_model_repeats_for_a_group_of_queries_are_not_blamed() -> None:
    from tests.pairs_of_models import random_variables

    variables = random_variables(Grouped(True), TOKENS)
    assert compare_models(Grouped(True).apply, variables, TorchGrouped(), TOKENS).passed
    report = compare_models(Grouped(False).apply, variables, TorchGrouped(), TOKENS, level="function")
    assert not report.passed and report.origin.torch.line == line_of("y = nn.functional.scaled_dot_product"), str(report)
