"""What preparing an image costs: images a second on one core, from JPEG files of 500x400 to 224x224.

Run `python -m benchmarks.input [--images N] [--runs N]`; it prints the table of docs/training.md.  The files are made
from the two photographs in scikit-learn, cut and resized at random.  `bare` is Pillow and no more: open, the same boxes
and mirrors (drawn ahead), resize, to an array.  `ours` is what training does: read, make the generator, draw, crop,
mirror, to an array.  Time is the processor's, so that other work on the machine counts less; a run takes all candidates in
turn, a few images each, and ratios are taken within it.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, features

from train.data.augment import Augment, augmented
from train.data.augment.crop import FILTERS, inception_box
from train.data.rng import IMAGE, generator
from train.data.sources import read_image
from train.recipes.augmentation import Filter

SIZE = (224, 224)
FILTER: tuple[Filter, ...] = ("bilinear_aliased", "bilinear", "bicubic")
VARIED = "ours, bilinear_aliased, RandAugment(2, 10)"


def photographs(folder: Path, count: int) -> list[Path]:
    """Write `count` JPEG files of 500x400 pixels, cut out of two photographs of 640x427."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    paths = [folder / f"{i}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        image, rng = originals[i % 2], np.random.default_rng(i)
        box = inception_box(*image.size, rng, (0.7, 0.9))
        image.resize((500, 400), Image.Resampling.LANCZOS, box=box).save(path, quality=90)
    return paths


Work = Callable[[list[int]], None]


def bare(paths: list[Path], filter: Filter) -> Work:
    """Decode, cut, resize and mirror with Pillow alone, as `ours` will draw it."""
    draws = [generator(IMAGE, 0, 0, row) for row in range(len(paths))]
    boxes = [inception_box(500, 400, rng, (0.05, 1.0)) for rng in draws]
    flips = [rng.random(5)[-1] < 0.5 for rng in draws]

    def work(rows: list[int]) -> None:
        for row in rows:
            with Image.open(paths[row]) as image:
                if filter == "bilinear_aliased":
                    shown = image.transform(SIZE, Image.Transform.EXTENT, boxes[row], Image.Resampling.BILINEAR)
                else:
                    shown = image.resize(SIZE, FILTERS[filter], box=boxes[row])
                if flips[row]:
                    shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                np.asarray(shown)

    return work


def ours(paths: list[Path], filter: Filter, **options: Any) -> Work:
    """Prepare images as training does."""
    augment = Augment(crop="inception", flip=True, filter=filter, **options)

    def work(rows: list[int]) -> None:
        for row in rows:
            augmented(read_image(paths[row]), augment, SIZE, generator(IMAGE, 0, 0, row))

    return work


def measured(candidates: dict[str, Work], count: int) -> dict[str, float]:
    """Return the images a second of each candidate over all images, ten at a time in turn."""
    spent = dict.fromkeys(candidates, 0.0)
    for start in range(0, count, 10):
        rows = list(range(start, min(start + 10, count)))
        for name, work in candidates.items():
            before = time.process_time()
            work(rows)
            spent[name] += time.process_time() - before
    return {name: count / seconds for name, seconds in spent.items()}


def row(name: str, rates: list[float], to: list[float]) -> str:
    """A line of the table: images/s, and the ratio to another candidate within each run, both with their spread."""
    ratios = [one / other for one, other in zip(rates, to, strict=True)]
    speed = f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"
    return f"| {name} | {speed} | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    jpeg = features.version("libjpeg_turbo") or "none"
    print(f"{platform.machine()}, one of {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(f"Pillow {version('pillow')} (libjpeg-turbo {jpeg}), numpy {version('numpy')}\n")
    with tempfile.TemporaryDirectory() as folder:
        paths = photographs(Path(folder), given.images)
        candidates: dict[str, Work] = {}
        for filter in FILTER:
            candidates |= {f"bare, {filter}": bare(paths, filter), f"ours, {filter}": ours(paths, filter)}
        candidates[VARIED] = ours(paths, FILTER[0], randaugment=(2, 10))
        runs = [measured(candidates, given.images) for _ in range(given.runs + 1)][1:]  # the first warms up
    rates = {name: [run[name] for run in runs] for name in candidates}
    print("| candidate | images/s a core, median (least to most) | of the bare rate |")
    print("|---|---|---|")
    for name in candidates:
        print(row(name, rates[name], rates[f"bare, {name.split(', ')[1]}"]))
    more = [without / varied - 1 for without, varied in zip(rates[f"ours, {FILTER[0]}"], rates[VARIED], strict=True)]
    print(f"\nRandAugment takes {median(more):.0%} more time ({min(more):.0%} to {max(more):.0%}).")
    before = time.process_time()
    for i in range(10000):
        generator(IMAGE, 0, 0, i)
    print(f"Making a generator takes {(time.process_time() - before) * 100:.1f} µs an image.")


if __name__ == "__main__":
    main()
