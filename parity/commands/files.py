"""The commands convert, inspect, formats and models, called with parsed arguments; see `parity.__main__`."""

import argparse
import os
import re
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

import vit_spec
from parity.checkpoints import metadata, surgery
from parity.checkpoints.atomic_write import atomic_replace, check_replaceable
from parity.checkpoints.columns import pieces_of
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.format_text import format_text
from parity.checkpoints.formats import formats as format_names
from parity.checkpoints.formats import get
from parity.checkpoints.inspection import ParameterInfo, list_parameters
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from parity.commands.printing import (
    check_format_files_used,
    checkpoint_facts,
    describe_checkpoint,
    load_source,
    make_table,
    print_json,
    transfer_progress,
)
from parity.terminal import print_file, print_lines
from vit_spec import InputError, ViTConfig

if TYPE_CHECKING:
    from parity.comparison.own_model import DerivedTable

_SIZES = ("image_size", "patch_size", "in_channels", "num_classes")  # the options that make parameters larger
MIN_BYTES_FOR_SPEED = 100_000_000  # below this, start-up dominates the time


def convert(args: argparse.Namespace) -> int:
    """Convert the checkpoint SRC to another format, bit for bit, and write it to DST."""
    get(args.to)  # report a misspelt format before reading files
    shard, start = None if args.shard is None else _parse_file_size(args.shard), time.perf_counter()
    table, derived = _table_path(args), None
    if table:
        derived = _derive_table(args)
        loaded = derived.checkpoint
    else:
        loaded = load_source(args)
        check_format_files_used(args, loaded.format, args.to)
    repaired, repairs = _repair(loaded, args.mend)
    try:
        checkpoint, changes = surgery.apply(repaired, _surgery_operations(args))
    except MemoryError:
        sizes = [f"--{name.replace('_', '-')} {given}" for name in _SIZES if (given := getattr(args, name)) is not None]
        if not sizes:
            raise
        raise InputError(
            f"not enough memory for the weights with {' '.join(sizes)}: give smaller values, or use a machine with more "
            "memory"
        ) from None
    changes = [*repairs, *changes, *([f"rounded to {args.dtype}"] if args.dtype else [])]
    with ExitStack() as stack:
        if table and derived:  # it gets its name when the checkpoint is complete
            stack.enter_context(atomic_replace(table, replace=args.force)).write_text(derived.text)
        progress = stack.enter_context(transfer_progress(quiet=args.json))
        written = write(
            checkpoint,
            args.target,
            args.to,
            force=args.force,
            dtype=args.dtype,
            container=args.container,
            shard=shard,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    if args.json:
        facts = {**checkpoint_facts(loaded), "changes": changes, "notes": written.remarks, "target": str(written.path)}
        facts |= {"target_format": written.format, "target_container": written.container}
        facts |= {"bytes": written.nbytes, "seconds": seconds}
        facts |= {"table": str(table), "proof": derived.proof.differences} if derived else {}
        print_json("parity.convert/1", facts)
        return 0
    speed = f", {written.nbytes / seconds / 1e9:.2f} GB/s" if written.nbytes > MIN_BYTES_FOR_SPEED else ""
    print_lines(
        *describe_checkpoint(loaded),
        *([f"proven: {derived.proof}", f"table: {table}"] if derived else []),
        *(f"changed: {change}" for change in changes),
        *(remark if remark.startswith(metadata.LOST_PREFIX) else f"note: {remark}" for remark in written.remarks),
        f"{args.target}: format {written.format}, {written.nbytes:,} bytes of weights, verified{speed}",
    )
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Show the format, the config and the parameters of SRC."""
    checkpoint = load_source(args)
    check_format_files_used(args, checkpoint.format)
    parameters = list(list_parameters(checkpoint, args.values))
    if args.json:
        facts = {**checkpoint_facts(checkpoint), "parameters": [_parameter_facts(entry) for entry in parameters]}
        print_json("parity.inspect/1", facts)
        return 0
    print_lines(
        *describe_checkpoint(checkpoint), _config_table(checkpoint.config), _parameter_table(checkpoint, parameters)
    )
    if suspicious := [f"{entry.key} has {_suspicious_text(entry)}" for entry in parameters if entry.suspicious]:
        print_lines(f"suspicious: {'; '.join(suspicious)}")
    if any(entry.suspicious is None for entry in parameters):
        print_lines("values were not checked: --values reads the whole checkpoint and checks for NaN, infinities and zeros")
    return 0


def formats(args: argparse.Namespace) -> int:
    """List all formats, or print one of them, or that of a checkpoint, as a file."""
    if args.show:
        is_file = args.show not in format_names() and os.path.exists(args.show)
        name = load(args.show).format if is_file else args.show
        text = format_text(get(name))
        if args.json:
            print_json("parity.formats/1", {"format": name, "text": text})
        else:
            print_file(text)
        return 0
    if args.json:
        found = {
            name: {"description": get(name).description, "variants": list(get(name).tables)} for name in format_names()
        }
        print_json("parity.formats/1", {"formats": found})
        return 0
    table = make_table(None, "format", "description", "layout of queries, keys and values")
    for name in format_names():
        format = get(name)
        for variant in format.tables:
            lines = format.table_layouts(variant)
            layouts = [each for name in pieces_of(lines, "blocks.attn.qkv.weight") for each in lines[name]]
            table.add_row(f"{name}:{variant}" if variant else name, format.description, "; ".join(map(str, layouts)))
    print_lines(table)
    return 0


def models(args: argparse.Namespace) -> int:
    """List all named models with their sizes."""
    configs = {name: vit_spec.get(name) for name in vit_spec.names()}
    if args.json:
        sizes = {name: {"parameters": vit_spec.count(c), "flops": vit_spec.flops(c)} for name, c in configs.items()}
        print_json("parity.models/1", {"models": sizes})
        return 0
    table = make_table(None, "model", "image", ">parameters", ">GFLOPs")
    for name, config in configs.items():
        size = " × ".join(map(str, config.image_size))
        table.add_row(name, size, f"{vit_spec.count(config):,}", f"{vit_spec.flops(config) / 1e9:,.2f}")
    print_lines(table)
    return 0


# Arguments ------------------------------------------------------------------------------------------------------------


def _table_path(args: argparse.Namespace) -> Path | None:
    """Return where --like writes its table; None without --like.

    Raises:
        InputError: --table without --like, --like with an option that it replaces, or the file exists.
    """
    if args.like is None:
        if args.table is not None:
            raise InputError("--table is for --like: give the class with --like MODULE:CLASS, or leave --table out")
        return None
    for name, value in (("--from", args.format), ("--format-file", args.format_file)):
        if value:
            raise InputError(f"{name} together with --like, which finds the format itself: leave one of them out")
    target = Path(args.target)
    path = Path(args.table) if args.table is not None else target.with_name(f"{target.stem}.table.txt")
    if path.resolve() == target.resolve():
        raise InputError(f"--table {path} is also DST: give another name")
    check_replaceable(path)
    if os.path.lexists(path) and not args.force:
        raise InputError(f"{path} exists: give another name with --table, or --force to replace it")
    if not path.parent.is_dir():
        raise InputError(f"--table {path}: there is no folder {path.parent}: create it, or give another name")
    return path


def _derive_table(args: argparse.Namespace) -> "DerivedTable":
    """Return the table of the class that --like names."""
    from parity.comparison.own_model import derive_table  # slow to import
    from parity.comparison.own_model.construct import prints_to_stderr

    given = parse_overrides(args.set)
    with prints_to_stderr():  # what the user's code prints is not the output of this command
        return derive_table(args.like, args.source, given=given, strip=args.strip, ignore=args.ignore)


def _repair(checkpoint: Checkpoint, causes: list[str]) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint repaired for the causes that `diagnose` reported, and a description of each repair."""
    if not causes:
        return checkpoint, []
    from parity.comparison.diagnosis.repair import repair  # imports the catalogue of causes, which is slow

    return repair(checkpoint, causes)


def _surgery_operations(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `parity.surgery.apply` that the options ask for."""
    sizes = {name: _parse_size(getattr(args, name)) for name in ("image_size", "patch_size") if getattr(args, name)}
    numbers = {name: getattr(args, name) for name in ("in_channels", "num_classes") if getattr(args, name) is not None}
    switches = {name: True for name in surgery.FLAG_OPERATIONS if getattr(args, name)}
    modes = {"resampling": args.resampling} if args.resampling else {}
    return {**sizes, **numbers, **switches, **modes}


def _parse_size(text: str) -> tuple[int, int]:
    """Return (height, width) for 384 or 384x256."""
    if not (match := re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", text)):
        raise InputError(f"{text!r} is not a size: write it as 384, or as 384x256, height first")
    return int(match[1]), int(match[2] or match[1])


def _parse_file_size(text: str) -> int:
    """Return the number of bytes in a file size such as 500MB or 5GB."""
    if not (match := re.fullmatch(r"(\d{1,18})\s*([KMG]?)B?", text.upper())) or not int(match[1]):
        raise InputError(f"{text!r} is not a file size: write it as 500MB or 5GB")
    return int(int(match[1]) * 1000 ** " KMG".index(match[2] or " "))


# Output ---------------------------------------------------------------------------------------------------------------


def _config_table(config: ViTConfig) -> Table:
    """Return a table with one row for each top-level field; the row of a nested dataclass lists its fields."""
    table = make_table("config", "field", "value")
    for name, value in asdict(config).items():
        parts = [f"{field}={part}" for field, part in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name, ", ".join(parts))
    return table


def _parameter_table(checkpoint: Checkpoint, parameters: list[ParameterInfo]) -> Table:
    title = f"format {checkpoint.format}: {get(checkpoint.format).description}"
    table = make_table(title, "key", "axes", "shape", "dtype", ">arrays", ">entries", ">bytes", "")
    for entry in parameters:
        shape = " × ".join(map(str, entry.shape))
        numbers = (f"{number:,}" for number in (entry.arrays, entry.entries, entry.nbytes))
        table.add_row(entry.key, entry.axes, shape, entry.dtype, *numbers, _suspicious_text(entry))
    totals = (f"{sum(getattr(entry, name) for entry in parameters):,}" for name in ("arrays", "entries", "nbytes"))
    table.add_section()
    table.add_row("all", "", "", "", *totals, "")
    return table


def _parameter_facts(parameter: ParameterInfo) -> dict[str, Any]:
    """Return a parameter for JSON, with its size under the name that `convert` gives sizes."""
    return {"bytes" if name == "nbytes" else name: value for name, value in asdict(parameter).items()}


def _suspicious_text(entry: ParameterInfo) -> str:
    return ", ".join(entry.suspicious or ())
