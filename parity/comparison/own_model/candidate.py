"""A hypothesis on a model of the user: its config, and the layout of each parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from parity.checkpoints.columns import Piece, parameter_of, pieces_of
from parity.checkpoints.layout import FIXED_SIZES, Array, Axis, Layout
from parity.comparison.own_model.block_roles import Roles
from parity.comparison.own_model.twin import by_row
from vit_spec import InputError, ViTConfig, rows

Dims = tuple[tuple[str, ...], ...]  # for each dimension of an array, the axes merged into it

_NOT_OF_CONFIG = ("inner", "pool_inner", "token_mean", "output_axes")  # facts that are no fields
_MAX_LAYOUTS = 48  # of one parameter
# Axes of arrays whose indices may be in another order -> the beginnings of the rows that have them, and their axis there.
_ORDERED = {
    "qkv": (("blocks.attn.qkv.",), "qkv"),
    "kv": (("blocks.attn.qkv.",), "qkv"),
    "glu": (("blocks.mlp.fc1.", "attn_pool.mlp.fc1."), "glu"),
}


@dataclass(frozen=True)
class Candidate:
    """A hypothesis on a model.

    Attributes:
        roles: the parameters by the names of the rows, the words in keys, and the config fields.
        depth: the number of blocks.
        dims: row, or piece of one -> the axes of the dimensions of its arrays, where they are chosen already; else they are
            the likeliest.
        orders: an axis of `_ORDERED` -> the index that each index of it has in the arrays, if their order is not ours.
    """

    roles: Roles
    depth: int
    dims: Mapping[str, Dims] = field(default_factory=dict)
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def with_fields(self, **fields: Any) -> "Candidate":
        """Return the candidate with other config fields; two underscores stand for a dot."""
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return replace(self, roles=self.roles | Roles(named))

    def with_words(self, axis: str, words: tuple[str, ...]) -> "Candidate":
        """Return the candidate with other words for the indices of an axis in keys."""
        return replace(self, roles=self.roles | Roles(words={axis: words}))

    def with_dims(self, name: str, dims: Dims) -> "Candidate":
        """Return the candidate with another layout of a row."""
        return replace(self, dims={**self.dims, name: dims})

    def with_order(self, axis: str, order: tuple[int, ...]) -> "Candidate":
        """Return the candidate with another order of the indices of an axis of `_ORDERED` in arrays."""
        return replace(self, orders={**self.orders, axis: order})

    @cached_property
    def config(self) -> ViTConfig:
        """The config.

        Raises:
            InputError: the fields contradict each other.
        """
        return _config(tuple(self.roles.fields.items()), self.depth)

    @cached_property
    def column(self) -> dict[str, Layout]:
        """The layout of each row of the config, or of each piece of one.

        Raises:
            InputError: the parameters are not those of the config, or a shape does not fit.
        """
        declared, leaves = rows(self.config), self.roles.leaves
        if wrong := [f"the parameter {leaves[name].key}" for name in leaves if parameter_of(name) not in declared]:
            raise InputError(f"the config has no place for {wrong[0]}")
        names = {name: pieces_of(leaves, name) for name in declared}
        if missing := [name for name, pieces in names.items() if not pieces]:
            raise InputError(f"no parameter is {missing[0]}")
        found = dict[str, Layout]()
        for name in (piece for pieces in names.values() for piece in pieces):
            dims = self.dims.get(name) or next(iter(self.layouts_of(name)), None)
            if dims is None:
                axes = " ".join(Piece.parse(name).axes(declared[parameter_of(name)].axes))
                raise InputError(f"{leaves[name].key} {leaves[name].shape} does not fit the axes {axes}")
            words = {axis: self.roles.words[axis] for axis in leaves[name].axes if axis in self.roles.words}
            part = leaves[name].part
            merged = (tuple(part if part and a == part.name else Axis(a, a, 0) for a in dim) for dim in dims)
            found |= self._in_order(Piece.parse(name), Layout(leaves[name].key, tuple(merged), words))
        return found

    def _in_order(self, piece: Piece, layout: Layout) -> dict[str, Layout]:
        """Return the layout of a piece, or the layouts of its single indices if their order in the array is not ours."""
        for axis, order in self.orders.items():
            names, parameter_axis = _ORDERED[axis]
            if axis in {each.name for each in layout.array_axes} and piece.parameter.startswith(names):
                return {
                    str(Piece(piece.parameter, parameter_axis, piece.start + n)): layout.cut(axis, stored, None)
                    for n, stored in enumerate(order)
                }
        return {str(piece): layout}

    def layouts_of(self, name: str) -> list[Dims]:
        """Return the ways in which the axes of a row, or of a piece, fit the shape of its arrays, the likeliest first."""
        leaf, row = self.roles.leaves[name], rows(self.config)[parameter_of(name)]
        axes = tuple(axis for axis in Piece.parse(name).axes(row.axes) if axis not in leaf.axes)
        if leaf.part:  # the array has another axis, of which the row takes a part
            axes = (leaf.part.name, *(axis for axis in axes if axis != leaf.part.parameter_axis))
        return _layouts(leaf.shape, axes, tuple(self.config.sizes[axis] for axis in axes), leaf.stacked)

    def fits_heads(self, heads: int) -> bool:
        """Return whether the shapes of the weights of attention allow a number of heads."""
        fields = self.roles.fields
        sizes = {"block": self.depth, "head": heads, "dim": fields["inner"] // heads, "width": fields["width"]}
        sizes |= FIXED_SIZES
        for name, axes in (("qkv", ("block", "qkv", "head", "dim", "width")), ("proj", ("block", "width", "head", "dim"))):
            for piece in pieces_of(self.roles.leaves, f"blocks.attn.{name}.weight"):
                leaf = self.roles.leaves[piece]
                rest = tuple(axis for axis in Piece.parse(piece).axes(axes) if axis not in leaf.axes)
                if not _layouts(leaf.shape, rest, tuple(sizes[axis] for axis in rest), leaf.stacked):
                    return False
        return True

    def fits_pool_heads(self, heads: int | None) -> bool:
        """Return whether the shapes of the weights of attention pooling allow a number of heads."""
        chosen = self.with_fields(head__pool="attention", head__pool_heads=heads)
        return all(chosen.layouts_of(f"attn_pool.{name}.weight") for name in ("q", "kv", "proj"))

    def to_rows(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays by row, with the axes of the row, from arrays by key."""
        return by_row(self.column, self.config, arrays)

    def keys_of(self, name: str) -> list[str]:
        """Return the keys of the arrays of a row, or of a piece."""
        return self.column[name].keys(self.config.sizes)


@lru_cache(maxsize=1024)
def _config(items: tuple[tuple[str, Any], ...], depth: int) -> ViTConfig:
    fields = dict(items)
    inner, width, heads = fields["inner"], fields["width"], fields["num_heads"]
    if inner % heads:
        raise InputError(f"{heads} heads do not divide {inner}")
    if inner != width or width % heads:
        fields["attention.head_dim"] = inner // heads
    of_config = {name: each for name, each in fields.items() if name not in _NOT_OF_CONFIG}
    return ViTConfig.from_fields({**of_config, "depth": depth})


@lru_cache(maxsize=4096)
def _layouts(shape: tuple[int, ...], axes: tuple[str, ...], sizes: tuple[int, ...], stacked: bool) -> list[Dims]:
    """Return the ways to assign axes to the dimensions of an array; the first have the axes in the most usual order."""
    lengths = dict(zip(axes, sizes, strict=True))
    first: tuple[str, ...] = ()
    if stacked:
        if "block" not in axes or shape[0] != lengths["block"]:
            return []
        first, axes, shape = ("block",), tuple(axis for axis in axes if axis != "block"), shape[1:]
    found = list(_assign(shape, axes, lengths))
    # Outputs and inputs of a layer are not merged into one dimension.
    found = [dims for dims in found if all(_is_group(dim) for dim in dims)] or found
    usual = [axes, _inputs_first(axes)]
    found.sort(key=lambda dims: min(_inversions([axis for dim in dims for axis in dim], order) for order in usual))
    return [((first, *dims) if stacked else dims) for dims in found[:_MAX_LAYOUTS]]


_GROUPS = (
    {"qkv", "kv", "head", "dim"},
    {"qkv", "kv", "pool_head", "pool_dim"},
    {"rgb", "ph", "pw"},
    {"glu", "ff"},
)


def _is_group(axes: tuple[str, ...]) -> bool:
    """Return whether some axes may be merged into one dimension."""
    return len(axes) < 2 or any(set(axes) <= group for group in _GROUPS)


def _assign(shape: tuple[int, ...], axes: tuple[str, ...], lengths: Mapping[str, int]) -> Iterator[Dims]:
    if not shape:
        if not axes:
            yield ()
        return
    for merged in _merged(shape[0], axes, lengths):
        rest = tuple(axis for axis in axes if axis not in merged)
        for dims in _assign(shape[1:], rest, lengths):
            yield (merged, *dims)


def _merged(length: int, axes: tuple[str, ...], lengths: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the ordered selections of axes whose lengths multiply to `length`; axes of length one come with others."""
    if length == 1:
        yield ()
    for n, axis in enumerate(axes):
        if length % lengths[axis] == 0:
            rest = axes[:n] + axes[n + 1 :]
            if lengths[axis] == length:
                yield (axis,)
            if rest:
                for others in _merged(length // lengths[axis], rest, lengths):
                    if others:
                        yield (axis, *others)


def _inputs_first(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a weight with those of its inputs first, as in Flax."""
    for inputs in (
        ("rgb", "ph", "pw"),
        ("head", "dim"),
        ("pool_head", "pool_dim"),
        ("width",),
        ("ff",),
        ("pooled",),
        ("feature",),
    ):
        if axes[-len(inputs) :] == inputs and len(axes) > len(inputs):
            moved = ("ph", "pw", "rgb") if inputs[0] == "rgb" else inputs
            return (*moved, *axes[: -len(inputs)])
    return axes


def _inversions(order: list[str], usual: tuple[str, ...]) -> int:
    places = [usual.index(axis) for axis in order]
    return sum(a > b for n, a in enumerate(places) for b in places[n + 1 :])
