"""The keys of the patch projection in all formats: every model has one, so they show where the weights of a model are."""

import re
from functools import cache

from parity.checkpoints.formats import formats, get, revision

MAX_KEY_WORDS = 8  # the key of a patch projection has at most this many words


def patch_projection_keys(separator: str) -> frozenset[str]:
    """Return the keys of the patch projection in all tables of the formats with this separator."""
    return _keys(separator, revision())


def patch_projection_endings(separator: str) -> tuple[str, ...]:
    """Return the last words of the keys of all patch projections."""
    return _endings(separator, revision())


def patch_projection_aliases(separator: str) -> re.Pattern[str] | None:
    """Return a pattern of the keys that formats read as that of the patch projection under another name; None if none."""
    return _aliases(separator, revision())


# In the functions below, `registered` is the revision of the formats, which is only a key of their caches.


@cache
def _keys(separator: str, registered: int) -> frozenset[str]:
    tables = [
        (get(name), variant) for name in formats() for variant in get(name).tables if get(name).separator == separator
    ]
    return frozenset(
        layout.key
        for format, variant in tables
        for layout in format.table_layouts(variant).get("patch_embed.proj.weight", [])
    )


@cache
def _endings(separator: str, registered: int) -> tuple[str, ...]:
    return tuple(sorted({key.rsplit(separator, 1)[-1] for key in _keys(separator, registered)}))


@cache
def _aliases(separator: str, registered: int) -> re.Pattern[str] | None:
    found = [
        f"(?:{alias}){re.escape(key.removeprefix(replacement))}$"
        for name in formats()
        for alias, replacement in get(name).aliases.items()
        for key in _keys(separator, registered)
        if get(name).separator == separator and key.startswith(replacement)
    ]
    return re.compile("|".join(dict.fromkeys(found))) if found else None
