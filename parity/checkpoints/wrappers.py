"""Find the weights of a model in a checkpoint: the prefix of their keys, and what the other keys are.

Training scripts store weights in wrappers, such as {"model": ...} or "module." in front of every key, and store other
things beside them, such as optimizer state.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.formats import formats, get, revision
from vit_spec import nearest

WEIGHT_LEAVES = ("weight", "kernel")  # the last word of the key of a linear layer's weight, in PyTorch and in Flax

# Names of wrappers, in order of preference.  Averaged weights are preferred, because they are the weights that people
# evaluate, as in timm.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "teacher",
    "ema",
    "ema_state_dict",
    "ema_params",
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "params",
    "weights",
    "opt",
    "optimizer",
    "target",
    "img",
    "backbone",
    "encoder",
    "vit",
    "timm_model",  # in transformers' TimmWrapper
    "net",
    "student",
    "current_model_state",  # the weights beside averaged ones, in Lightning's callback WeightAveraging
)

# Modules that torch.compile, FullyShardedDataParallel and activation checkpointing put around any module of a model.
_INNER_MODULES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Wrappers that do not change the function of a model: these, the module of DistributedDataParallel, and, by separator,
# dictionaries of training loops.  Within a key of PyTorch, a word such as "model" names a module, no dictionary.
_LOOP_MODULES = ("module", *_INNER_MODULES)
_LOOP_DICTIONARIES = {
    ".": (
        "state_dict_ema",
        "state_dict",
        "model_state_dict",
        "model_state",
        "weights",
        "params",
        "opt",
        "optimizer",
        "target",
        "model",
        "net",
        "model_ema",
        "ema",
        "ema_state_dict",
        "ema_params",
        "current_model_state",
    ),
    "/": ("params", "opt", "optimizer", "target", "ema_params"),
}

# Keys that may be beside weights; they are reported and not read.  Any other key is an error: the model may need it.
_KNOWN_EXTRAS = re.compile(
    # Of a training run.  A layer can have these names too, and then has a weight or a bias.
    r"(optim|optimizer(s|_states?|_state_dict)?|opt|opt_states?|callbacks|loops)(\W(?!(weight|bias|kernel)$).*)?"
    r"|state\W(step|param_states)(\W.*)?|(extra\W)?accum_(\w+_time|examples_seen)"
    r"|((lr_)?scheduler(s|_states?|_state_dict)?|loss_scaler|hyper_parameters|best_(acc|prec)\w*|\w*rngs?(_states?|_keys?)?"
    r"|step|global_step|epochs?|iteration|args|config|n_averaged|averaging_state)"
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
# Wrappers that a layer may be called too: they have other weights only if these have a patch projection.
_LAYER_NAMES = ("weights", "vit", "model_state", "ema_state_dict", "ema_params", "current_model_state")

# The states of a metric of torchmetrics, which are integers that count: certainly no part of a model.
_COUNTS = (frozenset(("tp", "fp", "tn", "fn")), frozenset(("correct", "total")), frozenset(("confmat",)))
# The states of its metrics that aggregate numbers, each a scalar; two of these words may name a scale of a layer too.
_AGGREGATES = frozenset(
    "mean_value sum_value max_value min_value sum_squared_error sum_abs_error sum_error residual".split()
)
_AGGREGATES_OR_SCALES = _AGGREGATES | {"weight", "total"}
# A loss, and its buffers: weights of the classes, or the mean output of DINO's teacher.
_LOSS = re.compile(r"(\w+_)?(criterion|loss(es)?|loss_(fn|func|function)|bce|cross_entropy)")
_LOSS_BUFFERS = frozenset(("weight", "pos_weight", "weights", "class_weights", "alpha", "center"))

CLASSIFIERS = ("head", "classifier", "fc")  # modules beside a backbone that are read as its classifier

_PRIORITY = {word: n for n, word in enumerate(WRAPPERS)}
_MAX_KEY_WORDS = 8  # the key of a patch projection has at most this many words
_MAX_SUGGESTED_KEYS = 10_000  # keys whose prefixes a message may suggest
_MAX_DEPTH, _MAX_PREFIXES = 6, 16  # limits for nested wrappers, and for the prefixes to try in one file
_SEPARATORS = re.compile(r"[./]")


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


def find_prefixes(keys: Mapping[str, Any], separator: str, strip: str | None = None) -> list[str]:
    """Return the prefixes under which the keys have a patch projection of some format: "", "model.", "model.module.", ...

    They are in the order of their first wrappers in `WRAPPERS`, then of their second, and so on; "" is first.

    Args:
        keys: all keys of a file.
        separator: the separator of the words of a key.
        strip: a wrapper in addition to `WRAPPERS`, such as "net.vit."; if it is given, only prefixes with it are returned.
    """
    found = _wrapped_prefixes(keys, separator, "")
    for text in _spellings_of_strip(strip, separator) if strip else ():
        if found := _wrapped_prefixes(keys, separator, text):
            break
    projections = _patch_projection_keys(separator, revision())
    ordered = sorted(found, key=lambda prefix: found[prefix])
    fitting = [prefix for prefix in ordered if any(prefix + key in keys for key in projections)]
    if not fitting:
        inside = {
            prefix: without_inner_modules([key.removeprefix(prefix) for key in _below(keys, prefix)]) for prefix in ordered
        }
        fitting = [prefix for prefix in ordered if not projections.isdisjoint(inside[prefix])]
    if not fitting and (aliases := _projection_aliases(separator, revision())):
        fitting = [prefix for prefix in ordered if any(aliases.match(key, len(prefix)) for key in _below(keys, prefix))]
    return fitting[:_MAX_PREFIXES]


def _below(keys: Iterable[str], prefix: str) -> Iterator[str]:
    return (key for key in keys if key.startswith(prefix))


def without_inner_modules(keys: Sequence[str]) -> list[str]:
    """Return keys without the modules that torch.compile, FSDP and checkpointing put around modules within a model.

    `keys` are the keys of a model, without wrappers in front.  They are returned unchanged if two would become the same.
    """
    pattern = rf"(?<![^.])(?:{'|'.join(_INNER_MODULES)})\."
    names = [re.sub(pattern, "", key) for key in keys]
    return names if len(set(names)) == len(names) else list(keys)


@cache
def _projection_aliases(separator: str, registered: int) -> re.Pattern[str] | None:
    """Return a pattern of the keys that formats read as that of the patch projection under another name; None if none.

    registered: the `revision` of the formats, a key of the cache, as in the two functions below.
    """
    found = [
        f"(?:{alias}){re.escape(key.removeprefix(replacement))}$"
        for name in formats()
        for alias, replacement in get(name).aliases.items()
        for key in _patch_projection_keys(separator, registered)
        if get(name).separator == separator and key.startswith(replacement)
    ]
    return re.compile("|".join(dict.fromkeys(found))) if found else None


def is_prefix(keys: Iterable[str], separator: str, strip: str) -> bool:
    """Return whether a key begins with a prefix that the user gave, if need be after wrappers."""
    keys = list(keys)
    return any(_wrapped_prefixes(keys, separator, text) for text in _spellings_of_strip(strip, separator))


def unknown_prefix(keys: Iterable[str], separator: str) -> str:
    """Return the beginning of a key that ends like the key of a patch projection, such as "net.vit."; "" if none does."""
    projections = _patch_projection_keys(separator, revision())
    for key in keys:
        words = key.rsplit(separator, _MAX_KEY_WORDS)
        for first in range(1, len(words)):
            if separator.join(words[first:]) in projections:
                return "".join(f"{word}{separator}" for word in words[:first])
    return ""


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
            elif rest and word in _PRIORITY:
                prefix, order = f"{prefix}{word}{separator}", (*order, _PRIORITY[word])
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
    names = [word for word in words[:count] if word not in (*_LOOP_MODULES, *_LOOP_DICTIONARIES[separator])]
    names += [word for word in words[count:] if word not in _LOOP_MODULES]
    return separator.join(names)


@cache
def _patch_projection_keys(separator: str, registered: int) -> frozenset[str]:
    """Return the keys of the patch projection in all tables of the formats with this separator."""
    tables = [
        (get(name), variant) for name in formats() for variant in get(name).tables if get(name).separator == separator
    ]
    return frozenset(
        layout.key
        for format, variant in tables
        for layout in format.table_layouts(variant).get("patch_embed.proj.weight", [])
    )


def find_classifier(unknown: Iterable[str], prefix: str, separator: str) -> str:
    """Return the path of the classifier that a module has beside its backbone, such as "model.head"; "" if there is none.

    It lies in a module around the backbone, is the only such module, and has a weight.

    Args:
        unknown: see `OtherKeys`.
        prefix: the prefix of the weights of the backbone, such as "model.backbone.".
        separator: the separator of the words of a key.
    """
    words, keys = prefix.removesuffix(separator).split(separator), set(unknown)
    around = ["".join(f"{word}{separator}" for word in words[:count]) for count in range(len(words))] if prefix else []
    paths = [f"{outer}{name}" for outer in around for name in CLASSIFIERS]
    found = [path for path in paths if any(f"{path}{separator}{leaf}" in keys for leaf in WEIGHT_LEAVES)]
    return found[0] if len(found) == 1 else ""


def classify_other_keys(arrays: Mapping[str, StoredArray], prefix: str, separator: str) -> OtherKeys:
    """Classify all keys that do not begin with the prefix of a model's weights; with an empty prefix there are none."""
    others = {key: without_common_path(key, prefix, separator) for key in arrays if prefix and not key.startswith(prefix)}
    is_known = _known_extra_test(others.values(), prefix.removesuffix(separator), separator)
    of_training, buffers = _states_of_metrics_and_losses({key: arrays[key] for key in others}, separator)
    doubtful = {key: rest for key, rest in others.items() if not is_known(rest) and key not in of_training}
    projected = {rest for rest in others.values() if _is_patch_projection(rest, separator)}
    with_projection = {rest.partition(separator)[0] for rest in projected}
    ambiguous = {
        rest for key, rest in doubtful.items() if key in buffers or _is_ambiguous(rest, separator, with_projection)
    }
    unknown = tuple(key for key, rest in doubtful.items() if rest not in ambiguous)
    ambiguous |= projected
    return OtherKeys(frozenset(others), unknown, tuple(sorted({rest.partition(separator)[0] for rest in ambiguous})))


def _states_of_metrics_and_losses(
    arrays: Mapping[str, StoredArray], separator: str
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys that are certainly states of metrics, and those that are probably states of metrics or losses.

    A layer may be called "criterion" too, and then has a bias, or a weight of two dimensions, which no loss has.
    """
    groups: dict[str, dict[str, StoredArray]] = {}
    for key, array in arrays.items():
        parent, _, leaf = key.rpartition(separator)
        groups.setdefault(parent, {})[leaf] = array
    certain: set[str] = set()
    probable: set[str] = set()
    for parent, group in groups.items():
        keys, values = {f"{parent}{separator}{leaf}" for leaf in group}, list(group.values())
        if parent and group.keys() in _COUNTS and all(array.dtype.kind in "iu" for array in values):
            certain |= keys
        elif parent and group.keys() <= _AGGREGATES_OR_SCALES and group.keys() & _AGGREGATES:
            probable |= keys if all(array.size == 1 for array in values) else set()
        elif (
            parent
            and group.keys() <= _LOSS_BUFFERS
            and ("pos_weight" in group or any(map(_LOSS.fullmatch, parent.split(separator))))
        ):
            probable |= keys if all(array.size == max(array.shape, default=1) for array in values) else set()
    return frozenset(certain), frozenset(probable)


def without_common_path(key: str, prefix: str, separator: str) -> str:
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


def _is_ambiguous(rest: str, separator: str, with_projection: Collection[str]) -> bool:
    """Return whether a key may belong to other weights or to a part of the model.

    with_projection: the first words of the keys that have a patch projection.
    """
    word = rest.partition(separator)[0]
    has_weights = word in _PRIORITY and (word not in _LAYER_NAMES or word in with_projection)
    return has_weights or _POSSIBLE_PARTS.fullmatch(rest) is not None


def _is_patch_projection(rest: str, separator: str) -> bool:
    """Return whether a key ends like the key of a patch projection, as for averaged weights in the state of a callback."""
    projections = _patch_projection_keys(separator, revision())
    if not rest.endswith(_patch_projection_endings(separator, revision())) or _OPTIMIZER_STATE.fullmatch(rest):
        return False
    words = rest.rsplit(separator, _MAX_KEY_WORDS)
    return any(separator.join(words[first:]) in projections for first in range(len(words)))


@cache
def _patch_projection_endings(separator: str, registered: int) -> tuple[str, ...]:
    """Return the last words of the keys of all patch projections."""
    return tuple(sorted({key.rsplit(separator, 1)[-1] for key in _patch_projection_keys(separator, registered)}))
