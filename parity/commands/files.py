"""The commands that read and write files, once their arguments are read; see `parity.__main__`."""

import argparse
import json
import re
import time
from dataclasses import asdict
from typing import Any

from rich.table import Table

import vit_spec
from parity.checkpoints import metadata, surgery
from parity.checkpoints.formats import formats as format_names
from parity.checkpoints.formats import get
from parity.checkpoints.inspection import Entry, entries
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from parity.commands.printing import columns, facts_of, source, told, transfer
from parity.terminal import say
from vit_spec import InputError, ViTConfig

FAST = 100_000_000  # bytes; of less, the time is that of starting


def convert(given: argparse.Namespace) -> int:
    """Write the weights of SRC to DST in another format, bit for bit."""
    get(given.to)  # a misspelt name is told before files are looked at
    shard, start = _bytes(given.shard), time.perf_counter()
    found = source(given)
    mended, causes = _mended(found, given.mend)
    checkpoint, changes = surgery.apply(mended, _operations(given))
    changes = [*causes, *changes]
    with transfer(quiet=given.json) as progress:
        written = write(
            checkpoint,
            given.target,
            given.to,
            force=given.force,
            dtype=given.dtype,
            container=given.container,
            shard=shard,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    if given.json:
        facts = {**facts_of(found), "changes": changes, "target": str(written.path), "to": written.format}
        facts |= {"container": written.container, "bytes": written.nbytes, "seconds": seconds, "remarks": written.remarks}
        print(json.dumps(facts))
        return 0
    if given.dtype:
        changes = [*changes, f"rounded to {given.dtype}"]
    speed = f", {written.nbytes / seconds / 1e9:.2f} GB/s" if written.nbytes > FAST else ""
    say(
        *told(found),
        *(f"changed: {change}" for change in changes),
        *(remark if remark.startswith(metadata.LOST) else f"note: {remark}" for remark in written.remarks),
        f"{given.target}: format {written.format}, {written.nbytes:,} bytes of weights, read back{speed}",
    )
    return 0


def inspect(given: argparse.Namespace) -> int:
    """Show the format, the config and the parameters of SRC."""
    checkpoint = source(given)
    found = list(entries(checkpoint, given.values))
    if given.json:
        print(json.dumps({**facts_of(checkpoint), "parameters": [asdict(entry) for entry in found]}))
        return 0
    say(*told(checkpoint), _config_table(checkpoint.config), _parameter_table(checkpoint, found))
    if odd := [f"{entry.key} has {_odd(entry)}" for entry in found if entry.suspicious]:
        say(f"suspicious: {'; '.join(odd)}")
    if any(entry.suspicious is None for entry in found):
        say("numbers were not looked at: --values reads all of the file, and looks for NaN and the like")
    return 0


def formats(given: argparse.Namespace) -> int:
    """List the formats."""
    if given.json:
        print(json.dumps({name: {"what": get(name).what, "variants": list(get(name).tables)} for name in format_names()}))
        return 0
    table = columns(None, "format", "what it is", "where queries, keys and values are")
    for name in format_names():
        format = get(name)
        for variant in format.tables:
            layouts = format.lines(variant)["blocks.attn.qkv.weight"]
            table.add_row(f"{name}:{variant}" if variant else name, format.what, "; ".join(map(str, layouts)))
    say(table)
    return 0


def models(given: argparse.Namespace) -> int:
    """List the named models."""
    found = {name: vit_spec.get(name) for name in vit_spec.names()}
    if given.json:
        print(
            json.dumps({name: {"parameters": vit_spec.count(c), "flops": vit_spec.flops(c)} for name, c in found.items()})
        )
        return 0
    table = columns(None, "model", "image", ">parameters", ">GFLOPs")
    for name, config in found.items():
        size = " × ".join(map(str, config.image_size))
        table.add_row(name, size, f"{vit_spec.count(config):,}", f"{vit_spec.flops(config) / 1e9:,.2f}")
    say(table)
    return 0


# What is given --------------------------------------------------------------------------------------------------------


def _mended(checkpoint: Checkpoint, causes: list[str]) -> tuple[Checkpoint, list[str]]:
    """Return the weights with the causes of a diagnosis taken into account, and what was done."""
    if not causes:
        return checkpoint, []
    from parity.comparison.diagnosis.mend import mend  # with it the catalogue, which no other conversion needs

    return mend(checkpoint, causes)


def _operations(given: argparse.Namespace) -> dict[str, Any]:
    """Return the surgery that was asked for, by name."""
    sizes = {name: _size(getattr(given, name)) for name in ("image_size", "patch_size") if getattr(given, name)}
    numbers = {name: getattr(given, name) for name in ("in_channels", "num_classes") if getattr(given, name) is not None}
    flags = ("drop_head", "fold_class_position", "unfold_class_position", "add_key_bias", "drop_key_bias")
    switches = {name: True for name in flags if getattr(given, name)}
    modes = {"resampling": given.resampling} if given.resampling else {}
    return {**sizes, **numbers, **switches, **modes}


def _size(text: str) -> tuple[int, int]:
    """Read 384 or 384x256, height first."""
    if not (found := re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", text)):
        raise InputError(f"{text!r} is no size: write it as 384, or as 384x256, height first")
    return int(found[1]), int(found[2] or found[1])


def _bytes(text: str) -> int:
    """Read 500MB or 5GB."""
    if not (found := re.fullmatch(r"(\d{1,18})\s*([KMG]?)B?", text.upper())) or not int(found[1]):
        raise InputError(f"{text!r} is no size of a file: write it as 500MB or 5GB")
    return int(int(found[1]) * 1000 ** " KMG".index(found[2] or " "))


# What is printed ------------------------------------------------------------------------------------------------------


def _config_table(config: ViTConfig) -> Table:
    """A line for each field that everyone knows, and for each part its own fields."""
    table = columns("config", "field", "value")
    for name, value in asdict(config).items():
        parts = [f"{field}={part}" for field, part in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name, ", ".join(parts))
    return table


def _parameter_table(checkpoint: Checkpoint, found: list[Entry]) -> Table:
    title = f"format {checkpoint.format}: {get(checkpoint.format).what}"
    table = columns(title, "key", "axes", "shape", "dtype", ">arrays", ">entries", ">bytes", "")
    for entry in found:
        shape = " × ".join(map(str, entry.shape))
        numbers = (f"{number:,}" for number in (entry.arrays, entry.entries, entry.nbytes))
        table.add_row(entry.key, entry.axes, shape, entry.dtype, *numbers, _odd(entry))
    totals = (f"{sum(getattr(entry, name) for entry in found):,}" for name in ("arrays", "entries", "nbytes"))
    table.add_section()
    table.add_row("all", "", "", "", *totals, "")
    return table


def _odd(entry: Entry) -> str:
    return ", ".join(entry.suspicious or ())
