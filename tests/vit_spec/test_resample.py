"""Resampling matrices, compared with resampling by torch and scipy in float64."""

from itertools import product

import numpy as np
import pytest

from vit_spec import resample

SIZES = [(14, 24), (24, 14), (28, 14), (16, 7), (7, 16), (5, 5), (8, 3), (2, 9), (6, 1), (1, 6), (1, 1)]
GRIDS = [((14, 14), (24, 24)), ((7, 5), (4, 9)), ((5, 5), (5, 8)), ((6, 11), (13, 2)), ((3, 1), (1, 4))]
MODES = [
    {"antialias": False, "align_corners": False, "offset": 0.0},
    {"antialias": True, "align_corners": False, "offset": 0.0},
    {"antialias": False, "align_corners": True, "offset": 0.0},
    {"antialias": False, "align_corners": False, "offset": 0.1},
    {"antialias": True, "align_corners": False, "offset": 0.1},
]
PLAIN = MODES[0]
KERNELS = ["bilinear", "bicubic"]
EXACT = {"rtol": 0, "atol": 1e-12}


def describe(mode):
    """Return the options of a mode that are not off, in words."""
    return " ".join(f"{name}={value}" for name, value in mode.items() if value) or "plain"


@pytest.mark.parametrize("mode", MODES, ids=describe)
@pytest.mark.parametrize("kernel", KERNELS)
def test_grids_are_resampled_as_in_torch(kernel, mode):
    torch = pytest.importorskip("torch")
    for old, new in GRIDS:
        grid = np.random.default_rng(0).normal(size=(*old, 3))
        rows, columns = (resample.matrix(o, n, kernel=kernel, **mode) for o, n in zip(old, new, strict=True))
        ours = np.einsum("hH,wW,HWD->hwD", rows, columns, grid)

        scale = [(n + mode["offset"]) / o for o, n in zip(old, new, strict=True)]
        theirs = torch.nn.functional.interpolate(
            torch.from_numpy(grid).permute(2, 0, 1)[None].contiguous(),
            **({"scale_factor": scale} if mode["offset"] else {"size": new}),
            mode=kernel,
            antialias=mode["antialias"],
            align_corners=mode["align_corners"],
        )
        np.testing.assert_allclose(ours, theirs[0].permute(1, 2, 0).numpy(), **EXACT, err_msg=f"{old} -> {new}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_new_grid_of_one_column_is_resampled_as_in_pillow_and_not_as_in_torch(kernel):
    torch = pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")
    grid = np.random.default_rng(0).normal(size=(14, 14)).astype(np.float32)
    rows, columns = (resample.matrix(14, n, kernel=kernel, **PLAIN | {"antialias": True}) for n in (16, 1))
    ours = rows @ grid @ columns.T
    of_pillow = image.fromarray(grid).resize((1, 16), image.Resampling[kernel.upper()])
    np.testing.assert_allclose(ours, of_pillow, rtol=0, atol=1e-6)  # Pillow computes in float32
    of_torch = torch.nn.functional.interpolate(torch.tensor(grid)[None, None], size=(16, 1), mode=kernel, antialias=True)
    # If this fails, torch has changed: then name the versions that differ in the docstring of `matrix`.
    assert abs(ours - of_torch[0, 0].numpy()).max() > 0.1


def test_bilinear_with_aligned_corners_is_scipy_zoom_of_order_one():
    """The mode of scipy is "nearest", since in the default mode scipy 1.17 returns zeros for the last row of 28 -> 14."""
    ndimage = pytest.importorskip("scipy.ndimage")
    for size_in, size_out in SIZES:
        ours = resample.matrix(size_in, size_out, kernel="bilinear", **PLAIN | {"align_corners": True})
        theirs = ndimage.zoom(np.eye(size_in), (size_out / size_in, 1), order=1, mode="nearest")
        np.testing.assert_allclose(ours, theirs, **EXACT, err_msg=f"{size_in} -> {size_out}")


def test_rows_sum_to_one():
    wrong = []
    for (size_in, size_out), kernel, mode in product(SIZES, KERNELS, MODES):
        rows = resample.matrix(size_in, size_out, kernel=kernel, **mode)
        if rows.shape != (size_out, size_in) or not np.allclose(rows.sum(axis=1), 1, rtol=0, atol=1e-14):
            wrong.append(f"{size_in} -> {size_out}, {kernel}, {describe(mode)}")
    assert not wrong


def test_equal_sizes_give_exactly_the_identity():
    wrong = []
    for size, kernel, mode in product((1, 2, 14), KERNELS, (mode for mode in MODES if not mode["offset"])):
        if not np.array_equal(resample.matrix(size, size, kernel=kernel, **mode), np.eye(size)):
            wrong.append(f"{size}, {kernel}, {describe(mode)}")
    assert not wrong


def test_bilinear_by_hand():
    rows = resample.matrix(2, 4, kernel="bilinear", **PLAIN)
    assert (rows == [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]).all()


def test_bicubic_by_hand_with_repeated_border_pixels():
    rows = resample.matrix(4, 2, kernel="bicubic", **PLAIN)
    near, far = 19 / 32, -3 / 32  # a = -3/4: 1/2 - a/8 at distance 1/2, a/8 at distance 3/2
    assert (rows == [[far + near, near, far, 0], [0, far, near, near + far]]).all()


def test_the_matrix_is_float64_and_read_only():
    rows = resample.matrix(2, 3, kernel="bicubic", **PLAIN)
    assert rows.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel": "nearest"}, '"bilinear" or "bicubic"'),
        ({"size_in": 0}, "give sizes of at least 1"),
        ({"size_out": 0}, "give sizes of at least 1"),
        ({"offset": -0.1}, "no negative offset"),
        ({"align_corners": True, "antialias": True}, "cannot be combined with antialias or an offset"),
        ({"align_corners": True, "offset": 0.1}, "cannot be combined with antialias or an offset"),
    ],
)
def test_invalid_arguments_are_refused(change, reason):
    arguments = {"size_in": 4, "size_out": 6, "kernel": "bicubic"} | PLAIN | change
    with pytest.raises(ValueError, match=reason):
        resample.matrix(**arguments)
