"""The table of a model of the user, as text: a format file, with which its checkpoints are read without its class."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from parity.checkpoints.field_defaults import DEFAULTS
from parity.checkpoints.formats import formats
from parity.comparison.own_model.candidate import Candidate
from vit_spec import ViTConfig
from vit_spec.positions import SCALED_ROTARY

# Fields that a checkpoint does not show.  The statistics of pixels and resampling are no part of a class's function.
_SHOWN = ("positions.kind",)
_NOT_PROVEN = ("pixels.", "resampling.")
_ROTARY = ("positions.rotary_base", "positions.rotary_start", "positions.rotary_grid")


def table_text(
    candidate: Candidate,
    *,
    like: str,
    largest: float,
    strip: str,
    ignored: Mapping[str, str],
    constants: Mapping[str, str],
    given: Sequence[str],
) -> str:
    """Return the text of a table.

    Args:
        candidate: the config and the layouts.
        like: the text that names the class.
        largest: the largest difference in the proof.
        strip: the prefix of keys, or "".
        ignored: regular expression for whole keys that are no parameters -> the reason.
        constants: regular expression for whole keys of constants -> the digest of their values.
        given: the names of fields that the user stated.
    """
    lines = [
        f"# {like} as a format of python -m parity; written by --like",
        f"name: {format_name(like)}",
        f"description: {like.rpartition(':')[2]} of {like.partition(':')[0]}",
    ]
    lines += [f"set: {name}={_value_text(value)}" for name, value in hidden_fields(candidate.config, given).items()]
    words = {axis: words for axis, words in candidate.roles.words.items()}
    lines += [f"words: {axis} = {' '.join(each)}" for axis, each in words.items()]
    lines += [f"strip: {strip}"] if strip else []
    lines += [f"ignore: {pattern} {reason}" for pattern, reason in ignored.items()]
    lines += [f"constant: {pattern} {value} a constant made by the class" for pattern, value in constants.items()]
    lines += [f"proven: {like}, relRMS {largest:.1e} in float64", "", "# parameter | key | axes"]
    column = candidate.column
    widths = [max(len(name) for name in column), max(len(layout.key) for layout in column.values())]
    lines += [f"{name:{widths[0]}} | {layout.key:{widths[1]}} | {layout.axes_text}" for name, layout in column.items()]
    return "\n".join(lines) + "\n"


def format_name(like: str) -> str:
    """Return a name for the format of a class: "my_vit" for "models:MyViT"; never that of a known format."""
    word = re.split(r"[:.]", like)[-1]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", word).lower().strip("_") or "own"
    return f"own_{name}" if name in formats() else name


def hidden_fields(config: ViTConfig, given: Sequence[str]) -> dict[str, Any]:
    """Return the fields that tensors do not show, with their values.

    given: the fields that the user stated, which are written in any case.
    """
    names = [name for name in DEFAULTS if not name.startswith(_NOT_PROVEN) and name not in _SHOWN]
    # A checkpoint of another width has another number of heads too, which its tensors may not show.
    names = ["image_size", "patch_size", "in_channels", "width", "num_heads", *names]
    if config.positions.kind != "learned":
        names += ["positions.kind", "positions.table", "positions.covers"][: 3 if config.positions.kind == "fixed" else 1]
    if config.positions.rotary != "none":
        names += _ROTARY[: 3 if config.positions.rotary in SCALED_ROTARY else 1]
    if config.head.pool in ("mean", "attention") and config.num_prefix:
        names.append("head.pool_prefix")
    if config.head.pool == "attention":
        names.append("head.pool_heads")
    if config.norms.shared_norm:
        names.append("norms.shared_norm")
    return {name: config.at(name) for name in dict.fromkeys([*names, *given])}


def _value_text(value: Any) -> str:
    """Return a value as the option --set takes it."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return f"{value[0]}x{value[1]}"
    return repr(value) if not isinstance(value, str) else value
