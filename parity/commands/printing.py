"""What the commands read and print alike."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from parity.checkpoints import metadata
from parity.checkpoints.config_overrides import assignments
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint
from parity.terminal import console
from vit_spec.printable import printable


def source(given: argparse.Namespace) -> Checkpoint:
    """Open SRC, with what --from and --set say of it."""
    return load(given.source, format=given.format, given=assignments(given.set))


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What of a checkpoint goes into JSON."""
    return {
        "format": checkpoint.format,
        "container": checkpoint.container,
        "config": asdict(checkpoint.config),
        "assumed": [asdict(each) for each in checkpoint.assumed],
        "left": list(checkpoint.left),
        **metadata.facts(checkpoint),
    }


def told(checkpoint: Checkpoint) -> Iterator[str]:
    """Say what was read, what of it was assumed, and what was left."""
    yield f"read: format {checkpoint.format}, container {checkpoint.container}"
    yield from metadata.told(checkpoint)
    reasons: dict[str, list[str]] = {}
    for each in checkpoint.assumed:
        reasons.setdefault(each.why, []).append(f"{each.field}={each.value!r}")
    for why, fields in reasons.items():
        yield f"assumed, {why}: {', '.join(fields)}"
    if reasons:
        yield "(--set FIELD=VALUE says otherwise)"
    for line in checkpoint.left:
        yield f"not read: {line}"


@contextmanager
def transfer(quiet: bool) -> Iterator[Any]:
    """Show a bar with GB/s on a terminal; yield what to call with the bytes done and those in all."""
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
def spinner(quiet: bool) -> Iterator[Any]:
    """Show on a terminal what is being done; yield what to call with it."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda what: None
        return
    with screen.status("") as status:
        yield lambda what: status.update(Text(printable(f"{what} ...")))


def columns(title: str | None, *columns: str) -> Table:
    """A table without frames; a column's name starts with > where it holds numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold")
    return table
