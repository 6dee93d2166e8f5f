"""Fields that follow from tensors together with other fields: heads, patches, rotary positions, pooling and the grid."""

from math import isqrt
from typing import Any

from parity.checkpoints.assumptions import Assumption, Inferred
from parity.checkpoints.field_defaults import ROTARY_KINDS
from parity.checkpoints.formats import Evidence, Fields, Format
from vit_spec import InputError
from vit_spec.models import SIZES
from vit_spec.positions import SCALED_ROTARY


class UnfittingFieldsError(InputError):
    """Fields do not fit the tensors; the message says to give others.

    Attributes:
        problem: what does not fit.
        options: field -> the option that gives it, such as "--set image_size=HxW".
    """

    def __init__(self, problem: str, **forms: str) -> None:
        """Make the error for some fields, each with the form of its value, such as "HxW"."""
        self.problem, self.options = problem, {name: f"--set {name}={form}" for name, form in forms.items()}
        super().__init__(f"{problem}: give {' '.join(self.options.values())}")


class FormatMismatch(InputError):
    """The tensors or files contradict a format; another format with the same keys may fit."""


def infer_patch(known: Fields, evidence: Evidence) -> Inferred:
    """Return the number of channels and the patch size, if the projection takes flattened patches, which merge them.

    Raises:
        InputError: the tensors do not show the number of channels or the patch size; or the projection has another length.
    """
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
        raise UnfittingFieldsError(
            f"{channels} channels of patches of {ph}x{pw} are {channels * ph * pw} values, the projection takes {length}",
            in_channels="N",
            patch_size="HxW",
        )
    return Inferred(assumed=tuple(assumed))


def infer_heads(known: Fields, evidence: Evidence) -> Inferred:
    """Return the number of heads, and the width of each if it is not `width / num_heads`.

    Raises:
        InputError: the tensors do not show the number of heads, or it does not fit the width of queries and keys.
    """
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
        raise UnfittingFieldsError(f"{heads} heads do not divide {inner}, the width of queries and keys", num_heads="N")
    if known.get("positions.rotary", "none") != "none" and inner // heads % 4:
        what = "rotary positions, which need a multiple of 4"
        raise UnfittingFieldsError(f"{heads} heads of width {inner // heads} have no {what}", num_heads="N")
    if inner // heads * heads != width or width % heads:
        proven["attention.head_dim"] = inner // heads
    return Inferred(proven, tuple(assumed))


def infer_rotary(known: Fields, evidence: Evidence | None) -> Inferred:
    """Return base and coordinates of rotary positions, also if a config override of the user chose them."""
    rotary = known.get("positions.rotary", "none")
    if rotary not in ROTARY_KINDS or rotary == "mixed":  # its base only matters for initial values
        return Inferred()
    values: dict[str, Any] = {"positions.rotary_base": ROTARY_KINDS[rotary][1]}
    if rotary in SCALED_ROTARY:
        values |= {"positions.rotary_start": 0.0, "positions.rotary_grid": (16, 16) if rotary == "eva" else None}
    why = f"as published with rotary positions of kind {rotary!r}"
    return Inferred(assumed=tuple(Assumption(name, value, why) for name, value in values.items() if name not in known))


def infer_pooling(published: Fields, known: Fields, evidence: Evidence) -> Inferred:
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


def infer_grid(format: Format, known: Fields, evidence: Evidence) -> Inferred:
    """Return the image size, and which tokens the position table covers, from the number of rows of the table.

    Raises:
        FormatMismatch: the format has a position table, and the file has none.
        InputError: no image size, or not the given one, has that number of rows.
    """
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
        raise UnfittingFieldsError(
            f"an image of {height}x{width} has {cells} patches of {ph}x{pw}, the position table {rows} rows, for the image "
            "size of training",
            image_size="HxW",
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
