"""The declared pairs: one module for each source, each with `PAIRS`."""

import importlib
import pkgutil

from benchmarks.ports.declaration import Pair, Pairs


def sources() -> list[Pairs]:
    """Return the pairs of every source."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").PAIRS for name in names]


def find(name: str) -> Pair:
    """Return the pair with a name.

    Raises:
        KeyError: there is none.
    """
    return {pair.name: pair for source in sources() for pair in source}[name]
