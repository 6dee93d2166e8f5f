"""What a config must satisfy, said to the person who wrote it: one line each, with what to change."""

import dataclasses
import math
import numbers
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from vit_spec.errors import InputError, nearest
from vit_spec.laws import Law
from vit_spec.positions import TABLES

if TYPE_CHECKING:
    from vit_spec.config import ViTConfig

_COUNTED = 2**63  # beyond which nothing is counted, and products of sizes are numbers that Python does not print


def hold_to_types(part: Any, prefix: str) -> None:
    """Hold every field of a dataclass to its annotation, descending into parts."""
    for name, annotation in typing.get_type_hints(type(part)).items():
        value = getattr(part, name)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            if type(value) is not annotation:
                raise InputError(f"{prefix}{name} is {value!r}: give a vit_spec.{annotation.__name__}(...)")
            hold_to_types(value, f"{prefix}{name}.")
        else:
            object.__setattr__(part, name, coerced(f"{prefix}{name}", value, annotation))


def coerced(name: str, value: Any, annotation: Any) -> Any:
    """Return `value` as the plain Python value that `annotation` asks for, or refuse it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{name} is {value!r}: give one of {', '.join(arguments)}{nearest(value, arguments)}")
        return value
    if origin is types.UnionType:  # `X | None`
        return None if value is None else coerced(name, value, arguments[0])
    if origin is tuple:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, (tuple, list)) or not value or length not in (None, len(value)):
            example = f"{length} numbers, as in (224, 224)" if length else "some numbers, as in (0.5, 0.5, 0.5)"
            raise InputError(f"{name} is {value!r}: give {example}")
        return tuple(coerced(name, item, arguments[0]) for item in value)
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is str and isinstance(value, str):
        return value
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if abs(int(value)) < _COUNTED:
            return int(value)
        raise InputError(f"{name} is a number of {int(value).bit_length()} bits: give a smaller one")
    if annotation is float and isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value):
        return float(value)
    wanted = {bool: "True or False", str: "a string", int: "a whole number", float: "a finite number"}[annotation]
    raise InputError(f"{name} is {value!r}: give {wanted}")


def _is_finite(value: numbers.Real) -> bool:
    """Whether a number is one of those that a float can be, which very large whole numbers are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def hold_to_reason(c: "ViTConfig") -> None:
    """Refuse values out of range and values that contradict each other, saying what to change."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise InputError(message)

    counts = {
        "in_channels": c.in_channels,
        "width": c.width,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_dim": c.mlp_dim,
    }
    for name, value in counts.items():
        require(value > 0, f"{name} is {value}: give a positive number")
    for name, pair in {"image_size": c.image_size, "patch_size": c.patch_size}.items():
        require(min(pair) > 0, f"{name} is {pair}: give positive numbers of pixels")
    require(c.num_classes >= 0, f"num_classes is {c.num_classes}: give the number of outputs, or 0 for features")
    c.grid_of(*c.image_size)

    for name, values in {"mean": c.pixels.mean, "std": c.pixels.std}.items():
        require(
            len(values) in (1, c.in_channels),
            f"pixels.{name} has {len(values)} values for {c.in_channels} channels: give one for all, or one a channel",
        )
    require(min(c.pixels.std) > 0, f"pixels.std is {c.pixels.std}: give positive numbers")

    require(c.tokens.registers >= 0, f"tokens.registers is {c.tokens.registers}: give 0 or more")
    require(
        c.tokens.class_token or not c.tokens.distillation,
        "tokens.distillation adds a second token to the class token: set tokens.class_token=True",
    )
    Law.parse(c.tokens.init, "tokens.init")
    Law.parse(c.head.init, "head.init")

    p = c.positions
    if p.kind == "fixed":
        require(
            p.table in TABLES,
            f"positions.table is {p.table!r}: a fixed table is one of {', '.join(TABLES)}{nearest(p.table, TABLES)}",
        )
    elif p.table not in TABLES:
        Law.parse(p.table, "positions.table", alternatives=TABLES)
    if p.kind != "none" and p.table.startswith("sincos_2d"):
        require(
            c.width % 4 == 0 and c.width > 4,
            f"width {c.width}: a 2-D sine-cosine table needs a multiple of 4 above 4, or choose another positions.table",
        )
    if p.kind != "none":
        require(
            p.covers != "class" or c.tokens.class_token,
            "positions.covers='class' needs a class token: set tokens.class_token=True, or positions.covers='none'",
        )
    require(p.rotary_base > 0, f"positions.rotary_base is {p.rotary_base}: give a positive number")
    r = c.resampling
    require(
        not (r.antialias and r.align_corners),
        "resampling.antialias has no corner-aligned form: switch off one of the two",
    )
    require(not (r.offset and r.align_corners), "resampling.offset has no corner-aligned form: switch off one of the two")
    require(0 <= r.offset < 1, f"resampling.offset is {r.offset}: give a number from 0 up to 1 (DINO's is 0.1)")

    a = c.attention
    require(a.head_dim is None or a.head_dim > 0, f"attention.head_dim is {a.head_dim}: give a positive number")
    require(
        a.head_dim is not None or c.width % c.num_heads == 0,
        f"width {c.width} is not divisible by num_heads {c.num_heads}: choose num_heads that divides it, "
        "or set attention.head_dim",
    )
    inner = c.num_heads * c.head_dim
    require(
        inner == c.width or (a.proj and not a.value_skip),
        f"num_heads {c.num_heads} times head_dim {c.head_dim} is {inner}, not the width {c.width}: without an output "
        "projection, or with attention.value_skip, it must be; change attention.head_dim, or those two",
    )
    require(
        p.rotary == "none" or c.head_dim % 4 == 0,
        f"head_dim {c.head_dim} is not a multiple of 4, which positions.rotary needs: change num_heads, "
        "or attention.head_dim",
    )
    require(a.scale is None or a.scale > 0, f"attention.scale is {a.scale}: give a positive number, or None")
    require(c.norms.eps > 0, f"norms.eps is {c.norms.eps}: give a positive number such as 1e-6")

    pool = c.head.pool
    require(
        pool not in ("token", "token_mean") or c.tokens.class_token,
        f"head.pool={pool!r} reads the class token: set tokens.class_token=True, or head.pool='mean'",
    )
    require(not c.tokens.distillation or pool == "token", "tokens.distillation reads two tokens: set head.pool='token'")
    require(c.head.hidden is None or c.head.hidden > 0, f"head.hidden is {c.head.hidden}: give a positive width, or None")

    for name, rate in dataclasses.asdict(c.regularisation).items():
        require(0 <= rate < 1, f"regularisation.{name} is {rate}: give a probability from 0 up to (not including) 1")
