"""The error for a config that a format cannot store names flags and formats that help, and no others."""

import re

import numpy as np
import pytest

from parity.checkpoints import surgery
from parity.checkpoints.alternatives import check_can_store
from parity.checkpoints.formats import formats, get
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from tests.parity.checkpoints.test_conversions import can_store
from vit_spec import InputError, ViTConfig, rows

VIT = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=16, num_classes=3)
DINO = VIT.replace(norms={"layer_scale": 1.0}, positions={"covers": "none"})
PLAIN = VIT.replace(
    tokens={"class_token": False},
    positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
    mlp={"activation": "gelu_tanh"},
    head={"pool": "mean"},
)
CASES = {  # format, config, and the flags that the message offers
    "covers": ("big_vision", VIT, ["--fold-class-position"]),
    "no row": ("torchvision", VIT.replace(positions={"covers": "none"}), ["--unfold-class-position"]),
    "key bias": ("hf-beit", VIT, ["--drop-key-bias"]),
    "no key bias": ("torchvision", VIT.replace(attention={"qkv_bias": "qv"}), ["--add-key-bias"]),
    "fixed": ("timm", PLAIN, ["--learn-positions"]),
    "size": ("hf-flax", VIT.replace(image_size=(8, 12), norms={"eps": 1e-12}), ["--image-size 8"]),
    "two": (
        "torchvision",
        VIT.replace(positions={"covers": "none"}, attention={"qkv_bias": "qv"}),
        ["--unfold-class-position with --add-key-bias"],
    ),
    "two, of which the second applies only after the first": (
        "timm-naflex",
        VIT.replace(positions={"kind": "fixed", "table": "sincos_2d_mae"}),
        ["--learn-positions with --fold-class-position"],
    ),
    "layer scale, which no flag removes": ("hf-vit", DINO, []),
    "another model": ("lucidrains", VIT, []),
    "another model without a key bias": ("lucidrains", VIT.replace(attention={"qkv_bias": "qv"}), []),
}


def zeros(config: ViTConfig) -> Checkpoint:
    """Return a checkpoint of zeros in the torch format."""
    layouts = get("torch").layouts(config).values()
    shapes = {key: layout.shape(config.sizes) for layout in layouts for key in layout.keys(config.sizes)}
    return Checkpoint(config, "torch", {key: np.zeros(shape, np.float32) for key, shape in shapes.items()})


def after_flags(config: ViTConfig, flags: str) -> ViTConfig:
    """Return the config after the flags of `convert` in a text such as "--image-size 8 with --drop-head"."""
    words = [flag.removeprefix("--").split() for flag in flags.split(" with ")]
    operations = {name.replace("-", "_"): int(*value) if value else True for name, *value in words}
    return surgery.apply(zeros(config), operations)[0].config


@pytest.mark.parametrize(("name", "config", "flags"), CASES.values(), ids=CASES)
def test_the_flags_in_the_message_are_those_that_help(name: str, config: ViTConfig, flags: list[str]) -> None:
    with pytest.raises(InputError) as error:
        check_can_store(get(name), config)
    remedy = str(error.value).rpartition(")")[2]
    assert [each for each in remedy.split(", or ") if each] == flags
    assert all(can_store(name, after_flags(config, each)) for each in flags)


@pytest.mark.parametrize(("name", "config"), [("hf-vit", PLAIN), ("hf-vit", DINO), ("hf-beit", VIT)])
def test_the_formats_in_the_message_are_those_that_can_store_the_model(name: str, config: ViTConfig) -> None:
    with pytest.raises(InputError) as error:
        check_can_store(get(name), config)
    match = re.search(r"choose another format \((.*)\)", str(error.value))
    assert match
    as_it_is, *after = match[1].split("; ")
    assert as_it_is.split(", ") == [each for each in formats() if can_store(each, config)]
    for text in after:
        flag, names = text.removeprefix("with ").split(" also ")
        changed = after_flags(config, flag)
        assert names.split(", ") == [each for each in formats() if can_store(each, changed) and not can_store(each, config)]


def test_a_plain_model_of_the_trainers_goes_to_big_vision_and_with_learned_positions_to_timm(tmp_path) -> None:
    checkpoint = zeros(PLAIN)
    message = (
        r"cannot store positions\.kind='fixed', .*big_vision; with --learn-positions also timm, .*, or --learn-positions"
    )
    with pytest.raises(InputError, match=message):
        write(checkpoint, tmp_path / "a.safetensors", "timm")
    write(checkpoint, tmp_path / "a.npz", "big_vision")
    learned, _ = surgery.learn_positions(checkpoint)
    write(learned, f"{tmp_path / 'timm'}/", "timm")
    assert "pos_embed" in rows(learned.config)


def test_a_format_that_can_store_the_config_is_accepted() -> None:
    check_can_store(get("timm"), VIT)
