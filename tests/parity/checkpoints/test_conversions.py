"""Every format converts to every other bit for bit, and refuses a config that it cannot store."""

import re
from functools import cache
from itertools import islice

import numpy as np
import pytest

import vit_spec
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import formats, get
from parity.checkpoints.weights import Checkpoint
from tests.twins import small_config, small_models
from vit_spec import InputError, ViTConfig

SMALL = tuple(small_models().values())
DINOV2 = small_config(vit_spec.get("dinov2_b14_reg4", positions={"covers": "class"}))
PLAIN = small_config(vit_spec.get("vit_b16"))
NORM_AFTER_POOL_ONLY = {"after_blocks": False, "after_pool": True}
UNNAMED = (  # published models that have no name in vit_spec
    PLAIN.replace(mlp={"activation": "gelu_tanh"}),
    small_config(vit_spec.get("dinov3_s16", mlp={"activation": "gelu_tanh"})),
    DINOV2,
    DINOV2.replace(mlp={"activation": "swiglu"}),
    DINOV2.replace(num_classes=5, head={"pool": "token_mean"}),
    DINOV2.replace(num_classes=5, head={"pool": "token_mean"}, mlp={"activation": "swiglu"}),
    small_config(vit_spec.get("deit_b16_distilled")).replace(num_classes=0),
    small_config(vit_spec.get("beit_b16")).replace(num_classes=0),
    PLAIN.replace(attention={"qkv_bias": "none"}, norms=NORM_AFTER_POOL_ONLY),
    PLAIN.replace(
        tokens={"class_token": False},
        positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
        attention={"qkv_bias": "none", "proj_bias": False},
        norms=NORM_AFTER_POOL_ONLY,
        head={"pool": "mean"},
    ),
    PLAIN.replace(  # BEiT in pre-training
        positions={"relative": "table", "relative_shared": True},
        attention={"qkv_bias": "qv"},
    ),
    PLAIN.replace(  # timm's vit_srelpos_small_patch16_224
        tokens={"class_token": False},
        positions={"kind": "none", "relative": "mlp", "relative_dim": 10, "relative_shared": True},
        attention={"qkv_bias": "none"},
        head={"pool": "mean"},
    ),
    PLAIN.replace(norms={"order": "parallel", "layer_scale": 0.1}),  # timm's vit_pwee_patch16_reg1_gap_256
    PLAIN.replace(  # timm's vit_base_patch16_xp_224
        tokens={"patch_bias": False},
        attention={"qkv_bias": "none", "qk_norm": True},
        norms={"order": "parallel", "kind": "rms", "bias": False, "before_blocks": True},
    ),
)
# On the grid of `small_config`, and on a square grid, because some formats can store no other.
STRUCTURES = (
    SMALL + UNNAMED + tuple(config.replace(image_size=(2 * config.patch_size[0],) * 2) for config in SMALL + UNNAMED)
)
NAMES = [f"{name}:{variant}" if variant else name for name in formats() for variant in get(name).tables]


def can_store(name: str, config: ViTConfig) -> bool:
    """Return whether a format can store a config."""
    try:
        get(name).layouts(config)
    except InputError:
        return False
    return True


@cache
def storable_configs(name: str) -> tuple[ViTConfig, ...]:
    """Return the structures of published models that a format can store, in one small size."""
    return tuple(config for config in STRUCTURES if can_store(name, config))


@cache
def random_arrays(config: ViTConfig) -> dict[str, np.ndarray]:
    """Return random bits, with NaN and infinities, for every key of the torch format."""
    rng = np.random.default_rng(0)
    return {
        key: rng.integers(0, 256, (*layout.shape(config.sizes), 4), np.uint8).view(np.float32)[..., 0]
        for layout in get("torch").layouts(config).values()
        for key in layout.keys(config.sizes)
    }


@cache
def random_checkpoint(name: str, config: ViTConfig) -> Checkpoint:
    """Return a checkpoint of `random_arrays` in a format."""
    return Checkpoint(config, name, dict(converted_arrays(Checkpoint(config, "torch", random_arrays(config)), name)))


def same_bits(a, b):
    """Return whether two dictionaries of arrays have the same keys, shapes, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


def test_every_format_can_store_one_of_the_published_models():
    assert not [name for name in NAMES if not storable_configs(name)]


@pytest.mark.parametrize("source", NAMES)
def test_a_format_converts_to_every_other_bit_for_bit(source):
    """The result is what the torch format converts to, so the conversion back, whose source is the other, inverts it."""
    count = 0
    for target in NAMES:
        shared = (config for config in storable_configs(source) if config in storable_configs(target))
        for config in islice(shared, 2):
            converted = dict(converted_arrays(random_checkpoint(source, config), target))
            assert same_bits(converted, random_checkpoint(target, config).arrays), (target, config)
            count += 1
    assert count >= len([name for name in NAMES if can_store(name, storable_configs(source)[0])])


def test_a_config_that_a_format_cannot_store_is_refused_before_the_conversion():
    wrong = []
    for target in NAMES:
        for config in STRUCTURES:
            if config in storable_configs(target):
                continue
            try:
                converted_arrays(Checkpoint(config, "torch", random_arrays(config)), target)
                wrong.append(f"{target}: not refused: {config}")
            except InputError as error:
                if "\n" in str(error) or not re.search(r"cannot store .+:|has no key.* for .+:|spells", str(error)):
                    wrong.append(f"{target}: {error}")
    assert not wrong, "\n".join(wrong)
