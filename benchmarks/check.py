"""Time and memory of `python -m parity check SRC`, each run in its own process.

Run `python -m benchmarks.check [--runs N] [MODEL ...]`.  It prints the table "Cost of a check" of
docs/measurements/parity.md.  Weights are those of an initialized model with noise on every entry, in float32.  Memory is
the peak of the process, which includes both frameworks.  Without gradients, the goal is at most three times the weights in
float64.  Small models exceed it: between ViT-S and ViT-B, memory grows by 1.4 times the weights in float64, and the rest,
about 900 MiB, does not depend on the model.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import parity
import vit_spec
from tests.twins import perturbed_params

MODELS = ["vit_s16", "vit_b16"]
CHECKS = {"forward": ["--no-gradients"], "and gradients": []}


def measure_check(path: Path, options: list[str]) -> tuple[float, float, int, str]:
    """Check a file once; return the wall time and CPU time in seconds, the peak memory in bytes and the verdict."""
    command = [sys.executable, "-m", "parity", "check", str(path), "--json", *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        verdict = json.loads(process.stdout.read())["verdict"]
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0  # os.wait4 has reaped it
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, verdict


def main() -> None:
    """Print the table, each row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch", "numpy"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    print("| model | check | seconds, median (least to most) | CPU seconds | peak memory | times the weights in float64 |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        config = vit_spec.get(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.safetensors"
            parity.save(path, perturbed_params(config), config, "jax")
            for what, options in CHECKS.items():
                runs = [measure_check(path, options) for _ in range(args.runs)]
                seconds, cpu, peak, verdicts = zip(*runs, strict=True)
                times = max(peak) / (8 * vit_spec.count(config))
                spread = f"{median(seconds):.0f} ({min(seconds):.0f} to {max(seconds):.0f})"
                memory = f"{max(peak) / 2**20:.0f} MiB | {times:.2f}"
                print(f"| {name} | {what} | {spread} | {median(cpu):.0f} | {memory} |", flush=True)
                if wrong := [verdict for verdict in verdicts if not verdict.startswith("PASS")]:
                    sys.exit(f"{name}: {wrong[0]}")


if __name__ == "__main__":
    main()
