"""Models that compute parts in a fixed lower precision: float64 for the first check, as they are for the second one."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.trace.tables import _SMOOTH, _partners_by_entry, _partners_by_place, _roughness
from tests.pairs_of_models import random_variables

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((3, 4)).astype(np.float32)
TOKENS = RNG.standard_normal((2, 5, 8)).astype(np.float32)


class Linear(linen.Module):
    """One layer, and a function of its output."""

    after: Any = staticmethod(lambda y: y)
    dtype: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return self.after(linen.Dense(2, dtype=self.dtype)(x))


class TorchLinear(nn.Module):
    """The same layer, and a function of its output."""

    def __init__(self, after: Any = lambda y: y) -> None:
        super().__init__()
        self.fc, self.after = nn.Linear(4, 2), after

    def forward(self, x: Any) -> Any:
        return self.after(self.fc(x))


def compare(flax: Any = None, torch_model: Any = None, **options: Any) -> Any:
    """Return the report of one layer."""
    flax = flax or Linear()
    return compare_models(flax.apply, random_variables(flax, ROWS), torch_model or TorchLinear(), ROWS, **options)


def test_a_part_in_float32_is_named_and_the_function_is_compared_in_float64() -> None:
    def softmax(y: Any) -> Any:
        return jax.nn.softmax(y.astype(jnp.float32)).astype(y.dtype) * 0.1

    report = compare(Linear(softmax), TorchLinear(lambda y: y.softmax(-1) * 0.1))
    assert report.passed and max(row.difference for row in report.rows) < 1e-15
    [part] = report.fixed_parts
    assert (part.framework, part.dtype, part.operation) == ("flax", "float32", "convert_element_type")
    assert "in float64 for the first check: the model itself of flax in float32 (1 operation)" in str(report)


def test_numbers_of_a_part_in_float32_are_not_rounded() -> None:
    def gelu(y: Any) -> Any:
        return (0.3 * jax.nn.gelu(y.astype(jnp.float32), approximate=True) / np.sqrt(48)).astype(y.dtype)

    other = TorchLinear(lambda y: 0.3 * nn.functional.gelu(y, approximate="tanh") / 48**0.5)
    report = compare(Linear(gelu), other, level="function")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "cast",
    [
        lambda y: y.float(),
        lambda y: y.to(torch.float32),
        lambda y: y.type(torch.float32),
        lambda y: y.type(torch.FloatTensor),
        lambda y: y.type("torch.FloatTensor"),
    ],
    ids="abcde",
)
def test_a_part_in_float32_of_torch_is_named(cast: Any) -> None:
    report = compare(Linear(jax.nn.softmax), TorchLinear(lambda y: cast(y).softmax(-1).to(y.dtype)))
    assert report.passed
    assert [(part.framework, part.dtype) for part in report.fixed_parts] == [("torch", "float32")]
    assert report.fixed_parts[0].stack[0].file == __file__


FILLED = {
    "buffer": lambda filled: nn.Buffer(filled),
    "not persistent": lambda filled: nn.Buffer(filled, persistent=False),
    "frozen": lambda filled: nn.Parameter(filled, requires_grad=False),
    "attribute": lambda filled: filled,
}
NUMBERS = {
    "number": lambda: 0.1,
    "float64": lambda: jnp.full(2, 0.1),
    "float32": lambda: jnp.full(2, 0.1, jnp.float32),
    "stored": lambda: np.full(2, 0.1, np.float32),
    "stored number": lambda: np.float32(0.1),
}


@pytest.mark.parametrize(
    ("number", "filled", "weights"),
    [*((number, "buffer", "flax") for number in NUMBERS), *(("number", filled, "torch") for filled in FILLED)],
)
def test_a_constant_with_equal_entries_is_the_number_that_was_rounded(number: str, filled: str, weights: str) -> None:
    class Scaled(TorchLinear):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scale = FILLED[filled](torch.full((2,), value))

        def forward(self, x: Any) -> Any:
            return self.fc(x) * self.scale

    flax = Linear(lambda y: y * NUMBERS[number]())
    for value, is_same in ((0.1, True), (0.1000001, False)):
        report = compare(flax, Scaled(value), weights=weights, level="function")
        assert report.passed == is_same, str(report)


@pytest.mark.parametrize("scale", [lambda filled: filled, nnx.Param], ids=["array", "Param"])
def test_a_filled_array_of_an_nnx_module_is_a_constant_or_a_parameter(scale: Any) -> None:
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.fc, self.scale = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), scale(jnp.full((1, 2), 0.1))

        def __call__(self, x: Any) -> Any:
            return self.fc(x) * self.scale

    class TorchScaled(TorchLinear):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1, 2), 0.1)) if scale is nnx.Param else torch.full((2,), 0.1)

        def forward(self, x: Any) -> Any:
            return self.fc(x) * self.scale

    report = compare_models(Scaled.__call__, Scaled(), TorchScaled(), ROWS, level="function")
    assert report.passed, str(report)


@pytest.mark.parametrize("state", [lambda self: self.state, lambda self: self.state.data], ids=["tensor", "data"])
def test_a_state_in_a_plain_attribute_is_changed_in_place_in_float64(state: Any) -> None:
    def steps(y: Any) -> Any:
        rows, last = [], 0.0
        for row in y:
            rows.append(jnp.tanh(row + last))
            last = 0.7 * last + jax.lax.stop_gradient(rows[-1])
        return jnp.stack(rows)

    class Recurrent(TorchLinear):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(2)

        def forward(self, x: Any) -> Any:
            state(self).zero_()
            rows = []
            for row in self.fc(x):
                rows.append(torch.tanh(row + self.state))
                state(self).mul_(0.7).add_(rows[-1].detach())
            return torch.stack(rows)

    report = compare(Linear(steps), Recurrent())
    assert report.passed, str(report)


def test_a_wrong_formula_in_a_part_with_a_fixed_dtype_fails() -> None:
    def wrong(y: Any) -> Any:
        return jax.nn.softmax(y.astype(jnp.float32) * (1 + 1e-6)).astype(y.dtype)

    report = compare(Linear(wrong), TorchLinear(lambda y: y.softmax(-1)), level="function")
    assert not report.passed and 1e-8 < report.rows[0].difference < 1e-5


def test_a_model_in_float32_as_a_whole_is_compared() -> None:
    assert compare(Linear(dtype=jnp.float32), level="function").passed
    assert compare(torch_model=TorchLinear(lambda y: y.float()), level="function").passed


def test_a_part_in_bfloat16_fails_the_second_check() -> None:
    report = compare(Linear(lambda y: y.astype(jnp.bfloat16).astype(y.dtype)))
    assert all(row.same_function for row in report.rows) and not report.passed
    assert report.verdict.startswith("FAIL G1") and report.fixed_parts[0].dtype == "bfloat16"
    assert report.origin.kind == "precision" and report.origin.flax.operation == "convert_element_type"


@pytest.mark.parametrize(("bits", "name"), [((8, 10), "TF32"), ((8, 7), "bfloat16"), ((4, 3), "e4m3")])
def test_a_part_that_is_rounded_without_a_cast_fails_the_second_check(bits: tuple[int, int], name: str) -> None:
    report = compare(Linear(lambda y: jax.lax.reduce_precision(y, *bits)))
    assert report.verdict.startswith("FAIL G1") and [part.dtype for part in report.fixed_parts] == [name], str(report)
    assert report.origin.kind == "precision" and report.origin.flax.operation == "reduce_precision"


def test_a_rounding_to_float64_is_no_part_with_a_fixed_dtype() -> None:
    report = compare(Linear(lambda y: jax.lax.reduce_precision(y, 11, 52)), level="function")
    assert report.passed and not report.fixed_parts


def test_a_part_of_torch_in_bfloat16_is_the_origin_of_the_error() -> None:
    report = compare(torch_model=TorchLinear(lambda y: y.bfloat16().to(y.dtype) * 2), level="precision")
    assert not report.passed
    report = compare(Linear(lambda y: 2 * y), TorchLinear(lambda y: y.bfloat16().to(y.dtype) * 2))
    assert report.verdict.startswith("FAIL G1") and report.origin.flax is None
    assert report.origin.torch.file == __file__ and "the error is large after" in str(report)


def test_a_loss_that_rounds_more_is_the_origin_of_the_error_in_gradients() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any) -> Any:
            ctx.save_for_backward(y)
            return (y**2).mean()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            rounded = gradient.bfloat16() if gradient.dtype == torch.float32 else gradient
            return (0.3 * rounded).to(gradient.dtype) / 0.3 * 2 * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()

    report = compare(loss=(lambda y: (y**2).mean(), Square.apply))
    assert report.verdict.startswith("FAIL G1, the same precision: the errors of gradient in float32"), str(report)
    assert "the first large one in the backward pass is in the gradient in fc of torch" in str(report)
    assert any("compare the models without loss" in hint for hint in report.hints)
    assert compare().passed


class Attention(nnx.Module):
    """Attention with the softmax of jax.nn.dot_product_attention, which is always in float32."""

    def __init__(self) -> None:
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.attn(x)


def test_the_softmax_of_jax_nn_dot_product_attention_is_compared_in_float64() -> None:
    options: dict[str, Any] = {"batch_first": True}
    other = TorchAttention(options)
    report = compare_models(Attention.__call__, Attention(), other, TOKENS)
    assert report.passed and report.rows[0].difference < 1e-14
    assert {(part.framework, part.module) for part in report.fixed_parts} == {("flax", "attn")}


class TorchAttention(nn.Module):
    """The same attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Any) -> Any:
        return self.attn(x, x, x, need_weights=False)[0]


def table(tokens: int, width: int) -> Any:
    """Return sines of positions, in float64."""
    return np.sin(np.arange(1, tokens + 1)[:, None] / 10 ** np.arange(width))


class Positions(linen.Module):
    """A layer, and positions from a table in float32."""

    scale: float = 1.0

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8)(x + self.scale * jnp.asarray(table(5, 8).astype(np.float32)))


class TorchPositions(nn.Module):
    """The same layer, with a table in the dtype of its inputs."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        if buffer:
            self.register_buffer("table", torch.tensor(table(5, 8), dtype=torch.float32))

    def forward(self, x: Any) -> Any:
        rows = torch.arange(1, 6, dtype=x.dtype)[:, None] / 10 ** torch.arange(8, dtype=x.dtype)
        return self.fc(x + getattr(self, "table", rows.sin()))


@pytest.mark.parametrize("buffer", [False, True])
def test_a_table_that_is_rounded_to_float32_is_named(buffer: bool) -> None:
    flax = Positions()
    report = compare_models(flax.apply, random_variables(flax, TOKENS), TorchPositions(buffer), TOKENS)
    assert report.passed, str(report)
    assert [each.flax.shape for each in report.tables] == ([] if buffer else [(5, 8)])


def test_a_table_with_other_numbers_fails() -> None:
    flax = Positions(scale=1 + 3e-6)
    report = compare_models(flax.apply, random_variables(flax, TOKENS), TorchPositions(), TOKENS, level="function")
    assert not report.passed and report.origin is not None and report.origin.kind == "constant"


class Table(linen.Module):
    """A layer that adds a table."""

    table: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8)(x + self.table(x.dtype))


class TorchTable(nn.Module):
    """The same layer."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(8, 8), torch.tensor(table)

    def forward(self, x: Any) -> Any:
        return self.fc(x + self.table.to(x.dtype))


MANY_TOKENS = RNG.standard_normal((1, 200, 8)).astype(np.float32)
ANGLES = np.arange(200)[:, None] / 10000 ** (np.arange(8) / 8)  # those of a table of positions


def compare_tables(flax: Any, other: Any) -> Any:
    """Return the report of a layer of Flax that adds an array, which is float32, and one of PyTorch."""
    layer = Table(lambda dtype: jnp.asarray(flax.astype(np.float32)).astype(dtype))
    variables = random_variables(layer, MANY_TOKENS)
    return compare_models(layer.apply, variables, TorchTable(other), MANY_TOKENS, level="function")


def test_a_table_whose_angles_are_computed_in_float32_is_the_same_table() -> None:
    angles = np.arange(200, dtype=np.float32)[:, None] / np.float32(10000) ** (np.arange(8, dtype=np.float32) / 8)
    assert np.abs(np.sin(angles) - np.sin(ANGLES)).max() > 2e-6
    report = compare_tables(np.sin(angles), np.sin(ANGLES))
    assert report.passed and len(report.tables) == 1, str(report)


@pytest.mark.parametrize("columns", [[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]])
@pytest.mark.parametrize("is_doubled_in_flax", [True, False])
def test_a_table_of_angles_of_pairs_is_that_of_their_features(columns: list[int], is_doubled_in_flax: bool) -> None:
    """Rotary positions have one angle for two features, which some models store once and some twice."""

    def once(table: Any, x: Any) -> Any:
        pairs, table = ((4, 2), table[:, :, None]) if columns[0] == columns[1] else ((2, 4), table[:, None, :])
        return (x.reshape(*x.shape[:2], *pairs) + table).reshape(x.shape)

    exact = torch.sin(torch.tensor(ANGLES[:, :4]))
    of_float32 = np.sin(ANGLES[:, :4].astype(np.float32))
    adds = (lambda table, x: x + table[:, columns], once)
    layer = Table(lambda dtype: 0)
    variables = random_variables(layer, MANY_TOKENS)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.fc(once(exact, x) if is_doubled_in_flax else x + exact[:, columns])

    def apply(variables: Any, x: Any) -> Any:
        return layer.apply(variables, adds[0 if is_doubled_in_flax else 1](of_float32, x))

    report = compare_models(apply, variables, Model(), MANY_TOKENS, level="function")
    assert report.passed and len(report.tables) == 1, str(report)


@pytest.mark.parametrize(
    "wrong", [np.sin(ANGLES) * (1 + 2e-6), np.sin(ANGLES * (1 + 2e-6)), np.cos(ANGLES), np.sin(ANGLES[::-1])]
)
def test_a_table_of_positions_with_other_numbers_fails(wrong: Any) -> None:
    assert not compare_tables(wrong, np.sin(ANGLES)).passed


@pytest.mark.parametrize("partners", [_partners_by_place, _partners_by_entry])
@pytest.mark.parametrize("base", [10000, 500000])
def test_frequencies_differ_by_rounding_relative_to_each(base: float, partners: Any) -> None:
    steps = np.arange(32) / 32
    right = [np.float32(base) ** -np.float32(steps), np.exp(np.float32(steps) * -np.log(base, dtype=np.float32))]
    for frequencies, is_same in ((right[0], True), (right[1], True), ((base * (1 + 1e-5)) ** -steps, False)):
        assert bool(list(partners(frequencies.astype(np.float64), [base**-steps]))) == is_same


@pytest.mark.parametrize(("base", "is_same"), [(10000.01, True), (10000.1, False)])
def test_a_base_is_known_to_the_rounding_of_its_frequencies(base: float, is_same: bool) -> None:
    other = np.arange(200)[:, None] / base ** (np.arange(8) / 8)
    assert compare_tables(np.sin(other), np.sin(ANGLES)).passed == is_same


def wide_table(base: float, *positions: Any) -> Any:
    """Return sines and cosines of each list of positions at 384 frequencies, side by side, as a ViT-B has them."""
    angles = [np.asarray(each)[:, None] / base ** (np.arange(384) / 384) for each in positions]
    return np.concatenate([part for each in angles for part in (np.sin(each), np.cos(each))], axis=1)


# The positions of tokens, and a base that is not 10000 to the rounding of its frequencies.
GRIDS: dict[str, tuple[Any, float]] = {
    "50 tokens": ([np.arange(50)], 10000.1),
    "5 tokens": ([np.arange(5)], 10000.3),
    "7x7 tokens": (np.divmod(np.arange(49), 7), 10001.0),
}


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_columns_of_a_table_are_no_positions(grid: str, is_same: bool) -> None:
    """Column 700 is no position, whose angle would have been rounded 700 times as much."""
    positions, other_base = GRIDS[grid]
    table, other = wide_table(10000.0, *positions), wide_table(other_base, *positions)
    if is_same:  # as if computed in float32
        other = table * (1 + 4 * 2.0**-24 * RNG.uniform(-1, 1, other.shape))
    for a, b in ((table, other), (table.T.copy(), other.T.copy())):
        assert bool(list(_partners_by_place(a, [b]))) == is_same


LAYOUTS: dict[str, Any] = {
    "5 tokens": [np.arange(5)],
    "2048 tokens": [np.arange(2048)],
    "3x3 tokens": np.divmod(np.arange(9), 3),
    "4x6 tokens": np.divmod(np.arange(24), 6),
    "14x14 tokens": np.divmod(np.arange(196), 14),
}


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_axis_of_positions_is_smooth_and_that_of_frequencies_is_not(layout: str, prefix: int) -> None:
    """In float32, in which the angles are computed too, with and without a class token before the positions."""
    frequencies = np.float32(10000) ** -(np.arange(256, dtype=np.float32) / np.float32(256))
    angles = [np.asarray(each, np.float32)[:, None] * frequencies for each in LAYOUTS[layout]]
    table = np.concatenate([part for each in angles for part in (np.sin(each), np.cos(each))], axis=1)
    table = np.concatenate([np.zeros((prefix, table.shape[1])), table])
    assert _roughness(table, 0) <= _SMOOTH / 5 and _roughness(table, 1) >= 4 * _SMOOTH


def test_biases_beside_a_mask_are_compared_as_closely_as_without_it() -> None:
    mask = np.where(np.arange(8) < np.arange(200)[:, None], 0.0, -1e9)
    slopes = np.arange(200)[:, None] * 0.125 ** np.arange(1, 9)
    assert compare_tables(mask - slopes, mask - slopes).passed
    assert not compare_tables(mask - slopes * 1.00001, mask - slopes).passed


def test_a_number_that_flax_rounds_to_float32_is_the_number_of_torch() -> None:
    flax = Linear(lambda y: y * jnp.array(1.442695041, jnp.float32).astype(y.dtype))
    report = compare_models(flax.apply, random_variables(flax, ROWS), TorchLinear(lambda y: y * 1.442695041), ROWS)
    assert report.passed and "the number 1.442695041 of torch, which flax has in float32" in str(report)
    other = TorchLinear(lambda y: y * 1.4426951)
    assert not compare_models(flax.apply, random_variables(flax, ROWS), other, ROWS, level="function").passed


class TorchNormed(TorchLinear):
    """The layer after an RMS norm, by default with PyTorch's default epsilon."""

    def __init__(self, eps: Any = None) -> None:
        super().__init__()
        self.norm, self.eps = nn.RMSNorm(4), eps

    def forward(self, x: Any) -> Any:
        if self.eps is None:
            return self.fc(self.norm(x))
        return self.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps(x.dtype)) * self.norm.weight)


def compare_norms(flax_eps: Any, torch_eps: Any = None, scale: float = 1.0) -> Any:
    """Return the report of an RMS norm; each epsilon is a function of the dtype, or None for PyTorch's default."""

    def apply(params: Any, x: Any) -> Any:
        y = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + flax_eps(x.dtype)) * params["norm"]["scale"]
        return y @ params["fc"]["kernel"] + params["fc"]["bias"]

    rng = np.random.default_rng(1)
    shapes = {"norm": {"scale": (4,)}, "fc": {"kernel": (4, 2), "bias": (2,)}}
    params = jax.tree.map(lambda shape: rng.random(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return compare_models(apply, params, TorchNormed(torch_eps), scale * ROWS)


NORMS: dict[str, Any] = {
    "that of the dtype": (lambda dtype: jnp.finfo(dtype).eps,),
    "that of float32": (lambda _: np.finfo(np.float32).eps,),
    "that of float32 for that of the dtype": (lambda _: np.finfo(np.float32).eps, lambda dtype: torch.finfo(dtype).eps),
}
WRONG_NORMS: dict[str, Any] = {
    "another": (lambda _: 1e-6,),
    "that of float64": (lambda _: np.finfo(np.float64).eps,),
    "that of the dtype for another": (lambda dtype: jnp.finfo(dtype).eps, lambda _: 1e-6),
    "that of float64 for that of the dtype": (lambda _: np.finfo(np.float32).eps, lambda _: np.finfo(np.float64).eps),
}


@pytest.mark.parametrize("norms", NORMS)
def test_an_epsilon_of_the_dtype_is_that_of_float32(norms: str) -> None:
    report = compare_norms(*NORMS[norms])
    assert report.passed, str(report)


def test_an_epsilon_of_the_dtype_is_named() -> None:
    report = compare_norms(*NORMS["that of the dtype"])
    assert "the same for the first check: the epsilon of the dtype, for which torch has that of float32, 1.2e-07" in str(
        report
    )


def test_an_epsilon_of_the_dtype_counts_as_that_of_float32_for_small_numbers() -> None:
    """Their outputs differ by a tenth between the two epsilons."""
    assert compare_norms(*NORMS["that of the dtype"], scale=1e-3).passed


@pytest.mark.parametrize("norms", WRONG_NORMS)
def test_another_epsilon_fails(norms: str) -> None:
    report = compare_norms(*WRONG_NORMS[norms])
    assert not report.passed and not report.tables, str(report)


class Sliced(linen.Module):
    """A layer that runs without 64-bit types only: it mixes integers of fixed and of default types."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = 0.1 * linen.Dense(2)(x)
        return jax.lax.dynamic_update_slice(y, y[:1] / 7, (jnp.int32(1), jnp.arange(3)[0]))


class TorchSliced(TorchLinear):
    """The same layer."""

    def forward(self, x: Any) -> Any:
        y = 0.1 * self.fc(x)
        return torch.cat([y[:1], y[:1] / 7, y[2:]])


def test_a_model_that_runs_without_64_bit_types_only_is_compared_in_float64() -> None:
    report = compare(Sliced(), TorchSliced())
    assert report.passed and report.rows[0].difference < 1e-15, str(report)
    assert report.fixed_parts[0].operation == "trace"


class Embedded(linen.Module):
    """An embedding whose gradient is added up in float32."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        table = self.param("table", linen.initializers.normal(), (4, 3)).astype(jnp.float32)
        return table[jnp.array([0, 1, 1, 3, 1])] * x[:1, :3]


class TorchEmbedded(nn.Module):
    """The same embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: Any) -> Any:
        return self.table[torch.tensor([0, 1, 1, 3, 1])] * x[:1, :3]


class Rooted(nn.Module):
    """A layer with a number that is a buffer in float32."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("root", torch.tensor(number), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.fc(x) * self.root


def test_a_number_in_a_buffer_that_is_rounded_to_float32_is_the_number_itself() -> None:
    flax = Linear(lambda y: y * jnp.sqrt(jnp.asarray(32, y.dtype)))
    report = compare_models(flax.apply, random_variables(flax, ROWS), Rooted(32**0.5), ROWS)
    assert report.passed and "in float64 for the first check: the model itself of torch in float32 (1 operation)" in str(
        report
    )
    assert not compare_models(flax.apply, random_variables(flax, ROWS), Rooted(32.0001**0.5), ROWS).passed


def test_the_gradient_of_an_exact_gelu_in_float32_is_compared_in_float64() -> None:
    flax = Linear(lambda y: jax.nn.gelu(y, approximate=False), dtype=jnp.float32)
    report = compare_models(flax.apply, random_variables(flax, ROWS), TorchLinear(nn.functional.gelu), ROWS)
    assert report.passed, str(report)


def test_gradients_that_are_added_up_in_float32_are_compared_in_float64() -> None:
    report = compare(Embedded(), TorchEmbedded())
    assert report.passed and max(row.difference for row in report.rows) < 1e-15, str(report)


@pytest.mark.parametrize("name", ["hard_sigmoid", "hard_swish"])
def test_gradients_that_pytorch_computes_with_a_constant_in_float32_are_compared_in_float64(name: str) -> None:
    report = compare(Linear(getattr(jax.nn, name)), TorchLinear(getattr(nn.functional, name.replace("_", ""))))
    assert report.passed and max(row.difference for row in report.rows) < 1e-14, str(report)
    assert report.fixed_parts[0].operation == f"{name.replace('_', '')}_backward"
