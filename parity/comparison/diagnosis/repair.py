"""Apply causes of the catalogue to the weights of a checkpoint: `convert --mend`."""

import re
from collections.abc import Sequence

import numpy as np

from parity.checkpoints.conversion import parameter
from parity.checkpoints.surgery.edit import apply_changes, round_parameter, to_float64
from parity.checkpoints.weights import Checkpoint, validate
from parity.comparison.diagnosis.config_hypotheses import config_hypotheses
from parity.comparison.diagnosis.hypothesis import Hypothesis, Trial
from parity.comparison.diagnosis.weight_hypotheses import weight_hypotheses
from vit_spec import InputError, ViTConfig, nearest, rows

IN_BLOCK = re.compile(r"in block (\d+) alone, (.*)")


def repairable_causes(c: ViTConfig) -> dict[str, Hypothesis]:
    """Return, by name, the causes that a change of the weights or of the config repairs."""
    hypotheses = [*config_hypotheses(c, c.image_size, normalized=False), *weight_hypotheses(c)]
    return {hypothesis.name: hypothesis for hypothesis in hypotheses if not hypothesis.images}


def find_cause(name: str, known: dict[str, Hypothesis], c: ViTConfig) -> Hypothesis | None:
    """Return the cause with this name, which may name a single block, or None if there is no such cause."""
    if (match := IN_BLOCK.fullmatch(name)) and match[2] in known and int(match[1]) < c.depth:
        return known[match[2]].in_block(int(match[1]))
    return known.get(name)


def repair(checkpoint: Checkpoint, causes: Sequence[str]) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint with these causes repaired, and a line of text for each.

    causes: names as `diagnose` prints them, in its order; if empty, the checkpoint is returned unchanged.

    Raises:
        InputError: this model has no such cause, it changes nothing, or a finite number would become infinite.
    """
    if not causes:
        return checkpoint, []
    config, known = checkpoint.config, repairable_causes(checkpoint.config)
    weights = {name: to_float64(parameter(checkpoint, name)) for name in rows(config)}
    trial = Trial(config, weights, np.zeros((1, config.in_channels, *config.image_size)), None)
    fields: set[str] = set()
    for name in causes:
        cause = find_cause(name, known, config)
        if cause is None:
            hint = nearest(name, known) or ": give it as `python -m parity diagnose` prints it"
            raise InputError(f"--mend {name!r} is not a cause that a change of the weights can repair{hint}")
        repaired = cause.apply(trial)
        if repaired is None:
            raise InputError(f"--mend {name!r} changes nothing in this checkpoint: leave it out")
        trial, fields = repaired, fields | set(cause.fields)
    dtypes = validate(checkpoint)
    widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)  # for new parameters, which copy others
    new = {
        name: round_parameter(name, array, dtypes.get(name, widest))
        for name, array in trial.weights.items()
        if name not in weights or not np.array_equal(array, weights[name])
    }
    return apply_changes(checkpoint, trial.config, new, fields), [f"mended: {name}" for name in causes]
