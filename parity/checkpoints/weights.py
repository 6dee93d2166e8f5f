"""Checkpoints in memory, strictly validated against their config."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, as_array, shape_and_dtype
from parity.checkpoints.assumptions import Assumption, Override
from parity.checkpoints.columns import parameter_of
from parity.checkpoints.formats import Format, get
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.preprocessing import Preprocessing
from vit_spec import InputError, ViTConfig
from vit_spec.config import check_config

Tree = Mapping[str, Any]  # key -> array, or nested; of numpy, jax or torch

TaskName = Literal["classes", "labels", "values"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)

# If the config has this many times more arrays than the checkpoint, it is another model's, and its keys are not listed.
_MAX_MISSING_RATIO = 50


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights of a model, together with its config.

    Attributes:
        config: the model.
        format: the name of the format of the arrays, with its variant if the format has several: "google:linen".
        arrays: key -> array, exactly as the format stores them.  Arrays of a file are read when they are used.
        container: the kind of file, e.g. "safetensors"; "" for weights that were not read from a file.
        path: the file or folder that was read, of a run folder the file in it; "" for weights that were not read from one.
        assumed: the properties of the model that were assumed, because neither the file nor the file from which it was
            converted states them.
        overridden: the config overrides of the user that replace another value, which the file states.
        left: one line, with the reason, for each part of the file that was not read.
        labels: num_classes names of the outputs; None if the outputs have no names.
        preprocessing: how an image becomes the pixels that `config.pixels` normalizes; None if unknown.
        task: the meaning of the outputs: "classes" are logits of mutually exclusive classes, "labels" are logits of
            independent labels, "values" are numbers, as in a regression.
    """

    config: ViTConfig
    format: str
    arrays: Mapping[str, Any] = field(repr=False)
    container: str = ""
    assumed: tuple[Assumption, ...] = ()
    left: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    preprocessing: Preprocessing | None = None
    task: TaskName = "classes"
    overridden: tuple[Override, ...] = ()
    path: str = ""


def flatten(tree: Tree, format: Format) -> dict[str, Any]:
    """Return nested weights as one dictionary, with keys joined by the format's separator.

    Raises:
        InputError: the tree is not a mapping, a key is not a string, or two entries have the same joined key.
    """
    if not isinstance(tree, Mapping):
        raise InputError(
            f"weights are a {type(tree).__name__}: give a mapping of names to arrays, such as a state dict or "
            "nnx.state(model, nnx.Param)"
        )
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


def validate(checkpoint: Checkpoint) -> dict[str, np.dtype[Any]]:
    """Check that a checkpoint has exactly the keys, shapes and dtypes of its config, and return each parameter's dtype.

    Raises:
        InputError: a key is missing, unexpected, misshapen or of a wrong dtype; the message lists every such key, with the
            expected shape or dtype.
    """
    config, format, arrays = checkpoint.config, get(checkpoint.format), checkpoint.arrays
    wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": [], "of a wrong dtype": []}
    dtypes: dict[str, np.dtype[Any]] = {}
    expected, column = set(), format.layouts(config)
    count = sum(prod(config.sizes[axis] for axis in layout.key_axes) for layout in column.values())
    if count > _MAX_MISSING_RATIO * (len(arrays) + 1):  # the missing keys would fill a screen, or the memory
        raise InputError(
            f"these weights do not match the config in format {format.name!r}: they are {len(arrays):,} arrays, but a "
            f"model of depth={config.depth} has {count:,}. Give the config that they were made with"
        )
    for name, layout in column.items():
        parameter, shape, seen = parameter_of(name), layout.shape(config.sizes), set()
        for key in layout.keys(config.sizes):
            expected.add(key)
            if key not in arrays:
                wrong["missing"].append(f"{key} | {layout.axes_text} {shape}")
                continue
            given, dtype = shape_and_dtype(arrays[key])
            if dtype not in FLOAT_DTYPES:
                wrong["of a wrong dtype"].append(f"{key} is {dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
                continue
            if given != shape:
                wrong["misshapen"].append(f"{key} {given}, expected {layout.axes_text} {shape}")
            seen.add(dtype)
        seen |= {dtypes[parameter].name} if parameter in dtypes else set()  # of another piece
        if len(seen) > 1:
            wrong["of a wrong dtype"].append(f"{layout.key} is {' and '.join(sorted(seen))}, expected one of them")
        if seen:
            dtypes[parameter] = FLOAT_DTYPES[min(seen)]
    others = [key for key in arrays if key not in expected]
    extra = [key for key in others if not any(re.fullmatch(p, key) for p in format.ignored_keys_of_variant)]
    wrong["unexpected"] = [f"{key!r} {shape_and_dtype(arrays[key])[0] or ''}".strip() for key in extra]

    if not wrong["misshapen"] and not wrong["missing"]:  # else a hostile config may give arrays of any size
        format.check_column(column, config.sizes)
    if lists := [f"{len(keys)} {what}: {'; '.join(keys)}" for what, keys in wrong.items() if keys]:
        raise InputError(
            f"these weights do not match the config in format {format.name!r}: {'. '.join(lists)}. "
            f"Give the config and the format that they were made with, or correct these keys"
        )
    check_ignored_values(format, config, {key: arrays[key] for key in others})
    return dtypes


def check_ignored_values(format: Format, config: ViTConfig, arrays: Mapping[str, Any]) -> None:
    """Check that arrays are what the reason says for which a format ignores them, if it is about their values.

    Args:
        format: the format of the arrays.
        config: the model.
        arrays: arrays that are not parameters of the model, by key.

    Raises:
        InputError: an array has other values, so the model may be another one than the config describes.
    """
    # No such array is larger than a table of all pairs of tokens, a value for each, or the classifier's bias.
    largest = max(config.num_tokens * max(config.num_tokens, config.width), config.num_classes)
    for pattern, has_values in format.ignored_values.items():
        for key in sorted(key for key in arrays if re.fullmatch(pattern, key)):
            shape, _ = shape_and_dtype(arrays[key])
            if shape is None or prod(shape) > largest or not has_values(as_array(arrays[key]), config):
                raise InputError(
                    f"{key} of format {format.name!r} has other values than expected ({format.ignored_keys[pattern]}), so "
                    f"it cannot be ignored: give the config that it was made with, or correct {key}"
                )


def as_checkpoint(weights: Tree | Checkpoint, config: ViTConfig | None, format: Literal["torch", "jax"]) -> Checkpoint:
    """Return `weights` if they are a checkpoint, otherwise a checkpoint of them, their config and their format.

    Raises:
        InputError: a checkpoint together with a config, weights without one, a config that is no `ViTConfig`, or the
            weights of the other twin.
    """
    if isinstance(weights, Checkpoint):
        if config is not None:
            raise InputError("a checkpoint has its own config: leave the second argument out")
        return weights
    if config is None:
        raise InputError("weights alone do not say which model they belong to: give its config as the second argument")
    check_config(config)
    arrays = flatten(weights, get(format))
    if format == "jax" and isinstance(weights.get("params"), Mapping):
        raise InputError("weights have the key 'params', as variables of vit_jax: give variables['params']")
    kinds = {"torch": "a state dict of PyTorch", "jax": "parameters of vit_jax"}
    other = next(name for name in kinds if name != format)
    keys = {name: get(name).layouts(config)[PROJECTION].key for name in kinds}
    if keys[format] not in arrays and keys[other] in flatten(weights, get(other)):
        instead = f"parity.to_{format}(weights, config) converts them"
        raise InputError(f"weights are {kinds[other]}, not {kinds[format]}: {instead}")
    return Checkpoint(config, format, arrays)
