"""Find what a written checkpoint does not state: the fields that a reader without our metadata takes for other values.

The reader is this project's own, which reads files of other programs: `recognition.py` and `config_inference.py`.  Writing
and reading therefore cannot disagree on what a format shows.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.conversion import ArrayConversion
from parity.checkpoints.field_defaults import affects_function
from parity.checkpoints.format_matching import Match
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import first_valid_match
from parity.checkpoints.recognition import recognise
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS

# Field -> its effect on the function of a model, if different values may have the same effect.
_EFFECTS: dict[str, Callable[[ViTConfig], Any]] = {
    "tokens.pad": lambda config: config.grid,
    "tokens.crop": lambda config: config.grid,
    "positions.table": lambda config: config.positions.table if config.positions.kind == "fixed" else None,
    "positions.covers": lambda config: None if config.positions.kind == "none" else config.num_covered,
    "positions.rotary_base": lambda config: (
        None if config.positions.rotary in ("none", "mixed") else config.positions.rotary_base
    ),
    "attention.head_dim": lambda config: config.head_dim,
    "attention.proj_bias": lambda config: config.attention.proj and config.attention.proj_bias,
    "attention.scale": lambda config: config.scale,
    "norms.layer_scale": lambda config: config.norms.layer_scale is not None,  # its value is an initial one
    "head.pool_prefix": lambda config: config.head.pool_prefix and config.num_prefix > 0,
    "head.pool_heads": lambda config: config.pool_heads,
    "head.bias": lambda config: None,  # tensors show it, or the format writes zeros in place of a bias
}


def unstated_fields(
    config: ViTConfig, format: str, conversions: Iterable[ArrayConversion], files: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a line for each field that changes the function and that a reader without our metadata cannot know.

    With `image_size` and the fields of these lines as config overrides, that reader infers a model of the same function.
    No parameter is read.

    Args:
        config: the model.
        format: the name of the format; all its variants are tried.
        conversions: the arrays to write.
        files: the JSON files to write beside them, by name.
    """
    lines: list[str] = []
    given: dict[str, Any] = {"image_size": config.image_size}
    try:
        matches = recognise(planned_arrays(conversions), files, format.partition(":")[0])
    except InputError as error:
        return (f"other libraries cannot read this model: {error}",)
    while True:
        read = _read_config(matches, given)
        name = _first_difference(config, read, matches, given)
        if name is None:
            break
        instead = "must be given it" if isinstance(read, InputError) else f"read the format as {read.at(name)!r}"
        lines.append(f"{name}={config.at(name)!r} is only in our own metadata: other libraries {instead}")
        given[name] = config.at(name)
    if isinstance(read, InputError):
        lines.append(f"other libraries cannot read this model: {read}")
    return tuple(lines)


def has_same_effect(name: str, one: ViTConfig, other: ViTConfig) -> bool:
    """Return whether a field of two models has the same value, or has the same effect on what they compute."""
    return one.at(name) == other.at(name) or (name in _EFFECTS and _EFFECTS[name](one) == _EFFECTS[name](other))


def planned_arrays(conversions: Iterable[ArrayConversion]) -> dict[KeyPath, StoredArray]:
    """Return the arrays that are to be written, as a reader would find them."""
    return {(each.key,): _PlannedArray(each) for each in conversions}


class _PlannedArray(StoredArray):
    """An array that is to be written.  Only constants are computed: inference reads no parameters."""

    def __init__(self, conversion: ArrayConversion) -> None:
        self.shape, self.dtype, self._conversion = conversion.shape, conversion.dtype, conversion

    def read(self, start: int, stop: int) -> Array:
        return self._conversion.to_array().reshape(-1)[start:stop]


def _read_config(matches: list[Match], given: Mapping[str, Any]) -> ViTConfig | InputError:
    """Return the config that a reader infers with these config overrides, or the error that it raises."""
    try:
        _, config, _ = first_valid_match(matches, given)
    except InputError as error:
        return error
    return config


def _first_difference(
    config: ViTConfig, read: ViTConfig | InputError, matches: list[Match], given: Mapping[str, Any]
) -> str | None:
    """Return the first field that a reader takes for another value, or that changes its error; None if there is none.

    Fields that depend on others come after them in `FIELDS`: given the others, the reader may know them.
    """
    names = [name for name in FIELDS if affects_function(name) and name not in given]
    if isinstance(read, ViTConfig):
        return next((name for name in names if not has_same_effect(name, config, read)), None)
    changed = (name for name in names if str(_read_config(matches, {**given, name: config.at(name)})) != str(read))
    return next(changed, None)
