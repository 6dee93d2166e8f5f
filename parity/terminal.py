"""Printing to the terminal: the one place through which every message and every table of the commands goes.

Names in files can hold escape sequences and directional overrides, which a terminal would obey, and can be of any length.
So all text is made printable (see `vit_spec.printable`) before it reaches the terminal.
"""

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from vit_spec.printable import LONGEST, printable


class Terminal(Console):
    """A console that prints every text as it is, without markup, highlighting or emoji codes, and made printable."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        emoji: bool | None = None,
        markup: bool | None = None,
        highlight: bool | None = None,
        highlighter: Callable[[str | Text], Text] | None = None,
    ) -> Text:
        """Return a text that a terminal cannot mistake for commands.  Rich calls this for every `str` that it prints."""
        safe = printable(text, keep="\n", longest=LONGEST)
        return Text(safe, style=style, justify=justify, overflow=overflow)


def console(*, stderr: bool = False) -> Terminal:
    """Return a console as wide as the terminal; a pipe or a file has no width, and there no line is broken."""
    found = Terminal(stderr=stderr)
    if not found.is_terminal:
        found.width = 10_000
    return found


def say(*lines: Any) -> None:
    """Print lines, or tables of rich."""
    for line in lines:
        console().print(line)


def report(text: Any) -> None:
    """Print a text of many lines as it is, such as a report, whose names are capped one by one."""
    print(printable(str(text), keep="\n"))


def complain(message: object) -> None:
    """Print an error to stderr, in one line."""
    note(f"error: {message}")


def note(message: object) -> None:
    """Print a line to stderr."""
    print(printable(" ".join(str(message).split("\n")), longest=LONGEST), file=sys.stderr)
