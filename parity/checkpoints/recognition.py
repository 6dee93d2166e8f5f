"""Recognise the format of a checkpoint: its table has all keys of the checkpoint, and the checkpoint all required keys.

Weights may be wrapped: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are removed.  Other content of the file is reported and not read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.formats import Evidence, Format, formats, get
from parity.checkpoints.layout import Layout
from parity.checkpoints.unreadable import describe_unreadable
from parity.checkpoints.wrappers import classify_other_keys, enclosing_module, find_prefixes
from vit_spec import InputError

Shape = tuple[int, ...]

_MAX_MISSING_SHOWN = 20  # missing keys of one table line that a message lists
_NUMBER = re.compile(r"\d{1,9}(?!\d)")

FIXED_SIZES = {"qkv": 3, "kv": 2, "glu": 2}  # axes whose length is the same in every model


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
    """

    format: Format
    arrays: Mapping[str, StoredArray]
    evidence: Evidence
    mismatches: tuple[str, ...]
    wrapper: str = ""
    alternatives: tuple[str, ...] = ()

    @property
    def unread(self) -> tuple[str, ...]:
        """One line, with the reason, for each part of the file that is not read."""
        lines = []
        for pattern, reason in self.format.ignored_keys.items():
            if keys := sorted(key for key in self.evidence.ignored_arrays if re.fullmatch(pattern, key)):
                lines.append(f"{keys[0] if len(keys) == 1 else f'{keys[0]} and {len(keys) - 1} more'}: {reason}")
        groups = Counter(re.split(r"[./]", key)[0] for key in self.evidence.other_keys)
        lines += [f"{word} ({n} array{'s' * (n > 1)}): beside the weights" for word, n in sorted(groups.items())]
        return tuple(lines)


def recognise(arrays: Mapping[KeyPath, StoredArray], notes: Mapping[str, Any], name: str | None = None) -> list[Match]:
    """Return the formats that a checkpoint may be in, the likeliest first.

    The time is proportional to the number of keys, even for hostile files.

    Args:
        arrays: all arrays of the file.
        notes: the metadata of the file, and the parsed JSON files beside it, by their names.
        name: the name of the only format to try; None tries all.

    Raises:
        InputError: no format matches (the message lists the missing and unexpected keys of the nearest one), or a
            config.json describes another kind of model.
    """
    candidates = _candidates(notes, name)
    matches: list[Match] = []
    for separator in dict.fromkeys(format.separator for format in candidates):
        stored = join_keys(arrays, separator)
        for prefix in find_prefixes(stored, separator):
            inside = {key.removeprefix(prefix): array for key, array in stored.items() if key.startswith(prefix)}
            path = next((path for path in arrays if prefix and separator.join(path).startswith(prefix)), ())
            module = enclosing_module(prefix, path, separator)
            others = classify_other_keys(stored, prefix, separator)
            unexpected = [f"unexpected {key}" for key in others.unknown]
            indexes = {}
            for format in candidates:
                if format.separator != separator:
                    continue
                aliases = tuple(format.aliases.items())
                if aliases not in indexes:
                    indexes[aliases] = _KeyIndex(_replace_aliases(inside, format.aliases))
                for variant in [format.variant] if format.variant else format.tables:
                    if match := _match_format(format.with_variant(variant), indexes[aliases], others.keys, notes):
                        matches.append(
                            replace(
                                match,
                                evidence=replace(match.evidence, module=module),
                                mismatches=(*match.mismatches, *unexpected),
                                wrapper=prefix.removesuffix(separator),
                                alternatives=others.alternatives,
                            )
                        )
    fitting = [match for match in matches if not match.mismatches]
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

    A Flax pytree in a safetensors file may have keys joined by dots; they are replaced by slashes.
    """
    flat = {separator.join(words): array for words, array in arrays.items() if array.size}
    dotted = separator == "/" and not any("/" in key for key in flat)
    return {key.replace(".", "/"): array for key, array in flat.items()} if dotted else flat


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
        self._by_block: dict[frozenset[str], dict[str, dict[int, str]]] = {}

    def by_block(self, prefixes: frozenset[str]) -> dict[str, dict[int, str]]:
        """Return the keys that begin with one of `prefixes` and a number: pattern -> block -> key."""
        if prefixes not in self._by_block:
            found: dict[str, dict[int, str]] = {}
            for prefix in prefixes:
                for key in self.arrays:
                    if key.startswith(prefix) and (number := _NUMBER.match(key, len(prefix))):
                        found.setdefault(f"{prefix}{{block}}{key[number.end() :]}", {})[int(number[0])] = key
            self._by_block[prefixes] = found
        return self._by_block[prefixes]


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
    blocks = index.by_block(frozenset(each.key.partition("{block}")[0] for each in layouts if "{block}" in each.key))
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
    mismatches = [f"missing {key}" for key in missing] + [f"unexpected {key}" for key in rest if key not in ignored]
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
    layout = Layout(key, (), {**dict(spellings), "block": ("{block}",)})
    return tuple(layout.keys({**dict.fromkeys(layout.key_axes, 0), **FIXED_SIZES, "block": 1}))


def _match_line(
    layout: Layout, arrays: Mapping[str, StoredArray], blocks: Mapping[str, Mapping[int, str]], depth: int
) -> _LineMatch:
    """Find the keys of one line, and at most `_MAX_MISSING_SHOWN` missing keys for each pattern."""
    present: list[str] = []
    missing: list[str] = []
    for pattern in _key_patterns(layout):
        if "{block}" not in pattern:
            (present if pattern in arrays else missing).append(pattern)
            continue
        found = blocks.get(pattern, {})
        present += [found[number] for number in sorted(found) if number < depth]
        if len(found) < depth:
            absent = (number for number in range(depth) if number not in found)
            missing += [pattern.replace("{block}", str(number)) for number in islice(absent, _MAX_MISSING_SHOWN)]
    return _LineMatch(layout, tuple(present), tuple(missing))


def _solve_sizes(
    shapes: Mapping[str, list[tuple[Layout, Shape]]], known: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, frozenset[str]], list[str]]:
    """Return the length of each axis, the axes of each parameter, and a line for each contradictory shape.

    A dimension with one unknown axis gives the length of that axis.  Table lines that do not fit these lengths are dropped.
    Two more entries are lengths of merged axes: "inner" of head and dim, which most formats merge, and "patch" of a
    flattened patch.

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
                    elif set(unknown) == {"head", "dim"}:
                        sizes["inner"] = length
                    elif set(unknown) == {"rgb", "ph", "pw"}:
                        sizes["patch"] = length
        open_lines = {name: lines for name, lines in open_lines.items() if lines}
        if (len(sizes), sum(map(len, open_lines.values()))) == before or contradictions:
            break
    if "head" in sizes and "dim" in sizes:
        sizes["inner"] = sizes["head"] * sizes["dim"]
    axes = {name: frozenset(lines[0][0].parameter_axes) for name, lines in open_lines.items()}
    return sizes, axes, contradictions


def _unknown_axes(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Yield for each dimension its length divided by the known lengths (-1 if not divisible), and the unknown axes."""
    for length, dim in zip(shape, layout.dims, strict=True):
        unknown = []
        for axis in dim:
            if axis.name not in sizes:
                unknown.append(axis.name)
            elif length % sizes[axis.name] == 0:
                length //= sizes[axis.name]
            else:
                length = -1
        yield length, unknown


def _shape_fits(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> bool:
    """Return whether a layout can have this shape with the lengths that are known."""
    if len(shape) != len(layout.dims):
        return False
    return all(
        length >= 1
        and (length == 1 or bool(unknown))
        and (set(unknown) != {"head", "dim"} or sizes.get("inner", length) == length)
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
        return f"{which}: {some or 'there are none'}; `python -m parity formats` lists the formats and where their keys are"
    best = min(matches, key=lambda match: (len(match.mismatches), -len(match.arrays)))
    shown = "; ".join(best.mismatches[:20]) + (
        f"; and {len(best.mismatches) - 20} more" if len(best.mismatches) > 20 else ""
    )
    to_remove = any(line.startswith("unexpected ") for line in best.mismatches)
    remedy = "Remove those keys or give the format with --from" if to_remove else "Fetch or save the weights again"
    return f"these weights match no known format; the nearest is {best.format.name}, except for {shown}. {remedy}"
