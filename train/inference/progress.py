"""A progress bar of images."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parity.terminal import console


@contextmanager
def progress_bar(count: int, what: str, is_hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal; yield a function that advances it by a number of images.

    count: number of images.    what: the text before the bar.
    """
    screen = console(stderr=True)
    parts = (TextColumn(what), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=screen, transient=True, disable=is_hidden or not screen.is_terminal) as bar:
        task = bar.add_task("", total=count)
        yield lambda done: bar.advance(task, done)
