"""Every format becomes every other and comes back bit by bit, or says beforehand what it cannot hold."""

from functools import cache

import numpy as np
import pytest

import vit_spec
from parity.checkpoints.formats import formats, get
from parity.checkpoints.weights import Checkpoint, translate
from tests.twins import small, small_models
from vit_spec import InputError, ViTConfig

# On the grid of the tests, and on a square one, which is all that some formats have.
SMALL = tuple(small_models().values())
DINOV2 = small(vit_spec.get("dinov2_b14_reg4", positions={"covers": "class"}))
PLAIN = small(vit_spec.get("vit_b16"))
LUCIDRAINS = {"after_blocks": False, "after_pool": True}
MORE = (  # what is published, but under none of the names
    DINOV2,
    DINOV2.replace(mlp={"activation": "swiglu"}),
    DINOV2.replace(num_classes=5, head={"pool": "token_mean"}),
    DINOV2.replace(num_classes=5, head={"pool": "token_mean"}, mlp={"activation": "swiglu"}),
    small(vit_spec.get("deit_b16_distilled")).replace(num_classes=0),
    PLAIN.replace(attention={"qkv_bias": "none"}, norms=LUCIDRAINS),
    PLAIN.replace(
        tokens={"class_token": False},
        positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
        attention={"qkv_bias": "none", "proj_bias": False},
        norms=LUCIDRAINS,
        head={"pool": "mean"},
    ),
)
STRUCTURES = SMALL + MORE + tuple(config.replace(image_size=(2 * config.patch_size[0],) * 2) for config in SMALL + MORE)
NAMES = [f"{name}:{variant}" if variant else name for name in formats() for variant in get(name).tables]


def held(name: str, config: ViTConfig) -> bool:
    """Whether a format can hold a config."""
    try:
        get(name).layouts(config)
    except InputError:
        return False
    return True


@cache
def configs(name: str) -> tuple[ViTConfig, ...]:
    """The structures among the named models that a format can hold, in one small size."""
    return tuple(config for config in STRUCTURES if held(name, config))


@cache
def drawn(config: ViTConfig) -> dict[str, np.ndarray]:
    """Random bits for every key of the torch format, NaN and infinities among them."""
    rng = np.random.default_rng(0)
    return {
        key: rng.integers(0, 256, (*layout.shape(config.sizes), 4), np.uint8).view(np.float32)[..., 0]
        for layout in get("torch").layouts(config).values()
        for key in layout.keys(config.sizes)
    }


@cache
def kept(name: str, config: ViTConfig) -> Checkpoint:
    """The drawn weights in a format."""
    return Checkpoint(config, name, dict(translate(Checkpoint(config, "torch", drawn(config)), name)))


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_format_holds_one_of_the_named_models(name):
    assert configs(name)


@pytest.mark.parametrize("source", NAMES)
def test_a_format_becomes_every_other_and_comes_back_bit_by_bit(source):
    met = 0
    for target in NAMES:
        shared = [config for config in configs(source) if config in configs(target)]
        for config in shared[:2]:
            there = Checkpoint(config, target, dict(translate(kept(source, config), target)))
            assert same_bits(dict(translate(there, source)), kept(source, config).arrays), (target, config)
            met += 1
    assert met >= len([name for name in NAMES if held(name, configs(source)[0])])


@pytest.mark.parametrize("target", NAMES)
def test_what_a_format_cannot_hold_is_told_before_anything_is_written(target):
    refused = [config for config in STRUCTURES if not held(target, config)]
    for config in refused:
        with pytest.raises(InputError, match=r"cannot hold .+:|has no place for .+:|spells") as error:
            translate(Checkpoint(config, "torch", drawn(config)), target)
        assert "\n" not in str(error.value)
