"""Which format a file is in: the one whose keys are all there, and whose keys alone are there.

Files wrap weights: {"model": ...} beside an optimizer, "module." in front of every key, two towers side by side.
Wrappers are peeled, and what lies beside the weights is told and not read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parity.containers.container import Stored, Words
from parity.formats import Evidence, Format, formats, get
from parity.layout import Layout
from vit_spec import InputError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

# What weights are wrapped in.  Of several, the earlier: averaged weights are what people evaluate, as in timm.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "teacher",
    "ema",
    "state_dict",
    "model",
    "module",
    "_orig_mod",
    "params",
    "opt",
    "optimizer",
    "target",
    "img",
    "backbone",
    "encoder",
    "net",
    "student",
)

# What may stand beside weights, and is told and not read.  Anything else there is an error: it may be half the model.
_BESIDE = re.compile(
    r"(optimizer\w*|opt|state|opt_state\w*|lr_scheduler\w*|scheduler\w*|loss_scaler|scaler|amp|rng\w*|step|global_step|epoch\w*"
    r"|iteration|args|config|hyper_parameters|callbacks|loops|batch_stats|cache"  # the state of a training run
    r"|head\W(mlp|last_layer)|dino_\w+|ibot_\w+|center|predictor|decoder\w*|mask_token"  # what pre-training alone needs
    r"|txt|text\w*|t|b|logit_scale|logit_bias)(\W.*)?"  # another tower
)

COUNTS = {"qkv": 3, "kv": 2, "glu": 2}  # axes whose length is the same in every model


@dataclass(frozen=True)
class Match:
    """A reading of a file as a format.

    format: with the variant chosen.
    arrays: those of the parameters, by key as the format has it, without wrappers.
    evidence: what the file shows of the model.
    misfits: in words, why it is not this format after all.
    """

    format: Format
    arrays: Mapping[str, Stored]
    evidence: Evidence
    misfits: tuple[str, ...]

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

    Args:
        arrays: all that the file holds.
        notes: what else it holds.
        name: a format to hold the file to; None tries all.

    Raises:
        InputError: none fits; lists what the nearest lacks and has too much.  Or a config.json of another kind of model.
    """
    _hold_to_known(str(notes.get("config.json", {}).get("model_type", "")))
    candidates = [get(name)] if name else [get(each) for each in formats()]
    matches: list[Match] = []
    for format in candidates:
        stored = joined(arrays, format.separator)
        for root in _roots(stored, format.separator):
            inside = {key.removeprefix(root): array for key, array in stored.items() if key.startswith(root)}
            inside = _respelled(inside, format.aliases)
            beside = frozenset(key for key in stored if not key.startswith(root))
            for variant in [format.variant] if format.variant else format.tables:
                if match := _match(format.of(variant), inside, beside, notes):
                    foreign = [f"unexpected {key}" for key in beside if not _may_lie_beside(key, root, format.separator)]
                    matches.append(replace(match, misfits=(*match.misfits, *foreign)))
    fitting = [match for match in matches if not match.misfits]
    if not fitting:
        _refuse(candidates, arrays)
        raise InputError(_no_format(matches, ["/".join(words) for words in arrays], name))
    # Prefer what claims the file, then what reads more of it, then the outer wrapper, then the order of the formats.
    return sorted(fitting, key=lambda match: (not match.format.recognises(match.evidence), -len(match.arrays)))


def _hold_to_known(model_type: str) -> None:
    """Refuse what Hugging Face calls by a name that no format has."""
    known = list(dict.fromkeys(kind for name in formats() for kind in get(name).model_types))
    if model_type and model_type not in known:
        raise InputError(
            f"its config.json is of model_type {model_type!r}, which is no ViT that is known here; "
            f"known are {', '.join(known)}"
        )


def joined(arrays: Mapping[Words, Stored], separator: str) -> dict[str, Stored]:
    """Return arrays by key, nested ones joined as a format joins them, without those that hold nothing.

    Keys of a Flax tree come joined by dots too, where they were kept in safetensors.
    """
    flat = {separator.join(words): array for words, array in arrays.items() if array.size}
    dotted = separator == "/" and not any("/" in key for key in flat)
    return {key.replace(".", "/"): array for key, array in flat.items()} if dotted else flat


def _may_lie_beside(key: str, root: str, separator: str) -> bool:
    """Whether a key, from where it leaves the way to the weights, is a wrapper's or what is known to lie there."""
    words, way = key.split(separator), root.split(separator)
    while words and way and words[0] == way[0]:
        words, way = words[1:], way[1:]
    return bool(words) and (words[0] in WRAPPERS or _BESIDE.fullmatch(separator.join(words)) is not None)


def _respelled(arrays: dict[str, Stored], aliases: Mapping[str, str]) -> dict[str, Stored]:
    """Return arrays by the keys that the format's tables have; as they are where two would share one."""
    for alias, own in aliases.items():
        renamed = {re.sub(f"^{alias}", own, key): array for key, array in arrays.items()}
        arrays = renamed if len(renamed) == len(arrays) else arrays
    return arrays


def _roots(keys: Iterable[str], separator: str) -> list[str]:
    """Return what may stand in front of the model's keys: nothing, a wrapper, wrappers in wrappers."""
    found, keys = [""], list(keys)
    for root in found:
        for wrapper in WRAPPERS:
            longer = f"{root}{wrapper}{separator}"
            if len(found) < 64 and any(key.startswith(longer) for key in keys):
                found.append(longer)
    return found


def _match(format: Format, arrays: Mapping[str, Stored], beside: frozenset[str], notes: Mapping[str, Any]) -> Match | None:
    """Read keys as one format; None where hardly a key is the format's."""
    lines, shapes = format.lines(format.variant), {key: array.shape for key, array in arrays.items()}
    sizes: dict[str, int] = dict(COUNTS)
    if depth := _depth(lines, shapes):
        sizes["block"] = depth
    there: dict[str, list[Layout]] = {}
    taken: set[str] = set()
    whole: set[str] = set()
    partial: list[list[str]] = []
    for name, layouts in lines.items():
        expanded = [(layout, _keys(layout, sizes)) for layout in layouts]
        if full := [layout for layout, keys in expanded if keys and all(key in shapes for key in keys)]:
            there[name] = full
        for layout, keys in expanded:
            taken.update(key for key in keys if key in shapes)
            if layout in full:
                whole.update(keys)
            elif not full:
                partial.append(keys)
    # A bias of queries and values is no half of one of all three, where the format has lines for both.
    lacking = [keys for keys in partial if any(key in taken - whole for key in keys)]
    missing = [key for keys in lacking for key in keys if key not in shapes]
    if "patch_embed.proj.weight" not in there or "blocks.mlp.fc2.weight" not in there:
        return None
    rest = {key: array for key, array in arrays.items() if key not in taken}
    ignored = {key: array for key, array in rest.items() if any(re.fullmatch(p, key) for p in format.ignored)}
    extra = [key for key in rest if key not in ignored]
    misfits = [f"missing {key}" for key in missing] + [f"unexpected {key}" for key in extra]
    solved, axes, trouble = _solve(there, shapes, sizes)
    evidence = Evidence(notes, beside, ignored, axes, solved, format.variant)
    return Match(format, {key: arrays[key] for key in arrays if key in taken}, evidence, (*misfits, *trouble))


def _depth(lines: Mapping[str, list[Layout]], shapes: Shapes) -> int:
    """Return the number of blocks that the keys spell out; 0 where they are stacked."""
    prefixes = {
        layout.key.partition("{block}")[0] for found in lines.values() for layout in found if "{block}" in layout.key
    }
    if not prefixes:
        return 0
    pattern = re.compile("|".join(rf"{re.escape(prefix)}(\d+)" for prefix in prefixes))
    numbers = [int(next(filter(None, m.groups()))) for key in shapes if (m := pattern.match(key)) and len(m[0]) < 200]
    return min(max(numbers) + 1, len(shapes)) if numbers else 0


def _keys(layout: Layout, sizes: Mapping[str, int]) -> list[str]:
    return layout.keys(sizes) if all(word in sizes for word in layout.spelled) else []


def _solve(
    there: Mapping[str, list[Layout]], shapes: Shapes, known: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, frozenset[str]], list[str]]:
    """Return the lengths of the axes, the axes of each parameter, and what of the arrays' shapes contradicts itself.

    A dimension with one unknown axis tells its length.  Lines that the lengths rule out are dropped; "inner" is the
    length of heads and their width together, which most formats keep merged, "patch" that of a flattened patch.
    """
    sizes, trouble = dict(known), []
    open_lines = {name: list(layouts) for name, layouts in there.items()}
    while True:
        before = (len(sizes), sum(map(len, open_lines.values())))
        for name, layouts in open_lines.items():
            fitting = [layout for layout in layouts if _fits(layout, shapes[_keys(layout, sizes)[0]], sizes)]
            if not fitting:
                layout, shape = layouts[0], shapes[_keys(layouts[0], sizes)[0]]
                trouble.append(f"misshapen {layout.key} {shape}, expected {layout.axes}")
                fitting = []
            open_lines[name] = fitting
            if len(fitting) == 1:
                for length, words in _dims(fitting[0], shapes[_keys(fitting[0], sizes)[0]], sizes):
                    if len(words) == 1:
                        sizes[words[0]] = length
                    elif set(words) == {"head", "dim"}:
                        sizes["inner"] = length
                    elif set(words) == {"rgb", "ph", "pw"}:
                        sizes["patch"] = length
        open_lines = {name: layouts for name, layouts in open_lines.items() if layouts}
        if (len(sizes), sum(map(len, open_lines.values()))) == before or trouble:
            break
    if "head" in sizes and "dim" in sizes:
        sizes["inner"] = sizes["head"] * sizes["dim"]
    axes = {name: frozenset(layouts[0].words) for name, layouts in open_lines.items()}
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
        keys = [format.separator.join(words) for words in arrays]
        for pattern, what in format.refused.items():
            if key := next((key for key in keys if re.search(pattern, key)), None):
                raise InputError(f"{key}, of format {format.name}: {what}, for which ViTConfig has no word")


def _no_format(matches: list[Match], keys: list[str], name: str | None) -> str:
    """Say why no format fits, by the nearest."""
    if not matches:
        some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        which = f"format {name!r} has no such keys" if name else "no format has such keys"
        return f"{which}: {some or 'there are none'}; `python -m parity formats` lists the formats and where their keys are"
    best = min(matches, key=lambda match: (len(match.misfits), -len(match.arrays)))
    shown = "; ".join(best.misfits[:20]) + (f"; and {len(best.misfits) - 20} more" if len(best.misfits) > 20 else "")
    return (
        f"these weights are in no format that is known here; nearest is {best.format.name}, but for {shown}. "
        f"Take those keys out or give the format with --from"
    )
