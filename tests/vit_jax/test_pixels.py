"""Images that `vit_jax.normalize` prepares are those of the formula, and those that the model accepts."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import vit_jax
import vit_spec
from tests.twins import small_config
from vit_spec import InputError, Pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ((0.5,), STD), ((0.1,), (0.3,))])
def test_images_are_divided_by_255_then_shifted_and_scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    expected = (IMAGES / 255 - np.array(mean)) / np.array(std)
    for images in (IMAGES, jnp.asarray(IMAGES), IMAGES.astype(np.float32)):
        found = vit_jax.normalize(images, Pixels(mean=mean, std=std))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_result_has_at_least_the_default_dtype() -> None:
    assert vit_jax.normalize(jnp.asarray(IMAGES, jnp.bfloat16), Pixels()).dtype == np.float32
    with jax.enable_x64():
        assert vit_jax.normalize(IMAGES, Pixels()).dtype == np.float64


def test_the_model_refuses_pixels_and_takes_them_after_the_function_that_its_message_names() -> None:
    config = small_config(vit_spec.get("vit_s16"))
    model, params = vit_jax.ViT(config), vit_jax.init(config)
    with pytest.raises(InputError) as error:
        model.apply({"params": params}, IMAGES)
    call = str(error.value).partition("normalize them first, ")[2]
    names: dict[str, Any] = {"vit_jax": vit_jax, "images": IMAGES, "config": config}
    logits: Any = model.apply({"params": params}, eval(call, names))
    assert logits.shape == (2, config.num_classes)


def test_images_with_another_number_of_channels_are_refused() -> None:
    with pytest.raises(InputError, match=r"pixels\.mean has 3 values for 1 channels"):
        vit_jax.normalize(IMAGES[..., :1], Pixels(mean=MEAN, std=STD))
