"""Parameter counts, FLOPs and memory estimates, compared with sums written out by hand."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

from vit_spec import InputError, ViTConfig, count, flops, get, memory, names, rows
from vit_spec.cost import ACTIVATION_ARRAYS, training_flops

# 6 patches of 768 values, 7 tokens, heads of 12
SMALL = ViTConfig(image_size=(32, 48), width=24, depth=2, num_heads=2, mlp_dim=40, num_classes=5)

PATCHES = 2 * 6 * 768 * 24
BLOCK = 2 * 7 * (3 * 24 * 24 + 24 * 24 + 24 * 40 + 40 * 24) + 2 * (2 * 7 * 7 * 24)
HEAD = 2 * 24 * 5


# Parameters -------------------------------------------------------------------------------------------------


def test_the_parameter_count_is_the_sum_by_hand():
    embedding = 768 * 24 + 24 + 24 + 7 * 24  # matrix, bias, class token, positions
    norms = 2 * 24
    block = 2 * norms + (24 * 72 + 72) + (24 * 24 + 24) + (24 * 40 + 40) + (40 * 24 + 24)
    assert count(SMALL) == embedding + 2 * block + norms + (24 * 5 + 5)


def test_the_parameter_count_is_a_python_integer():
    assert [name for name in names() if type(count(get(name))) is not int] == []


def test_without_a_classifier_the_count_lacks_its_parameters():
    assert count(SMALL) - count(SMALL.replace(num_classes=0)) == 24 * 5 + 5


# FLOPs ------------------------------------------------------------------------------------------------------


def test_the_flops_are_the_sum_by_hand():
    assert flops(SMALL) == PATCHES + 2 * BLOCK + HEAD


def test_the_flops_for_a_head_dim_larger_than_width_over_num_heads():
    wide = SMALL.replace(attention={"head_dim": 20})
    block = 2 * 7 * (4 * 24 * 40 + 2 * 24 * 40) + 2 * (2 * 7 * 7 * 40)
    assert flops(wide) == PATCHES + 2 * block + HEAD


def test_a_gated_mlp_has_the_flops_of_a_third_matrix():
    assert flops(SMALL.replace(mlp={"activation": "swiglu"})) - flops(SMALL) == 2 * (2 * 7 * 24 * 40)


def test_without_an_output_projection_its_flops_are_missing():
    assert flops(SMALL) - flops(SMALL.replace(attention={"proj": False})) == 2 * (2 * 7 * 24 * 24)


def test_registers_are_multiplied_in_the_blocks_but_not_in_the_patch_projection():
    tokens = 7 + 4
    block = 2 * tokens * (4 * 24 * 24 + 2 * 24 * 40) + 2 * (2 * tokens * tokens * 24)
    assert flops(SMALL.replace(tokens={"registers": 4})) == PATCHES + 2 * block + HEAD


def test_attention_pooling_reads_the_patches_and_later_layers_read_one_token():
    keys_and_values = 2 * 6 * (2 * 24 * 24) + 2 * (2 * 6 * 24)
    query_projection_and_mlp = 2 * (24 * 24 + 24 * 24 + 2 * 24 * 40)
    pooled = SMALL.replace(head={"pool": "attention"})
    assert flops(pooled) == flops(SMALL) + keys_and_values + query_projection_and_mlp


def test_a_distillation_head_has_the_flops_of_the_head():
    tokens = 8
    block = 2 * tokens * (4 * 24 * 24 + 2 * 24 * 40) + 2 * (2 * tokens * tokens * 24)
    assert flops(SMALL.replace(tokens={"distillation": True})) == PATCHES + 2 * block + 2 * HEAD


def test_a_hidden_layer_before_the_head_multiplies_one_token():
    assert flops(SMALL.replace(head={"hidden": 9})) == flops(SMALL) - HEAD + 2 * (24 * 9 + 9 * 5)


def test_the_hidden_layer_of_a_distilled_model_multiplies_two_tokens():
    distilled = SMALL.replace(tokens={"distillation": True})
    assert flops(distilled.replace(head={"hidden": 9})) == flops(distilled) - 2 * HEAD + 2 * 2 * (24 * 9 + 9 * 5)


def test_without_pooling_the_head_multiplies_every_token():
    assert flops(SMALL.replace(head={"pool": "none"})) == flops(SMALL) + 6 * HEAD


def test_elementwise_options_add_no_flops():
    changes = {"qk_norm": True, "out_norm": True, "qkv_bias": "none"}
    assert flops(SMALL.replace(attention=changes, norms={"layer_scale": 0.1, "before_blocks": True})) == flops(SMALL)


def test_the_flops_at_another_image_size_are_those_of_a_config_of_that_size():
    differing = []
    for name in (name for name in names() if get(name).positions.relative == "none"):
        config = get(name)
        size = (5 * config.patch_size[0], 3 * config.patch_size[1])
        if flops(config, size) != flops(config.replace(image_size=size)):
            differing.append(name)
    assert differing == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"head": {"pool": "attention", "pool_prefix": True}}, {"head": {"pool": "attention"}}, {"head": {"pool": "none"}}],
)
def test_patch_dropout_leaves_all_patches_to_the_embedding_and_fewer_tokens_to_later_layers(changes: Any) -> None:
    """6 patches of which 4 are kept cost as much as 4 patches, besides the embedding of the other two."""
    config = SMALL.replace(regularisation={"patch_drop": 0.3}, **changes)
    assert training_flops(config) == flops(config, (32, 32)) + 2 * 2 * 768 * 24
    assert training_flops(SMALL) == flops(SMALL) and flops(config) == flops(SMALL.replace(**changes))


def test_one_integer_means_a_square():
    assert flops(SMALL, 64) == flops(SMALL, (64, 64))


@pytest.mark.parametrize("size", [np.int64(64), (np.int32(64), 64)])
def test_an_image_size_of_numpy_gives_python_integers(size: Any) -> None:
    assert flops(SMALL, size) == flops(SMALL, 64)
    assert type(flops(SMALL, size)) is int
    assert type(memory(SMALL, size).activations) is int


@pytest.mark.parametrize("name", ["vit_ti16", "vit_s16", "vit_b16", "vit_l16", "vit_h14", "vit_g14", "vit_G14"])
def test_the_flops_follow_the_closed_form_of_a_plain_vit(name):
    """The sum is 2 N d 3 p^2 + depth (2 T (4 d^2 + 2 d m) + 4 T^2 d) + the head, for N patches and T = N + 1 tokens.

    d is the width, m the width of the MLP, and p the patch size.
    """
    c = get(name)
    patches = c.grid[0] * c.grid[1]
    tokens = patches + 1
    block = 2 * tokens * (4 * c.width**2 + 2 * c.width * c.mlp_dim) + 4 * tokens**2 * c.width
    assert flops(c) == 2 * patches * c.width * 3 * c.patch_size[0] ** 2 + c.depth * block + 2 * c.width * 1000


@pytest.mark.parametrize("cost", [flops, memory])
def test_an_image_size_that_is_not_a_multiple_of_the_patch_size_is_refused(cost):
    with pytest.raises(InputError, match="image size 33x48 is not a multiple of the patch size 16x16"):
        cost(SMALL, (33, 48))


# Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weights_take_the_bytes_of_their_dtype(dtype, width):
    assert memory(SMALL, dtype=dtype).weights == width * count(SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_training_state_has_four_float32_values_per_parameter(dtype):
    assert memory(SMALL, dtype=dtype).training_state == 16 * count(SMALL)


def activation_bytes_of_a_block(config, **options):
    """Return the bytes of activations that one more block adds."""
    deeper = config.replace(depth=config.depth + 1)
    return memory(deeper, **options).activations - memory(config, **options).activations


def test_a_plain_block_stores_32_bytes_per_token_and_channel_in_half_precision():
    """arXiv 2205.05198, section 4.1, has 34 bytes, of which 2 are dropout masks."""
    assert activation_bytes_of_a_block(get("vit_b16"), dtype="bfloat16") == 32 * 197 * 768


def test_attention_stores_its_weights_if_it_is_not_fused_or_has_relative_positions():
    relative = SMALL.replace(positions={"relative": "table"})
    assert memory(relative) == memory(relative, fused_attention=False)
    fused, unfused = (activation_bytes_of_a_block(SMALL, fused_attention=fused) for fused in (True, False))
    assert unfused - fused == 4 * 2 * 7 * 7


def test_layer_scale_stores_its_inputs():
    scaled = SMALL.replace(norms={"layer_scale": 0.1})
    assert activation_bytes_of_a_block(scaled) - activation_bytes_of_a_block(SMALL) == 4 * 2 * 7 * 24


@pytest.mark.parametrize(
    ("activation", "stored"), [("none", 1), ("relu", 1), ("gelu", 2), ("quick_gelu", 3), ("swiglu", 4)]
)
def test_an_mlp_stores_the_arrays_that_the_gradient_of_its_activation_needs(activation, stored):
    config = SMALL.replace(mlp={"activation": activation})
    assert activation_bytes_of_a_block(config) == 4 * 7 * (8 * 24 + stored * 40)


def test_outside_the_blocks_the_patches_and_the_final_norm_are_stored():
    blocks = 2 * activation_bytes_of_a_block(SMALL)
    assert memory(SMALL).activations == blocks + 4 * (6 * 768 + 2 * 7 * 24)


STORING: dict[str, dict[str, Any]] = {
    **{f"activation {kind}": {"mlp": {"activation": kind}} for kind in ACTIVATION_ARRAYS},
    "norms of queries and keys": {"attention": {"qk_norm": True}},
    "rotations": {"positions": {"rotary": "dinov3"}},
    "rotations and norms": {"positions": {"rotary": "axial"}, "attention": {"qk_norm": True}},
    "learned rotations": {"positions": {"rotary": "mixed"}},
    "learned rotations and norms": {"positions": {"rotary": "mixed"}, "attention": {"qk_norm": True}},
    "relative positions": {"positions": {"relative": "table"}},
    "relative positions and rotations": {"positions": {"relative": "table", "rotary": "eva"}},
    "norm of the heads": {"attention": {"out_norm": True}},
    "no projection": {"attention": {"proj": False}},
    "norm of the heads, no projection": {"attention": {"out_norm": True, "proj": False}},
    "relu and norm": {"mlp": {"activation": "relu", "norm": True}},
    "norm before the blocks": {"norms": {"before_blocks": True}},
    "norm of the patches": {"norms": {"after_patches": True}},
    "no final norm": {"norms": {"after_blocks": False}},
    "parallel": {"norms": {"order": "parallel", "layer_scale": 0.1}},
    "norms after": {"norms": {"order": "res_post"}},
    "mean": {"head": {"pool": "mean"}},
    "attention pooling": {"head": {"pool": "attention"}},
    "no pooling": {"head": {"pool": "none", "hidden": 48}, "norms": {"after_pool": True}},
    "no classes": {"num_classes": 0},
}


@pytest.mark.parametrize("attention", ["fused", "explicit"])
@pytest.mark.parametrize("option", STORING)
def test_the_activations_are_what_torch_stores_for_another_image(option: str, attention: str) -> None:
    """Within 2 %: statistics of norms and of the softmax, and layers of one token, are left out."""
    pytest.importorskip("torch")
    from tests.torch_costs import kept_bytes

    plain = ViTConfig(image_size=48, patch_size=6, width=96, depth=1, num_heads=2, mlp_dim=192, num_classes=5)
    config = plain.replace(**STORING[option])
    two, three = (kept_bytes(config, "float32", "none", images, attention) for images in (2, 3))
    assert memory(config, fused_attention=attention == "fused").activations == pytest.approx(three - two, rel=0.02)


def test_activations_at_another_image_size_are_those_of_a_config_of_that_size():
    assert memory(SMALL, 64).activations == memory(SMALL.replace(image_size=64)).activations


def test_the_error_for_an_unknown_dtype_suggests_a_similar_one():
    with pytest.raises(InputError, match="dtype is 'bf16': give one of float64, float32, bfloat16, float16; did you mean"):
        memory(SMALL, dtype="bf16")


# 22 billion parameters --------------------------------------------------------------------------------------


def test_the_cost_of_22b_is_computed_without_allocating_its_arrays():
    config = get("vit_22b14")
    tracemalloc.start()
    count(config), flops(config), memory(config), rows(config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # bytes; its smallest matrix has 3,612,672 entries


def test_the_cost_of_22b_is_computed_in_exact_integers():
    config = get("vit_22b14")
    assert count(config) == sum(row.size for row in rows(config).values()) == 22_209_743_848
    assert memory(config).training_state == 16 * 22_209_743_848
    assert all(type(value) is int for value in dataclasses.astuple(memory(config)))
