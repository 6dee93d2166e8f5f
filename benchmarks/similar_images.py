"""Which changed images `--check-data` finds as similar to the original, and how similar different images are.

Run `python -m benchmarks.similar_images FOLDER`.  It prints the figures of train/data_check.py.  FOLDER has class folders
of photographs.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.sources import open_dataset
from train.data_check import MIN_CORRELATION, thumbnail


def as_jpeg(image: Image.Image) -> Image.Image:
    """Return the image as a JPEG of quality 40 shows it."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=40)
    return Image.open(stream)


def cropped(share: float) -> Callable[[Image.Image], Image.Image]:
    """Return a function that cuts a share of each side off, half of it at each end."""
    return lambda image: image.crop(
        tuple(round(side * part) for part in (share / 2, 1 - share / 2) for side in image.size)  # type: ignore[arg-type]
    )


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG, quality 40": as_jpeg,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "grey": lambda image: image.convert("L"),
    "15 % brighter": lambda image: image.point(lambda value: min(255, int(value * 1.15))),
    "cropped by 2 %": cropped(0.02),
    "cropped by 5 %": cropped(0.05),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    images = [Image.open(path).convert("RGB") for path in sorted(parser.parse_args().folder.glob("*/*"))]
    originals = np.stack([thumbnail(image) for image in images])
    products = originals @ originals.T
    np.fill_diagonal(products, -1)
    print(f"{len(images)} photographs; two different ones correlate by {products.max():.2f} at most\n")
    print(f"| change | found, of {len(images)} | smallest correlation |")
    print("|---|---|---|")
    for name, change in CHANGES.items():
        found = (originals * np.stack([thumbnail(change(image)) for image in images])).sum(1)
        print(f"| {name} | {(found >= MIN_CORRELATION).sum()} | {found.min():.3f} |")
    digits = open_dataset("digits")
    train, held_out = (
        np.stack([thumbnail(examples.read(i)) for i in range(len(examples))])
        for examples in (digits.train, digits.held_out)
    )
    similar = ((held_out @ train.T).max(1) >= MIN_CORRELATION).sum()
    print(f"\ndigits: {similar} of {len(held_out)} held-out images are similar to a training image")


if __name__ == "__main__":
    main()
