"""Layers and functions of the JAX twin.  Unlike model.py, they may differ from `vit_torch/layers.py`.

Kernels have the shape (*inputs, *outputs), with heads as a separate axis, so that a mesh can shard their axes by name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax import Array, lax

from vit_jax.compilation import gradient_separately, is_on_gpu, is_stored, recompute_in_backward, separately, stored
from vit_jax.execution import Execution
from vit_jax.initialisation import Shape, draw_parameter
from vit_jax.noise import Noise
from vit_jax.normal_cdf import normal_cdf
from vit_spec import InputError, ViTConfig
from vit_spec.config import check_config
from vit_spec.errors import require_type
from vit_spec.noise import Site, drop_threshold

ConstantTables = tuple[np.ndarray, ...]
ARRAYS = jax.Array, np.ndarray  # the types of arrays that the twin takes


def _wide(operation: Callable[[Array, Array], Array], x: Array, parameter: Array) -> Array:
    """Return the result of an operation on x and a parameter that broadcasts to it, both rounded to x's dtype.

    It is computed in at least float32, and so is the gradient of the parameter, a sum over tokens.
    """
    wide = at_least_float32(x)
    return operation(x.astype(wide), parameter.astype(x.dtype).astype(wide)).astype(x.dtype)


class ViTModule(nn.Module):
    """Base class of the twin's modules: it has the config, and initializes parameters as `vit_spec.rows` declares.

    Attributes:
        config: the config of the model.
        execution: the execution options of the model.
    """

    config: ViTConfig
    execution: Execution

    def __post_init__(self) -> None:
        check_config(self.config)
        require_type("execution is", self.execution, Execution)
        super().__post_init__()

    def declare(self, leaf: str, shape: Shape) -> Array:
        """Declare the parameter `leaf` of this module and return it; initial values are float32."""
        if not self.has_variable("params", leaf):
            return jnp.asarray(self.param(leaf, partial(draw_parameter, self.config, (*self.path, leaf)), shape))
        # `self.param` would trace an initializer for the shape alone, in a third of the time of tracing a forward pass.
        value = nn.unbox(self.get_variable("params", leaf))
        if np.shape(value) != shape:
            raise ScopeParamShapeError(leaf, "/" + "/".join(self.path), np.shape(value), shape)
        # A numpy array, as `vit_jax.load` returns, cannot be indexed by arrays that are traced.
        return jnp.asarray(value)

    def intermediate(self, name: str, value: Array) -> Array:
        """Record an intermediate under a name; return it, or the value fed to replace it: see `vit_jax.intermediates`."""
        earlier = len(self.get_variable("intermediates", name, ()))
        self.sow("intermediates", name, value)
        return self.get_variable("fed", f"{name} ({earlier + 1})" if earlier else name, value)

    def record(self, name: str, value: Array) -> None:
        """Record a value that the forward pass does not use further, so that it cannot be replaced."""
        self.sow("intermediates", name, value)
        if self.has_variable("fed", name):
            raise InputError(f"fed names {name!r}, which no later operation reads: feed an intermediate that is read later")

    def constants(self, make: Callable[..., ConstantTables], grid: tuple[int, int], x: Array) -> tuple[Array, ...]:
        """Return constant tables of `vit_spec` for this grid, in x's dtype, but at least float32; indices are integers."""
        dtype = at_least_float32(x)
        return tuple(jnp.asarray(table, dtype if table.dtype.kind == "f" else int) for table in make(self.config, grid))


class Linear(ViTModule):
    """A linear layer from the trailing axes `inputs` to the axes `outputs`: (..., *inputs) -> (..., *outputs)."""

    inputs: Shape
    outputs: Shape
    use_bias: bool = True

    def setup(self) -> None:
        self.kernel = self.declare("kernel", (*self.inputs, *self.outputs))
        self.bias = self.declare("bias", self.outputs) if self.use_bias else None

    def __call__(self, x: Array) -> Array:
        n, kernel = len(self.inputs), stored(self.kernel.astype(x.dtype))
        # No reshape that merges axes: a mesh may shard them separately.
        axes = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
        x = lax.dot_general(x, kernel, (axes, ((), ())), precision=self.execution.precision)
        # The gradient of the bias is a sum over tokens, slow on GPUs in the kernel that computes its summands.
        return x if self.bias is None else gradient_separately(_wide(jnp.add, x, self.bias))


class PatchProjection(ViTModule):
    """A linear projection of patches, which do not overlap: (B, H, W, C) -> (B, rows * columns, width)."""

    use_bias: bool

    def setup(self) -> None:
        (ph, pw), channels = self.config.patch_size, self.config.in_channels
        self.kernel = self.declare("kernel", (ph, pw, channels, self.config.width))
        self.bias = self.declare("bias", (self.config.width,)) if self.use_bias else None

    def __call__(self, images: Array) -> Array:
        (b, height, width, c), (ph, pw) = images.shape, self.config.patch_size
        x = images.astype(self.execution.dtype or self.kernel.dtype)
        x = x.reshape(b, height // ph, ph, width // pw, pw, c).swapaxes(2, 3)
        x = x.reshape(b, height // ph * (width // pw), ph * pw * c)
        kernel = self.kernel.astype(x.dtype).reshape(ph * pw * c, -1)
        x = jnp.matmul(x, kernel, precision=self.execution.precision)
        return x if self.bias is None else _wide(jnp.add, x, self.bias)


class Norm(ViTModule):
    """Layer or RMS normalization of the trailing axes together, in at least float32: (..., *dims) -> (..., *dims).

    The variance is the mean of squared deviations; flax's default, E[x^2] - E[x]^2, loses digits where the mean is large.
    """

    dims: Shape

    def setup(self) -> None:
        self.scale = self.declare("scale", self.dims)
        self.bias = self.declare("bias", self.dims) if self.config.norms.bias else None

    def __call__(self, x: Array) -> Array:
        norms, axes = self.config.norms, tuple(range(-len(self.dims), 0))
        return _normalize(x, self.scale, self.bias, norms.eps, norms.kind == "layer", axes)


@partial(recompute_in_backward, static_argnums=(3, 4, 5))
def _normalize(x: Array, scale: Array, bias: Array | None, eps: float, centre: bool, axes: tuple[int, ...]) -> Array:
    wide = x.astype(at_least_float32(x))
    y = _standardize(wide, eps, centre, axes) * scale.astype(wide.dtype)
    y = (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)
    # A kernel of its own for the gradient of y, so that one other kernel computes those of the scale, the bias and x.
    return gradient_separately(stored(y))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _standardize(x: Array, eps: float, centre: bool, axes: tuple[int, ...]) -> Array:
    """Return (x - mean) / sqrt(variance + eps), or x / sqrt(mean of squares + eps) without `centre`, along axes."""
    return _centre_and_factor(x, eps, centre, axes)[0]


@_standardize.defjvp
def _standardize_jvp(
    eps: float, centre: bool, axes: tuple[int, ...], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    # jax would differentiate each operation.  Here the backward pass has two sums over `axes` instead of three, and neither
    # needs the other.
    y, factor = _centre_and_factor(primals[0], eps, centre, axes)
    (dx,) = tangents
    dy = dx - _mean(dx, axes) if centre else dx
    return y, (dy - y * _mean(y * dx, axes)) * factor


def _centre_and_factor(x: Array, eps: float, centre: bool, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the standardized x, and the factor 1 / sqrt(variance + eps)."""
    centred = x - stored(_mean(x, axes)) if centre else x
    variance = stored(_mean(jnp.square(centred), axes))
    factor = 1 / jnp.sqrt(variance + eps)
    return centred * factor, factor


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    # On GPUs by a kernel of its own: one that also computes what depends on the mean is slower, up to five times.
    return separately(x.mean(axes, keepdims=True))


class LayerScale(ViTModule):
    """A learned factor per channel: (..., width) -> (..., width)."""

    def setup(self) -> None:
        self.gamma = self.declare("gamma", (self.config.width,))

    def __call__(self, x: Array) -> Array:
        return recompute_in_backward(partial(_wide, jnp.multiply))(x, self.gamma)


@partial(recompute_in_backward, static_argnums=(1,))
def activation(x: Array, kind: str) -> Array:
    """Apply the activation function `kind` of `vit_spec.Mlp`; "swiglu" maps (..., 2, ff) to (..., ff).

    It is computed in at least float32, and rounded once.
    """
    return stored(_activate(x.astype(at_least_float32(x)), kind).astype(x.dtype))


def _activate(x: Array, kind: str) -> Array:
    match kind:
        case "gelu":
            # jax.nn.gelu takes longer (benchmarks/gelu.py), and rounds constants in half precision: 2 / sqrt(pi) to 1.125.
            return x * normal_cdf(x)
        case "gelu_tanh":
            return nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * nn.sigmoid(1.702 * x)
        case "relu":
            return nn.relu(x)
        case "silu":
            return nn.silu(x)
        case "mish":
            return x * jnp.tanh(nn.softplus(x))
        case "none":
            return x
        case "swiglu":
            gate, value = jnp.unstack(x, axis=-2)
            return nn.silu(gate) * value
    raise ValueError(f"unknown activation {kind!r}: give one of `vit_spec.Mlp.activation`, or add it to both twins")


def dropout(x: Array, rate: float, noise: Noise | None, site: Site) -> Array:
    """Apply dropout in training: set entries to zero with probability `rate`, and multiply the others by 1 / (1 - rate)."""
    if not rate or noise is None:
        return x
    keep = stored(noise.words(site, x.shape) >= np.uint32(drop_threshold(rate)))
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def drop_path(module: ViTModule, x: Array, noise: Noise | None, site: Site) -> Array:
    """Apply stochastic depth in training: dropout of whole images of x, (B, T, width)."""
    if noise is None:
        return x
    rate, threshold = noise.drop_path
    mask = (noise.words(site, (x.shape[0], 1, 1)) >= threshold).astype(x.dtype)
    mask = module.intermediate("drop_path", mask)
    return jnp.where(mask > 0, x / (1 - rate), 0).astype(x.dtype)


def sample_kept_tokens(x: Array, prefix: int, rate: float, noise: Noise) -> Array:
    """Return the indices (B, kept) of the tokens that patch dropout keeps: the prefix, and a random subset of patches."""
    batch, patches = x.shape[0], x.shape[1] - prefix
    order = jnp.argsort(noise.words(Site.PATCHES, (batch, patches)), axis=1)
    kept = order[:, : max(1, int(patches * (1 - rate)))] + prefix
    return jnp.concatenate([jnp.broadcast_to(jnp.arange(prefix), (batch, prefix)), kept], axis=1)


def scan_blocks(block: type[ViTModule], config: ViTConfig, execution: Execution, has_parameters: bool) -> nn.Module:
    """Return `config.depth` blocks as one module, whose parameters are stacked on a leading axis.

    The module takes the arguments (x, noise of all blocks or None, tables).  With `unroll=1` only one block is compiled.
    `has_parameters` tells whether the parameters exist, or are to be initialized.
    """
    # A loop copies the activations of all blocks into stacked arrays and out of them: on an H100, a quarter of a training
    # step of ViT-S/16.  Recomputed blocks stay in a loop, because outside of it the compiler keeps their activations.
    unroll = execution.unroll or (config.depth if is_on_gpu() and execution.remat == "none" else 1)
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = {"none": is_stored, "dots": dots, "full": None}[execution.remat]
    if execution.remat != "none" or is_on_gpu():
        # Outside of a loop, the compiler would merge what is computed again with what was computed before.
        block = nn.remat(block, prevent_cse=unroll >= config.depth, policy=policy)
    scan = nn.scan(
        block,
        variable_axes={"params": 0, "intermediates": 0, "fed": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),
        length=config.depth,
        unroll=unroll,
        # The check traces the block once more.  It draws random keys too, on which initial values depend.
        check_constancy_invariants=not has_parameters,
    )
    return scan(config, execution)


def check_images(images: Array, config: ViTConfig) -> None:
    """Raise InputError unless `images` is a batch of floating-point images that fits the config, on automatic mesh axes."""
    require_type("images are", images, *ARRAYS)
    expected, c = "(batch, height, width, channels)", config.in_channels
    if images.ndim != 4:
        raise InputError(f"images have shape {images.shape}: expected {expected}; a single image is images[None]")
    if images.shape[3] != c:
        hint = "; these look channels-first: use images.transpose(0, 2, 3, 1)" if images.shape[1] == c else ""
        raise InputError(f"images have shape {images.shape}: expected {expected} with {c} channels{hint}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise InputError(
            f"images are {images.dtype}: expected floating-point numbers; normalize them first, "
            "vit_jax.normalize(images, config.pixels)"
        )
    sharding = jax.typeof(images).sharding
    sharded = {name for entry in sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if axes := [name for name in sharding.mesh.explicit_axes if name in sharded]:
        raise InputError(
            f"images are sharded over the explicit mesh axis {axes[0]!r}, and the model does not state how its arrays are "
            "sharded: call jax.sharding.auto_axes(model.apply, out_sharding=NamedSharding(mesh, PartitionSpec(...))), or "
            "make a mesh with automatic axis_types"
        )


def image_size(images: Array) -> tuple[int, int]:
    """Return the (height, width) of images, (B, H, W, C).

    Raises:
        InputError: they are symbols of a program that is exported.
    """
    height, width = images.shape[1:3]
    if not (isinstance(height, int) and isinstance(width, int)):
        raise InputError(
            f"image size {height} x {width} is symbolic: export at one image size; only the batch may be dynamic"
        )
    return height, width


def at_least_float32(x: Array) -> Any:
    """Return the dtype for sums and exponentials: that of x, but at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)
