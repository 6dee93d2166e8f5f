"""Throughput of image preprocessing on one core, in images/s, from JPEG files of 400x500 to arrays of 224x224.

Run `python -m benchmarks.input [--images N] [--runs N]`.  It prints the table "Augmentation" of
docs/measurements/training.md.  The files are random crops of the two photographs in scikit-learn.  `bare` is Pillow alone:
open, crop, resize, flip, convert to an array; its random numbers are drawn beforehand.  `ours` is the work of training:
read, make the generator, draw the random numbers, crop, resize, flip, convert to an array.  Times are processor time, which
other work on the machine affects less than wall time.  In a run, the candidates take turns of ten images, and ratios are
computed within a run.
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

from train.data.augment import Augment, augment_image
from train.data.augment.crop import FILTERS, inception_box
from train.data.rng import IMAGE, generator
from train.data.sources import read_image
from train.recipes.augmentation import Filter

SIZE = (224, 224)
FILTERS_COMPARED: tuple[Filter, ...] = ("bilinear_aliased", "bilinear", "bicubic")
AUGMENTED = "ours, bilinear_aliased, RandAugment(2, 10)"


def write_photographs(folder: Path, count: int) -> list[Path]:
    """Write `count` JPEG files of 400x500 pixels, crops of two photographs of 427x640."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    paths = [folder / f"{i}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        image, rng = originals[i % 2], np.random.default_rng(i)
        box = inception_box(*image.size, rng, (0.7, 0.9))
        image.resize((500, 400), Image.Resampling.LANCZOS, box=box).save(path, quality=90)
    return paths


Work = Callable[[list[int]], None]  # row numbers of images -> None


def make_bare(paths: list[Path], filter: Filter) -> Work:
    """Return a function that decodes, crops, resizes and flips with Pillow alone, at the same random boxes as `ours`."""
    draws = [generator(IMAGE, 0, 0, row) for row in range(len(paths))]
    boxes = [inception_box(500, 400, rng, (0.05, 1.0)) for rng in draws]
    flips = [rng.random(5)[-1] < 0.5 for rng in draws]

    def work(rows: list[int]) -> None:
        for row in rows:
            with Image.open(paths[row]) as image:
                if filter == "bilinear_aliased":
                    resized = image.transform(SIZE, Image.Transform.EXTENT, boxes[row], Image.Resampling.BILINEAR)
                else:
                    resized = image.resize(SIZE, FILTERS[filter], box=boxes[row])
                if flips[row]:
                    resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                np.asarray(resized)

    return work


def make_ours(paths: list[Path], filter: Filter, **options: Any) -> Work:
    """Return a function that preprocesses and augments images as in training; `options` are fields of `Augment`."""
    augment = Augment(crop="inception", flip=True, filter=filter, **options)

    def work(rows: list[int]) -> None:
        for row in rows:
            augment_image(read_image(paths[row]), augment, SIZE, generator(IMAGE, 0, 0, row))

    return work


def measure(candidates: dict[str, Work], count: int) -> dict[str, float]:
    """Return the images/s of each candidate over `count` images; candidates take turns of ten images."""
    spent = dict.fromkeys(candidates, 0.0)
    for start in range(0, count, 10):
        rows = list(range(start, min(start + 10, count)))
        for name, work in candidates.items():
            before = time.process_time()
            work(rows)
            spent[name] += time.process_time() - before
    return {name: count / seconds for name, seconds in spent.items()}


def format_row(name: str, rates: list[float], baseline: list[float]) -> str:
    """Return a row of the table: images/s and the ratio to the baseline within each run, as median and range."""
    ratios = [one / other for one, other in zip(rates, baseline, strict=True)]
    speed = f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"
    return f"| {name} | {speed} | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    jpeg = features.version("libjpeg_turbo") or "none"
    print(f"{platform.machine()}, one of {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(f"Pillow {version('pillow')} (libjpeg-turbo {jpeg}), numpy {version('numpy')}\n")
    with tempfile.TemporaryDirectory() as folder:
        paths = write_photographs(Path(folder), args.images)
        candidates: dict[str, Work] = {}
        for filter in FILTERS_COMPARED:
            candidates |= {f"bare, {filter}": make_bare(paths, filter), f"ours, {filter}": make_ours(paths, filter)}
        candidates[AUGMENTED] = make_ours(paths, FILTERS_COMPARED[0], randaugment=(2, 10))
        runs = [measure(candidates, args.images) for _ in range(args.runs + 1)][1:]  # the first warms up
    rates = {name: [run[name] for run in runs] for name in candidates}
    print("| candidate | images/s | relative to bare |")
    print("|---|---|---|")
    for name in candidates:
        print(format_row(name, rates[name], rates[f"bare, {name.split(', ')[1]}"]))
    overheads = [
        without / augmented - 1
        for without, augmented in zip(rates[f"ours, {FILTERS_COMPARED[0]}"], rates[AUGMENTED], strict=True)
    ]
    print(f"\nRandAugment takes {median(overheads):.0%} more time ({min(overheads):.0%} to {max(overheads):.0%}).")
    before = time.process_time()
    for i in range(10000):
        generator(IMAGE, 0, 0, i)
    print(f"Making a generator takes {(time.process_time() - before) * 100:.1f} µs an image.")


if __name__ == "__main__":
    main()
