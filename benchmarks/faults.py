"""Measure which mistakes of `tests/faults` are detected, and whether their part and their cause are named.

    python -m benchmarks.faults                  # the table, then checks of correct twins
    python -m benchmarks.faults --only layers    # only mistakes whose file or name contains this
    python -m benchmarks.faults --configs 20     # fewer random configs

It prints the figures of docs/measurements/planted_faults.md.

Each mistake is planted separately in a copy of a twin, a format or an optimizer.  `check` must fail and name the part.
`diagnose` then gets the correct weights and the wrong outputs; if the cause is in its catalogue, it must name it first.
After that, correct twins are checked on random configs, weights and images, forward and backward, in float64 and float32:
no check may fail.  Wrong answers are printed in bold.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor

import hypothesis
from hypothesis import strategies as st

from parity.comparison.twins import compare
from tests.faults import FAULTS, Fault
from tests.faults.outcomes import QUICK, names_cause, names_part, run_check, run_diagnosis
from tests.random_configs import configs
from tests.twins import perturbed_params, random_images
from vit_spec import ViTConfig

Case = tuple[ViTConfig, int]  # config, seed of its weights and images
Outcome = tuple[bool, bool, bool | None]  # whether the mistake was detected, its part named, and its cause named


def initialise_worker(folder: str) -> None:
    """Initialise a worker: one PyTorch thread, and XLA's compilation cache, because few faults change what XLA compiles."""
    import jax
    import torch

    torch.set_num_threads(1)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def evaluate_fault(fault: Fault) -> tuple[str, Outcome]:
    """Plant a fault, and return its row of the table and the outcome."""
    report = run_check(fault)
    is_part_right, cause, answer = names_part(fault, report), None, "not in its catalogue"
    if fault.cause:
        diagnosis = run_diagnosis(fault)
        cause = names_cause(fault, diagnosis)
        answer = _bold_unless(str(diagnosis.matched[0]) if diagnosis.matched else "nothing", cause)
    cells = [fault.name, f"`{fault.file}`", _bold_unless("no" if report.passed else "yes", not report.passed)]
    cells += [_bold_unless(str(report.part or "nothing"), is_part_right), answer]
    return f"| {' | '.join(cells)} |", (not report.passed, is_part_right, cause)


def _bold_unless(text: str, is_right: bool) -> str:
    return text if is_right else f"**{text}**"


def print_table(faults: list[Fault], pool: Executor) -> None:
    """Print a row for each mistake, then the totals."""
    print("| mistake | planted in | found | part that `check` names | cause that `diagnose` names |")
    print("| --- | --- | --- | --- | --- |")
    outcomes = []
    for line, outcome in pool.map(evaluate_fault, faults):
        print(line, flush=True)
        outcomes.append(outcome)
    found, parts, causes = ([each[i] for each in outcomes if each[i] is not None] for i in range(3))
    print(f"\n`check` found {_share(found)} of the mistakes and named the part of {_share(parts)}.")
    print(f"`diagnose` named the cause of {_share(causes)} that are in its catalogue.\n")


def _share(flags: list[bool | None]) -> str:
    return f"{sum(map(bool, flags))} of {len(flags)} ({sum(map(bool, flags)) / max(1, len(flags)):.1%})"


def random_cases(count: int, seed: int) -> list[Case]:
    """Return random configs, each with a random seed; the same `seed` gives the same cases."""
    cases: list[Case] = []
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    draw = hypothesis.given(configs(), st.integers(0, 2**16))(lambda config, each: cases.append((config, each)))
    hypothesis.seed(seed)(settings(draw))()
    return cases


def false_alarm(case: Case) -> str:
    """Check correct twins, and return a description of the failure, or "" if the check passes."""
    config, seed = case
    size = (config.patch_size[0] * 4, config.patch_size[1] * 2)
    report = compare(config, perturbed_params(config, seed), images=random_images(config, size, seed), xla_options=QUICK)
    return "" if report.passed else f"seed {seed}, {config.to_json()}\n  {report.verdict}"


def print_false_alarms(cases: list[Case], pool: Executor) -> None:
    """Check correct twins; print every failure, and the number of failures."""
    count = 0
    for number, alarm in enumerate(pool.map(false_alarm, cases), 1):
        count += bool(alarm)
        if alarm:
            print(f"false alarm: {alarm}", flush=True)
        if number % 10 == 0:
            print(f"{number} of {len(cases)} random configs, {count} false alarms", file=sys.stderr, flush=True)
    print(f"Of {len(cases)} random configs and seeds, {count} were false alarms.")


def main() -> None:
    """Print the table, then the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plant only mistakes whose file or name contains this")
    parser.add_argument("--configs", type=int, default=200, help="number of random configs for false alarms")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random configs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    args = parser.parse_args()
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.jobs, context, initialise_worker, (folder,)) as pool,
    ):
        if faults := [fault for fault in FAULTS if args.only in fault.id]:
            print_table(faults, pool)
        if args.configs:
            print_false_alarms(random_cases(args.configs, args.seed), pool)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
