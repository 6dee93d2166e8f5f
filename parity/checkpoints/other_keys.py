"""Explain the keys of a checkpoint that are not under the prefix of the model's weights.

Training scripts store other things beside the weights: optimizer state, metrics, other weights, and parts of the model.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.patch_keys import MAX_KEY_WORDS, patch_projection_endings, patch_projection_keys
from parity.checkpoints.wrapper_names import LAYER_NAMES, PRIORITY
from parity.checkpoints.wrappers import without_common_path

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
    has_weights = word in PRIORITY and (word not in LAYER_NAMES or word in with_projection)
    return has_weights or _POSSIBLE_PARTS.fullmatch(rest) is not None


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


def _is_patch_projection(rest: str, separator: str) -> bool:
    """Return whether a key ends like the key of a patch projection, as for averaged weights in the state of a callback."""
    projections = patch_projection_keys(separator)
    if not rest.endswith(patch_projection_endings(separator)) or _OPTIMIZER_STATE.fullmatch(rest):
        return False
    words = rest.rsplit(separator, MAX_KEY_WORDS)
    return any(separator.join(words[first:]) in projections for first in range(len(words)))
