"""Why a checkpoint matches no format, in the words of an error."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.format_matching import Match
from parity.checkpoints.formats import Format, formats, get, timm_arguments
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.unreadable import describe_reparametrized, describe_unreadable
from parity.checkpoints.wrappers import CLASSIFIERS
from vit_spec import InputError

_LEADING_ZEROS = re.compile(r"(?<![^./])0+(0|[1-9][0-9]*)(?![^./])")  # of a word that is a number


def raise_unmatched(
    matches: Sequence[Match],
    candidates: Sequence[Format],
    arrays: Mapping[KeyPath, StoredArray],
    notes: Mapping[str, Any],
    name: str | None,
    strip_hint: str,
) -> NoReturn:
    """Raise the error for a checkpoint that is in no format.

    Args:
        matches: the formats whose patch projection it has, with their mismatches.
        candidates: the formats that were tried.
        arrays: all arrays of the file.
        notes: the metadata of the file, and the parsed JSON files beside it, by their names.
        name: the name of the format that the user gave; None for any.
        strip_hint: the options that read a model within the file; "" if there are none.

    Raises:
        InputError: always.
    """
    if what := describe_unreadable(arrays):
        raise InputError(what)
    keys = _unexpected(_nearest(matches)) if matches else [".".join(path) for path in arrays]
    if what := describe_reparametrized(set(keys)):
        raise InputError(what)
    if what := _describe_leading_zeros(keys, _nearest(matches).arrays if matches else keys):
        raise InputError(what)
    _raise_if_unsupported(candidates, arrays)
    for match in matches[:1]:
        if match.format.library.describes_model(notes) and "blocks.mlp.fc1.weight" in match.evidence.axes:
            match.format.stated_fields(match.evidence)  # raises the error about the config file, which says more
    raise InputError(
        _describe_nearest(matches, arrays) if matches else _describe_unknown_keys(arrays, notes, name, strip_hint)
    )


def _describe_leading_zeros(keys: Iterable[str], others: Iterable[str]) -> str:
    """Return what to do about numbers with leading zeros, in one line, or "" if there are none.

    Args:
        keys: the keys that a format does not have.
        others: the keys that it has; if the same key without leading zeros is among them, the number is not the reason.
    """
    plain_keys = {key: plain for key in keys if (plain := _LEADING_ZEROS.sub(r"\1", key)) != key}
    if not plain_keys or not set(others).isdisjoint(plain_keys.values()):
        return ""
    key, plain = next(iter(plain_keys.items()))
    return f"{key} has a number with leading zeros, and no format has such keys: rename them, this one to {plain}"


def _describe_unknown_keys(
    arrays: Mapping[KeyPath, StoredArray], notes: Mapping[str, Any], name: str | None, strip_hint: str
) -> str:
    """Return the message for a file without a patch projection of any format."""
    keys = ["/".join(words) for words in arrays]
    if empty := [key for key, array in zip(keys, arrays.values(), strict=True) if not array.size]:
        return (
            f"{len(empty)} of its {len(keys)} arrays are empty, such as {empty[0]}, as in files of DeepSpeed's ZeRO-3: "
            f"gather the weights and save them again"
        )
    some = ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
    for file in {get(each).library.config_file: None for each in formats()}:
        if config := notes.get(file):
            kind = next((word for word in ("model_type", "architecture") if word in config), "")
            if kind == "architecture":
                timm_arguments.config_fields(config, 0)  # raises the error about an architecture that cannot be read
            if config.get("model_type") == "beit" and any(key.endswith("/kernel") for key in keys):
                return (
                    "these weights are of transformers' Flax BEiT, whose keys no format has: load them with from_flax=True "
                    "in transformers 4, and save them as PyTorch's"
                )
            what = f"is of {kind} {config[kind]!r}, which" if kind else "describes a model that"
            return f"its {file} {what} has other keys than {some}: give the {file} of these weights"
    which = f"format {name!r} has no such keys" if name else "no format has such keys"
    if name and (definition := get(name).definition):
        [projection, *_] = get(name).table_layouts("")[PROJECTION]
        return f"no key {projection.key} ({definition.place(PROJECTION)}) among {some}: correct it, or add `strip:`"
    if strip_hint:
        return f"{which}: {some}; {strip_hint} reads the model that begins there"
    listed = "`python -m parity formats` lists the formats and where their keys are"
    if name or not some:
        return f"{which}: {some or 'there are none'}; {listed}"
    own = "a format file (--format-file, parity.register_format) or its class (convert --like, parity.derive_table)"
    return f"{which}: {some}; {listed}; for a model of your own, give {own}"


def _describe_nearest(matches: Sequence[Match], arrays: Mapping[KeyPath, StoredArray]) -> str:
    """Return the message with the missing and unexpected keys of the nearest format."""
    best = _nearest(matches)
    if what := _replaced_classifier(best):
        return what
    leading = {array.shape[:1] for array in arrays.values() if array.size}
    is_replicated = len(arrays) > 1 and len(leading) == 1 and leading != {()}
    if not is_replicated and (what := _other_projection(best)):
        return what
    shown = "; ".join(map(str, best.mismatches[:20])) + (
        f"; and {len(best.mismatches) - 20} more" if len(best.mismatches) > 20 else ""
    )
    remove = "Remove those keys (with --ignore REGEX, if the model does not use them), or give the format with --from"
    remedy = remove if _unexpected(best) else "Fetch or save the weights again"
    if best.format.definition:
        remedy = f"Correct {best.format.definition.source}, or fetch or save the weights again"
    if is_replicated:
        remedy = (
            f"Every array begins with an axis of length {leading.pop()[0]}, as those that jax.pmap replicates: save one of "
            "the replicas, jax.tree.map(lambda x: x[0], params)"
        )
    return f"these weights match no known format; the nearest is {best.format.name}, except for {shown}. {remedy}"


def _other_projection(match: Match) -> str:
    """Return what the patches of another kind of model are, as the shape of its patch projection shows; else ""."""
    projections = {layout.key for layout in match.format.table_layouts(match.format.variant)[PROJECTION]}
    for key in [each.key for each in match.mismatches if each.kind == "misshapen" and each.key in projections]:
        shape = match.arrays[key].shape
        if len(shape) == 5:
            return f"{key} has the shape {shape}, of patches of several frames: it is a model of videos, and cannot be read"
        if len(shape) == 2 and not match.format.definition:
            return (
                f"{key} has the shape {shape}, of a layer for flattened patches, as in SigLIP 2 with a flexible resolution "
                f"(NaFlex): it is another model than {match.format.name}, and cannot be read"
            )
    return ""


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


def _nearest(matches: Sequence[Match]) -> Match:
    """Return the match with the fewest mismatches."""
    return min(matches, key=lambda match: (len(match.mismatches), -len(match.arrays)))


def _unexpected(match: Match) -> list[str]:
    """Return the keys that a format does not have."""
    return [each.key for each in match.mismatches if each.kind == "unexpected"]


def _raise_if_unsupported(candidates: Sequence[Format], arrays: Iterable[KeyPath]) -> None:
    """Raise InputError if a key shows that the model computes a function that `ViTConfig` cannot express."""
    for format in candidates:
        keys = [format.separator.join(words) for words in arrays] if format.refused_keys else []
        for pattern, what in format.refused_keys.items():
            if key := next((key for key in keys if re.search(pattern, key)), None):
                raise InputError(f"{key}, of format {format.name}: {what}, which ViTConfig cannot express")
