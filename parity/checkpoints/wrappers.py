"""Where in a file weights lie: what they are wrapped in, and what may lie beside them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from parity.checkpoints.formats import formats, get

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
    r"(optimizer\w*|opt|opt_state\w*|state\W(step|param_states)|lr_scheduler\w*|scheduler\w*|loss_scaler|rng\w*|step"
    r"|global_step|epoch\w*|iteration|args|config|hyper_parameters|callbacks|loops|best_(acc|prec)\w*|n_averaged"
    r"|(extra\W)?accum_(\w+_time|examples_seen)"  # the state of a training run
    r"|dino_\w+|ibot_\w+|mask_token"  # what pre-training alone needs
    r"|txt|text|text_(model|encoder|tower|projection)|logit_scale|logit_bias)(\W.*)?"  # another tower
)
_TEXT = re.compile(r"[tb]")  # temperature and bias of the comparison with texts, beside "img"
_DINO = re.compile(r"head\W(mlp|last_layer)(\W.*)?")  # of pre-training alone, where there is a last layer
# Of a training run or of pre-training too, or what a model's outputs come from: that it is not read is an assumption.
_PARTS = re.compile(r"(predictor|decoder\w*|head\Wmlp|scaler|amp|state|batch_stats|cache|center|text\w*|[tb])(\W.*)?")
_MOMENTS = re.compile(r"opt.*")  # keeps arrays by the names of the parameters, which are no weights

_RANKS = {word: n for n, word in enumerate(WRAPPERS)}
_LONGEST = 8  # words of the key of a patch projection, at most
_DEEPEST, _ROOTS = 6, 16  # wrappers around one another; places in one file where a model may lie


@dataclass(frozen=True)
class Beside:
    """What lies in a file beside the weights of a model.

    keys: all of it.
    foreign: the keys of what is neither known to lie there nor weights: it may be half the model.
    others: what could be meant as well, or as a part of the model: other weights, a predictor, a scaler.
    """

    keys: frozenset[str]
    foreign: tuple[str, ...]
    others: tuple[str, ...]


def roots(keys: Mapping[str, Any], separator: str) -> list[str]:
    """Return what may stand in front of a model's keys: nothing, a wrapper, wrappers in wrappers; the outer first.

    A root counts where a patch projection of some format lies under it.
    """
    found: dict[str, tuple[int, ...]] = {"": ()}
    for key in keys:
        root = ""
        ranks: tuple[int, ...] = ()
        for _ in range(_DEEPEST):
            word, _, rest = key[len(root) :].partition(separator)
            if not rest or word not in _RANKS:
                break
            root, ranks = f"{root}{word}{separator}", (*ranks, _RANKS[word])
            found.setdefault(root, ranks)
    anchors = _anchors(separator)
    ordered = sorted(found, key=lambda root: (len(found[root]), found[root]))
    return [root for root in ordered if any(root + anchor in keys for anchor in anchors)][:_ROOTS]


@cache
def _anchors(separator: str) -> frozenset[str]:
    """Return the keys of the patch projection in all tables of the formats that join keys like this."""
    tables = [
        (get(name), variant) for name in formats() for variant in get(name).tables if get(name).separator == separator
    ]
    return frozenset(
        layout.key for format, variant in tables for layout in format.lines(variant).get("patch_embed.proj.weight", [])
    )


def beside(keys: Iterable[str], root: str, separator: str) -> Beside:
    """Judge all keys that do not begin with `root`, behind which a model lies; none are beside where that is empty."""
    aside = {key: _aside(key, root, separator) for key in keys if root and not key.startswith(root)}
    inert = _inert(aside.values(), root.removesuffix(separator), separator)
    doubtful = {key: rest for key, rest in aside.items() if not inert(rest)}
    meant = {rest for rest in doubtful.values() if _may_be_meant(rest, separator)}
    foreign = tuple(key for key, rest in doubtful.items() if rest not in meant)
    meant |= {rest for rest in aside.values() if _holds_weights(rest, separator)}
    return Beside(frozenset(aside), foreign, tuple(sorted({rest.partition(separator)[0] for rest in meant})))


def _aside(key: str, root: str, separator: str) -> str:
    """Return a key from where it leaves the way to the weights."""
    words, way = key.split(separator), root.split(separator)
    while words and way and words[0] == way[0]:
        words, way = words[1:], way[1:]
    return separator.join(words)


def _inert(beside: Iterable[str], wrapper: str, separator: str) -> Callable[[str], bool]:
    """Return whether what lies beside weights has no part in their model.

    beside: all keys from where they leave the way to the weights.
    wrapper: that way.
    """
    patterns = [_BESIDE]
    patterns += [_TEXT] if wrapper.split(separator)[-1] == "img" else []
    patterns += [_DINO] if any(rest.startswith(f"head{separator}last_layer") for rest in beside) else []
    return lambda rest: any(pattern.fullmatch(rest) for pattern in patterns)


def _may_be_meant(rest: str, separator: str) -> bool:
    """Whether such a key is of weights that could be read as well, or of what may be a part of the model."""
    return rest.partition(separator)[0] in _RANKS or _PARTS.fullmatch(rest) is not None


def _holds_weights(rest: str, separator: str) -> bool:
    """Whether such a key ends in that of a patch projection, as one of averaged weights in a callback's state does."""
    anchors = _anchors(separator)
    if not rest.endswith(_endings(separator)) or _MOMENTS.fullmatch(rest):
        return False
    words = rest.rsplit(separator, _LONGEST)
    return any(separator.join(words[first:]) in anchors for first in range(len(words)))


@cache
def _endings(separator: str) -> tuple[str, ...]:
    """Return the last words of all patch projections."""
    return tuple(sorted({anchor.rsplit(separator, 1)[-1] for anchor in _anchors(separator)}))
