"""Find the weights of a model in a checkpoint: the prefix of their keys.

Training scripts store weights in wrappers, such as {"model": ...} or "module." in front of every key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from parity.checkpoints.containers.container import KeyPath
from parity.checkpoints.patch_keys import (
    MAX_KEY_WORDS,
    patch_projection_aliases,
    patch_projection_endings,
    patch_projection_keys,
)
from parity.checkpoints.wrapper_names import INNER_MODULES, LOOP_DICTIONARIES, LOOP_MODULES, PRIORITY
from vit_spec import nearest

WEIGHT_LEAVES = ("weight", "kernel")  # the last word of the key of a linear layer's weight, in PyTorch and in Flax
CLASSIFIERS = ("head", "classifier", "fc")  # modules beside a backbone that are read as its classifier

_MAX_SUGGESTED_KEYS = 10_000  # keys whose prefixes a message may suggest
_MAX_DEPTH, _MAX_PREFIXES = 6, 16  # limits for nested wrappers, and for the prefixes to try in one file
_MAX_UNKNOWN_PREFIXES = 4  # to try in one file: each takes as long as a recognition
_SEPARATORS = re.compile(r"[./]")


def find_prefixes(keys: Mapping[str, Any], separator: str, strip: str | None = None) -> list[str]:
    """Return the prefixes under which the keys have a patch projection of some format: "", "model.", "model.module.", ...

    They are in the order of their first wrappers in `wrapper_names.WRAPPERS`, then of their second, and so on; "" is first.

    Args:
        keys: all keys of a file.
        separator: the separator of the words of a key.
        strip: a wrapper in addition to these, such as "net.vit."; if it is given, only prefixes with it are returned.
    """
    found = _wrapped_prefixes(keys, separator, "")
    for text in _spellings_of_strip(strip, separator) if strip else ():
        if found := _wrapped_prefixes(keys, separator, text):
            break
    projections = patch_projection_keys(separator)
    ordered = sorted(found, key=lambda prefix: found[prefix])
    fitting = [prefix for prefix in ordered if any(prefix + key in keys for key in projections)]
    if not fitting:
        inside = {
            prefix: without_inner_modules([key.removeprefix(prefix) for key in _below(keys, prefix)]) for prefix in ordered
        }
        fitting = [prefix for prefix in ordered if not projections.isdisjoint(inside[prefix])]
    if not fitting and (aliases := patch_projection_aliases(separator)):
        fitting = [prefix for prefix in ordered if any(aliases.match(key, len(prefix)) for key in _below(keys, prefix))]
    return fitting[:_MAX_PREFIXES]


def _below(keys: Iterable[str], prefix: str) -> Iterator[str]:
    return (key for key in keys if key.startswith(prefix))


def without_inner_modules(keys: Sequence[str]) -> list[str]:
    """Return keys without the modules that torch.compile, FSDP and checkpointing put around modules within a model.

    `keys` are the keys of a model, without wrappers in front.  They are returned unchanged if two would become the same.
    """
    pattern = rf"(?<![^.])(?:{'|'.join(INNER_MODULES)})\."
    names = [re.sub(pattern, "", key) for key in keys]
    return names if len(set(names)) == len(names) else list(keys)


def is_prefix(keys: Iterable[str], separator: str, strip: str) -> bool:
    """Return whether a key begins with a prefix that the user gave, if need be after wrappers."""
    keys = list(keys)
    return any(_wrapped_prefixes(keys, separator, text) for text in _spellings_of_strip(strip, separator))


def unknown_prefixes(keys: Iterable[str], separator: str) -> list[str]:
    """Return the beginnings of keys that end like the key of a patch projection, such as "net.vit."; at most 4."""
    projections = patch_projection_keys(separator)
    endings, found = patch_projection_endings(separator), dict[str, None]()
    for key in keys:
        words = key.rsplit(separator, MAX_KEY_WORDS) if key.endswith(endings) else []
        for first in range(1, len(words)):
            if separator.join(words[first:]) in projections:
                found["".join(f"{word}{separator}" for word in words[:first])] = None
                break
        if len(found) == _MAX_UNKNOWN_PREFIXES:
            break
    return list(found)


def nearest_prefix(keys: Iterable[str], strip: str) -> str:
    """Return "; did you mean 'x.'?" for the prefix of a key that is most similar to `strip`, or "" if none is similar."""
    found: dict[str, None] = {}
    for key in islice(keys, _MAX_SUGGESTED_KEYS):
        ends = [match.end() for match in islice(_SEPARATORS.finditer(key), _MAX_DEPTH)]
        found |= dict.fromkeys(key[:end] for end in ends)
    return nearest(strip, found)


def _spellings_of_strip(strip: str, separator: str) -> Iterator[str]:
    """Yield a prefix that the user gave as keys may have it: with a separator at its end, and with this separator."""
    yield strip.removesuffix(separator) + separator
    yield strip
    yield _SEPARATORS.sub(separator, strip).removesuffix(separator) + separator


def _wrapped_prefixes(keys: Iterable[str], separator: str, strip: str) -> dict[str, tuple[int, ...]]:
    """Return the prefixes of the keys that consist of wrappers, with their order; with `strip`, only those that have it."""
    found: dict[str, tuple[int, ...]] = {} if strip else {"": ()}
    for key in keys:
        prefix, has_strip = "", not strip
        order: tuple[int, ...] = ()
        for _ in range(_MAX_DEPTH):
            word, _, rest = key[len(prefix) :].partition(separator)
            if not has_strip and key.startswith(strip, len(prefix)):
                prefix, has_strip = prefix + strip, True
            elif rest and word in PRIORITY:
                prefix, order = f"{prefix}{word}{separator}", (*order, PRIORITY[word])
            else:
                break
            if has_strip:
                found.setdefault(prefix, order)
    return found


def enclosing_module(prefix: str, path: KeyPath, separator: str) -> str:
    """Return the path of the model in a module that contains it, such as "backbone"; "" if the prefix shows no such module.

    Args:
        prefix: the prefix of the keys of the model's weights, such as "state_dict.module.backbone.".
        path: a key path that begins with the prefix, such as ("state_dict", "module.backbone.cls_token"); its entries are
            the keys of nested dictionaries.
        separator: the separator of the words of a key.
    """
    words = prefix.removesuffix(separator).split(separator) if prefix else []
    # The first `count` words are keys of dictionaries.  A Flax pytree consists of dictionaries only.
    count = len(words) if separator == "/" else sum(len(key.split(separator)) for key in path[:-1])
    names = [word for word in words[:count] if word not in (*LOOP_MODULES, *LOOP_DICTIONARIES[separator])]
    names += [word for word in words[count:] if word not in LOOP_MODULES]
    return separator.join(names)


def find_classifier(unknown: Iterable[str], prefix: str, separator: str) -> str:
    """Return the path of the classifier that a module has beside its backbone, such as "model.head"; "" if there is none.

    It lies in a module around the backbone, is the only such module, and has a weight.

    Args:
        unknown: see `other_keys.OtherKeys`.
        prefix: the prefix of the weights of the backbone, such as "model.backbone.".
        separator: the separator of the words of a key.
    """
    words, keys = prefix.removesuffix(separator).split(separator), set(unknown)
    around = ["".join(f"{word}{separator}" for word in words[:count]) for count in range(len(words))] if prefix else []
    paths = [f"{outer}{name}" for outer in around for name in CLASSIFIERS]
    found = [path for path in paths if any(f"{path}{separator}{leaf}" in keys for leaf in WEIGHT_LEAVES)]
    return found[0] if len(found) == 1 else ""


def without_common_path(key: str, prefix: str, separator: str) -> str:
    """Return a key without the words that it shares with the beginning of a prefix."""
    words, prefix_words = key.split(separator), prefix.split(separator)
    while words and prefix_words and words[0] == prefix_words[0]:
        words, prefix_words = words[1:], prefix_words[1:]
    return separator.join(words)
