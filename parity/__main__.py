"""The command line: python -m parity convert | inspect | check | diagnose | assert | golden | formats | models.

Exit codes: 0 success, or the check passed; 1 the check failed; 2 invalid input; 130 interrupted; 141 the reader of the
output has ended; 143 ended by SIGTERM.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from parity.checkpoints.format_file import read_format
from parity.checkpoints.formats import registered
from parity.commands import checks, files
from parity.commands.options import build_parser
from parity.commands.run_command import run_command
from vit_spec import InputError, nearest


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program name; None means the arguments of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(lambda: _run(given))


def _run(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        hint = nearest(arguments[0], COMMANDS) or f": give one of {', '.join(COMMANDS)}"
        raise InputError(f"unknown command {arguments[0]!r}{hint}")
    args = build_parser(COMMANDS).parse_args(arguments)
    with registered(*map(read_format, getattr(args, "format_file", ()))):
        return COMMANDS[args.command](args)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": files.convert,
    "inspect": files.inspect,
    "check": checks.check,
    "diagnose": checks.diagnose,
    "assert": checks.assert_pair,
    "golden": checks.golden,
    "formats": files.formats,
    "models": files.models,
}


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that partially written files are removed."""
    raise SystemExit(128 + number)


def command() -> NoReturn:
    """Run the command line of this process and exit with its exit code; the entry point of `vit-parity`."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(main())


if __name__ == "__main__":
    command()
