"""The parser of all commands of this project, with options that several of them have."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NoReturn

from parity.checkpoints.config_overrides import split_overrides
from vit_spec import InputError, nearest


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError with a one-line message, which suggests a similar option."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def hint(self, flag: str) -> str:
        """Return the end of a message about an unknown option: what to give instead; "" if nothing is similar."""
        return nearest(flag, self._option_string_actions)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, known = split_overrides(list(sys.argv[1:] if args is None else args)), self._option_string_actions
        try:
            args, unknown = super().parse_known_args(arguments, namespace)
        except InputError:
            if self._subparsers is not None:  # the error is that of a command
                raise
            # A required option that is misspelt is missing, which argparse says first.
            before = takewhile(lambda argument: argument != "--", arguments)
            flags = (argument.partition("=")[0] for argument in before if argument.startswith("--"))
            unknown = [flag for flag in flags if flag not in known and self.hint(flag)]
            if not unknown:
                raise
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.hint(unknown[0])}")
        # An empty path would mean the working folder; a shell gives one for a variable that is not set.
        for action in self._actions:
            value = getattr(args, action.dest, None)
            if value == "" or (isinstance(value, list) and "" in value):
                self.error(f"{' '.join(action.option_strings) or action.metavar} is empty: give a path or another value")
        return args, unknown


def integer(least: int, what: str) -> Callable[[str], int]:
    """Return a function that parses the integer of an option, for `type` of `add_argument`.

    Args:
        least: the smallest value.  All values are below 2^63, as NumPy, PyTorch and JAX accept them for seeds.
        what: the integer in a message about another text, such as "a seed".
    """

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}: give {least} or more, below 2^63")
        return int(text)

    return parse


parse_seed = integer(0, "a seed")


def add_format_file_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --format-file."""
    text = "a file that defines a format of your own, whose name can then be used like any other; repeatable"
    parser.add_argument("--format-file", action="append", default=[], type=os.path.expanduser, metavar="FILE", help=text)


def add_key_options(parser: argparse.ArgumentParser, source: str) -> None:
    """Add the options that say which keys of a checkpoint are its model's: --strip and --ignore.

    source: what the help calls the checkpoint, such as "SRC".
    """
    text = f"the beginning of the model's keys in {source}, such as net.vit., if it is not a known wrapper"
    parser.add_argument("--strip", metavar="PREFIX", help=text)
    text = f"ignore the keys of {source} that match this regular expression as a whole, and are not parameters; repeatable"
    parser.add_argument("--ignore", action="append", default=[], metavar="REGEX", help=text)
