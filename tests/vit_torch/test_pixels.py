"""Images that `vit_torch.normalize` prepares are those of the formula, and those that the model accepts."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

import vit_spec
import vit_torch
from tests.twins import small_config
from vit_spec import InputError, Pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ((0.5,), STD), ((0.1,), (0.3,))])
def test_images_are_divided_by_255_then_shifted_and_scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    pixels = Pixels(mean=mean, std=std)
    expected = torch.tensor((IMAGES.astype(np.float32) / np.float32(255) - np.float32(mean)) / np.float32(std))
    for images in (torch.tensor(IMAGES), torch.tensor(IMAGES).float()):
        assert torch.equal(vit_torch.normalize(images, pixels, channel_dim=-1), expected)
        first = vit_torch.normalize(images.permute(0, 3, 1, 2), pixels)
        assert torch.equal(first, expected.permute(0, 3, 1, 2))
        assert torch.equal(vit_torch.normalize(images[0].permute(2, 0, 1), pixels), first[0])


def test_the_result_has_at_least_the_default_dtype() -> None:
    images = torch.tensor(IMAGES)
    assert vit_torch.normalize(images.bfloat16(), Pixels(), channel_dim=-1).dtype == torch.float32
    assert vit_torch.normalize(images.double(), Pixels(), channel_dim=-1).dtype == torch.float64


def test_it_compiles_for_any_size_as_one_graph() -> None:
    images, pixels = torch.tensor(IMAGES).permute(0, 3, 1, 2), Pixels(mean=MEAN, std=STD)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: vit_torch.normalize(x, pixels), fullgraph=True, dynamic=True, backend="eager")
    for each in (images, images[..., 3:]):
        assert torch.equal(compiled(each), vit_torch.normalize(each, pixels))


def test_no_values_are_copied_to_the_device() -> None:
    """`torch.tensor` of a list, which the operation "lift_fresh" betrays, waits for a GPU."""
    operations = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    images = torch.tensor(IMAGES)
    with Record():
        vit_torch.normalize(images, Pixels(mean=MEAN, std=STD), channel_dim=-1)
        assert "div" in operations and "lift_fresh" not in operations
        torch.tensor(MEAN)
        assert "lift_fresh" in operations


def test_the_model_refuses_pixels_and_takes_them_after_the_function_that_its_message_names() -> None:
    config, images = small_config(vit_spec.get("vit_s16")), torch.tensor(IMAGES).permute(0, 3, 1, 2)
    model = vit_torch.ViT(config)
    with pytest.raises(InputError) as error:
        model(images)
    call = str(error.value).partition("normalize them first, ")[2]
    logits = model(eval(call, {"vit_torch": vit_torch, "images": images, "config": config}))
    assert logits.shape == (2, config.num_classes)


def test_images_with_another_number_of_channels_are_refused() -> None:
    with pytest.raises(InputError, match=r"pixels\.mean has 3 values for 1 channels"):
        vit_torch.normalize(torch.tensor(IMAGES[..., :1]), Pixels(mean=MEAN, std=STD), channel_dim=-1)
