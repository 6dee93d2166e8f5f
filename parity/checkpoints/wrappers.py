"""Find the weights of a model in a checkpoint: the prefix of their keys, and what the other keys are.

Training scripts store weights in wrappers, such as {"model": ...} or "module." in front of every key, and store other
things beside them, such as optimizer state.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from parity.checkpoints.containers.container import KeyPath
from parity.checkpoints.formats import formats, get

# Names of wrappers, in order of preference.  Averaged weights are preferred, because they are the weights that people
# evaluate, as in timm.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "teacher",
    "ema",
    "state_dict",
    "model_state_dict",
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

# Wrappers that do not change the function of a model: modules of DistributedDataParallel and torch.compile, and, by
# separator, dictionaries of training loops.  Within a key of PyTorch, a word such as "model" names a module, no dictionary.
_LOOP_MODULES = ("module", "_orig_mod")
_LOOP_DICTIONARIES = {
    ".": (
        "state_dict_ema",
        "state_dict",
        "model_state_dict",
        "params",
        "opt",
        "optimizer",
        "target",
        "model",
        "net",
        "model_ema",
        "ema",
    ),
    "/": ("params", "opt", "optimizer", "target"),
}

# Keys that may be beside weights; they are reported and not read.  Any other key is an error: the model may need it.
_KNOWN_EXTRAS = re.compile(
    # Of a training run.  A layer can have these names too, and then has a weight or a bias.
    r"(optim|optimizer(s|_states?|_state_dict)?|opt|opt_states?|callbacks|loops)(\W(?!(weight|bias|kernel)$).*)?"
    r"|state\W(step|param_states)(\W.*)?|(extra\W)?accum_(\w+_time|examples_seen)"
    r"|((lr_)?scheduler(s|_states?|_state_dict)?|loss_scaler|hyper_parameters|best_(acc|prec)\w*|\w*rngs?(_states?|_keys?)?"
    r"|step|global_step|epochs?|iteration|args|config|n_averaged)"
    r"(\W(?!(.*\W)?(\w*(weight|bias|kernel|gamma|beta|embedding)\w*|running_\w+)$).*)?"
    # Used only in pre-training, by DINO, iBOT and DINOv2.
    r"|(dino|ibot)_head\W(mlp|last_layer)(\W.*)?|(dino|ibot)_(patch_)?loss\Wcenter|mask_token"
)
_TEXT_TOWER = re.compile(r"(txt|text|text_(model|encoder|tower|projection)|logit_scale|logit_bias)(\W.*)?")
_MIN_TEXT_TOWER_KEYS = 12  # one block of a Transformer has as many; a layer or a scale of the model has fewer
_CONTRASTIVE_SCALARS = re.compile(r"[tb]")  # temperature and bias of big_vision's contrastive loss, beside "img"
_DINO_HEAD = re.compile(r"head\W(mlp|last_layer)(\W.*)?")  # only for pre-training, if there is a last_layer
# These may belong to a training run, to pre-training or to the model: ignoring them is reported as an assumption.
_POSSIBLE_PARTS = re.compile(
    r"(predictor|decoder\w*|head\Wmlp|scaler|amp|state|batch_stats|cache|center|txt|text\w*|logit_(scale|bias)|[tb])(\W.*)?"
)
_OPTIMIZER_STATE = re.compile(r"opt.*")  # has arrays under the names of the parameters, which are not weights

_PRIORITY = {word: n for n, word in enumerate(WRAPPERS)}
_MAX_KEY_WORDS = 8  # the key of a patch projection has at most this many words
_MAX_DEPTH, _MAX_PREFIXES = 6, 16  # limits for nested wrappers, and for the prefixes to try in one file


@dataclass(frozen=True)
class OtherKeys:
    """The keys of a file that are not under the prefix of the model's weights.

    Attributes:
        keys: all these keys.
        unknown: keys that are neither known extras nor other weights; they may be a part of the model.
        alternatives: the first words of keys that may be the weights the user wants, or a part of the model, such as other
            weights, a predictor or a scaler.
    """

    keys: frozenset[str]
    unknown: tuple[str, ...]
    alternatives: tuple[str, ...]


def find_prefixes(keys: Mapping[str, Any], separator: str) -> list[str]:
    """Return the prefixes under which the keys have a patch projection of some format: "", "model.", "model.module.", ...

    They are in the order of their first wrappers in `WRAPPERS`, then of their second, and so on; "" is first.
    """
    found: dict[str, tuple[int, ...]] = {"": ()}
    for key in keys:
        prefix = ""
        priority: tuple[int, ...] = ()
        for _ in range(_MAX_DEPTH):
            word, _, rest = key[len(prefix) :].partition(separator)
            if not rest or word not in _PRIORITY:
                break
            prefix, priority = f"{prefix}{word}{separator}", (*priority, _PRIORITY[word])
            found.setdefault(prefix, priority)
    projections = _patch_projection_keys(separator)
    ordered = sorted(found, key=lambda prefix: found[prefix])
    return [prefix for prefix in ordered if any(prefix + key in keys for key in projections)][:_MAX_PREFIXES]


def enclosing_module(prefix: str, path: KeyPath, separator: str) -> str:
    """Return the path of the model in a module that contains it, such as "backbone"; "" if the prefix shows no such module.

    Args:
        prefix: the prefix of the keys of the model's weights, such as "state_dict.module.backbone.".
        path: a key path that begins with the prefix, such as ("state_dict", "module.backbone.cls_token"); its entries are
            the keys of nested dictionaries.
        separator: the separator of the words of a key.
    """
    words = prefix.split(separator)[:-1]
    # The first `count` words are keys of dictionaries.  A Flax pytree consists of dictionaries only.
    count = len(words) if separator == "/" else sum(len(key.split(separator)) for key in path[:-1])
    names = [word for word in words[:count] if word not in (*_LOOP_MODULES, *_LOOP_DICTIONARIES[separator])]
    names += [word for word in words[count:] if word not in _LOOP_MODULES]
    return separator.join(names)


@cache
def _patch_projection_keys(separator: str) -> frozenset[str]:
    """Return the keys of the patch projection in all tables of the formats with this separator."""
    tables = [
        (get(name), variant) for name in formats() for variant in get(name).tables if get(name).separator == separator
    ]
    return frozenset(
        layout.key
        for format, variant in tables
        for layout in format.table_layouts(variant).get("patch_embed.proj.weight", [])
    )


def classify_other_keys(keys: Iterable[str], prefix: str, separator: str) -> OtherKeys:
    """Classify all keys that do not begin with the prefix of a model's weights; with an empty prefix there are none."""
    others = {key: _without_common_path(key, prefix, separator) for key in keys if prefix and not key.startswith(prefix)}
    is_known = _known_extra_test(others.values(), prefix.removesuffix(separator), separator)
    doubtful = {key: rest for key, rest in others.items() if not is_known(rest)}
    ambiguous = {rest for rest in doubtful.values() if _is_ambiguous(rest, separator)}
    unknown = tuple(key for key, rest in doubtful.items() if rest not in ambiguous)
    ambiguous |= {rest for rest in others.values() if _is_patch_projection(rest, separator)}
    return OtherKeys(frozenset(others), unknown, tuple(sorted({rest.partition(separator)[0] for rest in ambiguous})))


def _without_common_path(key: str, prefix: str, separator: str) -> str:
    """Return a key without the words that it shares with the beginning of a prefix."""
    words, prefix_words = key.split(separator), prefix.split(separator)
    while words and prefix_words and words[0] == prefix_words[0]:
        words, prefix_words = words[1:], prefix_words[1:]
    return separator.join(words)


def _known_extra_test(rests: Iterable[str], wrapper: str, separator: str) -> Callable[[str], bool]:
    """Return a function that returns whether a key certainly does not belong to the model.

    Args:
        rests: all other keys, without the words that they share with the prefix of the weights.
        wrapper: the prefix of the weights, without its last separator.
        separator: the separator of the words of a key.
    """
    rests = list(rests)
    patterns = [_KNOWN_EXTRAS]
    if wrapper.split(separator)[-1] == "img":  # as in big_vision, beside "txt"
        patterns += [_TEXT_TOWER, _CONTRASTIVE_SCALARS]
    elif sum(bool(_TEXT_TOWER.fullmatch(rest)) for rest in rests) >= _MIN_TEXT_TOWER_KEYS:
        patterns += [_TEXT_TOWER]
    patterns += [_DINO_HEAD] if any(rest.startswith(f"head{separator}last_layer") for rest in rests) else []
    return lambda rest: any(pattern.fullmatch(rest) for pattern in patterns)


def _is_ambiguous(rest: str, separator: str) -> bool:
    """Return whether a key may belong to other weights or to a part of the model."""
    return rest.partition(separator)[0] in _PRIORITY or _POSSIBLE_PARTS.fullmatch(rest) is not None


def _is_patch_projection(rest: str, separator: str) -> bool:
    """Return whether a key ends like the key of a patch projection, as for averaged weights in the state of a callback."""
    projections = _patch_projection_keys(separator)
    if not rest.endswith(_patch_projection_endings(separator)) or _OPTIMIZER_STATE.fullmatch(rest):
        return False
    words = rest.rsplit(separator, _MAX_KEY_WORDS)
    return any(separator.join(words[first:]) in projections for first in range(len(words)))


@cache
def _patch_projection_endings(separator: str) -> tuple[str, ...]:
    """Return the last words of the keys of all patch projections."""
    return tuple(sorted({key.rsplit(separator, 1)[-1] for key in _patch_projection_keys(separator)}))
