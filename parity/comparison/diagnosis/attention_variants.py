"""Patches of attention and rotary positions: what other implementations compute differently.

A patch changes one model of the PyTorch twin in place.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.patches import Inapplicable, Patch, intercept
from vit_spec import ViTConfig, positions
from vit_spec.positions import patch_coordinates

if TYPE_CHECKING:
    from torch import Tensor

    Softmax = Callable[[Tensor], Tensor]  # scores (B, H, T, S) -> attention weights

Grid = tuple[int, int]
Angles = Callable[[ViTConfig, Grid], Array]  # (config, grid) -> angles of queries and keys, (T, head_dim)


def replace_softmax(softmax: "Softmax") -> Patch:
    """Return the patch that replaces the softmax of the attention in every block."""

    def patch(model: Any) -> None:
        for block in model.blocks:
            intercept(block.attn, _recompute_heads(softmax))

    return patch


def _recompute_heads(softmax: "Softmax") -> Callable[[str, Any], Any]:
    """Return the change that computes the heads from softmax(scores) and the values."""
    values: dict[str, Any] = {}

    def change(name: str, value: Any) -> Any:
        if name == "weights":
            value = softmax(values["scores"])
        if name == "heads":
            heads: Any = values["weights"].to(value.dtype) @ values["v"].to(value.dtype).transpose(1, 2)  # (B, H, T, D)
            return heads.transpose(1, 2)
        values[name] = value
        return value

    return change


def causal_softmax(scores: "Tensor") -> "Tensor":
    """Return the softmax with a causal mask: no token attends to later ones."""
    import torch

    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


def merge_heads_untransposed(heads: "Tensor") -> "Tensor":
    """Return heads (B, T, H, D) as if merged from (B, H, T, D) without the transpose."""
    return heads.transpose(1, 2).reshape(heads.shape)


# Rotary positions -----------------------------------------------------------------------------------------------------


def replace_rotary_angles(angles: Angles) -> Patch:
    """Return the patch that rotates queries and keys by angles(config, grid)."""

    def patch(model: Any) -> None:
        _require_rotary(model)
        grids: list[Grid] = []
        original = model.embed

        def embed(images: Any, noise: Any = None) -> Any:
            grids[:] = [model.config.grid_of(*images.shape[2:])]
            return original(images)

        def change(name: str, value: Any) -> Any:
            import torch

            if name not in ("cosines", "sines"):
                return value
            function = np.cos if name == "cosines" else np.sin
            return torch.tensor(function(angles(model.config, grids[0])), dtype=value.dtype).view(value.shape)

        model.embed = embed
        intercept(model, change)

    return patch


def _require_rotary(model: Any) -> None:
    if model.config.positions.rotary == "none":
        raise Inapplicable("this model has no rotary positions")


def angles_at(c: ViTConfig, grid: Grid, y: Array, x: Array) -> Array:
    """Return the rotary angles (n, head_dim) at rows y and columns x, counted from 0; fractions are allowed."""
    p, head_dim = c.positions, c.head_dim
    if p.rotary in positions.SCALED_ROTARY:
        arguments = p.rotary_start, p.rotary_grid, p.rotary == "rope_vit"
        return positions.rows_columns_angles(y, x, grid, head_dim, p.rotary_base, *arguments)
    if p.rotary == "axial":
        return positions.axial_angles(y, x, head_dim, p.rotary_base)
    return positions.dinov3_angles(y, x, grid, head_dim, p.rotary_base)


def with_prefix(c: ViTConfig, patches: Array, prefix: Array | None = None) -> Array:
    """Return the rotary angles of all tokens, (T, head_dim): first the prefix tokens, then the patches.

    patches: the angles of the patches, (patches, head_dim).
    prefix: the angles that every prefix token gets, (1, head_dim); 0 by default.
    """
    row = np.zeros((1, patches.shape[1])) if prefix is None else prefix
    return np.concatenate([np.repeat(row, c.num_prefix, 0), patches])


def replace_coordinates(coordinates: Callable[[Array, Array, Grid], tuple[Array, Array]]) -> Patch:
    """Return the patch that computes rotary angles at coordinates(rows, columns, grid)."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        y, x = coordinates(*patch_coordinates(grid), grid)
        return with_prefix(c, angles_at(c, grid, y, x))

    return replace_rotary_angles(angles)


def swapped_axes_angles(c: ViTConfig, grid: Grid) -> Array:
    """Return the rotary angles of all tokens with rows and columns swapped."""
    y, x = patch_coordinates(grid)
    if c.positions.rotary == "dinov3":  # DINOv3 divides a coordinate by the length of its own axis first
        y, x = (y + 0.5) / grid[0] * grid[1] - 0.5, (x + 0.5) / grid[1] * grid[0] - 0.5
    return with_prefix(c, angles_at(c, grid, y=x, x=y))


def column_major(y: Array, x: Array, grid: Grid) -> tuple[Array, Array]:
    """Return the coordinates of the patches in column-major order."""
    order = np.arange(grid[0] * grid[1]).reshape(grid).T.ravel()
    return y[order], x[order]


def transposed_grid(y: Array, x: Array, grid: Grid) -> tuple[Array, Array]:
    """Return the coordinates of a grid with height and width swapped."""
    return patch_coordinates(grid[::-1])


def prefix_rotated_as(y: float, x: float) -> Patch:
    """Return the patch that rotates prefix tokens like a patch at row y and column x, counted from 0."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        prefix = angles_at(c, grid, np.array([y]), np.array([x]))
        return with_prefix(c, angles_at(c, grid, *patch_coordinates(grid)), prefix)

    return replace_rotary_angles(angles)


def angles_from_first_token(c: ViTConfig, grid: Grid) -> Array:
    """Return the angles of the patches, assigned to the tokens from the first prefix token on; the last rows are 0."""
    patches = angles_at(c, grid, *patch_coordinates(grid))
    return np.concatenate([patches, np.zeros((c.num_prefix, patches.shape[1]))])


def roformer_angles(c: ViTConfig, grid: Grid) -> Array:
    """Return axial angles whose fastest pair rotates by one radian per patch (RoFormer, arXiv 2104.09864)."""
    d = c.head_dim // 2
    return with_prefix(c, angles_at(c, grid, *patch_coordinates(grid)) * c.positions.rotary_base ** (2 / d))


def angles_scaled_by(side: Callable[[int, int], int]) -> Angles:
    """Return a function that computes DINOv3's angles with both coordinates divided by side(height, width)."""

    def angles(c: ViTConfig, grid: Grid) -> Array:
        n = side(*grid)
        y, x = (
            (coordinate + 0.5) / n * length - 0.5 for coordinate, length in zip(patch_coordinates(grid), grid, strict=True)
        )
        return with_prefix(c, angles_at(c, grid, y, x))

    return angles


def change_rotary_angles(change: Callable[[ViTConfig, Array], Array]) -> Patch:
    """Return the patch that replaces the rotary angles by change(config, angles)."""
    return replace_rotary_angles(lambda c, grid: change(c, with_prefix(c, angles_at(c, grid, *patch_coordinates(grid)))))


def replace_rotation(change: Callable[[str, Any, Any, Any, str], Any]) -> Patch:
    """Return the patch that replaces q, k and v by change(name, unrotated vector, cosines, sines, layout)."""

    def patch(model: Any) -> None:
        _require_rotary(model)
        layout, tables = model.config.positions.rotary, {}

        def record_tables(name: str, value: Any) -> Any:
            if name in ("cosines", "sines"):
                tables[name] = value
            return value

        def change_vector(name: str, value: Any) -> Any:
            if name not in ("q", "k", "v"):
                return value
            cos, sin = tables["cosines"], tables["sines"]
            unrotated = value if name == "v" else _rotate(value, cos, -sin, layout)
            return change(name, unrotated, cos, sin, layout)

        intercept(model, record_tables)
        for block in model.blocks:
            intercept(block.attn, change_vector)

    return patch


def _rotate(x: Any, cos: Any, sin: Any, layout: str) -> Any:
    from vit_torch.attention import apply_rotary

    return apply_rotary(x, (cos, sin), layout)


def rotate_only(names: str) -> Callable[..., Any]:
    """Return the change that rotates only the vectors in `names`, e.g. "qk" for queries and keys."""
    return lambda name, x, cos, sin, layout: _rotate(x, cos, sin, layout) if name in names else x


def rotate_other_pairs(name: str, x: Any, cos: Any, sin: Any, layout: str) -> Any:
    """Rotate pairs of neighbours instead of halves, or halves instead of neighbours, with the same cosines and sines."""
    return x if name == "v" else _rotate(x, cos, sin, "axial" if layout == "dinov3" else "dinov3")


def rotate_in_dtype(dtype: str) -> Callable[..., Any]:
    """Return the change that rotates queries and keys in a lower precision, with rounded cosines and sines."""

    def change(name: str, x: Any, cos: Any, sin: Any, layout: str) -> Any:
        import torch

        low_dtype = getattr(torch, dtype)
        return x if name == "v" else _rotate(x.to(low_dtype), cos.to(low_dtype), sin.to(low_dtype), layout).to(x.dtype)

    return change
