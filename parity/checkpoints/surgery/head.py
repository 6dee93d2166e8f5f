"""Operations on the classifier: remove it, keep some of its outputs, or replace it by a new one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parity.checkpoints.conversion import parameter
from parity.checkpoints.surgery.edit import Changed, apply_changes, round_parameter
from parity.checkpoints.weights import Checkpoint, validate
from vit_spec import InputError, rows
from vit_spec.config import coerce_field
from vit_spec.sampling import sample


def drop_head(checkpoint: Checkpoint) -> Changed:
    """Remove the classifier, or both classifiers of a distilled model; a hidden layer before it stays.

    Raises:
        InputError: there is no classifier.
    """
    before = checkpoint.config
    if not before.num_classes:
        raise InputError("there is no head to drop: num_classes is 0 already")
    stays = "; pre_logits stays" if before.head.hidden else ""
    done = f"num_classes {before.num_classes} -> 0{stays}{_lost_labels_remark(checkpoint)}"
    return apply_changes(replace(checkpoint, labels=None, task="classes"), before.replace(num_classes=0), {}, ()), done


def select_outputs(checkpoint: Checkpoint, outputs: Sequence[int]) -> Changed:
    """Keep some outputs of the classifier, or of both classifiers of a distilled model, in a new order.

    The labels follow.

    Args:
        checkpoint: a checkpoint with a classifier.
        outputs: the numbers of the outputs to keep, each at most once, in their new order.

    Raises:
        InputError: there is no such output, or one is given twice.
    """
    before, chosen = checkpoint.config, np.array(outputs)
    is_valid = chosen.ndim == 1 and chosen.dtype.kind in "iu" and len(np.unique(chosen)) == len(chosen)
    if not is_valid or chosen.min() < 0 or chosen.max() >= before.num_classes:
        raise InputError(f"outputs are {outputs!r}: give different numbers from 0 to {before.num_classes - 1}")
    config = before.replace(num_classes=len(outputs))
    names = [name for name, row in rows(before).items() if name.startswith("head") and "label" in row.axes]
    heads = {name: parameter(checkpoint, name)[chosen] for name in names}
    labels = None if checkpoint.labels is None else tuple(checkpoint.labels[i] for i in outputs)
    done = (
        f"num_classes {before.num_classes} -> {len(outputs)}; kept: the outputs {_shorten(outputs)} of {', '.join(heads)}"
    )
    return replace(apply_changes(checkpoint, config, heads, ("num_classes",)), labels=labels), done


def _shorten(outputs: Sequence[int]) -> str:
    """Return numbers as text; of more than six, the first five."""
    shown = outputs if len(outputs) <= 6 else outputs[:5]
    return ", ".join(map(str, shown)) + ", ..." * (len(shown) < len(outputs))


def new_head(checkpoint: Checkpoint, num_classes: int, init: str | None = None, seed: int = 0) -> Changed:
    """Replace the classifier by a new, randomly initialised one, or add one; a distilled model gets two.

    Args:
        checkpoint: the checkpoint.
        num_classes: number of outputs.
        init: the initial distribution of the weight, such as "zeros", which also goes into the config; by default
            `head.init` of the config.
        seed: seed of the random numbers.

    Raises:
        InputError: num_classes is not a positive integer, or the distribution is unknown.
    """
    num_classes = coerce_field("num_classes", num_classes)
    if num_classes < 1:
        raise InputError(
            f"num_classes is {num_classes}: give the number of outputs, or remove the classifier with drop_head "
            f"(--drop-head)"
        )
    before = checkpoint.config
    config = before.replace(num_classes=num_classes, head={"init": init or before.head.init})
    dtypes, rng = validate(checkpoint), np.random.default_rng(seed)
    dtype = dtypes.get("head.weight", dtypes["patch_embed.proj.weight"])
    laws = {name: row.law for name, row in rows(config).items() if name.startswith("head") and row.law}
    heads = {name: round_parameter(name, sample(law, rows(config)[name].shape, rng), dtype) for name, law in laws.items()}
    done = f"num_classes {before.num_classes} -> {num_classes}; new: {', '.join(heads)}, {config.head.init}, seed {seed}"
    done += _lost_labels_remark(checkpoint)
    return apply_changes(
        replace(checkpoint, labels=None, task="classes"), config, heads, ("num_classes", "head.init")
    ), done


def _lost_labels_remark(checkpoint: Checkpoint) -> str:
    """Return the end of a line, which says that labels are lost; "" if there are none."""
    return f"; its {len(checkpoint.labels)} labels are lost" if checkpoint.labels else ""
