"""Test of the tolerances on extreme weights: correct twins must pass, and planted bugs must fail.

    python -m benchmarks.tolerances                          # 200 random pairs, and every bug on extreme weights
    python -m benchmarks.tolerances --pairs 20 --first 40    # 20 random pairs, of the seeds 40 to 59, and every bug
    python -m benchmarks.tolerances --faults layers          # only bugs whose file or name contains this; "none" for none

It prints the figures of the section "Extreme weights" of docs/measurements/parity.md.

Correct twins: `check` runs all its checks, forward and backward, in float64 and float32; every tenth pair also trains for
five steps.  A checkpoint is also compared with itself as `check --against` does.  Nothing may fail.

Bugs: each is planted as `benchmarks.faults` does, and checked on weights of a few extreme kinds in turn.  Three outcomes
are acceptable: the bug is found; the report says that it cannot be judged; or the bug makes no difference with these
weights, such as an eps that is added to a variance of 1e12.  "No difference" means that no part of the wrong twin differs
from the correct one by more than 1e-12 on the same inputs.
"""

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.metadata import version

from benchmarks.faults import initialise_worker
from parity.checkpoints.weights import as_checkpoint
from parity.comparison.report import Report
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from parity.comparison.twins import compare
from parity.comparison.two_files import compare_files
from tests.extreme_weights import CONFIGS, KINDS, draw_example, make_extreme
from tests.faults import FAULTS, Fault, plant_fault
from tests.faults.outcomes import QUICK
from vit_spec import InputError

FAULT_KINDS = (
    "all weights times 10 to 300",
    "a norm's weight times 1000",
    "outliers of 10 to 10,000 times",
    "attention saturated",
)


def describe_outcome(report: Report) -> str:
    """Return the outcome of a check of correct twins."""
    if not report.passed:
        return "fails"
    parts = {each.dtype for each in report.unjudged}
    return f"passes, some not judged in {' and '.join(sorted(parts))}" if parts else "passes"


def check_pair(seed: int) -> tuple[str, str, str]:
    """Check correct twins on random weights; return the kind, the outcome, and a line if the outcome is wrong."""
    name, kind, config, params, images = draw_example(seed)
    level = "train" if seed % 10 == 0 else "precision"
    try:
        report = compare(config, params, images=images, level=level, steps=5, xla_options=QUICK)  # type: ignore[arg-type]
        result, line = describe_outcome(report), report.verdict
        checkpoint = as_checkpoint(params, config, "jax")
        against = compare_files(checkpoint, checkpoint)
        if not against.passed:
            result, line = "fails", against.verdict
    except InputError as error:
        result, line = "refused", str(error)
    return kind, result, f"seed {seed}, {name}, {kind}: {line}" if result in ("fails", "refused") else ""


def check_fault(number: int) -> tuple[str, str, str]:
    """Plant a bug and check it on extreme weights; return the kind, the outcome, and a line if it is missed."""
    fault, kind = FAULTS[number], FAULT_KINDS[number % len(FAULT_KINDS)]
    params = make_extreme(fault.params(), kind, number)
    try:
        with plant_fault(fault):
            report = compare(
                fault.config,
                params,
                images=fault.images(),
                level=_level(fault),
                backward=_needs_backward(fault),
                xla_options=QUICK,
            )
    except InputError as error:
        return kind, "refused", f"{fault.id}, {kind}: {error}"
    return kind, fault_outcome(report), f"{fault.id}, {kind}: {report.verdict}" if report.passed else ""


def fault_outcome(report: Report) -> str:
    """Return the outcome of a check of a twin with a planted bug."""
    if not report.passed:
        return "found"
    if any(each.dtype == "float64" for each in report.unjudged):
        return "cannot be judged"
    largest = report.largest_part_error
    difference = max(m.difference for m in report.measures) if largest is None else largest
    return "makes no difference" if difference <= FLOAT64_TOLERANCE else "missed"


def _level(fault: Fault) -> str:
    return "function" if fault.level == "function" else "precision"


def _needs_backward(fault: Fault) -> bool:
    return fault.part.endswith("in the backward pass")


def print_table(results: Iterator[tuple[str, str, str]], total: int) -> None:
    """Print a line for each wrong outcome, and a table of the outcomes of each kind of weights."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, (kind, result, line) in enumerate(results, 1):
        counts[kind][result] += 1
        if line:
            print(line, flush=True)
        print(f"{number} of {total}", file=sys.stderr, flush=True)
    outcomes = sorted({result for each in counts.values() for result in each})
    print(f"\n| weights | {' | '.join(outcomes)} |")
    print(f"| --- |{' --- |' * len(outcomes)}")
    for kind in [kind for kind in KINDS if kind in counts]:
        print(f"| {kind} | {' | '.join(str(counts[kind][result]) for result in outcomes)} |")
    sums = [sum(each[result] for each in counts.values()) for result in outcomes]
    print(f"| all {sum(sums)} | {' | '.join(map(str, sums))} |\n", flush=True)


def run(pool: Executor, args: argparse.Namespace) -> None:
    """Print the table of correct twins and the table of bugs, as far as the arguments select them."""
    if args.pairs:
        print(f"Correct twins, {args.pairs} pairs of weights and images, of {len(CONFIGS)} configs:\n")
        print_table(pool.map(check_pair, range(args.first, args.first + args.pairs)), args.pairs)
    chosen = [i for i, fault in enumerate(FAULTS) if fault.level != "train" and args.faults in fault.id]
    if chosen and args.faults != "none":
        print(f"{len(chosen)} bugs, each on extreme weights:\n")
        print_table(pool.map(check_fault, chosen), len(chosen))


def main() -> None:
    """Print the versions and the tables; see the docstring of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=200, help="number of random pairs of weights and images for correct twins"
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first pair")
    parser.add_argument("--faults", default="", help='bugs whose file or name contains this; "none" for none')
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    args = parser.parse_args()
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "numpy"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.jobs, context, initialise_worker, (folder,)) as pool,
    ):
        run(pool, args)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
