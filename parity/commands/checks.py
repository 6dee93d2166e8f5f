"""The commands that run models, once their arguments are read; see `parity.__main__`."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parity.checkpoints.config_overrides import assignments
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint
from parity.commands.printing import facts_of, source, spinner, told
from parity.terminal import report as show
from parity.terminal import say
from vit_spec import InputError


def check(given: argparse.Namespace) -> int:
    """Run both twins on the weights of SRC, or SRC against OTHER, and say PASS or the first part that differs."""
    from parity.comparison import html_report

    gates = ("level", "dtype", "steps", "no_gradients", "as_is", "html")
    if given.against and (asked := [f"--{name.replace('_', '-')}" for name in gates if getattr(given, name)]):
        raise InputError(f"--against compares two files in float64, forward, and has no {' or '.join(asked)}: leave it out")
    if given.html:
        html_report.ready(given.html)
    checkpoint = source(given)
    other = load(given.against) if given.against else None
    written: list[Path] = []
    with _frameworks("check runs both twins"), spinner(quiet=given.json) as progress:
        report = _against(checkpoint, other, given, progress) if other else _twins(checkpoint, given, progress)
        if given.html:
            progress("the report")
            written = html_report.write(report, checkpoint, given.html, source=given.source, seed=given.seed)
    if given.json:
        _print_json({**report.facts(), **facts_of(checkpoint)})
    else:
        say(*told(checkpoint), *(f"wrote {path}" for path in written))
        show(report)
    return 0 if report.passed else 1


def diagnose(given: argparse.Namespace) -> int:
    """Find out why SRC does not give the outputs that it should: which cause explains it, and what mends it."""
    from parity.comparison import diagnosis

    said = assignments(given.set)
    if given.logits:
        checkpoint = diagnosis.load(given.source, given.logits, format=given.format, given=said)
    else:
        checkpoint = source(given)
    said |= {each.field: each.value for each in checkpoint.assumed if each.why == diagnosis.AS_SHOWN}
    named = diagnosis.Source(given.source, given.format, said)
    with _frameworks("diagnose runs the PyTorch twin"), spinner(quiet=given.json) as progress:
        if given.against:
            found = diagnosis.against(
                checkpoint,
                load(given.against),
                seed=given.seed,
                source=named,
                progress=_counted(progress),
                pairs=given.pairs,
            )
        else:
            expected = diagnosis.read(given.logits, checkpoint.config)
            found = diagnosis.diagnose(checkpoint, expected, source=named, progress=_counted(progress), pairs=given.pairs)
    if given.json:
        _print_json({**found.facts(), **facts_of(checkpoint)})
    else:
        say(*told(checkpoint))
        show(found)
    return 0 if found.passed else 1


def golden(given: argparse.Namespace) -> int:
    """Record what both twins agree on, verify it with later versions or on other hardware, or print its history."""
    return {"record": _record, "verify": _verify, "table": _table}[given.what](given)


def _record(given: argparse.Namespace) -> int:
    from parity.comparison import golden

    subject = golden.read_subject(given.subject, format=given.format, given=assignments(given.set))
    with _frameworks("golden record runs both twins"), spinner(quiet=given.json) as progress:
        made = golden.record(subject, given.file, seed=given.seed, force=given.force, progress=progress)
    size = Path(given.file).stat().st_size
    if given.json:
        _print_json({"file": given.file, "tensors": len(made.tensors), "bytes": size})
    else:
        say(f"{given.file}: {len(made.tensors)} tensors, {size:,} bytes")
    return 0


def _verify(given: argparse.Namespace) -> int:
    from parity.comparison import golden

    weights = load(given.weights) if given.weights else None
    found = []
    with _frameworks("golden verify runs either twin"), spinner(quiet=given.json) as progress:
        for path in given.files:
            found.append(golden.verify(path, weights=weights, only=given.only, append=given.append, progress=progress))
    if given.json:
        _print_json({"passed": all(each.passed for each in found), "files": [each.facts() for each in found]})
    else:
        show("\n\n".join(map(str, found)))
    return 0 if all(each.passed for each in found) else 1


def _table(given: argparse.Namespace) -> int:
    from parity.comparison import golden

    history = golden.table(given.files)
    if given.json:
        _print_json(history.facts())
    else:
        show(history)
    return 0


def _twins(checkpoint: Checkpoint, given: argparse.Namespace, progress: Any) -> Any:
    from parity.comparison.twins import compare

    options: dict[str, Any] = {"backward": not given.no_gradients, "strict": not given.as_is}
    options |= {name: value for name in ("level", "dtype", "steps") if (value := getattr(given, name))}
    return compare(checkpoint.config, checkpoint, seed=given.seed, progress=progress, **options)


def _against(checkpoint: Checkpoint, other: Checkpoint, given: argparse.Namespace, progress: Any) -> Any:
    from parity.comparison.two_files import compare_files

    return compare_files(checkpoint, other, seed=given.seed, progress=progress)


def _counted(progress: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Say what is tried, and how many of how many are done."""
    return lambda what, done, total: progress(f"{done:,} of {total:,}: {what}")


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, allow_nan=False))


@contextmanager
def _frameworks(what: str) -> Iterator[None]:
    """Say which package a command lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"{what}, and {error.name} is not installed: install it") from None
