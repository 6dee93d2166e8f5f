"""The config of weights that do not bring one: read off shapes, told by the files beside them, or assumed and said so."""

from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

from parity.checkpoints.formats import Evidence, Fields, Format
from vit_spec import InputError, ViTConfig
from vit_spec.config import PARTS, typed
from vit_spec.models import SIZES

# Fields that change what is computed and that no tensor shows, with what most models have.  Whatever of them neither the
# file nor the format tells is assumed, and named.
USUAL: Fields = {
    "positions.kind": "none",
    "positions.rotary": "none",
    "attention.scale": None,
    "attention.value_skip": False,
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


# What `ViTConfig` means by each rotation, in words, and the base that it was published with.
ROTATIONS: dict[str, tuple[str, float]] = {
    "axial": ("of neighbouring pairs, over columns and rows of patches counted from one", 10000.0),
    "dinov3": ("of halves, over rows and columns of patches about the centre", 100.0),
}


class AssumptionWarning(UserWarning):
    """A model was made of weights that do not tell everything about it; the message names what was assumed."""


class Unfit(InputError):
    """A format cannot be what a file shows; another one with the same keys may."""


@dataclass(frozen=True)
class Assumption:
    """Something that changes the function and that nothing in the file tells.

    field, value: as in `ViTConfig`, e.g. "norms.eps", 1e-6; or, where `ViTConfig` knows no other value, in words, e.g.
        "order of a block", "each norm ahead of its half".
    why: on whose word.
    """

    field: str
    value: Any
    why: str


def infer(format: Format, evidence: Evidence, given: Fields) -> tuple[ViTConfig, tuple[Assumption, ...]]:
    """Return the config of weights in a format, and what of it is assumed.

    Args:
        given: fields that the user set; they go before all else.

    Raises:
        Unfit: no model of the format is what the file shows.
        InputError: something that must be known is not, or the file contradicts itself.
    """
    shown, likely = _structure(evidence)
    always = {name: value for name, value in format.always.items() if not isinstance(value, tuple) and not callable(value)}
    if format.owns(evidence.notes):  # what its own library always does, others with the same keys may not
        always |= {name: value[0] for name, value in format.always.items() if isinstance(value, tuple) and len(value) == 1}
    given = {name: typed(name, value) for name, value in given.items()}
    told = format.told(evidence)
    source = format.described_in if format.owns(evidence.notes) else "file"
    if "in_channels" not in {**told, **given}:
        _hold_to_channels_first(evidence)
    for name, value in told.items():
        if name in shown and shown[name] != value and name not in given:
            raise InputError(
                f"its {source} says {name}={value!r}, its tensors {shown[name]!r}: give the {source} of these very weights"
            )
    for name in sorted(shown.keys() & always.keys()):
        if shown[name] != always[name]:
            raise Unfit(f"models of format {format.name!r} have {name}={always[name]!r}, its tensors show {shown[name]!r}")
    known = {**shown, **always, **told, **given}
    # Statistics of red, green and blue say nothing of other channels.
    guessed = {**format.assumed, **likely, **format.likely(evidence)}
    channels = (1, known.get("in_channels", guessed.get("in_channels", 3)))
    published = {n: v for n, v in guessed.items() if not n.startswith("pixels.") or len(v) in channels}
    if format.owns(evidence.notes):  # of the format's own library, whose code has one rule for all its models
        known = {**{n: v for n, v in published.items() if n.startswith("resampling.")}, **known}
    of_format = f"models of format {format.name}"
    assumed = [
        Assumption(name, value, f"as {'most models' if name not in published or name in likely else of_format}")
        for name, value in {**USUAL, **published}.items()
        if name not in known and _matters(name, known, evidence)
    ]
    start = {"norms.layer_scale": published.get("norms.layer_scale", 1e-5)}
    known = {**start, **{each.field: each.value for each in assumed}, **known}
    for found_by in (_patch, _heads, _base, partial(_grid, format)):
        found = found_by(known, evidence)
        assumed += [each for each in found if each.why]
        known = {**{each.field: each.value for each in found}, **known}
    try:
        config = build(known)
        format.layouts(config)
    except InputError as error:
        raise Unfit(str(error)) from None
    in_words = dict(format.untold(evidence))
    if (rotary := config.positions.rotary) != "none" and "positions.rotary" not in {**always, **told}:
        in_words["rotation"], _ = ROTATIONS[rotary]
    for what, value in in_words.items():
        assumed.append(Assumption(what, value, f"as models of format {format.name}"))
    return config, tuple(assumed)


def build(fields: Fields) -> ViTConfig:
    """Return the config that has these fields, dotted where they lie in a part, and defaults for the others.

    Raises:
        InputError: a value that the config refuses, or that does not go with the others.
    """
    changes = nested(fields)
    parts = {name: PARTS[name](**changes.pop(name)) for name in PARTS if name in changes}
    return ViTConfig(**changes, **parts)


def nested(fields: Fields) -> dict[str, Any]:
    """Return dotted fields as `ViTConfig.replace` takes them: {"norms.eps": 1e-5} as {"norms": {"eps": 1e-5}}."""
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        part, _, field = name.rpartition(".")
        if part:
            changes.setdefault(part, {})[field] = value
        else:
            changes[name] = value
    return changes


def _structure(evidence: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what tensors tell by being there and by their shapes, and what they make likely."""
    axes, sizes = evidence.axes, evidence.sizes
    qkv = "qkv" if "blocks.attn.qkv.bias" in axes else "qv" if "blocks.attn.q_bias" in axes else "none"
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
        "norms.shared_norm": "blocks.norm2.weight" not in axes,
        "norms.before_blocks": "norm_pre.weight" in axes,
        "norms.after_blocks": "norm.weight" in axes,
        "norms.after_pool": "fc_norm.weight" in axes,
    }
    likely: dict[str, Any] = {}
    if "patch" not in sizes:
        shown |= {"in_channels": sizes["rgb"], "patch_size": (sizes["ph"], sizes["pw"])}
    if shown["attention.proj"]:
        shown["attention.proj_bias"] = "blocks.attn.proj.bias" in axes
    if "pos_embed" in axes:
        shown["positions.kind"] = "learned"
    if "blocks.ls1.gamma" not in axes:
        shown["norms.layer_scale"] = None
    if "glu" in axes["blocks.mlp.fc1.weight"]:
        likely["mlp.activation"] = "swiglu"
    if "attn_pool.latent" in axes:
        shown["head.pool"] = "attention"
    elif not shown["tokens.class_token"] or "fc_norm.weight" in axes:  # a norm after the pool is a mean's
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


def _hold_to_channels_first(evidence: Evidence) -> None:
    """Refuse a patch projection of (width, 16, 16, 3), in the order of MLX, where PyTorch's is (width, 3, 16, 16).

    Read as PyTorch's it has 16 channels and patches of 16 x 3, and all shapes of the file agree with that.

    Raises:
        InputError: channels seem to be the last axis.
    """
    channels, ph, pw = (evidence.sizes.get(word, 0) for word in ("rgb", "ph", "pw"))
    if 1 < channels == ph != pw and pw in (1, 3):
        raise InputError(
            f"its patch projection takes {channels} channels of {ph}x{pw} pixels, or {pw} of {channels}x{ph} with the "
            f"channels last: transpose it to (width, channels, rows, columns), or give --set in_channels={channels}"
        )


def _matters(name: str, known: Fields, evidence: Evidence) -> bool:
    """Whether a field that is assumed changes anything for this model."""
    if name.startswith("resampling."):
        return "pos_embed" in evidence.axes
    return name != "norms.layer_scale"  # whose value is where training starts


def _patch(known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the channels and the patch, where a projection of flattened patches has merged them."""
    if "patch" not in evidence.sizes:
        return []
    length, found = evidence.sizes["patch"], []
    channels = known.get("in_channels", 3)
    if "in_channels" not in known:
        found.append(Assumption("in_channels", channels, "as colour images"))
    side = isqrt(length // max(1, channels))
    ph, pw = known.get("patch_size", (side, side))
    if "patch_size" not in known:
        found.append(Assumption("patch_size", (ph, pw), "a square patch"))
    if channels * ph * pw != length:
        raise InputError(
            f"{channels} channels of patches of {ph}x{pw} are {channels * ph * pw} numbers, the projection takes {length}: "
            f"give --set in_channels=N patch_size=HxW"
        )
    return found


def _heads(known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return how many heads there are, and how wide each is where that is not their share of the width."""
    inner, width = evidence.sizes.get("inner", known["width"]), known["width"]
    found: list[Assumption] = []
    if "num_heads" in known and known["num_heads"] is None:
        raise InputError("tensors do not tell the number of heads: give it with --set num_heads=N")
    if "num_heads" in known:
        heads = known["num_heads"]
    elif "dim" in evidence.sizes:
        heads = inner // evidence.sizes["dim"]
        # A norm over the whole width is that of one head, or of all heads together: tensors do not tell.
        found.append(Assumption("num_heads", heads, "as wide as the norm of queries" if heads == 1 else ""))
    else:
        sizes = [s for s in SIZES.values() if (s.width, s.depth) == (width, known["depth"])]
        if not sizes and inner % 64:
            raise InputError("tensors do not tell the number of heads: give it with --set num_heads=N")
        heads = sizes[0].num_heads if sizes else inner // 64
        why = "as the published models of this width and depth" if sizes else "as in most models, whose heads are 64 wide"
        found.append(Assumption("num_heads", heads, why))
    if heads < 1 or inner % heads:
        raise InputError(f"{heads} heads do not divide {inner}, which queries and keys have: give --set num_heads=N")
    if inner // heads * heads != width or width % heads:
        found.append(Assumption("attention.head_dim", inner // heads, ""))
    return found


def _base(known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the base of a rotation, also of one that the user was the first to tell of."""
    rotary = known.get("positions.rotary", "none")
    if rotary not in ROTATIONS or "positions.rotary_base" in known:
        return []
    _, base = ROTATIONS[rotary]
    return [Assumption("positions.rotary_base", base, f"as where rotary positions of kind {rotary!r} were published")]


def _grid(format: Format, known: Fields, evidence: Evidence) -> list[Assumption]:
    """Return the image size and which tokens the position table covers, from its rows."""
    ph, pw = known["patch_size"]
    prefix = known["tokens.class_token"] + known["tokens.distillation"] + known["tokens.registers"]
    if known.get("positions.kind") != "learned":
        return (
            [] if "image_size" in known else [Assumption("image_size", (14 * ph, 14 * pw), "for a grid of 14 x 14 patches")]
        )
    if "token" not in evidence.sizes:
        raise Unfit(f"models of format {format.name!r} have a table of positions, and the file has none")
    rows = evidence.sizes["token"]
    covers = {"all": prefix, "none": 0, "class": int(known["tokens.class_token"])}  # the last, where there is none
    if isinstance(allowed := format.always.get("positions.covers"), tuple):
        covers = {name: count for name, count in covers.items() if name in allowed}
    if "positions.covers" in known:
        covers = {known["positions.covers"]: covers[known["positions.covers"]]}
    if "image_size" in known:
        height, width = known["image_size"]
        cells = -(-height // ph) * -(-width // pw)
        for name, count in covers.items():
            if rows == cells + count:
                return [Assumption("positions.covers", name, "")]
        raise InputError(
            f"an image of {height}x{width} has {cells} patches of {ph}x{pw}, the position table {rows} rows: "
            f"give the size that it was trained at with --set image_size=HxW"
        )
    sides = {name: isqrt(max(rows - count, 0)) for name, count in covers.items()}
    fitting = [name for name, count in covers.items() if sides[name] and sides[name] ** 2 == rows - count]
    if fitting:
        side, several = sides[fitting[0]], len({sides[name] for name in fitting}) > 1
        found = [Assumption("image_size", (side * ph, side * pw), "since the table's rows make a square")]
        return [*found, Assumption("positions.covers", fitting[0], "the first that makes a square" if several else "")]
    raise InputError(f"the position table has {rows} rows, which make no square: give --set image_size=HxW")
