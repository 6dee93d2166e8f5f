"""Compare the keys of a checkpoint with a format: the arrays under a prefix with each line of the format's table."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from parity.checkpoints.columns import pieces_of
from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.formats import Evidence, Format
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.ignored_keys import IgnoredKeys
from parity.checkpoints.layout import KERAS_GROUPS, NNX_VALUES
from parity.checkpoints.other_keys import classify_other_keys
from parity.checkpoints.table_matching import KeyIndex, Mismatch, match_lines, solve_sizes
from parity.checkpoints.wrappers import find_classifier, without_common_path, without_inner_modules
from vit_spec import InputError


@dataclass(frozen=True)
class Match:
    """A format that the keys of a checkpoint may be in.

    Attributes:
        format: the format, with its variant chosen.
        arrays: the arrays of the parameters by key, without wrappers.
        evidence: what the checkpoint shows about the model.
        mismatches: the reasons why the checkpoint is not in this format.
        wrapper: the prefix that was removed from the keys; "" for none.
        alternatives: other content of the file that may be the weights the user wants, or a part of the model, such as
            other weights, a predictor or a scaler.
        ignored: regular expression of the user -> the keys that it matches, which are not parameters.
        ignored_by_table: the same for the expressions in the file of a format that the user defines.
    """

    format: Format
    arrays: Mapping[str, StoredArray]
    evidence: Evidence
    mismatches: tuple[Mismatch, ...]
    wrapper: str = ""
    alternatives: tuple[str, ...] = ()
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored_by_table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ignored_texts(self) -> dict[str, str]:
        """Regular expression of the user -> the first key that it matches, and the number of others."""
        return {pattern: first_of(keys) for pattern, keys in self.ignored.items()}

    @property
    def unread(self) -> tuple[str, ...]:
        """One line, with the reason, for each part of the file that is not read."""
        lines = []
        for pattern, reason in self.format.ignored_keys.items():
            if keys := sorted(key for key in self.evidence.ignored_arrays if re.fullmatch(pattern, key)):
                lines.append(f"{first_of(keys)}: {reason}")
        reasons = self.format.definition.ignored if self.format.definition else {}
        lines += [f"{first_of(keys)}: {reasons[pattern]}" for pattern, keys in self.ignored_by_table.items()]
        lines += [f"{text}: ignored by --ignore '{pattern}'" for pattern, text in self.ignored_texts.items()]
        groups = Counter(map(self._group, self.evidence.other_keys))
        lines += [f"{word} ({n} array{'s' * (n > 1)}): beside the weights" for word, n in sorted(groups.items())]
        return tuple(lines)

    def _group(self, key: str) -> str:
        """Return the beginning of a key beside the weights, up to the first word that differs from the wrapper's."""
        separator = self.format.separator
        rest = without_common_path(key, f"{self.wrapper}{separator}", separator)
        return key.removesuffix(rest) + re.split(r"[./]", rest)[0]


def first_of(keys: Sequence[str]) -> str:
    """Return the first of some keys, and the number of others."""
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


class WrappedWeights:
    """The arrays of a file under one prefix, to be compared with formats.

    Attributes:
        is_wanted: whether the user does not ignore all of them.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredArray],
        prefix: str,
        separator: str,
        module: str,
        ignored: IgnoredKeys,
        by_table: IgnoredKeys | None = None,
    ) -> None:
        inside = {key: array for key, array in stored.items() if key.startswith(prefix)}
        expressions = [ignored] if by_table is None else [ignored, by_table]
        excused = {key for key in stored if any(each.matches(key, prefix, separator) for each in expressions)}
        read = {key: array for key, array in stored.items() if key in inside or key not in excused}
        self.is_wanted = not inside.keys() <= excused
        names = dict(zip(inside, without_inner_modules([key.removeprefix(prefix) for key in inside]), strict=True))
        self._arrays = {names[key]: array for key, array in inside.items()}
        self._excused = {names[key] for key in excused & inside.keys()}
        self._ignored = ignored.by_pattern(stored, prefix, separator)
        self._ignored_by_table = by_table.by_pattern(stored, prefix, separator) if by_table is not None else {}
        self._others = classify_other_keys(read, prefix, separator)
        self._classifier = find_classifier(self._others.unknown, prefix, separator)
        self._stored, self._separator, self._module = stored, separator, module
        self._wrapper = prefix.removesuffix(separator)
        self._indexes: dict[Any, KeyIndex] = {}

    def match(self, format: Format, notes: Mapping[str, Any]) -> Match | None:
        """Compare the arrays with one variant of a format; see `_match_format`."""
        adopted = self._classifier_keys(format)
        index = self._index(format, adopted)
        outside = frozenset(adopted.values())
        match = _match_format(format, index, self._others.keys - outside, notes)
        if match is None:
            return None
        excused = {key for key, old in zip(index.arrays, [*self._arrays, *adopted], strict=True) if old in self._excused}
        mismatches = [each for each in match.mismatches if each.kind != "unexpected" or each.key not in excused]
        mismatches += [Mismatch("ignored", key) for key in match.arrays if key in excused]
        mismatches += [Mismatch("unexpected", key) for key in self._others.unknown if key not in outside]
        # A classifier beside the weights shows a module around both.
        module = self._module or (self._wrapper if adopted else "")
        return replace(
            match,
            evidence=replace(match.evidence, module=module, classifier=self._classifier if adopted else ""),
            mismatches=tuple(mismatches),
            wrapper=self._wrapper,
            alternatives=self._others.alternatives,
            ignored=self._ignored,
            ignored_by_table=self._ignored_by_table,
        )

    def _index(self, format: Format, adopted: Mapping[str, str]) -> "KeyIndex":
        name = (tuple(format.aliases.items()), tuple(adopted))
        if name not in self._indexes:
            arrays = {**self._arrays, **{key: self._stored[outside] for key, outside in adopted.items()}}
            self._indexes[name] = KeyIndex(_replace_aliases(arrays, format.aliases))
        return self._indexes[name]

    def _classifier_keys(self, format: Format) -> dict[str, str]:
        """Return the keys of a format's classifier -> the keys of the one beside the weights; {} if there is none."""
        if not self._classifier:
            return {}
        table = format.table_layouts(format.variant)
        layouts = [layout for name in ("head.weight", "head.bias") for layout in table.get(name, [])]
        found: dict[str, str] = {}
        for layout in layouts:
            outside = f"{self._classifier}{self._separator}{layout.key.rpartition(self._separator)[2]}"
            if outside in self._others.unknown and len(self._stored[outside].shape) == len(layout.dims):
                found[layout.key] = outside
        is_taken = any(layout.key in self._arrays for layout in layouts)
        return {} if is_taken or len(set(found.values())) != len(found) else found


def _match_format(format: Format, index: KeyIndex, other_keys: frozenset[str], notes: Mapping[str, Any]) -> Match | None:
    """Match keys with one variant of a format; None without a whole patch projection or without any second MLP layer.

    A format that a user defines needs the projection only, so that a message can name the line of a missing key.
    """
    table, arrays = format.table_layouts(format.variant), index.arrays
    if not any(layout.key in arrays for layout in table[PROJECTION]):
        return None
    lines, known_sizes = match_lines(table, index)
    complete = {name: [line for line in found if line.present and not line.missing] for name, found in lines.items()}
    if not complete[PROJECTION]:
        return None
    if not format.definition and not any(line.present for line in lines["blocks.mlp.fc2.weight"]):
        return None
    known_keys = {key for found in lines.values() for line in found for key in line.present}
    complete_keys = {key for found in complete.values() for line in found for key in line.present}
    # Only keys of lines that are partly present are missing.  A format may have a line for the bias of queries and values
    # and a line for the bias of all three: the first is not an incomplete form of the second.
    partial = [line for name, found in lines.items() if not complete[name] for line in found]
    incomplete = [line for line in partial if any(key not in complete_keys for key in line.present)]
    mismatches = [Mismatch("missing", key) for line in incomplete for key in line.missing]
    first = [line for name in pieces_of(lines, "blocks.mlp.fc1.weight") for line in lines[name]]
    if not any(line.present for line in first):
        # Every model has it, whatever else is optional.
        mismatches += [Mismatch("missing", key) for key in first[0].missing]
    if format.definition:
        absent = [name for name, found in lines.items() if not any(line.present for line in found)]
        needed = [name for name in absent if name not in format.definition.optional]
        mismatches += [Mismatch("missing", table[name][0].key, f"({format.definition.place(name)})") for name in needed]
    rest = [key for key in arrays if key not in known_keys]
    ignored_pattern = _union(tuple(format.ignored_keys_of_variant))
    ignored = {key: arrays[key] for key in rest if ignored_pattern.fullmatch(key)}
    mismatches += [Mismatch("unexpected", key) for key in rest if key not in ignored]
    shapes = {
        name: [(line.layout, arrays[line.present[0]].shape) for line in found] for name, found in complete.items() if found
    }
    sizes, axes, contradictions = solve_sizes(shapes, known_sizes)
    evidence = Evidence(notes, other_keys, ignored, axes, sizes, format.variant)
    parameters = {key: arrays[key] for key in arrays if key in known_keys}
    return Match(format, parameters, evidence, (*mismatches, *contradictions))


@cache
def _union(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches if any of the patterns does; without patterns, it matches nothing."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _replace_aliases(arrays: dict[str, StoredArray], aliases: Mapping[str, str]) -> dict[str, StoredArray]:
    """Return arrays by the keys of the format's tables; an alias is not replaced if two keys would become the same."""
    for alias, replacement in aliases.items():
        renamed = {re.sub(f"^{alias}", replacement, key): array for key, array in arrays.items()}
        arrays = renamed if len(renamed) == len(arrays) else arrays
    return arrays


def join_keys(arrays: Mapping[KeyPath, StoredArray], separator: str) -> dict[str, StoredArray]:
    """Return arrays by key, with nested keys joined by a format's separator, and without empty arrays.

    A Flax pytree in a safetensors file may have keys joined by dots; they are replaced by slashes.  A saved NNX state may
    have each array under the key "value" of its variable, and Keras groups variables; neither is a part of the key.

    Raises:
        InputError: two arrays have the same joined key.
    """
    flat: dict[str, StoredArray] = {}
    for words, array in arrays.items():
        key = separator.join(words)
        if array.size and flat.setdefault(key, array) is not array:
            raise InputError(f"the file has {key} twice, as a nested and as a joined key: remove the wrong one")
    if separator != "/":
        return flat
    if not any("/" in key for key in flat):
        flat = {key.replace(".", "/"): array for key, array in flat.items()}
    shorter = {key: variable for key in flat if (variable := _variable_of(key)) not in flat}
    unambiguous = len(set(shorter.values())) == len(shorter)
    return {shorter.get(key, key) if unambiguous else key: array for key, array in flat.items()}


def _variable_of(key: str) -> str:
    """Return the key of the variable of NNX or Keras whose array has this key; other keys unchanged."""
    for group in KERAS_GROUPS:
        if key.startswith(group):
            return key.removeprefix(group)
    variable, _, last = key.rpartition("/")
    return variable if last in NNX_VALUES and variable else key
