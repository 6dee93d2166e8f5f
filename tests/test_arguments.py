"""Wrong arguments of public functions: each is refused in one line that names the argument and what to give."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import vit_jax
import vit_spec
import vit_torch
from tests.twins import small_config
from vit_spec import InputError

CONFIG = small_config(vit_spec.get("vit_s16"))


@pytest.mark.parametrize(
    ("make", "execution", "message"),
    [
        (vit_jax.ViT, vit_torch.Execution(), "execution is a vit_torch.Execution: give a vit_jax.Execution"),
        (vit_torch.ViT, vit_jax.Execution(), "execution is a vit_jax.Execution: give a vit_torch.Execution"),
        (vit_jax.ViT, None, "execution is None: give a vit_jax.Execution"),
        (vit_torch.ViT, "float16", "execution is 'float16': give a vit_torch.Execution"),
    ],
    ids=["of torch", "of jax", "None", "a dtype"],
)
def test_execution_options_of_another_class_are_refused(make: Any, execution: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        make(CONFIG, execution)
    assert str(error.value) == message


@pytest.mark.parametrize("make", [vit_jax.ViT, vit_torch.ViT], ids=["jax", "torch"])
def test_a_model_of_anything_but_a_config_is_refused(make: Callable[[Any], object]) -> None:
    for config, message in {
        "vit_ti16": "config is 'vit_ti16': give a vit_spec.ViTConfig, such as vit_spec.get('vit_ti16')",
        CONFIG.norms: "config is a vit_spec.Norms: give a vit_spec.ViTConfig, such as vit_spec.get('vit_b16')",
    }.items():
        with pytest.raises(InputError) as error:
            make(config)
        assert str(error.value) == message


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None, True])
def test_a_seed_that_is_no_integer_of_64_bits_is_refused(seed: Any) -> None:
    for use in (partial(vit_jax.init, CONFIG), vit_torch.random_key):
        with pytest.raises(InputError) as error:
            use(seed)
        assert str(error.value) == f"seed is {seed!r}: give an integer from 0 up to 2^64 - 1"


def test_unstacked_refuses_parameters() -> None:
    with pytest.raises(InputError) as error:
        vit_jax.unstacked({"blocks": {"attn": {}}})
    assert str(error.value) == (
        "'blocks' is a dict: give arrays by name, as vit_jax.intermediates(..., stacked=True) returns them"
    )
