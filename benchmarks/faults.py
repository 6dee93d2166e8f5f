"""Which of the mistakes of `tests/faults` are found, and are their part and their cause named?

    python -m benchmarks.faults                  # the table, and what the check says of right twins
    python -m benchmarks.faults --only layers    # the mistakes whose file or name has this in it
    python -m benchmarks.faults --configs 20     # fewer random configs

Each mistake is planted by itself in a copy of a twin, of a column or of an optimizer.  `check` must fail and name the
part; `diagnose` is then given the right weights and the wrong outputs, and must name the cause first of all, where the
cause is one of its catalogue.  Then the right twins are checked on random configs, weights and images, forward and
backward, in float64 and in float32: nothing may fail.  What is wrong is in bold.
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
from tests.faults.outcomes import QUICK, checked, diagnosed, explained, named
from tests.random_configs import configs
from tests.twins import perturbed, pictures
from vit_spec import ViTConfig

Drawn = tuple[ViTConfig, int]  # and the seed of its weights and images
Outcome = tuple[bool, bool, bool | None]  # whether a mistake was found, its part named, and its cause


def started(folder: str) -> None:
    """Begin a process: one thread of PyTorch, and a place for what XLA has compiled, since most faults leave it alone."""
    import jax
    import torch

    torch.set_num_threads(1)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def planted_and_found(fault: Fault) -> tuple[str, Outcome]:
    """Return a line of the table, and what it comes to."""
    report = checked(fault)
    right, cause, told = named(fault, report), None, "not in its catalogue"
    if fault.cause:
        found = diagnosed(fault)
        cause = explained(fault, found)
        told = _marked(str(found.matched[0]) if found.matched else "nothing", cause)
    cells = [fault.name, f"`{fault.file}`", _marked("no" if report.passed else "yes", not report.passed)]
    cells += [_marked(str(report.part or "nothing"), right), told]
    return f"| {' | '.join(cells)} |", (not report.passed, right, cause)


def _marked(told: str, right: bool) -> str:
    return told if right else f"**{told}**"


def table(faults: list[Fault], pool: Executor) -> None:
    """Print a row for each mistake, and the totals."""
    print("| mistake | planted in | found | part that `check` names | cause that `diagnose` names |")
    print("| --- | --- | --- | --- | --- |")
    outcomes = []
    for line, outcome in pool.map(planted_and_found, faults):
        print(line, flush=True)
        outcomes.append(outcome)
    found, parts, causes = ([each[i] for each in outcomes if each[i] is not None] for i in range(3))
    print(f"\n`check` found {_share(found)} of the mistakes and named the part of {_share(parts)}.")
    print(f"`diagnose` named the cause of {_share(causes)} that are in its catalogue.\n")


def _share(flags: list[bool | None]) -> str:
    return f"{sum(map(bool, flags))} of {len(flags)} ({sum(map(bool, flags)) / max(1, len(flags)):.1%})"


def drawn(count: int, seed: int) -> list[Drawn]:
    """Return random configs, the same for the same seed."""
    found: list[Drawn] = []
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    draw = hypothesis.given(configs(), st.integers(0, 2**16))(lambda config, each: found.append((config, each)))
    hypothesis.seed(seed)(settings(draw))()
    return found


def alarm(one: Drawn) -> str:
    """Check right twins; return what is said to be wrong, or nothing."""
    config, seed = one
    size = (config.patch_size[0] * 4, config.patch_size[1] * 2)
    report = compare(config, perturbed(config, seed), images=pictures(config, size, seed), xla_options=QUICK)
    return "" if report.passed else f"seed {seed}, {config.to_json()}\n  {report.verdict}"


def alarms(models: list[Drawn], pool: Executor) -> None:
    """Print what is said to be wrong with right twins, and how often."""
    false = 0
    for number, told in enumerate(pool.map(alarm, models), 1):
        false += bool(told)
        if told:
            print(f"false alarm: {told}", flush=True)
        if number % 10 == 0:
            print(f"{number} of {len(models)} random configs, {false} false alarms", file=sys.stderr, flush=True)
    print(f"Of {len(models)} random configs and seeds, {false} were false alarms.")


def main() -> None:
    """Print the table and the false alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mistakes with this in their file or name")
    parser.add_argument("--configs", type=int, default=200, help="random configs for false alarms")
    parser.add_argument("--seed", type=int, default=0, help="of the random configs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, context, started, (folder,)) as pool,
    ):
        if faults := [fault for fault in FAULTS if given.only in fault.id]:
            table(faults, pool)
        if given.configs:
            alarms(drawn(given.configs, given.seed), pool)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
