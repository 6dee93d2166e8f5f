"""Imports of packages that import a framework wherever it is installed, and work without it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Make imports of these packages fail in this context, except of those that are loaded already.

    A package that imports a framework without need would take seconds, and the memory of the framework.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
