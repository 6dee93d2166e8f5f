"""Recognise the format of a checkpoint: its table has all keys of the checkpoint, and the checkpoint all required keys.

Weights may be wrapped: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are removed.  Other content of the file is reported and not read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.format_matching import Match, WrappedWeights, join_keys
from parity.checkpoints.formats import Format, formats, get
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.ignored_keys import IgnoredKeys
from parity.checkpoints.unmatched import raise_unmatched
from parity.checkpoints.wrappers import (
    enclosing_module,
    find_prefixes,
    is_prefix,
    nearest_prefix,
    unknown_prefixes,
    without_common_path,
)
from vit_spec import InputError

_MAX_IGNORED_WORDS = 8  # in an expression that a message suggests


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
    matches = list(_match_candidates(candidates, arrays, notes, strip, ignore))
    _check_ignored_parameters(matches)
    fitting = [match for match in matches if not match.mismatches]
    if not fitting:
        strip_hint = "" if matches or strip is not None else _find_strip_options(candidates, arrays, notes)
        raise_unmatched(matches, candidates, arrays, notes, name, strip_hint)
    order = {format.name: n for n, format in enumerate(candidates)}
    # Prefer a format that recognises the file, then one that reads more of it, then the order of the formats; matches are
    # already in the order of their wrappers.
    return sorted(
        fitting,
        key=lambda match: (not match.format.recognises(match.evidence), -len(match.arrays), order[match.format.name]),
    )


def _match_candidates(
    candidates: Sequence[Format],
    arrays: Mapping[KeyPath, StoredArray],
    notes: Mapping[str, Any],
    strip: str | None,
    ignore: Sequence[str],
) -> Iterator[Match]:
    """Compare the arrays under each possible prefix with each format; see `recognise`.

    Raises:
        InputError: `strip` does not fit the keys, or `ignore` matches none of them or all.
    """
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

    @cache
    def ignored_by_table(name: str) -> IgnoredKeys | None:
        definition = get(name).definition
        patterns = list(definition.ignored) if definition else []
        return IgnoredKeys(patterns, stored_by_separator, tried, definition.source) if definition and patterns else None

    for separator, stored in stored_by_separator.items():
        for prefix in tried[separator]:
            path = next((path for path in arrays if prefix and separator.join(path).startswith(prefix)), ())
            module = enclosing_module(prefix, path, separator)
            weights = WrappedWeights(stored, prefix, separator, module, ignored)
            if not weights.is_wanted:
                continue
            is_any_wanted = True
            # transformers has a module "vit" too, which is in the tables of its formats: as a wrapper, it would make layers
            # that are beside it in the model those of another one.
            is_vit = strip is None and prefix.removesuffix(separator).rpartition(separator)[2] == "vit"
            for format in candidates:
                is_tried = format.separator == separator and prefix in (own_prefixes[format.name] or prefixes[separator])
                if not is_tried or (is_vit and format.library.model_types):
                    continue
                by_table = ignored_by_table(format.name) if _has_projection(format, stored, prefix) else None
                own = WrappedWeights(stored, prefix, separator, module, ignored, by_table) if by_table else weights
                variants = [format.variant] if format.variant else format.tables
                found = (own.match(format.with_variant(variant), notes) for variant in variants)
                yield from (match for match in found if match)
    if any(prefixes.values()) and not is_any_wanted:
        raise InputError("--ignore matches all keys of the weights: let it match only keys that are not parameters")


def _find_strip_options(
    candidates: Sequence[Format], arrays: Mapping[KeyPath, StoredArray], notes: Mapping[str, Any]
) -> str:
    """Return the options --strip that read a model within a file, each with the --ignore that it needs; "" if none does."""

    def match(prefix: str, ignore: Sequence[str]) -> list[Match]:
        try:
            return list(_match_candidates(candidates, arrays, notes, prefix, ignore))
        except InputError:
            return []

    found: dict[str, str] = {}  # prefix, with dots -> its options
    for separator in dict.fromkeys(each.separator for each in candidates):
        stored = join_keys(arrays, separator)
        for prefix in unknown_prefixes(stored, separator):
            matches = match(prefix, [])
            patterns = (_pattern_of_other_keys(each, stored, prefix, separator) for each in matches)
            for pattern in dict.fromkeys(each for each in patterns if each is not None):
                if any(not each.mismatches for each in match(prefix, [pattern] if pattern else [])):
                    others = f" with --ignore '{pattern}' (if the model does not use these keys)" if pattern else ""
                    found.setdefault(prefix.replace(separator, "."), f"--strip {prefix}{others}")
                    break
    return " or ".join(found.values())


def _pattern_of_other_keys(match: Match, keys: Iterable[str], prefix: str, separator: str) -> str | None:
    """Return an expression for --ignore of the keys outside of a prefix that a format lacks, or "" if it lacks none.

    It is None if there is a mismatch within the prefix, or if the expression would be long.
    """
    unexpected = {each.key for each in match.mismatches}
    outside = [key for key in keys if key in unexpected and not key.startswith(prefix)]
    words = dict.fromkeys(without_common_path(key, prefix, separator).partition(separator)[0] for key in outside)
    if len(outside) < len(unexpected) or len(words) > _MAX_IGNORED_WORDS:
        return None
    return "" if not words else f"({'|'.join(map(re.escape, words))})([{separator}].*)?"


def _check_ignored_parameters(matches: Sequence[Match]) -> None:
    """Raise InputError if a format would match if the user, or the file that defines it, did not ignore its parameters."""
    for match in matches:
        if match.mismatches and all(each.kind == "ignored" for each in match.mismatches):
            key, definition = match.mismatches[0].key, match.format.definition
            if definition and not any(key in keys for keys in match.ignored.values()):
                raise InputError(f"{definition.source} ignores {key}, a parameter of its table: correct one of them")
            raise InputError(
                f"--ignore matches {key}, a parameter of format {match.format.name}: ignore only other keys, "
                f"or give the format with --from"
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


def _prefixes_in_table(format: Format, stored: Mapping[str, StoredArray], strip: str | None) -> list[str]:
    """Return the prefixes with the wrappers that the file of a format names, if keys have them and the user gives none."""
    wrappers = format.definition.wrappers if format.definition and strip is None else ()
    return [prefix for wrapper in wrappers for prefix in find_prefixes(stored, format.separator, wrapper)]


def _has_projection(format: Format, stored: Mapping[str, StoredArray], prefix: str) -> bool:
    """Return whether keys with a prefix have the patch projection of a format that a user defines."""
    is_own = format.definition is not None
    return is_own and any(prefix + layout.key in stored for layout in format.table_layouts("")[PROJECTION])


def _candidates(notes: Mapping[str, Any], name: str | None) -> list[Format]:
    """Return the formats to try: those of users, and only those of a library whose JSON file is beside the weights, or all.

    Raises:
        InputError: the config.json is that of an unknown model, or the named format does not belong to its library.
    """
    named = [get(name)] if name else [get(each) for each in formats()]
    defined = [format for format in named if format.definition]
    if found := [format for format in named if format.library.describes_model(notes)]:
        return [*defined, *found]
    if defined and name:
        return defined
    config = notes.get("config.json") or {}
    files = [file for file in {get(each).library.config_file: None for each in formats()} if notes.get(file)]
    if not files:
        return named
    kind = str(config.get("model_type", ""))
    known = list(dict.fromkeys(each for other in formats() for each in get(other).library.model_types))
    if kind == "timm_wrapper":
        raise InputError(
            "its config.json is that of transformers' TimmWrapper: save the model inside it by timm.models.save_for_hf("
            "model.timm_model, FOLDER, model_args=model.config.model_args), or move the weights away from config.json"
        )
    if kind and kind not in known:
        raise InputError(
            f"its config.json is of model_type {kind!r}, which is not a known ViT; known are {', '.join(known)}: if a ViT "
            f"is a part of it, move the weights away from config.json"
        )
    if not config:
        raise InputError(
            f"its {files[0]} is not for format {name!r}: leave --from (format=) out, or move the weights away from it"
        )
    what = f"is of model_type {kind!r}" if kind else f"names timm's {config.get('architecture')!r}"
    if not kind and "architecture" not in config:
        some = ", ".join(map(repr, list(config)[:5]))
        raise InputError(
            f"its config.json describes a model ({some}) and names neither a model_type of transformers nor an "
            f"architecture of timm: move the weights away from it, and give its values with --set"
        )
    raise InputError(
        f"its config.json {what}, which format {name!r} is not for: leave --from (format=) out, or move the weights away "
        f"from it"
    )
