"""How the recipe of a run may change when it resumes, and the changes that config.json records."""

import dataclasses
from typing import Any

from train.recipes import Augment
from train.recipes.fields import format_value
from vit_spec import InputError

# Fields of the recipe that may differ when a run resumes: they do not decide what is learnt.
CHANGEABLE = (
    *("run", "workers", "mesh", "remat", "compile", "log_every", "save_every", "keep", "tensorboard", "wandb", "profile"),
    "patience",  # when to stop
    *("non_finite", "corrupt"),  # how to go on after a step or an image that stopped the run
    *("data", "compare_data"),  # the data may be moved: the fingerprint identifies them
    "teacher",  # so may its weights: their checksum identifies them
)
# Fields of the augmentation that may not change: held-out images depend on the first two, the order of images on the third.
_KEPT = ("share", "held_out_filter", "repeats")
# Fields of the recipe that `--resume` may change, besides CHANGEABLE: they take effect from that step on.  Fields that
# held-out metrics depend on may not change.  Nor may beta1 and beta2: Adam's bias corrections suppose the same betas in all
# updates.
RESUMABLE = (
    *("epochs", "warmup", "decay", "cooldown", "batch_size", "accumulate", "dtype", "eval_every"),
    *("label_smoothing", "class_weights", "sampling"),
    *("distillation", "distillation_weight", "distillation_temperature"),
    *(f"optimizer.{name}" for name in ("lr", "weight_decay", "eps", "clip")),
    *(f"augment.{each.name}" for each in dataclasses.fields(Augment) if each.name not in _KEPT),
)

TRAINER = "trainer"  # the name of a change of the trainer, and of the trainer in config.json

# The changes of a recipe, the first one first.  "step": of the checkpoint from which the run resumed; "changes": by field,
# the value before and after.
Lineage = list[dict[str, Any]]


def extend_lineage(
    lineage: Any, before: dict[str, Any], after: dict[str, Any], trainers: tuple[str, str], step: int
) -> Lineage:
    """Return a lineage with the changes between two recipes, as config.json has them, and of the trainer, if there are any.

    trainers: those before and after.
    step: step of the newest checkpoint.

    Raises:
        InputError: the lineage is none that a run writes.
    """
    if not _is_lineage(lineage):
        raise InputError("a lineage that no run writes: put the file back as it was")
    was, now = flatten(before), flatten(after)
    changes = {name: [was.get(name), now[name]] for name in RESUMABLE if was.get(name) != now[name]}
    if trainers[0] != trainers[1]:
        changes[TRAINER] = [*trainers]
    done = lineage_from(lineage, step)
    return [*done, {"step": step, "changes": changes}] if changes else done


def lineage_from(lineage: Lineage, step: int) -> Lineage:
    """Return the lineage of a run that resumes from a step: changes after it count from it.

    Their own steps are lost if the checkpoints of these were damaged or removed.
    """
    return [{**each, "step": min(each["step"], step)} for each in lineage]


def _is_lineage(lineage: Any) -> bool:
    return isinstance(lineage, list) and all(
        isinstance(each, dict)
        and type(each.get("step")) is int
        and isinstance(each.get("changes"), dict)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in each["changes"].values())
        and all(type(size) is int and size > 0 for size in each["changes"].get("batch_size", ()))
        for each in lineage
    )


def image_offset(lineage: Lineage, batch_size: int) -> int:
    """Return how many more training images a run has had than if all of its steps had had the present batch size."""
    offset = 0
    for each in lineage:
        before, after = each["changes"].get("batch_size", (batch_size, batch_size))
        offset += each["step"] * (before - after)
    return offset


def batch_size_step(lineage: Lineage) -> int:
    """Return the step at which the batch size changed last, 0 if never."""
    return max((each["step"] for each in lineage if "batch_size" in each["changes"]), default=0)


def describe_changes(lineage: Lineage) -> list[str]:
    """Return a line for each field that has changed: "epochs from 10 to 20 at step 225"."""
    return [
        f"{name} from {format_value(was)} to {format_value(now)} at step {each['step']}"
        for each in lineage
        for name, (was, now) in each["changes"].items()
    ]


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        name: value for key, child in node.items() for name, value in flatten(child, f"{prefix}.{key}".lstrip(".")).items()
    }
