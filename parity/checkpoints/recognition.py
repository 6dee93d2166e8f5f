"""Which format a file is in: the one whose keys are all there, and whose keys alone are there.

Files wrap weights: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are peeled, and what lies beside the weights is told and not read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from parity.checkpoints.containers.container import Stored, Words
from parity.checkpoints.formats import Evidence, Format, formats, get
from parity.checkpoints.layout import Layout
from parity.checkpoints.wrappers import beside, roots
from vit_spec import InputError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_MISSING = 20  # keys of one line that a message names
_NUMBER = re.compile(r"\d{1,9}(?!\d)")

COUNTS = {"qkv": 3, "kv": 2, "glu": 2}  # axes whose length is the same in every model


@dataclass(frozen=True)
class Match:
    """A reading of a file as a format.

    format: with the variant chosen.
    arrays: those of the parameters, by key as the format has it, without wrappers.
    evidence: what the file shows of the model.
    misfits: in words, why it is not this format after all.
    wrapper: what the keys stood behind; "" for nothing.
    others: what lies beside that could be meant as well, or as a part of the model: other weights, a predictor, a scaler.
    """

    format: Format
    arrays: Mapping[str, Stored]
    evidence: Evidence
    misfits: tuple[str, ...]
    wrapper: str = ""
    others: tuple[str, ...] = ()

    @property
    def left(self) -> tuple[str, ...]:
        """What of the file is not read, in lines with the reason."""
        lines = []
        for pattern, reason in self.format.ignored.items():
            if keys := sorted(key for key in self.evidence.ignored if re.fullmatch(pattern, key)):
                lines.append(f"{keys[0] if len(keys) == 1 else f'{keys[0]} and {len(keys) - 1} more'}: {reason}")
        groups = Counter(re.split(r"[./]", key)[0] for key in self.evidence.beside)
        lines += [f"{word} ({n} array{'s' * (n > 1)}): beside the weights" for word, n in sorted(groups.items())]
        return tuple(lines)


def recognise(arrays: Mapping[Words, Stored], notes: Mapping[str, Any], name: str | None = None) -> list[Match]:
    """Return the formats that a file may be in, the likeliest first.

    The time it takes is proportional to the number of keys, whatever they are.

    Args:
        arrays: all that the file holds.
        notes: what else it holds.
        name: a format to hold the file to; None tries all.

    Raises:
        InputError: none fits; lists what the nearest lacks and has too much.  Or a config.json of another kind of model.
    """
    candidates = _candidates(notes, name)
    matches: list[Match] = []
    for separator in dict.fromkeys(format.separator for format in candidates):
        stored = joined(arrays, separator)
        for root in roots(stored, separator):
            inside = {key.removeprefix(root): array for key, array in stored.items() if key.startswith(root)}
            aside = beside(stored, root, separator)
            foreign = [f"unexpected {key}" for key in aside.foreign]
            views = {}
            for format in candidates:
                if format.separator != separator:
                    continue
                aliases = tuple(format.aliases.items())
                if aliases not in views:
                    views[aliases] = _View(_respelled(inside, format.aliases))
                for variant in [format.variant] if format.variant else format.tables:
                    if match := _match(format.of(variant), views[aliases], aside.keys, notes):
                        misfits, wrapper = (*match.misfits, *foreign), root.removesuffix(separator)
                        matches.append(replace(match, misfits=misfits, wrapper=wrapper, others=aside.others))
    fitting = [match for match in matches if not match.misfits]
    if not fitting:
        _refuse(candidates, arrays)
        for match in matches[:1]:
            if match.format.owns(notes):
                match.format.told(match.evidence)  # a refusal by what the file beside says tells more than one by keys
        raise InputError(_no_format(matches, ["/".join(words) for words in arrays], name, notes))
    order = {format.name: n for n, format in enumerate(candidates)}
    # Prefer what claims the file, then what reads more of it, then the order of the formats, then the outer wrapper.
    return sorted(
        fitting,
        key=lambda match: (not match.format.recognises(match.evidence), -len(match.arrays), order[match.format.name]),
    )


def _candidates(notes: Mapping[str, Any], name: str | None) -> list[Format]:
    """Return the formats that a file may be in: beside the JSON file of a library, those of that library alone.

    Raises:
        InputError: a config.json of a model that no format knows, or a format by name that is not of its library.
    """
    named = [get(name)] if name else [get(each) for each in formats()]
    if found := [format for format in named if format.owns(notes)]:
        return found
    config = notes.get("config.json") or {}
    files = [file for file in {get(each).described_in: None for each in formats()} if notes.get(file)]
    if not files:
        return named
    kind = str(config.get("model_type", ""))
    known = list(dict.fromkeys(each for other in formats() for each in get(other).model_types))
    if kind and kind not in known:
        raise InputError(
            f"its config.json is of model_type {kind!r}, which is no ViT that is known here; known are {', '.join(known)}"
        )
    if not config:
        raise InputError(f"its {files[0]} is not for format {name!r}: leave --from out, or move the weights away from it")
    said = f"is of model_type {kind!r}" if kind else f"names timm's {config.get('architecture')!r}"
    if not kind and "architecture" not in config:
        some = ", ".join(map(repr, list(config)[:5]))
        raise InputError(
            f"its config.json describes a model ({some}) and names neither a model_type of transformers nor an "
            f"architecture of timm: move the weights away from it, and give what it says with --set"
        )
    raise InputError(
        f"its config.json {said}, format {name!r} is not for that: leave --from out, or move the weights away from it"
    )


def joined(arrays: Mapping[Words, Stored], separator: str) -> dict[str, Stored]:
    """Return arrays by key, nested ones joined as a format joins them, without those that hold nothing.

    Keys of a Flax tree come joined by dots too, where they were kept in safetensors.
    """
    flat = {separator.join(words): array for words, array in arrays.items() if array.size}
    dotted = separator == "/" and not any("/" in key for key in flat)
    return {key.replace(".", "/"): array for key, array in flat.items()} if dotted else flat


def _respelled(arrays: dict[str, Stored], aliases: Mapping[str, str]) -> dict[str, Stored]:
    """Return arrays by the keys that the format's tables have; as they are where two would share one."""
    for alias, own in aliases.items():
        renamed = {re.sub(f"^{alias}", own, key): array for key, array in arrays.items()}
        arrays = renamed if len(renamed) == len(arrays) else arrays
    return arrays


class _View:
    """Keys by pattern: "blocks.3.norm1.bias" is block 3 of "blocks.{block}.norm1.bias"."""

    def __init__(self, arrays: dict[str, Stored]) -> None:
        self.arrays = arrays
        self._counted: dict[frozenset[str], dict[str, dict[int, str]]] = {}

    def by_block(self, prefixes: frozenset[str]) -> dict[str, dict[int, str]]:
        """Return the keys that begin with one of `prefixes` and a number: pattern -> block -> key."""
        if prefixes not in self._counted:
            found: dict[str, dict[int, str]] = {}
            for prefix in prefixes:
                for key in self.arrays:
                    if key.startswith(prefix) and (number := _NUMBER.match(key, len(prefix))):
                        found.setdefault(f"{prefix}{{block}}{key[number.end() :]}", {})[int(number[0])] = key
            self._counted[prefixes] = found
        return self._counted[prefixes]


@dataclass(frozen=True)
class _Line:
    """A line of a table in a file: its layout, a key that is there, and the keys that are and that are not."""

    layout: Layout
    there: tuple[str, ...]
    missing: tuple[str, ...]


def _match(format: Format, view: _View, beside: frozenset[str], notes: Mapping[str, Any]) -> Match | None:
    """Read keys as one format; None where hardly a key is the format's."""
    table, arrays = format.lines(format.variant), view.arrays
    layouts = [layout for found in table.values() for layout in found]
    if not any(layout.key in arrays for layout in table["patch_embed.proj.weight"]):
        return None
    blocks = view.by_block(frozenset(each.key.partition("{block}")[0] for each in layouts if "{block}" in each.key))
    numbers = {n for layout in layouts for pattern in _patterns(layout) for n in blocks.get(pattern, ())}
    depth = min(max(numbers) + 1, len(numbers) + _MISSING) if numbers else 0
    lines = {name: [_line(layout, arrays, blocks, depth) for layout in found] for name, found in table.items()}
    full = {name: [line for line in found if line.there and not line.missing] for name, found in lines.items()}
    if not full["patch_embed.proj.weight"] or not full["blocks.mlp.fc2.weight"]:
        return None
    taken = {key for found in lines.values() for line in found for key in line.there}
    whole = {key for found in full.values() for line in found for key in line.there}
    # A bias of queries and values is no half of one of all three, where the format has lines for both.
    partial = [line for name, found in lines.items() if not full[name] for line in found]
    missing = [key for line in partial if any(key not in whole for key in line.there) for key in line.missing]
    if not full["blocks.mlp.fc1.weight"] and not any(line.there for line in lines["blocks.mlp.fc1.weight"]):
        missing += lines["blocks.mlp.fc1.weight"][0].missing  # which every model has, whatever else is optional
    rest = [key for key in arrays if key not in taken]
    passed = _any_of(tuple(format.passed))
    ignored = {key: arrays[key] for key in rest if passed.fullmatch(key)}
    misfits = [f"missing {key}" for key in missing] + [f"unexpected {key}" for key in rest if key not in ignored]
    there = {name: [(line.layout, arrays[line.there[0]].shape) for line in found] for name, found in full.items() if found}
    solved, axes, trouble = _solve(there, {**COUNTS, "block": depth} if depth else COUNTS)
    evidence = Evidence(notes, beside, ignored, axes, solved, format.variant)
    return Match(format, {key: arrays[key] for key in arrays if key in taken}, evidence, (*misfits, *trouble))


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern that any of several is; one that nothing is where there are none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def _patterns(layout: Layout) -> tuple[str, ...]:
    """Return the keys of a layout with every axis spelled but the block."""
    return _spelled(layout.key, tuple(layout.spellings.items()))


@cache
def _spelled(key: str, spellings: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[str, ...]:
    layout = Layout(key, (), {**dict(spellings), "block": ("{block}",)})
    return tuple(layout.keys({**dict.fromkeys(layout.spelled, 0), **COUNTS, "block": 1}))


def _line(layout: Layout, arrays: Mapping[str, Stored], blocks: Mapping[str, Mapping[int, str]], depth: int) -> _Line:
    """Find the keys of one line; of those that are missing no more than a message shows."""
    there: list[str] = []
    missing: list[str] = []
    for pattern in _patterns(layout):
        if "{block}" not in pattern:
            (there if pattern in arrays else missing).append(pattern)
            continue
        found = blocks.get(pattern, {})
        there += [found[number] for number in sorted(found) if number < depth]
        if len(found) < depth:
            lacking = (number for number in range(depth) if number not in found)
            missing += [pattern.replace("{block}", str(number)) for number in islice(lacking, _MISSING)]
    return _Line(layout, tuple(there), tuple(missing))


def _solve(
    there: Mapping[str, list[tuple[Layout, Shape]]], known: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, frozenset[str]], list[str]]:
    """Return the lengths of the axes, the axes of each parameter, and what of the arrays' shapes contradicts itself.

    A dimension with one unknown axis tells its length.  Lines that the lengths rule out are dropped; "inner" is the
    length of heads and their width together, which most formats keep merged, "patch" that of a flattened patch.

    there: the lines of each parameter, with the shape of one of their arrays.
    """
    sizes, trouble = dict(known), []
    open_lines = {name: list(lines) for name, lines in there.items()}
    while True:
        before = (len(sizes), sum(map(len, open_lines.values())))
        for name, lines in open_lines.items():
            fitting = [(layout, shape) for layout, shape in lines if _fits(layout, shape, sizes)]
            if not fitting:
                layout, shape = lines[0]
                trouble.append(f"misshapen {layout.key} {shape}, expected {layout.axes}")
            open_lines[name] = fitting
            if len(fitting) == 1:
                for length, words in _dims(*fitting[0], sizes):
                    if len(words) == 1:
                        sizes[words[0]] = length
                    elif set(words) == {"head", "dim"}:
                        sizes["inner"] = length
                    elif set(words) == {"rgb", "ph", "pw"}:
                        sizes["patch"] = length
        open_lines = {name: lines for name, lines in open_lines.items() if lines}
        if (len(sizes), sum(map(len, open_lines.values()))) == before or trouble:
            break
    if "head" in sizes and "dim" in sizes:
        sizes["inner"] = sizes["head"] * sizes["dim"]
    axes = {name: frozenset(lines[0][0].words) for name, lines in open_lines.items()}
    return sizes, axes, trouble


def _dims(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Yield what is left of each dimension once the known lengths are divided out, and the words that are left."""
    for length, dim in zip(shape, layout.dims, strict=True):
        unknown = []
        for axis in dim:
            if axis.holder not in sizes:
                unknown.append(axis.holder)
            elif length % sizes[axis.holder] == 0:
                length //= sizes[axis.holder]
            else:
                length = -1
        yield length, unknown


def _fits(layout: Layout, shape: Shape, sizes: Mapping[str, int]) -> bool:
    if len(shape) != len(layout.dims):
        return False
    return all(
        length >= 1
        and (length == 1 or bool(words))
        and (set(words) != {"head", "dim"} or sizes.get("inner", length) == length)
        for length, words in _dims(layout, shape, sizes)
    )


def _refuse(candidates: list[Format], arrays: Iterable[Words]) -> None:
    """Say of a file that is known to be none of these models what it computes instead."""
    for format in candidates:
        keys = [format.separator.join(words) for words in arrays] if format.refused else []
        for pattern, what in format.refused.items():
            if key := next((key for key in keys if re.search(pattern, key)), None):
                raise InputError(f"{key}, of format {format.name}: {what}, for which ViTConfig has no word")


def _no_format(matches: list[Match], keys: list[str], name: str | None, notes: Mapping[str, Any]) -> str:
    """Say why no format fits, by the nearest."""
    if not matches:
        some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        for file in {get(each).described_in: None for each in formats()}:
            if config := notes.get(file):
                kind = next((word for word in ("model_type", "architecture") if word in config), "")
                what = f"is of {kind} {config[kind]!r}, which" if kind else "describes a model that"
                return f"its {file} {what} has other keys than {some}: give the {file} of these very weights"
        which = f"format {name!r} has no such keys" if name else "no format has such keys"
        return f"{which}: {some or 'there are none'}; `python -m parity formats` lists the formats and where their keys are"
    best = min(matches, key=lambda match: (len(match.misfits), -len(match.arrays)))
    shown = "; ".join(best.misfits[:20]) + (f"; and {len(best.misfits) - 20} more" if len(best.misfits) > 20 else "")
    return (
        f"these weights are in no format that is known here; nearest is {best.format.name}, but for {shown}. "
        f"Take those keys out or give the format with --from"
    )
