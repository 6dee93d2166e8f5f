"""From the bytes of an image file to pixels: one function for every kind of source."""

import io
import math
import os
import re
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from train.sources.files import unless_damaged
from vit_spec import InputError, bounded_json

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Of the many formats that Pillow opens, those that photographs come in: EPS, for one, would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_LONGEST = 1 << 30  # bytes of a file
_SCANS = 100  # of a JPEG, each of which goes over all pixels; writers make ten
_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
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
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            deep = _deep(image)
            if data.count(_SCAN) > _SCANS and _scans(data) > _SCANS:
                raise InputError(f"a JPEG of more than {_SCANS} scans")
            if image.width * image.height > _most():
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


def _scans(data: bytes) -> int:
    """Return how many scans a JPEG has: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, B.1.1."""
    at, count = 2, 0
    while (marker := _MARKER.search(data, at)) and marker[0] != _END:
        count += marker[0] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return count


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
