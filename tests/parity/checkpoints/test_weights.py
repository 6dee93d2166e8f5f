"""Checkpoints in memory: bitwise conversion between the twins, and refusal of weights that do not match their config."""

from dataclasses import replace
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

import parity
import parity.checkpoints.formats
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint, flatten, validate
from vit_spec import InputError, ViTConfig

TINY = ViTConfig(image_size=(4, 6), patch_size=2, width=8, depth=2, num_heads=2, mlp_dim=6, num_classes=3)
CONFIGS = {
    "plain": TINY,
    "every token, norm and head": TINY.replace(
        tokens={"distillation": True, "registers": 3},
        norms={"before_blocks": True, "after_pool": True, "layer_scale": 0.1},
        attention={"qk_norm": True, "qkv_bias": "qv", "head_dim": 3},
        head={"hidden": 5},
    ),
    "gated, pooled by attention": TINY.replace(mlp={"activation": "swiglu"}, head={"pool": "attention"}),
    "minimal": TINY.replace(
        num_classes=0,
        tokens={"class_token": False, "patch_bias": False},
        positions={"kind": "none"},
        attention={"qkv_bias": "none", "proj": False},
        norms={"shared_norm": True, "after_blocks": False},
        head={"pool": "mean"},
    ),
}
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def random_arrays(format, config, dtype="float32", seed=0):
    """Return arrays of random bits, with NaNs and infinities, for every key of a format."""
    rng, dtype = np.random.default_rng(seed), np.dtype(DTYPES[dtype])
    return {
        key: rng.integers(0, 256, (*layout.shape(config.sizes), dtype.itemsize), np.uint8).view(dtype)[..., 0]
        for layout in get(format).layouts(config).values()
        for key in layout.keys(config.sizes)
    }


def tensors(arrays):
    """Return the same bits as torch tensors."""
    torch = pytest.importorskip("torch")
    return {
        key: torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name)) for key, array in arrays.items()
    }


def same_bits(a, b):
    """Return whether two dictionaries of arrays or tensors have the same keys, shapes, dtypes and bits."""
    return a.keys() == b.keys() and all(
        str(a[key].dtype) == str(b[key].dtype) and a[key].shape == b[key].shape and raw_bytes(a[key]) == raw_bytes(b[key])
        for key in a
    )


def raw_bytes(array):
    """Return the bytes of an array or a tensor."""
    if not hasattr(array, "detach"):
        return array.tobytes()
    torch = pytest.importorskip("torch")
    return array.contiguous().view(torch.uint8).numpy().tobytes()


# Bit for bit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_torch_to_jax_and_back_is_bitwise(config):
    for name, dtype in DTYPES.items():
        state_dict = tensors(random_arrays("torch", config, name))
        params = parity.to_jax(state_dict, config)
        assert {array.dtype for array in flatten(params, get("jax")).values()} == {np.dtype(dtype)}
        assert same_bits(parity.to_torch(params, config), state_dict), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_jax_to_torch_and_back_is_bitwise(config):
    pytest.importorskip("torch")
    for name in DTYPES:
        params = random_arrays("jax", config, name)
        back = parity.to_jax(parity.to_torch(params, config), config)
        assert same_bits(flatten(back, get("jax")), params), name


def test_kernels_have_the_expected_positions_and_orientations():
    state_dict = random_arrays("torch", TINY)
    blocks = parity.to_jax(state_dict, TINY)["blocks"]
    for i in range(TINY.depth):
        weight = state_dict[f"blocks.{i}.attn.qkv.weight"]
        for j, part in enumerate(np.split(weight, 3)):  # timm: queries, then keys, then values
            np.testing.assert_array_equal(blocks["attn"]["qkv"]["kernel"][i, :, j].reshape(8, 8), part.T)
            np.testing.assert_array_equal(blocks["attn"]["qkv"]["kernel"][i, :, j, 1], part[4:].T)  # the second head
        proj = state_dict[f"blocks.{i}.attn.proj.weight"]
        np.testing.assert_array_equal(blocks["attn"]["proj"]["kernel"][i, 1], proj.T[4:])
        np.testing.assert_array_equal(blocks["mlp"]["fc2"]["kernel"][i], state_dict[f"blocks.{i}.mlp.fc2.weight"].T)


def test_the_first_half_of_a_gated_mlp_stays_the_first():
    config = CONFIGS["gated, pooled by attention"]
    state_dict = random_arrays("torch", config)
    kernel = parity.to_jax(state_dict, config)["blocks"]["mlp"]["fc1"]["kernel"]
    np.testing.assert_array_equal(kernel[1, :, 0], state_dict["blocks.1.mlp.fc1.weight"][:6].T)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_torch_format_has_the_keys_and_shapes_of_vit_torch(config):
    torch, vit_torch = pytest.importorskip("torch"), pytest.importorskip("vit_torch")
    with torch.device("meta"):
        live = vit_torch.ViT(config).state_dict()
    assert {key: tuple(value.shape) for key, value in live.items()} == shapes("torch", config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_jax_format_has_the_keys_and_shapes_of_vit_jax(config):
    jax, vit_jax = pytest.importorskip("jax"), pytest.importorskip("vit_jax")
    live = flatten(jax.eval_shape(lambda: vit_jax.init(config)), get("jax"))
    assert {key: value.shape for key, value in live.items()} == shapes("jax", config)


def shapes(format, config):
    """Return the shape of each array of a config in a format."""
    return {key: array.shape for key, array in random_arrays(format, config).items()}


# Accepted weights -----------------------------------------------------------------------------------------------------


def test_jax_arrays_in_a_frozen_dict_are_accepted():
    jnp, flax = pytest.importorskip("jax.numpy"), pytest.importorskip("flax")
    arrays = random_arrays("torch", TINY, "bfloat16")
    params = parity.to_jax(arrays, TINY)
    frozen = flax.core.freeze({name: map_arrays(jnp.asarray, part) for name, part in params.items()})
    assert same_bits(parity.to_torch(frozen, TINY), tensors(arrays))


def map_arrays(function, tree):
    """Return nested dictionaries with a function applied to each array."""
    return {k: map_arrays(function, v) for k, v in tree.items()} if isinstance(tree, dict) else function(tree)


def test_strided_tensors_that_require_gradients_are_accepted():
    pytest.importorskip("torch")
    arrays = random_arrays("torch", TINY, "bfloat16")
    strided = {
        key: tensor.T.contiguous().T.requires_grad_() if tensor.ndim == 2 else tensor
        for key, tensor in tensors(arrays).items()
    }
    params = parity.to_jax(strided, TINY)
    assert same_bits(parity.to_torch(params, TINY), tensors(arrays))


def test_tensors_that_are_stored_negated_are_accepted():
    torch = pytest.importorskip("torch")
    weights = tensors(random_arrays("torch", TINY))
    values = torch.arange(TINY.width, dtype=torch.float32)
    weights["norm.bias"] = torch.complex(values, -values).conj().imag
    assert parity.to_torch(parity.to_jax(weights, TINY), TINY)["norm.bias"].tolist() == values.tolist()


def test_a_checkpoint_in_either_format_is_accepted():
    params, state_dict = random_arrays("jax", TINY), random_arrays("torch", TINY)
    assert same_bits(flatten(parity.to_jax(Checkpoint(TINY, "jax", params)), get("jax")), params)
    assert same_bits(
        flatten(parity.to_jax(Checkpoint(TINY, "torch", state_dict)), get("jax")),
        flatten(parity.to_jax(state_dict, TINY), get("jax")),
    )


def test_arrays_of_the_caller_are_neither_shared_nor_changed():
    arrays = random_arrays("jax", TINY)
    before = {key: array.copy() for key, array in arrays.items()}
    given = MappingProxyType(arrays)  # a mapping that cannot be written to
    same = parity.to_jax(Checkpoint(TINY, "jax", given))
    other = parity.to_torch(given, TINY)
    for leaf in flatten(same, get("jax")).values():
        assert leaf.flags.writeable
        leaf[...] = 0
    for tensor in other.values():
        tensor.zero_()
    assert same_bits(arrays, before)


def test_parameters_may_differ_in_dtype():
    arrays = random_arrays("torch", TINY, "bfloat16") | {"head.bias": np.ones(3, np.float64)}
    params = parity.to_jax(arrays, TINY)
    assert params["head"]["bias"].dtype == np.float64 and params["head"]["kernel"].dtype == ml_dtypes.bfloat16


# Refused weights ------------------------------------------------------------------------------------------------------


def refusal(arrays, config=TINY, format="torch"):
    """Validate a checkpoint, which must fail with an InputError, and return the message."""
    with pytest.raises(InputError) as error:
        validate(Checkpoint(config, format, arrays))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_one_error_lists_every_key_that_is_wrong():
    arrays = random_arrays("torch", TINY)
    del arrays["cls_token"], arrays["blocks.1.norm1.bias"]
    arrays["head.weight"] = np.ones((8, 3), np.float32)
    arrays["norm.bias"] = np.ones(8, np.int64)
    arrays["blocks.2.norm1.bias"] = arrays["head_dist.bias"] = np.ones(3)
    arrays["pos_embed"] = [1.0, 2.0]
    message = refusal(arrays)
    for part in (
        "2 missing: cls_token | 1 1 width (1, 1, 8); blocks.1.norm1.bias | width (8,)",
        "2 unexpected: 'blocks.2.norm1.bias' (3,); 'head_dist.bias' (3,)",
        "1 misshapen: head.weight (8, 3), expected label feature (3, 8)",
        "norm.bias is int64, expected one of float16, bfloat16, float32, float64",
        "pos_embed is a list without values",
        "format 'torch'",
        "Give the config",
    ):
        assert part in message


def test_every_unexpected_key_of_a_deeper_model_is_listed():
    deeper = TINY.replace(depth=3)
    message = refusal(random_arrays("torch", deeper))
    assert all(repr(key) in message for key in random_arrays("torch", deeper) if key.startswith("blocks.2."))


def test_a_config_of_absurd_depth_is_refused_without_listing_its_keys():
    message = refusal(random_arrays("torch", TINY), TINY.replace(depth=10**12))
    assert "they are 32 arrays, but a model of depth=1000000000000 has 12,000,000,000,008" in message


def test_a_matrix_that_was_flattened_is_misshapen():
    arrays = random_arrays("torch", TINY)
    arrays["blocks.0.attn.proj.weight"] = arrays["blocks.0.attn.proj.weight"].ravel()
    assert "blocks.0.attn.proj.weight (64,), expected width (head dim) (8, 8)" in refusal(arrays)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", ">f4"])
def test_other_dtypes_than_the_four_floating_point_ones_are_refused(dtype):
    arrays = random_arrays("torch", TINY)
    arrays["norm.weight"] = np.ones(8, dtype)
    assert f"norm.weight is {np.dtype(dtype)}, expected one of float16" in refusal(arrays)


def test_blocks_that_differ_in_dtype_cannot_be_stacked():
    arrays = random_arrays("torch", TINY)
    arrays["blocks.1.norm1.bias"] = arrays["blocks.1.norm1.bias"].astype(np.float64)
    assert "blocks.{block}.norm1.bias is float32 and float64, expected one of them" in refusal(arrays)


def test_tensors_without_values_are_refused():
    torch = pytest.importorskip("torch")
    arrays = tensors(random_arrays("torch", TINY)) | {"norm.bias": torch.empty(8, device="meta")}
    assert "norm.bias is a Tensor without values" in refusal(arrays)


def test_shapes_without_values_are_refused():
    jax = pytest.importorskip("jax")
    arrays = random_arrays("jax", TINY) | {"norm/bias": jax.ShapeDtypeStruct((8,), np.float32)}
    assert "norm/bias is a ShapeDtypeStruct without values" in refusal(arrays, format="jax")


def test_ignored_keys_must_match_their_pattern_exactly(monkeypatch):
    torch = get("torch")
    toy = replace(torch, name="toy", ignored_keys={r"blocks\.[01]\.attn\.mask": "a constant"})
    monkeypatch.setitem(parity.checkpoints.formats._FORMATS, "toy", toy)
    arrays = random_arrays("torch", TINY) | {"blocks.1.attn.mask": np.ones(3)}
    assert validate(Checkpoint(TINY, "toy", arrays))
    assert "1 unexpected: 'blocks.2.attn.mask'" in refusal(arrays | {"blocks.2.attn.mask": np.ones(3)}, format="toy")
    assert "1 unexpected: 'blocks.1.attn.mask'" in refusal(arrays)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([1, 2], "weights are a list: give a mapping"),
        ({0: np.ones(3)}, "the key 0: keys must be strings"),
        ({"a": {"b": np.ones(3)}, "a.b": np.ones(3)}, "weights have a.b twice"),
    ],
)
def test_weights_that_are_not_a_mapping_with_distinct_string_keys_are_refused(weights, what):
    with pytest.raises(InputError, match=what):
        parity.to_jax(weights, TINY)


def test_weights_without_a_config_are_refused():
    with pytest.raises(InputError, match="give its config as the second argument"):
        parity.to_jax(random_arrays("torch", TINY))


def test_a_checkpoint_with_a_second_config_is_refused():
    with pytest.raises(InputError, match="has its own config"):
        parity.to_jax(Checkpoint(TINY, "torch", random_arrays("torch", TINY)), TINY)
