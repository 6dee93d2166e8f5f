"""`check --against`: two checkpoints of one function pass; NaN agrees with nothing."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison.two_files import compare_files
from tests.extreme_weights import CONFIGS, flatten_params
from tests.twins import perturbed_params
from vit_spec import InputError

TINY = CONFIGS["width 2, three blocks"]


def altered(**factors: float) -> Checkpoint:
    """Return a checkpoint in which some arrays are multiplied by a factor; "__" separates the words of a path."""
    params = perturbed_params(TINY)
    arrays = flatten_params(params)
    for name, factor in factors.items():
        arrays[name.replace("__", "/")] *= np.float32(factor)
    return as_checkpoint(params, TINY, "jax")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_models_that_compute_nan_are_not_compared(number: float) -> None:
    """Both files give the same NaN, although they are different models."""
    one, other = altered(head__bias=number), altered(head__bias=number, cls_token=2)
    message = r"^the model of a\.npz computes NaN or infinities, first at head: .* inspect a\.npz"
    with pytest.raises(InputError, match=message):
        compare_files(one, other, sources=("a.npz", "b.npz"))
