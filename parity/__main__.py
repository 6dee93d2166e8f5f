"""The command line: python -m parity convert | inspect | check | formats | models.

Exit codes: 0 the claim holds, 1 it does not, 2 bad input.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

import vit_spec
from parity.files import convert, load
from parity.formats import formats, get
from parity.weights import check, to_jax
from vit_spec import InputError, ViTConfig, nearest, rows


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are bad input as any other: one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            hint = nearest(arguments[0], COMMANDS) or f": give one of {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {arguments[0]!r}{hint}")
        given = _parser().parse_args(arguments)
        return COMMANDS[given.command](given)
    except (InputError, OSError) as error:
        print("error:", *str(error).split("\n"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog="python -m parity", description="Move ViT weights between formats, and compare the twins on them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str) -> argparse.ArgumentParser:
        text = COMMANDS[name].__doc__
        return commands.add_parser(name, help=text, description=text)

    def source(one: argparse.ArgumentParser) -> None:
        one.add_argument("source", metavar="SRC", type=Path, help="a safetensors file of this project, or a run folder")

    one = command("convert")
    source(one)
    one.add_argument("target", metavar="DST", type=Path, help="the safetensors file to write")
    one.add_argument("--to", required=True, metavar="FORMAT", help=f"what to write: {', '.join(formats())}")
    one.add_argument("--force", action="store_true", help="replace DST if it exists")
    source(command("inspect"))
    source(command("check"))
    command("formats")
    command("models")
    return parser


def _convert(given: argparse.Namespace) -> int:
    """Write the weights of SRC to DST in another format, bit for bit."""
    convert(given.source, given.target, given.to, force=given.force)
    print(f"{given.target}: format {given.to}, {given.target.stat().st_size:,} bytes")
    return 0


def _inspect(given: argparse.Namespace) -> int:
    """Show the config and the parameters of SRC."""
    checkpoint = load(given.source)
    config, format, dtypes = checkpoint.config, get(checkpoint.format), check(checkpoint)
    console, found, column = _console(), rows(checkpoint.config), format.layouts(checkpoint.config)
    console.print(_config_table(config))
    table = _table(f"format {format.name}: {format.what}", "key", "axes", "shape", "dtype", ">arrays", ">entries")
    for name, layout in column.items():
        arrays, shape = len(layout.keys(config.sizes)), " × ".join(map(str, layout.shape(config.sizes)))
        table.add_row(layout.key, layout.axes, shape, str(dtypes[name]), str(arrays), f"{found[name].size:,}")
    arrays, size = sum(len(layout.keys(config.sizes)) for layout in column.values()), vit_spec.count(config)
    table.add_section()
    table.add_row("all", "", "", "", str(arrays), f"{size:,}")
    console.print(table)
    return 0


def _config_table(config: ViTConfig) -> Table:
    """A line for each field that everyone knows, and for each part its own fields."""
    table = _table("config", "field", "value")
    for name, value in asdict(config).items():
        parts = [f"{field}={part}" for field, part in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name, ", ".join(parts))
    return table


def _check(given: argparse.Namespace) -> int:
    """Run both twins on the weights of SRC, and say PASS or the first part that differs."""
    from parity.comparison import compare

    checkpoint = load(given.source)
    try:
        report = compare(checkpoint.config, to_jax(checkpoint))
    except ModuleNotFoundError as error:
        raise InputError(f"check runs both twins, and {error.name} is not installed: install it") from None
    print(report)
    return 0 if report.passed else 1


def _formats(given: argparse.Namespace) -> int:
    """List the formats."""
    example = vit_spec.get("vit_s16")
    table = _table(None, "format", "what it is", "where queries, keys and values are")
    for name in formats():
        table.add_row(name, get(name).what, str(get(name).layouts(example)["blocks.attn.qkv.weight"]))
    _console().print(table)
    return 0


def _models(given: argparse.Namespace) -> int:
    """List the named models."""
    table = _table(None, "model", "image", ">parameters", ">GFLOPs")
    for name in vit_spec.names():
        config = vit_spec.get(name)
        size = " × ".join(map(str, config.image_size))
        table.add_row(name, size, f"{vit_spec.count(config):,}", f"{vit_spec.flops(config) / 1e9:,.2f}")
    _console().print(table)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": _convert,
    "inspect": _inspect,
    "check": _check,
    "formats": _formats,
    "models": _models,
}


def _console() -> Console:
    """A console as wide as the terminal; a pipe or a file has no width, and there no line is broken."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def _table(title: str | None, *columns: str) -> Table:
    """A table without frames; a column's name starts with > where it holds numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold")
    return table


if __name__ == "__main__":
    sys.exit(main())
