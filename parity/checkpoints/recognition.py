"""Recognise the format of a checkpoint: its table has all keys of the checkpoint, and the checkpoint all required keys.

Weights may be wrapped: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are removed.  Other content of the file is reported and not read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from math import prod
from typing import Any

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.formats import Evidence, Format, formats, get
from parity.checkpoints.ignored_keys import IgnoredKeys
from parity.checkpoints.layout import Layout
from parity.checkpoints.unreadable import describe_unreadable
from parity.checkpoints.wrappers import (
    classify_other_keys,
    enclosing_module,
    find_classifier,
    find_prefixes,
    is_prefix,
    nearest_prefix,
    unknown_prefix,
    without_common_path,
)
from vit_spec import InputError

Shape = tuple[int, ...]

_MAX_MISSING_SHOWN = 20  # missing keys of one table line that a message lists
_UNEXPECTED, _IGNORED = "unexpected ", "ignored "  # begin a mismatch, before the key
_NUMBER = re.compile(r"\d{1,9}(?!\d)")
_BLOCK = re.compile(r"\{block(?:\+(\d+))?\}")
_BlockField = tuple[str, str, int]  # what is before the number of a block in keys, its field, and the number of the first

# What checkpoints of an NNX state have behind the key of each variable, by version of flax.
_NNX_VALUES = ("value", "raw_value")
_KERAS_GROUPS = ("trainable_variables/", "non_trainable_variables/")  # of `keras.Model.get_state_tree`; a frozen part moves

FIXED_SIZES = {"qkv": 3, "kv": 2, "glu": 2, "xy": 2, "yx": 2}  # axes whose length is the same in every model
# Axes that most formats merge -> the name of the length of the merged axis.
_MERGED_SIZES = {
    frozenset(("head", "dim")): "inner",
    frozenset(("pool_head", "pool_dim")): "pool_inner",
    frozenset(("rgb", "ph", "pw")): "patch",
}


@dataclass(frozen=True)
class Match:
    """A format that the keys of a checkpoint may be in.

    Attributes:
        format: the format, with its variant chosen.
        arrays: the arrays of the parameters by key, without wrappers.
        evidence: what the checkpoint shows about the model.
        mismatches: the reasons, as text, why the checkpoint is not in this format.
        wrapper: the prefix that was removed from the keys; "" for none.
        alternatives: other content of the file that may be the weights the user wants, or a part of the model, such as
            other weights, a predictor or a scaler.
        ignored: regular expression of the user -> the keys that it matches, which are not parameters.
    """

    format: Format
    arrays: Mapping[str, StoredArray]
    evidence: Evidence
    mismatches: tuple[str, ...]
    wrapper: str = ""
    alternatives: tuple[str, ...] = ()
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ignored_texts(self) -> dict[str, str]:
        """Regular expression of the user -> the first key that it matches, and the number of others."""
        return {
            pattern: keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
            for pattern, keys in self.ignored.items()
        }

    @property
    def unread(self) -> tuple[str, ...]:
        """One line, with the reason, for each part of the file that is not read."""
        lines = []
        for pattern, reason in self.format.ignored_keys.items():
            if keys := sorted(key for key in self.evidence.ignored_arrays if re.fullmatch(pattern, key)):
                lines.append(f"{keys[0] if len(keys) == 1 else f'{keys[0]} and {len(keys) - 1} more'}: {reason}")
        lines += [f"{text}: ignored by --ignore '{pattern}'" for pattern, text in self.ignored_texts.items()]
        groups = Counter(map(self._group, self.evidence.other_keys))
        lines += [f"{word} ({n} array{'s' * (n > 1)}): beside the weights" for word, n in sorted(groups.items())]
        return tuple(lines)

    def _group(self, key: str) -> str:
        """Return the beginning of a key beside the weights, up to the first word that differs from the wrapper's."""
        separator = self.format.separator
        rest = without_common_path(key, f"{self.wrapper}{separator}", separator)
        return key.removesuffix(rest) + re.split(r"[./]", rest)[0]


def recognise(
    arrays: Mapping[KeyPath, StoredArray],
    notes: Mapping[str, Any],
    name: str | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> list[Match]:
    """Return the formats that a checkpoint may be in, the likeliest first.

    The time is proportional to the number of keys, even for hostile files.

    Args:
        arrays: all arrays of the file.
        notes: the metadata of the file, and the parsed JSON files beside it, by their names.
        name: the name of the only format to try; None tries all.
        strip: a prefix of the keys of the weights, after or before known wrappers; other weights are not read.
        ignore: regular expressions for whole keys, with or without wrappers, that are not parameters of the model.

    Raises:
        InputError: no format matches (the message lists the missing and unexpected keys of the nearest one), a config.json
            describes another kind of model, or `strip` or `ignore` does not fit the keys.
    """
    candidates = _candidates(notes, name)
    matches: list[Match] = []
    stored_by_separator = {each: join_keys(arrays, each) for each in dict.fromkeys(c.separator for c in candidates)}
    prefixes = {each: find_prefixes(stored, each, strip) for each, stored in stored_by_separator.items()}
    if strip is not None:
        _check_strip(strip, stored_by_separator, prefixes)
    ignored, is_any_wanted = IgnoredKeys(ignore, stored_by_separator, prefixes), False
    for separator, stored in stored_by_separator.items():
        for prefix in prefixes[separator]:
            path = next((path for path in arrays if prefix and separator.join(path).startswith(prefix)), ())
            wrapped = _WrappedWeights(stored, prefix, separator, enclosing_module(prefix, path, separator), ignored)
            is_any_wanted |= wrapped.is_wanted
            # transformers has a module "vit" too, which is in the tables of its formats: as a wrapper, it would make layers
            # that are beside it in the model those of another one.
            is_vit = strip is None and prefix.removesuffix(separator).rpartition(separator)[2] == "vit"
            for format in candidates if wrapped.is_wanted else ():
                if format.separator == separator and not (is_vit and format.model_types):
                    variants = [format.variant] if format.variant else format.tables
                    found = (wrapped.match(format.with_variant(variant), notes) for variant in variants)
                    matches += [match for match in found if match]
    if any(prefixes.values()) and not is_any_wanted:
        raise InputError("--ignore matches all keys of the weights: let it match only keys that are not parameters")
    fitting = [match for match in matches if not match.mismatches]
    for match in matches:
        if match.mismatches and all(line.startswith(_IGNORED) for line in match.mismatches):
            key = match.mismatches[0].removeprefix(_IGNORED)
            raise InputError(
                f"--ignore matches {key}, a parameter of format {match.format.name}: ignore only other keys, "
                f"or give the format with --from"
            )
    if not fitting:
        if what := describe_unreadable(arrays):
            raise InputError(what)
        _raise_if_unsupported(candidates, arrays)
        for match in matches[:1]:
            if match.format.matches_config_file(notes) and "blocks.mlp.fc1.weight" in match.evidence.axes:
                match.format.stated_fields(match.evidence)  # raises the error about the config file, which says more
        raise InputError(_no_format_message(matches, arrays, name, notes))
    order = {format.name: n for n, format in enumerate(candidates)}
    # Prefer a format that recognises the file, then one that reads more of it, then the order of the formats; matches are
    # already in the order of their wrappers.
    return sorted(
        fitting,
        key=lambda match: (not match.format.recognises(match.evidence), -len(match.arrays), order[match.format.name]),
    )


def _check_strip(
    strip: str, stored_by_separator: Mapping[str, Mapping[str, StoredArray]], prefixes: Mapping[str, list[str]]
) -> None:
    """Raise InputError if no weights are under the prefix that the user gave."""
    if not strip:
        raise InputError("--strip '' is empty: give the beginning of the keys of the model, such as net.vit.")
    if any(prefixes.values()):
        return
    keys = next(iter(stored_by_separator.values()))
    if any(is_prefix(stored, each, strip) for each, stored in stored_by_separator.items()):
        raise InputError(f"--strip {strip!r}: the keys under it have no patch projection of a known format")
    some = ", ".join(list(keys)[:3])
    raise InputError(f"--strip {strip!r} is not the beginning of a key{nearest_prefix(keys, strip) or f', such as {some}'}")


class _WrappedWeights:
    """The arrays of a file under one prefix, to be compared with formats.

    Attributes:
        is_wanted: whether the user does not ignore all of them.
    """

    def __init__(
        self, stored: Mapping[str, StoredArray], prefix: str, separator: str, module: str, ignored: IgnoredKeys
    ) -> None:
        inside = {key: array for key, array in stored.items() if key.startswith(prefix)}
        excused = {key for key in stored if ignored.matches(key, prefix)}
        read = {key: array for key, array in stored.items() if key in inside or key not in excused}
        self.is_wanted = not inside.keys() <= excused
        self._arrays = {key.removeprefix(prefix): array for key, array in inside.items()}
        self._excused = {key.removeprefix(prefix) for key in excused & inside.keys()}
        self._ignored = ignored.by_pattern(stored, prefix)
        self._others = classify_other_keys(read, prefix, separator)
        self._classifier = find_classifier(self._others.unknown, prefix, separator)
        self._stored, self._separator, self._module = stored, separator, module
        self._wrapper = prefix.removesuffix(separator)
        self._indexes: dict[Any, _KeyIndex] = {}

    def match(self, format: Format, notes: Mapping[str, Any]) -> Match | None:
        """Compare the arrays with one variant of a format; see `_match_format`."""
        adopted = self._classifier_keys(format)
        index = self._index(format, adopted)
        outside = frozenset(adopted.values())
        match = _match_format(format, index, self._others.keys - outside, notes)
        if match is None:
            return None
        excused = {key for key, old in zip(index.arrays, [*self._arrays, *adopted], strict=True) if old in self._excused}
        mismatches = [line for line in match.mismatches if line.removeprefix(_UNEXPECTED) not in excused]
        mismatches += [f"{_IGNORED}{key}" for key in match.arrays if key in excused]
        mismatches += [f"{_UNEXPECTED}{key}" for key in self._others.unknown if key not in outside]
        # A classifier beside the weights shows a module around both.
        module = self._module or (self._wrapper if adopted else "")
        return replace(
            match,
            evidence=replace(match.evidence, module=module, classifier=self._classifier if adopted else ""),
            mismatches=tuple(mismatches),
            wrapper=self._wrapper,
            alternatives=self._others.alternatives,
            ignored=self._ignored,
        )

    def _index(self, format: Format, adopted: Mapping[str, str]) -> "_KeyIndex":
        name = (tuple(format.aliases.items()), tuple(adopted))
        if name not in self._indexes:
            arrays = {**self._arrays, **{key: self._stored[outside] for key, outside in adopted.items()}}
            self._indexes[name] = _KeyIndex(_replace_aliases(arrays, format.aliases))
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


def _candidates(notes: Mapping[str, Any], name: str | None) -> list[Format]:
    """Return the formats to try: only those of a library whose JSON file is beside the weights, else all.

    Raises:
        InputError: the config.json is that of an unknown model, or the named format does not belong to its library.
    """
    named = [get(name)] if name else [get(each) for each in formats()]
    if found := [format for format in named if format.matches_config_file(notes)]:
        return found
    config = notes.get("config.json") or {}
    files = [file for file in {get(each).config_file: None for each in formats()} if notes.get(file)]
    if not files:
        return named
    kind = str(config.get("model_type", ""))
    known = list(dict.fromkeys(each for other in formats() for each in get(other).model_types))
    if kind and kind not in known:
        raise InputError(
            f"its config.json is of model_type {kind!r}, which is not a known ViT; known are {', '.join(known)}"
        )
    if not config:
        raise InputError(f"its {files[0]} is not for format {name!r}: leave --from out, or move the weights away from it")
    what = f"is of model_type {kind!r}" if kind else f"names timm's {config.get('architecture')!r}"
    if not kind and "architecture" not in config:
        some = ", ".join(map(repr, list(config)[:5]))
        raise InputError(
            f"its config.json describes a model ({some}) and names neither a model_type of transformers nor an "
            f"architecture of timm: move the weights away from it, and give its values with --set"
        )
    raise InputError(
        f"its config.json {what}, which format {name!r} is not for: leave --from out, or move the weights away from it"
    )


def join_keys(arrays: Mapping[KeyPath, StoredArray], separator: str) -> dict[str, StoredArray]:
    """Return arrays by key, with nested keys joined by a format's separator, and without empty arrays.

    A Flax pytree in a safetensors file may have keys joined by dots; they are replaced by slashes.  A saved NNX state may
    have each array under the key "value" of its variable, and Keras groups variables; neither is a part of the key.
    """
    flat = {separator.join(words): array for words, array in arrays.items() if array.size}
    if separator != "/":
        return flat
    if not any("/" in key for key in flat):
        flat = {key.replace(".", "/"): array for key, array in flat.items()}
    shorter = {key: variable for key in flat if (variable := _variable_of(key)) not in flat}
    unambiguous = len(set(shorter.values())) == len(shorter)
    return {shorter.get(key, key) if unambiguous else key: array for key, array in flat.items()}


def _variable_of(key: str) -> str:
    """Return the key of the variable of NNX or Keras whose array has this key; other keys unchanged."""
    for group in _KERAS_GROUPS:
        if key.startswith(group):
            return key.removeprefix(group)
    variable, _, last = key.rpartition("/")
    return variable if last in _NNX_VALUES and variable else key


def _replace_aliases(arrays: dict[str, StoredArray], aliases: Mapping[str, str]) -> dict[str, StoredArray]:
    """Return arrays by the keys of the format's tables; an alias is not replaced if two keys would become the same."""
    for alias, replacement in aliases.items():
        renamed = {re.sub(f"^{alias}", replacement, key): array for key, array in arrays.items()}
        arrays = renamed if len(renamed) == len(arrays) else arrays
    return arrays


class _KeyIndex:
    """An index of keys by pattern: "blocks.3.norm1.bias" is block 3 of "blocks.{block}.norm1.bias"."""

    def __init__(self, arrays: dict[str, StoredArray]) -> None:
        self.arrays = arrays
        self._by_block: dict[frozenset[_BlockField], dict[str, dict[int, str]]] = {}

    def by_block(self, fields: frozenset[_BlockField]) -> dict[str, dict[int, str]]:
        """Return the keys with a number at one of `fields`: pattern -> block -> key."""
        if fields not in self._by_block:
            found: dict[str, dict[int, str]] = {}
            for prefix, field, first in fields:
                for key in self.arrays:
                    if key.startswith(prefix) and (number := _NUMBER.match(key, len(prefix))) and int(number[0]) >= first:
                        found.setdefault(f"{prefix}{field}{key[number.end() :]}", {})[int(number[0]) - first] = key
            self._by_block[fields] = found
        return self._by_block[fields]


@dataclass(frozen=True)
class _LineMatch:
    """A line of a format's table, compared with the keys of a file.

    Attributes:
        layout: the line.
        present: keys of the line that the file has.
        missing: keys of the line that the file lacks.
    """

    layout: Layout
    present: tuple[str, ...]
    missing: tuple[str, ...]


def _match_format(format: Format, index: _KeyIndex, other_keys: frozenset[str], notes: Mapping[str, Any]) -> Match | None:
    """Match keys with one variant of a format; None without a whole patch projection or without any second MLP layer."""
    table, arrays = format.table_layouts(format.variant), index.arrays
    layouts = [layout for found in table.values() for layout in found]
    if not any(layout.key in arrays for layout in table["patch_embed.proj.weight"]):
        return None
    fields = [(each.key[: field.start()], field) for each in layouts if (field := _BLOCK.search(each.key))]
    blocks = index.by_block(frozenset((prefix, field[0], int(field[1] or 0)) for prefix, field in fields))
    numbers = {n for layout in layouts for pattern in _key_patterns(layout) for n in blocks.get(pattern, ())}
    depth = min(max(numbers) + 1, len(numbers) + _MAX_MISSING_SHOWN) if numbers else 0
    lines = {name: [_match_line(layout, arrays, blocks, depth) for layout in found] for name, found in table.items()}
    complete = {name: [line for line in found if line.present and not line.missing] for name, found in lines.items()}
    if not complete["patch_embed.proj.weight"] or not any(line.present for line in lines["blocks.mlp.fc2.weight"]):
        return None
    known_keys = {key for found in lines.values() for line in found for key in line.present}
    complete_keys = {key for found in complete.values() for line in found for key in line.present}
    # Only keys of lines that are partly present are missing.  A format may have a line for the bias of queries and values
    # and a line for the bias of all three: the first is not an incomplete form of the second.
    partial = [line for name, found in lines.items() if not complete[name] for line in found]
    missing = [key for line in partial if any(key not in complete_keys for key in line.present) for key in line.missing]
    if not complete["blocks.mlp.fc1.weight"] and not any(line.present for line in lines["blocks.mlp.fc1.weight"]):
        missing += lines["blocks.mlp.fc1.weight"][0].missing  # every model has it, whatever else is optional
    rest = [key for key in arrays if key not in known_keys]
    ignored_pattern = _union(tuple(format.ignored_keys_of_variant))
    ignored = {key: arrays[key] for key in rest if ignored_pattern.fullmatch(key)}
    mismatches = [f"missing {key}" for key in missing] + [f"{_UNEXPECTED}{key}" for key in rest if key not in ignored]
    shapes = {
        name: [(line.layout, arrays[line.present[0]].shape) for line in found] for name, found in complete.items() if found
    }
    sizes, axes, contradictions = _solve_sizes(shapes, {**FIXED_SIZES, "block": depth} if depth else FIXED_SIZES)
    evidence = Evidence(notes, other_keys, ignored, axes, sizes, format.variant)
    parameters = {key: arrays[key] for key in arrays if key in known_keys}
    return Match(format, parameters, evidence, (*mismatches, *contradictions))


@cache
def _union(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches if any of the patterns does; without patterns, it matches nothing."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _key_patterns(layout: Layout) -> tuple[str, ...]:
    """Return the keys of a layout with every axis except block spelled out: "layer.{block}.attn.query.weight", ..."""
    return _expand_pattern(layout.key, tuple(layout.spellings.items()))


@cache
def _expand_pattern(key: str, spellings: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[str, ...]:
    """Return the result of `_key_patterns`; the cache needs hashable arguments."""
    field = _BLOCK.search(key)
    layout = Layout(_BLOCK.sub("{block}", key), (), {**dict(spellings), "block": (field[0] if field else "",)})
    return tuple(layout.keys({**dict.fromkeys(layout.key_axes, 0), **FIXED_SIZES, "block": 1}))


def _match_line(
    layout: Layout, arrays: Mapping[str, StoredArray], blocks: Mapping[str, Mapping[int, str]], depth: int
) -> _LineMatch:
    """Find the keys of one line, and at most `_MAX_MISSING_SHOWN` missing keys for each pattern."""
    present: list[str] = []
    missing: list[str] = []
    for pattern in _key_patterns(layout):
        field = _BLOCK.search(pattern)
        if not field:
            (present if pattern in arrays else missing).append(pattern)
            continue
        found = blocks.get(pattern, {})
        present += [found[number] for number in sorted(found) if number < depth]
        if len(found) < depth:
            absent = (number for number in range(depth) if number not in found)
            first = int(field[1] or 0)
            missing += [pattern.replace(field[0], str(first + n)) for n in islice(absent, _MAX_MISSING_SHOWN)]
    return _LineMatch(layout, tuple(present), tuple(missing))


def _solve_sizes(
    shapes: Mapping[str, list[tuple[Layout, Shape]]], known: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, frozenset[str]], list[str]]:
    """Return the length of each axis, the axes of each parameter, and a line for each contradictory shape.

    A dimension with one unknown axis gives the length of that axis.  Table lines that do not fit these lengths are dropped.
    More entries are lengths of merged axes: see `_MERGED_SIZES`.

    Args:
        shapes: parameter -> its possible layouts, each with the shape of one of its arrays.
        known: the lengths that are known beforehand.
    """
    sizes, contradictions = dict(known), []
    open_lines = {name: list(lines) for name, lines in shapes.items()}
    while True:
        before = (len(sizes), sum(map(len, open_lines.values())))
        for name, lines in open_lines.items():
            fitting = [(layout, shape) for layout, shape in lines if _shape_fits(layout, shape, sizes)]
            if not fitting:
                layout, shape = lines[0]
                contradictions.append(f"misshapen {layout.key} {shape}, expected {layout.axes_text}")
            open_lines[name] = fitting
            if len(fitting) == 1:
                for length, unknown in _unknown_axes(*fitting[0], sizes):
                    if len(unknown) == 1:
                        sizes[unknown[0]] = length
                    elif merged := _MERGED_SIZES.get(frozenset(unknown)):
                        sizes[merged] = length
        open_lines = {name: lines for name, lines in open_lines.items() if lines}
        if (len(sizes), sum(map(len, open_lines.values()))) == before or contradictions:
            break
    if "pair" in sizes:
        sizes.setdefault("dim", 2 * sizes["pair"])
    if "head" in sizes and "dim" in sizes:
        sizes["inner"] = sizes["head"] * sizes["dim"]
    axes = {name: frozenset(lines[0][0].parameter_axes) for name, lines in open_lines.items()}
    return sizes, axes, contradictions


def _unknown_axes(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Yield for each dimension its length divided by the known lengths (-1 if not divisible), and the unknown axes."""
    for number, (length, dim) in enumerate(zip(shape, layout.dims, strict=True)):
        unknown = []
        if number == 0 and (layout.before or layout.after):
            others = [_count_if_known(segment, sizes) for segment in (*layout.before, *layout.after)]
            if None in others:
                continue
            length -= sum(count for count in others if count is not None)
        for axis in dim:
            if axis.name not in sizes:
                unknown.append(axis.name)
            elif length % sizes[axis.name] == 0:
                length //= sizes[axis.name]
            else:
                length = -1
        yield length, unknown


def _count_if_known(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int | None:
    """Return the product of the lengths of merged axes; None if it is not known."""
    missing = frozenset(axis for axis in axes if axis not in sizes)
    rest = sizes.get(_MERGED_SIZES.get(missing, "")) if missing else 1
    return None if rest is None else rest * prod(sizes[axis] for axis in axes if axis not in missing)


def _shape_fits(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> bool:
    """Return whether a layout can have this shape with the lengths that are known."""
    if len(shape) != len(layout.dims):
        return False
    return all(
        length >= 1
        and (length == 1 or bool(unknown))
        and sizes.get(_MERGED_SIZES.get(frozenset(unknown), ""), length) == length
        for length, unknown in _unknown_axes(layout, shape, sizes)
    )


def _raise_if_unsupported(candidates: list[Format], arrays: Iterable[KeyPath]) -> None:
    """Raise InputError if a key shows that the model computes a function that `ViTConfig` cannot express."""
    for format in candidates:
        keys = [format.separator.join(words) for words in arrays] if format.refused_keys else []
        for pattern, what in format.refused_keys.items():
            if key := next((key for key in keys if re.search(pattern, key)), None):
                raise InputError(f"{key}, of format {format.name}: {what}, which ViTConfig cannot express")


def _no_format_message(
    matches: list[Match], arrays: Mapping[KeyPath, StoredArray], name: str | None, notes: Mapping[str, Any]
) -> str:
    """Return the message for a file that matches no format, with the missing and unexpected keys of the nearest one."""
    if not matches:
        keys = ["/".join(words) for words in arrays]
        if empty := [key for key, array in zip(keys, arrays.values(), strict=True) if not array.size]:
            return (
                f"{len(empty)} of its {len(keys)} arrays are empty, such as {empty[0]}, as in files of DeepSpeed's ZeRO-3: "
                f"gather the weights and save them again"
            )
        some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        for file in {get(each).config_file: None for each in formats()}:
            if config := notes.get(file):
                kind = next((word for word in ("model_type", "architecture") if word in config), "")
                what = f"is of {kind} {config[kind]!r}, which" if kind else "describes a model that"
                return f"its {file} {what} has other keys than {some}: give the {file} of these weights"
        which = f"format {name!r} has no such keys" if name else "no format has such keys"
        for separator in dict.fromkeys(get(each).separator for each in ([name] if name else formats())):
            if prefix := unknown_prefix(join_keys(arrays, separator), separator):
                return f"{which}: {some}; --strip {prefix} reads the model that begins there"
        return f"{which}: {some or 'there are none'}; `python -m parity formats` lists the formats and where their keys are"
    best = min(matches, key=lambda match: (len(match.mismatches), -len(match.arrays)))
    shown = "; ".join(best.mismatches[:20]) + (
        f"; and {len(best.mismatches) - 20} more" if len(best.mismatches) > 20 else ""
    )
    to_remove = any(line.startswith(_UNEXPECTED) for line in best.mismatches)
    remove = "Remove those keys (with --ignore REGEX, if the model does not use them), or give the format with --from"
    remedy = remove if to_remove else "Fetch or save the weights again"
    return f"these weights match no known format; the nearest is {best.format.name}, except for {shown}. {remedy}"
