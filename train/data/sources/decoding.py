"""Image decoding: from the bytes of an image file to pixels, the same for every data source."""

import io
import math
import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from train.data.sources.files import MAX_IMAGE_BYTES, raise_if_inaccessible
from vit_spec import InputError, bounded_json

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Only formats of photographs.  Pillow opens many more, and EPS would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_MAX_SCANS = 100  # of a JPEG; each scan covers all pixels, and encoders write ten
_MAX_TIFF_PARTS = 1 << 16  # strips, tiles or tags of a TIFF; Pillow makes an object of each, a hundred times its size
_MAX_EXIF_SEGMENTS = 16  # of a JPEG, up to 64 KiB each; Pillow copies all of them for each
_SOI, _SOS, _EOI = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # JPEG markers: start of image, start of scan, end of image
_APP1, _EXIF_HEADER = b"\xff\xe1", b"Exif\0\0"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_OFFSET_TAGS = (273, 324)  # TIFF tags: StripOffsets, TileOffsets
_TILE_SIDE_TAGS = (322, 323)  # TileWidth, TileLength
_BIT_DEPTH_TAG = 258  # BitsPerSample
_BMP_565 = "BGR;16"  # Pillow's name of 16 bits a pixel; in other names ";16" means 16 bits a channel
_GREY_MODES = ("1", "L", "LA")

# Pillow warns about each damaged tag of an image: up to 80,000 lines for a small file.  `decode` raises an error for damage
# that matters.  The filter is global: images are decoded in threads, and `warnings.catch_warnings` is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(source: bytes | str | os.PathLike[str], name: object) -> Image.Image:
    """Decode an image: all its pixels, upright by its EXIF orientation, in mode L (grey) or RGB.

    Transparency is dropped, CMYK is converted, and an animation gives its first frame.

    source: the bytes of an image file, or its path.
    name: the image's name in messages, converted to text only for a message.

    Raises:
        InputError: an image that is missing, cut short, or of a format that is not supported; more than 8 bits per channel;
            or more pixels than Pillow considers safe (`PIL.Image.MAX_IMAGE_PIXELS`, 89 million).  It is a
            `FileAccessError` if the system does not give the file.
    """
    try:
        data = source if isinstance(source, bytes) else bounded_json.read_bytes(Path(source), max_bytes=MAX_IMAGE_BYTES)
        _refuse_expensive_headers(data)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            high_depth = _high_bit_depth(image)
            if data.count(_SOS) > _MAX_SCANS and _count_scans(data) > _MAX_SCANS:
                raise InputError(f"a JPEG of more than {_MAX_SCANS} scans")
            if max(image.width * image.height, _tile_pixels(image)) > _max_pixels():
                raise Image.DecompressionBombError  # Pillow itself only warns up to twice the limit
            if not high_depth:
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return _to_grey_or_rgb(image)
    except UnidentifiedImageError:
        raise InputError(f"{name} is not an image that can be read: replace or remove the file") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name} has more than {_max_pixels():,} pixels: make it smaller first") from None
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions for damaged images
        raise_if_inaccessible(error, name)
        raise InputError(f"{name} cannot be read ({error_text(error)}): replace or remove the file") from None
    # Pillow would silently clip these values at 255, drop their lower bits, or take the bytes of one for two pixels.
    raise InputError(f"{name} has more than 8 bits a channel ({high_depth}): convert it to 8 bits first")


def check_image_size(height: int, width: int, name: object) -> None:
    """Check the size of the images in an array.

    Raises:
        InputError: they have no pixels, or more than `decode` accepts.
    """
    if not height * width:
        raise InputError(f"{name} has images of {height}x{width} pixels, which are empty: fetch or write it again")
    if height * width > _max_pixels():
        raise InputError(f"{name} has images of more than {_max_pixels():,} pixels: make them smaller first")


def read_image(path: Path | str) -> Image.Image:
    """Decode an image file; see `decode`."""
    return decode(path, path)


def _refuse_expensive_headers(data: bytes) -> None:
    """Refuse files that would cost Pillow far more time and memory to open than their size suggests."""
    if data.startswith(_SOI) and data.count(_EXIF_HEADER) > _MAX_EXIF_SEGMENTS:
        exifs = (data.startswith(_EXIF_HEADER, end + 2) for marker, end in _jpeg_segments(data) if marker == _APP1)
        if sum(exifs) > _MAX_EXIF_SEGMENTS:
            raise InputError(f"a JPEG with EXIF in more than {_MAX_EXIF_SEGMENTS} parts")
    if _count_tiff_parts(data) > _MAX_TIFF_PARTS:
        raise InputError(f"a TIFF of more than {_MAX_TIFF_PARTS:,} strips, tiles or tags")


def _count_scans(data: bytes) -> int:
    """Return how many scans a JPEG has."""
    return sum(marker == _SOS for marker, _ in _jpeg_segments(data))


def _jpeg_segments(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each marker of a JPEG and the offset of its end: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, B.1.1."""
    offset = 2
    while (marker := _MARKER.search(data, offset)) and marker[0] != _EOI:
        yield marker[0], marker.end()
        offset = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def _count_tiff_parts(data: bytes) -> int:
    """Return the number of strips, tiles or tags of the first image of a TIFF, whichever is largest; 0 if it is no TIFF.

    See https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf, section 2, and https://libtiff.gitlab.io/libtiff/
    specification/bigtiff.html, which differs in the widths of integers.
    """
    order, version = {b"II": "<", b"MM": ">"}.get(data[:2]), data[2:4].strip(b"\0")
    if order is None or version not in (b"*", b"+"):
        return 0
    most = 0
    for offset, offset_format, count_format, entry in ((4, "I", "H", "HHI4x"), (8, "Q", "Q", "HHQ8x"))[
        : 1 + (version == b"+")
    ]:
        with suppress(struct.error):  # the file ends too early, which Pillow reports
            (offset,) = struct.unpack_from(order + offset_format, data, offset)
            (count,) = struct.unpack_from(order + count_format, data, offset)
            offset, tags = offset + struct.calcsize(order + count_format), struct.Struct(order + entry)
            entries = data[offset : offset + min(count, _MAX_TIFF_PARTS) * tags.size]
            found = tags.iter_unpack(entries[: len(entries) // tags.size * tags.size])
            most = max([most, count, *(values for tag, _, values in found if tag in _OFFSET_TAGS)])
    return most


def _tile_pixels(image: Image.Image) -> float:
    """Return the pixels of a tile of a TIFF, which are allocated however small the image is; 0 for other formats."""
    return math.prod(_largest_value(image, tag) for tag in _TILE_SIDE_TAGS)


def _largest_value(image: Image.Image, tag: int) -> float:
    """Return the largest value of a tag of a TIFF; 0 if the image does not have the tag."""
    value = getattr(image, "tag_v2", {}).get(tag, 0)
    return max(value) if isinstance(value, tuple) else value


def _max_pixels() -> float:
    return Image.MAX_IMAGE_PIXELS or math.inf


def error_text(error: Exception) -> str:
    """Return the message of an exception in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _high_bit_depth(image: Image.Image) -> str:
    """Return the mode or the number that shows more than 8 bits per channel, or ""."""
    if image.mode[0] in "IF":
        return image.mode
    if (bits := _largest_value(image, _BIT_DEPTH_TAG)) > 8:  # the raw modes of a planar TIFF do not show it
        return f"{bits} bits"
    stored = [part for tile in getattr(image, "tile", ()) for part in (tile[3] if isinstance(tile[3], tuple) else tile[3:])]
    return next((part for part in stored if isinstance(part, str) and ";16" in part and part != _BMP_565), "")


def _to_grey_or_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "La":
        image = image.convert("LA")  # the only mode to which Pillow converts it
    if image.mode in _GREY_MODES:
        return image.convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
