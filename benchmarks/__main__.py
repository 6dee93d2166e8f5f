"""Measure both twins beside other libraries, on this machine: `python -m benchmarks`.

    python -m benchmarks                                     # three models, on the CPU
    python -m benchmarks --quick                             # one small model, four contestants; two minutes
    python -m benchmarks --gpu                               # training steps and latency in bfloat16 on a GPU
    python -m benchmarks --models vit_s16 --only 'timm*'     # some models, and some contestants
    python -m benchmarks --source big_vision=CLONE           # also a library that has no package
    python -m benchmarks --json results.json --picture results.svg

Every contestant has the same weights, which `parity` converts to its format.  Its logits, its loss and the norm of its
gradient are compared with those of our twin, and one that differs is left out.  Each is in a process of its own; the
processes take turns.  docs/performance.md says what is measured and how, and has the results.  Libraries that are not
installed, and contestants that fail, are left out, with the reason.

Exit codes: 0 measured; 1 a contestant differs from our twin; 2 invalid input; 130 interrupted.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import vit_spec
from benchmarks import lines, plan, report, turns
from benchmarks.machine import hardware, revision, versions
from benchmarks.peers import LIBRARIES, contestants
from parity.checkpoints.atomic_write import atomic_replace, check_replaceable
from parity.commands.run_command import run_command
from parity.terminal import print_note
from vit_spec import InputError, ViTConfig, nearest


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError with a one-line message, which suggests a similar option."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], self._option_string_actions)}")
        return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    arguments: the command line without the program name; None means the arguments of this process.
    """
    return run_command(lambda: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    assert __doc__ is not None
    parser = Parser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="MODEL", help="named models, see `python -m parity models`"
    )
    parser.add_argument(
        "--batch", nargs="+", default=[], metavar="MODEL=N", help="batch sizes that differ from the default"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help=f"contestants ({', '.join(LIBRARIES)}; some also with -compiled, -bfloat16, -compiled-bfloat16), "
        f"patterns such as 'timm*', or other measurements ({', '.join(lines.LINES)}); the twins that they are compared "
        "with are added",
    )  # fmt: skip
    parser.add_argument(
        "--source", nargs="+", default=[], metavar="LIBRARY=PATH", action="extend",
        help="folders of libraries that have no package, or need another version of one",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one small model and few contestants, two minutes")
    parser.add_argument("--gpu", action="store_true", help="measure the first GPU, and not the CPU")
    parser.add_argument("--turns", type=int, default=3, help="how often each function is timed (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the throughput")
    return parser


def _run(args: argparse.Namespace) -> int:
    chosen = make_plan(args)
    sources = parse_pairs(args.source, "--source", [name for name, library in LIBRARIES.items() if library.by_source])
    for library, path in sources.items():
        if not Path(path).is_dir():
            raise InputError(f"--source {library}={path}: there is no such folder: give that of the library")
    for path in filter(None, (args.json, args.picture)):
        check_output(path)
    configs = {block.model: named_config(block.model) for block in chosen.blocks}
    for results in run(chosen, configs, sources):
        if args.json:
            with atomic_replace(args.json) as new:
                new.write_text(json.dumps(results, indent=1) + "\n")
    print(report.markdown(results))
    if args.picture and results["results"]:
        with atomic_replace(args.picture) as new:
            report.draw(results, new)
    elif args.picture:
        print_note(f"{args.picture} is not written: nothing to draw was measured")
    return int(any(each["reason"].startswith(turns.WRONG) for each in results["skipped"]))


def run(chosen: plan.Plan, configs: dict[str, ViTConfig], sources: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Measure everything of a plan, and print what is done to the standard error.

    Args:
        chosen: the plan.
        configs: the config of each of its models.
        sources: the folder of each library that is not installed as a package.

    Yields:
        What `--json` writes: all that is measured, after each block of the plan and after each line.

    Raises:
        InputError: as for `turns.measure`.
    """

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(Path(__file__).parent),
        "hardware": hardware(),
        "versions": versions(),
        "sources": {library: revision(path) for library, path in sources.items()},
        "turns": chosen.turns,
        "results": [],
        "skipped": [],
        "lines": {},
    }
    for found in turns.measure(chosen, configs, sources, say) if chosen.blocks else ():
        results |= found
        yield results
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.lines:
            results["lines"][name] = lines.measure(name, Path(folder), say)
            yield results


def make_plan(args: argparse.Namespace) -> plan.Plan:
    """Return the plan for the arguments.

    Raises:
        InputError: an unknown name, a number that is not positive, or options that do not combine.
    """
    if args.turns < 1:
        raise InputError(f"--turns is {args.turns}: give at least 1")
    if args.picture and args.picture.suffix.lower() != ".svg":
        raise InputError(f"--picture {args.picture} does not end in .svg: the picture is an SVG file")
    if args.quick and args.gpu:
        raise InputError("--quick and --gpu are different plans: give one of them")
    defaults = plan.QUICK_BATCHES if args.quick else plan.GPU_BATCHES if args.gpu else plan.CPU_BATCHES
    sizes = parse_pairs(args.batch, "--batch", args.models or list(defaults))
    for model, size in sizes.items():
        if not size.isdecimal() or int(size) < 1:
            raise InputError(f"--batch {model}={size}: give a positive number of images")
    batches = {model: int(sizes.get(model, defaults.get(model, plan.DEFAULT_BATCH))) for model in args.models or defaults}
    names = [*(each.name for each in contestants()), *lines.LINES]
    for name in args.only:
        if name not in lines.LINES and not plan.chosen([name], contestants()):
            hint = nearest(name, names) or f": give some of {', '.join(names)}"
            raise InputError(f"--only {name} is no contestant or measurement{hint}")
    peers = [name for name in args.only if name not in lines.LINES]
    if (args.quick or args.gpu) and (other := [name for name in args.only if name in lines.LINES]):
        raise InputError(f"--only {other[0]} is not measured with --quick or --gpu: leave that option out")
    if args.only and not peers:
        if args.picture:
            raise InputError(f"--picture draws contestants, and --only {' '.join(args.only)} has none: leave --picture out")
        batches = {}
    if args.gpu:
        return plan.gpu_plan(batches, peers, args.turns)
    if args.quick:
        return plan.quick_plan(batches, peers, args.turns)
    chosen_lines = tuple(name for name in lines.LINES if not args.only or name in args.only)
    return plan.cpu_plan(batches, peers, args.turns, chosen_lines)


def parse_pairs(given: list[str], option: str, names: list[str]) -> dict[str, str]:
    """Return the values of an option such as `--batch MODEL=N ...` by their names.

    Raises:
        InputError: a pair has no "=", or a name that is not among `names`.
    """
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise InputError(f"{option} {pair}: give NAME=VALUE, such as {names[0] if names else 'NAME'}=...")
        if name not in names:
            raise InputError(f"{option} {name}{nearest(name, names) or f': give one of {chr(44).join(names)}'}")
        found[name] = value
    return found


def named_config(model: str) -> ViTConfig:
    """Return the config of a named model, with 1,000 classes.

    Raises:
        InputError: there is no such model.
    """
    return vit_spec.get(model, num_classes=1000)


def check_output(path: Path) -> None:
    """Check that a file can be written, and later replaced.

    Raises:
        InputError: it is not a file, or its folder does not exist or cannot be written.
    """
    check_replaceable(path)
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder; give the name of a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = f"{path} cannot be written: {path.parent}: {error.strerror}"
        raise InputError(f"{reason}; give a file in a folder that exists and can be written") from None


if __name__ == "__main__":
    sys.exit(main())
