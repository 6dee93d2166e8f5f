"""`check --against`: the part that changes the outputs is named; NaN agrees with nothing."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import vit_spec
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison import two_files
from parity.comparison.forward_backward import TorchTwin
from parity.comparison.two_files import compare_files
from tests.extreme_weights import CONFIGS, flatten_params
from tests.twins import perturbed_params, small_config
from vit_spec import InputError

TINY = CONFIGS["width 2, three blocks"]


def altered(**factors: float) -> Checkpoint:
    """Return a checkpoint in which some arrays are multiplied by a factor; "__" separates the words of a path."""
    params = perturbed_params(TINY)
    arrays = flatten_params(params)
    for name, factor in factors.items():
        arrays[name.replace("__", "/")] *= np.float32(factor)
    return as_checkpoint(params, TINY, "jax")


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the PyTorch twin in the place of the JAX twin, to save the time of XLA's compiler."""
    monkeypatch.setattr(two_files, "JaxTwin", partial(TorchTwin, attention="explicit"))


def reordered(params: dict[str, Any]) -> None:
    """Reverse the order of the hidden units of the first block, which changes no output."""
    mlp = params["blocks"]["mlp"]
    mlp["fc1"]["kernel"][0] = mlp["fc1"]["kernel"][0, :, ::-1].copy()
    mlp["fc1"]["bias"][0] = mlp["fc1"]["bias"][0, ::-1].copy()
    mlp["fc2"]["kernel"][0] = mlp["fc2"]["kernel"][0, ::-1].copy()


def test_parts_that_do_not_change_the_outputs_are_not_named_first(torch_alone: None) -> None:
    params, other = perturbed_params(TINY), perturbed_params(TINY)
    reordered(other)
    other["blocks"]["mlp"]["fc2"]["bias"][2] *= 2
    report = compare_files(as_checkpoint(params, TINY, "jax"), as_checkpoint(other, TINY, "jax"))
    assert str(report.part) == "blocks.2.mlp.fc2"
    assert str(report.origins[0].part).startswith("blocks.0.mlp.fc1")
    assert report.verdict.endswith("parts differ without changing the outputs")


def test_a_table_that_all_blocks_use_is_named_although_the_first_stage_is_right(torch_alone: None) -> None:
    config = small_config(vit_spec.get("dinov3_s16"))
    params, other = perturbed_params(config), perturbed_params(config)
    other["blocks"]["mlp"]["fc2"]["bias"][1] *= 2
    turned = config.replace(positions={"rotary_base": 10.0})
    report = compare_files(as_checkpoint(params, config, "jax"), as_checkpoint(other, turned, "jax"))
    assert str(report.part) in ("cosines", "sines") and report.harmless == 0
    assert "blocks.1.mlp.fc2" in {str(origin.part) for origin in report.origins}


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_models_that_compute_nan_are_not_compared(number: float) -> None:
    """Both files give the same NaN, although they are different models."""
    one, other = altered(head__bias=number), altered(head__bias=number, cls_token=2)
    message = r"^the model of a\.npz computes NaN or infinities, first at head: .* inspect a\.npz"
    with pytest.raises(InputError, match=message):
        compare_files(one, other, sources=("a.npz", "b.npz"))
