"""Do the tolerances hold for any weights?  Right twins on extreme weights, and planted mistakes on some of them.

    python -m benchmarks.tolerances                      # 200 drawn pairs, and every mistake on extreme weights
    python -m benchmarks.tolerances --pairs 20 --first 40
    python -m benchmarks.tolerances --faults layers      # the mistakes whose file or name has this in it; "" for all

Right twins: `check` runs all its gates, forward and backward, in float64 and in float32, and every tenth pair trains for
five steps too; the same weights in two formats are compared as `check --against` does.  Nothing may fail.

Mistakes: each is planted as `benchmarks.faults` does, and checked on weights of a few extreme kinds in turn.  One is found;
or it cannot be judged, and the report says so; or it makes no difference to these weights (an eps beside a variance of
1e12): no part of the wrong twin, fed the same, differs from the right one by more than 1e-12.
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

from benchmarks.faults import started
from parity.checkpoints.weights import held
from parity.comparison.report import Report
from parity.comparison.tolerances import FUNCTION
from parity.comparison.twins import compare
from parity.comparison.two_files import compare_files
from tests.extreme_weights import CONFIGS, KINDS, drawn, extreme
from tests.faults import FAULTS, Fault, planted
from tests.faults.outcomes import QUICK
from vit_spec import InputError

ON = ("all weights times 10 to 300", "a norm's weight times 1000", "outliers of 10 to 10,000 times", "attention saturated")


def said(report: Report) -> str:
    """Return what a report comes to."""
    if not report.passed:
        return "fails"
    parts = {each.dtype for each in report.unjudged}
    return f"passes, some not judged in {' and '.join(sorted(parts))}" if parts else "passes"


def of_pair(seed: int) -> tuple[str, str, str]:
    """Check right twins on drawn weights; return the kind, what is said, and a line where that is wrong."""
    name, kind, config, params, images = drawn(seed)
    level = "train" if seed % 10 == 0 else "precision"
    try:
        report = compare(config, params, images=images, level=level, steps=5, xla_options=QUICK)  # type: ignore[arg-type]
        told, line = said(report), report.verdict
        checkpoint = held(params, config, "jax")
        against = compare_files(checkpoint, checkpoint)
        if not against.passed:
            told, line = "fails", against.verdict
    except InputError as error:
        told, line = "refused", str(error)
    return kind, told, f"seed {seed}, {name}, {kind}: {line}" if told in ("fails", "refused") else ""


def of_fault(number: int) -> tuple[str, str, str]:
    """Plant a mistake and check it on extreme weights; return the kind, the outcome, and a line where it is missed."""
    fault, kind = FAULTS[number], ON[number % len(ON)]
    params = extreme(fault.params(), kind, number)
    try:
        with planted(fault):
            report = compare(
                fault.config, params, images=fault.images(), level=_level(fault), backward=_back(fault), xla_options=QUICK
            )
    except InputError as error:
        return kind, "refused", f"{fault.id}, {kind}: {error}"
    return kind, outcome(report), f"{fault.id}, {kind}: {report.verdict}" if report.passed else ""


def outcome(report: Report) -> str:
    """Return what a check of a wrong twin comes to."""
    if not report.passed:
        return "found"
    if any(each.dtype == "float64" for each in report.unjudged):
        return "cannot be judged"
    differs = max(m.difference for m in report.measures) if report.parts is None else report.parts
    return "makes no difference" if differs <= FUNCTION else "missed"


def _level(fault: Fault) -> str:
    return "function" if fault.level == "function" else "precision"


def _back(fault: Fault) -> bool:
    return fault.part.endswith("on the way back")


def table(found: Iterator[tuple[str, str, str]], total: int) -> None:
    """Print lines of what is wrong, and how often each kind came to what."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, (kind, told, line) in enumerate(found, 1):
        counts[kind][told] += 1
        if line:
            print(line, flush=True)
        print(f"{number} of {total}", file=sys.stderr, flush=True)
    outcomes = sorted({told for each in counts.values() for told in each})
    print(f"\n| weights | {' | '.join(outcomes)} |")
    print(f"| --- |{' --- |' * len(outcomes)}")
    for kind in [kind for kind in KINDS if kind in counts]:
        print(f"| {kind} | {' | '.join(str(counts[kind][told]) for told in outcomes)} |")
    sums = [sum(each[told] for each in counts.values()) for told in outcomes]
    print(f"| all {sum(sums)} | {' | '.join(map(str, sums))} |\n", flush=True)


def run(pool: Executor, given: argparse.Namespace) -> None:
    """Print both tables."""
    if given.pairs:
        print(f"Right twins, {given.pairs} pairs of weights and images, of {len(CONFIGS)} configs:\n")
        table(pool.map(of_pair, range(given.first, given.first + given.pairs)), given.pairs)
    chosen = [i for i, fault in enumerate(FAULTS) if fault.level != "train" and given.faults in fault.id]
    if chosen and given.faults != "none":
        print(f"{len(chosen)} mistakes, each on extreme weights:\n")
        table(pool.map(of_fault, chosen), len(chosen))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="drawn weights for right twins")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--faults", default="", help='mistakes with this in their file or name; "none" for none')
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "numpy"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}\n")
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, context, started, (folder,)) as pool,
    ):
        run(pool, given)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
