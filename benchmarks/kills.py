"""Test of resuming: runs killed at random moments must reach the records of a run that was never killed.

Run `python -m benchmarks.kills [--trainer train.torch] [--kills 100] [--seed 0]`.  It prints the figures of
docs/guides/resume.md.  A model with few weights and many patches is trained on the digits, so that a step takes longer
than writing a checkpoint.  Each run is killed up to five times, by SIGKILL as in a power cut or by SIGTERM as a cluster
sends it.  One kill in three waits until a checkpoint is being written.  Then the run continues to its end.  All of its
records must equal those of the reference run, bit for bit, and a kill may repeat at most the steps between two checkpoints.
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
MAX_DELAY = 3  # seconds from the first new record to a kill
PACKAGES = {"train.jax": ("jax", "orbax-checkpoint", "grain"), "train.torch": ("torch", "safetensors", "grain")}
SIGNAL_NAMES = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM"}


def start_trainer(trainer: str, run: Path) -> subprocess.Popen[str]:
    """Start a trainer in a new process."""
    command = [sys.executable, "-m", trainer, *ARGUMENTS, "--no-tensorboard", "--run", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_records(run: Path) -> list[dict[str, float]]:
    """Return the records of a run without their times; skip a line that is incomplete because of a kill."""
    found = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found.append({name: value for name, value in record.items() if name != "seconds"})
    return found


def last_step(run: Path) -> int:
    """Return the last step that has a record; 0 if there is none."""
    return max((int(record["step"]) for record in read_records(run)), default=0)


class ProcessResult(NamedTuple):
    """Result of one process of a run.

    resumed_step: the step from which it resumed; 0 if it started the run.
    last_step: the last step that has a record.
    was_saving: whether a checkpoint was being written when it was killed.
    is_finished: whether it ended with status 0.
    output: the text that it printed.
    """

    resumed_step: int
    last_step: int
    was_saving: bool
    is_finished: bool
    output: str


def is_saving(run: Path) -> bool:
    """Return whether a checkpoint is being written, or was incomplete when the process ended."""
    folder = run / "checkpoints"
    return folder.exists() and any(not path.name.isdecimal() for path in folder.iterdir())


def run_until_killed(
    trainer: str, run: Path, number: signal.Signals | None, delay: float, *, during_save: bool
) -> ProcessResult:
    """Start or resume a run, send it a signal, and return what the process did.

    number: the signal; None: let the run end.
    delay: seconds from its first new record to the signal.
    during_save: after the delay, wait until a checkpoint is being written.
    """
    before = last_step(run)
    with start_trainer(trainer, run) as process:
        while number and process.poll() is None and last_step(run) == before:
            time.sleep(0.02)
        if number:
            time.sleep(delay)
            while during_save and process.poll() is None and not is_saving(run):
                time.sleep(0.001)
            was_saving = is_saving(run)
            process.send_signal(number)
        output, _ = process.communicate()
    match = re.search(r"resuming from step ([\d,]+)", output)
    resumed_step = int(match[1].replace(",", "")) if match else 0
    return ProcessResult(resumed_step, last_step(run), bool(number) and was_saving, process.returncode == 0, output)


def main() -> None:
    """Kill runs, print the table, and exit with 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trainer", choices=PACKAGES, default="train.jax")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, counts, repeated_steps, failed = random.Random(args.seed), Counter[str](), [], 0
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES[args.trainer])
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        reference = Path(folder) / "reference"
        with start_trainer(args.trainer, reference) as process:
            output, _ = process.communicate()
            assert process.returncode == 0, output
        expected, runs, kills = read_records(reference), 0, 0
        while kills < args.kills:
            runs += 1
            run, last = Path(folder) / f"run-{runs}", 0
            signals = [rng.choice([*SIGNAL_NAMES]) for _ in range(rng.randint(1, 5))]
            for number in (*signals, None):
                delay = rng.uniform(0, MAX_DELAY)
                result = run_until_killed(args.trainer, run, number, delay, during_save=rng.random() < 1 / 3)
                repeated_steps.append(last - result.resumed_step)
                last = result.last_step
                if result.is_finished or number is None:
                    break
                kills += 1
                counts[SIGNAL_NAMES[number]] += 1
                counts["while a checkpoint was written"] += result.was_saving
            if not result.is_finished or read_records(run) != expected:
                failed += 1
                print(f"run {runs} has other records:\n{result.output}", file=sys.stderr)
            print(f"{kills} kills, {failed} of {runs} runs failed", file=sys.stderr, flush=True)
    print("| | |\n|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count} |")
    print(f"| runs | {runs}, of which {runs - failed} ended with the records of the reference run, bit for bit |")
    print(f"| steps repeated after a kill | {max(repeated_steps)} at most, with a checkpoint every {INTERVAL} |")
    sys.exit(bool(failed) or max(repeated_steps) > INTERVAL)


if __name__ == "__main__":
    main()
