"""Position tables, compared with the formulas of their papers, one entry at a time."""

from math import cos, log, pi, sin

import numpy as np
import pytest

from vit_spec import positions

GRIDS = [(1, 1), (3, 5), (4, 2)]
EXACT = {"rtol": 0, "atol": 1e-13}


@pytest.mark.parametrize(("length", "width"), [(1, 2), (7, 8), (5, 7)])
def test_sincos_1d_follows_the_formula_of_attention_is_all_you_need(length, width):
    table = positions.sincos_1d(length, width)
    assert table.shape == (length, width)
    for pos in range(length):
        for column in range(width):
            i, function = column // 2, (sin, cos)[column % 2]
            np.testing.assert_allclose(table[pos, column], function(pos / 10000 ** (2 * i / width)), **EXACT)


def test_sincos_1d_by_hand():
    expected = [[0, 1, 0, 1], [sin(1), cos(1), sin(0.01), cos(0.01)]]
    np.testing.assert_allclose(positions.sincos_1d(2, 4), expected, **EXACT)


@pytest.mark.parametrize("order", ["big_vision", "mae", "timm"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("width", [8, 20])
def test_sincos_2d_follows_its_formula(grid, width, order):
    table = positions.sincos_2d(grid, width, order)
    assert table.shape == (grid[0] * grid[1], width)
    d = width // 4
    for row in range(grid[0]):
        for column in range(grid[1]):
            for k in range(d):
                omega = 10000 ** -(k / (d - 1 if order == "big_vision" else d))
                x, y = column * omega, row * omega
                columns_first, rows_first = (sin(x), cos(x), sin(y), cos(y)), (sin(y), sin(x), cos(y), cos(x))
                expected = rows_first if order == "timm" else columns_first
                np.testing.assert_allclose(table[row * grid[1] + column, k::d], expected, **EXACT)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("big_vision", [sin(1), sin(1e-4), cos(1), cos(1e-4), 0, 0, 1, 1]),
        ("mae", [sin(1), sin(1e-2), cos(1), cos(1e-2), 0, 0, 1, 1]),
        ("timm", [0, 0, sin(1), sin(1e-2), 1, 1, cos(1), cos(1e-2)]),
    ],
)
def test_sincos_2d_by_hand_one_patch_to_the_right(order, expected):
    np.testing.assert_allclose(positions.sincos_2d((1, 2), 8, order)[1], expected, **EXACT)


@pytest.mark.parametrize(
    ("width", "order", "remedy"),
    [
        (6, "mae", "multiple of 4"),
        (0, "mae", "multiple of 4"),
        (4, "big_vision", "8 or more"),
        (8, "learned", '"big_vision", "mae" or "timm"'),
    ],
)
def test_invalid_arguments_of_sincos_2d_are_refused_with_a_remedy(width, order, remedy):
    with pytest.raises(ValueError, match=remedy):
        positions.sincos_2d((2, 2), width, order)


def rotate(vector, angles, pairs):
    """Return `vector` with each pair (i, j) rotated by its angle: [[cos, -sin], [sin, cos]]."""
    result = list(vector)
    for angle, (i, j) in zip(angles, pairs, strict=True):
        result[i] = vector[i] * cos(angle) - vector[j] * sin(angle)
        result[j] = vector[i] * sin(angle) + vector[j] * cos(angle)
    return result


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("head_dim", [4, 16])
def test_rotary_axial_rotates_interleaved_pairs(grid, head_dim):
    cosine, sine = positions.rotary_axial(grid, head_dim, 1, 10000.0)
    q = np.random.default_rng(0).normal(size=head_dim)
    rotated = q * cosine + np.stack([-q[1::2], q[::2]], axis=-1).reshape(head_dim) * sine
    d = head_dim // 2
    pairs = [(i, i + 1) for i in range(0, head_dim, 2)]
    for row in range(grid[0]):
        for column in range(grid[1]):
            theta = [10000 ** (-2 * i / d) for i in range(1, d // 2 + 1)]
            angles = [place * frequency for place in (column + 1, row + 1) for frequency in theta]
            patch = 1 + row * grid[1] + column
            np.testing.assert_allclose(rotated[patch], rotate(q, angles, pairs), **EXACT)


def test_rotary_axial_by_hand():
    cosine, sine = positions.rotary_axial((1, 2), 8, 0, 16.0)  # d = 4: theta = 16^(-1/2), 16^(-1)
    angles = [2 / 4, 2 / 4, 2 / 16, 2 / 16, 1 / 4, 1 / 4, 1 / 16, 1 / 16]
    np.testing.assert_allclose(cosine[1], np.cos(angles), **EXACT)
    np.testing.assert_allclose(sine[1], np.sin(angles), **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("head_dim", [4, 16])
def test_rotary_dinov3_rotates_halves(grid, head_dim):
    cosine, sine = positions.rotary_dinov3(grid, head_dim, 1, 100.0)
    q = np.random.default_rng(0).normal(size=head_dim)
    half, quarter = head_dim // 2, head_dim // 4
    rotated = q * cosine + np.concatenate([-q[half:], q[:half]]) * sine
    pairs = [(i, i + half) for i in range(half)]
    for row in range(grid[0]):
        for column in range(grid[1]):
            y, x = 2 * (row + 0.5) / grid[0] - 1, 2 * (column + 0.5) / grid[1] - 1
            angles = [2 * pi * place / 100 ** (2 * i / half) for place in (y, x) for i in range(quarter)]
            patch = 1 + row * grid[1] + column
            np.testing.assert_allclose(rotated[patch], rotate(q, angles, pairs), **EXACT)


def test_rotary_dinov3_by_hand():
    cosine, sine = positions.rotary_dinov3((1, 2), 8, 0, 16.0)  # y = 0, x = 1/2; periods 1 and 4
    angles = [0, 0, pi, pi / 4] * 2
    np.testing.assert_allclose(cosine[1], np.cos(angles), **EXACT)
    np.testing.assert_allclose(sine[1], np.sin(angles), **EXACT)


@pytest.mark.parametrize("rotary", [positions.rotary_axial, positions.rotary_dinov3])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_prefix_tokens_are_not_rotated(rotary, prefix):
    cosine, sine = rotary((2, 3), 8, prefix, 100.0)
    assert cosine.shape == sine.shape == (prefix + 6, 8)
    assert (cosine[:prefix] == 1).all()
    assert (sine[:prefix] == 0).all()


@pytest.mark.parametrize("rotary", [positions.rotary_axial, positions.rotary_dinov3])
def test_a_head_dim_that_is_not_a_multiple_of_four_is_refused(rotary):
    with pytest.raises(ValueError, match="change num_heads or width"):
        rotary((2, 2), 6, 1, 100.0)


def test_tables_are_float64_and_indices_int64():
    sincos = [positions.sincos_1d(3, 8), positions.sincos_2d((2, 3), 8, "mae")]
    rotary = [*positions.rotary_axial((2, 3), 8, 1, 10000.0), *positions.rotary_dinov3((2, 3), 8, 1, 100.0)]
    assert [table.dtype for table in sincos + rotary] == [np.float64] * 6
    assert (positions.relative_offsets((2, 3)).dtype, positions.relative_index((2, 3), 1).dtype) == (np.float64, np.int64)


@pytest.mark.parametrize("grid", GRIDS)
def test_relative_offsets_are_signed_logarithms_rows_first(grid):
    table = positions.relative_offsets(grid)
    offsets = [(dy, dx) for dy in range(1 - grid[0], grid[0]) for dx in range(1 - grid[1], grid[1])]
    expected = [[(n > 0) * log(1 + abs(n)) - (n < 0) * log(1 + abs(n)) for n in offset] for offset in offsets]
    np.testing.assert_allclose(table, expected, **EXACT)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_relative_index_is_the_row_of_the_offset_of_the_query_from_the_key(grid, prefix):
    index, (height, width) = positions.relative_index(grid, prefix), grid
    count = (2 * height - 1) * (2 * width - 1)
    assert index.shape == (prefix + height * width,) * 2
    for query in range(len(index)):
        for key in range(len(index)):
            if query < prefix or key < prefix:
                expected = count + (2 if max(query, key) < prefix else int(key < prefix))
            else:
                (y, x), (v, u) = divmod(query - prefix, width), divmod(key - prefix, width)
                expected = (y - v + height - 1) * (2 * width - 1) + (x - u + width - 1)
            assert index[query, key] == expected
