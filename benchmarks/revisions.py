"""Training steps and evaluations of earlier revisions of this repository beside those of this checkout.

Run `python -m benchmarks.revisions REVISION [REVISION ...] [--trainer train.torch] [--model vit_s16] [--batch-size 8]
[--dtype float32] [--turns 5]`.  A revision is anything that git can check out, such as HEAD~3.  Each has a process of its
own; the processes take turns, and ratios are those within a turn.
"""

import argparse
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.conversion import format_spread
from benchmarks.input_pipeline import TRAINERS
from benchmarks.machine import hardware
from benchmarks.trainer_steps import REPOSITORY, Case, Turn, take_turns


def check_out(revision: str, folder: Path) -> str:
    """Write the files of a revision into a folder, and return its abbreviated commit."""
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "--verify", revision], capture_output=True, text=True, check=True
    ).stdout
    folder.mkdir()
    archive = subprocess.run([*git, "archive", commit.strip()], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return commit.strip()


def row(name: str, turns: list[Turn], ours: list[Turn]) -> str:
    """Return the row of the table for a revision."""
    cells = [name]
    for seconds, of_ours in zip(list(zip(*turns, strict=True))[:2], list(zip(*ours, strict=True))[:2], strict=True):
        cells += [format_spread(seconds), format_spread([a / b for a, b in zip(of_ours, seconds, strict=True)])]
    return f"| {' | '.join(cells)} | {median(turn.memory for turn in turns):,.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revisions", nargs="+", metavar="REVISION")
    parser.add_argument("--trainer", default="train.jax", choices=TRAINERS)
    parser.add_argument("--model", default="vit_s16")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    case = (args.trainer, args.model, args.batch_size, args.dtype)
    with tempfile.TemporaryDirectory() as name:
        cases = {"this checkout": Case(*case)}
        for number, revision in enumerate(args.revisions):
            folder = Path(name) / str(number)
            try:
                cases[check_out(revision, folder)] = Case(*case, folder=folder)
            except subprocess.CalledProcessError as error:
                parser.error(f"git cannot check out {revision!r}: {error.stderr.strip().splitlines()[0]}")
        measured = take_turns(cases, args.turns)
    machine, packages = hardware(), ("jax", "torch")
    versions = ", ".join(f"{package} {version(package)}" for package in packages if find_spec(package))
    print(f"{machine['processor']}, {machine['usable_cores']} cores, Python {machine['python']}, {versions}")
    print(f"{args.trainer}, {args.model}, {args.batch_size} images, {args.dtype}; medians of {args.turns} turns\n")
    print("| revision | step, s | ours / its | evaluation, s | ours / its | peak memory, MiB |\n|---|---|---|---|---|---|")
    for name, turns in measured.items():
        print(row(name, turns, measured["this checkout"]))


if __name__ == "__main__":
    main()
