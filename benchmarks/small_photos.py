"""What `--config small_photos` reaches with few images: from scratch, fine-tuned, and as a linear classifier of features.

    python -m benchmarks.small_photos cifar10 --out results

Needs CIFAR-10 as Parquet files.  The weights to start from are trained here, by the same recipe, on the training images
of five classes (airplane, automobile, bird, cat, deer).  The other five classes (dog, frog, horse, ship, truck) are
the task, with few training images of each, and scored on their 5,000 test images.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from train.data.sources import Dataset, open_dataset

COUNTS = (20, 100, 400)  # training images of each class
TASKS = {"start": range(5), "task": range(5, 10)}


def write_images(source: Dataset, folder: Path, classes: range, count: int | None) -> None:
    """Write the training and test images of some classes as files in class folders; count: training images of each."""
    for split, examples, limit in (("train", source.train, count), ("test", source.held_out, None)):
        for number in classes:
            target = folder / split / source.classes[number]
            target.mkdir(parents=True)
            for row in np.flatnonzero(examples.targets == number)[:limit].tolist():
                examples.read(row).save(target / f"{row:05}.png")


def train(trainer: str, data: Path, run: Path, *options: str) -> None:
    """Train with a share of the training images held out, so that the test images stay unseen."""
    command = [sys.executable, "-m", trainer, "--config", "small_photos", "--data", f"folder:{data}", "--held-out", "0.2"]
    if not (run / "curves.png").exists():
        subprocess.run([*command, "--run", str(run), *options], check=True)


def score(run: Path, data: Path, *options: str) -> dict[str, object]:
    """Return the scores of a run on the test images."""
    command = [sys.executable, "-m", "train.evaluate", str(run), "--data", f"folder:{data}", "--held-out", "test", "--json"]
    lines = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, object] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with CIFAR-10 as Parquet files")
    parser.add_argument("--out", type=Path, required=True, help="a folder for images and runs; a later call continues")
    parser.add_argument("--trainer", default="train.torch", choices=("train.torch", "train.jax"))
    parser.add_argument("--start-epochs", type=int, default=30, help="epochs of the weights to start from")
    args = parser.parse_args()
    source = open_dataset(f"parquet:{args.data}", "test")
    folders = {f"task-{count}": (TASKS["task"], count) for count in COUNTS} | {"start": (TASKS["start"], None)}
    for name, (classes, count) in folders.items():
        if not (args.out / name).exists():
            write_images(source, args.out / name, classes, count)
    start = args.out / "run-start"
    train(args.trainer, args.out / "start", start, "--epochs", str(args.start_epochs), "--patience", "0")
    print("weights to start from:", score(start, args.out / "start")["accuracy"])
    print("images of each class, from scratch, fine-tuned, linear classifier of the features")
    for count in COUNTS:
        data = args.out / f"task-{count}"
        results = []
        for name, options in (("scratch", ()), ("tuned", ("--init", str(start)))):
            run = args.out / f"run-{name}-{count}"
            train(args.trainer, data, run, *options)
            found = score(run, data)
            low, high = found["intervals"]["accuracy"]  # type: ignore[index]
            results.append(f"{found['accuracy']:.1%} ({low:.1%} to {high:.1%})")
        results.append(f"{score(start, data, '--method', 'linear')['accuracy']:.1%}")
        print(count, *results, sep=", ")


if __name__ == "__main__":
    main()
