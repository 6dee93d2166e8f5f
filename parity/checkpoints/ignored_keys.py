"""The keys of a file that the user ignores: --ignore REGEX, or a line `ignore:` in the file of a format.

The user gives the regular expressions and the file gives the keys, so a match can take time exponential in the length of a
key.  Python cannot interrupt it: another process, whose time is limited, does the matching.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from parity.checkpoints.wrappers import without_common_path, without_inner_modules
from vit_spec import InputError

_CHILD = Path(__file__).with_name("ignored_keys_child.py")
_MAX_SECONDS = 10  # a million keys take about one
_MAX_PATTERNS = 1000


class IgnoredKeys:
    """The keys of a file that match regular expressions, with or without the wrappers in front of them."""

    def __init__(
        self,
        patterns: Sequence[str],
        keys: Mapping[str, Iterable[str]],
        prefixes: Mapping[str, Sequence[str]],
        source: str = "",
    ) -> None:
        """Match the keys with the expressions.

        Args:
            patterns: the regular expressions.
            keys: separator -> the keys of the file, joined with it.
            prefixes: separator -> the prefixes of weights in the file.
            source: the file of the format that has the expressions, which need not match a key; "" for those of --ignore.

        Raises:
            InputError: see `matched_keys`.
        """
        names = (
            name
            for separator in keys
            for prefix in ("", *prefixes[separator])
            for key in keys[separator]
            for name in _names(key, prefix, separator)
        )
        self._matched = matched_keys(patterns, names, source) if patterns else {}

    def matches(self, key: str, prefix: str, separator: str) -> bool:
        """Return whether a key is ignored, in weights with this prefix."""
        return any(not found.isdisjoint(_names(key, prefix, separator)) for found in self._matched.values())

    def by_pattern(self, keys: Iterable[str], prefix: str, separator: str) -> dict[str, tuple[str, ...]]:
        """Return the keys that each expression ignores, in weights with this prefix."""
        keys = list(keys) if self._matched else []
        groups = {
            pattern: tuple(key for key in keys if not found.isdisjoint(_names(key, prefix, separator)))
            for pattern, found in self._matched.items()
        }
        return {pattern: group for pattern, group in groups.items() if group}


def _names(key: str, prefix: str, separator: str) -> tuple[str, ...]:
    """Return a key, and what remains of it without the prefix of the weights, or without the words that both have.

    The last is the key as messages name it, without modules such as that of torch.compile within the model.
    """
    rest = key.removeprefix(prefix)
    return key, rest, without_common_path(key, prefix, separator), *without_inner_modules([rest])


def matched_keys(patterns: Sequence[str], keys: Iterable[str], source: str = "") -> Mapping[str, frozenset[str]]:
    """Return the keys that each regular expression matches as a whole.

    Raises:
        InputError: an expression is invalid, takes too long, or is one of --ignore and matches no key.
    """
    option = f"{source}: ignore:" if source else "--ignore"
    if len(patterns) > _MAX_PATTERNS:
        raise InputError(f"{option} has {len(patterns)} regular expressions, more than {_MAX_PATTERNS}: join them with |")
    names, found = list(dict.fromkeys(keys)), {}
    for pattern in dict.fromkeys(patterns):
        answer = _match(pattern, names, option)
        if answer.error:
            raise InputError(f"{option} '{pattern}' is not a regular expression ({answer.error}): correct it")
        if not answer.matches and not source:
            example = f", and of {names[answer.part]} only a part: match a whole key" if answer.part is not None else ""
            raise InputError(f"{option} '{pattern}' matches no key{example or ': leave it out, or correct it'}")
        found[pattern] = frozenset(names[n] for n in answer.matches)
    return found


class _Answer(NamedTuple):
    """The answer of the child process.

    Attributes:
        error: why the expression is invalid, or "".
        matches: the indices of the keys that match as a whole.
        part: if there are none, the index of a key of which a part matches, or None.
    """

    error: str
    matches: list[int]
    part: int | None


def _match(pattern: str, names: list[str], option: str) -> _Answer:
    """Match all keys with one expression in the child process."""
    request = json.dumps({"pattern": pattern, "keys": names}).encode()
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    try:
        child = subprocess.run(command, input=request, capture_output=True, check=False, timeout=_MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{option} '{pattern}' takes more than {_MAX_SECONDS} s for the keys of this file: write it without repeated "
            f"repetition, such as (a*)*"
        ) from None
    if child.returncode:
        raise InputError(f"{option} '{pattern}' takes too much memory, or nests too deeply: write a simpler expression")
    return _Answer(**json.loads(child.stdout))
