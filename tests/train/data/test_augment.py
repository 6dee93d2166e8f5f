"""Augmentation: each part against its definition, Pillow's, torchvision's or timm's; distributions at fixed seeds.

A distribution is held to its reference at a level of one in a million: a right one fails with one seed in a million.
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
    augmented,
    colour_jitter,
    cropped,
    fit,
    mix,
    mixed_images,
    mixed_targets,
    randaugment,
    random_erase,
    three_augment,
)
from train.data.augment.crop import Box, cut, inception_box, resized_box, simple_crop
from train.data.augment.randaugment import OPERATIONS
from train.data.rng import generator
from vit_spec import InputError

LEVEL = 1e-6


def picture(width: int = 80, height: int = 60, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Waves with noise on them, in every value from 0 to 255."""
    rng = np.random.default_rng(seed)
    y, x = np.indices((height, width))[..., None]
    waves = 127 + 90 * np.sin(x / (5, 7, 9) + y / (11, 6, 8)) + rng.normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(waves, 0, 255).astype(np.uint8)).convert(mode)


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode and np.array_equal(one, other)


# Options --------------------------------------------------------------------------------------------------------------

EDGES: list[dict[str, Any]] = [
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
BEYOND: dict[str, Any] = {
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


@pytest.mark.parametrize("fields", EDGES)
def test_a_value_at_its_edge_is_taken_and_works(fields: dict[str, Any]) -> None:
    assert augmented(picture(), Augment(**fields), (16, 16), generator(1)).shape == (16, 16, 3)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BEYOND for value in BEYOND[name]])
def test_a_value_beyond_its_edge_is_refused_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^augment\.{name} is .*: give [^\n]*$"):
        Augment(**{name: value})


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_fit_covers_and_cuts_the_overhang_off_evenly() -> None:
    whole = picture().resize((30, 22), Image.Resampling.BICUBIC)  # of 80x60: 22.5 rows, rounded half to even
    assert same(fit(picture(), (20, 30)), whole.crop((0, 1, 30, 21)))


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos", "box"])
def test_fit_is_a_resize_and_a_central_crop_where_those_need_no_rounding(filter: Any) -> None:
    image = picture(160, 96)
    whole = image.resize((80, 48), getattr(Image.Resampling, filter.upper()))
    assert same(fit(image, (36, 36), 36 / 48, filter), whole.crop((22, 6, 58, 42)))


def test_fit_shows_the_middle_without_smoothing_too() -> None:
    image = picture(160, 96)
    box = (44, 12, 116, 84)
    assert same(fit(image, (36, 36), 36 / 48, "bilinear_aliased"), cut(image, box, (36, 36), "bilinear_aliased"))


def bilinear(image: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
    """The definition, in float64: pixel i lies at i + 1/2, and beyond the image its edge goes on."""
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
def test_a_cut_without_smoothing_is_bilinear_between_pixel_centres(box: Box, mode: str) -> None:
    shown = np.asarray(cut(picture(mode=mode), box, (24, 32), "bilinear_aliased"), np.float64)
    # Each of two passes rounds (1/2) and takes weights of 8 bits (1/2 again), and places are a bit of 2**-20 off.
    assert np.abs(shown - bilinear(picture(mode=mode), box, (24, 32))).max() <= 2 + 255 * 2 * 2**-20


@pytest.mark.parametrize("box", BOXES)
def test_a_cut_without_smoothing_is_pillows_transform(box: Box) -> None:
    shown = np.asarray(cut(picture(), box, (24, 32), "bilinear_aliased"), int)
    pillow = picture().transform((32, 24), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
    assert np.abs(shown - np.asarray(pillow, int)).max() <= 2  # Pillow's is exact and then cut off: up to one less


def test_a_cut_with_smoothing_is_a_crop_and_a_resize_away_from_its_edge() -> None:
    box = (10, 6, 70, 54)
    shown, alone = (
        cut(picture(), box, (16, 20), "bilinear"),
        picture().crop(box).resize((20, 16), Image.Resampling.BILINEAR),
    )
    assert same(shown.crop((1, 1, 19, 15)), alone.crop((1, 1, 19, 15)))


# Crops ----------------------------------------------------------------------------------------------------------------


def boxes(draw: Callable[..., Box], width: int, height: int, count: int, area: tuple[float, float]) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([draw(width, height, rng, area) for _ in range(count)])


def heights_by_definition(width: int, height: int, area: tuple[float, float]) -> np.ndarray:
    """The law of an inception crop's height: the mean over aspect ratios, of the uniform law between their bounds."""
    law = np.zeros(height + 1)
    for aspect in 3 / 4 + (np.arange(20000) + 0.5) / 20000 * (4 / 3 - 3 / 4):
        low = round(math.sqrt(area[0] * width * height / aspect))
        high = min(math.sqrt(area[1] * width * height / aspect), height, (width + 0.5) / aspect)
        high = max(h for h in (int(high), int(high) + 1) if h <= height and round(h * aspect) <= width)
        law[low : high + 1] += 1 / (high + 1 - low) / 20000
    return law


def test_the_height_of_an_inception_crop_has_tensorflows_law() -> None:
    drawn = boxes(inception_box, 500, 400, 20000, (0.05, 1.0))
    law = heights_by_definition(500, 400, (0.05, 1.0))
    # Twenty bins of about one law each; a rounding at the lower bound moves a box by one row, within its bin.
    edges = np.searchsorted(law.cumsum(), np.arange(1, 20) / 20)
    counts = np.bincount(np.searchsorted(edges, drawn[:, 3] - drawn[:, 1]), minlength=20)
    expected = np.add.reduceat(law, [0, *(edges + 1)])
    assert stats.chisquare(counts, expected * len(drawn)).pvalue > LEVEL


def test_the_aspect_ratio_of_an_inception_crop_is_uniform() -> None:
    left, top, right, bottom = boxes(inception_box, 50000, 40000, 5000, (0.05, 0.4)).T  # none is cut short
    aspect = (right - left) / (bottom - top)
    assert stats.kstest(aspect, stats.uniform(3 / 4, 4 / 3 - 3 / 4).cdf).pvalue > LEVEL


@pytest.mark.parametrize("draw", [inception_box, resized_box])
def test_a_crop_lies_anywhere_with_the_same_probability(draw: Callable[..., Box]) -> None:
    left, top, right, bottom = boxes(draw, 50000, 40000, 5000, (0.05, 0.4)).T
    for place in (left / (50000 - right + left), top / (40000 - bottom + top)):
        assert stats.kstest(place, "uniform").pvalue > LEVEL


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


def test_an_inception_crop_keeps_its_share_of_the_area() -> None:
    left, top, right, bottom = boxes(inception_box, 97, 61, 2000, (0.3, 0.5)).T
    share = (right - left) * (bottom - top) / (97 * 61)
    assert 0.3 <= share.min() and share.max() <= 0.5


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000)])
def test_where_no_inception_crop_fits_it_is_the_whole_image(size: tuple[int, int]) -> None:
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


def sides_and_places(drawn: np.ndarray) -> np.ndarray:
    return np.stack([drawn[:, 2] - drawn[:, 0], drawn[:, 3] - drawn[:, 1], drawn[:, 0], drawn[:, 1]])


def test_a_resized_crop_has_torchvisions_law(torchvision: Any) -> None:
    ours, theirs = boxes(resized_box, 500, 400, 3000, (0.08, 1.0)), torchvision_boxes(torchvision, 500, 400, 3000)
    for one, other in zip(sides_and_places(ours), sides_and_places(theirs), strict=True):
        assert stats.ks_2samp(one, other).pvalue > LEVEL


def test_an_inception_crop_has_another_law_than_torchvisions(torchvision: Any) -> None:
    ours, theirs = boxes(inception_box, 500, 400, 3000, (0.08, 1.0)), torchvision_boxes(torchvision, 500, 400, 3000)
    assert stats.ks_2samp(sides_and_places(ours)[1], sides_and_places(theirs)[1]).pvalue < LEVEL


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000), (999, 10)])
def test_where_no_resized_crop_fits_it_is_torchvisions_middle(torchvision: Any, size: tuple[int, int]) -> None:
    [theirs] = torchvision_boxes(torchvision, *size, 1).tolist()
    assert resized_box(*size, generator(1), (0.9, 1.0)) == tuple(theirs)


def test_a_simple_crop_lies_anywhere_in_the_padded_image() -> None:
    image = picture(21, 16, "L")
    padded = np.pad(np.asarray(image), 4, mode="reflect")
    places = {padded[y : y + 16, x : x + 16].tobytes(): (y, x) for y in range(9) for x in range(14)}
    rng = np.random.default_rng(0)
    found = [places[simple_crop(image, (16, 16), rng, "bicubic").tobytes()] for _ in range(2000)]
    counts = np.histogram2d(*np.array(found).T, bins=(9, 14), range=((0, 9), (0, 14)))[0]
    assert stats.chisquare(counts, axis=None).pvalue > LEVEL


# RandAugment ----------------------------------------------------------------------------------------------------------

GREY = {"L": 128, "RGB": (128, 128, 128)}


def moved(*way_back: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, way_back, fillcolor=GREY[image.mode])


def cut_out(image: Image.Image) -> Image.Image:
    """Half a side of 40 of 224 about the pixel at (0.25, 0.75) of the sides, by arrays."""
    pixels = np.array(image)
    y, x = (np.abs(np.arange(n) - int(at * n) + 0.5) for n, at in zip(pixels.shape, (0.75, 0.25), strict=False))
    down, across = int(40 / 224 * pixels.shape[0]), int(40 / 224 * pixels.shape[1])
    pixels[np.ix_(y < down, x < across)] = 128
    return Image.fromarray(pixels)


AT_TEN: dict[str, Callable[[Image.Image], Image.Image]] = {  # with the draws 0.25 (a positive sign) and 0.75
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
    "ShearX": moved(1, 0.3, 0, 0, 1, 0),
    "ShearY": moved(1, 0, 0, 0.3, 1, 0),
    "TranslateX": moved(1, 0, 100 / 224 * 80, 0, 1, 0),
    "TranslateY": moved(1, 0, 0, 0, 1, 100 / 224 * 60),
    "Cutout": cut_out,
}


def test_there_are_big_visions_sixteen_operations() -> None:
    assert OPERATIONS.keys() == AT_TEN.keys() and len(OPERATIONS) == 16


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", AT_TEN)
def test_an_operation_of_magnitude_10_is_pillows(name: str, mode: str) -> None:
    image = picture(mode=mode)
    assert same(OPERATIONS[name](image, 1.0, 0.25, 0.75), AT_TEN[name](image))


@pytest.mark.parametrize("name", AT_TEN)
def test_an_operation_does_something_to_a_colour_image(name: str) -> None:
    image = ImageEnhance.Brightness(picture()).enhance(0.7)  # else its contrast is at its best already
    assert not same(OPERATIONS[name](image, 1.0, 0.25, 0.75), image)


def test_colour_is_nothing_to_a_grey_image() -> None:
    assert same(OPERATIONS["Color"](picture(mode="L"), 1.0, 0.25, 0.75), picture(mode="L"))


def test_contrast_moves_values_away_from_the_images_mean() -> None:
    image = Image.fromarray(np.repeat(np.uint8([60, 100]), 8).reshape(4, 4))
    assert set(np.asarray(OPERATIONS["Contrast"](image, 1.0, 0, 0)).flat) == {80 - 38, 80 + 38}  # 1.9 times 20


@pytest.mark.parametrize(("magnitude", "first"), [(0, 256), (5, 128), (9, 26), (10, 0), (30, 0)])
def test_solarize_inverts_more_values_with_more_magnitude(magnitude: int, first: int) -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    shown = np.asarray(OPERATIONS["Solarize"](ramp, magnitude / 10, 0, 0))[0]
    assert np.array_equal(shown, np.where(np.arange(256) < first, np.arange(256), 255 - np.arange(256)))


@pytest.mark.parametrize(("magnitude", "values"), [(0, 2), (5, 4), (10, 16), (15, 64), (20, 256), (30, 256)])
def test_posterize_keeps_bits_by_big_visions_rule_and_one_at_least(magnitude: int, values: int) -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    assert len(np.unique(OPERATIONS["Posterize"](ramp, magnitude / 10, 0, 0))) == values


TIMM = {name: name for name in AT_TEN if name != "Cutout"} | {"Solarize": "SolarizeIncreasing"}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("magnitude", [4, 10])
def test_an_operation_is_timms(name: str, magnitude: int, torchvision: Any) -> None:
    timm = pytest.importorskip("timm.data.auto_augment")
    size = 224
    image, level = picture(size, size), timm.LEVEL_TO_ARG[TIMM[name]]
    arguments = level(magnitude, {"translate_const": 100}) if level else ()
    if name.startswith(("Rotate", "Shear", "Translate")):
        arguments = (abs(arguments[0]),)  # the sign is drawn
    theirs = timm.NAME_TO_OP[TIMM[name]](image, *arguments, fillcolor=GREY["RGB"], resample=Image.Resampling.NEAREST)
    assert same(OPERATIONS[name](image, magnitude / 10, 0.25, 0.75), theirs)


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_an_operation_with_a_sign_goes_either_way(name: str) -> None:
    forth, back = (OPERATIONS[name](picture(), 1.0, draw, 0) for draw in (0.49, 0.5))
    assert not same(forth, back) and same(back, OPERATIONS[name](picture(), -1.0, 0, 0))


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3), (80, 60)])
@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9, 3.7])
def test_sharpness_is_pillows_at_any_size(size: tuple[int, int], factor: float) -> None:
    image = picture(*size)
    assert same(OPERATIONS["Sharpness"](image, (factor - 0.1) / 1.8, 0, 0), ImageEnhance.Sharpness(image).enhance(factor))


def test_a_cutout_at_the_corner_covers_what_lies_within_the_image() -> None:
    white = Image.new("L", (224, 224), 255)
    assert np.argwhere(np.asarray(OPERATIONS["Cutout"](white, 1.0, 0, 0)) == 128).max(0).tolist() == [39, 39]


def test_every_operation_is_drawn_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    spies = [lambda image, m, u, v, i=i: drawn.append(i) or image for i in range(16)]
    monkeypatch.setitem(randaugment.__globals__, "_ALL", spies)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        randaugment(picture(2, 2), rng, 2)
    assert stats.chisquare(np.bincount(drawn, minlength=16)).pvalue > LEVEL


# Colour ---------------------------------------------------------------------------------------------------------------


def test_jitter_is_torchvisions_in_one_of_six_orders(torchvision: Any) -> None:
    adjust = torchvision.transforms.functional
    steps = (adjust.adjust_brightness, adjust.adjust_contrast, adjust.adjust_saturation)
    seen = set()
    for seed in range(40):
        shown, rng = colour_jitter(picture(8, 8), generator(seed), 0.4), generator(seed)
        factors = 1 + 0.4 * rng.uniform(-1, 1, 3)
        for order in itertools.permutations(range(3)):
            image = picture(8, 8)
            for i in order:
                image = steps[i](image, factors[i])
            if same(image, shown):
                seen.add(order)
                break
        else:
            pytest.fail(f"seed {seed}: no order gives this image")
    assert len(seen) == 6


def test_jitter_of_strength_zero_changes_nothing() -> None:
    assert same(colour_jitter(picture(), generator(1), 0), picture())


def test_three_augment_is_each_of_the_three_as_often() -> None:
    image, rng = picture(16, 16), np.random.default_rng(0)
    grey, solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image)
    shown = [three_augment(image, rng) for _ in range(600)]
    counts = [sum(same(one, known) for one in shown) for known in (grey, solarized)]
    assert stats.chisquare([*counts, 600 - sum(counts)]).pvalue > LEVEL


def test_three_augment_blurs_by_a_radius_from_a_tenth_to_two() -> None:
    image, rng = picture(16, 16), np.random.default_rng(0)
    grey, solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image)
    shown = [one for one in (three_augment(image, rng) for _ in range(300)) if not same(one, grey)]
    left = [np.var(np.asarray(one, float)) for one in shown if not same(one, solarized)]
    least, most = (np.var(np.asarray(image.filter(ImageFilter.GaussianBlur(r)), float)) for r in (2, 0.1))
    assert least <= min(left) < 1.05 * least and 0.95 * most < max(left) <= most


# Erasing --------------------------------------------------------------------------------------------------------------

FLAT = np.full((64, 48, 3), 128, np.uint8)


def extent(mask: np.ndarray) -> tuple[int, int]:
    """Rows and columns of the rectangle where a mask is set."""
    return int(mask.any(1).sum()), int(mask.any(0).sum())


def test_the_erased_rectangle_has_timms_law(torchvision: Any) -> None:
    import torch

    timm = pytest.importorskip("timm.data.random_erasing").RandomErasing(1.0, mode="const", device="cpu")
    random.seed(0)
    theirs = np.array([extent(timm(torch.ones(1, 64, 48)).numpy()[0] == 0) for _ in range(1000)])
    rng = np.random.default_rng(0)
    ours = np.array([extent((random_erase(FLAT, rng, 1.0) != FLAT).any(2)) for _ in range(1000)])
    for one, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(one, other).pvalue > LEVEL


def test_as_many_images_are_erased_as_asked() -> None:
    rng = np.random.default_rng(0)
    erased = sum(random_erase(FLAT, rng, 0.25) is not FLAT for _ in range(2000))
    assert stats.binomtest(erased, 2000, 0.25).pvalue > LEVEL


def test_the_noise_is_standard_normal_for_the_model() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.05, 0.06, 0.07)  # eight deviations stay within 0 to 255
    pixels = np.zeros((400, 400, 3), np.uint8)
    shown = random_erase(pixels, np.random.default_rng(0), 1.0, mean, std)
    values = (shown[shown.any(2)] / 255 - mean) / std
    # Rounding to 8 bits adds a twelfth of the squared step.
    steps = 1 / (255 * np.array(std))
    assert np.allclose(values.mean(0), 0, atol=5 / len(values) ** 0.5)
    assert np.allclose(values.var(0), 1 + steps**2 / 12, atol=5 * (2 / len(values)) ** 0.5)


def test_noise_beyond_a_pixels_range_stops_at_it() -> None:
    shown = random_erase(FLAT, np.random.default_rng(0), 1.0, (0.5,), (10.0,))
    changed = shown[(shown != FLAT).any(2)]
    assert np.isin(changed, (0, 255)).mean() > 0.9


# Mixing ---------------------------------------------------------------------------------------------------------------


def mixes(count: int, size: tuple[int, int] = (224, 224), **options: float) -> list:
    rng = np.random.default_rng(0)
    return [mix(Augment(**options), size, rng) for _ in range(count)]


@pytest.mark.parametrize(("options", "mixes"), [({}, False), ({"mixup": 0.2}, True), ({"cutmix": 1.0}, True)])
def test_options_say_whether_a_batch_is_mixed(options: Any, mixes: bool) -> None:
    assert Augment(**options).mixes is mixes


def test_without_mixing_a_batch_is_its_own() -> None:
    weight, box, share = mix(Augment(), (8, 8), generator(1))
    assert weight == share == 1 and not box.any()


def test_mixup_weighs_by_the_larger_part_of_a_beta_draw() -> None:
    weights = [float(one.weight) for one in mixes(3000, mixup=0.2)]
    beta = stats.beta(0.2, 0.2)
    assert stats.kstest(weights, lambda x: beta.cdf(x) - beta.cdf(1 - x)).pvalue > LEVEL


def test_mixup_mixes_targets_as_images_and_has_no_box() -> None:
    assert all(one.weight == one.share and not one.box.any() for one in mixes(50, mixup=0.2))


def test_the_share_of_a_cutmix_is_the_area_outside_its_box() -> None:
    for weight, (top, left, bottom, right), share in mixes(500, (30, 50), cutmix=1.0):
        assert weight == 1 and 0 <= top <= bottom <= 30 and 0 <= left <= right <= 50
        assert share == np.float32(1 - (bottom - top) * (right - left) / 1500)


def test_the_box_of_a_cutmix_has_timms_law(torchvision: Any) -> None:
    timm = pytest.importorskip("timm.data.mixup")
    np.random.seed(0)
    theirs = [timm.cutmix_bbox_and_lam((3, 60, 90), np.random.beta(1, 1)) for _ in range(3000)]
    ours = mixes(3000, (60, 90), cutmix=1.0)
    assert stats.ks_2samp([one.share for one in ours], [share for _, share in theirs]).pvalue > LEVEL
    for i, j in enumerate((0, 2, 1, 3)):  # timm's are top, bottom, left, right
        assert stats.ks_2samp([one.box[i] for one in ours], [box[j] for box, _ in theirs]).pvalue > LEVEL


def test_with_both_half_of_the_batches_are_cut() -> None:
    cuts = sum(one.weight == 1 for one in mixes(2000, mixup=0.8, cutmix=1.0))
    assert stats.binomtest(cuts, 2000).pvalue > LEVEL


def test_a_mix_is_two_float32_and_four_int32() -> None:
    assert [part.dtype for part in mix(Augment(cutmix=1), (8, 8), generator(1))] == [np.float32, np.int32, np.float32]


# The whole ------------------------------------------------------------------------------------------------------------

LIVELY = {
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
def test_any_image_comes_out_at_its_size_and_stays_as_it_was(size: tuple[int, int], crop: Any, mode: str) -> None:
    image = picture(*size, mode)
    shown = augmented(image, Augment(**crop, **LIVELY), (12, 20), generator(3))
    assert shown.shape == (12, 20, len(mode)) and shown.dtype == np.uint8
    assert same(image, picture(*size, mode))


@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: "-".join(crop.values()))
def test_the_same_numbers_give_the_same_image_and_others_another(crop: Any) -> None:
    options = Augment(**crop, **LIVELY)
    one, again, other = (augmented(picture(), options, (24, 24), generator(seed)) for seed in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_with_everything_off_an_image_is_fitted() -> None:
    assert np.array_equal(augmented(picture(), Augment(), (24, 24), generator(1)), fit(picture(), (24, 24)))


@pytest.mark.parametrize("crop", ["inception", "resized"])
def test_a_crop_keeps_no_less_than_asked(crop: Any) -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (200, 1)))
    options = Augment(crop=crop, crop_area=(0.9, 1.0), filter="bilinear")
    spans = [np.ptp(np.asarray(cropped(ramp, options, (50, 50), generator(seed)))[0].astype(int)) for seed in range(50)]
    # At least 180 columns are kept, and the outer pixels of 50 lie 49/50 of them apart; both may be rounded.
    assert min(spans) >= 180 * 49 / 50 - 1


def test_options_are_part_of_a_recipe() -> None:
    from train.recipes import Recipe

    assert isinstance(Recipe().augment, Augment)


def test_torch_mixes_as_numpy_does() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    images, others = rng.random((2, 3, 8, 6, 3), np.float32)
    targets, theirs = rng.random((2, 3, 5), np.float32)
    for mixing in (
        Mix(np.float32(1), np.array([2, 1, 6, 5], np.int32), np.float32(2 / 3)),
        Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)),
    ):
        placed = Mix(*map(torch.as_tensor, mixing))
        mixed = mixed_images(placed, torch.as_tensor(images), torch.as_tensor(others))
        assert np.array_equal(mixed.numpy(), mixed_images(mixing, images, others))
        shares = mixed_targets(placed, torch.as_tensor(targets), torch.as_tensor(theirs))
        assert np.array_equal(shares.numpy(), mixed_targets(mixing, targets, theirs))
