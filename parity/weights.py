"""Weights in memory: held to their config without mercy, and moved from one format to another.

Nothing here loads jax or torch before it is handed one of their arrays or asked for one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from parity import layout
from parity.formats import Format, get
from parity.layout import Array
from vit_spec import InputError, ViTConfig

if TYPE_CHECKING:
    import torch

Tree = Mapping[str, Any]  # key -> array, or nested; of numpy, jax or torch

FLOATS = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights that know what they are the weights of.

    config: the model.
    format: the name of the format that the arrays are in.
    arrays: key -> array, exactly as the format has them; of a file, views of it that are read when they are used.
    """

    config: ViTConfig
    format: str
    arrays: Mapping[str, Any] = field(repr=False)


def to_jax(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> dict[str, Any]:
    """Return weights as the parameters of `vit_jax`: nested dictionaries of new numpy arrays, bit for bit.

    Args:
        weights: the state dict of `vit_torch` (or of timm), or a checkpoint in any format.
        config: the model; a checkpoint brings its own.

    Raises:
        InputError: weights that are not exactly this config's; lists every key that is wrong.
    """
    nested: dict[str, Any] = {}
    for key, array in translate(_checkpoint(weights, config, "torch"), "jax"):
        *parents, leaf = key.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return nested


def to_torch(weights: Tree | Checkpoint, config: ViTConfig | None = None) -> "dict[str, torch.Tensor]":
    """Return weights as the state dict of `vit_torch` (and of timm): new tensors on the CPU, bit for bit.

    Args:
        weights: the parameters of `vit_jax`, or a checkpoint in any format.
        config: the model; a checkpoint brings its own.

    Raises:
        InputError: weights that are not exactly this config's; lists every key that is wrong.
    """
    import torch

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype == FLOATS["bfloat16"]:  # of which numpy's and torch's know nothing of each other: hand over bits
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return {key: tensor(array) for key, array in translate(_checkpoint(weights, config, "jax"), "torch")}


def flatten(tree: Tree, format: Format) -> dict[str, Any]:
    """Return nested weights as one dictionary, keys joined as the format joins them.

    Raises:
        InputError: not a mapping of names, or a name given twice.
    """
    if not isinstance(tree, Mapping):
        raise InputError(f"weights are a {type(tree).__name__}: give a mapping of names to arrays, such as a state dict")
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise InputError(f"weights have the key {name!r}: keys must be strings")
        inner = flatten(value, format) if isinstance(value, Mapping) else {"": value}
        for rest, leaf in inner.items():
            key = f"{name}{format.separator}{rest}" if rest else name
            if key in flat:
                raise InputError(f"weights have {key} twice, nested and joined: leave one of them out")
            flat[key] = leaf
    return flat


def check(checkpoint: Checkpoint) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each parameter, after holding every key to the config, both ways.

    Raises:
        InputError: one, that lists every missing, unexpected, misshapen and mistyped key, with what was expected.
    """
    config, format, arrays = checkpoint.config, get(checkpoint.format), checkpoint.arrays
    wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": [], "of a wrong dtype": []}
    dtypes, expected = {}, format.ignored_keys(config)
    for name, place in format.layouts(config).items():
        shape, seen = place.shape(config.sizes), set()
        for key in place.keys(config.sizes):
            expected.add(key)
            if key not in arrays:
                wrong["missing"].append(f"{key} | {place.axes} {shape}")
                continue
            given, dtype = _facts(arrays[key])
            if dtype not in FLOATS:
                wrong["of a wrong dtype"].append(f"{key} is {dtype}, expected one of {', '.join(FLOATS)}")
                continue
            if given != shape:
                wrong["misshapen"].append(f"{key} {given}, expected {place.axes} {shape}")
            seen.add(dtype)
        if len(seen) > 1:
            wrong["of a wrong dtype"].append(f"{place.key} is {' and '.join(sorted(seen))}, expected one of them")
        dtypes[name] = FLOATS[seen.pop()] if seen else FLOATS["float32"]
    wrong["unexpected"] = [f"{key!r} {_facts(arrays[key])[0] or ''}".strip() for key in arrays if key not in expected]

    if lists := [f"{len(keys)} {what}: {'; '.join(keys)}" for what, keys in wrong.items() if keys]:
        raise InputError(
            f"these weights are not the config's in format {format.name!r}: {'. '.join(lists)}. "
            f"Give the config and the format that they were made with, or correct these keys"
        )
    return dtypes


def translate(checkpoint: Checkpoint, to: str) -> Iterator[tuple[str, Array]]:
    """Yield every key of the format `to` with a new numpy array, parameter by parameter, after `check`.

    Raises:
        InputError: an unknown format, one that cannot hold this config, or weights that fail `check`; before any work.
    """
    config, arrays = checkpoint.config, checkpoint.arrays
    source, target = get(checkpoint.format).layouts(config), get(to).layouts(config)
    return layout.convert(source, target, config.sizes, check(checkpoint), lambda key: _on_host(arrays[key]))


def _checkpoint(weights: Tree | Checkpoint, config: ViTConfig | None, format: str) -> Checkpoint:
    """Return the checkpoint that was given, or the one that weights in `format` and their config are."""
    if isinstance(weights, Checkpoint):
        if config is not None:
            raise InputError("a checkpoint brings its own config: leave the second argument out")
        return weights
    if config is None:
        raise InputError("weights alone do not say which model they are of: give its config as the second argument")
    return Checkpoint(config, format, flatten(weights, get(format)))


def _facts(value: Any) -> tuple[tuple[int, ...] | None, str]:
    """Return an array's shape and the name of its dtype; of anything else its type, and no shape."""
    if not hasattr(value, "__array__") or getattr(value, "is_meta", False):
        return None, f"a {type(value).__name__} without values"
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def _on_host(value: Any) -> Array:
    """Return an array of numpy, jax or torch as numpy's, sharing memory where it can."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(FLOATS["bfloat16"])
    host: Array = tensor.numpy()
    return host
