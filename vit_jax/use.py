"""Starting, loading and looking into the functional twin."""

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from vit_jax.execution import Execution
from vit_jax.layers import Part, at_least_float32
from vit_jax.model import ViT
from vit_spec import ViTConfig
from vit_spec.shadowing import require_own

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


def load(
    path: str | PathLike[str],
    execution: Execution | None = None,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[ViT, Params]:
    """Return the model and the parameters that a file holds; see `parity.load` for what can be read.

    Args:
        path: a file, a folder, a run, or "hf://owner/name".
        execution: how the model runs.
        format: the name of the file's format; by default it is recognised.
        given: fields of the config to set against what the file says, dotted as in {"norms.eps": 1e-5}.
        num_classes: width of the classifier: another one than the file's is drawn anew, 0 takes it away.
        image_size: in pixels, (height, width) or the side of a square: positions are resampled to it.

    Warns:
        parity.AssumptionWarning: names everything about the model that the file does not tell and that was assumed.
        parity.SurgeryWarning: says what num_classes or image_size changed.

    Raises:
        vit_spec.InputError: no such file, or one that is not a ViT's weights.
    """
    require_own("parity")
    import parity.checkpoints.loading  # the one import that points up: parity reads all formats

    checkpoint = parity.checkpoints.loading.for_model(
        path, format=format, given=given, num_classes=num_classes, image_size=image_size
    )
    return ViT(checkpoint.config, execution or Execution()), parity.to_jax(checkpoint)


def intermediates(
    model: ViT,
    params: Params,
    images: Array,
    fed: Mapping[str, Array] | None = None,
    *,
    stacked: bool = False,
    **options: Any,
) -> tuple[Array, dict[str, Array]]:
    """Return the logits, and every named intermediate on the way to them, in the order of their names.

    A module's output has the module's name ("patch_embed", "blocks.3.attn", "blocks.3", "norm"); what is between modules
    has one of its own: "tokens", "positions", "embed" (what enters the blocks), "blocks.3.attn.q", "k", "v" (after norms
    and rotations), "scores", "weights", "heads" (ahead of the output projection), "blocks.3.sum" (after the first half),
    "blocks.3.mlp.activation", "pool".  What is computed twice has two names, "fc_norm" and "fc_norm (2)".  The names are
    those of `vit_torch.intermediates`.

    Args:
        fed: what goes on in the place of the intermediates of these names; of those in blocks, all blocks or none.
        stacked: leave those of the blocks in one array, (depth, ...), without a number in its name: under `jax.jit` each
            block's own would be a copy.
        options: for `ViT.apply`: with train=True and rngs, "blocks.3.drop_path" is the mask of the first half's images,
            "blocks.3.drop_path (2)" that of the second half's, and both can be fed.
    """

    def run(variables: Params, images: Array) -> Any:
        return model.apply(variables, images, mutable=["intermediates"], **options)

    with nn.intercept_methods(_named):
        variables = {"params": params}
        if fed:
            _, shapes = jax.eval_shape(run, variables, images)
            variables["fed"] = _in_place(shapes["intermediates"], fed, model.config.depth)
        logits, state = run(variables, images)
    found = {name: value for _, name, value in _leaves(state["intermediates"])}
    return logits, found if stacked else unstacked(found)


def unstacked(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return intermediates with those of the blocks one by one; of numpy's arrays these are views."""
    each: dict[str, Any] = {}
    for name, value in found.items():
        blocks = enumerate(value) if name.startswith("blocks") else [(0, value)]
        each |= {name.replace("blocks", f"blocks.{i}", 1): entry for i, entry in blocks}
    return each


def _named(call: Callable[..., Any], arguments: Any, options: Any, context: Any) -> Any:
    """Keep a module's output as it keeps what is between modules."""
    value, module = call(*arguments, **options), context.module
    if context.method_name != "__call__" or not isinstance(module, Part):
        return value
    return (module.keep("__call__", value[0]), None) if isinstance(value, tuple) else module.keep("__call__", value)


def _leaves(tree: Any) -> Iterator[tuple[list[str], str, Any]]:
    """Yield what modules kept: where it lies, its name without the number of a block, and the value."""
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        *words, last = (entry.key for entry in path[:-1])
        turn = f" ({path[-1].idx + 1})" if path[-1].idx else ""
        name = ".".join(words if last == "__call__" else [*words, last]) or "logits"
        yield [*words, last + turn], name + turn, value


def _in_place(kept: Any, fed: Mapping[str, Array], depth: int) -> dict[str, Any]:
    """Return what is fed as `Part.keep` looks for it: in the modules' places, that of the blocks stacked."""
    tree: dict[str, Any] = {}
    for path, name, _ in _leaves(kept):
        names = [name.replace("blocks", f"blocks.{i}", 1) for i in range(depth)] if path[0] == "blocks" else [name]
        if all(each in fed for each in names):
            node = tree
            for word in path[:-1]:
                node = node.setdefault(word, {})
            node[path[-1]] = jnp.stack([fed[each] for each in names]) if path[0] == "blocks" else fed[name]
    return tree


def attention_maps(model: ViT, params: Params, images: Array, block: int = -1) -> Array:
    """Return a block's attention weights, (B, heads, T, T): row t says where token t looks.

    The class token is row 0, and patches start at column `config.num_prefix`, row by row of the image.
    """
    block = range(model.config.depth)[block]
    _, found = intermediates(model, params, images)
    q, k = (found[f"blocks.{block}.attn.{name}"] for name in "qk")
    scores = model.config.scale * jnp.einsum("bthd,bshd->bhts", q, k, precision=model.execution.precision)
    return jax.nn.softmax(scores.astype(at_least_float32(scores)), axis=-1)
