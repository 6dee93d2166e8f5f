"""Infer the config of weights that are stored without one: from tensors and the files beside them, else by assumptions.

Every assumption is reported to the user.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any

from parity.checkpoints.formats import Evidence, Fields, Format
from parity.checkpoints.formats.behaviour import behaviour_of_module
from parity.checkpoints.formats.format import Definition
from parity.checkpoints.tensor_fields import check_channels_first, fields_from_tensors
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS, coerce_field
from vit_spec.models import SIZES
from vit_spec.positions import SCALED_ROTARY

# Fields that change what is computed and that no tensor shows, with the values that most models have.  A field that neither
# the file nor the format determines gets this value, and is reported as an assumption.
DEFAULTS: Fields = {
    "positions.kind": "none",
    "positions.rotary": "none",
    "attention.scale": None,
    "attention.value_skip": False,
    "norms.kind": "layer",
    "norms.order": "pre",
    "norms.eps": 1e-6,
    "mlp.activation": "gelu",
    "head.pool": "token",
    "pixels.mean": (0.5,),
    "pixels.std": (0.5,),
    "resampling.kernel": "bicubic",
    "resampling.antialias": True,
    "resampling.align_corners": False,
    "resampling.offset": 0.0,
}

# `DEFAULTS`, and fields of pooling, which only matter for some models; `_infer_pooling` has their defaults.
HIDDEN_FIELDS = (*DEFAULTS, "head.pool_prefix", "head.pool_heads")

# Fields, and parts of the config, that do not change what a model with given weights computes from the normalized pixels of
# an image of its own size: initial values, dropout, normalization of pixels, and resampling to images of another size.
NEUTRAL = ("image_size", "pixels", "resampling", "regularisation", "tokens.init", "head.init")


# Kind of rotary positions -> what it rotates, in words, and the base that it was published with.
ROTARY_KINDS: dict[str, tuple[str, float]] = {
    "axial": ("of neighbouring pairs, over columns and rows of patches counted from one", 10000.0),
    "dinov3": ("of halves, over rows and columns of patches about the centre", 100.0),
    "eva": ("of neighbouring pairs, over rows and columns of patches", 10000.0),
    "rope_vit": ("of neighbouring pairs, over columns and rows of patches", 100.0),
    "mixed": ("of neighbouring pairs, by learned frequencies times columns and rows of patches counted from zero", 10.0),
}


_REQUIRED_FIELDS = {
    each.name for each in dataclasses.fields(ViTConfig) if each.default is each.default_factory is dataclasses.MISSING
}


class AssumptionWarning(UserWarning):
    """A model was loaded whose config is not what its file states: fields were assumed, or overridden by the caller."""


class FormatMismatch(InputError):
    """The tensors or files contradict a format; another format with the same keys may fit."""


@dataclass(frozen=True)
class Assumption:
    """A property that changes the function and that nothing in the file states.

    Attributes:
        field: a field of `ViTConfig`, e.g. "norms.eps"; or a property that has no field, e.g. "patch extraction".
        value: the assumed value of the field, e.g. 1e-6; or text, e.g. "without overlap".
        why: the reason for the value, e.g. "as in most models".
    """

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class Inferred:
    """Fields that follow from the tensors and from the fields known so far, which have precedence over them.

    Attributes:
        proven: the fields that the tensors show.
        assumed: the fields that they do not show.
    """

    proven: Fields = field(default_factory=dict)
    assumed: tuple[Assumption, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """All values, by field."""
        return {**self.proven, **{each.field: each.value for each in self.assumed}}


@dataclass(frozen=True)
class Override:
    """A config override that replaces another value, which the file states.

    Attributes:
        field: a field of `ViTConfig`, e.g. "norms.eps".
        value: the value that the user gave.
        stated: the value in the file.
    """

    field: str
    value: Any
    stated: Any

    def describe(self, option: str) -> str:
        """Return the override in one line; option: what gave it, e.g. "--set"."""
        return f"{self.field} is {self.value!r} by {option}; the file states {self.stated!r}"


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
    if format.matches_config_file(evidence.notes):  # the library resamples the positions of all its models in the same way
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
    if format.matches_config_file(evidence.notes):
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
    source = format.config_file if format.matches_config_file(evidence.notes) else "file"
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
    return Inferred(
        assumed=tuple(
            Assumption(
                name,
                value,
                f"as in {'most models' if name not in published or name in likely else f'models of format {format.name}'}",
            )
            for name, value in {**DEFAULTS, **published}.items()
            if name not in known and _affects_model(name, evidence)
        )
    )


def _derive_fields(
    format: Format, evidence: Evidence, published: Fields, known: Fields
) -> tuple[dict[str, Any], list[Assumption]]:
    """Return `known` with the fields that follow from it and the tensors, and the assumptions in them."""
    fields, assumed = dict(known), list[Assumption]()
    infer_pooling, infer_grid = partial(_infer_pooling, published), partial(_infer_grid, format)
    for infer_fields in (_infer_patch, _infer_heads, _infer_rotary, infer_pooling, infer_grid):
        found = infer_fields(fields, evidence)
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


def override_fields(config: ViTConfig, given: Fields) -> tuple[ViTConfig, tuple[Assumption, ...]]:
    """Return a config with some fields replaced, and the assumptions about what these fields newly depend on.

    Args:
        config: the config of a file that states one.
        given: config overrides of the user, by dotted field name.

    Raises:
        InputError: an unknown field or an invalid value.
    """
    given = {name: coerce_field(name, value) for name, value in given.items()}
    rotary, assumed = given.get("positions.rotary", "none"), list[Assumption]()
    if rotary != config.positions.rotary and rotary in ROTARY_KINDS:
        assumed = [*_infer_rotary(given, None).assumed, Assumption("rotation", ROTARY_KINDS[rotary][0], "as published")]
    fields = {each.field: each.value for each in assumed if each.field in FIELDS}
    return config.with_fields({**fields, **given}), tuple(assumed)


def find_overridden(stated: Fields, given: Fields) -> tuple[Override, ...]:
    """Return the config overrides of the user that replace another value, which the file states.

    Args:
        stated: the fields that the file states, by dotted field name.
        given: config overrides of the user, by dotted field name.
    """
    values = {name: coerce_field(name, value) for name, value in given.items()}
    return tuple(Override(name, value, stated[name]) for name, value in values.items() if stated.get(name, value) != value)


def _is_valid(fields: Fields) -> bool:
    """Return whether `ViTConfig` accepts these fields."""
    try:
        ViTConfig.from_fields(fields)
    except InputError:
        return False
    return True


def affects_function(name: str) -> bool:
    """Return whether a field may change what a model with given weights computes: all fields that are not in `NEUTRAL`."""
    return name not in NEUTRAL and name.partition(".")[0] not in NEUTRAL


def _affects_model(name: str, evidence: Evidence) -> bool:
    """Return whether an assumed field changes the function of this model."""
    if name.startswith("resampling."):
        return "pos_embed" in evidence.axes or "pos_embed_y" in evidence.axes
    if name.startswith("head.pool_"):
        return False  # see `_infer_pooling`
    return name != "norms.layer_scale"  # only the initial value of parameters that are in the file


def _infer_patch(known: Fields, evidence: Evidence) -> Inferred:
    """Return the number of channels and the patch size, if the projection takes flattened patches, which merge them."""
    if "patch" not in evidence.sizes:
        if missing := [name for name in ("in_channels", "patch_size") if name not in known]:
            raise InputError(
                f"the tensors do not show {' and '.join(missing)}: give --set in_channels=N --set patch_size=HxW"
            )
        return Inferred()
    length, assumed = evidence.sizes["patch"], list[Assumption]()
    channels = known.get("in_channels", 3)
    if "in_channels" not in known:
        assumed.append(Assumption("in_channels", channels, "as for colour images"))
    side = isqrt(length // max(1, channels))
    ph, pw = known.get("patch_size", (side, side))
    if "patch_size" not in known:
        assumed.append(Assumption("patch_size", (ph, pw), "a square patch"))
    if channels * ph * pw != length:
        raise InputError(
            f"{channels} channels of patches of {ph}x{pw} are {channels * ph * pw} values, the projection takes {length}: "
            f"give --set in_channels=N --set patch_size=HxW"
        )
    return Inferred(assumed=tuple(assumed))


def _infer_heads(known: Fields, evidence: Evidence) -> Inferred:
    """Return the number of heads, and the width of each if it is not `width / num_heads`."""
    inner, width = evidence.sizes.get("inner", known["width"]), known["width"]
    proven, assumed = dict[str, Any](), list[Assumption]()
    if "num_heads" in known and known["num_heads"] is None:
        raise InputError("the tensors do not show the number of heads: give it with --set num_heads=N")
    if "num_heads" in known:
        heads = known["num_heads"]
    elif "dim" in evidence.sizes:
        heads = inner // evidence.sizes["dim"]
        if heads == 1:  # a norm of the whole width may belong to a single head or to all heads together
            assumed.append(Assumption("num_heads", heads, "as wide as the norm of queries"))
        else:
            proven["num_heads"] = heads
    else:
        # The heads of the published models are together as wide as the model.
        sizes = [s for s in SIZES.values() if (s.width, s.depth) == (width, known["depth"]) and inner == width]
        if not sizes and inner % 64:
            raise InputError("the tensors do not show the number of heads: give it with --set num_heads=N")
        heads = sizes[0].num_heads if sizes else inner // 64
        why = (
            "as in the published models of this width and depth" if sizes else "as in most models, whose heads are 64 wide"
        )
        assumed.append(Assumption("num_heads", heads, why))
    if heads < 1 or inner % heads:
        raise InputError(f"{heads} heads do not divide {inner}, the width of queries and keys: give --set num_heads=N")
    if known.get("positions.rotary", "none") != "none" and inner // heads % 4:
        raise InputError(
            f"{heads} heads of width {inner // heads} have no rotary positions, which need a multiple of 4: give --set "
            f"num_heads=N"
        )
    if inner // heads * heads != width or width % heads:
        proven["attention.head_dim"] = inner // heads
    return Inferred(proven, tuple(assumed))


def _infer_rotary(known: Fields, evidence: Evidence | None) -> Inferred:
    """Return base and coordinates of rotary positions, also if a config override of the user chose them."""
    rotary = known.get("positions.rotary", "none")
    if rotary not in ROTARY_KINDS or rotary == "mixed":  # its base only matters for initial values
        return Inferred()
    values: dict[str, Any] = {"positions.rotary_base": ROTARY_KINDS[rotary][1]}
    if rotary in SCALED_ROTARY:
        values |= {"positions.rotary_start": 0.0, "positions.rotary_grid": (16, 16) if rotary == "eva" else None}
    why = f"as published with rotary positions of kind {rotary!r}"
    return Inferred(assumed=tuple(Assumption(name, value, why) for name, value in values.items() if name not in known))


def _infer_pooling(published: Fields, known: Fields, evidence: Evidence) -> Inferred:
    """Return which tokens are pooled, and the number of heads of attention pooling."""
    pool, prefix = known["head.pool"], sum(known[f"tokens.{name}"] for name in ("class_token", "distillation", "registers"))
    proven, values = dict[str, Any](), dict[str, Any]()
    if pool in ("mean", "attention") and prefix:
        values["head.pool_prefix"] = published.get("head.pool_prefix", False)
    if pool == "attention" and (heads := evidence.sizes.get("pool_head")):
        proven["head.pool_heads"] = None if heads == known["num_heads"] else heads
    elif pool == "attention":
        values["head.pool_heads"] = published.get("head.pool_heads")
    assumed = (Assumption(name, value, "as in most models") for name, value in values.items() if name not in known)
    return Inferred(proven, tuple(assumed))


def _infer_grid(format: Format, known: Fields, evidence: Evidence) -> Inferred:
    """Return the image size, and which tokens the position table covers, from the number of rows of the table."""
    ph, pw = known["patch_size"]
    prefix = known["tokens.class_token"] + known["tokens.distillation"] + known["tokens.registers"]
    if known.get("positions.kind") != "learned":
        if "image_size" in known:
            return Inferred()
        if "offset" in evidence.sizes:
            return Inferred(assumed=(_image_size_of_offsets(evidence.sizes["offset"], (ph, pw), prefix),))
        return Inferred(assumed=(Assumption("image_size", (14 * ph, 14 * pw), "for a grid of 14 x 14 patches"),))
    if "token" not in evidence.sizes:
        raise FormatMismatch(f"models of format {format.name!r} have a position table, and the file has none")
    if "row" in evidence.sizes:  # a grid, without rows for prefix tokens
        size = (evidence.sizes["row"] * ph, evidence.sizes["column"] * pw)
        return Inferred({"image_size": size, "positions.covers": "none"})
    rows = evidence.sizes["token"]
    covers = {"all": prefix, "none": 0, "class": int(known["tokens.class_token"])}  # in order of preference
    if isinstance(allowed := format.constraints.get("positions.covers"), tuple):
        covers = {name: count for name, count in covers.items() if name in allowed}
    if "positions.covers" in known:
        covers = {known["positions.covers"]: covers[known["positions.covers"]]}
    if "image_size" in known:
        height, width = known["image_size"]
        cells = -(-height // ph) * -(-width // pw)
        for name, count in covers.items():
            if rows == cells + count:
                return Inferred({"positions.covers": name})
        for name, count in covers.items():  # as in a convolution, which leaves out the remainder
            if rows == (height // ph) * (width // pw) + count and not known.get("tokens.pad"):
                return Inferred({"positions.covers": name, "tokens.crop": True})
        raise InputError(
            f"an image of {height}x{width} has {cells} patches of {ph}x{pw}, the position table {rows} rows: "
            f"give the size that it was trained at with --set image_size=HxW"
        )
    sides = {name: isqrt(max(rows - count, 0)) for name, count in covers.items()}
    fitting = [name for name, count in covers.items() if sides[name] and sides[name] ** 2 == rows - count]
    if fitting:
        side = sides[fitting[0]]
        usual = fitting[0] == next(iter(covers)) and len({sides[name] for name in fitting}) == 1
        square = Assumption("image_size", (side * ph, side * pw), "the rows of the position table make a square grid")
        if usual:
            return Inferred({"positions.covers": fitting[0]}, (square,))
        covered = Assumption("positions.covers", fitting[0], "the first choice that makes a square grid")
        return Inferred(assumed=(square, covered))
    raise InputError(f"the position table has {rows} rows, which do not form a square grid: give --set image_size=HxW")


def _image_size_of_offsets(rows: int, patch: tuple[int, int], prefix: int) -> Assumption:
    """Return the image size for which a table of relative positions has so many rows, if the grid is square.

    Raises:
        InputError: no square grid has so many offsets.
    """
    patches = max(rows - (3 if prefix else 0), 0)
    length = isqrt(patches)  # 2 * side - 1
    if length % 2 == 0 or length**2 != patches:
        raise InputError(
            f"the table of relative positions has {rows} rows, which do not fit a square grid: give --set image_size=HxW"
        )
    side = (length + 1) // 2
    why = "the rows of the table of relative positions make a square grid"
    return Assumption("image_size", (side * patch[0], side * patch[1]), why)
