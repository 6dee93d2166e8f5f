"""Reports of a small model for the tests of the HTML report: one that passes, one that fails, and attention maps."""

from functools import cache

import numpy as np
import pytest

import vit_spec
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison.report import Report
from parity.comparison.twins import compare
from tests.twins import perturbed_params, small_config

QUICK = {"xla_backend_optimization_level": 0}


@cache
def checkpoint() -> Checkpoint:
    """Return a checkpoint with two blocks, a class token and a grid that is not square."""
    config = small_config(vit_spec.get("vit_s16"))
    return as_checkpoint(perturbed_params(config), config, "jax")


@cache
def passing_report() -> Report:
    """Return a report of the default level that passes."""
    return compare(checkpoint().config, checkpoint(), xla_options=QUICK)


@cache
def failing_report() -> Report:
    """Return a report that fails, because the JAX twin has another eps."""
    import vit_jax

    original = vit_jax.ViT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit_jax, "ViT", lambda config, *rest: original(config.replace(norms={"eps": 1e-5}), *rest))
        return compare(checkpoint().config, checkpoint(), level="function", backward=False, xla_options=QUICK)


def random_attention_maps(seed: int = 0) -> np.ndarray:
    """Return random attention maps of two heads, (2, 3, 2), float32."""
    return np.random.default_rng(seed).random((2, 3, 2), np.float32)
