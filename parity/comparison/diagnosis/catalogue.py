"""The catalogue of causes, in the order in which they are tried: the likeliest first."""

import re

from parity.comparison.diagnosis.misreadings import misreadings
from parity.comparison.diagnosis.ports import ports
from parity.comparison.diagnosis.settings import settings
from parity.comparison.diagnosis.trial import Hypothesis, Trial

ROUNDINGS = ("dtype rounding", "TF32")  # families that explain a difference without a formula being wrong
LOWER = "precision of "  # begins the names of families in which one place is rounded to a lower type

RARE = re.compile(  # families and names that are tried in pairs after all others
    r"LayerNorm formula of one norm:.*|formula of q_norm and k_norm:.*|precision of .*|merged heads:.*|order of patches:.*"
    r"|positions:.*|order of tokens:.*|rotary phase .*|activation:.* is (sigmoid|tanh|s?elu|leaky_relu|softplus|hardswish)"
    r"|activation:.* is relu squared|norm around the pooling:.*(twice|again)|sums of a block:.*(twice the|left out)"
    r"|sums of a block: both halves are added to nothing|norms of a block:.* own norm"
    r"|LayerNorm formula:.*(divide by|zero|ahead)"
    r"|softmax:.*(all pairs|sigmoid|one more|transposed)|kind of outputs:.*rounded.*"
    r"|pooling:.*(prefix|avgmax|twice|first patch|of the class|number of all).*|hidden layer:.*(relu|sigmoid) .*"
)


def is_rare(cause: Hypothesis) -> bool:
    """Whether a cause is seldom one of two."""
    return RARE.fullmatch(f"{cause.family}: {cause.name}") is not None


def catalogue(trial: Trial) -> list[Hypothesis]:
    """Return every hypothesis about this model and these images; some change nothing, which `apply` tells."""
    height, width = trial.images.shape[2:]
    found = settings(trial.config, (height, width), trial.normalised is not None)
    return [*found, *misreadings(trial.config), *ports(trial.config)]
