"""Infer the config of weights that are stored without one: from tensors and the files beside them, else by assumptions.

Every assumption is reported to the user.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

from parity.checkpoints.formats import Evidence, Fields, Format
from parity.checkpoints.formats.behaviour import behaviour_of_module
from parity.checkpoints.formats.format import Definition
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS, PARTS, coerce_field
from vit_spec.models import SIZES

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
    shown, likely = _fields_from_tensors(evidence)
    required = {
        name: value for name, value in format.constraints.items() if not isinstance(value, tuple) and not callable(value)
    }
    from_library = format.matches_config_file(evidence.notes)
    hidden: dict[str, Any] = {}  # what other code with the same keys may have different
    if not from_library:
        hidden = {name: required.pop(name) for name in HIDDEN_FIELDS if name in required and name not in shown}
        likely = {name: value for name, value in likely.items() if name not in hidden}
    given = {name: coerce_field(name, value) for name, value in given.items()}
    stated = format.stated_fields(evidence)
    source = format.config_file if from_library else "file"
    if "in_channels" not in {**stated, **given}:
        _check_channels_first(evidence)
    if format.definition:
        gate = {name: likely[name] for name in ("mlp.activation",) if name in likely}  # `ViTConfig` has one kind of gate
        _check_definition(format.definition, {**shown, **gate}, given)
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
    known = {**shown, **required, **stated, **given}
    if known.get("norms.order") == "parallel":  # its blocks have one norm
        likely.pop("norms.shared_norm", None)
    guessed = {**format.assumed, **likely, **format.infer_assumed(evidence), **hidden}
    # The published pixel statistics are those of red, green and blue: they do not apply to other numbers of channels.
    channels = (1, known.get("in_channels", guessed.get("in_channels", 3)))
    published = {n: v for n, v in guessed.items() if not n.startswith("pixels.") or len(v) in channels}
    if from_library:  # the library resamples the positions of all its models in the same way
        known = {**{n: v for n, v in published.items() if n.startswith("resampling.")}, **known}
    of_format = f"models of format {format.name}"
    assumed = [
        Assumption(name, value, f"as in {'most models' if name not in published or name in likely else of_format}")
        for name, value in {**DEFAULTS, **published}.items()
        if name not in known and _affects_model(name, known, evidence)
    ]
    initial = {"norms.layer_scale": published.get("norms.layer_scale", 1e-5)}
    known = {**initial, **{each.field: each.value for each in assumed}, **known}
    infer_pooling, infer_grid = partial(_infer_pooling, published), partial(_infer_grid, format)
    for infer_fields in (_infer_patch, _infer_heads, _infer_rotary, infer_pooling, infer_grid):
        found = infer_fields(known, evidence)
        assumed += [each for each in found if each.why]
        known = {**{each.field: each.value for each in found}, **known}
    inferred = {**shown, **required, **stated}
    without_given = {
        name: inferred.get(name, value)
        for name, value in known.items()
        if name in inferred or name not in given or name in _REQUIRED_FIELDS
    }
    try:
        config = build_config(known)
    except InputError as error:
        # If the config without the user's fields is valid, these are wrong, and not the format.
        raise (InputError if given and _is_valid(without_given) else FormatMismatch)(str(error)) from None
    try:
        format.layouts(config)
    except InputError as error:
        raise FormatMismatch(str(error)) from None
    behaviour = dict(format.assumed_behaviour(evidence))
    if evidence.module:  # the files of a library describe its own class, and not a module that contains it
        behaviour = {**behaviour_of_module(evidence, evidence.module), **behaviour}
    if (rotary := config.positions.rotary) != "none" and "positions.rotary" not in {**required, **stated}:
        behaviour["rotation"], _ = ROTARY_KINDS[rotary]
    for what, value in behaviour.items():
        assumed.append(Assumption(what, value, f"as in models of format {format.name}"))
    return config, tuple(assumed)


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
        assumed = [*_infer_rotary(given, None), Assumption("rotation", ROTARY_KINDS[rotary][0], "as published")]
    fields = {each.field: each.value for each in assumed if each.field in FIELDS}
    return config.replace(**nest_fields({**fields, **given})), tuple(assumed)


def find_overridden(stated: Fields, given: Fields) -> tuple[Override, ...]:
    """Return the config overrides of the user that replace another value, which the file states.

    Args:
        stated: the fields that the file states, by dotted field name.
        given: config overrides of the user, by dotted field name.
    """
    values = {name: coerce_field(name, value) for name, value in given.items()}
    return tuple(Override(name, value, stated[name]) for name, value in values.items() if stated.get(name, value) != value)


def _is_valid(fields: Fields) -> bool:
    """Return whether `build_config` accepts these fields."""
    try:
        build_config(fields)
    except InputError:
        return False
    return True


def build_config(fields: Fields) -> ViTConfig:
    """Return a config with these fields, dotted as in "norms.eps", and the defaults of `ViTConfig` for the others.

    Raises:
        InputError: a value is invalid, by itself or in combination with the others.
    """
    changes = nest_fields(fields)
    parts = {name: PARTS[name](**changes.pop(name)) for name in PARTS if name in changes}
    return ViTConfig(**changes, **parts)


def nest_fields(fields: Fields) -> dict[str, Any]:
    """Return dotted fields nested, as `ViTConfig.replace` takes them: {"norms.eps": 1e-5} as {"norms": {"eps": 1e-5}}."""
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        part, _, field = name.rpartition(".")
        if part:
            changes.setdefault(part, {})[field] = value
        else:
            changes[name] = value
    return changes


def _fields_from_tensors(evidence: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that the presence and shapes of tensors prove, and those that they make likely."""
    axes, sizes = evidence.axes, evidence.sizes
    qkv = "qkv" if "blocks.attn.qkv.bias" in axes else "qv" if "blocks.attn.q_bias" in axes else "none"
    likely: dict[str, Any] = {}
    shown: dict[str, Any] = {
        "width": sizes["width"],
        "depth": sizes["block"],
        "mlp_dim": sizes["ff"],
        "num_classes": sizes.get("label", 0),
        "tokens.class_token": "cls_token" in axes,
        "tokens.registers": sizes.get("register", 0),
        "tokens.distillation": "dist_token" in axes,
        "tokens.patch_bias": "patch_embed.proj.bias" in axes,
        "attention.qkv_bias": qkv,
        "attention.proj": "blocks.attn.proj.weight" in axes,
        "attention.qk_norm": "blocks.attn.q_norm.weight" in axes,
        "attention.out_norm": "blocks.attn.norm.weight" in axes,
        "mlp.bias": "blocks.mlp.fc1.bias" in axes,
        "mlp.norm": "blocks.mlp.norm.weight" in axes,
        "norms.bias": "blocks.norm1.bias" in axes,
        "norms.after_patches": "patch_embed.norm.weight" in axes,
        "norms.before_blocks": "norm_pre.weight" in axes,
        "norms.after_blocks": "norm.weight" in axes,
        "norms.after_pool": "fc_norm.weight" in axes,
    }
    if sizes.keys() >= {"rgb", "ph", "pw"}:  # else some of them are merged
        shown |= {"in_channels": sizes["rgb"], "patch_size": (sizes["ph"], sizes["pw"])}
    if shown["attention.proj"]:
        shown["attention.proj_bias"] = "blocks.attn.proj.bias" in axes
    if "pos_embed" in axes or "pos_embed_y" in axes:
        shown |= {"positions.kind": "learned", "positions.factorized": "pos_embed_y" in axes}
    if "blocks.attn.freqs" in axes:
        shown["positions.rotary"] = "mixed"
    shown |= _relative_fields(evidence)
    if "blocks.ls1.gamma" not in axes:
        shown["norms.layer_scale"] = None
    if "blocks.norm2.weight" in axes:
        shown["norms.shared_norm"] = False
        shown["norms.mlp_layer_scale"] = "blocks.ls1.gamma" not in axes or "blocks.ls2.gamma" in axes
    else:  # or attention and MLP are parallel
        likely["norms.shared_norm"] = True
    if not shown["norms.bias"]:
        likely["norms.kind"] = "rms"
    if "glu" in axes["blocks.mlp.fc1.weight"]:
        likely["mlp.activation"] = "swiglu"
    if "attn_pool.latent" in axes:
        shown["head.pool"] = "attention"
    elif not shown["tokens.class_token"] or "fc_norm.weight" in axes:  # models with a norm after the pool take the mean
        likely["head.pool"] = "mean"
    if "pre_logits.weight" in axes:
        shown["head.hidden"] = sizes["feature"]
    elif sizes.get("feature") == 2 * sizes["width"]:
        likely["head.pool"] = "token_mean"
    if "head.weight" in axes:
        shown["head.bias"] = "head.bias" in axes
    if "head" in sizes and not (shown["attention.qk_norm"] and sizes["head"] == 1):
        shown["num_heads"] = sizes["head"]
    return shown, likely


def _relative_fields(evidence: Evidence) -> dict[str, Any]:
    """Return the fields of relative positions, all of which the tensors show."""
    shared = "rel_pos.table" in evidence.axes or "rel_pos.fc1.weight" in evidence.axes
    name = "rel_pos" if shared else "blocks.attn.rel_pos"
    kinds = {f"{name}.table": "table", f"{name}.fc1.weight": "mlp"}
    kind = next((kind for tensor, kind in kinds.items() if tensor in evidence.axes), "none")
    return {
        "positions.relative": kind,
        "positions.relative_dim": evidence.sizes["offset_ff"] if kind == "mlp" else None,
        "positions.relative_shared": shared,
    }


def _check_channels_first(evidence: Evidence) -> None:
    """Raise InputError if the channels seem to be another axis of the patch projection.

    MLX stores (width, 16, 16, 3) instead of (width, 3, 16, 16).  In PyTorch's order that shape means 16 channels and
    patches of 16 x 3, and all other shapes of the file agree with it.  A table of a user may have the mistake too.
    """
    channels, ph, pw = (evidence.sizes.get(axis, 0) for axis in ("rgb", "ph", "pw"))
    if 1 < channels == pw != ph and ph in (1, 3):
        raise InputError(
            f"its patch projection has {channels} channels of {ph}x{pw} pixels, or {ph} channels of {channels}x{pw} if the "
            f"channels are the axis that is called rows: correct the table, or give --set in_channels={channels}"
        )
    if 1 < channels == ph != pw and pw in (1, 3):
        raise InputError(
            f"its patch projection has {channels} channels of {ph}x{pw} pixels, or {pw} channels of {channels}x{ph} if the "
            f"channels are last: transpose it to (width, channels, rows, columns), or give --set in_channels={channels}"
        )


def affects_function(name: str) -> bool:
    """Return whether a field may change what a model with given weights computes: all fields that are not in `NEUTRAL`."""
    return name not in NEUTRAL and name.partition(".")[0] not in NEUTRAL


def _affects_model(name: str, known: Fields, evidence: Evidence) -> bool:
    """Return whether an assumed field changes the function of this model."""
    if name.startswith("resampling."):
        return "pos_embed" in evidence.axes or "pos_embed_y" in evidence.axes
    if name.startswith("head.pool_"):
        return False  # see `_infer_pooling`
    return name != "norms.layer_scale"  # only the initial value of parameters that are in the file


def _infer_patch(known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the number of channels and the patch size, if the projection takes flattened patches, which merge them."""
    if "patch" not in evidence.sizes:
        if missing := [name for name in ("in_channels", "patch_size") if name not in known]:
            raise InputError(
                f"the tensors do not show {' and '.join(missing)}: give --set in_channels=N --set patch_size=HxW"
            )
        return []
    length, found = evidence.sizes["patch"], []
    channels = known.get("in_channels", 3)
    if "in_channels" not in known:
        found.append(Assumption("in_channels", channels, "as for colour images"))
    side = isqrt(length // max(1, channels))
    ph, pw = known.get("patch_size", (side, side))
    if "patch_size" not in known:
        found.append(Assumption("patch_size", (ph, pw), "a square patch"))
    if channels * ph * pw != length:
        raise InputError(
            f"{channels} channels of patches of {ph}x{pw} are {channels * ph * pw} values, the projection takes {length}: "
            f"give --set in_channels=N --set patch_size=HxW"
        )
    return found


def _infer_heads(known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the number of heads, and the width of each if it is not `width / num_heads`."""
    inner, width = evidence.sizes.get("inner", known["width"]), known["width"]
    found: list[Assumption] = []
    if "num_heads" in known and known["num_heads"] is None:
        raise InputError("the tensors do not show the number of heads: give it with --set num_heads=N")
    if "num_heads" in known:
        heads = known["num_heads"]
    elif "dim" in evidence.sizes:
        heads = inner // evidence.sizes["dim"]
        # A norm of the whole width may belong to a single head or to all heads together: tensors do not show which.
        found.append(Assumption("num_heads", heads, "as wide as the norm of queries" if heads == 1 else ""))
    else:
        # The heads of the published models are together as wide as the model.
        sizes = [s for s in SIZES.values() if (s.width, s.depth) == (width, known["depth"]) and inner == width]
        if not sizes and inner % 64:
            raise InputError("the tensors do not show the number of heads: give it with --set num_heads=N")
        heads = sizes[0].num_heads if sizes else inner // 64
        why = (
            "as in the published models of this width and depth" if sizes else "as in most models, whose heads are 64 wide"
        )
        found.append(Assumption("num_heads", heads, why))
    if heads < 1 or inner % heads:
        raise InputError(f"{heads} heads do not divide {inner}, the width of queries and keys: give --set num_heads=N")
    if known.get("positions.rotary", "none") != "none" and inner // heads % 4:
        raise InputError(
            f"{heads} heads of width {inner // heads} have no rotary positions, which need a multiple of 4: give --set "
            f"num_heads=N"
        )
    if inner // heads * heads != width or width % heads:
        found.append(Assumption("attention.head_dim", inner // heads, ""))
    return found


def _infer_rotary(known: Fields, evidence: Evidence | None) -> list[Assumption]:
    """Return base and coordinates of rotary positions, also if a config override of the user chose them."""
    rotary = known.get("positions.rotary", "none")
    if rotary not in ROTARY_KINDS or rotary == "mixed":  # its base only matters for initial values
        return []
    values: dict[str, Any] = {"positions.rotary_base": ROTARY_KINDS[rotary][1]}
    if rotary in ("eva", "rope_vit"):
        values |= {"positions.rotary_start": 0.0, "positions.rotary_grid": (16, 16) if rotary == "eva" else None}
    why = f"as published with rotary positions of kind {rotary!r}"
    return [Assumption(name, value, why) for name, value in values.items() if name not in known]


def _infer_pooling(published: Fields, known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return which tokens are pooled, and the number of heads of attention pooling."""
    pool, prefix = known["head.pool"], sum(known[f"tokens.{name}"] for name in ("class_token", "distillation", "registers"))
    values: dict[str, Any] = {}
    if pool in ("mean", "attention") and prefix:
        values["head.pool_prefix"] = published.get("head.pool_prefix", False)
    if pool == "attention":
        values["head.pool_heads"] = published.get("head.pool_heads")
    found = {name: Assumption(name, value, "as in most models") for name, value in values.items() if name not in known}
    if "head.pool_heads" in found and (heads := evidence.sizes.get("pool_head")):
        found["head.pool_heads"] = Assumption("head.pool_heads", None if heads == known["num_heads"] else heads, "")
    return list(found.values())


def _infer_grid(format: Format, known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the image size, and which tokens the position table covers, from the number of rows of the table."""
    ph, pw = known["patch_size"]
    prefix = known["tokens.class_token"] + known["tokens.distillation"] + known["tokens.registers"]
    if known.get("positions.kind") != "learned":
        if "image_size" in known:
            return []
        if "offset" in evidence.sizes:
            return [_image_size_of_offsets(evidence.sizes["offset"], (ph, pw), prefix)]
        return [Assumption("image_size", (14 * ph, 14 * pw), "for a grid of 14 x 14 patches")]
    if "token" not in evidence.sizes:
        raise FormatMismatch(f"models of format {format.name!r} have a position table, and the file has none")
    if "row" in evidence.sizes:  # a grid, without rows for prefix tokens
        size = (evidence.sizes["row"] * ph, evidence.sizes["column"] * pw)
        return [Assumption("image_size", size, ""), Assumption("positions.covers", "none", "")]
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
                return [Assumption("positions.covers", name, "")]
        for name, count in covers.items():  # as in a convolution, which leaves out the remainder
            if rows == (height // ph) * (width // pw) + count and not known.get("tokens.pad"):
                return [Assumption("positions.covers", name, ""), Assumption("tokens.crop", True, "")]
        raise InputError(
            f"an image of {height}x{width} has {cells} patches of {ph}x{pw}, the position table {rows} rows: "
            f"give the size that it was trained at with --set image_size=HxW"
        )
    sides = {name: isqrt(max(rows - count, 0)) for name, count in covers.items()}
    fitting = [name for name, count in covers.items() if sides[name] and sides[name] ** 2 == rows - count]
    if fitting:
        side = sides[fitting[0]]
        usual = fitting[0] == next(iter(covers)) and len({sides[name] for name in fitting}) == 1
        found = [Assumption("image_size", (side * ph, side * pw), "the rows of the position table make a square grid")]
        return [
            *found,
            Assumption("positions.covers", fitting[0], "" if usual else "the first choice that makes a square grid"),
        ]
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
