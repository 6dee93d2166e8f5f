"""The commands check, diagnose, assert and golden, which run models, with parsed arguments; see `parity.__main__`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint
from parity.commands.printing import (
    check_format_files_used,
    checkpoint_facts,
    describe_checkpoint,
    load_other,
    load_source,
    print_json,
    reading_options,
    spinner,
)
from parity.comparison.progress import CountProgress, StepProgress
from parity.terminal import print_lines, print_report
from vit_spec import InputError

if TYPE_CHECKING:
    from parity.comparison.diagnosis import CommandLineSource
    from parity.comparison.golden import Verification
    from parity.comparison.invariance.twins import TwinsInvariance
    from parity.comparison.report import Report
    from parity.comparison.two_files import FileReport


class _CheckReport(Protocol):
    """The result of a check; `str` gives it as text."""

    @property
    def passed(self) -> bool:
        """Whether the check passes."""

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON."""


def check(args: argparse.Namespace) -> int:
    """Compare both twins on the weights of SRC, or SRC with OTHER, and print PASS or the first part that differs."""
    from parity.comparison import html_report

    _check_options_combine(args)
    if args.html:
        html_report.check_output_path(args.html)
    checkpoint = load_source(args)
    other = load_other(args)
    check_format_files_used(args, checkpoint.format, *([other.format] if other else []))
    written: list[Path] = []
    with spinner(quiet=args.json) as progress:
        report: _CheckReport
        if args.invariance:
            report = _test_invariance(checkpoint, args, progress)
        elif other:
            report = _compare_checkpoints(checkpoint, other, args, progress)
        else:
            report = of_twins = _compare_twins(checkpoint, args, progress)
            if args.html:
                progress("the HTML report")
                source = _command_line_source(args)
                words = source.options({})
                written = html_report.write(
                    of_twins, checkpoint, args.html, source=source.name, options=words, seed=args.seed
                )
    if args.json:
        print_json("parity.check/1", {**report.facts(), **checkpoint_facts(checkpoint)})
    else:
        print_lines(*describe_checkpoint(checkpoint), *(f"wrote {path}" for path in written))
        print_report(report)
    return 0 if report.passed else 1


def _command_line_source(args: argparse.Namespace) -> "CommandLineSource":
    """Return SRC with the options that say how it is read."""
    from parity.comparison.diagnosis import CommandLineSource

    given = parse_overrides(args.set)
    return CommandLineSource(args.source, args.format, given, args.strip, tuple(args.ignore), tuple(args.format_file))


def diagnose(args: argparse.Namespace) -> int:
    """Find out why SRC does not give the expected outputs, and print the cause and how to repair it."""
    from parity.comparison import diagnosis

    if args.logits and args.seed is not None:
        raise InputError("--seed is of the images for --against, and --logits has its own: leave --seed out")
    overrides = parse_overrides(args.set)
    if args.logits:
        checkpoint, overrides = diagnosis.load_checkpoint(
            args.source, args.logits, format=args.format, given=overrides, strip=args.strip, ignore=args.ignore
        )
    else:
        checkpoint = load_source(args)
    other = load_other(args)
    check_format_files_used(args, checkpoint.format, *([other.format] if other else []))
    source = replace(_command_line_source(args), given=overrides)
    with spinner(quiet=args.json) as progress:
        if other:
            found = diagnosis.diagnose_against(
                checkpoint,
                other,
                seed=args.seed or 0,
                source=source,
                progress=_with_count(progress),
                pairs=args.pairs,
            )
        else:
            expected = diagnosis.read_expected_outputs(args.logits, checkpoint.config)
            found = diagnosis.diagnose(
                checkpoint, expected, source=source, progress=_with_count(progress), pairs=args.pairs
            )
    if args.json:
        print_json("parity.diagnose/1", {**found.facts(), **checkpoint_facts(checkpoint)})
    else:
        print_lines(*describe_checkpoint(checkpoint))
        print_report(found)
    return 0 if found.passed else 1


def assert_pair(args: argparse.Namespace) -> int:
    """Compare the Flax and the PyTorch model that a function of your own returns, and print the verdict."""
    from parity.comparison.any_model import named_pair, provenance, verdict
    from parity.comparison.any_model.report import UnequalWeightsError

    try:
        with spinner(quiet=args.json) as progress:
            progress("both models")
            report = named_pair.compare_named_pair(args.function, args.level)
        passed, text, facts = report.passed, str(report), report.facts()
    except UnequalWeightsError as error:
        passed, text = False, f"FAIL: {error}"
        facts = verdict.unequal_weights_facts(error, args.level or "precision", provenance.framework_versions())
    except InputError as error:
        if args.json:
            print_json(verdict.SCHEMA, verdict.error_facts(error))
        raise
    if args.json:
        print_json(verdict.SCHEMA, facts)
    else:
        print_report(text)
    return 0 if passed else 1


def golden(args: argparse.Namespace) -> int:
    """Record a golden file of a model, verify it with other library versions or hardware, or print its history."""
    return {"record": _record, "verify": _verify, "table": _table}[args.what](args)


def _record(args: argparse.Namespace) -> int:
    from parity.comparison import golden

    model = golden.read_model(args.subject, **reading_options(args))
    with spinner(quiet=args.json) as progress:
        recorded = golden.record(model, args.file, seed=args.seed, force=args.force, progress=progress)
    size = Path(args.file).stat().st_size
    if args.json:
        facts = {"file": args.file, "tensor_count": len(recorded.tensors), "bytes": size}
        print_json("parity.golden-record/1", {**facts, "unjudged": [each.facts() for each in recorded.unjudged]})
    else:
        description = describe_checkpoint(model) if isinstance(model, Checkpoint) else ()
        print_lines(
            *description, *map(str, recorded.unjudged), f"{args.file}: {len(recorded.tensors)} tensors, {size:,} bytes"
        )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from parity.comparison import golden

    options = reading_options(args)
    if any(options.values()) and not args.weights:
        raise InputError("--from, --set, --strip and --ignore say how --weights is read: give --weights, or leave them out")
    weights = load(args.weights, **options) if args.weights else None
    for path in args.files:
        golden.Golden.read(path)  # refuse a wrong file before models run, which can take minutes
    results: list[Verification] = []
    try:
        with spinner(quiet=args.json) as progress:
            for path in args.files:
                results.append(golden.verify(path, weights=weights, only=args.only, append=args.append, progress=progress))
    finally:
        passed = len(results) == len(args.files) and all(each.passed for each in results)
        if results:  # also if a later file is refused: a result may be a FAIL, and may have been appended
            _print_verifications(results, passed, args)
    return 0 if passed else 1


def _print_verifications(results: "Sequence[Verification]", passed: bool, args: argparse.Namespace) -> None:
    if args.json:
        print_json("parity.golden-verify/1", {"passed": passed, "files": [each.facts() for each in results]})
    else:
        print_report("\n\n".join(map(str, results)))


def _table(args: argparse.Namespace) -> int:
    from parity.comparison import golden

    history = golden.table(args.files)
    if args.json:
        print_json("parity.golden-table/1", history.facts())
    else:
        print_report(history)
    return 0


def _check_options_combine(args: argparse.Namespace) -> None:
    """Raise InputError for options of `check` that do not combine."""
    of_twins = ("level", "steps", "no_gradients", "as_is", "html")
    modes = (
        ("invariance", "tests whether the outputs of each twin depend on the batch", ("against", *of_twins)),
        ("against", "compares only the forward passes of two checkpoints, in float64", ("dtype", *of_twins)),
    )
    for mode, what, excluded in modes:
        if getattr(args, mode) and (given := [f"--{name.replace('_', '-')}" for name in excluded if getattr(args, name)]):
            raise InputError(f"--{mode} {what}: remove {' and '.join(given)}")
    if args.steps and args.level != "train":
        raise InputError("--steps is the number of optimizer steps for --level train: give both, or leave it out")
    if args.dtype and args.level == "function":
        raise InputError("--level function compares only in float64: give --level precision, or leave --dtype out")


def _test_invariance(checkpoint: Checkpoint, args: argparse.Namespace, progress: StepProgress) -> "TwinsInvariance":
    from parity.comparison.invariance.twins import twins_invariance

    return twins_invariance(checkpoint, seed=args.seed, dtype=args.dtype or "float32", progress=progress)


def _compare_twins(checkpoint: Checkpoint, args: argparse.Namespace, progress: StepProgress) -> "Report":
    from parity.comparison.twins import compare

    options: dict[str, Any] = {"backward": not args.no_gradients, "strict": not args.as_is}
    options |= {name: value for name in ("level", "dtype", "steps") if (value := getattr(args, name))}
    return compare(checkpoint.config, checkpoint, seed=args.seed, progress=progress, **options)


def _compare_checkpoints(
    checkpoint: Checkpoint, other: Checkpoint, args: argparse.Namespace, progress: StepProgress
) -> "FileReport":
    from parity.comparison.two_files import compare_files

    sources = args.source, args.against
    return compare_files(checkpoint, other, sources=sources, seed=args.seed, progress=progress)


def _with_count(progress: StepProgress) -> CountProgress:
    """Return a progress function that writes the number done and the total number before the description."""
    return lambda what, done, total: progress(f"{done:,} of {total:,}: {what}")
