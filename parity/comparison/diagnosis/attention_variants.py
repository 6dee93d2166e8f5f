"""Attention and rotary positions of other implementations: patches that change one model of the PyTorch twin in place."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.patches import Inapplicable, Patch, kept
from vit_spec import ViTConfig

if TYPE_CHECKING:
    from torch import Tensor

    Mixing = Callable[[Tensor], Tensor]  # scores (B, H, T, S) to weights

Grid = tuple[int, int]
Angles = Callable[[ViTConfig, Grid], Array]  # of queries and keys, (T, head_dim)


def mixing(weights: "Mixing") -> Patch:
    """Every attention of a block mixes values by weights(scores)."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            kept(block.attn, _mixed(weights))

    return patch


def _mixed(weights: "Mixing") -> Callable[[str, Any], Any]:
    seen: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        if name == "weights":
            value = weights(seen["scores"])
        if name == "heads":
            mixed: Any = seen["weights"].to(value.dtype) @ seen["v"].to(value.dtype).transpose(1, 2)  # (B, H, T, D)
            return mixed.transpose(1, 2)
        seen[name] = value
        return value

    return change


def causal(scores: "Tensor") -> "Tensor":
    """No token sees those after it."""
    import torch

    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def joined_without_turning(heads: "Tensor") -> "Tensor":
    """Heads (B, T, H, D) merged as if they lay as (B, H, T, D)."""
    return heads.transpose(1, 2).reshape(heads.shape)


# Rotary positions -----------------------------------------------------------------------------------------------------


def rotary(angles: Angles) -> Patch:
    """Queries and keys are turned by angles(config, grid)."""

    def patch(model: Any) -> None:
        _needs_rotary(model)
        grids: list[Grid] = []
        before = model.embed

        def embed(images: Any) -> Any:
            grids[:] = [model.config.grid_of(*images.shape[2:])]
            return before(images)

        def change(name: str, value: Any) -> Any:
            import torch

            if name not in ("cosines", "sines"):
                return value
            function = np.cos if name == "cosines" else np.sin
            return torch.tensor(function(angles(model.config, grids[0])), dtype=value.dtype).view(value.shape)

        model.embed = embed
        kept(model, change)

    return patch


def _needs_rotary(model: Any) -> None:
    if model.config.positions.rotary == "none":
        raise Inapplicable("this model has no rotary positions")


def places(grid: Grid) -> tuple[Array, Array]:
    """Return the rows and columns of patches, counted from 0, each (rows * columns,) of float64."""
    y, x = np.indices(grid).reshape(2, -1).astype(np.float64)
    return y, x


def angles_at(c: ViTConfig, grid: Grid, y: Array, x: Array) -> Array:
    """Return the angles (n, head_dim) of tokens at rows y and columns x, counted from 0; they need not be whole.

    As `vit_spec.positions.rotary_axial` and `rotary_dinov3` have them on the patches of a grid.
    """
    d, base = c.head_dim // 2, c.positions.rotary_base
    if c.positions.rotary == "axial":
        theta = np.repeat(base ** (-2 * np.arange(1, d // 2 + 1) / d), 2)
        return np.concatenate([np.outer(x + 1, theta), np.outer(y + 1, theta)], axis=1)
    period = base ** (2 * np.arange(d // 2) / d)
    centres = (2 * (place + 0.5) / side - 1 for place, side in zip((y, x), grid, strict=True))
    rows, columns = (np.outer(centre, 2 * np.pi / period) for centre in centres)
    return np.concatenate([rows, columns, rows, columns], axis=1)


def with_prefix(c: ViTConfig, patches: Array, prefix: Array | None = None) -> Array:
    """Return angles (T, head_dim): the first prefix rows at `prefix` (1, head_dim), by default 0, then the patches'."""
    row = np.zeros((1, patches.shape[1])) if prefix is None else prefix
    return np.concatenate([np.repeat(row, c.num_prefix, 0), patches])


def placed(coordinates: Callable[[Array, Array, Grid], tuple[Array, Array]]) -> Patch:
    """Patches stand at coordinates(rows, columns, grid)."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        y, x = coordinates(*places(grid), grid)
        return with_prefix(c, angles_at(c, grid, y, x))

    return rotary(angles)


def turned_axes(c: ViTConfig, grid: Grid) -> Array:
    """Rows take the angles of columns and columns those of rows."""
    y, x = places(grid)
    if c.positions.rotary == "dinov3":  # which scales a coordinate by its own side first
        y, x = (y + 0.5) / grid[0] * grid[1] - 0.5, (x + 0.5) / grid[1] * grid[0] - 0.5
    return with_prefix(c, angles_at(c, grid, y=x, x=y))


def column_by_column(y: Array, x: Array, grid: Grid) -> tuple[Array, Array]:
    """The grid's places listed column by column."""
    order = np.arange(grid[0] * grid[1]).reshape(grid).T.ravel()
    return y[order], x[order]


def swapped_grid(y: Array, x: Array, grid: Grid) -> tuple[Array, Array]:
    """The places of a grid with height and width swapped."""
    return places(grid[::-1])


def prefix_at(y: float, x: float) -> Patch:
    """Prefix tokens turn as a patch at row y and column x, counted from 0."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        own = angles_at(c, grid, np.array([y]), np.array([x]))
        return with_prefix(c, angles_at(c, grid, *places(grid)), own)

    return rotary(angles)


def counted_from_the_prefix(c: ViTConfig, grid: Grid) -> Array:
    """The patches' angles given to the first tokens of the sequence, and those of the last patches to none."""
    patches = angles_at(c, grid, *places(grid))
    return np.concatenate([patches, np.zeros((c.num_prefix, patches.shape[1]))])


def roformer(c: ViTConfig, grid: Grid) -> Array:
    """Axial angles whose fastest pair turns by one radian a patch (RoFormer, arXiv 2104.09864)."""
    d = c.head_dim // 2
    return with_prefix(c, angles_at(c, grid, *places(grid)) * c.positions.rotary_base ** (2 / d))


def scaled_by(side: Callable[[int, int], int]) -> Angles:
    """DINOv3's angles with both coordinates divided by side(height, width)."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        n = side(*grid)
        y, x = ((place + 0.5) / n * own - 0.5 for place, own in zip(places(grid), grid, strict=True))
        return with_prefix(c, angles_at(c, grid, y, x))

    return angles


def changed(factor: Callable[[ViTConfig, Array], Array]) -> Patch:
    """Angles are factor(config, angles)."""
    return rotary(lambda c, grid: factor(c, with_prefix(c, angles_at(c, grid, *places(grid)))))


def turned_again(change: Callable[[str, Any, Any, Any, str], Any]) -> Patch:
    """Queries, keys and values are change(name, the vector not turned, cosines, sines, layout)."""

    def patch(model: Any) -> None:
        _needs_rotary(model)
        layout, tables = model.config.positions.rotary, {}

        def note(name: str, value: Any) -> Any:
            if name in ("cosines", "sines"):
                tables[name] = value
            return value

        def again(name: str, value: Any) -> Any:
            if name not in ("q", "k", "v"):
                return value
            cos, sin = tables["cosines"], tables["sines"]
            plain = value if name == "v" else _turned(value, cos, -sin, layout)
            return change(name, plain, cos, sin, layout)

        kept(model, note)
        for block in model.blocks:
            kept(block.attn, again)

    return patch


def _turned(x: Any, cos: Any, sin: Any, layout: str) -> Any:
    from vit_torch.layers import rotate

    return rotate(x, (cos, sin), layout)


def turning(names: str) -> Callable[..., Any]:
    """Turn these of q, k and v, and no other."""
    return lambda name, x, cos, sin, layout: _turned(x, cos, sin, layout) if name in names else x


def other_pairs(name: str, x: Any, cos: Any, sin: Any, layout: str) -> Any:
    """Turn neighbours for halves, or halves for neighbours, with the same cosines and sines."""
    return x if name == "v" else _turned(x, cos, sin, "dinov3" if layout == "axial" else "axial")


def in_lower_type(kind: str) -> Callable[..., Any]:
    """Turn queries and keys in a lower type, with cosines and sines of that type."""

    def change(name: str, x: Any, cos: Any, sin: Any, layout: str) -> Any:
        import torch

        low = getattr(torch, kind)
        return x if name == "v" else _turned(x.to(low), cos.to(low), sin.to(low), layout).to(x.dtype)

    return change
