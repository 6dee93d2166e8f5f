"""Augmentation: each part against its definition, Pillow, torchvision or timm; distributions at fixed seeds.

A distribution is compared with its reference at a significance level of 1e-6: a correct one fails for one seed in a
million.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("PIL")
stats = pytest.importorskip("scipy.stats")

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from train.data.augment import (
    Augment,
    Mix,
    augment_image,
    colour_jitter,
    crop_image,
    mix_images,
    mix_targets,
    randaugment,
    random_erase,
    resize_and_center_crop,
    sample_mix,
    three_augment,
)
from train.data.augment.crop import Box, crop_and_resize, inception_box, resized_box, simple_crop
from train.data.augment.randaugment import OPERATIONS
from train.data.rng import generator
from vit_spec import InputError

SIGNIFICANCE = 1e-6


def wave_image(width: int = 80, height: int = 60, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of noisy waves that has every value from 0 to 255."""
    rng = np.random.default_rng(seed)
    y, x = np.indices((height, width))[..., None]
    waves = 127 + 90 * np.sin(x / (5, 7, 9) + y / (11, 6, 8)) + rng.normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(waves, 0, 255).astype(np.uint8)).convert(mode)


def is_same_image(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode and np.array_equal(one, other)


# Options --------------------------------------------------------------------------------------------------------------

LIMITS: list[dict[str, Any]] = [
    {"crop_area": (1.0, 1.0)},
    {"rotate": 180},
    {"shift": 0.999},
    {"scale": 1},
    {"randaugment": (1, 0)},
    {"randaugment": (3, 30)},
    {"jitter": 1},
    {"erase": 1},
    {"mixup": 0, "cutmix": 0},
]
BEYOND_LIMITS: dict[str, Any] = {
    "crop_area": [(0.0, 1.0), (0.5, 0.4), (0.5, 1.1), (math.nan, 1.0)],
    "rotate": [-1, 181, math.nan],
    "shift": [1, -0.1],
    "scale": [0.5, math.inf],
    "randaugment": [(0, 10), (2, -1), (2, 31)],
    "jitter": [-0.1, 1.1],
    "erase": [1.5],
    "mixup": [-1, math.inf],
    "cutmix": [math.nan],
}


@pytest.mark.parametrize("fields", LIMITS)
def test_a_value_at_its_limit_is_accepted_and_works(fields: dict[str, Any]) -> None:
    assert augment_image(wave_image(), Augment(**fields), (16, 16), generator(1)).shape == (16, 16, 3)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BEYOND_LIMITS for value in BEYOND_LIMITS[name]])
def test_a_value_beyond_its_limit_is_refused_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^augment\.{name} is .*: give [^\n]*$"):
        Augment(**{name: value})


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_resize_and_center_crop_covers_the_size_and_crops_both_sides_evenly() -> None:
    whole = wave_image().resize((30, 22), Image.Resampling.BICUBIC)  # of 80x60: 22.5 rows, rounded half to even
    assert is_same_image(resize_and_center_crop(wave_image(), (20, 30)), whole.crop((0, 1, 30, 21)))


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos", "box"])
def test_resize_and_center_crop_is_pillows_resize_and_crop_when_no_rounding_is_needed(filter: Any) -> None:
    image = wave_image(160, 96)
    whole = image.resize((80, 48), getattr(Image.Resampling, filter.upper()))
    assert is_same_image(resize_and_center_crop(image, (36, 36), 36 / 48, filter), whole.crop((22, 6, 58, 42)))


def test_an_image_that_is_too_long_is_refused_with_its_height_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"^80x10 pixels would be resized to 240x30 \(height x width\)"):
        resize_and_center_crop(Image.new("L", (10, 80)), (30, 30))
    with pytest.raises(InputError, match=r"^80x10 pixels would be resized to 240x30 \(height x width\)"):
        simple_crop(Image.new("L", (10, 80)), (30, 30), np.random.default_rng(0), "bicubic")


def test_resize_and_center_crop_keeps_the_centre_without_antialiasing_too() -> None:
    image = wave_image(160, 96)
    box = (44, 12, 116, 84)
    assert is_same_image(
        resize_and_center_crop(image, (36, 36), 36 / 48, "bilinear_aliased"),
        crop_and_resize(image, box, (36, 36), "bilinear_aliased"),
    )


def reference_bilinear(image: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
    """Return the result by definition, in float64: pixel i is at i + 1/2, and the edge extends beyond the image."""
    pixels = np.asarray(image, np.float64)
    for axis, (low, high) in enumerate(((box[1], box[3]), (box[0], box[2]))):
        place = low + (np.arange(size[axis]) + 0.5) * (high - low) / size[axis] - 0.5
        before = np.floor(place).astype(int)
        one, other = (pixels.take(np.clip(i, 0, pixels.shape[axis] - 1), axis) for i in (before, before + 1))
        weight = (place - before).reshape([-1 if i == axis else 1 for i in range(pixels.ndim)])
        pixels = (1 - weight) * one + weight * other
    return pixels


BOXES = [(0, 0, 80, 60), (10, 5, 70, 55), (33, 21, 40, 30), (79, 59, 80, 60), (0, 10, 80, 12)]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("box", BOXES)
def test_a_crop_without_antialiasing_is_bilinear_between_pixel_centres(box: Box, mode: str) -> None:
    shown = np.asarray(crop_and_resize(wave_image(mode=mode), box, (24, 32), "bilinear_aliased"), np.float64)
    # Each of two passes rounds (1/2) and takes weights of 8 bits (1/2 again), and positions are off by 2**-20.
    assert np.abs(shown - reference_bilinear(wave_image(mode=mode), box, (24, 32))).max() <= 2 + 255 * 2 * 2**-20


@pytest.mark.parametrize("box", BOXES)
def test_a_crop_without_antialiasing_matches_pillows_transform(box: Box) -> None:
    shown = np.asarray(crop_and_resize(wave_image(), box, (24, 32), "bilinear_aliased"), int)
    pillow = wave_image().transform((32, 24), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
    assert np.abs(shown - np.asarray(pillow, int)).max() <= 2  # Pillow's is exact, then truncated: up to one less


def test_a_crop_with_antialiasing_is_a_crop_and_a_resize_except_at_its_edge() -> None:
    box = (10, 6, 70, 54)
    shown, alone = (
        crop_and_resize(wave_image(), box, (16, 20), "bilinear"),
        wave_image().crop(box).resize((20, 16), Image.Resampling.BILINEAR),
    )
    assert is_same_image(shown.crop((1, 1, 19, 15)), alone.crop((1, 1, 19, 15)))


# Crops ----------------------------------------------------------------------------------------------------------------


def draw_boxes(draw: Callable[..., Box], width: int, height: int, count: int, area: tuple[float, float]) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([draw(width, height, rng, area) for _ in range(count)])


def expected_heights(width: int, height: int, area: tuple[float, float]) -> np.ndarray:
    """Return the distribution of an inception crop's height: for each aspect ratio it is uniform between two bounds."""
    law = np.zeros(height + 1)
    for aspect in 3 / 4 + (np.arange(20000) + 0.5) / 20000 * (4 / 3 - 3 / 4):
        low = round(math.sqrt(area[0] * width * height / aspect))
        high = min(math.sqrt(area[1] * width * height / aspect), height, (width + 0.5) / aspect)
        high = max(h for h in (int(high), int(high) + 1) if h <= height and round(h * aspect) <= width)
        law[low : high + 1] += 1 / (high + 1 - low) / 20000
    return law


def test_the_height_of_an_inception_crop_has_tensorflows_distribution() -> None:
    drawn = draw_boxes(inception_box, 500, 400, 20000, (0.05, 1.0))
    law = expected_heights(500, 400, (0.05, 1.0))
    # Twenty bins of about equal probability; a rounding at the lower bound moves a box by one row, within its bin.
    edges = np.searchsorted(law.cumsum(), np.arange(1, 20) / 20)
    counts = np.bincount(np.searchsorted(edges, drawn[:, 3] - drawn[:, 1]), minlength=20)
    expected = np.add.reduceat(law, [0, *(edges + 1)])
    assert stats.chisquare(counts, expected * len(drawn)).pvalue > SIGNIFICANCE


def test_the_aspect_ratio_of_an_inception_crop_is_uniform() -> None:
    # The image does not limit crops of at most 0.4 of its area.
    left, top, right, bottom = draw_boxes(inception_box, 50000, 40000, 5000, (0.05, 0.4)).T
    aspect = (right - left) / (bottom - top)
    assert stats.kstest(aspect, stats.uniform(3 / 4, 4 / 3 - 3 / 4).cdf).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("draw", [inception_box, resized_box])
def test_the_position_of_a_crop_is_uniform(draw: Callable[..., Box]) -> None:
    left, top, right, bottom = draw_boxes(draw, 50000, 40000, 5000, (0.05, 0.4)).T
    for place in (left / (50000 - right + left), top / (40000 - bottom + top)):
        assert stats.kstest(place, "uniform").pvalue > SIGNIFICANCE


@pytest.mark.parametrize("draw", [inception_box, resized_box])
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    area=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_a_crop_lies_within_its_image(
    draw: Callable[..., Box], width: int, height: int, area: tuple[float, float], seed: int
) -> None:
    low, high = sorted(area)
    left, top, right, bottom = draw(width, height, np.random.default_rng(seed), (low, high))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_an_inception_crop_has_an_area_within_the_limits() -> None:
    left, top, right, bottom = draw_boxes(inception_box, 97, 61, 2000, (0.3, 0.5)).T
    share = (right - left) * (bottom - top) / (97 * 61)
    assert 0.3 <= share.min() and share.max() <= 0.5


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000)])
def test_an_inception_crop_that_never_fits_is_the_whole_image(size: tuple[int, int]) -> None:
    assert inception_box(*size, generator(1), (0.5, 1.0)) == (0, 0, *size)


@pytest.fixture(scope="module")
def torchvision() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("tests.goldens.peers")  # lets torchvision load beside another build of PyTorch
    return pytest.importorskip("torchvision")


def torchvision_boxes(torchvision: Any, width: int, height: int, count: int) -> np.ndarray:
    import torch

    torch.manual_seed(0)
    image, crop = Image.new("L", (width, height)), torchvision.transforms.RandomResizedCrop
    drawn = np.array([crop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)])
    top, left, high, wide = drawn.T
    return np.stack([left, top, left + wide, top + high], 1)


def sizes_and_positions(drawn: np.ndarray) -> np.ndarray:
    return np.stack([drawn[:, 2] - drawn[:, 0], drawn[:, 3] - drawn[:, 1], drawn[:, 0], drawn[:, 1]])


def test_a_resized_crop_has_torchvisions_distribution(torchvision: Any) -> None:
    ours, theirs = draw_boxes(resized_box, 500, 400, 3000, (0.08, 1.0)), torchvision_boxes(torchvision, 500, 400, 3000)
    for one, other in zip(sizes_and_positions(ours), sizes_and_positions(theirs), strict=True):
        assert stats.ks_2samp(one, other).pvalue > SIGNIFICANCE


def test_an_inception_crop_has_another_distribution_than_torchvisions(torchvision: Any) -> None:
    ours, theirs = draw_boxes(inception_box, 500, 400, 3000, (0.08, 1.0)), torchvision_boxes(torchvision, 500, 400, 3000)
    assert stats.ks_2samp(sizes_and_positions(ours)[1], sizes_and_positions(theirs)[1]).pvalue < SIGNIFICANCE


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000), (999, 10)])
def test_a_resized_crop_that_never_fits_is_torchvisions_central_crop(torchvision: Any, size: tuple[int, int]) -> None:
    [theirs] = torchvision_boxes(torchvision, *size, 1).tolist()
    assert resized_box(*size, generator(1), (0.9, 1.0)) == tuple(theirs)


def test_the_position_of_a_simple_crop_in_the_padded_image_is_uniform() -> None:
    image = wave_image(21, 16, "L")
    padded = np.pad(np.asarray(image), 4, mode="reflect")
    places = {padded[y : y + 16, x : x + 16].tobytes(): (y, x) for y in range(9) for x in range(14)}
    rng = np.random.default_rng(0)
    found = [places[simple_crop(image, (16, 16), rng, "bicubic").tobytes()] for _ in range(2000)]
    counts = np.histogram2d(*np.array(found).T, bins=(9, 14), range=((0, 9), (0, 14)))[0]
    assert stats.chisquare(counts, axis=None).pvalue > SIGNIFICANCE


# RandAugment ----------------------------------------------------------------------------------------------------------

GREY = {"L": 128, "RGB": (128, 128, 128)}


def expected_affine(*inverse: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, inverse, fillcolor=GREY[image.mode])


def expected_cutout(image: Image.Image) -> Image.Image:
    """Cover the pixels within 40/224 of the sides from the point (0.25, 0.75) of the sides, with numpy."""
    pixels = np.array(image)
    y, x = (np.abs(np.arange(n) - int(at * n) + 0.5) for n, at in zip(pixels.shape, (0.75, 0.25), strict=False))
    down, across = int(40 / 224 * pixels.shape[0]), int(40 / 224 * pixels.shape[1])
    pixels[np.ix_(y < down, x < across)] = 128
    return Image.fromarray(pixels)


# For the random numbers 0.25, a positive sign, and 0.75
EXPECTED_AT_TEN: dict[str, Callable[[Image.Image], Image.Image]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
    "Rotate": lambda image: image.rotate(30, fillcolor=GREY[image.mode]),
    "Posterize": lambda image: ImageOps.posterize(image, 4),
    "Solarize": ImageOps.invert,
    "SolarizeAdd": lambda image: image.point(lambda value: min(255, value + 110) if value < 128 else value),
    "Color": lambda image: ImageEnhance.Color(image).enhance(1.9),
    "Contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.9),
    "Brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.9),
    "Sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.9),
    "ShearX": expected_affine(1, 0.3, 0, 0, 1, 0),
    "ShearY": expected_affine(1, 0, 0, 0.3, 1, 0),
    "TranslateX": expected_affine(1, 0, 100 / 224 * 80, 0, 1, 0),
    "TranslateY": expected_affine(1, 0, 0, 0, 1, 100 / 224 * 60),
    "Cutout": expected_cutout,
}


def test_the_operations_are_big_visions_sixteen() -> None:
    assert OPERATIONS.keys() == EXPECTED_AT_TEN.keys() and len(OPERATIONS) == 16


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", EXPECTED_AT_TEN)
def test_an_operation_of_magnitude_10_matches_pillow(name: str, mode: str) -> None:
    image = wave_image(mode=mode)
    assert is_same_image(OPERATIONS[name](image, 1.0, 0.25, 0.75), EXPECTED_AT_TEN[name](image))


@pytest.mark.parametrize("name", EXPECTED_AT_TEN)
def test_every_operation_changes_a_colour_image(name: str) -> None:
    image = ImageEnhance.Brightness(wave_image()).enhance(0.7)  # otherwise its contrast is already full
    assert not is_same_image(OPERATIONS[name](image, 1.0, 0.25, 0.75), image)


def test_the_colour_operation_does_not_change_a_grey_image() -> None:
    assert is_same_image(OPERATIONS["Color"](wave_image(mode="L"), 1.0, 0.25, 0.75), wave_image(mode="L"))


def test_contrast_moves_values_away_from_the_mean_of_the_image() -> None:
    image = Image.fromarray(np.repeat(np.uint8([60, 100]), 8).reshape(4, 4))
    assert set(np.asarray(OPERATIONS["Contrast"](image, 1.0, 0, 0)).flat) == {80 - 38, 80 + 38}  # 1.9 times 20


@pytest.mark.parametrize(("magnitude", "first"), [(0, 256), (5, 128), (9, 26), (10, 0), (30, 0)])
def test_solarize_inverts_more_values_with_more_magnitude(magnitude: int, first: int) -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    shown = np.asarray(OPERATIONS["Solarize"](ramp, magnitude / 10, 0, 0))[0]
    assert np.array_equal(shown, np.where(np.arange(256) < first, np.arange(256), 255 - np.arange(256)))


@pytest.mark.parametrize(("magnitude", "values"), [(0, 2), (5, 4), (10, 16), (15, 64), (20, 256), (30, 256)])
def test_posterize_keeps_bits_by_big_visions_rule_and_at_least_one(magnitude: int, values: int) -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    assert len(np.unique(OPERATIONS["Posterize"](ramp, magnitude / 10, 0, 0))) == values


TIMM_NAMES = {name: name for name in EXPECTED_AT_TEN if name != "Cutout"} | {"Solarize": "SolarizeIncreasing"}


@pytest.mark.parametrize("name", TIMM_NAMES)
@pytest.mark.parametrize("magnitude", [4, 10])
def test_an_operation_matches_timm(name: str, magnitude: int, torchvision: Any) -> None:
    timm = pytest.importorskip("timm.data.auto_augment")
    size = 224
    image, level = wave_image(size, size), timm.LEVEL_TO_ARG[TIMM_NAMES[name]]
    arguments = level(magnitude, {"translate_const": 100}) if level else ()
    if name.startswith(("Rotate", "Shear", "Translate")):
        arguments = (abs(arguments[0]),)  # the sign is random
    theirs = timm.NAME_TO_OP[TIMM_NAMES[name]](image, *arguments, fillcolor=GREY["RGB"], resample=Image.Resampling.NEAREST)
    assert is_same_image(OPERATIONS[name](image, magnitude / 10, 0.25, 0.75), theirs)


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_an_operation_with_a_sign_works_in_both_directions(name: str) -> None:
    forth, back = (OPERATIONS[name](wave_image(), 1.0, draw, 0) for draw in (0.49, 0.5))
    assert not is_same_image(forth, back) and is_same_image(back, OPERATIONS[name](wave_image(), -1.0, 0, 0))


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3), (80, 60)])
@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9, 3.7])
def test_sharpness_matches_pillow_at_any_size(size: tuple[int, int], factor: float) -> None:
    image = wave_image(*size)
    assert is_same_image(
        OPERATIONS["Sharpness"](image, (factor - 0.1) / 1.8, 0, 0), ImageEnhance.Sharpness(image).enhance(factor)
    )


def test_a_cutout_at_the_corner_covers_the_part_within_the_image() -> None:
    white = Image.new("L", (224, 224), 255)
    assert np.argwhere(np.asarray(OPERATIONS["Cutout"](white, 1.0, 0, 0)) == 128).max(0).tolist() == [39, 39]


def test_all_operations_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    spies = [lambda image, m, u, v, i=i: drawn.append(i) or image for i in range(16)]
    monkeypatch.setitem(randaugment.__globals__, "_OPERATION_LIST", spies)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        randaugment(wave_image(2, 2), rng, 2)
    assert stats.chisquare(np.bincount(drawn, minlength=16)).pvalue > SIGNIFICANCE


# Colour ---------------------------------------------------------------------------------------------------------------


def test_jitter_matches_torchvision_in_one_of_six_orders(torchvision: Any) -> None:
    adjust = torchvision.transforms.functional
    steps = (adjust.adjust_brightness, adjust.adjust_contrast, adjust.adjust_saturation)
    seen = set()
    for seed in range(40):
        shown, rng = colour_jitter(wave_image(8, 8), generator(seed), 0.4), generator(seed)
        factors = 1 + 0.4 * rng.uniform(-1, 1, 3)
        for order in itertools.permutations(range(3)):
            image = wave_image(8, 8)
            for i in order:
                image = steps[i](image, factors[i])
            if is_same_image(image, shown):
                seen.add(order)
                break
        else:
            pytest.fail(f"seed {seed}: no order gives this image")
    assert len(seen) == 6


def test_jitter_of_strength_zero_changes_nothing() -> None:
    assert is_same_image(colour_jitter(wave_image(), generator(1), 0), wave_image())


def test_the_three_operations_of_three_augment_are_equally_likely() -> None:
    image, rng = wave_image(16, 16), np.random.default_rng(0)
    grey, solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image)
    shown = [three_augment(image, rng) for _ in range(600)]
    counts = [sum(is_same_image(one, known) for one in shown) for known in (grey, solarized)]
    assert stats.chisquare([*counts, 600 - sum(counts)]).pvalue > SIGNIFICANCE


def test_three_augment_blurs_by_a_radius_from_0_1_to_2() -> None:
    image, rng = wave_image(16, 16), np.random.default_rng(0)
    grey, solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image)
    shown = [one for one in (three_augment(image, rng) for _ in range(300)) if not is_same_image(one, grey)]
    left = [np.var(np.asarray(one, float)) for one in shown if not is_same_image(one, solarized)]
    least, most = (np.var(np.asarray(image.filter(ImageFilter.GaussianBlur(r)), float)) for r in (2, 0.1))
    assert least <= min(left) < 1.05 * least and 0.95 * most < max(left) <= most


# Erasing --------------------------------------------------------------------------------------------------------------

FLAT = np.full((64, 48, 3), 128, np.uint8)


def extent(mask: np.ndarray) -> tuple[int, int]:
    """Return the numbers of rows and columns of the rectangle where a mask is set."""
    return int(mask.any(1).sum()), int(mask.any(0).sum())


def test_the_erased_rectangle_has_timms_distribution(torchvision: Any) -> None:
    import torch

    timm = pytest.importorskip("timm.data.random_erasing").RandomErasing(1.0, mode="const", device="cpu")
    random.seed(0)
    theirs = np.array([extent(timm(torch.ones(1, 64, 48)).numpy()[0] == 0) for _ in range(1000)])
    rng = np.random.default_rng(0)
    ours = np.array([extent((random_erase(FLAT, rng, 1.0) != FLAT).any(2)) for _ in range(1000)])
    for one, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(one, other).pvalue > SIGNIFICANCE


def test_images_are_erased_with_the_given_probability() -> None:
    rng = np.random.default_rng(0)
    erased = sum(random_erase(FLAT, rng, 0.25) is not FLAT for _ in range(2000))
    assert stats.binomtest(erased, 2000, 0.25).pvalue > SIGNIFICANCE


def test_the_noise_is_standard_normal_in_the_models_input() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.05, 0.06, 0.07)  # eight standard deviations stay within 0 to 255
    pixels = np.zeros((400, 400, 3), np.uint8)
    shown = random_erase(pixels, np.random.default_rng(0), 1.0, mean, std)
    values = (shown[shown.any(2)] / 255 - mean) / std
    # Rounding to 8 bits adds a variance of a twelfth of the squared step.
    steps = 1 / (255 * np.array(std))
    assert np.allclose(values.mean(0), 0, atol=5 / len(values) ** 0.5)
    assert np.allclose(values.var(0), 1 + steps**2 / 12, atol=5 * (2 / len(values)) ** 0.5)


def test_noise_is_clipped_to_the_range_of_a_pixel() -> None:
    shown = random_erase(FLAT, np.random.default_rng(0), 1.0, (0.5,), (10.0,))
    changed = shown[(shown != FLAT).any(2)]
    assert np.isin(changed, (0, 255)).mean() > 0.9


# Mixing ---------------------------------------------------------------------------------------------------------------


def draw_mixes(count: int, size: tuple[int, int] = (224, 224), **options: float) -> list:
    rng = np.random.default_rng(0)
    return [sample_mix(Augment(**options), size, rng) for _ in range(count)]


@pytest.mark.parametrize(("options", "mixes"), [({}, False), ({"mixup": 0.2}, True), ({"cutmix": 1.0}, True)])
def test_the_property_mixes_tells_whether_mixup_or_cutmix_is_on(options: Any, mixes: bool) -> None:
    assert Augment(**options).mixes is mixes


def test_without_mixup_and_cutmix_nothing_is_mixed() -> None:
    weight, box, share = sample_mix(Augment(), (8, 8), generator(1))
    assert weight == share == 1 and not box.any()


def test_the_weight_of_mixup_is_the_larger_part_of_a_beta_draw() -> None:
    weights = [float(one.weight) for one in draw_mixes(3000, mixup=0.2)]
    beta = stats.beta(0.2, 0.2)
    assert stats.kstest(weights, lambda x: beta.cdf(x) - beta.cdf(1 - x)).pvalue > SIGNIFICANCE


def test_mixup_has_the_same_weight_for_images_and_targets_and_no_box() -> None:
    assert all(one.weight == one.share and not one.box.any() for one in draw_mixes(50, mixup=0.2))


def test_the_share_of_a_cutmix_is_the_area_outside_its_box() -> None:
    for weight, (top, left, bottom, right), share in draw_mixes(500, (30, 50), cutmix=1.0):
        assert weight == 1 and 0 <= top <= bottom <= 30 and 0 <= left <= right <= 50
        assert share == np.float32(1 - (bottom - top) * (right - left) / 1500)


def test_the_box_of_a_cutmix_has_timms_distribution(torchvision: Any) -> None:
    timm = pytest.importorskip("timm.data.mixup")
    np.random.seed(0)
    theirs = [timm.cutmix_bbox_and_lam((3, 60, 90), np.random.beta(1, 1)) for _ in range(3000)]
    ours = draw_mixes(3000, (60, 90), cutmix=1.0)
    assert stats.ks_2samp([one.share for one in ours], [share for _, share in theirs]).pvalue > SIGNIFICANCE
    for i, j in enumerate((0, 2, 1, 3)):  # timm's are top, bottom, left, right
        assert stats.ks_2samp([one.box[i] for one in ours], [box[j] for box, _ in theirs]).pvalue > SIGNIFICANCE


def test_with_mixup_and_cutmix_half_of_the_batches_use_cutmix() -> None:
    cuts = sum(one.weight == 1 for one in draw_mixes(2000, mixup=0.8, cutmix=1.0))
    assert stats.binomtest(cuts, 2000).pvalue > SIGNIFICANCE


def test_a_mix_has_float32_weights_and_an_int32_box() -> None:
    assert [part.dtype for part in sample_mix(Augment(cutmix=1), (8, 8), generator(1))] == [
        np.float32,
        np.int32,
        np.float32,
    ]


# All steps together ---------------------------------------------------------------------------------------------------

ALL_AUGMENTATIONS = {
    "flip": True,
    "rotate": 10,
    "shift": 0.1,
    "scale": 1.2,
    "randaugment": (2, 10),
    "three_augment": True,
    "jitter": 0.3,
    "erase": 0.5,
}
CROPS: list[dict[str, Any]] = [
    {"crop": crop, "filter": filter}
    for crop in ("fit", "inception", "resized", "simple")
    for filter in ("bicubic", "bilinear_aliased")
]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: "-".join(crop.values()))
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (2000, 3), (3, 2000), (80, 60)])
def test_any_image_is_augmented_to_the_size_and_is_not_modified(size: tuple[int, int], crop: Any, mode: str) -> None:
    image = wave_image(*size, mode)
    shown = augment_image(image, Augment(**crop, **ALL_AUGMENTATIONS), (12, 20), generator(3))
    assert shown.shape == (12, 20, len(mode)) and shown.dtype == np.uint8
    assert is_same_image(image, wave_image(*size, mode))


@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: "-".join(crop.values()))
def test_the_same_generator_gives_the_same_image_and_another_generator_another(crop: Any) -> None:
    options = Augment(**crop, **ALL_AUGMENTATIONS)
    one, again, other = (augment_image(wave_image(), options, (24, 24), generator(seed)) for seed in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_without_augmentation_an_image_is_resized_and_center_cropped() -> None:
    assert np.array_equal(
        augment_image(wave_image(), Augment(), (24, 24), generator(1)), resize_and_center_crop(wave_image(), (24, 24))
    )


@pytest.mark.parametrize("crop", ["inception", "resized"])
def test_a_crop_keeps_at_least_the_given_share(crop: Any) -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (200, 1)))
    options = Augment(crop=crop, crop_area=(0.9, 1.0), filter="bilinear")
    spans = [np.ptp(np.asarray(crop_image(ramp, options, (50, 50), generator(seed)))[0].astype(int)) for seed in range(50)]
    # At least 180 columns are kept, and the outer of 50 pixels are 49/50 of them apart; both may be rounded.
    assert min(spans) >= 180 * 49 / 50 - 1


def test_the_options_are_part_of_a_recipe() -> None:
    from train.recipes import Recipe

    assert isinstance(Recipe().augment, Augment)


def test_mixing_torch_tensors_matches_numpy() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    images, others = rng.random((2, 3, 8, 6, 3), np.float32)
    targets, theirs = rng.random((2, 3, 5), np.float32)
    for mixing in (
        Mix(np.float32(1), np.array([2, 1, 6, 5], np.int32), np.float32(2 / 3)),
        Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)),
    ):
        placed = Mix(*map(torch.as_tensor, mixing))
        mixed = mix_images(placed, torch.as_tensor(images), torch.as_tensor(others))
        assert np.array_equal(mixed.numpy(), mix_images(mixing, images, others))
        shares = mix_targets(placed, torch.as_tensor(targets), torch.as_tensor(theirs))
        assert np.array_equal(shares.numpy(), mix_targets(mixing, targets, theirs))
