"""The catalogue of all known causes, in the order in which they are tried: the likeliest first."""

from parity.comparison.diagnosis.config_hypotheses import config_hypotheses
from parity.comparison.diagnosis.hypothesis import Hypothesis, Trial
from parity.comparison.diagnosis.implementation_hypotheses import implementation_hypotheses
from parity.comparison.diagnosis.weight_hypotheses import weight_hypotheses


def catalogue(trial: Trial) -> list[Hypothesis]:
    """Return every hypothesis about this model and these images.

    Some of them change nothing in this model: `Hypothesis.apply` then returns None.
    """
    height, width = trial.images.shape[2:]
    of_config = config_hypotheses(trial.config, (height, width), trial.normalized_by is not None)
    return [*of_config, *weight_hypotheses(trial.config), *implementation_hypotheses(trial.config)]
