"""Time to compute the fingerprint of a data set of many files, compared with the time to list the files.

Run `python -m benchmarks.fingerprint [--files 100000] [--runs 5]`.  It prints the table "Data fingerprint" of
docs/measurements/training.md.  It writes files of 20 kB to 100 class folders in a temporary folder.  Times are processor
time, with the files in the page cache.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from train.data.fingerprint import Fingerprint
from train.data.sources import Dataset
from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import ImageFiles, make_examples
from train.data.sources.files import walk_files

CLASSES, SIZE = 100, 20_000


def write_files(root: Path, count: int) -> None:
    """Write `count` files of random bytes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class{i % CLASSES:02}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i:07}.jpg").write_bytes(rng.bytes(SIZE))


def make_dataset(root: Path) -> Dataset:
    """Return the files as a data set.  Their random bytes cannot be decoded as images."""
    paths = list(walk_files(str(root), SUFFIXES))
    train = make_examples(ImageFiles(root, paths), np.zeros(len(paths), np.int64))
    return Dataset(train, train.take(range(10)), "classes", ("a",), 3, None, ())


def print_time(what: str, run: Callable[[], object], runs: int) -> None:
    """Print the median and range of the processor time of `run`."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    print(f"| {what} | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) s |")


def main() -> None:
    """Make the files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), args.files)
        data = make_dataset(Path(folder))
        size = args.files * SIZE / 2**20
        print(f"{args.files:,} files, {size:,.0f} MiB; {len(os.sched_getaffinity(0))} cores\n")
        print("| what | time |\n| --- | --- |")
        print_time("listing the files", lambda: list(walk_files(folder, SUFFIXES)), args.runs)
        print_time("`--compare-data sample`", lambda: Fingerprint.compute(data), args.runs)
        print_time("`--compare-data all`", lambda: Fingerprint.compute(data, every_byte=True), args.runs)


if __name__ == "__main__":
    main()
