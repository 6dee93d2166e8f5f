"""Is every checkpoint of timm and transformers read as its own function, or refused?

    python -m benchmarks.zoo                        # every architecture and every class, then 300 random variations
    python -m benchmarks.zoo --only eva02           # those with this in their name
    python -m benchmarks.zoo --drawn 2000 --seed 1  # other variations
    python -m benchmarks.zoo --keys                 # every other model of the libraries: no format takes its keys

Every architecture is built at its own width and one block deep, filled with random weights, saved as a folder with its
config and as a bare state dict, read through `vit_torch.load`, and held to its library's output in float64.
`tests/peers/zoo` says what the outcomes mean.  A WRONG one sets the exit code.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.peers.zoo import of_timm, of_transformers, unjudged
from tests.peers.zoo.judging import ASSUMED, REFUSED, RIGHT, WRONG, Outcome, Peer, judge

VERDICTS = (RIGHT, ASSUMED, REFUSED, "impossible", WRONG)
Totals = dict[str, Counter[str]]


def judged(library: Any, build: Callable[[], Peer], name: str) -> Iterator[tuple[str, Outcome]]:
    """Build a model, save it in each way, and yield the way and what came of reading it."""
    try:
        peer = build()
        if peer.run is not None:
            peer.outputs()  # does the library itself compute it?
    except Exception as error:  # libraries refuse combinations of arguments by any exception
        yield "", Outcome("impossible", told=f"{name}: {type(error).__name__}: {error}"[:200])
        return
    with tempfile.TemporaryDirectory() as folder:
        for way, path, bare in library.cases(peer, Path(folder)):
            yield way, judge(peer, path, bare=bare)


def hold_keys() -> int:
    """Print the models that the harness cannot judge and a format takes, and how many there are; return that number."""
    found = 0
    for library, models in {"timm": unjudged.of_all_timm(), "transformers": unjudged.of_all_transformers()}.items():
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for name, build in models:
                try:
                    format = unjudged.taken(build, Path(folder) / "model.safetensors")
                except Exception:  # as many kinds as there are packages that a model may need
                    counts["not built"] += 1
                    continue
                counts["taken" if format else "refused"] += 1
                if format:
                    print(f"{WRONG:10} | {name} | keys | {format} | | the harness has no output of it", flush=True)
        print(f"{library}: {', '.join(f'{count} {what}' for what, count in counts.items())}", flush=True)
        found += counts["taken"]
    return found


def line(name: str, way: str, outcome: Outcome) -> str:
    """Return a row of the table."""
    distance = f"{outcome.distance:.1e}" if outcome.format else ""
    return f"{outcome.verdict:10} | {name} | {way} | {outcome.format} | {distance} | {outcome.told}"


def main() -> None:
    """Print a row for each checkpoint, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures and classes with this in their name")
    parser.add_argument("--drawn", type=int, default=300, help="number of random variations")
    parser.add_argument("--seed", type=int, default=0, help="of the first variation")
    parser.add_argument("--library", nargs="+", default=["timm", "transformers"], help="timm, transformers")
    parser.add_argument("--quiet", action="store_true", help="print WRONG rows alone")
    parser.add_argument("--keys", action="store_true", help="go through every other model of the libraries instead")
    given = parser.parse_args()
    if given.keys:
        sys.exit(bool(hold_keys()))
    totals: Totals = defaultdict(Counter)
    start = time.process_time()

    def run(group: str, library: Any, name: str, options: dict[str, Any], note: str = "") -> None:
        label = f"{note}{name} {options or ''}".strip()
        if given.only not in label:
            return
        for way, outcome in judged(library, lambda: library.peer(name, **options), label):
            totals[f"{group}, {way or 'not built'}"][outcome.verdict] += 1
            if outcome.verdict == WRONG or not given.quiet:
                print(line(label, way, outcome), flush=True)

    if "timm" in given.library:
        for name in of_timm.missing() if not given.only else ():
            totals["timm, of a signature that make test lacks"][WRONG] += 1
            print(f"no test takes one like {name}: add it to DISTINCT")
        for name in of_timm.architectures():
            run("timm", of_timm, name, {})
            side = of_timm.patch(name)
            run("timm, 2 x 8 patches", of_timm, name, {"img_size": (2 * side, 8 * side)})
        for seed in range(given.seed, given.seed + given.drawn):
            run("timm, drawn", of_timm, *of_timm.drawn(seed), note=f"#{seed} ")
    if "transformers" in given.library:
        for name in (*of_transformers.CLASSES, *of_transformers.others()):
            run("transformers", of_transformers, name, {})
        for seed in range(given.seed, given.seed + given.drawn):
            run("transformers, drawn", of_transformers, *of_transformers.drawn(seed), note=f"#{seed} ")
    print(f"\n| checkpoints | {' | '.join(VERDICTS)} |\n|{' --- |' * (len(VERDICTS) + 1)}")
    for group, counts in totals.items():
        print(
            f"| {group} | "
            + " | ".join(str(counts[v]) for v in ("right", "assumed", "refused", "impossible", WRONG))
            + " |"
        )
    print(f"\n{time.process_time() - start:.0f} CPU seconds", file=sys.stderr)
    sys.exit(any(counts[WRONG] for counts in totals.values()))


if __name__ == "__main__":
    main()
