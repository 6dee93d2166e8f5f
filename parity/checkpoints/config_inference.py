"""Infer the config of weights that are stored without one: from tensors and the files beside them, else by assumptions.

Every assumption is reported to the user.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from parity.checkpoints.assumptions import Assumption, Inferred
from parity.checkpoints.derived_fields import (
    FormatMismatch,
    UnfittingFieldsError,
    infer_grid,
    infer_heads,
    infer_patch,
    infer_pooling,
    infer_rotary,
)
from parity.checkpoints.field_defaults import DEFAULTS, HIDDEN_FIELDS, ROTARY_KINDS
from parity.checkpoints.formats import Evidence, Fields, Format
from parity.checkpoints.formats.behaviour import behaviour_of_module
from parity.checkpoints.formats.definition import Definition
from parity.checkpoints.tensor_fields import check_channels_first, fields_from_tensors
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS, coerce_field

_REQUIRED_FIELDS = {
    each.name for each in dataclasses.fields(ViTConfig) if each.default is each.default_factory is dataclasses.MISSING
}


def infer_config(format: Format, evidence: Evidence, given: Fields) -> tuple[ViTConfig, tuple[Assumption, ...]]:
    """Return the config of weights in a format, and the assumptions in it.

    Sources, in order of precedence: `given`; the statements of the file and of the files beside it; the requirements of the
    format; the tensors; the published models of the format; `DEFAULTS`.

    Args:
        format: the format of the weights.
        evidence: what the checkpoint shows about the model.
        given: config overrides of the user, by dotted field name.

    Raises:
        FormatMismatch: the file is not a model of this format.
        InputError: a required field is unknown, or the file contradicts itself.
    """
    shown, likely = fields_from_tensors(evidence)
    required, hidden = _requirements(format, evidence, shown)
    likely = {name: value for name, value in likely.items() if name not in hidden}
    given = {name: coerce_field(name, value) for name, value in given.items()}
    stated = format.stated_fields(evidence)
    _check_sources(format, evidence, shown, likely, required, stated, given)
    inferred = {**shown, **required, **stated}
    known = {**inferred, **given}
    if known.get("norms.order") == "parallel":  # its blocks have one norm
        likely.pop("norms.shared_norm", None)
    guessed = {**format.assumed, **likely, **format.infer_assumed(evidence), **hidden}
    # The published pixel statistics are those of red, green and blue: they do not apply to other numbers of channels.
    channels = (1, known.get("in_channels", guessed.get("in_channels", 3)))
    published = {n: v for n, v in guessed.items() if not n.startswith("pixels.") or len(v) in channels}
    if format.library.describes_model(evidence.notes):  # which resamples the positions of all its models alike
        known |= {n: v for n, v in published.items() if n.startswith("resampling.") and n not in known}
    defaults = _assume_defaults(format, evidence, known, published, likely)
    initial = {"norms.layer_scale": published.get("norms.layer_scale", 1e-5)}
    fields, assumed = _derive_fields(format, evidence, published, {**initial, **defaults.fields, **known})
    config = _build_config(format, fields, inferred, given)
    rotary = config.positions.rotary if "positions.rotary" not in {**required, **stated} else "none"
    behaviour = _assume_behaviour(format, evidence, rotary)
    return config, (*defaults.assumed, *assumed, *behaviour)


def _requirements(format: Format, evidence: Evidence, shown: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that a format requires, and those that are only assumed to be as it requires.

    Without the config file of its library, the latter are the `HIDDEN_FIELDS` that the tensors do not show: other code with
    the same keys may have other values.
    """
    required = {
        name: value for name, value in format.constraints.items() if not isinstance(value, tuple) and not callable(value)
    }
    if format.library.describes_model(evidence.notes):
        return required, {}
    hidden = {name: required.pop(name) for name in HIDDEN_FIELDS if name in required and name not in shown}
    return required, hidden


def _check_sources(
    format: Format, evidence: Evidence, shown: Fields, likely: Fields, required: Fields, stated: Fields, given: Fields
) -> None:
    """Check that the sources of fields do not contradict each other.

    The arguments after `evidence` are the fields that the tensors show or make likely, that the format requires, that the
    file states, and that the user gave.

    Raises:
        FormatMismatch: the tensors contradict the format.
        InputError: the tensors contradict the file or the user's definition of the format.
    """
    if "in_channels" not in {**stated, **given}:
        check_channels_first(evidence)
    if format.definition:
        gate = {name: likely[name] for name in ("mlp.activation",) if name in likely}  # `ViTConfig` has one kind of gate
        _check_definition(format.definition, {**shown, **gate}, given)
    source = format.library.config_file if format.library.describes_model(evidence.notes) else "file"
    for name, value in stated.items():
        if name in shown and shown[name] != value and name not in given:
            raise InputError(
                f"its {source} says {name}={value!r}, but its tensors show {shown[name]!r}: give the {source} of these "
                f"weights"
            )
    for name in sorted(shown.keys() & required.keys()):
        if shown[name] != required[name]:
            raise FormatMismatch(
                f"models of format {format.name!r} have {name}={required[name]!r}, but its tensors show {shown[name]!r}"
            )


def _assume_defaults(format: Format, evidence: Evidence, known: Fields, published: Fields, likely: Fields) -> Inferred:
    """Return the fields that are not known, with the values of the published models of the format, or of most models."""

    def reason(name: str) -> str:
        if name == "positions.kind" and name not in published:  # a table of positions would be among the tensors
            return "the weights have no table of positions"
        return f"as in {'most models' if name not in published or name in likely else f'models of format {format.name}'}"

    return Inferred(
        assumed=tuple(
            Assumption(name, value, reason(name))
            for name, value in {**DEFAULTS, **published}.items()
            if name not in known and _affects_model(name, evidence)
        )
    )


def _derive_fields(
    format: Format, evidence: Evidence, published: Fields, known: Fields
) -> tuple[dict[str, Any], list[Assumption]]:
    """Return `known` with the fields that follow from it and the tensors, and the assumptions in them.

    Raises:
        FormatMismatch: the tensors contradict the format.
        InputError: a field does not fit the tensors, or they do not show it.
    """
    fields, assumed = dict(known), list[Assumption]()
    steps = (
        infer_patch,
        infer_heads,
        infer_rotary,
        partial(infer_pooling, published),
        partial(infer_grid, format),
    )
    for infer_fields in steps:
        try:
            found = infer_fields(fields, evidence)
        except UnfittingFieldsError as error:
            raise _name_lines(error, format.definition) if format.definition else error from None
        assumed += found.assumed
        fields = {**found.fields, **fields}
    return fields, assumed


def _build_config(format: Format, fields: Fields, inferred: Fields, given: Fields) -> ViTConfig:
    """Return the config with these fields.

    Args:
        inferred: the fields that are known without the user.
        given: config overrides of the user.

    Raises:
        InputError: the fields that the user gave are invalid.
        FormatMismatch: the other fields are invalid, or are not those of a model of this format.
    """
    without_given = {
        name: inferred.get(name, value)
        for name, value in fields.items()
        if name in inferred or name not in given or name in _REQUIRED_FIELDS
    }
    try:
        config = ViTConfig.from_fields(fields)
    except InputError as error:
        # If the config without the user's fields is valid, these are wrong, and not the format.
        raise (InputError if given and _is_valid(without_given) else FormatMismatch)(str(error)) from None
    if (problems := format.problems(config)) and not format.definition:
        raise FormatMismatch(
            f"format {format.name!r} {'; '.join(problems)}: give other values, or change the file that "
            f"`python -m parity formats --show {format.name}` prints, and give it with --format-file and --from"
        )
    try:
        format.layouts(config)
    except InputError as error:
        raise FormatMismatch(str(error)) from None
    return config


def _assume_behaviour(format: Format, evidence: Evidence, rotary: str) -> Iterator[Assumption]:
    """Yield the assumptions about properties of the model that have no field.

    rotary: the kind of rotary positions, if the format does not require it and the file does not state it; else "none".
    """
    behaviour = dict(format.assumed_behaviour(evidence))
    if evidence.module:  # the files of a library describe its own class, and not a module that contains it
        behaviour = {**behaviour_of_module(evidence, evidence.module), **behaviour}
    if rotary != "none":
        behaviour["rotation"], _ = ROTARY_KINDS[rotary]
    for what, value in behaviour.items():
        yield Assumption(what, value, f"as in models of format {format.name}")


def _check_definition(definition: Definition, shown: Fields, given: Fields) -> None:
    """Raise InputError if the file of a format sets a field to another value than the tensors show, or than --set gives."""
    for name, value in definition.fields.items():
        if name in given and given[name] != value:
            raise InputError(
                f"{definition.source} sets {name}={value!r}, but --set gives {given[name]!r}: correct one of them"
            )
        if name in shown and shown[name] != value:
            raise InputError(f"{definition.source} sets {name}={value!r}, but the tensors show {shown[name]!r}: correct it")


def _name_lines(error: UnfittingFieldsError, definition: Definition) -> InputError:
    """Return an error that names the lines of the user's format that set its fields: --set cannot override these."""
    fields = definition.fields
    lines = [
        f"{definition.place_of_field(name)}, which sets {name}={fields[name]!r}" for name in error.options if name in fields
    ]
    options = [option for name, option in error.options.items() if name not in fields]
    remedies = [f"correct {' and '.join(lines)}"] * bool(lines) + [f"give {' '.join(options)}"] * bool(options)
    return InputError(f"{error.problem}: {', or '.join(remedies)}")


def override_fields(
    config: ViTConfig, assumed: Iterable[Assumption], given: Fields
) -> tuple[ViTConfig, tuple[Assumption, ...]]:
    """Return a config with some fields replaced, and its assumptions, with those about what these fields newly depend on.

    Args:
        config: the config of a file that states one.
        assumed: the assumptions that the file states.
        given: config overrides of the user, by dotted field name.

    Raises:
        InputError: an unknown field or an invalid value.
    """
    given = {name: coerce_field(name, value) for name, value in given.items()}
    rotary, fields, new = given.get("positions.rotary", config.positions.rotary), dict[str, Any](), list[Assumption]()
    if rotary != config.positions.rotary:
        fields = {"positions.rotary_start": 0.0, "positions.rotary_grid": None}  # most kinds have no others
        new += infer_rotary(given, None).assumed
        new += [Assumption("rotation", ROTARY_KINDS[rotary][0], "as published")] if rotary in ROTARY_KINDS else []
    fields |= {each.field: each.value for each in new if each.field in FIELDS}
    config = config.with_fields({**fields, **given})
    return config, (*update_assumptions(assumed, config, [*given, *(each.field for each in new)]), *new)


def update_assumptions(assumed: Iterable[Assumption], config: ViTConfig, known: Iterable[str]) -> tuple[Assumption, ...]:
    """Return the assumptions that are left after a change of the config, with their values in the new config.

    Args:
        assumed: the assumptions before the change.
        config: the new config.
        known: the fields, nested dataclasses of the config and other properties about which they no longer hold.
    """
    known, values = list(known), dict[str, Any]()
    if config.positions.rotary == "none":
        known += ["rotation", "positions.rotary_base", "positions.rotary_start", "positions.rotary_grid"]
    else:
        values["rotation"], _ = ROTARY_KINDS[config.positions.rotary]
    return tuple(
        dataclasses.replace(one, value=config.at(one.field) if one.field in FIELDS else values.get(one.field, one.value))
        for one in assumed
        if not any(one.field == name or one.field.startswith(f"{name}.") for name in known)
    )


def _is_valid(fields: Fields) -> bool:
    """Return whether `ViTConfig` accepts these fields."""
    try:
        ViTConfig.from_fields(fields)
    except InputError:
        return False
    return True


def _affects_model(name: str, evidence: Evidence) -> bool:
    """Return whether an assumed field changes the function of this model."""
    if name.startswith("resampling."):
        return "pos_embed" in evidence.axes or "pos_embed_y" in evidence.axes
    if name.startswith("head.pool_"):
        return False  # see `infer_pooling`
    return name != "norms.layer_scale"  # only the initial value of parameters that are in the file
