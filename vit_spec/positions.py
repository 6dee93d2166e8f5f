"""Position tables: sinusoids that are added to the tokens, cosines and sines of rotary embeddings, relative positions.

Every table is row-major: row y * gw + x is the patch in row y and column x of a grid (gh, gw).  Tables are float64, indices
int64.  They are cached, and therefore read-only.
"""

from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Index = NDArray[np.int64]
AnyTable = TypeVar("AnyTable", bound=NDArray[Any])

TABLES = (
    "sincos_1d",
    "sincos_2d_big_vision",
    "sincos_2d_mae",
    "sincos_2d_timm",
)  # names of the tables that can be added to tokens
SCALED_ROTARY = ("eva", "rope_vit")  # rotary embeddings of `rotary_rows_columns`, with a start and a reference grid


@cache
def sincos_1d(length: int, width: int) -> Table:
    """Return the sine-cosine table of a sequence, (length, width); positions count from 0.

        table[pos, 2i]     = sin(pos / 10000^(2i / width))
        table[pos, 2i + 1] = cos(pos / 10000^(2i / width))

    "Attention Is All You Need", section 3.5; T2T-ViT `get_sinusoid_encoding` (models/transformer_block.py).
    An odd width ends with a sine that has no cosine, as in the formula and in T2T-ViT.
    """
    column = np.arange(width)
    angle = np.arange(length)[:, None] / 10000.0 ** (column // 2 * 2 / width)
    return _read_only(np.where(column % 2 == 0, np.sin(angle), np.cos(angle)))


@cache
def sincos_2d(grid: tuple[int, int], width: int, order: str) -> Table:
    """Return the 2-D sine-cosine table of a grid of patches, (gh * gw, width).

    Rows y and columns x count from 0; d = width / 4:

        order       w_k, k = 0..d-1         columns, d of each                      source
        big_vision  10000^(-k / (d - 1))    [sin x w, cos x w, sin y w, cos y w]    big_vision models/vit.py
        mae         10000^(-k / d)          [sin x w, cos x w, sin y w, cos y w]    mae util/pos_embed.py
        timm        10000^(-k / d)          [sin y w, sin x w, cos y w, cos x w]    timm build_sincos2d_pos_embed

    SimpleViT also uses "big_vision"; both state that they follow MoCo v3.  However, vits.py of moco-v3 has MAE's
    frequencies, and rows before columns; its checkpoints contain the table as `pos_embed`.

    Raises:
        ValueError: unknown order; width not a multiple of 4; "big_vision" with width 4, where w is 0 / 0.
    """
    if order not in ("big_vision", "mae", "timm"):
        raise ValueError(f'order must be "big_vision", "mae" or "timm", not {order!r}')
    if width % 4 or width < 4:
        raise ValueError(f"width {width} must be a positive multiple of 4: a sine and a cosine for each of x and y")
    if order == "big_vision" and width == 4:
        raise ValueError('order "big_vision" divides by width / 4 - 1: use a width of 8 or more, or order "mae"')
    d = width // 4
    omega = 10000.0 ** (-np.arange(d) / (d - 1 if order == "big_vision" else d))
    y, x = (np.outer(position, omega) for position in np.indices(grid).reshape(2, -1))
    if order == "timm":
        return _read_only(np.concatenate([np.sin(y), np.sin(x), np.cos(y), np.cos(x)], axis=1))
    return _read_only(np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1))


def patch_coordinates(grid: tuple[int, int]) -> tuple[Table, Table]:
    """Return the row y and the column x of every patch, counted from 0, each (gh * gw,)."""
    y, x = np.indices(grid).reshape(2, -1).astype(np.float64)
    return y, x


@cache
def rotary_axial(grid: tuple[int, int], head_dim: int, prefix: int, base: float) -> tuple[Table, Table]:
    """Return cos and sin of axial rotary embeddings, of columns and of rows, each (prefix + gh * gw, head_dim).

    With d = head_dim / 2 and theta_i = base^(-2i / d), i = 1..d/2, where each theta_i occurs twice:

        angle = [x theta_1, x theta_1, .., x theta_{d/2}, x theta_{d/2},  y theta_1, y theta_1, ..]

    x (the column) and y (the row) count from 1; prefix tokens have angle 0, so they are not rotated.
    Apply to queries and keys in **interleaved pairs**:

        q * cos + pairs(q) * sin,   pairs: (q0, q1, q2, q3, ..) -> (-q1, q0, -q3, q2, ..)

    s-chh/2D-Positional-Encoding-Vision-Transformer, positional_embeddings/pos_embed_rope.py, base 10000.  Its exponent is
    -2i / d where RoFormer (arXiv 2104.09864, equation 15) has -2(i - 1) / d, so even the fastest pair rotates by less than
    a radian per patch.

    Raises:
        ValueError: head_dim is not a multiple of 4.
    """
    y, x = patch_coordinates(grid)
    return _cos_sin(axial_angles(y, x, head_dim, base), prefix)


def axial_angles(y: Table, x: Table, head_dim: int, base: float) -> Table:
    """Return the angles of `rotary_axial` at rows y and columns x, (n, head_dim).

    Rows and columns, (n,), count from 0 here; fractions are allowed.
    """
    _check_head_dim(head_dim)
    d = head_dim // 2
    theta = np.repeat(base ** (-2 * np.arange(1, d // 2 + 1) / d), 2)
    return np.concatenate([np.outer(x + 1, theta), np.outer(y + 1, theta)], axis=1)


@cache
def rotary_rows_columns(
    grid: tuple[int, int],
    head_dim: int,
    prefix: int,
    base: float,
    start: float = 0.0,
    reference: tuple[int, int] | None = None,
    columns_first: bool = False,
) -> tuple[Table, Table]:
    """Return cos and sin of the rotary embeddings of EVA-02 and of RoPE-ViT, each (prefix + gh * gw, head_dim).

    With d = head_dim / 2 and theta_i = base^(-2i / d), i = 0..d/2-1, where each theta_i occurs twice:

        y = (row + start) rows / gh,   x = (column + start) columns / gw
        angle = [y theta_0, y theta_0, .., y theta_{d/2-1}, y theta_{d/2-1},  x theta_0, x theta_0, ..]

    for a reference grid of (rows, columns); without one, y = row + start and x = column + start.  With `columns_first`, the
    angles of x come before those of y.  Prefix tokens have angle 0, so they are not rotated.  Apply to queries and keys in
    interleaved pairs, as for `rotary_axial`.

    EVA-02 (arXiv 2303.11331): rows first, start 0, a reference grid of 16 x 16.  RoPE-ViT (arXiv 2403.13298, "axial"):
    columns first, start 0, no reference, base 100.  Perception Encoder (arXiv 2504.13181): columns first, start 1 (0 in G),
    and the grid of its own resolution.  timm 1.0.31, RotaryEmbeddingCat in layers/pos_embed_sincos.py.

    Raises:
        ValueError: head_dim is not a multiple of 4.
    """
    y, x = patch_coordinates(grid)
    return _cos_sin(rows_columns_angles(y, x, grid, head_dim, base, start, reference, columns_first), prefix)


def rows_columns_angles(
    y: Table,
    x: Table,
    grid: tuple[int, int],
    head_dim: int,
    base: float,
    start: float,
    reference: tuple[int, int] | None,
    columns_first: bool,
) -> Table:
    """Return the angles of `rotary_rows_columns` at rows y and columns x, (n, head_dim).

    Rows and columns, (n,), count from 0; fractions are allowed.
    """
    _check_head_dim(head_dim)
    d = head_dim // 2
    theta = np.repeat(base ** (-2 * np.arange(d // 2) / d), 2)
    y, x = y + start, x + start
    if reference is not None:
        y, x = y / grid[0] * reference[0], x / grid[1] * reference[1]
    rows, columns = np.outer(y, theta), np.outer(x, theta)
    return np.concatenate([columns, rows] if columns_first else [rows, columns], axis=1)


@cache
def grid_coordinates(grid: tuple[int, int], prefix: int) -> tuple[Table, Table]:
    """Return the columns x and the rows y of all tokens, each (prefix + gh * gw); both are 0 for prefix tokens."""
    y, x = (np.pad(coordinate, (prefix, 0)) for coordinate in patch_coordinates(grid))
    return _read_only(x), _read_only(y)


def rotary_frequencies(pairs: int, base: float) -> tuple[Table, Table]:
    """Return magnitudes m and angles t, each (pairs,), of the initial frequencies of learned rotary embeddings.

    The frequencies of a head for x and y are m cos(a + t) and m sin(a + t), where the angle a of the head is random.  With
    d = pairs / 2, m is base^(-i / d), i = 0..d-1, twice; t is 0 for the first d pairs and pi / 2 for the others.

    arXiv 2403.13298; naver-ai/rope-vit, init_random_2d_freqs in models/vit_rope.py.

    Args:
        pairs: number of pairs of entries of a head: head_dim / 2.
        base: the base of the frequencies.
    """
    d = pairs // 2
    return np.tile(base ** (-np.arange(d) / d), 2), np.repeat([0, np.pi / 2], d)


@cache
def rotary_dinov3(grid: tuple[int, int], head_dim: int, prefix: int, base: float) -> tuple[Table, Table]:
    """Return cos and sin of DINOv3's rotary embedding, each (prefix + gh * gw, head_dim).

    Patch centers are scaled to [-1, 1] along each axis, so that the angles do not grow with the resolution.
    With d = head_dim / 2 and period_i = base^(2i / d), i = 0..d/2-1:

        y = 2 (row + 1/2) / gh - 1,   x = 2 (column + 1/2) / gw - 1
        angle = [2 pi y / period, 2 pi x / period,  2 pi y / period, 2 pi x / period]

    Prefix tokens have angle 0, so they are not rotated.  Apply to queries and keys in **halves**:

        q * cos + halves(q) * sin,   halves: (q1, q2) -> (-q2, q1), each of head_dim / 2

    arXiv 2508.10104; dinov3/layers/rope_position_encoding.py with normalize_coords="separate" (base 100).
    Meta's checkpoints store the periods rounded to bfloat16; timm and transformers recompute them in float32.

    Raises:
        ValueError: head_dim is not a multiple of 4.
    """
    y, x = patch_coordinates(grid)
    return _cos_sin(dinov3_angles(y, x, grid, head_dim, base), prefix)


def dinov3_angles(y: Table, x: Table, grid: tuple[int, int], head_dim: int, base: float) -> Table:
    """Return the angles of `rotary_dinov3` at rows y and columns x, (n, head_dim).

    Rows and columns, (n,), count from 0; fractions are allowed.
    """
    _check_head_dim(head_dim)
    d = head_dim // 2
    period = base ** (2 * np.arange(d // 2) / d)
    y, x = 2 * (y + 0.5) / grid[0] - 1, 2 * (x + 0.5) / grid[1] - 1
    rows, columns = np.outer(y, 2 * np.pi / period), np.outer(x, 2 * np.pi / period)
    return np.concatenate([rows, columns, rows, columns], axis=1)


@cache
def relative_offsets(grid: tuple[int, int]) -> Table:
    """Return signed logarithms of the offsets between two patches of a grid, ((2 gh - 1) (2 gw - 1), 2).

        l(n) = sign(n) log(1 + |n|);   row (dy + gh - 1) (2 gw - 1) + (dx + gw - 1) is (l(dy), l(dx))

    timm 1.0.31, layers/pos_embed_rel.py, gen_relative_log_coords with mode "cr".
    """
    offsets = np.indices([2 * n - 1 for n in grid]).reshape(2, -1).T - (np.array(grid) - 1)
    return _read_only(np.sign(offsets) * np.log(1.0 + np.abs(offsets)))


@cache
def relative_index(grid: tuple[int, int], prefix: int) -> Index:
    """Return the row of a table of relative positions for each query and each key, (T, T) int64, T = prefix + gh * gw.

    Two patches have the row of their offset (dy, dx) = query - key, as in `relative_offsets`.  Three rows follow: for the
    query of a prefix token with the key of a patch, for the query of a patch with the key of a prefix token, and for two
    prefix tokens.

    BEiT (arXiv 2106.08254): microsoft/unilm, beit/modeling_finetune.py, relative_position_index.
    """
    gh, gw = grid
    y, x = np.indices(grid).reshape(2, -1)
    patches = (y[:, None] - y + gh - 1) * (2 * gw - 1) + (x[:, None] - x + gw - 1)
    index = np.pad(patches, (prefix, 0)).astype(np.int64)
    count = (2 * gh - 1) * (2 * gw - 1)
    index[:prefix], index[prefix:, :prefix], index[:prefix, :prefix] = count, count + 1, count + 2
    return _read_only(index)


def _check_head_dim(head_dim: int) -> None:
    """Raise ValueError if half a head, for x and for y each, cannot be divided into pairs of entries."""
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}: 2-D rotary embeddings need a multiple of 4; change num_heads or width")


def _cos_sin(angle: Table, prefix: int) -> tuple[Table, Table]:
    """Return cos and sin of the angles (gh * gw, head_dim), with `prefix` rows of angle 0 prepended."""
    angle = np.pad(angle, ((prefix, 0), (0, 0)))
    return _read_only(np.cos(angle)), _read_only(np.sin(angle))


def _read_only(table: AnyTable) -> AnyTable:
    table.flags.writeable = False  # the cache returns the same array to every caller
    return table
