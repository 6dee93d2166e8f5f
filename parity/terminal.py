"""Print to the terminal: all messages and tables of the commands go through this module.

Names in files can contain escape sequences and bidirectional overrides, which a terminal would execute, and can have any
length.  All text is therefore made printable first: see `vit_spec.printable`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from rich.console import Console, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from vit_spec.printable import MAX_MESSAGE_LENGTH, printable


class Terminal(Console):
    """A rich console that makes text printable and prints it without markup, highlighting or emoji codes."""

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
        """Return printable text without control sequences.  Rich calls this method for every `str` that it prints."""
        safe = printable(text, keep="\n", max_length=MAX_MESSAGE_LENGTH)
        return Text(safe, style=style, justify=justify, overflow=overflow)


class _Stdout:
    """The stream of stdout, whose errors name it.

    Attributes:
        error: the newest error of a write; argparse ignores those of its help.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._named_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._named_errors():
            self._stream.flush()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, "standard output")  # of the same class as `error`
            raise self.error from None


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Print any text to stdout, whatever its encoding, and flush it at the end; every command runs in this context.

    Characters that the encoding of stdout lacks are printed as escapes.  Python does the same for stderr.

    Raises:
        OSError: stdout cannot be written, for example because the disk is full; the error names standard output.
    """
    if sys.stdout is None:  # as Python sets it where the process was started without stdout
        yield
        return
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    stdout = _Stdout(sys.stdout)
    try:
        with redirect_stdout(stdout):
            yield
    finally:
        with suppress(OSError):
            stdout.flush()
        if stdout.error is not None:
            # The text is still in the buffer: Python's own flush at exit would print a traceback and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
            raise stdout.error from None


def console(*, stderr: bool = False) -> Terminal:
    """Return a console as wide as the terminal.  For a pipe or a file, lines are not wrapped."""
    terminal = Terminal(stderr=stderr)
    if not terminal.is_terminal:
        terminal.width = 10_000
    return terminal


def print_lines(*lines: Any) -> None:
    """Print lines of text, or rich tables, to stdout.  A line break in a line is printed as an escape."""
    for line in lines:
        console().print(printable(line) if isinstance(line, str) else line)


def print_report(text: Any) -> None:
    """Print text of several lines, such as a report, to stdout.

    Unlike messages, it is not limited in length: the report limits the length of each name.
    """
    print(printable(str(text), keep="\n"))


def print_file(text: str) -> None:
    """Print the content of a text file to stdout as it is, so that a redirected output is that file."""
    print(text, end="")


def print_error(message: object) -> None:
    """Print an error to stderr as one line."""
    print_note(f"error: {message}")


def print_note(message: object) -> None:
    """Print a message to stderr as one line."""
    print(printable(" ".join(str(message).split("\n")), max_length=MAX_MESSAGE_LENGTH), file=sys.stderr)
