"""The catalogue of causes, in the order in which they are tried: the likeliest first."""

from parity.diagnosis.misreadings import misreadings
from parity.diagnosis.ports import ports
from parity.diagnosis.settings import settings
from parity.diagnosis.trial import Hypothesis, Trial

ROUNDINGS = ("dtype rounding", "TF32")  # families that explain a difference without a formula being wrong


def catalogue(trial: Trial) -> list[Hypothesis]:
    """Return every hypothesis about this model and these images; some change nothing, which `apply` tells."""
    height, width = trial.images.shape[2:]
    found = settings(trial.config, (height, width), trial.normalised is not None)
    return [*found, *misreadings(trial.config), *ports(trial.config)]
