"""Recognise the format of a checkpoint: its table has all keys of the checkpoint, and the checkpoint all required keys.

Weights may be wrapped: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are removed.  Other content of the file is reported and not read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from parity.checkpoints.columns import pieces_of
from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.formats import Evidence, Format, formats, get
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.ignored_keys import IgnoredKeys
from parity.checkpoints.layout import KERAS_GROUPS, NNX_VALUES
from parity.checkpoints.table_matching import KeyIndex, match_lines, solve_sizes
from parity.checkpoints.unreadable import describe_reparametrized, describe_unreadable
from parity.checkpoints.wrappers import (
    CLASSIFIERS,
    classify_other_keys,
    enclosing_module,
    find_classifier,
    find_prefixes,
    is_prefix,
    nearest_prefix,
    unknown_prefix,
    without_common_path,
    without_inner_modules,
)
from vit_spec import InputError

_UNEXPECTED, _IGNORED = "unexpected ", "ignored "  # begin a mismatch, before the key


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
        ignored_by_table: the same for the expressions in the file of a format that the user defines.
    """

    format: Format
    arrays: Mapping[str, StoredArray]
    evidence: Evidence
    mismatches: tuple[str, ...]
    wrapper: str = ""
    alternatives: tuple[str, ...] = ()
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored_by_table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ignored_texts(self) -> dict[str, str]:
        """Regular expression of the user -> the first key that it matches, and the number of others."""
        return {pattern: _first_of(keys) for pattern, keys in self.ignored.items()}

    @property
    def unread(self) -> tuple[str, ...]:
        """One line, with the reason, for each part of the file that is not read."""
        lines = []
        for pattern, reason in self.format.ignored_keys.items():
            if keys := sorted(key for key in self.evidence.ignored_arrays if re.fullmatch(pattern, key)):
                lines.append(f"{_first_of(keys)}: {reason}")
        reasons = self.format.definition.ignored if self.format.definition else {}
        lines += [f"{_first_of(keys)}: {reasons[pattern]}" for pattern, keys in self.ignored_by_table.items()]
        lines += [f"{text}: ignored by --ignore '{pattern}'" for pattern, text in self.ignored_texts.items()]
        groups = Counter(map(self._group, self.evidence.other_keys))
        lines += [f"{word} ({n} array{'s' * (n > 1)}): beside the weights" for word, n in sorted(groups.items())]
        return tuple(lines)

    def _group(self, key: str) -> str:
        """Return the beginning of a key beside the weights, up to the first word that differs from the wrapper's."""
        separator = self.format.separator
        rest = without_common_path(key, f"{self.wrapper}{separator}", separator)
        return key.removesuffix(rest) + re.split(r"[./]", rest)[0]


def _first_of(keys: Sequence[str]) -> str:
    """Return the first of some keys, and the number of others."""
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


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
    own_prefixes = {c.name: _prefixes_in_table(c, stored_by_separator[c.separator], strip) for c in candidates}
    tried = {
        each: list(dict.fromkeys([*found, *(p for c in candidates if c.separator == each for p in own_prefixes[c.name])]))
        for each, found in prefixes.items()
    }
    ignored, is_any_wanted = IgnoredKeys(ignore, stored_by_separator, tried), False
    by_table: dict[str, IgnoredKeys] = {}
    for separator, stored in stored_by_separator.items():
        for prefix in tried[separator]:
            path = next((path for path in arrays if prefix and separator.join(path).startswith(prefix)), ())
            module = enclosing_module(prefix, path, separator)
            wrapped = _WrappedWeights(stored, prefix, separator, module, ignored)
            is_any_wanted |= wrapped.is_wanted
            # transformers has a module "vit" too, which is in the tables of its formats: as a wrapper, it would make layers
            # that are beside it in the model those of another one.
            is_vit = strip is None and prefix.removesuffix(separator).rpartition(separator)[2] == "vit"
            for format in candidates if wrapped.is_wanted else ():
                if prefix not in (own_prefixes[format.name] or prefixes[separator]):
                    continue
                if format.separator == separator and not (is_vit and format.model_types):
                    weights = wrapped
                    if format.definition and format.definition.ignored and _has_projection(format, stored, prefix):
                        if format.name not in by_table:
                            patterns, source = list(format.definition.ignored), format.definition.source
                            by_table[format.name] = IgnoredKeys(patterns, stored_by_separator, tried, source)
                        own = by_table[format.name]
                        weights = _WrappedWeights(stored, prefix, separator, module, ignored, own)
                    variants = [format.variant] if format.variant else format.tables
                    found = (weights.match(format.with_variant(variant), notes) for variant in variants)
                    matches += [match for match in found if match]
    if any(prefixes.values()) and not is_any_wanted:
        raise InputError("--ignore matches all keys of the weights: let it match only keys that are not parameters")
    fitting = [match for match in matches if not match.mismatches]
    for match in matches:
        if match.mismatches and all(line.startswith(_IGNORED) for line in match.mismatches):
            key, definition = match.mismatches[0].removeprefix(_IGNORED), match.format.definition
            if definition and not any(key in keys for keys in match.ignored.values()):
                raise InputError(f"{definition.source} ignores {key}, a parameter of its table: correct one of them")
            raise InputError(
                f"--ignore matches {key}, a parameter of format {match.format.name}: ignore only other keys, "
                f"or give the format with --from"
            )
    if not fitting:
        if what := describe_unreadable(arrays):
            raise InputError(what)
        keys = _unexpected(_nearest(matches)) if matches else [".".join(path) for path in arrays]
        if what := describe_reparametrized(set(keys)):
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


def _prefixes_in_table(format: Format, stored: Mapping[str, StoredArray], strip: str | None) -> list[str]:
    """Return the prefixes with the wrappers that the file of a format names, if keys have them and the user gives none."""
    wrappers = format.definition.wrappers if format.definition and strip is None else ()
    return [prefix for wrapper in wrappers for prefix in find_prefixes(stored, format.separator, wrapper)]


def _has_projection(format: Format, stored: Mapping[str, StoredArray], prefix: str) -> bool:
    """Return whether keys with a prefix have the patch projection of a format that a user defines."""
    return any(prefix + layout.key in stored for layout in format.table_layouts("")[PROJECTION])


def _candidates(notes: Mapping[str, Any], name: str | None) -> list[Format]:
    """Return the formats to try: those of users, and only those of a library whose JSON file is beside the weights, or all.

    Raises:
        InputError: the config.json is that of an unknown model, or the named format does not belong to its library.
    """
    named = [get(name)] if name else [get(each) for each in formats()]
    defined = [format for format in named if format.definition]
    if found := [format for format in named if format.matches_config_file(notes)]:
        return [*defined, *found]
    if defined and name:
        return defined
    config = notes.get("config.json") or {}
    files = [file for file in {get(each).config_file: None for each in formats()} if notes.get(file)]
    if not files:
        return named
    kind = str(config.get("model_type", ""))
    known = list(dict.fromkeys(each for other in formats() for each in get(other).model_types))
    if kind == "timm_wrapper":
        raise InputError(
            "its config.json is that of transformers' TimmWrapper: save the model inside it by timm.models.save_for_hf("
            "model.timm_model, FOLDER, model_args=model.config.model_args), or move the weights away from config.json"
        )
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


def _replace_aliases(arrays: dict[str, StoredArray], aliases: Mapping[str, str]) -> dict[str, StoredArray]:
    """Return arrays by the keys of the format's tables; an alias is not replaced if two keys would become the same."""
    for alias, replacement in aliases.items():
        renamed = {re.sub(f"^{alias}", replacement, key): array for key, array in arrays.items()}
        arrays = renamed if len(renamed) == len(arrays) else arrays
    return arrays


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
    missing = [key for line in partial if any(key not in complete_keys for key in line.present) for key in line.missing]
    first = [line for name in pieces_of(lines, "blocks.mlp.fc1.weight") for line in lines[name]]
    if not any(line.present for line in first):
        missing += first[0].missing  # every model has it, whatever else is optional
    if format.definition:
        absent = [name for name, found in lines.items() if not any(line.present for line in found)]
        needed = [name for name in absent if name not in format.definition.optional]
        missing += [f"{table[name][0].key} ({format.definition.place(name)})" for name in needed]
    rest = [key for key in arrays if key not in known_keys]
    ignored_pattern = _union(tuple(format.ignored_keys_of_variant))
    ignored = {key: arrays[key] for key in rest if ignored_pattern.fullmatch(key)}
    mismatches = [f"missing {key}" for key in missing] + [f"{_UNEXPECTED}{key}" for key in rest if key not in ignored]
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


def _raise_if_unsupported(candidates: list[Format], arrays: Iterable[KeyPath]) -> None:
    """Raise InputError if a key shows that the model computes a function that `ViTConfig` cannot express."""
    for format in candidates:
        keys = [format.separator.join(words) for words in arrays] if format.refused_keys else []
        for pattern, what in format.refused_keys.items():
            if key := next((key for key in keys if re.search(pattern, key)), None):
                raise InputError(f"{key}, of format {format.name}: {what}, which ViTConfig cannot express")


def _nearest(matches: Sequence[Match]) -> Match:
    """Return the match with the fewest mismatches."""
    return min(matches, key=lambda match: (len(match.mismatches), -len(match.arrays)))


def _unexpected(match: Match) -> list[str]:
    """Return the keys that a format does not have."""
    return [line.removeprefix(_UNEXPECTED) for line in match.mismatches if line.startswith(_UNEXPECTED)]


def _replaced_classifier(match: Match) -> str:
    """Return what to do if only the layers of a torch.nn.Sequential in the place of the classifier differ; else ""."""
    keys, paths = _unexpected(match), dict[str, str]()  # path of a sequence -> path of the classifier
    for layout in match.format.table_layouts(match.format.variant).get("head.weight", ()):
        own = layout.key.rpartition(".")[0]
        paths |= {own: own, own.rpartition(".")[0]: own}  # torchvision's classifier is the layer heads.head of a sequence
    for path, own in [*paths.items(), *zip(CLASSIFIERS, CLASSIFIERS, strict=True)]:
        found = [each for key in keys if (each := re.fullmatch(rf"(.*\.)?{re.escape(path)}\.(\d+)\.(\w+)", key))]
        if not path or not found or len(found) < len(match.mismatches):
            continue
        layers = list(dict.fromkeys(each[2] for each in found))
        if len(layers) > 1 or not {each[3] for each in found} <= {"weight", "bias"}:
            return (
                f"its classifier {path} has parameters in its layers {', '.join(layers)}, but ViTConfig has one linear "
                f"layer: only weights without {path}.* can be read"
            )
        renames = " and ".join(f"{each[0]} to {each[1] or ''}{own}.{each[3]}" for each in found)
        return (
            f"its classifier {path} is a sequence of layers: if the others do nothing at inference, as dropout, rename "
            f"{renames}, and save the weights again"
        )
    return ""


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
        if name and (definition := get(name).definition):
            [projection, *_] = get(name).table_layouts("")[PROJECTION]
            return f"no key {projection.key} ({definition.place(PROJECTION)}) among {some}: correct it, or add `strip:`"
        for separator in dict.fromkeys(get(each).separator for each in ([name] if name else formats())):
            if prefix := unknown_prefix(join_keys(arrays, separator), separator):
                return f"{which}: {some}; --strip {prefix} reads the model that begins there"
        return f"{which}: {some or 'there are none'}; `python -m parity formats` lists the formats and where their keys are"
    best = _nearest(matches)
    if what := _replaced_classifier(best):
        return what
    shown = "; ".join(best.mismatches[:20]) + (
        f"; and {len(best.mismatches) - 20} more" if len(best.mismatches) > 20 else ""
    )
    to_remove = any(line.startswith(_UNEXPECTED) for line in best.mismatches)
    remove = "Remove those keys (with --ignore REGEX, if the model does not use them), or give the format with --from"
    remedy = remove if to_remove else "Fetch or save the weights again"
    if best.format.definition:
        remedy = f"Correct {best.format.definition.source}, or fetch or save the weights again"
    leading = {array.shape[:1] for array in arrays.values() if array.size}
    if len(arrays) > 1 and len(leading) == 1 and (length := next(iter(leading))):
        remedy = (
            f"Every array begins with an axis of length {length[0]}, as those that jax.pmap replicates: save one of the "
            "replicas, jax.tree.map(lambda x: x[0], params)"
        )
    return f"these weights match no known format; the nearest is {best.format.name}, except for {shown}. {remedy}"
