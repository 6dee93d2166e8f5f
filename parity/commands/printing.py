"""Helpers that several commands share: load SRC and OTHER, describe a checkpoint, print JSON, show progress."""

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from parity.checkpoints import metadata
from parity.checkpoints.array_transfer import ByteProgress
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.format_file import read_format
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint
from parity.comparison.progress import StepProgress
from parity.terminal import console
from vit_spec import InputError
from vit_spec.printable import printable


def load_source(args: argparse.Namespace) -> Checkpoint:
    """Open the checkpoint SRC with the options that say how it is read."""
    return load(args.source, **reading_options(args))


def load_other(args: argparse.Namespace) -> Checkpoint | None:
    """Open the checkpoint of --against, or return None without one.

    Raises:
        InputError: it cannot be read; if options would help, which are only for SRC, the message says how to give them.
    """
    if not args.against:
        return None
    try:
        return load(args.against)
    except InputError as error:
        if not any(option in str(error) for option in ("--from", "--set", "--strip", "--ignore")):
            raise
        command = f"python -m parity convert {shlex.quote(args.against)} OTHER.safetensors --to torch"
        raise InputError(
            f"{error}; here these options are for {args.source}: add them to `{command}`, and compare with its result"
        ) from None


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `load` that --from, --set, --strip and --ignore give."""
    return {"format": args.format, "given": parse_overrides(args.set), "strip": args.strip, "ignore": args.ignore}


def check_format_files_used(args: argparse.Namespace, *names: str) -> None:
    """Raise InputError if --format-file defines a format that is not in `names`, those that a command reads and writes."""
    for path in args.format_file:
        defined = read_format(path).name
        if defined not in [name.partition("@")[0].partition(":")[0] for name in names]:
            raise InputError(
                f"{path} is not used: {args.source} is in format {names[0]}, not {defined}; --from {defined} shows why, "
                f"or leave --format-file out"
            )


def checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of the JSON output that describe a checkpoint."""
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "container": checkpoint.container,
        "config": asdict(checkpoint.config),
        "assumed": [asdict(each) for each in checkpoint.assumed],
        "overridden": [asdict(each) for each in checkpoint.overridden],
        "not_read": list(checkpoint.left),
        **metadata.to_json_fields(checkpoint),
    }


def print_json(schema: str, facts: dict[str, Any]) -> None:
    """Print the JSON object of a command.

    Args:
        schema: name and version of the fields; docs/reference/json.md has the rule by which the version changes.
        facts: the fields.
    """
    print(json.dumps({"schema": schema, **facts}, allow_nan=False))


def describe_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines that describe a checkpoint: its file and format, the assumptions, the overrides and the keys not read."""
    file = f"{name}, " if (name := Path(checkpoint.path).name) else ""
    yield f"read: {file}format {checkpoint.format}, container {checkpoint.container}"
    yield from metadata.summary_lines(checkpoint)
    reasons: dict[str, list[str]] = {}
    for each in checkpoint.assumed:
        reasons.setdefault(each.why, []).append(f"{each.field}={each.value!r}")
    for why, fields in reasons.items():
        yield f"assumed, {why}: {', '.join(fields)}"
    if reasons:
        yield "(override with --set FIELD=VALUE)"
    for override in checkpoint.overridden:
        yield f"overridden: {override.describe('--set')}"
    for line in checkpoint.left:
        yield f"not read: {line}"


@contextmanager
def transfer_progress(quiet: bool) -> Iterator[ByteProgress | None]:
    """Show a progress bar with GB/s if stderr is a terminal.

    Yields:
        A function to call with the bytes done and the total, or None if nothing is shown.
    """
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield None
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f} %  {task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task, start = bar.add_task("", total=None, speed=""), time.perf_counter()

        def update(done: int, total: int) -> None:
            speed = f"{done / 1e9 / max(time.perf_counter() - start, 1e-3):.2f} GB/s"
            bar.update(task, completed=done, total=total, speed=speed)

        yield update


@contextmanager
def spinner(quiet: bool) -> Iterator[StepProgress]:
    """Show a spinner with the current step if stderr is a terminal.

    Yields:
        A function to call with a description of each step.
    """
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda what: None
        return
    with screen.status("") as status:
        yield lambda what: status.update(Text(printable(f"{what} ...")))


def make_table(title: str | None, *columns: str) -> Table:
    """Return a table without borders.

    Args:
        columns: the column headers; ">" before a header aligns its column to the right, for numbers.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold")
    return table
