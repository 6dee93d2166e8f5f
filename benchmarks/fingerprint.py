"""What it costs to know a data set again: the fingerprint of many files, beside listing them.

Run `python -m benchmarks.fingerprint [--files 100000] [--runs 5]`; it prints the table of docs/training.md.  Files of 20 kB
are made in a temporary folder, in 100 class folders; times are processor time, from the page cache.
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
from train.data.sources import Source
from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import Files, examples
from train.data.sources.files import below

CLASSES, SIZE = 100, 20_000


def made(root: Path, count: int) -> None:
    """Write so many files of random bytes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class{i % CLASSES:02}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i:07}.jpg").write_bytes(rng.bytes(SIZE))


def source(root: Path) -> Source:
    """The files as a data set whose images nobody decodes."""
    paths = list(below(str(root), SUFFIXES))
    train = examples(Files(root, paths), np.zeros(len(paths), np.int64))
    return Source(train, train.take(range(10)), "classes", ("a",), 3, None, ())


def timed(what: str, run: Callable[[], object], runs: int) -> None:
    """Print the median and range of the processor time of something."""
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made(Path(folder), given.files)
        data = source(Path(folder))
        size = given.files * SIZE / 2**20
        print(f"{given.files:,} files, {size:,.0f} MiB; {len(os.sched_getaffinity(0))} cores\n")
        print("| what | time |\n| --- | --- |")
        timed("listing the files", lambda: list(below(folder, SUFFIXES)), given.runs)
        timed("`--compare-data sample`", lambda: Fingerprint.of(data), given.runs)
        timed("`--compare-data all`", lambda: Fingerprint.of(data, every_byte=True), given.runs)


if __name__ == "__main__":
    main()
