"""Weights with causes of the catalogue taken into account: what `convert --mend` writes."""

import re
from collections.abc import Sequence

import numpy as np

from parity.checkpoints.surgery.edit import changed, float64
from parity.checkpoints.weights import Checkpoint, parameter, rounded
from parity.comparison.diagnosis.misreadings import misreadings
from parity.comparison.diagnosis.settings import settings
from parity.comparison.diagnosis.trial import Hypothesis, Trial
from vit_spec import InputError, ViTConfig, nearest, rows

IN_BLOCK = re.compile(r"in block (\d+) alone, (.*)")


def mendable(c: ViTConfig) -> dict[str, Hypothesis]:
    """Return the causes that other weights, or another config, would mend, by name."""
    found = [*settings(c, c.image_size, normalised=False), *misreadings(c)]
    return {each.name: each for each in found if not each.images}


def cause_named(name: str, known: dict[str, Hypothesis], c: ViTConfig) -> Hypothesis | None:
    """Return the cause of this name, of all blocks or of one; None where there is none."""
    if (place := IN_BLOCK.fullmatch(name)) and place[2] in known and int(place[1]) < c.depth:
        return known[place[2]].confined(int(place[1]))
    return known.get(name)


def mend(checkpoint: Checkpoint, causes: Sequence[str]) -> tuple[Checkpoint, list[str]]:
    """Return the weights that are right where these causes are true, and a line for each.

    causes: as `diagnose` names them, in its order; without any the checkpoint is returned as it is.

    Raises:
        InputError: no such cause for this model, or one that changes nothing.
    """
    if not causes:
        return checkpoint, []
    config, known = checkpoint.config, mendable(checkpoint.config)
    before = {name: float64(parameter(checkpoint, name)) for name in rows(config)}
    trial = Trial(config, before, np.zeros((1, config.in_channels, *config.image_size)), None)
    told: set[str] = set()
    for name in causes:
        cause = cause_named(name, known, config)
        if cause is None:
            hint = nearest(name, known) or ": give it as `python -m parity diagnose` prints it"
            raise InputError(f"--mend {name!r} is no cause that other weights would mend{hint}")
        after = cause.apply(trial)
        if after is None:
            raise InputError(f"--mend {name!r} changes nothing in these weights: leave it out")
        trial, told = after, told | set(cause.fields)
    dtype = parameter(checkpoint, "patch_embed.proj.weight").dtype
    new = {
        name: rounded(array, dtype)
        for name, array in trial.weights.items()
        if name not in before or not np.array_equal(array, before[name])
    }
    return changed(checkpoint, trial.config, new, told), [f"mended: {name}" for name in causes]
