"""No classifier, or a new one."""

from dataclasses import replace

import numpy as np

from parity.checkpoints.surgery.edit import Changed, Float64, changed
from parity.checkpoints.weights import Checkpoint, check, rounded
from vit_spec import InputError, Law, rows
from vit_spec.laws import TRUNCATED_STD


def drop_head(checkpoint: Checkpoint) -> Changed:
    """Take the classifier away, both of a distilled model; a hidden layer ahead of it stays, as part of the feature.

    Raises:
        InputError: there is none.
    """
    before = checkpoint.config
    if not before.num_classes:
        raise InputError("there is no head to drop: num_classes is 0 already")
    stays = "; pre_logits stays" if before.head.hidden else ""
    done = f"num_classes {before.num_classes} -> 0{stays}{_nameless(checkpoint)}"
    return changed(replace(checkpoint, labels=None, task="classes"), before.replace(num_classes=0), {}, ()), done


def new_head(checkpoint: Checkpoint, num_classes: int, init: str | None = None, seed: int = 0) -> Changed:
    """Put a new classifier in the place of the old one, or where there was none; two into a distilled model.

    Args:
        num_classes: number of outputs.
        init: the law of its weight, such as "zeros", from now on the config's; by default the config's.
        seed: of the draw.

    Raises:
        InputError: no classes, or no law.
    """
    before = checkpoint.config
    config = before.replace(num_classes=num_classes, head={"init": init or before.head.init})
    if not num_classes:
        raise InputError("a head of 0 classes is no head: drop it instead, with drop_head or --drop-head")
    dtypes, rng = check(checkpoint), np.random.default_rng(seed)
    kind = dtypes.get("head.weight", dtypes["patch_embed.proj.weight"])
    laws = {name: row.law for name, row in rows(config).items() if name.startswith("head") and row.law}
    heads = {name: rounded(_draw(law, rows(config)[name].shape, rng), kind) for name, law in laws.items()}
    done = f"num_classes {before.num_classes} -> {num_classes}; new: {', '.join(heads)}, {config.head.init}, seed {seed}"
    done += _nameless(checkpoint)
    return changed(replace(checkpoint, labels=None, task="classes"), config, heads, ("num_classes", "head.init")), done


def _nameless(checkpoint: Checkpoint) -> str:
    return f"; its {len(checkpoint.labels)} labels are gone" if checkpoint.labels else ""


def _draw(law: Law, shape: tuple[int, ...], rng: np.random.Generator) -> Float64:
    """Return independent draws."""
    if law.kind == "constant":
        return np.full(shape, law.mean)
    if law.kind == "uniform":
        low, high = law.arguments
        return rng.uniform(low, high, shape)
    values: Float64 = rng.standard_normal(shape)
    if law.kind == "normal":
        return law.std * values
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(outside.sum())
    return law.std / TRUNCATED_STD * values
