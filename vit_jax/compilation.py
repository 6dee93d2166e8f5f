"""Directions to XLA: options of a program, what to store for gradients, which kernels to separate, which layout to use."""

import platform
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from vit_spec import ViTConfig, flops
from vit_spec.config import check_config
from vit_spec.errors import require
from vit_spec.typed_fields import coerce

STORED = "stored for the backward pass"  # the name of arrays for jax.checkpoint

ONEDNN = {
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}
# Of a batch.  With one image, oneDNN takes 1.05 times as long for the matrices of ViT-S and ViT-B (benchmarks/linear.py).
FEWEST_TOKENS, FEWEST_FLOPS = 1500, 5e10


def compiler_options(config: ViTConfig, batch_size: int) -> dict[str, Any] | None:
    """Return options with which a program of the twin is fast on the default device; None for XLA's defaults.

        forward = jax.jit(model.apply, compiler_options=vit_jax.compiler_options(config, batch_size))

    On x86 CPUs, oneDNN then computes the matrix products of large batches, instead of YNN and Eigen; all are part of
    jaxlib.  The forward pass of 32 images of ViT-S/16 takes 0.9 of the time, with rounding errors of the same size.  XLA
    calls the options experimental; for a version that does not have them, the result is None.  JAX cannot write such
    programs to its persistent compilation cache, and warns of it.

    Args:
        config: the model.
        batch_size: images of a batch.

    Raises:
        vit_spec.InputError: the batch size is no integer, or negative.
    """
    check_config(config)
    batch_size = coerce("batch_size", batch_size, int)
    require(batch_size >= 0, f"batch_size is {batch_size}: give a number of images")
    is_large = batch_size * config.num_tokens >= FEWEST_TOKENS and batch_size * flops(config) >= FEWEST_FLOPS
    return dict(ONEDNN) if is_large and default_device().platform == "cpu" and has_onednn() else None


@cache
def has_onednn() -> bool:
    """Return whether XLA computes matrix products by oneDNN if it is told to.  Only builds for x86 have been measured."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    operand = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    with jax.default_device("cpu"), warnings.catch_warnings(action="ignore"):
        product = jax.jit(jnp.matmul, compiler_options=ONEDNN).lower(operand, operand)
        try:
            return "__onednn_fusion" in (product.compile().as_text() or "")
        except jax.errors.JaxRuntimeError:  # unknown options
            return False


def fast_compile_options() -> dict[str, int] | None:
    """Return XLA options for programs that run once, such as initialization: on CPU they compile four times faster."""
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None


def recompute_in_backward(function: Callable[..., Array], static_argnums: tuple[int, ...] = ()) -> Callable[..., Array]:
    """Return `function`, which then stores only its inputs for the backward pass, and computes the rest again.

    By default jax stores up to six arrays of a norm or an activation function, which doubles those of a block.  On GPUs,
    `is_stored` decides for whole blocks.
    """

    @wraps(function)
    def run(*args: Any) -> Array:
        platform = default_device().platform
        if platform == "gpu":
            return function(*args)
        # Where the blocks are not in a loop (`scan_blocks`), the compiler would merge both computations.
        return jax.checkpoint(function, prevent_cse=platform != "tpu", static_argnums=static_argnums)(*args)

    return run


def stored(x: Array) -> Array:
    """Return x, which a block on a GPU then stores for its backward pass."""
    # A name is an operation: elsewhere, jax would store its operand as well where the backward pass needs both.
    return checkpoint_name(x, STORED) if is_on_gpu() else x


@jax.custom_jvp
def stored_exp(x: Array) -> Array:
    """Return exp(x), stored as by `stored`, also for its own derivative."""
    return stored(jnp.exp(x))


@stored_exp.defjvp
def _stored_exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = stored_exp(*primals)
    return y, tangents[0] * y


def is_stored(primitive: Any, *_: Any, **options: Any) -> bool:
    """Return whether a block on a GPU stores the result of an operation for its backward pass: a policy of jax.checkpoint.

    It stores what takes long to compute, and computes sums, norms and activation functions again, in the kernels that need
    them.  So the sum of a product and a bias, for example, is never written to memory.
    """
    if primitive.name == "name":
        return bool(options["name"] == STORED)
    return primitive.name in ("dot_general", "dot_product_attention_fwd_wrapper")


def separately(x: Array) -> Array:
    """Return x, computed by a GPU kernel of its own."""
    return lax.optimization_barrier(x) if is_on_gpu() else x


@jax.custom_jvp
def gradient_separately(x: Array) -> Array:
    """Return x; on GPUs, a kernel of its own computes the gradient of x."""
    return x


@gradient_separately.defjvp
def _gradient_separately_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], separately(tangents[0])


def residual_tokens(x: Array) -> Array:
    """Return tokens (B, T, width) to which residual connections add: stored, and on GPUs with jax 0.11 or later row-major.

    Without this layout, the compiler chooses the one that suits the sum over images in the gradient of learned positions,
    and transposes the tokens at every norm.  Earlier compilers do not.  With the layout, the compiler of jax 0.10 gathers
    images that a mesh shards.
    """
    is_affected = jax.__version_info__ >= (0, 11) and is_on_gpu()
    return stored(with_layout_constraint(x, Layout((0, 1, 2))) if is_affected else x)


def is_on_gpu() -> bool:
    """Return whether programs are compiled for a GPU."""
    return default_device().platform == "gpu"


def default_device() -> jax.Device:
    """Return jax's default device, which `jax.default_device` can set."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device
