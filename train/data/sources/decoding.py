"""From the bytes of an image file to pixels: one function for every kind of source."""

import io
import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from train.data.sources.files import unless_damaged
from vit_spec import InputError, bounded_json

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Of the many formats that Pillow opens, those that photographs come in: EPS, for one, would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_LONGEST = 1 << 29  # bytes of a file, which is read whole: the largest image takes three quarters of that unpacked
_SCANS = 100  # of a JPEG, each of which goes over all pixels; writers make ten
_PARTS = 1 << 16  # strips or tiles of a TIFF, and its tags: Pillow makes objects of each that take a hundred times as much
_EXIFS = 16  # parts of a JPEG's EXIF, each of up to 64 KiB: Pillow copies all of them for each
_START, _SCAN, _END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
_ABOUT, _EXIF = b"\xff\xe1", b"Exif\0\0"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_PLACES = (273, 324)  # the tags of where strips and tiles lie
_GREY = ("1", "L", "LA", "La")


def decode(source: bytes | str | os.PathLike[str], name: object) -> Image.Image:
    """Decode an image: all its pixels, upright as its EXIF orientation says, in mode L (grey) or RGB.

    Transparency is dropped and CMYK is converted.  Of an animation the first picture counts.

    source: the bytes of an image file, or its path.
    name: what the image is called in messages; made into text when there is one.

    Raises:
        InputError: not there, not an image, cut short, of more than 8 bits a channel, or larger than Pillow thinks safe
            (`PIL.Image.MAX_IMAGE_PIXELS`, 89 million pixels).  `Unavailable` where it is the system that gives none.
    """
    try:
        data = source if isinstance(source, bytes) else bounded_json.read_bytes(Path(source), longest=_LONGEST)
        _check(data)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            deep = _deep(image)
            if data.count(_SCAN) > _SCANS and _scans(data) > _SCANS:
                raise InputError(f"a JPEG of more than {_SCANS} scans")
            if max(image.width * image.height, _tile(image)) > _most():
                raise Image.DecompressionBombError  # up to twice as many Pillow only warns
            if not deep:
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
    except UnidentifiedImageError:
        raise InputError(f"{name} is not an image that can be read: replace or remove the file") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name} has more than {_most():,} pixels: make it smaller first") from None
    except Exception as error:  # a damaged image fails in as many ways as Pillow's decoders have exceptions
        unless_damaged(error, name)
        raise InputError(f"{name} cannot be read ({said(error)}): replace or remove the file") from None
    if deep:  # Pillow would cut these off at 255, or drop their lower bits, without a word
        raise InputError(f"{name} has more than 8 bits a channel ({deep}): convert it to 8 bits first")
    return _plain(image)


def read_image(path: Path | str) -> Image.Image:
    """Decode an image file; see `decode`."""
    return decode(path, path)


def _check(data: bytes) -> None:
    """Refuse what takes Pillow far more time and memory to open than its bytes are worth."""
    if data.startswith(_START) and data.count(_EXIF) > _EXIFS:
        exifs = (data.startswith(_EXIF, at + 2) for marker, at in _segments(data) if marker == _ABOUT)
        if sum(exifs) > _EXIFS:
            raise InputError(f"a JPEG with EXIF in more than {_EXIFS} parts")
    if _parts(data) > _PARTS:
        raise InputError(f"a TIFF of more than {_PARTS:,} strips, tiles or tags")


def _scans(data: bytes) -> int:
    """Return how many scans a JPEG has."""
    return sum(marker == _SCAN for marker, _ in _segments(data))


def _segments(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the markers of a JPEG, and where each ends: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, B.1.1."""
    at = 2
    while (marker := _MARKER.search(data, at)) and marker[0] != _END:
        yield marker[0], marker.end()
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def _parts(data: bytes) -> int:
    """Return how many strips, tiles or tags the first picture of a TIFF has; 0 of what is none.

    See https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf, section 2, and https://libtiff.gitlab.io/libtiff/
    specification/bigtiff.html, which differs in the lengths of numbers.
    """
    order, version = {b"II": "<", b"MM": ">"}.get(data[:2]), data[2:4].strip(b"\0")
    if order is None or version not in (b"*", b"+"):
        return 0
    most = 0
    for at, place, length, entry in ((4, "I", "H", "HHI4x"), (8, "Q", "Q", "HHQ8x"))[: 1 + (version == b"+")]:
        with suppress(struct.error):  # it ends before: Pillow says so
            (at,) = struct.unpack_from(order + place, data, at)
            (count,) = struct.unpack_from(order + length, data, at)
            at, tags = at + struct.calcsize(order + length), struct.Struct(order + entry)
            whole = data[at : at + min(count, _PARTS) * tags.size]
            found = tags.iter_unpack(whole[: len(whole) // tags.size * tags.size])
            most = max([most, count, *(values for tag, _, values in found if tag in _PLACES)])
    return most


def _tile(image: Image.Image) -> float:
    """Return how many pixels a tile of a TIFF has, for which room is made however small the image is; 0 of others."""
    tags = getattr(image, "tag_v2", {})
    sides = [tags.get(tag, 0) for tag in (322, 323)]
    return math.prod(max(side) if isinstance(side, tuple) else side for side in sides)


def _most() -> float:
    return Image.MAX_IMAGE_PIXELS or math.inf


def said(error: Exception) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _deep(image: Image.Image) -> str:
    """Return what says that an image has more than 8 bits a channel, or nothing."""
    if image.mode[0] in "IF":
        return image.mode
    stored = [part for tile in getattr(image, "tile", ()) for part in (tile[3] if isinstance(tile[3], tuple) else tile[3:])]
    return next((part for part in stored if isinstance(part, str) and ";16" in part), "")


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in _GREY:
        return image.convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
