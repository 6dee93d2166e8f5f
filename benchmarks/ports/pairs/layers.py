"""Layers of Flax (linen and NNX), Equinox and JAX, and those of PyTorch that compute the same function."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, gate_lines, of_equinox, of_linen, of_nnx, tokens

PAIRS = Pairs("layers", ("flax.linen", "flax.nnx.nn", "equinox.nn"), ("torch.nn.modules",))

SEQUENCE = floats(2, 9, 32)
IMAGES = floats(2, 8, 8, 16)  # channels last
OF_IMAGES = {"input_axes": "b y x c <-> b c y x", "output_axes": "b y x c <-> b c y x"}
LAST_FIRST = {"input_axes": "b t c <-> b c t", "output_axes": "b t c <-> b c t"}


def rngs() -> Any:
    """Return the random keys of an NNX module."""
    from flax import nnx

    return nnx.Rngs(0)


def key() -> Any:
    """Return a key."""
    import jax

    return jax.random.key(0)


def declare(
    name: str,
    linen: Any,
    torch_module: Any,
    inputs: Any,
    options: dict[str, Any] | None = None,
    call: Any = None,
    **more: Any,
) -> None:
    """Declare a pair of a linen module and a PyTorch module, both built by functions of their libraries.

    call: calls the PyTorch module, if it has other arguments or results.
    more: other options of the pair and of `of_linen`.
    """
    of_pair = {key: more.pop(key) for key in ("layouts", "disagreement") if key in more}

    def build() -> Built:
        from flax import linen as nn
        from torch import nn as tnn

        module = torch_module(tnn)
        return of_linen(linen(nn), TorchCall(module, call) if call else module, inputs, **(options or {}), **more)

    PAIRS.add(f"linen_{name}", f"flax.linen, {name}", f"torch.nn, {name}", build, **of_pair)


SAME = ((1, 1), (1, 1))
EVAL = {"call_options": {"use_running_average": True}}
declare("dense", lambda n: n.Dense(24), lambda t: t.Linear(32, 24), SEQUENCE)
declare("layer_norm", lambda n: n.LayerNorm(epsilon=1e-5), lambda t: t.LayerNorm(32), SEQUENCE)
declare("rms_norm", lambda n: n.RMSNorm(epsilon=1e-6), lambda t: t.RMSNorm(32, eps=1e-6), SEQUENCE)
declare("group_norm", lambda n: n.GroupNorm(4, epsilon=1e-5), lambda t: t.GroupNorm(4, 16), IMAGES, OF_IMAGES)
declare("batch_norm", lambda n: n.BatchNorm(epsilon=1e-5), lambda t: t.BatchNorm2d(16), IMAGES, OF_IMAGES, **EVAL)
declare(
    "instance_norm",
    lambda n: n.InstanceNorm(epsilon=1e-5),
    lambda t: t.InstanceNorm2d(16, affine=True),
    IMAGES,
    OF_IMAGES,
)
declare("conv", lambda n: n.Conv(24, (3, 3), padding=SAME), lambda t: t.Conv2d(16, 24, 3, padding=1), IMAGES, OF_IMAGES)
declare(
    "conv_strided",
    lambda n: n.Conv(24, (3, 3), (2, 2), padding=SAME),
    lambda t: t.Conv2d(16, 24, 3, stride=2, padding=1),
    IMAGES,
    OF_IMAGES,
)
declare(
    "conv_depthwise",
    lambda n: n.Conv(16, (5, 5), padding=((2, 2), (2, 2)), feature_group_count=16),
    lambda t: t.Conv2d(16, 16, 5, padding=2, groups=16),
    IMAGES,
    OF_IMAGES,
)
declare(
    "conv_grouped_dilated",
    lambda n: n.Conv(32, (3, 3), padding="SAME", feature_group_count=4, kernel_dilation=2),
    lambda t: t.Conv2d(16, 32, 3, padding=2, groups=4, dilation=2),
    IMAGES,
    OF_IMAGES,
)
declare("conv_1d", lambda n: n.Conv(24, (3,), padding=1), lambda t: t.Conv1d(32, 24, 3, padding=1), SEQUENCE, LAST_FIRST)
declare(
    "conv_transposed",
    lambda n: n.ConvTranspose(24, (2, 2), (2, 2), padding="VALID", transpose_kernel=True),
    lambda t: t.ConvTranspose2d(16, 24, 2, stride=2),
    IMAGES,
    OF_IMAGES,
)
declare("embedding", lambda n: n.Embed(40, 24), lambda t: t.Embedding(40, 24), tokens(2, 9, high=40))
declare(
    "attention",
    lambda n: n.MultiHeadDotProductAttention(4),
    lambda t: t.MultiheadAttention(32, 4, batch_first=True),
    SEQUENCE,
    call=lambda module, x: module(x, x, x, need_weights=False)[0],
)
declare(
    "lstm",
    lambda n: n.RNN(n.OptimizedLSTMCell(24)),
    lambda t: t.LSTM(32, 24, batch_first=True),
    SEQUENCE,
    call=lambda module, x: module(x)[0],
    layouts=gate_lines("cell/", "model.", "ifgo", "hi hf hg ho", dim=24),
)
declare(
    "gru",
    lambda n: n.RNN(n.GRUCell(24)),
    lambda t: t.GRU(32, 24, batch_first=True),
    SEQUENCE,
    call=lambda module, x: module(x)[0],
    layouts=gate_lines("cell/", "model.", "rzn", "ir iz in hn", dim=24),
)
declare(
    "simple_rnn",
    lambda n: n.RNN(n.SimpleCell(24)),
    lambda t: t.RNN(32, 24, batch_first=True),
    SEQUENCE,
    call=lambda module, x: module(x)[0],
    layouts=gate_lines("cell/", "model.", ("",), "i", dim=24),
)


def declare_nnx(name: str, nnx_module: Any, torch_module: Any, inputs: Any, **options: Any) -> None:
    """Declare a pair of an NNX module and a PyTorch module."""
    call, torch_call = options.pop("call", None), options.pop("torch_call", None)
    layouts = options.pop("layouts", ())

    def build() -> Built:
        from flax import nnx
        from torch import nn as tnn

        module = torch_module(tnn)
        return of_nnx(
            nnx_module(nnx), TorchCall(module, torch_call) if torch_call else module, inputs, call=call, **options
        )

    PAIRS.add(f"nnx_{name}", f"flax.nnx, {name}", f"torch.nn, {name}", build, layouts=layouts)


declare_nnx("linear", lambda n: n.Linear(32, 24, rngs=rngs()), lambda t: t.Linear(32, 24), SEQUENCE)
declare_nnx("layer_norm", lambda n: n.LayerNorm(32, epsilon=1e-5, rngs=rngs()), lambda t: t.LayerNorm(32), SEQUENCE)
declare_nnx("rms_norm", lambda n: n.RMSNorm(32, epsilon=1e-6, rngs=rngs()), lambda t: t.RMSNorm(32, eps=1e-6), SEQUENCE)
declare_nnx(
    "group_norm",
    lambda n: n.GroupNorm(16, num_groups=4, epsilon=1e-5, rngs=rngs()),
    lambda t: t.GroupNorm(4, 16),
    IMAGES,
    **OF_IMAGES,
)
declare_nnx("batch_norm", lambda n: n.BatchNorm(16, rngs=rngs()), lambda t: t.BatchNorm2d(16), IMAGES, **OF_IMAGES)
declare_nnx(
    "conv",
    lambda n: n.Conv(16, 24, (3, 3), padding=1, rngs=rngs()),
    lambda t: t.Conv2d(16, 24, 3, padding=1),
    IMAGES,
    **OF_IMAGES,
)
declare_nnx("embedding", lambda n: n.Embed(40, 24, rngs=rngs()), lambda t: t.Embedding(40, 24), tokens(2, 9, high=40))
declare_nnx(
    "attention",
    lambda n: n.MultiHeadAttention(4, 32, decode=False, rngs=rngs()),
    lambda t: t.MultiheadAttention(32, 4, batch_first=True),
    SEQUENCE,
    torch_call=lambda module, x: module(x, x, x, need_weights=False)[0],
)
declare_nnx(
    "gru",
    lambda n: n.RNN(n.GRUCell(32, 24, rngs=rngs())),
    lambda t: t.GRU(32, 24, batch_first=True),
    SEQUENCE,
    torch_call=lambda module, x: module(x)[0],
    layouts=gate_lines("cell/dense_", "model.", ("",), "i", dim=24),
)
declare_nnx(
    "lstm",
    lambda n: n.RNN(n.OptimizedLSTMCell(32, 24, rngs=rngs())),
    lambda t: t.LSTM(32, 24, batch_first=True),
    SEQUENCE,
    torch_call=lambda module, x: module(x)[0],
    layouts=gate_lines("cell/dense_", "model.", ("",), "h", dim=24),
)


def declare_equinox(name: str, equinox_module: Any, torch_module: Any, inputs: Any, **options: Any) -> None:
    """Declare a pair of an Equinox module and a PyTorch module."""
    call, torch_call = options.pop("call", None), options.pop("torch_call", None)

    def build() -> Built:
        from equinox import nn
        from torch import nn as tnn

        module = torch_module(tnn)
        module = TorchCall(module, torch_call) if torch_call else module
        return of_equinox(equinox_module(nn), module, inputs, call=call, **options)

    PAIRS.add(f"equinox_{name}", f"equinox.nn, {name}", f"torch.nn, {name}", build)


def each_row(module: Any, x: Any) -> Any:
    """Apply an Equinox layer for one vector to each row of a matrix."""
    import jax

    return jax.vmap(module)(x)


MAPS = floats(2, 16, 8, 8)  # channels first
declare_equinox("linear", lambda n: n.Linear(32, 24, key=key()), lambda t: t.Linear(32, 24), SEQUENCE, call=each_row)
declare_equinox("layer_norm", lambda n: n.LayerNorm(32), lambda t: t.LayerNorm(32), SEQUENCE, call=each_row)
declare_equinox(
    "rms_norm", lambda n: n.RMSNorm(32, use_bias=False), lambda t: t.RMSNorm(32, eps=1e-5), SEQUENCE, call=each_row
)
declare_equinox("group_norm", lambda n: n.GroupNorm(4, 16), lambda t: t.GroupNorm(4, 16), MAPS)
declare_equinox("conv", lambda n: n.Conv2d(16, 24, 3, padding=1, key=key()), lambda t: t.Conv2d(16, 24, 3, padding=1), MAPS)
declare_equinox(
    "conv_depthwise",
    lambda n: n.Conv2d(16, 16, 5, padding=2, groups=16, key=key()),
    lambda t: t.Conv2d(16, 16, 5, padding=2, groups=16),
    MAPS,
)
declare_equinox(
    "embedding",
    lambda n: n.Embedding(40, 24, key=key()),
    lambda t: t.Embedding(40, 24),
    tokens(2, 9, high=40),
    call=each_row,
)
declare_equinox(
    "attention",
    lambda n: n.MultiheadAttention(
        4,
        32,
        use_query_bias=True,
        use_key_bias=True,
        use_value_bias=True,
        use_output_bias=True,
        key=key(),
    ),
    lambda t: t.MultiheadAttention(32, 4, batch_first=True),
    SEQUENCE,
    call=lambda module, x: module(x, x, x),
    torch_call=lambda module, x: module(x, x, x, need_weights=False)[0],
)
declare_equinox(
    "mlp",
    lambda n: n.MLP(32, 24, 40, 2, key=key()),
    lambda t: t.Sequential(t.Linear(32, 40), t.ReLU(), t.Linear(40, 40), t.ReLU(), t.Linear(40, 24)),
    SEQUENCE,
    call=each_row,
)
