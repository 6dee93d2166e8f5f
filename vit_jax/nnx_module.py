"""The model as an NNX module, through flax's bridge from linen."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.errors import InvalidRngError

from vit_jax.api import ENABLE_64_BIT, Params, init, rounded_dtypes
from vit_jax.execution import Execution
from vit_jax.model import ViT
from vit_spec import InputError, ViTConfig

_MAX_LISTED = 8


class NNXViT(flax_nnx.bridge.ToNNX):
    """The linen model as an NNX module, with the modes of NNX: `train()` enables dropout, `eval()` disables it.

    Its `nnx.Param`s have the paths of the parameters of `vit_jax`.  `vit_jax.nnx` makes one.
    """

    def __init__(self, model: ViT, rngs: flax_nnx.Rngs | None) -> None:
        super().__init__(model, rngs)
        self.to_nnx__deterministic = True  # flax takes attributes without this prefix for variables of the linen module

    @property
    def deterministic(self) -> bool:
        """Whether dropout is disabled; `train()` and `eval()` set it, as for every NNX module with this attribute."""
        return self.to_nnx__deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        self.to_nnx__deterministic = value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the model: images (B, H, W, C) -> logits (B, num_classes).  `train` overrides the mode of the module."""
        if options.get("method") is None and len(arguments) < 2:  # the second argument is `train`
            options.setdefault("train", not self.deterministic)
        try:
            return super().__call__(*arguments, **options)
        except InvalidRngError:
            raise InputError(
                "dropout needs random numbers: make the module with vit_jax.nnx(..., rngs=nnx.Rngs(dropout=SEED))"
            ) from None


def nnx(
    config: ViTConfig, params: Params, execution: Execution | None = None, *, rngs: flax_nnx.Rngs | None = None
) -> NNXViT:
    """Return the model with these parameters as an NNX module: images (B, H, W, C) -> logits (B, num_classes).

    `nnx.Optimizer`, `nnx.jit`, `nnx.grad`, `nnx.state`, `nnx.split` and `nnx.merge` work as for any NNX module; the module
    may be part of another one.  The parameters are `nnx.Param`s: `parity.to_torch(nnx.state(model, nnx.Param), config)` and
    the other functions of `parity` accept them, and `nnx.to_pure_dict` returns those of `vit_jax`.

    Args:
        config: the model.
        params: its parameters, as `vit_jax.init` and `vit_jax.load` return them; numpy arrays are copied to the device.
        execution: execution options of the model.
        rngs: random number generators for dropout, `nnx.Rngs(dropout=SEED)`.  Each call in training mode draws new numbers.

    Returns:
        The module, in evaluation mode: `model.train()` enables the dropout of `config.regularisation`.

    Raises:
        InputError: the parameters do not match the config, or jax would round them because 64-bit types are disabled.
    """
    _check(config, params)
    module = NNXViT(ViT(config, execution or Execution()), rngs)
    for name, value in params.items():
        setattr(module, name, flax_nnx.data(jax.tree.map(lambda leaf: flax_nnx.Param(jnp.asarray(leaf)), value)))
    return module


def _check(config: ViTConfig, params: Params) -> None:
    """Raise InputError unless the parameters have the paths and shapes of the config, and dtypes that jax preserves."""
    if not isinstance(params, Mapping):
        raise InputError(f"params are a {type(params).__name__}: give nested dictionaries, as vit_jax.init returns them")
    given, expected = _leaves(params), _leaves(jax.eval_shape(lambda: init(config)))
    wrong = [f"{path} is missing" for path in expected.keys() - given.keys()]
    wrong += [f"{path} is unexpected" for path in given.keys() - expected.keys()]
    wrong += [
        f"{path} is {jnp.shape(given[path])}, expected {expected[path].shape}"
        for path in expected.keys() & given.keys()
        if jnp.shape(given[path]) != expected[path].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        listed = "; ".join(sorted(wrong)[:_MAX_LISTED])
        raise InputError(f"params do not match the config: {listed}{more}. Give the config that they were made with")
    if wide := rounded_dtypes(params):
        raise InputError(f"params are {wide}, which jax would round: {ENABLE_64_BIT}")


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the arrays of nested dictionaries by their paths, joined by "/"."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
