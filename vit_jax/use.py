"""Starting, loading and looking into the functional twin."""

from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.execution import Execution
from vit_jax.layers import at_least_float32
from vit_jax.model import ViT
from vit_spec import ViTConfig

Params = dict[str, Any]


def init(config: ViTConfig, seed: int = 0) -> Params:
    """Return fresh float32 parameters, drawn by the laws of `vit_spec.rows`: those of linen's `ViT(config).init`.

    It can be traced: under `jax.jit` with `out_shardings` no device ever holds more than its part.
    """
    images = jnp.zeros((1, *config.image_size, config.in_channels))

    def draw() -> Params:
        return ViT(config).init(jax.random.key(seed), images)["params"]

    if isinstance(images, jax.core.Tracer):
        return draw()
    return jax.jit(draw, compiler_options=quick_to_compile())()


def quick_to_compile() -> dict[str, int] | None:
    """Options of XLA for what runs once, like drawing parameters: on CPU it compiles four times sooner."""
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None


def load(path: str | PathLike[str], execution: Execution | None = None) -> tuple[ViT, Params]:
    """Return the model and the parameters that a file holds; see `parity.load` for what can be read.

    Raises:
        vit_spec.InputError: no such file, or one that is not a ViT's weights.
    """
    import parity  # the one arrow that points up: reading any format is the parity layer's work

    checkpoint = parity.load(path)
    return ViT(checkpoint.config, execution or Execution()), parity.to_jax(checkpoint)


def intermediates(model: ViT, params: Params, images: Array) -> tuple[Array, dict[str, Array]]:
    """Return the logits, and every named intermediate on the way to them, in the order of their names.

    A module's output has the module's name ("patch_embed", "blocks.3.attn", "blocks.3", "norm"); what is between modules
    has one of its own: "embed" (the tokens that enter the blocks), "blocks.3.attn.q", "k", "v" (after norms and
    rotations), "heads" (ahead of the output projection), "pool".  The names are those of `vit_torch.intermediates`.
    """
    logits, state = model.apply({"params": params}, images, capture_intermediates=True, mutable=["intermediates"])
    found: dict[str, Array] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(state["intermediates"]):
        words = [entry.key for entry in path if hasattr(entry, "key")]
        name = ".".join(word for word in words if word != "__call__") or "logits"
        if words[0] == "blocks":
            for i in range(model.config.depth):
                found[f"blocks.{i}" + name.removeprefix("blocks")] = value[i]
        else:
            found[name] = value
    return logits, found


def attention_maps(model: ViT, params: Params, images: Array, block: int = -1) -> Array:
    """Return a block's attention weights, (B, heads, T, T): row t says where token t looks.

    The class token is row 0, and patches start at column `config.num_prefix`, row by row of the image.
    """
    block = range(model.config.depth)[block]
    _, found = intermediates(model, params, images)
    q, k = (found[f"blocks.{block}.attn.{name}"] for name in "qk")
    scores = model.config.scale * jnp.einsum("bthd,bshd->bhts", q, k, precision=model.execution.precision)
    return jax.nn.softmax(scores.astype(at_least_float32(scores)), axis=-1)
