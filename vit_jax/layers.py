"""The small parts of the functional twin: everything in which it may differ from `vit_torch/layers.py`.

Kernels have their inputs first and keep heads apart, (*inputs, *outputs), so that a mesh can shard them by name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.execution import Execution
from vit_spec import InputError, Law, Row, ViTConfig, position_table, rows
from vit_spec.laws import TRUNCATED_STD

Shape = tuple[int, ...]
Tables = tuple[np.ndarray, ...]

# Of a norm, an activation or a rounding the backward pass is left what enters, and computes the rest again. Jax would keep
# up to half a dozen arrays of each, to be written and read: twice as much for a block, in all.
_again = partial(jax.checkpoint, prevent_cse=False)


class Part(nn.Module):
    """A module of the twin: it knows the config, and draws its parameters by the laws of `vit_spec.rows`."""

    config: ViTConfig
    execution: Execution

    def declare(self, leaf: str, shape: Shape) -> Array:
        """Return the parameter `leaf` of this module, float32 when it is drawn."""
        return self.param(leaf, partial(draw, self.config, (*self.path, leaf)), shape)

    def keep(self, name: str, value: Array) -> Array:
        """Name an intermediate, and return it, or what is fed in its place; see `vit_jax.intermediates`."""
        earlier = len(self.get_variable("intermediates", name, ()))
        self.sow("intermediates", name, value)
        return self.get_variable("fed", f"{name} ({earlier + 1})" if earlier else name, value)

    def show(self, name: str, value: Array) -> None:
        """Name a value that nothing goes on from."""
        self.sow("intermediates", name, value)

    def constants(self, make: Callable[..., Tables], grid: tuple[int, int], x: Array) -> tuple[Array, ...]:
        """The tables of `vit_spec` for this grid, rounded once to the type that x is summed in."""
        return tuple(jnp.asarray(table, at_least_float32(x)) for table in make(self.config, grid))


class Linear(Part):
    """Contract the trailing axes `inputs` of x into the axes `outputs`: (..., *inputs) -> (..., *outputs)."""

    inputs: Shape
    outputs: Shape
    use_bias: bool = True

    def setup(self) -> None:
        self.kernel = self.declare("kernel", (*self.inputs, *self.outputs))
        self.bias = self.declare("bias", self.outputs) if self.use_bias else None

    def __call__(self, x: Array) -> Array:
        n, kernel = len(self.inputs), self.kernel.astype(x.dtype)
        # No axis is merged with another: a mesh may have split it.
        axes = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
        x = lax.dot_general(x, kernel, (axes, ((), ())), precision=self.execution.precision)
        return x if self.bias is None else x + self.bias.astype(x.dtype)


class PatchProjection(Part):
    """Cut images into patches and project each: (B, H, W, C) -> (B, rows * columns, width)."""

    use_bias: bool

    def setup(self) -> None:
        (ph, pw), channels = self.config.patch_size, self.config.in_channels
        self.kernel = self.declare("kernel", (ph, pw, channels, self.config.width))
        self.bias = self.declare("bias", (self.config.width,)) if self.use_bias else None

    def __call__(self, images: Array) -> Array:
        (b, height, width, c), (ph, pw) = images.shape, self.config.patch_size
        x = images.astype(self.execution.dtype or self.kernel.dtype)
        x = x.reshape(b, height // ph, ph, width // pw, pw, c).swapaxes(2, 3)
        x = x.reshape(b, -1, ph * pw * c)
        kernel = self.kernel.astype(x.dtype).reshape(ph * pw * c, -1)
        x = jnp.matmul(x, kernel, precision=self.execution.precision)
        return x if self.bias is None else x + self.bias.astype(x.dtype)


class LayerNorm(Part):
    """Normalise the last axis, in at least float32: (..., dim) -> (..., dim).

    The variance is the mean of squared deviations; flax's default E[x^2] - E[x]^2 loses digits where the mean is large.
    """

    dim: int

    def setup(self) -> None:
        self.scale = self.declare("scale", (self.dim,))
        self.bias = self.declare("bias", (self.dim,))

    def __call__(self, x: Array) -> Array:
        return _layer_norm(x, self.scale, self.bias, self.config.norms.eps)


@partial(_again, static_argnums=3)
def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    wide = x.astype(at_least_float32(x))
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    # Not lax.rsqrt, whose derivative, a power of -3/2, underflows in float32 from deviations of about 4e12 on.
    y = centred * (1 / jnp.sqrt(variance + eps))
    return (y * scale.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


class LayerScale(Part):
    """A learned factor per channel: (..., width) -> (..., width)."""

    def setup(self) -> None:
        self.gamma = self.declare("gamma", (self.config.width,))

    def __call__(self, x: Array) -> Array:
        return x * self.gamma.astype(x.dtype)


@partial(_again, static_argnums=1)
def activation(x: Array, kind: str) -> Array:
    """Apply the non-linearity that `Mlp.activation` names; "swiglu" folds (..., 2, ff) into (..., ff)."""
    match kind:
        case "gelu":
            return nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * nn.sigmoid(1.702 * x)
        case "relu":
            return nn.relu(x)
        case "swiglu":
            gate, value = jnp.unstack(x, axis=-2)
            return nn.silu(gate) * value
    return x


def runs_cudnn(device: jax.Device) -> bool:
    """Whether cuDNN's fused attention runs on a device: NVIDIA's from Ampere (compute capability 8.0) on."""
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]  # AMD's are called such as gfx942
    return generation.isdigit() and int(generation) >= 8


def in_rows(x: Array) -> Array:
    """Hold tokens (B, T, width) in memory as they are written, width last.

    The compiler of jax 0.12 would lay them out by images on GPUs, for the sum over images that is the gradient of learned
    positions, and turn them around at every norm; those before it do not (and that of 0.10, told so, gathers
    images that a mesh splits).
    """
    turned = jax.__version_info__ >= (0, 12) and _device().platform == "gpu"
    return with_layout_constraint(x, Layout((0, 1, 2))) if turned else x


def _device() -> jax.Device:
    """The device that is computed on unless an array lies elsewhere: under `jax.default_device`, the one it names."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def attention(part: Part, q: Array, k: Array, v: Array, rate: float, train: bool) -> Array:
    """softmax(scale q k^T) v for each head: (B, T, H, D), (B, S, H, D), (B, S, H, D) -> (B, T, H, D)."""
    scale, kind, d = part.config.scale, part.execution.attention, q.shape[-1]
    if kind == "cudnn" and rate and train:
        raise InputError('attention="cudnn" has no dropout: run with attention="auto", or set regularisation.attn_drop=0')
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    served = half and d % 8 == 0 and d <= 128 and not (rate and train) and runs_cudnn(_device())
    among_themselves = q.shape[1] == k.shape[1]  # and no pooling's single query, whose gradient jax refuses
    if among_themselves and (kind == "cudnn" or (kind == "auto" and served)):
        return _fused(q, k, v, scale)
    # Heads go ahead of tokens, and the softmax divides after the second product, where there is less to divide: on CPU
    # this is several times faster than jax.nn.dot_product_attention (benchmarks/attention.py).
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # (B, H, T, D)
    dot = partial(lax.dot_general, precision=part.execution.precision, preferred_element_type=at_least_float32(q))
    # The queries are scaled, not the scores: on CPU, XLA would contract scale * product - maximum into one rounding.  At
    # scores of 3e9 the largest difference is then up to 128 away from 0, either way, and exp overflows or all are 0.
    q = (scale * q.astype(at_least_float32(q))).astype(q.dtype)
    scores = dot(q, k, (((3,), (3,)), ((0, 1), (0, 1))))  # (B, H, T, S)
    scores = part.keep("scores", scores)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    part.show("weights", weights / total)
    weights = drop(part, weights, rate, train)
    rounded = _again(lambda weights, v: dot(weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1)))))
    x = rounded(weights, v) / total  # (B, H, T, D)
    return jnp.swapaxes(x.astype(v.dtype), 1, 2)


def _fused(q: Array, k: Array, v: Array, scale: float) -> Array:
    """The same by cuDNN's kernel, with as many queries as keys.

    jax differentiates it for an even number of tokens alone (check_is_flash_attention in jax/_src/cudnn takes the stand-in
    of a bias for one, and so refuses 197): where there is one too many, another is put beside it that the kernel is told
    to leave out.
    """
    fused = partial(jax.nn.dot_product_attention, scale=scale, implementation="cudnn")
    batch, tokens = q.shape[:2]
    if tokens % 2 == 0:
        return fused(q, k, v)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    counted = jnp.full(batch, tokens, jnp.int32)
    return fused(q, k, v, query_seq_lengths=counted, key_value_seq_lengths=counted)[:, :tokens]


def rotate(x: Array, tables: tuple[Array, ...], kind: str) -> Array:
    """Turn queries or keys by their position: (B, T, H, D) and cosines, sines (B or 1, T, 1, D) -> (B, T, H, D)."""
    cos, sin = tables
    wide = x.astype(cos.dtype)
    if kind == "axial":  # the pairs are neighbours
        turned = jnp.stack([-wide[..., 1::2], wide[..., ::2]], -1).reshape(x.shape)
    else:  # the pairs are half a head apart
        first, second = jnp.split(wide, 2, -1)
        turned = jnp.concatenate([-second, first], -1)
    return (wide * cos + turned * sin).astype(x.dtype)


def drop(part: Part, x: Array, rate: float, train: bool) -> Array:
    """Dropout, in training: entries become zero with probability `rate`, the others grow by 1 / (1 - rate)."""
    if not rate or not train:
        return x
    keep = jax.random.bernoulli(part.make_rng("dropout"), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def drop_path(part: Part, x: Array, rate: Array, train: bool) -> Array:
    """Stochastic depth, in training: whole images of (B, T, width) become zero with probability `rate`."""
    if not train:
        return x
    mask = jax.random.bernoulli(part.make_rng("dropout"), 1 - rate, (x.shape[0], 1, 1)).astype(x.dtype)
    mask = part.keep("drop_path", mask)
    return jnp.where(mask > 0, x / (1 - rate), 0).astype(x.dtype)


def drop_patches(part: Part, x: Array, prefix: int, rate: float) -> Array:
    """Return the places (B, kept) of the tokens of x that stay: the prefix, and a random share of the patches."""
    batch, patches = x.shape[0], x.shape[1] - prefix
    noise = jax.random.uniform(part.make_rng("dropout"), (batch, patches))
    kept = jnp.argsort(noise, axis=1)[:, : max(1, int(patches * (1 - rate)))] + prefix
    return jnp.concatenate([jnp.broadcast_to(jnp.arange(prefix), (batch, prefix)), kept], axis=1)


def scanned(block: type[Part], config: ViTConfig, execution: Execution) -> nn.Module:
    """Return `config.depth` blocks as one module, its parameters stacked on a leading axis.

    Called with (x, rates (depth,), tables, train), it compiles one block however many there are.
    """
    if execution.remat != "none":
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = dots if execution.remat == "dots" else None
        block = nn.remat(block, prevent_cse=False, static_argnums=(4,), policy=policy)
    scan = nn.scan(
        block,
        variable_axes={"params": 0, "intermediates": 0, "fed": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast, nn.broadcast),
        length=config.depth,
        unroll=execution.unroll,
    )
    return scan(config, execution)


def check_images(images: Array, config: ViTConfig) -> None:
    """Refuse what is no batch of normalised images of this config."""
    wanted, c = "(batch, height, width, channels)", config.in_channels
    if images.ndim != 4:
        raise InputError(f"images have shape {images.shape}: expected {wanted}; a single image is images[None]")
    if images.shape[3] != c:
        hint = "; these look channels-first: use images.transpose(0, 2, 3, 1)" if images.shape[1] == c else ""
        raise InputError(f"images have shape {images.shape}: expected {wanted} with {c} channels{hint}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise InputError(
            f"images are {images.dtype}: expected floating-point numbers; normalise them first, "
            "(images / 255 - config.pixels.mean) / config.pixels.std"
        )


def at_least_float32(x: Array) -> Any:
    """The type that sums and exponentials are computed in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def draw(config: ViTConfig, path: tuple[str, ...], key: Array, shape: Shape) -> Array:
    """Draw the parameter at this path by its row's law, float32."""
    row = _row(config, path)
    if row.law is None:
        return jnp.asarray(position_table(config, config.grid)[0], jnp.float32).reshape(shape)
    return _sample(row.law, key, shape)


def _row(config: ViTConfig, path: tuple[str, ...]) -> Row:
    """Find the row of a parameter; modules that hold a ViT put names of their own ahead of its path."""
    leaf = {"kernel": "weight", "scale": "weight"}.get(path[-1], path[-1])
    names = (".".join((*path[start:-1], leaf)) for start in range(len(path)))
    return next(rows(config)[name] for name in names if name in rows(config))


def _sample(law: Law, key: Array, shape: Shape) -> Array:
    match law.kind:
        case "constant":
            return jnp.full(shape, law.arguments[0], jnp.float32)
        case "normal":
            return law.std * jax.random.normal(key, shape, jnp.float32)
        case "uniform":
            return jax.random.uniform(key, shape, jnp.float32, *law.arguments)
    return law.std / TRUNCATED_STD * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)
