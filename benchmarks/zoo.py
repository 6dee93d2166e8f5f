"""Test that every checkpoint of timm and transformers is read as the function that its library computes, or is refused.

    python -m benchmarks.zoo                        # all architectures and classes, then 300 random variations per library
    python -m benchmarks.zoo --only eva02           # only architectures and classes with this in their name
    python -m benchmarks.zoo --drawn 2000 --seed 1  # other random variations
    python -m benchmarks.zoo --keys                 # every other model of the libraries: no format may accept its keys
    python -m benchmarks.zoo --up-to-base           # only folders of timm's architectures up to the size of ViT-B

With --up-to-base, it prints how many architectures are right, and the reasons for which the others are refused.  It counts
architectures once by name, and once without those that differ from another one in the image size only.

It prints the table "Checkpoints of other libraries" of docs/measurements/conversion.md.  Every architecture is built at its
own width with one block, filled with random weights, and saved as a folder with its config and as a bare state dict.
`vit_torch.load` reads it, and the outputs are compared with the library's in float64.  `tests/peers/zoo/outcomes.py`
defines the outcomes.  The script exits with 1 if an outcome is WRONG.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.peers.zoo import of_timm, of_transformers, other_models
from tests.peers.zoo.outcomes import ASSUMED, REFUSED, RIGHT, WRONG, Outcome, Peer, check_reading

NOT_BUILT = "not built"
VERDICTS = (RIGHT, ASSUMED, REFUSED, NOT_BUILT, WRONG)
Totals = dict[str, Counter[str]]


def check_model(library: Any, build: Callable[[], Peer], name: str) -> Iterator[tuple[str, Outcome]]:
    """Build a model, save it in each way, and yield the way and the outcome of reading it."""
    try:
        peer = build()
        if peer.run is not None:
            peer.outputs()  # raises if the library itself cannot compute them
    except Exception as error:  # libraries refuse combinations of arguments with any exception
        yield "", Outcome(NOT_BUILT, details=f"{name}: {type(error).__name__}: {error}"[:200])
        return
    with tempfile.TemporaryDirectory() as folder:
        for saved_as, path, bare in library.save_each_way(peer, Path(folder)):
            yield saved_as, check_reading(peer, path, bare=bare)


def check_keys() -> int:
    """Print the models without a peer whose keys a format accepts, and the counts; return the number of such models."""
    accepted = 0
    for library, models in {
        "timm": other_models.timm_models(),
        "transformers": other_models.transformers_classes(),
    }.items():
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for name, build in models:
                try:
                    format = other_models.accepting_format(build, Path(folder) / "model.safetensors")
                except Exception:  # each optional package of a model raises its own exceptions
                    counts[NOT_BUILT] += 1
                    continue
                counts["accepted" if format else "refused"] += 1
                if format:
                    print(f"{WRONG:10} | {name} | keys | {format} | | there is no output to compare with", flush=True)
        print(f"{library}: {', '.join(f'{count} {what}' for what, count in counts.items())}", flush=True)
        accepted += counts["accepted"]
    return accepted


def check_up_to_base() -> int:
    """Print the outcomes of the folders of timm's architectures up to base size, by reason; return the number of WRONG."""
    structures, reasons = of_timm.up_to_base(), defaultdict(list)
    totals: Totals = defaultdict(Counter)
    distinct: dict[Any, str] = {}
    for name, structure in structures.items():
        outcome = next(outcome for way, outcome in check_model(of_timm, lambda name=name: of_timm.peer(name), name))
        totals["timm, up to base size"][outcome.verdict] += 1
        if distinct.setdefault(structure, name) == name:
            totals["timm, up to base size, distinct without the image size"][outcome.verdict] += 1
        if outcome.verdict != RIGHT:
            reason = outcome.details.replace(name, "NAME").removeprefix("FILE: ")
            reasons[outcome.verdict, re.sub(r"(has other keys than).*", r"\1 a ViT", reason)].append(name)
    for (verdict, reason), names in sorted(reasons.items(), key=lambda each: -len(each[1])):
        print(f"{verdict:10} | {len(names):3} | {reason} | {', '.join(names)}", flush=True)
    print_totals(totals)
    return sum(counts[WRONG] for counts in totals.values())


def print_totals(totals: Totals) -> None:
    """Print the table of totals."""
    print(f"\n| checkpoints | {' | '.join(VERDICTS)} |\n|{' --- |' * (len(VERDICTS) + 1)}")
    for group, counts in totals.items():
        print(f"| {group} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |")


def format_row(name: str, saved_as: str, outcome: Outcome) -> str:
    """Return a row of the table."""
    distance = f"{outcome.distance:.1e}" if outcome.format else ""
    return f"{outcome.verdict:10} | {name} | {saved_as} | {outcome.format} | {distance} | {outcome.details}"


def main() -> None:
    """Print a row for each checkpoint, then the table of totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="check only architectures and classes with this in their name")
    parser.add_argument("--drawn", type=int, default=300, help="number of random variations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random variation")
    parser.add_argument("--library", nargs="+", default=["timm", "transformers"], help="timm, transformers or both")
    parser.add_argument("--quiet", action="store_true", help="print only WRONG rows")
    parser.add_argument("--keys", action="store_true", help="check the keys of every other model of the libraries instead")
    parser.add_argument("--up-to-base", action="store_true", help="check folders of timm's ViTs up to base size only")
    args = parser.parse_args()
    if args.up_to_base:
        sys.exit(bool(check_up_to_base()))
    if args.keys:
        sys.exit(bool(check_keys()))
    totals: Totals = defaultdict(Counter)
    start = time.process_time()

    def run(group: str, library: Any, name: str, options: dict[str, Any], note: str = "") -> None:
        label = f"{note}{name} {options or ''}".strip()
        if args.only not in label:
            return
        for saved_as, outcome in check_model(library, lambda: library.peer(name, **options), label):
            totals[f"{group}, {saved_as or NOT_BUILT}"][outcome.verdict] += 1
            if outcome.verdict == WRONG or not args.quiet:
                print(format_row(label, saved_as, outcome), flush=True)

    if "timm" in args.library:
        for name in of_timm.untested_architectures() if not args.only else ():
            totals["timm, configurations that the tests lack"][WRONG] += 1
            print(f"no test has the configuration of {name}: add it to DISTINCT")
        for name in of_timm.architectures():
            run("timm", of_timm, name, {})
            side = of_timm.patch_side(name)
            run("timm, 2 x 8 patches", of_timm, name, {"img_size": (2 * side, 8 * side)})
        for seed in range(args.seed, args.seed + args.drawn):
            run("timm, random variations", of_timm, *of_timm.random_variation(seed), note=f"#{seed} ")
    if "transformers" in args.library:
        for name in (*of_transformers.CLASSES, *of_transformers.other_classes()):
            run("transformers", of_transformers, name, {})
        for seed in range(args.seed, args.seed + args.drawn):
            run(
                "transformers, random variations",
                of_transformers,
                *of_transformers.random_variation(seed),
                note=f"#{seed} ",
            )
    print_totals(totals)
    print(f"\n{time.process_time() - start:.0f} CPU seconds", file=sys.stderr)
    sys.exit(any(counts[WRONG] for counts in totals.values()))


if __name__ == "__main__":
    main()
