"""Runs that are killed over and over: does each go on to the losses of a run left alone, and how much is done twice?

Run `python -m benchmarks.kills [--kills 100] [--seed 0]`; it prints the table of docs/training.md.  A model of few weights
and many patches is trained on the digits, so that a step takes longer than to write a checkpoint.  Each run is killed at
random moments, by SIGKILL as by a power cut or by SIGTERM as by a cluster, some times over, every third time as soon as a
checkpoint is begun; and then it is left to end.  Every record of it has to be that of the unbroken run, bit for bit, and no
kill may cost more steps than lie between two checkpoints.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

INTERVAL = 5  # steps between two checkpoints
STEPS = 40
SHAPE = ["patch_size=2", "width=32", "depth=2", "num_heads=2", "mlp_dim=64", "regularisation.drop_path=0.1"]
LENGTHS = ["--epochs", f"{STEPS}steps", "--save-every", f"{INTERVAL}steps", "--eval-every", "20steps", "--log-every", "1"]
SIZE = ["--batch-size", "16", "--model.image-size", "48", "48", "--model.changes", *SHAPE]
ARGUMENTS = ["--config", "tiny", *SIZE, *LENGTHS, "--ema", "0.9"]
LONGEST = 3  # seconds from the first new record to a kill
NAMES = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM"}


def started(run: Path) -> subprocess.Popen[str]:
    """The trainer, as a process of its own."""
    command = [sys.executable, "-m", "train.jax", *ARGUMENTS, "--no-tensorboard", "--run", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(run: Path) -> list[dict[str, float]]:
    """What a run measured, without how long it took; a line that was cut off is none."""
    found = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found.append({name: value for name, value in record.items() if name != "seconds"})
    return found


def reached(run: Path) -> int:
    """The last step of which there is a record."""
    return max((int(record["step"]) for record in records(run)), default=0)


class Turn(NamedTuple):
    """What one process did: the step that it went on from, and the last that it recorded; how it ended."""

    begun: int
    reached: int
    saving: bool
    ended: bool
    output: str


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run ended."""
    folder = run / "checkpoints"
    return folder.exists() and any("tmp" in path.name for path in folder.iterdir())


def turn(run: Path, number: signal.Signals | None, wait: float, *, into_a_save: bool) -> Turn:
    """Start or go on with a run; kill it so long after its first record, or in the save after that; None: let it end."""
    before = reached(run)
    with started(run) as process:
        while number and process.poll() is None and reached(run) == before:
            time.sleep(0.02)
        if number:
            time.sleep(wait)
            while into_a_save and process.poll() is None and not saving(run):
                time.sleep(0.001)
            within = saving(run)
            process.send_signal(number)
        output, _ = process.communicate()
    went_on = re.search(r"going on from step ([\d,]+)", output)
    begun = int(went_on[1].replace(",", "")) if went_on else 0
    return Turn(begun, reached(run), bool(number) and within, process.returncode == 0, output)


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, counts, twice, wrong = random.Random(given.seed), Counter[str](), [], 0
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "orbax-checkpoint", "grain"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        unbroken = Path(folder) / "unbroken"
        with started(unbroken) as process:
            output, _ = process.communicate()
            assert process.returncode == 0, output
        wanted, runs, kills = records(unbroken), 0, 0
        while kills < given.kills:
            runs += 1
            run, at = Path(folder) / f"run-{runs}", 0
            signals = [chance.choice([*NAMES]) for _ in range(chance.randint(1, 5))]
            for number in (*signals, None):
                done = turn(run, number, chance.uniform(0, LONGEST), into_a_save=chance.random() < 1 / 3)
                twice.append(at - done.begun)
                at = done.reached
                if done.ended or number is None:
                    break
                kills += 1
                counts[NAMES[number]] += 1
                counts["while a checkpoint was written"] += done.saving
            if not done.ended or records(run) != wanted:
                wrong += 1
                print(f"run {runs} has other records:\n{done.output}", file=sys.stderr)
            print(f"{kills} kills, {wrong} of {runs} runs gone wrong", file=sys.stderr, flush=True)
    print("| | |\n|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count} |")
    print(f"| runs | {runs}, of which {runs - wrong} ended with the records of the unbroken run, bit for bit |")
    print(f"| steps done twice after a kill | {max(twice)} at most, with a checkpoint every {INTERVAL} |")
    sys.exit(bool(wrong) or max(twice) > INTERVAL)


if __name__ == "__main__":
    main()
