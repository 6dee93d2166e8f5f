"""Differences that values alone can hide: complex numbers, masks, NaN, names, rates of dropout, tables, fresh weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.random_masks import MaskStream
from tests.pairs_of_models import perturbed_module
from vit_spec import InputError

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((3, 4)).astype(np.float32)
KERNEL = RNG.standard_normal((4, 6)).astype(np.float32)


def same(y: Any) -> Any:
    """Return the argument."""
    return y


class Product(nn.Module):
    """A matrix product, with a function of its result, and other tensors that the module keeps."""

    def __init__(self, after: Callable[..., Any] = same, **buffers: Any) -> None:
        super().__init__()
        self.kernel, self.after = nn.Parameter(torch.tensor(KERNEL)), after
        for name, array in buffers.items():
            self.register_buffer(name, torch.tensor(array))

    def forward(self, x: Any, *others: Any) -> Any:
        return self.after(x @ self.kernel, *self.buffers(), *others)


def compare(flax: Callable[..., Any], other: Callable[..., Any] | nn.Module, inputs: Any = ROWS, **options: Any) -> Any:
    """Return the report of a matrix product with a function of its result in each framework."""
    module = other if isinstance(other, nn.Module) else Product(other)
    options.setdefault("level", "function")

    def apply(params: Any, x: Any, *others: Any) -> Any:
        return flax(x @ params["kernel"], *others)

    return compare_models(apply, {"kernel": KERNEL}, module, inputs, **options)


# Complex numbers ------------------------------------------------------------------------------------------------------


def test_both_parts_of_a_complex_output_are_compared() -> None:
    report = compare(lambda y: y * (1 + 2j), lambda y: y * (1 + 2j), level="precision")
    assert report.passed and {"output.real", "output.imag"} <= {row.name for row in report.rows}
    report = compare(lambda y: y * (1 + 2j), lambda y: y * (1 - 2j))
    assert [row.name for row in report.rows if row.name.startswith("output") and not row.same_function] == ["output.imag"]


def test_conjugates_that_pytorch_computes_lazily_are_compared() -> None:
    lazy = torch.tensor([[1 + 2j]] * 3).conj()
    inputs = (ROWS, torch.tensor(ROWS * 2j).conj().imag)
    assert compare(lambda y, z: (y * 2j).conj() + z[:, :1], lambda y, z: (y * 2j).conj() + z[:, :1], inputs).passed
    other = Product(lambda y, z: ((y * 2j).conj() * z).conj().imag)
    other.register_buffer("lazy", lazy)
    report = compare(lambda y: ((y * 2j).conj() * (1 - 2j)).conj().imag * 2, other)
    assert report.first.name == "output" and "mul" in str(report.origin)


PHASES = np.exp(1j * RNG.standard_normal((3, 6))).astype(np.complex64)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_complex_inputs_and_buffers_keep_their_imaginary_part(is_buffer: bool) -> None:
    def check(flax_phases: Any) -> bool:
        def rotate(y: Any, phases: Any) -> Any:
            return (y * phases).real + 2 * (y * phases).imag

        if is_buffer:
            right = Product(rotate, phases=PHASES)
            return bool(compare(lambda y: rotate(y, jnp.asarray(flax_phases)), right, level="precision").passed)
        conjugate = jnp.conj if flax_phases is not PHASES else same
        return bool(compare(lambda y, z: rotate(y, conjugate(z)), rotate, (ROWS, PHASES), level="precision").passed)

    assert check(PHASES) and not check(PHASES.conj())


def test_a_complex_parameter_is_refused() -> None:
    module = Product()
    module.phase = nn.Parameter(torch.tensor(PHASES))
    with pytest.raises(InputError, match="phase of torch is a complex parameter"):
        compare(same, module)


TOKENS, WIDTH = 12, 8
POSITIONS = np.arange(TOKENS, dtype=np.float32)
SQUARE = (RNG.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32)


class Rotary(nn.Module):
    """A square matrix and rotary positions by complex numbers, which are no buffer: `Module.to` does not convert them."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 1 / 10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
        angles = torch.outer(torch.tensor(POSITIONS), frequencies)
        self.rotation = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Any) -> Any:
        pairs = torch.view_as_complex(self.wq(x).float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotation).flatten(-2).type_as(x)


def rotary(base: float, is_complex: bool) -> Callable[..., Any]:
    """Return the same function in JAX, with a table of complex numbers or with sines and cosines."""
    angles = np.outer(np.arange(TOKENS), 1 / base ** (np.arange(0, WIDTH, 2) / WIDTH))

    def apply(params: Any, x: Any) -> Any:
        y = x @ params["wq"]
        a, b = y[..., 0::2], y[..., 1::2]
        if is_complex:
            z = jax.lax.complex(a, b) * jnp.asarray(np.exp(1j * angles).astype(np.complex64))
            return jnp.stack([z.real, z.imag], -1).reshape(y.shape).astype(y.dtype)
        cos, sin = (jnp.asarray(each.astype(np.float32)) for each in (np.cos(angles), np.sin(angles)))
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(y.shape)

    return apply


@pytest.mark.parametrize("is_complex", [False, True])
def test_complex_rotations_in_float32_are_the_table_of_the_other_model(is_complex: bool) -> None:
    x = RNG.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    report = compare_models(rotary(1e4, is_complex), {"wq": SQUARE}, Rotary(), x)
    assert report.passed and "the same for the first check: a constant" in str(report), str(report)
    wrong = compare_models(rotary(10001.0, is_complex), {"wq": SQUARE}, Rotary(), x, level="function")
    # The class gives the order of axes of the square matrix although the models differ, so that the product is not blamed.
    assert not wrong.passed and "wq | in out  <->  wq.weight | out in    (by convention: square: transposed)" in str(wrong)


# Outputs --------------------------------------------------------------------------------------------------------------

HIDDEN = np.arange(6) < 3


@pytest.mark.parametrize("masked", [-1e9, -1e18, float(np.finfo(np.float32).min), -np.inf])
def test_masked_entries_do_not_hide_the_others(masked: float) -> None:
    def flax(y: Any) -> Any:
        return jnp.where(HIDDEN, masked, y)

    report = compare(flax, lambda y: torch.where(torch.tensor(HIDDEN), masked, y))
    assert report.passed, str(report)
    assert not compare(flax, lambda y: torch.where(torch.tensor(HIDDEN), masked, y * 1.000001)).passed
    assert not compare(flax, lambda y: torch.where(torch.tensor(HIDDEN), masked * 1.001, y)).passed or masked == -np.inf


@pytest.mark.parametrize("large", [1e5, 1e7])
def test_large_entries_do_not_hide_the_others(large: float) -> None:
    def torch_scaled(of_others: float) -> Callable[..., Any]:
        return lambda y: torch.where(torch.tensor(HIDDEN), y * large, y * of_others)

    def flax(y: Any) -> Any:
        return jnp.where(HIDDEN, y * large, y)

    assert compare(flax, torch_scaled(1.0)).passed
    wrong = compare(flax, torch_scaled(1 + 1e-6))
    assert wrong.first.name == "output" and wrong.first.difference == pytest.approx(1e-6, rel=0.01)
    # What is left of a difference of large numbers has rounding errors of their size.
    assert compare(lambda y: jnp.where(HIDDEN, y * large, (y * large + y) - y * large), torch_scaled(1.0)).passed


def test_a_gradient_that_is_nan_in_both_models_is_refused() -> None:
    message = "gradient of kernel is NaN in both models.*give a loss that has a gradient"
    with pytest.raises(InputError, match=message):
        compare(lambda y: jnp.sqrt(y - y), lambda y: (y - y).sqrt())


def test_an_output_whose_name_has_a_mistake_is_refused() -> None:
    message = "flax returns output.logits, output.poled and torch output.logits, output.pooled.*as in 'poled <-> pooled'"
    with pytest.raises(InputError, match=message):
        compare(lambda y: {"logits": y, "poled": y + 1}, lambda y: {"logits": y, "pooled": y})


def test_a_number_among_the_outputs_is_left_out_and_named() -> None:
    report = compare(lambda y: (y, 3), lambda y: (y, 3))
    assert report.skipped_outputs["output.1 of torch"] == "an int, which is no array"


def test_an_output_in_half_precision_fails_the_second_check() -> None:
    report = compare(lambda y: y.astype(jnp.float16), lambda y: y.half(), level="precision")
    assert str(report).startswith("FAIL G1")


def test_outputs_without_gradients_are_a_hint() -> None:
    report = compare(same, lambda y: y.detach())
    assert not report.passed and "hint: the outputs of torch have no gradient" in str(report)


# Training -------------------------------------------------------------------------------------------------------------


def test_a_dropout_that_one_model_lacks_fails() -> None:
    def flax(y: Any) -> Any:
        return linen.Dropout(1e-9, deterministic=False).apply({}, y, rngs={"dropout": jax.random.key(0)})

    report = compare(flax, same, train=True)
    assert "number of dropouts" in {row.name for row in report.rows if not row.same_function}
    report = compare(same, lambda y: nn.functional.dropout(y, 1e-9), train=True)
    assert "number of dropouts" in {row.name for row in report.rows if not row.same_function}
    assert "hint: flax calls dropout 0 times and torch 1 times" in str(report)


class Dropped(nnx.Module):
    """A layer with the dropout of NNX."""

    def __init__(self, rate: float) -> None:
        rngs = nnx.Rngs(0)
        self.fc, self.dropout = nnx.Linear(4, 6, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.fc(x))


@pytest.mark.parametrize("rate", [0.5, 0.4])
def test_the_dropout_of_nnx_has_the_same_masks(rate: float) -> None:
    flax = perturbed_module(Dropped(rate))
    flax.train()
    report = compare_models(Dropped.__call__, flax, nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), ROWS, train=True)
    assert report.passed == (rate == 0.5), str(report)
    assert 0 < (report.runs["torch float64"]["output"] == 0).mean() < 1


class DroppedRows(nnx.Module):
    """A layer with a dropout, and the axes along which all entries are dropped together."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        rngs = nnx.Rngs(0)
        self.fc, self.dropout = nnx.Linear(4, 6, rngs=rngs), nnx.Dropout(0.5, broadcast_dims=axes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.fc(x))


class TorchDroppedRows(nn.Module):
    """The same layer; `nn.Dropout1d` drops all entries along the last axis together."""

    def __init__(self, whole_rows: bool) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(4, 6), nn.Dropout1d() if whole_rows else nn.Dropout()

    def forward(self, x: Any) -> Any:
        return self.dropout(self.fc(x))


@pytest.mark.parametrize(
    ("axes", "whole_rows", "hint"),
    [
        ((2,), True, ""),
        ((1,), False, "flax drops all entries along axis 1 together, and torch each entry by itself"),
        ((), True, "torch drops all entries along axis 2 together, and flax each entry by itself"),
    ],
)
def test_a_dropout_of_whole_rows_in_one_model_fails_and_is_named(axes: Any, whole_rows: bool, hint: str) -> None:
    flax = perturbed_module(DroppedRows(axes))
    flax.train()
    x = np.random.default_rng(1).standard_normal((2, 5, 4)).astype(np.float32)
    report = compare_models(DroppedRows.__call__, flax, TorchDroppedRows(whole_rows), x, train=True)
    assert report.passed == (not hint), str(report)
    if hint:
        assert f"hint: dropout 0: {hint}: their masks have shapes (2, " in str(report)
        assert "entries of dropout 0" in {row.name for row in report.rows if not row.same_function}


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [("dropout1d", (5, 4), (1,)), ("dropout1d", (2, 5, 4), (2,)), ("dropout3d", (5, 2, 3, 4), (1, 2, 3))],
)
def test_a_dropout_of_channels_drops_those_of_inputs_without_a_batch(name: str, shape: Any, axes: Any) -> None:
    def flax(y: Any) -> Any:
        return linen.Dropout(0.5, axes, deterministic=False).apply({}, y, rngs={"dropout": jax.random.key(0)})

    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    report = compare(flax, getattr(nn.functional, name), x, train=True)
    assert report.passed, str(report)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_dropout_that_keeps_all_or_nothing_needs_no_mask(rate: float) -> None:
    def flax(y: Any) -> Any:
        z = linen.Dropout(0.5, deterministic=False).apply({}, y, rngs={"dropout": jax.random.key(1)})
        return z + linen.Dropout(rate, deterministic=False).apply({}, y, rngs={"dropout": jax.random.key(0)})

    def other(y: Any) -> Any:
        return nn.functional.dropout(y) + nn.functional.dropout(y, rate)

    assert compare(flax, other, train=True).passed

    def flax_path(y: Any) -> Any:
        return y * jax.random.bernoulli(jax.random.key(0), rate, (3, 1))

    assert compare(flax_path, lambda y: y * rate, train=True).passed


def test_a_mask_with_several_rates_is_refused() -> None:
    with pytest.raises(InputError, match=r"^flax calls jax\.random\.bernoulli with 6 rates"):
        compare(lambda y: y * jax.random.bernoulli(jax.random.key(0), np.full(6, 0.5), y.shape), same, train=True)


def _drop_path_by_rand(y: Any) -> Any:
    return y * torch.floor(0.7 + torch.rand(len(y), 1)) / 0.7


class Recurrent(nn.Module):
    """A GRU of two layers with dropout between them."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, 2, dropout=rate)

    def forward(self, x: Any) -> Any:
        return self.gru(x)[0]


class Attending(nn.Module):
    """Attention with dropout of its weights."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, dropout=rate)

    def forward(self, x: Any) -> Any:
        return self.attn(x, x, x)[0]


RANDOM = {
    "rand": Product(_drop_path_by_rand),
    "rand_like": Product(lambda y: y * (torch.rand_like(y) < 0.7)),
    "randn_like": Product(lambda y: y + torch.randn_like(y)),
    "uniform_": Product(lambda y: y + torch.empty_like(y).uniform_()),
    "rrelu": Product(lambda y: nn.functional.rrelu(y, training=True)),
    "alpha_dropout": Product(lambda y: nn.functional.alpha_dropout(y, 0.1, training=True)),
    "gru": Recurrent(0.1),
    "multi_head_attention_forward": Attending(0.1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_torch_that_are_no_masks_are_refused_in_training(name: str) -> None:
    with pytest.raises(InputError, match=f"^torch calls {name}, whose .*: with train=True use nn.Dropout or"):
        compare(same, RANDOM[name], train=True)


@pytest.mark.parametrize("module", [Recurrent(0.0), Attending(0.0), Product(nn.AlphaDropout(0.0))])
def test_functions_that_draw_no_random_numbers_run_in_training(module: nn.Module) -> None:
    module.train()
    masks = MaskStream(0)
    with masks.in_torch():
        module(torch.tensor(ROWS))
    assert masks.calls["torch"] == []


class Layer(linen.Module):
    """A layer with dropout, for a scan."""

    rate: float

    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return linen.Dropout(self.rate, deterministic=False)(linen.Dense(4)(x)), None


class Layers(nn.Module):
    """Three layers with dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.ModuleDict({"Dense_0": nn.Linear(4, 4)}) for _ in range(3)), rate

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = nn.functional.dropout(layer["Dense_0"](x), self.rate)
        return x


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_dropout_in_a_scan_of_linen_is_refused(rate: float) -> None:
    over_layers = linen.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
    flax = over_layers(rate, name="layers")
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.tree.map(lambda leaf: leaf + RNG.standard_normal(leaf.shape) / 9, flax.init(keys, ROWS, None))
    variables = {"params": {"layers": variables["params"]}}

    def apply(variables: Any, x: Any) -> Any:
        return flax.apply({"params": variables["params"]["layers"]}, x, None, rngs={"dropout": keys["dropout"]})[0]

    if rate:
        with pytest.raises(InputError, match=r"^a dropout of flax is in a scan .*: with train=True loop in Python"):
            compare_models(apply, variables, Layers(rate), ROWS, train=True)
    else:
        assert compare_models(apply, variables, Layers(rate), ROWS, train=True).passed


LOOPS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "scan": lambda f, y: jax.lax.scan(lambda y, _: (f(y), None), y, length=2)[0],
    "map": lambda f, y: jax.lax.map(f, y),
    "fori_loop": lambda f, y: jax.lax.fori_loop(0, 2, lambda n, y: f(y), y),
    "while_loop": lambda f, y: jax.lax.while_loop(lambda y: (y > 0).all(), f, y),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dropout_in_a_loop_of_jax_is_refused(loop: str) -> None:
    def drop(y: Any) -> Any:
        return linen.Dropout(0.1, deterministic=False).apply({}, y, rngs={"dropout": jax.random.key(0)})

    with pytest.raises(InputError, match=r"^a dropout of flax is in a scan or another loop of JAX"):
        compare(lambda y: LOOPS[loop](drop, drop(y)), lambda y: y, train=True)


class Normalized(nnx.Module):
    """A batch norm."""

    def __init__(self, momentum: float) -> None:
        self.bn = nnx.BatchNorm(4, momentum=momentum, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.bn(x)


class TorchNormalized(nn.Module):
    """A batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        return self.bn(x)


@pytest.mark.parametrize(("momentum", "wrong"), [(0.9, set()), (0.99, {"mean", "var"})])
def test_running_statistics_that_an_nnx_module_updates_are_compared(momentum: float, wrong: set[str]) -> None:
    flax = perturbed_module(Normalized(momentum))
    flax.train()
    rows = RNG.standard_normal((1000, 4)).astype(np.float32)
    report = compare_models(Normalized.__call__, flax, TorchNormalized(), rows, train=True, level="function")
    assert {row.name.rpartition("_")[2] for row in report.rows if not row.same_function} == wrong, str(report)
    assert report.passed == (not wrong)
    assert ("note: PyTorch divides the running variance of bn.running_var by n - 1" in str(report)) == report.passed
    assert {"statistics bn.running_mean", "statistics bn.running_var"} <= {row.name for row in report.rows}


def test_running_statistics_that_an_nnx_module_does_not_update_are_a_note() -> None:
    flax = perturbed_module(Normalized(0.9))
    flax.eval()
    report = compare_models(Normalized.__call__, flax, TorchNormalized(), ROWS, train=True, level="function")
    what = "bn.running_mean, bn.running_var of torch, which are not compared"
    assert f"flax does not update {what}: call model.train(), or give use_running_average=False" in report.notes


class Centred(nn.Module):
    """A matrix product less its moving average, which is a buffer unless it has no name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kernel, self.name = nn.Parameter(torch.tensor(KERNEL)), name
        self.register_buffer(name, torch.ones(6))

    def forward(self, x: Any) -> Any:
        y, center = x @ self.kernel, getattr(self, self.name)
        returned = y - center
        if self.training:
            center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return returned


class FlaxCentred(nnx.Module):
    """The same model with a decay."""

    def __init__(self, decay: float) -> None:
        self.kernel, self.center, self.decay = nnx.Param(jnp.array(KERNEL)), nnx.BatchStat(jnp.ones(6)), decay

    def __call__(self, x: Any) -> Any:
        y, center = x @ self.kernel[...], self.center[...]
        self.center[...] = self.decay * center + (1 - self.decay) * jax.lax.stop_gradient(y).mean(0)
        return y - center


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.0])
def test_moving_averages_that_an_nnx_module_updates_are_compared(decay: float) -> None:
    report = compare_models(FlaxCentred.__call__, FlaxCentred(decay), Centred("center"), ROWS, train=True)
    wrong = {row.name for row in report.rows if not row.same_function}
    assert wrong == ({"statistics center"} if decay != 0.9 else set()), str(report)


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_moving_averages_that_linen_returns_are_compared(decay: float) -> None:
    params = {"params": {"kernel": KERNEL}, "ema": {"center": np.ones(6, np.float32)}}

    def apply(v: Any, x: Any) -> Any:
        y, center = x @ v["params"]["kernel"], v["ema"]["center"]
        return y - center, {"ema": {"center": decay * center + (1 - decay) * jax.lax.stop_gradient(y).mean(0)}}

    options: Any = {"train": True, "outputs": "output.0 <-> output"}
    report = compare_models(apply, params, Centred("center"), ROWS, **options)
    assert report.passed == (decay == 0.9) and "statistics center" in {row.name for row in report.rows}, str(report)
    assert not any("which flax updates" in note for note in report.notes)
    report = compare_models(lambda v, x: apply(v, x)[0], params, Centred("center"), ROWS, train=True)
    assert "flax does not return center of torch, which are not compared: use mutable=['ema']" in report.notes


def test_buffers_that_one_model_alone_updates_are_a_note() -> None:
    report = compare(lambda y: y - 1, Centred("other"), train=True)
    assert report.passed
    note = "flax has no counterpart of other, which torch updates in training: the updates are not compared"
    assert note in report.notes
    assert note not in compare(lambda y: y - 1, Centred("other")).notes

    params = {"params": {"kernel": KERNEL}, "ema": {"count": np.ones(6, np.float32)}}
    report = compare_models(
        lambda v, x: (x @ v["params"]["kernel"], {"ema": {"count": 2 * v["ema"]["count"]}}),
        params,
        Product(),
        ROWS,
        train=True,
        outputs="output.0 <-> output",
    )
    [note] = report.notes
    assert note == "torch updates no counterpart of ema/count, which flax updates: the updates are not compared"


# What a comparison cannot show ----------------------------------------------------------------------------------------


def test_two_masks_of_one_key_are_a_note() -> None:
    def flax(y: Any) -> Any:
        key = jax.random.key(0)
        for _ in range(2):
            y = linen.Dropout(0.5, deterministic=False).apply({}, y, rng=key)
        return y

    def other(y: Any) -> Any:
        return nn.functional.dropout(nn.functional.dropout(y))

    report = compare(flax, other, train=True)
    assert report.passed and "note: dropout 1 of flax has the key of dropout 0" in str(report)


def test_statistics_that_flax_does_not_return_are_a_note() -> None:
    class Normalized(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.BatchNorm(use_running_average=False, epsilon=1e-5, use_fast_variance=False)(x)

    flax = Normalized()
    variables = jax.tree.map(lambda leaf: leaf + 0.5, flax.init(jax.random.key(0), ROWS))
    module = nn.Sequential(nn.BatchNorm1d(4))
    report = compare_models(
        lambda v, x: flax.apply(v, x, mutable=["batch_stats"])[0], variables, module, ROWS, train=True, level="function"
    )
    assert "note: flax does not return 0.running_mean, 0.running_var of torch" in str(report)


def test_fresh_weights_and_constant_inputs_are_a_note() -> None:
    ones = np.ones((3, 6), np.float32)
    report = compare(lambda y, mask: y, lambda y, mask: y * mask, (ROWS, ones), outputs=["output"])
    assert "note: all entries of input 1 are 1.0: a model that ignores it would pass" in str(report)
    module = Product(lambda y: y)
    flax: Any = {"kernel": KERNEL * 0}
    text = str(compare_models(lambda p, x: x @ p["kernel"], flax, module, ROWS, level="function"))
    assert "note: all entries of kernel of torch are 0 or 1, which hides mistakes" in text


def test_outputs_and_gradients_that_are_zero_are_a_note() -> None:
    report = compare(lambda y: 0 * jax.nn.gelu(y), lambda y: 0 * y.relu())
    assert report.passed and report.notes == (
        "all entries of output are 0 or equal, which hides mistakes: use other weights or inputs",
        "all gradients of kernel are 0: the outputs do not show how the models use them",
    )
    [note] = compare(lambda y: (y, y.argmax(-1) * 0 + 3), lambda y: (y, y.argmax(-1) * 0 + 3)).notes
    assert note.startswith("all entries of output.1 are 0 or equal") and not compare(same, same).notes


class Gated(nn.Module):
    """A matrix product, to which a gate adds its square."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.gate = nn.Parameter(torch.tensor(KERNEL)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        y = x @ self.kernel
        return y + self.gate**2 * y**2


def test_a_gate_of_zero_is_a_note() -> None:
    params = {"kernel": KERNEL, "gate": np.zeros((), np.float32)}
    report = compare_models(lambda p, x: x @ p["kernel"], params, Gated(), ROWS, level="function")
    assert [note.partition(" are ")[0] for note in report.notes] == [
        "all entries of gate of torch",
        "all gradients of gate",
    ]


def test_a_buffer_whose_values_differ_is_a_note() -> None:
    module = Product(lambda y, scale: y * scale, scale=2 * np.arange(6.0, dtype=np.float32))
    params = {"kernel": KERNEL, "scale": np.arange(6.0, dtype=np.float32)}
    report = compare_models(lambda p, x: x @ p["kernel"] * p["scale"], params, module, ROWS, level="function")
    [note] = report.notes
    assert report.passed and note.startswith("the values of scale of torch, which no optimizer trains, differ")


def test_a_gradient_that_torch_alone_freezes_is_a_note() -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    layers[0].requires_grad_(False)
    params = {f"layers_{n}": {"kernel": RNG.random((a, b)), "bias": RNG.random(b)} for n, a, b in [(0, 4, 5), (2, 5, 3)]}

    def apply(params: Any, x: Any, stop: Any) -> Any:
        first, last = stop(params["layers_0"]), params["layers_2"]
        return jnp.tanh(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]

    options: Any = {"level": "function", "weights": "torch"}
    report = compare_models(lambda p, x: apply(p, x, same), params, layers, ROWS, **options)
    note = "torch freezes 0.bias, 0.weight, and flax has a gradient there, which is not compared"
    assert report.passed and note in report.notes
    report = compare_models(lambda p, x: apply(p, x, jax.lax.stop_gradient), params, layers, ROWS, **options)
    assert report.passed and note not in report.notes


@pytest.mark.parametrize(("kind", "is_trained"), [(nnx.Param, True), (nnx.BatchStat, False)])
@pytest.mark.parametrize("as_state", [True, False])
def test_a_frozen_parameter_may_be_a_variable_that_flax_does_not_train(kind: Any, is_trained: bool, as_state: bool) -> None:
    flax = FlaxCentred(0.9)
    flax.center = kind(jnp.arange(6.0))
    graph, state = nnx.split(flax)
    other = Product(lambda y: y)
    other.center = nn.Parameter(torch.arange(6.0), requires_grad=False)
    other.after = lambda y: y - other.center
    if as_state:
        report = compare_models(lambda s, x: nnx.merge(graph, s)(x), state, other, ROWS, level="function")
    else:
        report = compare_models(FlaxCentred.__call__, flax, other, ROWS, level="function")
    assert report.passed and any("center" in note for note in report.notes) == is_trained, str(report)


def test_hooks_on_parameters_change_the_gradient() -> None:
    other = Product()
    other.kernel.register_hook(lambda gradient: 0.1 * gradient)
    report = compare(same, other)
    assert "gradient of kernel" in {row.name for row in report.rows if not row.same_function}


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_input_that_torch_changes_in_place_is_a_note(is_changed: bool) -> None:
    def halve(y: Any, x: Any) -> Any:
        x.mul_(0.5) if is_changed else x * 0.5
        return y

    note = "torch changes input 1 in place, and flax does not: code that uses it after the call gets other values"
    assert compare(lambda y, x: y, halve, (ROWS, ROWS)).notes == ((note,) if is_changed else ())


def test_random_numbers_in_evaluation_are_a_note() -> None:
    report = compare(lambda y: y, lambda y: y + 0 * nn.functional.dropout(y, 0.1))
    [note] = report.notes
    assert report.passed and note.startswith("torch draws random numbers in evaluation")
    assert not compare(lambda y: y, lambda y: nn.functional.dropout(y, 0.1, training=False)).notes


# Constants ------------------------------------------------------------------------------------------------------------


def test_the_default_epsilon_of_rms_norm_is_that_of_float32() -> None:
    def flax(epsilon: float) -> Callable[..., Any]:
        return lambda y: y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + epsilon)

    def other(y: Any) -> Any:
        return nn.functional.rms_norm(y, (6,))

    assert compare(flax(float(np.finfo(np.float32).eps)), other, level="precision").passed
    assert not compare(flax(1e-6), other).passed


def test_a_long_window_with_other_numbers_fails() -> None:
    length = 400
    rows = RNG.standard_normal((2, length)).astype(np.float32)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)

    class Windowed(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x * torch.tensor(window).to(x.dtype))

    def check(flax: Any) -> bool:
        module, params = Windowed(length, 3), {"kernel": RNG.standard_normal((length, 3)), "bias": np.ones(3)}

        def apply(params: Any, x: Any) -> Any:
            return x * jnp.asarray(flax.astype(np.float32)) @ params["kernel"] + params["bias"]

        return bool(compare_models(apply, params, module, rows, level="function").passed)

    assert check(window) and not check(window * 1.000003)
    assert not check(0.5 - 0.5 * np.cos(2.00001 * np.pi * np.arange(length) / length))


def test_an_operation_on_a_table_in_float32_is_computed_in_float64() -> None:
    table = np.array([0.1, 0.2, 0.3, 0.5, 0.7, 0.9], np.float32)
    report = compare(
        lambda y: y * jnp.log(jnp.asarray(table)), lambda y: y * torch.tensor(table).double().log().to(y.dtype)
    )
    assert report.passed and report.fixed_parts, str(report)
    assert not compare(lambda y: y * jnp.log(jnp.asarray(table) * 1.00001), lambda y: y * torch.tensor(table).log()).passed
