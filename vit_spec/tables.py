"""Constant tables of a config for a grid of patches: positions of all kinds and resampling matrices.

Both twins use these arrays, so that they cannot differ in a sine or a resize kernel.  Tables are float64, indices int64.
Each function returns a tuple of arrays, and raises InputError for anything but a config and a grid: two positive integers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_spec import positions, resample
from vit_spec.config import ViTConfig, check_config
from vit_spec.errors import require
from vit_spec.typed_fields import coerce

Table = NDArray[np.float64]


def position_table(config: ViTConfig, grid: tuple[int, int]) -> tuple[Table]:
    """Return the sine-cosine table that `config.positions.table` names: (covered prefix + rows * columns, width).

    In a 1-D table, prefix tokens take the first positions.  In a 2-D table they have no position, and their rows are zero
    (as in MAE).

    Raises:
        InputError: `config.positions.table` is no sine-cosine table.
    """
    grid = _parse_arguments(config, grid)
    require(
        config.positions.table in positions.TABLES,
        f"positions.table is {config.positions.table!r}: only {', '.join(positions.TABLES)} are computed tables",
    )
    covered, patches = config.num_covered, grid[0] * grid[1]
    if config.positions.table == "sincos_1d":
        table = positions.sincos_1d(covered + patches, config.width)
    else:
        order = config.positions.table.removeprefix("sincos_2d_")
        table = np.concatenate([np.zeros((covered, config.width)), positions.sincos_2d(grid, config.width, order)])
    return (table,)


def rotary_tables(config: ViTConfig, grid: tuple[int, int]) -> tuple[Table, Table]:
    """Return cosines and sines, each (1, prefix + rows * columns, 1, head_dim); prefix tokens are not rotated.

    For "mixed", whose frequencies are parameters, return columns x and rows y, each (1, prefix + rows * columns, 1, 1).

    Raises:
        InputError: the config has no rotary embedding.
    """
    grid, p = _parse_arguments(config, grid), config.positions
    require(p.rotary != "none", "positions.rotary is 'none': give a config with a rotary embedding, such as 'axial'")
    if p.rotary == "mixed":
        first, second = (table[:, None] for table in positions.grid_coordinates(grid, config.num_prefix))
    elif p.rotary in positions.SCALED_ROTARY:
        arguments = p.rotary_base, p.rotary_start, p.rotary_grid, p.rotary == "rope_vit"
        first, second = positions.rotary_rows_columns(grid, config.head_dim, config.num_prefix, *arguments)
    else:
        rotary = {"axial": positions.rotary_axial, "dinov3": positions.rotary_dinov3}[p.rotary]
        first, second = rotary(grid, config.head_dim, config.num_prefix, p.rotary_base)
    return first[None, :, None], second[None, :, None]


def relative_tables(config: ViTConfig, grid: tuple[int, int]) -> tuple[Table, positions.Index]:
    """Return the logarithms of all offsets between patches, (offsets, 2), and the index of each pair of tokens, (T, T)."""
    grid = _parse_arguments(config, grid)
    return positions.relative_offsets(grid), positions.relative_index(grid, config.num_prefix)


def resampling_matrices(config: ViTConfig, grid: tuple[int, int]) -> tuple[Table, Table]:
    """Return the matrices (new rows, rows) and (new columns, columns) that resample a learned table to another grid."""
    grid, r = _parse_arguments(config, grid), config.resampling
    sizes = (max(grid), max(grid)) if r.square else grid
    rows, columns = (
        resample.matrix(old, new, kernel=r.kernel, antialias=r.antialias, align_corners=r.align_corners, offset=r.offset)
        for old, new in zip(config.grid, sizes, strict=True)
    )
    return rows[: grid[0]], columns[: grid[1]]


def _parse_arguments(config: ViTConfig, grid: Any) -> tuple[int, int]:
    """Return the grid as two integers; raise InputError unless it is two positive integers and the config is one."""
    check_config(config)
    rows, columns = coerce("grid", grid, tuple[int, int])
    require(min(rows, columns) > 0, f"grid is {grid!r}: give positive numbers of rows and columns")
    return rows, columns
