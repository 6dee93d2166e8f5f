"""The images that a model of the user may take: sizes and channels to try."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from parity.comparison.own_model.model import ImageShape

_SIZE = re.compile(r"im(age|g)|input|resolution|^chw$|(^|_)(res|size|shape)($|_)", re.IGNORECASE)
_NOT_SIZE = re.compile(r"patch|kernel|hidden|vocab|batch|window|head|mlp|embed|stride|channel|class", re.IGNORECASE)
_CHANNELS = re.compile(r"chan|in_c|^c$", re.IGNORECASE)
_USUAL_SIZES = (224, 32, 28, 64, 96, 128, 384, 256, 48, 16, 512)
_MAX_CELLS = 4096


def image_shapes(
    settings: Sequence[tuple[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Any],
    channels_last_first: bool,
) -> Iterator[ImageShape]:
    """Yield shapes of images to try, the likeliest first.

    Args:
        settings: names and values of attributes of the model.
        shapes: the shapes of its parameters.
        given: config fields that the user stated.
        channels_last_first: whether to try images with the channels as the last axis first.
    """
    sizes, channels = _sizes(settings, shapes, channels_last_first), _channels(settings, shapes)
    if "image_size" in given:
        sizes = [given["image_size"]]
    if "in_channels" in given:
        channels = [given["in_channels"]]
    seen = set()
    for (height, width), count, swapped in product(sizes, channels, (False, True)):
        shape = ImageShape(height, width, count, channels_last_first != swapped)
        if shape not in seen:
            seen.add(shape)
            yield shape


def _sizes(
    settings: Sequence[tuple[str, Any]], shapes: Mapping[str, tuple[int, ...]], channels_last: bool
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for name, value in settings:
        if not _SIZE.search(name) or _NOT_SIZE.search(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.append((value, value))
        elif isinstance(value, (tuple, list)) and len(value) in (2, 3) and all(isinstance(each, int) for each in value):
            pair = value if len(value) == 2 else (value[:2] if channels_last else value[1:])
            found.append((pair[0], pair[1]))
    heights = [v for name, v in settings if re.search("height", name) and isinstance(v, int) and "patch" not in name]
    widths = [v for name, v in settings if re.search("width", name) and isinstance(v, int) and "patch" not in name]
    found += [(height, width) for height, width in zip(heights, widths, strict=False)]
    found += _sizes_of_tables(shapes)
    return list(dict.fromkeys([*found, *((size, size) for size in _USUAL_SIZES)]))


def _sizes_of_tables(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Yield the sizes for which a table of positions has a row for each patch, if a kernel shows the size of patches."""
    kernels = [shape for shape in shapes.values() if len(shape) == 4 and min(shape) > 1]
    patches = [(shape[2:] if shape[0] > shape[1] else shape[:2]) for shape in kernels[:2]]
    tables = [shape for shape in shapes.values() if len(shape) in (2, 3) and 3 < max(shape[:-1]) < _MAX_CELLS]
    # Weights of layers look like tables of two axes: (1, rows, width) is surer.  A class may take images that use the first
    # rows of a table alone: the longest table that fits comes first.
    lengths = sorted({(len(shape) == 3 and shape[0] == 1, max(shape[:-1])) for shape in tables}, reverse=True)
    for patch in patches:
        for (_, length), prefix in product(lengths, (1, 0, 2)):
            cells = length - prefix
            divisors = [rows for rows in range(2, cells // 2 + 1) if cells % rows == 0]
            for rows in sorted(divisors, key=lambda rows: abs(rows - cells // rows))[:3]:
                yield rows * patch[0], cells // rows * patch[1]


def _channels(settings: Sequence[tuple[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    named = [v for name, v in settings if _CHANNELS.search(name) and type(v) is int and 0 < v <= 64]
    return list(dict.fromkeys([*named, 3, 1, 4]))[:5]
