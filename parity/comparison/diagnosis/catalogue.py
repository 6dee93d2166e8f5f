"""The catalogue of all known causes, in the order in which they are tried: the likeliest first."""

import re

from parity.comparison.diagnosis.config_hypotheses import config_hypotheses
from parity.comparison.diagnosis.hypothesis import Hypothesis, Trial
from parity.comparison.diagnosis.implementation_hypotheses import implementation_hypotheses
from parity.comparison.diagnosis.weight_hypotheses import weight_hypotheses

RARE = re.compile(  # "family: name" of the causes that are tried last in pairs
    r"LayerNorm formula of one norm:.*|formula of q_norm and k_norm:.*|precision of .*|merged heads:.*|order of patches:.*"
    r"|positions:.*|order of tokens:.*|rotary phase .*|activation:.* is (sigmoid|tanh|s?elu|leaky_relu|softplus|hardswish)"
    r"|activation:.* is relu squared|norm around the pooling:.*(twice|again)|sums of a block:.*(twice the|left out)"
    r"|sums of a block: neither half has a residual connection|norms of a block:.* own norm"
    r"|LayerNorm formula:.*(divide by|zero|before)"
    r"|softmax:.*(all pairs|sigmoid|one more|transposed)|kind of outputs:.*rounded.*"
    r"|pooling:.*(prefix|avgmax|twice|first patch|of the class|number of all).*|hidden layer:.*(relu|sigmoid) .*"
)


def is_rare(cause: Hypothesis) -> bool:
    """Return whether a cause is unlikely to be one of two simultaneous causes."""
    return RARE.fullmatch(f"{cause.family}: {cause.name}") is not None


def catalogue(trial: Trial) -> list[Hypothesis]:
    """Return every hypothesis about this model and these images.

    Some of them change nothing in this model: `Hypothesis.apply` then returns None.
    """
    height, width = trial.images.shape[2:]
    of_config = config_hypotheses(trial.config, (height, width), trial.normalized_by is not None)
    return [*of_config, *weight_hypotheses(trial.config), *implementation_hypotheses(trial.config)]
