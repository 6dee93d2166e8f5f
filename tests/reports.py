"""What the tests of the page show: one check that passes and one that fails, on a small model."""

from functools import cache

import numpy as np
import pytest

import vit_spec
from parity.checkpoints.weights import Checkpoint, held
from parity.comparison.report import Report
from parity.comparison.twins import compare
from tests.twins import perturbed, small

QUICK = {"xla_backend_optimization_level": 0}


@cache
def checkpoint() -> Checkpoint:
    """Two blocks, a class token, a grid that is not square."""
    config = small(vit_spec.get("vit_s16"))
    return held(perturbed(config), config, "jax")


@cache
def passing() -> Report:
    """Of the level that is checked by default."""
    return compare(checkpoint().config, checkpoint(), xla_options=QUICK)


@cache
def failing() -> Report:
    """With another eps in the JAX twin alone."""
    import vit_jax

    right = vit_jax.ViT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit_jax, "ViT", lambda config, *rest: right(config.replace(norms={"eps": 1e-5}), *rest))
        return compare(checkpoint().config, checkpoint(), level="function", backward=False, xla_options=QUICK)


def noise(seed: int = 0) -> np.ndarray:
    """An attention map of two heads."""
    return np.random.default_rng(seed).random((2, 3, 2), np.float32)
