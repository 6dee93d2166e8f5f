"""Public functions of the JAX twin: initialize, load and run a model, read its intermediates and attention maps."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from numpy.typing import NDArray

from vit_jax.compilation import compiler_options, fast_compile_options
from vit_jax.execution import Execution
from vit_jax.layers import ARRAYS, ViTModule, at_least_float32
from vit_jax.model import ViT
from vit_jax.noise import random_key
from vit_spec import InputError, ViTConfig
from vit_spec.config import check_config
from vit_spec.errors import block_index, nearest, require_type
from vit_spec.shadowing import check_not_shadowed

Params = dict[str, Any]

ENABLE_64_BIT = 'call jax.config.update("jax_enable_x64", True) first, or round them yourself'  # a remedy of messages


def init(config: ViTConfig, seed: int | Array | NDArray[Any] = 0) -> Params:
    """Return initial float32 parameters, sampled from the distributions that `vit_spec.rows` declares.

    The result is that of linen's `ViT(config).init`.  The function can be traced: under `jax.jit` with `out_shardings`,
    each device computes and stores only its shards.

    Args:
        config: the model.
        seed: seed of the random numbers, from 0 up to 2^64 - 1, also as a scalar integer array; or a key of `jax.random`.
            An array of JAX may be traced.

    Returns:
        The parameters as nested dictionaries; those of the blocks are stacked on a leading axis.

    Raises:
        vit_spec.InputError: the seed is no integer and no key, or out of range.
    """
    check_config(config)
    key, is_traced = _as_key(seed), isinstance(jnp.zeros(()), jax.core.Tracer)
    return _draw(config, key) if is_traced else _compiled_draw(config)(key)


def _draw(config: ViTConfig, key: Array) -> Params:
    images = jnp.zeros((1, *config.image_size, config.in_channels))
    return ViT(config).init(key, images)["params"]


@lru_cache(maxsize=4)  # for further seeds of a model
def _compiled_draw(config: ViTConfig) -> Callable[[Array], Params]:
    return jax.jit(lambda key: _draw(config, key), compiler_options=fast_compile_options())


def _as_key(seed: int | Array | NDArray[Any]) -> Array:
    """Return the key of a seed, or a key unchanged; see `init`."""
    if not isinstance(seed, Array | np.ndarray):
        return random_key(seed)
    # A key of the old kind is a vector of words.
    is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and not seed.ndim
    if is_key or (seed.dtype == jnp.uint32 and seed.shape == jax.random.key_data(jax.random.key(0)).shape):
        return jnp.asarray(seed)
    if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise InputError(
            f"seed is an array of {seed.dtype}, {seed.shape}: give an integer, a scalar integer array, or a key of "
            "jax.random.key; of PRNGKey only one of the default implementation"
        )
    return jax.random.key(seed) if isinstance(seed, jax.core.Tracer) else random_key(seed.item())


def load(
    path: str | PathLike[str],
    execution: Execution | None = None,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[ViT, Params]:
    """Return the model and the parameters of a checkpoint; see `parity.load` for what can be read.

    Args:
        path: a checkpoint file or folder, a run folder (its best weights), or "hf://owner/name".
        execution: execution options of the model.
        format: the name of the checkpoint's format; by default it is detected.
        given: config overrides by dotted field name, such as {"norms.eps": 1e-5}.
        strip: the beginning of the model's keys if it is not a known wrapper, such as "net.vit."; see `parity.load`.
        ignore: regular expressions for whole keys that are not parameters of the model; see `parity.load`.
        num_classes: replace the classifier by a new one with this number of outputs; 0 removes it.
        image_size: (height, width) in pixels, or the side of a square; positions are resampled to it.

    Returns:
        The model, and its parameters as nested dictionaries of numpy arrays in the dtypes of the checkpoint.

    Warns:
        parity.AssumptionWarning: lists the config fields that the checkpoint does not specify, and the assumed values;
            and those of `given` that replace another value, which it specifies.
        parity.SurgeryWarning: describes the changes that num_classes or image_size made.
        UserWarning: the model will round the parameters, because jax's 64-bit types are disabled.

    Raises:
        vit_spec.InputError: the path does not exist, or is not a checkpoint of a ViT.
    """
    check_not_shadowed("parity")
    import parity.checkpoints.loading  # the only import of a higher layer: parity reads all formats

    checkpoint = parity.checkpoints.loading.load_for_model(
        path,
        format=format,
        given=given,
        strip=strip,
        ignore=ignore,
        num_classes=num_classes,
        image_size=image_size,
    )
    params = parity.to_jax(checkpoint)
    if wide := rounded_dtypes(params):
        warnings.warn(f"{path}: params are {wide}, which jax will round: {ENABLE_64_BIT}", stacklevel=2)
    return ViT(checkpoint.config, execution or Execution()), params


def rounded_dtypes(params: Any) -> str:
    """Return the dtypes in a pytree that jax rounds because 64-bit types are disabled, or "" if there are none."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    return ", ".join(sorted(str(each) for each in dtypes if jax.dtypes.canonicalize_dtype(each) != each))


def compile_forward(model: ViT, params: Params, batch_size: int) -> Callable[[Array], Array]:
    """Return a compiled function for inference with fixed parameters on one device: images (B, H, W, C) -> logits.

        forward = vit_jax.compile_forward(model, params, batch_size=1)
        logits = forward(images)

    The function holds a copy of the parameters, with arrays of its own for each block, and matrices in the dtype of
    `Execution(dtype=...)`.  `jax.jit(model.apply)` rounds matrices to that dtype at each call.  On CPUs each of its blocks
    also copies its parameters out of the stacked arrays.  On CPUs in float32, the function takes 0.9 of the time for one
    image of ViT-B/16, and as long for eight (`python -m benchmarks.compile_forward`).  It takes longer to compile.  Inside
    another program, such as one for `jax.export`, the parameters are constants and the compiler options that program's.

    Args:
        model: the model.
        params: its parameters.
        batch_size: images of a batch; it selects the `compiler_options`.  The function takes any number of images.

    Raises:
        flax.errors.FlaxError, ValueError: the parameters are not those of the model.
        vit_spec.InputError: the model is not a `ViT`, or the batch size is no integer, or negative.
    """
    program, own = _forward_program(model, params, batch_size)
    inner = jax.jit(program.__wrapped__)  # jax refuses compiler options inside another program

    def forward(images: Array) -> Array:
        return (inner if isinstance(images, jax.core.Tracer) else program)(own, images)

    return forward


def _forward_program(model: ViT, params: Params, batch_size: int) -> tuple[Any, Params]:
    """Return the jitted function of `compile_forward`, and its first argument."""
    require_type("model is", model, ViT)
    config, execution = model.config, model.execution
    image = jax.ShapeDtypeStruct((1, *config.image_size, config.in_channels), jnp.float32)
    jax.eval_shape(model.apply, {"params": params}, image)  # checks the parameters
    unrolled = ViT(config, replace(execution, unroll=config.depth))

    def copy(path: Any, leaf: Any) -> Array:
        names = [entry.key for entry in path]
        # Every other matrix is rounded before it is used; the MLP of offsets is computed in float32.
        is_rounded = names[-1] == "kernel" and "rel_pos" not in names
        return jnp.array(leaf, execution.dtype if is_rounded else None)

    own = dict(jax.tree_util.tree_map_with_path(copy, params))  # it may be a FrozenDict
    own["blocks"] = [jax.tree.map(lambda x, i=i: x[i], own["blocks"]) for i in range(config.depth)]

    def forward(own: Params, images: Array) -> Array:
        # The compiler replaces an entry of a stack by the array that was stacked.
        stacked = jax.tree.map(lambda *entries: jnp.stack(entries), *own["blocks"])
        return unrolled.apply({"params": {**own, "blocks": stacked}}, images)  # type: ignore[return-value]

    return jax.jit(forward, compiler_options=compiler_options(config, batch_size)), own


def intermediates(
    model: ViT,
    params: Params,
    images: Array,
    fed: Mapping[str, Array] | None = None,
    *,
    stacked: bool = False,
    **options: Any,
) -> tuple[Array, dict[str, Array]]:
    """Return the logits and all named intermediates of a forward pass; their order has no meaning.

    The output of a module has the module's name ("patch_embed", "blocks.3.attn", "blocks.3", "norm").  Intermediates inside
    modules have their own names: "tokens", "positions", "embed" (the input of the blocks), "blocks.3.attn.q", "k", "v"
    (after norms and rotary embedding), "scores", "weights", "heads" (before the output projection), "blocks.3.sum" (after
    the first residual connection), "blocks.3.mlp.activation", "pool".  An intermediate that is computed twice has two
    names: "fc_norm" and "fc_norm (2)".  `vit_torch.intermediates` uses the same names.

    Args:
        model: the model.
        params: its parameters.
        images: (B, H, W, C).
        fed: values by name that replace intermediates in the forward pass; an intermediate of the blocks is replaced in
            all blocks or in none.
        stacked: return intermediates of the blocks as one array, (depth, ...), without a block number in its name.  Under
            `jax.jit`, separate arrays would be copies.
        options: passed to `ViT.apply`.  With train=True and rngs, "blocks.3.drop_path" is the mask (B, 1, 1) of stochastic
            depth for attention, and "blocks.3.drop_path (2)" the mask for the MLP; both can be fed.

    Raises:
        vit_spec.InputError: the model is not a `ViT`; or `fed` has a name that replaces nothing.
    """
    require_type("model is", model, ViT)

    def run(variables: Params, images: Array) -> Any:
        return model.apply(variables, images, mutable=["intermediates"], **options)

    with nn.intercept_methods(_record_output):
        variables = {"params": params}
        if fed:
            _, shapes = jax.eval_shape(run, variables, images)
            variables["fed"] = _fed_pytree(shapes["intermediates"], fed, model.config.depth)
        logits, state = run(variables, images)
    found = {name: value for _, name, value in _iterate_recorded(state["intermediates"])}
    return logits, found if stacked else unstacked(found)


def unstacked(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return intermediates with stacked arrays split into one array per block; numpy arrays are split into views.

    Args:
        found: intermediates by name, as `intermediates` returns them with `stacked=True`.

    Raises:
        vit_spec.InputError: a value is no array, as in the nested dictionaries of parameters.
    """
    split: dict[str, Any] = {}
    for name, value in found.items():
        if not isinstance(value, ARRAYS):
            raise InputError(
                f"{name!r} is a {type(value).__name__}: give arrays by name, as vit_jax.intermediates(..., stacked=True) "
                "returns them"
            )
        blocks = enumerate(value) if name.startswith("blocks") else [(0, value)]
        split |= {name.replace("blocks", f"blocks.{i}", 1): entry for i, entry in blocks}
    return split


def _record_output(call: Callable[..., Any], arguments: Any, options: Any, context: Any) -> Any:
    """Record the output of a module as an intermediate; an interceptor for `nn.intercept_methods`."""
    value, module = call(*arguments, **options), context.module
    if context.method_name != "__call__" or not isinstance(module, ViTModule):
        return value
    return (
        (module.intermediate("__call__", value[0]), None)
        if isinstance(value, tuple)
        else module.intermediate("__call__", value)
    )


def _iterate_recorded(tree: Any) -> Iterator[tuple[list[str], str, Any]]:
    """Yield the path in the pytree, the name without block number, and the value of each recorded intermediate."""
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        *words, last = (entry.key for entry in path[:-1])
        suffix = f" ({path[-1].idx + 1})" if path[-1].idx else ""
        name = ".".join(words if last == "__call__" else [*words, last]) or "logits"
        yield [*words, last + suffix], name + suffix, value


def _fed_pytree(template: Any, fed: Mapping[str, Array], depth: int) -> dict[str, Any]:
    """Return the fed values as the pytree that `ViTModule.intermediate` reads, with values of the blocks stacked.

    Args:
        template: a pytree of recorded intermediates, or of their shapes.
        fed: values by name.
        depth: number of blocks.

    Raises:
        InputError: a name is not that of an intermediate, or its intermediate is not replaced in all blocks.
    """
    tree: dict[str, Any] = {}
    known: list[str] = []
    used: set[str] = set()
    for path, name, _ in _iterate_recorded(template):
        names = [name.replace("blocks", f"blocks.{i}", 1) for i in range(depth)] if path[0] == "blocks" else [name]
        known += names
        if all(each in fed for each in names):
            used.update(names)
            node = tree
            for word in path[:-1]:
                node = node.setdefault(word, {})
            node[path[-1]] = jnp.stack([fed[each] for each in names]) if path[0] == "blocks" else fed[name]
    if unknown := [name for name in fed if name not in known]:
        raise InputError(
            f"fed names {', '.join(map(repr, unknown))}, which this forward pass does not compute: give names that "
            f"intermediates returns{nearest(unknown[0], known)}"
        )
    if partial := [name for name in fed if name not in used]:
        raise InputError(
            f"fed names {', '.join(map(repr, partial))}, but not the same of all {depth} blocks: feed all or none"
        )
    return tree


def attention_maps(model: ViT, params: Params, images: Array, block: int = -1) -> Array:
    """Return the attention weights of a block, (B, heads, T, T): row t has the weights of the query of token t.

    The class token has index 0; patches start at index `config.num_prefix`, in row-major order of the image.

    Args:
        model: the model.
        params: its parameters.
        images: (B, H, W, C).
        block: index of the block; negative indices count from the last block.

    Raises:
        vit_spec.InputError: the model is not a `ViT`, or has no such block.
    """
    _, found = intermediates(model, params, images)
    block = block_index(block, model.config.depth)
    q, k = (found[f"blocks.{block}.attn.{name}"] for name in "qk")
    options: Any = {"precision": model.execution.precision, "preferred_element_type": at_least_float32(q)}
    scores = model.config.scale * jnp.einsum("bthd,bshd->bhts", q, k, **options)
    if model.config.positions.relative != "none":
        scores = scores + found["rel_pos" if model.config.positions.relative_shared else f"blocks.{block}.attn.rel_pos"]
    return jax.nn.softmax(scores, axis=-1)
