"""Measure `assert_parity` on models of other authors, and on mutants of them.

    python -m benchmarks.ports                                  # the pairs of the installed libraries, 6 faults each
    python -m benchmarks.ports --source bonsai=CLONE            # also those of a clone; can be repeated
    python -m benchmarks.ports --pairs 'equimo/*' --faults 0    # only some pairs, without faults
    python -m benchmarks.ports --json results.json              # also writes every result
    python -m benchmarks.ports --list                           # only lists the pairs, and the sources they need

A pair is a JAX model and a PyTorch model that compute the same function, from two libraries or one (`pairs/`).  Nobody
changed them for `assert_parity`; a builder passes arguments, orders the axes of the inputs, and selects an output.  Each
pair is judged in a process of its own, with a time limit.

- right pairs: `assert_parity` must accept them.  A pair that it rejects is a false reject, with the reason.
- differences: pairs that are published as the same and are known to differ.  `assert_parity` must reject them.
- pairing found: the parameters were matched without `layouts`, and the pair passed.
- faults: one node of the code of one side, or one attribute of a module, is mutated (`operators.py`, `mutator.py`), on
  both sides in turn.  A mutant counts if it runs, its outputs have the same shapes and are finite, and its outputs, its
  loss or its gradients differ in float64 from those of the model itself by more than 1e-9.
- false accept: `assert_parity` passes for a mutant, or for a pair that differs.
- origin: the report's origin on the mutated side.  "line" counts origins whose line belongs to the mutated statement,
  "region" also those whose lines between the last value that agrees and the first that differs contain one of its lines,
  "caller" those whose function is called by it, "module" those whose module, or the module that the report says comes
  before it, is the innermost module that executes the statement, or that it makes in linen's `setup`, or that has the
  mutated attribute.  "named" counts the faults with any of these.
- refused: faults and differences for which `assert_parity` raises an error instead of returning a report that fails.

The script exits with 1 if there is a false reject or a false accept.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.machine import revision
from benchmarks.ports.declaration import HITS, Pair, Pairs
from benchmarks.ports.pairs import sources

SECONDS = 300  # time limit of a pair, and for each fault in addition
SECONDS_PER_FAULT = 60
MARK = "RESULT "
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "USE_TF": "0",
    # The compilation cache, because most mutants change one side, and the other is compiled again otherwise.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
PART = 8  # pairs of a source that share the process from which they are forked
Result = dict[str, Any]


def run_pairs(pairs: list[Pair], paths: list[str], faults: int, seed: int) -> Iterator[list[Result]]:
    """Judge pairs of one source, each in a process of its own, and yield the results of each."""
    names = ",".join(pair.name for pair in pairs)
    limit = SECONDS + SECONDS_PER_FAULT * faults
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.ports.worker",
        names,
        f"{faults}",
        f"{seed}",
        f"{limit}",
        *paths,
    ]
    results: list[Result] = []
    missing = pairs
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **ENVIRONMENT}
    ) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                result = json.loads(line.removeprefix(MARK))
                if result["event"] != "end":
                    results.append(result)
                    continue
                yield results
                results, missing = [], missing[1:]
    for pair in missing:
        yield [{"event": "error", "pair": pair.name, "reason": f"the worker ended with exit code {process.returncode}"}]


def format_result(result: Result) -> str:
    """Return a line for the result of a right pair or a fault."""
    reason = result.get("reason", "").split("\n")[0][:150]
    if result["event"] in ("error", "stopped"):
        return f"{result['event'].upper()} {result['pair']}: {reason}"
    if result["event"] == "difference":
        return f"{'ACCEPTED' if result['passed'] else 'differs'} {result['pair']} ({result['seconds']:.1f} s): {reason}"
    if result["event"] == "right":
        how = "" if result["automatic"] else " with layouts" if result["passed"] else ""
        return f"{'right' if result['passed'] else 'REJECTED'}{how} {result['pair']} ({result['seconds']:.1f} s): {reason}"
    if result["kind"] == "none":
        return f"  no fault on the side of {result['side']}"
    where = f"{Path(result['file']).name}:{result['line']}" if result["file"] else result["modules"][0]
    hits = [hit for hit in HITS if result[f"{hit}_hit"]]
    return (
        f"  {'ACCEPTED' if result['passed'] else 'rejected'} {result['side']} {where} {result['kind']}: "
        f"{result['before'][:60]!r} -> {result['after'][:60]!r} ({result['change']:.0e}; origin: {' '.join(hits) or '-'})"
    )


def count_results(pairs: list[Pair], results: list[Result]) -> Counter[str]:
    """Return the totals of the results of some pairs."""
    names, out = {pair.name for pair in pairs}, Counter[str]()
    for result in (each for each in results if each["pair"] in names):
        if result["event"] in ("right", "error"):
            accepted = result.get("passed", False)
            out["pairs"] += 1
            out["accepted"] += accepted
            out["pairing found"] += accepted and result["automatic"]
            out["with layouts"] += accepted and not result["automatic"]
            out["false rejects"] += not accepted and result["event"] == "right"
            out["not built"] += result["event"] == "error"
            out["seconds"] += round(result.get("seconds", 0))
        elif result["event"] == "difference":
            out["differences"] += 1
            out["false accepts"] += result["passed"]
            out["refused"] += _is_refused(result)
        elif result["event"] == "fault" and result["kind"] != "none":
            out["faults"] += 1
            out["false accepts"] += result["passed"]
            out["refused"] += _is_refused(result)
            hits = [hit for hit in HITS if result[f"{hit}_hit"]]
            out.update(hits)
            out["named"] += bool(hits)
        if result["event"] == "fault":
            out["equivalent"] += result["equivalent"]
            out["did not run"] += result["failed"]
    return out


def _is_refused(result: Result) -> bool:
    return not result["passed"] and not result["reason"].startswith("FAIL")


COLUMNS = (
    "pairs",
    "not built",
    "pairing found",
    "with layouts",
    "false rejects",
    "differences",
    "faults",
    "false accepts",
    "refused",
    *HITS,
    "named",
    "equivalent",
    "did not run",
)


def print_totals(groups: dict[str, list[Pair]], results: list[Result]) -> None:
    """Print the table of totals, one row for each group of pairs."""
    print(f"\n| source | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}")
    for name, pairs in groups.items():
        counts = count_results(pairs, results)
        print(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")


def chosen_pairs(
    every: list[Pairs], pattern: str, given: dict[str, str]
) -> tuple[dict[str, list[Pair]], dict[str, list[str]]]:
    """Return the pairs to judge by source, and the paths of each source."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for source in every:
        missing = [name for name in source.needs if name not in given]
        pairs = [pair for pair in source if fnmatch.fnmatch(pair.name, pattern)]
        if missing and pairs:
            print(f"left out: {len(pairs)} pairs of {source.source}; give --source {missing[0]}=PATH", file=sys.stderr)
        elif pairs:
            groups[source.source] = pairs
    return groups, {source.source: [given[name] for name in source.needs if name in given] for source in every}


def _next(done: Queue[list[Result]], futures: list[Future[None]]) -> list[Result]:
    """Return the next results, or raise an exception of a thread that has stopped."""
    while True:
        try:
            return done.get(timeout=5)
        except Empty:
            if all(future.done() for future in futures) and done.empty():
                for future in futures:
                    future.result()
                raise SystemExit("a worker stopped before its pairs were judged") from None


def main() -> None:
    """Judge the pairs, and print a line for each result, then the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default="*", help="pattern of the names of pairs, e.g. 'equimo/*'")
    parser.add_argument("--faults", type=int, default=6, help="number of faults for each pair")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=PATH", help="the path of an optional source")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of pairs that are judged at the same time")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--list", action="store_true", help="only list the pairs")
    args = parser.parse_args()
    given = dict(each.split("=", 1) for each in args.source)
    every = sources()
    if args.list:
        for source in every:
            for pair in source:
                print(f"{pair.name} | {pair.jax} | {pair.torch} | {' '.join(source.needs)} | {pair.disagreement}")
        return
    for name, path in given.items():
        print(f"{name}: {revision(path)}", flush=True)
    groups, paths = chosen_pairs(every, args.pairs, given)
    start, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"] = cache
        pairs = [pair for group in groups.values() for pair in group]
        parts = [group[n : n + PART] for group in groups.values() for n in range(0, len(group), PART)]
        done: Queue[list[Result]] = Queue()

        def run(part: list[Pair]) -> None:
            for own in run_pairs(part, paths[part[0].source], args.faults, args.seed):
                done.put(own)

        futures = [pool.submit(run, part) for part in parts]
        for number in range(1, len(pairs) + 1):
            results += (own := _next(done, futures))
            print("\n".join(map(format_result, own)), flush=True)
            print(f"{number} of {len(pairs)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    optional = {source.source for source in every if source.needs}
    totals = {
        "all": pairs,
        "without optional sources": [pair for pair in pairs if pair.source not in optional],
        **groups,
    }
    print_totals(totals, results)
    counts = count_results(pairs, results)
    print(f"\n{time.perf_counter() - start:.0f} s; right pairs {counts['seconds']} s in total")
    sys.exit(bool(counts["false rejects"] or counts["false accepts"]))


if __name__ == "__main__":
    main()
