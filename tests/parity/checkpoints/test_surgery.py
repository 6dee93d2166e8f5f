"""Surgery preserves the outputs where its documentation says so, up to rounding errors.

It neither reads nor changes other parameters than it has to.
"""

from dataclasses import replace
from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest

import parity
import vit_spec
from parity.checkpoints import conversion, formats, surgery
from parity.checkpoints.arrays import FLOAT_DTYPES, find_overflow, round_to
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.containers.container import File
from parity.checkpoints.conversion import converted_arrays, parameter
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint, flatten, validate
from tests.peers.proof import jax_logits, relrms, torch_logits
from tests.twins import perturbed_params, random_images
from vit_spec import InputError, ViTConfig, resample, rows
from vit_spec.initialisation import TRUNCATED_STD
from vit_spec.tables import position_table

TINY = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=2, num_heads=2, mlp_dim=24, num_classes=5)
REGISTERS = TINY.replace(tokens={"registers": 2})
FIXED_TABLE = {"positions": {"kind": "fixed", "table": "sincos_2d_mae"}}
DISTILLED = TINY.replace(tokens={"distillation": True})
TOLERANCE = 1e-12  # for the same function in float64; see docs/reference/tolerances.md
TWINS = {"torch": torch_logits, "jax": jax_logits}


@cache
def float64_weights(config):
    """Return a checkpoint of perturbed weights in float64, in the jax format."""
    pytest.importorskip("torch")
    arrays = flatten(perturbed_params(config), get("jax"))
    return Checkpoint(config, "jax", {key: array.astype(np.float64) for key, array in arrays.items()})


def weights(config=TINY, format="torch", dtype=np.float64):
    """Return a checkpoint of perturbed weights."""
    arrays = dict(converted_arrays(float64_weights(config), format))
    return Checkpoint(config, format, {key: array.astype(dtype) for key, array in arrays.items()})


def images(config, size=None):
    """Return images, (2, C, H, W), in float64."""
    return random_images(config, size).astype(np.float64).transpose(0, 3, 1, 2)


def same_function(before, after, images_before, images_after=None, twin=torch_logits):
    """Return whether two checkpoints give the same logits up to rounding errors, by default for the same images."""
    images_after = images_before if images_after is None else images_after
    return relrms(twin(after, images_after), twin(before, images_before)) <= TOLERANCE


def unchanged_parameters(before, after):
    """Return the names of the parameters that are equal in both checkpoints."""
    names = [name for name in rows(before.config) if name in rows(after.config)]
    return {name for name in names if np.array_equal(parameter(before, name), parameter(after, name))}


# Resolution -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", TWINS)
def test_a_resized_model_equals_the_model_run_at_that_size(twin):
    before = weights()
    after, _ = surgery.resize(before, image_size=(20, 16))
    assert after.config.image_size == (20, 16)
    assert same_function(before, after, images(TINY, (20, 16)), twin=TWINS[twin])


@pytest.mark.parametrize("mode", surgery.MODES)
def test_every_mode_equals_resampling_in_the_twin(mode):
    config = TINY.replace(resampling=surgery.MODES[mode])
    after, _ = surgery.resize(weights(), (12, 20), resampling=mode)
    assert after.config.resampling == config.resampling
    assert same_function(weights(config), after, images(TINY, (12, 20)))


@pytest.mark.parametrize(
    ("mode", "model"),
    [("timm", "vit_s16"), ("deit", "deit_s16"), ("mae", "mae_b16"), ("dino", "dino_s16"), ("dinov2", "dinov2_s14")],
)
def test_modes_equal_the_resampling_of_the_named_models(mode, model):
    assert surgery.MODES[mode] == vit_spec.get(model).resampling


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": {"registers": 2}},
        {"tokens": {"registers": 2}, "positions": {"covers": "class"}},
        {"tokens": {"distillation": True}},
        {"positions": {"covers": "none"}},
        {"positions": {"kind": "fixed", "table": "sincos_2d_mae"}},
        {"positions": {"kind": "none", "rotary": "axial"}},
        {"tokens": {"pad": True}},
    ],
    ids=str,
)
def test_a_resized_model_is_the_same_function_for_all_tokens_and_positions(change):
    config = TINY.replace(**change)
    before, size = weights(config), (18, 15) if config.tokens.pad else (16, 20)
    after, _ = surgery.resize(before, size)
    assert same_function(before, after, images(config, size))


def test_rows_of_prefix_tokens_do_not_change():
    before = weights(REGISTERS, dtype=ml_dtypes.bfloat16)
    after, _ = surgery.resize(before, (16, 20))
    covered = REGISTERS.num_covered
    assert covered == 3
    assert parameter(before, "pos_embed")[:covered].tobytes() == parameter(after, "pos_embed")[:covered].tobytes()


def test_an_unchanged_grid_keeps_its_table_even_with_an_offset():
    before = weights(TINY.replace(resampling=surgery.MODES["dino"]))
    after, _ = surgery.resize(before, (16, 24), patch_size=8)
    assert after.config.grid == TINY.grid
    assert unchanged_parameters(before, after) == set(rows(TINY)) - {"patch_embed.proj.weight"}


def test_two_new_sizes_resample_positions_once():
    before = weights()
    once, _ = surgery.resize(before, (24, 32), patch_size=8)
    plain, _ = surgery.resize(before, (12, 16))
    np.testing.assert_array_equal(parameter(once, "pos_embed"), parameter(plain, "pos_embed"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_positions_are_computed_in_float64_and_rounded_once(dtype):
    narrow = weights(dtype=dtype)
    exact = replace(narrow, arrays={key: array.astype(np.float64) for key, array in narrow.arrays.items()})
    found, exact = (parameter(surgery.resize(before, (20, 16))[0], "pos_embed") for before in (narrow, exact))
    assert found.dtype == dtype
    away = np.abs(found.astype(np.float64) - exact)
    for neighbour in (np.nextafter(found, dtype(np.inf)), np.nextafter(found, dtype(-np.inf))):
        assert (away <= np.abs(neighbour.astype(np.float64) - exact)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("off", [2**-40, -(2**-40)])
def test_bfloat16_is_not_rounded_twice(sign, off):
    tie = 1 + 2**-8  # halfway between 1 and the next number of bfloat16; float32 cannot represent tie + off
    expected = sign * (1 + 2**-7 if off > 0 else 1)
    assert round_to(np.array([sign * (tie + off)]), np.dtype(ml_dtypes.bfloat16)) == expected


def test_ties_infinities_and_nan_are_rounded_correctly():
    smallest = 2.0**-133
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, 0, 3.3 * smallest, 0.5 * smallest, np.nan])
    found = round_to(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    np.testing.assert_array_equal(found, [1, 1 + 2**-6, np.inf, -np.inf, 0, 3 * smallest, 0, np.nan])


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, 65_519.0, np.inf, np.nan], np.float16, None),
        ([1.0, np.inf, -65_520.0], np.float16, -65_520.0),
        ([3e38, 3.4e38], ml_dtypes.bfloat16, 3.4e38),
        ([np.inf, 1e39], np.float32, 1e39),
    ],
    ids=str,
)
def test_a_finite_number_that_rounds_to_an_infinity_is_found(values, dtype, expected):
    values = np.array(values)
    assert find_overflow(values, round_to(values, np.dtype(dtype))) == expected


def test_the_report_of_resizing_names_sizes_grids_and_resampling():
    _, line = surgery.resize(weights(), (16, 20))
    assert line == "image_size 8x12 -> 16x20; pos_embed 2x3 -> 4x5, bicubic antialias"


def test_new_resampling_alone_changes_only_the_config():
    before = weights()
    after, line = surgery.resize(before, resampling="dino")
    assert unchanged_parameters(before, after) == set(rows(TINY))
    assert line == "resampling bicubic antialias -> bicubic offset 0.1"


def test_resizing_to_the_same_size_changes_nothing():
    after, line = surgery.resize(weights(), TINY.image_size)
    assert after.config == TINY and line == "image_size: as before"


def test_given_resampling_is_no_longer_assumed():
    guesses = [("resampling.kernel", "bicubic"), ("resampling.antialias", True), ("norms.eps", 1e-6)]
    before = replace(weights(), assumed=tuple(Assumption(*guess, "nothing tells") for guess in guesses))
    after, _ = surgery.resize(before, (16, 20), resampling="timm")
    assert [each.field for each in after.assumed] == ["norms.eps"]


def test_a_field_whose_name_begins_with_that_of_a_given_field_is_still_assumed():
    guesses = [("image_size_note", "text"), ("image_size", (8, 12))]
    before = replace(weights(), assumed=tuple(Assumption(*guess, "nothing tells") for guess in guesses))
    after, _ = surgery.resize(before, (16, 20))
    assert [each.field for each in after.assumed] == ["image_size_note"]


@pytest.mark.parametrize("square", [False, True])
def test_factorized_positions_are_resized_as_the_model_resizes_them(square):
    rule = {"kernel": "bilinear", "antialias": False, "square": square}
    config = TINY.replace(positions={"covers": "none", "factorized": True}, resampling=rule)
    before, size = weights(config), (20, 8)
    after, line = surgery.resize(before, size)
    assert parameter(after, "pos_embed_y").shape == (5, config.width)
    larger = images(config.replace(image_size=size))
    assert same_function(before, after, larger, larger)
    assert line.endswith(f"pos_embed 2x3 -> 5x2, bilinear{' square' * square}")


# Patches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "mode", "rule"),
    [
        ("timm", None, "timm"),
        ("hf", None, "timm"),
        ("flexivit", None, "flexivit"),
        ("timm", "flexivit", "flexivit"),
        ("flexivit", "hf", "hf"),
    ],
)
def test_an_enlarged_projection_of_enlarged_patches_is_the_same_function(stated, mode, rule):
    before, size = weights(TINY.replace(resampling=surgery.MODES[stated])), (7, 5)
    (rows_, columns), (height, width) = TINY.grid, size
    after, _ = surgery.resize(before, (rows_ * height, columns * width), patch_size=size, resampling=mode)
    kernel, antialias = surgery.MODES[rule].kernel, surgery.MODES[rule].antialias
    of_rows, of_columns = (
        resample.matrix(4, new, kernel=kernel, antialias=antialias, align_corners=False, offset=0) for new in size
    )
    patches = images(TINY).reshape(2, 3, rows_, 4, columns, 4)
    enlarged = np.einsum("yh,xw,bcrhsw->bcrysx", of_rows, of_columns, patches).reshape(2, 3, *after.config.image_size)
    assert same_function(before, after, images(TINY), enlarged)


def test_a_new_patch_size_keeps_the_image_size_and_changes_the_grid():
    after, line = surgery.resize(weights(), patch_size=2)
    assert (after.config.image_size, after.config.grid) == ((8, 12), (4, 6))
    assert line == (
        "patch_size 4x4 -> 2x2; patch_embed.proj.weight by the pseudo-inverse of bicubic antialias; "
        "pos_embed 2x3 -> 4x6, bicubic antialias"
    )


@pytest.mark.parametrize("size", [(3, 5), (8, 2), (16, 16)])
def test_the_projection_is_multiplied_by_the_pseudo_inverse(size):
    before = weights()
    after, _ = surgery.resize(before, (48, 240), patch_size=size)
    rule = partial(resample.matrix, kernel="bicubic", antialias=True, align_corners=False, offset=0)
    whole = np.linalg.pinv(np.kron(rule(4, size[0]), rule(4, size[1])))  # of a flattened patch
    expected = parameter(before, "patch_embed.proj.weight").reshape(16, 3, 16) @ whole
    np.testing.assert_allclose(
        parameter(after, "patch_embed.proj.weight").reshape(expected.shape), expected, rtol=0, atol=1e-13
    )


# Channels -------------------------------------------------------------------------------------------------------------


def test_a_grey_image_has_the_output_of_its_copies():
    before, grey = weights(), images(TINY)[:, :1]
    after, line = surgery.adapt_channels(before, 1)
    assert same_function(before, after, grey.repeat(3, axis=1), grey)
    assert line == "in_channels 3 -> 1; patch_embed.proj.weight summed"


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 6), (2, 4)])
def test_a_repeated_image_has_the_output_of_the_image(old, new):
    config = TINY.replace(in_channels=old)
    before, given = weights(config), images(config)
    after, _ = surgery.adapt_channels(before, new)
    assert same_function(before, after, given, np.tile(given, (1, new // old, 1, 1)))


def test_five_channels_are_three_repeated_and_scaled():
    before = weights()
    after, line = surgery.adapt_channels(before, 5)
    old, new = (parameter(checkpoint, "patch_embed.proj.weight") for checkpoint in (before, after))
    np.testing.assert_array_equal(new, old[:, [0, 1, 2, 0, 1]] * (3 / 5))
    assert "repeated, times 3/5" in line


PIXELS = {"mean": (0.25, 0.5, 0.75), "std": (0.5, 0.25, 0.75)}


@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [(1, (0.5,), (0.5,)), (2, (0.25, 0.5), (0.5, 0.25)), (5, (0.25, 0.5, 0.75, 0.25, 0.5), (0.5, 0.25, 0.75, 0.5, 0.25))],
)
def test_pixel_statistics_follow_the_channels(channels, mean, std):
    after, line = surgery.adapt_channels(weights(TINY.replace(pixels=PIXELS)), channels)
    assert (after.config.pixels.mean, after.config.pixels.std) == (mean, std)
    assert f"pixels.mean (0.25, 0.5, 0.75) -> {mean}" in line


def test_assumed_pixel_statistics_have_their_new_values():
    before = replace(weights(TINY.replace(pixels=PIXELS)), assumed=(Assumption("pixels.mean", PIXELS["mean"], "a guess"),))
    after, _ = surgery.adapt_channels(before, 1)
    assert after.assumed == (Assumption("pixels.mean", (0.5,), "a guess"),)


def test_the_same_number_of_channels_changes_nothing():
    before = weights()
    assert surgery.adapt_channels(before, 3) == (before, "in_channels 3: as before")


# Heads ----------------------------------------------------------------------------------------------------------------


def test_a_model_without_head_outputs_the_input_of_the_head():
    config = TINY.replace(head={"hidden": 6})
    before = weights(config)
    after, line = surgery.drop_head(before)
    weight, bias = parameter(before, "head.weight"), parameter(before, "head.bias")
    features = torch_logits(after, images(config))
    assert features.shape == (2, 6)
    assert relrms(features @ weight.T + bias, torch_logits(before, images(config))) <= TOLERANCE
    assert line == "num_classes 5 -> 0; pre_logits stays"


def test_both_heads_of_a_distilled_model_are_removed_and_added():
    bare, _ = surgery.drop_head(weights(DISTILLED))
    assert not [name for name in rows(bare.config) if name.startswith("head")]
    after, line = surgery.new_head(bare, 7)
    assert validate(after) and parameter(after, "head_dist.weight").shape == (7, 16)
    assert not np.array_equal(parameter(after, "head.weight"), parameter(after, "head_dist.weight"))
    assert line == (
        "num_classes 0 -> 7; new: head.weight, head.bias, head_dist.weight, head_dist.bias, trunc_normal(0.02), seed 0"
    )


def test_a_new_head_is_determined_by_its_seed():
    a, b, c = (parameter(surgery.new_head(weights(), 9, seed=seed)[0], "head.weight") for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize(
    ("law", "mean", "std", "largest"),
    [
        ("trunc_normal(0.02)", 0, 0.02, 2 * 0.02 / TRUNCATED_STD),  # truncated at two standard deviations of the parent
        ("normal(0.1)", 0, 0.1, 0.6),
        ("uniform(-1, 3)", 1, 4 / 12**0.5, 3),
        ("constant(0.25)", 0.25, 0, 0.25),
        ("zeros", 0, 0, 0),
    ],
)
def test_a_new_head_follows_its_initialisation_law(law, mean, std, largest):
    after, _ = surgery.new_head(weights(), 4000, init=law)
    values, error = parameter(after, "head.weight"), 6 * std / 64_000**0.5
    assert after.config.head.init == law
    assert abs(values.mean() - mean) <= error and abs(values.std() - std) <= error and abs(values).max() <= largest
    assert not parameter(after, "head.bias").any()


@pytest.mark.parametrize("classes", [0, 5])
def test_a_new_head_has_the_dtype_of_the_weights_and_changes_nothing_else(classes):
    before = weights(TINY.replace(num_classes=classes), dtype=ml_dtypes.bfloat16)
    after, _ = surgery.new_head(before, 3)
    assert set(validate(after).values()) == {np.dtype(ml_dtypes.bfloat16)}
    assert unchanged_parameters(before, after) >= {name for name in rows(before.config) if not name.startswith("head")}


# Position table rows of prefix tokens ---------------------------------------------------------------------------------

# Name of a case -> config with rows for prefix tokens in its position table, and the tokens that have such rows.
FOLDED = {
    "all": (TINY, {"cls_token"}),
    "class of registers": (REGISTERS.replace(positions={"covers": "class"}), {"cls_token"}),
    "registers": (REGISTERS, {"cls_token", "reg_token"}),
    "distilled": (DISTILLED, {"cls_token", "dist_token"}),
    "registers alone": (
        REGISTERS.replace(tokens={"class_token": False}, head={"pool": "mean"}),
        {"reg_token"},
    ),
}


@pytest.mark.parametrize("table", ["sincos_1d", "sincos_2d_mae"])
@pytest.mark.parametrize("covers", ["all", "none"])
@pytest.mark.parametrize("twin", TWINS)
def test_a_fixed_table_written_as_a_learned_one_keeps_the_function(table, covers, twin):
    config = TINY.replace(positions={"kind": "fixed", "table": table, "covers": covers})
    before = weights(config)
    after, line = surgery.learn_positions(before)
    assert after.config == config.replace(positions={"kind": "learned"})
    assert unchanged_parameters(before, after) == set(rows(config))
    assert same_function(before, after, images(config), twin=TWINS[twin]) and "rounded to float64, by at most 0" in line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fixed_table_is_rounded_to_the_dtype_of_the_weights(dtype):
    before = weights(TINY.replace(**FIXED_TABLE), dtype=FLOAT_DTYPES[dtype])
    after, line = surgery.learn_positions(before)
    [exact] = position_table(before.config, before.config.grid)
    found = parameter(after, "pos_embed")
    assert found.dtype == FLOAT_DTYPES[dtype] and np.array_equal(found, exact.astype(FLOAT_DTYPES[dtype]))
    assert line.endswith(f"rounded to {dtype}, by at most {np.abs(found.astype(np.float64) - exact).max():.2g}")


@pytest.mark.parametrize(("config", "tokens"), FOLDED.values(), ids=FOLDED)
def test_folding_positions_keeps_the_function(config, tokens):
    before = weights(config)
    after, line = surgery.fold_class_position(before)
    assert after.config.positions.covers == "none"
    assert unchanged_parameters(before, after) == set(rows(config)) - tokens - {"pos_embed"}
    assert same_function(before, after, images(config)) and ", ".join(sorted(tokens)) in line


@pytest.mark.parametrize("config", [config for config, _ in FOLDED.values()], ids=FOLDED)
def test_unfolding_positions_keeps_the_function(config):
    folded, _ = surgery.fold_class_position(weights(config))
    after, _ = surgery.unfold_class_position(folded, config.positions.covers)
    assert after.config == config
    assert unchanged_parameters(folded, after) == set(rows(config)) - {"pos_embed"}
    assert same_function(folded, after, images(config))


@pytest.mark.parametrize(("config", "covers"), [(TINY, "all"), (REGISTERS, "class"), (DISTILLED, "all")])
def test_unfolding_gives_registers_no_rows_by_default(config, covers):
    bare = weights(config.replace(positions={"covers": "none"}))
    assert surgery.unfold_class_position(bare)[0].config.positions.covers == covers


def test_unfolding_can_add_rows_for_registers():
    before = weights(REGISTERS.replace(positions={"covers": "class"}))
    after, line = surgery.unfold_class_position(before, "all")
    assert same_function(before, after, images(REGISTERS)) and line == "pos_embed gains 2 rows of zeros, covers='all'"


@pytest.mark.parametrize("operation", ["fold_class_position", "unfold_class_position"])
def test_folding_and_unfolding_keep_the_function_of_vit_jax(operation):
    config = TINY.replace(positions={"covers": "all" if operation == "fold_class_position" else "none"})
    before = weights(config)
    after, _ = getattr(surgery, operation)(before)
    assert same_function(before, after, images(config), twin=jax_logits)


# The bias of keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("qkv_bias_before", ["qv", "none"])
def test_adding_a_key_bias_of_zeros_keeps_the_function(qkv_bias_before, twin):
    config = TINY.replace(attention={"qkv_bias": qkv_bias_before})
    before = weights(config)
    after, line = surgery.add_key_bias(before)
    assert after.config == TINY and "get a bias of zeros" in line
    assert not parameter(after, "blocks.attn.qkv.bias")[:, 1].any()
    assert same_function(before, after, images(config), twin=TWINS[twin])


@pytest.mark.parametrize("twin", TWINS)
def test_dropping_the_key_bias_keeps_the_function(twin):
    before = weights()
    norm = np.linalg.norm(parameter(before, "blocks.attn.qkv.bias")[:, 1])
    after, line = surgery.drop_key_bias(before)
    assert norm > 0.1 and f"norm {norm:.3g}, which softmax cancels" in line
    assert same_function(before, after, images(TINY), twin=TWINS[twin])


# Options with which the outputs depend on the bias of keys.
AFFECTED = {"attention.qk_norm": {"attention": {"qk_norm": True}}, "positions.rotary": {"positions": {"rotary": "axial"}}}


@pytest.mark.parametrize(("name", "change"), AFFECTED.items())
def test_a_key_bias_before_a_norm_or_rotation_cannot_be_dropped(name, change):
    with pytest.raises(InputError, match=rf"the bias of keys has norm .*, and with {name} attention depends on it"):
        surgery.drop_key_bias(weights(TINY.replace(**change)))


@pytest.mark.parametrize("change", AFFECTED.values(), ids=AFFECTED)
def test_dropping_a_key_bias_before_a_norm_or_rotation_would_change_the_function(change):
    config = TINY.replace(**change)
    before = weights(config)
    bias = parameter(before, "blocks.attn.qkv.bias")
    q_and_v = {"blocks.attn.q_bias": bias[:, 0], "blocks.attn.v_bias": bias[:, 2]}
    after = conversion.replace_parameters(before, config.replace(attention={"qkv_bias": "qv"}), q_and_v)
    assert not same_function(before, after, images(config))


@pytest.mark.parametrize("change", AFFECTED.values(), ids=AFFECTED)
def test_a_key_bias_of_zeros_can_always_be_dropped(change):
    config = TINY.replace(**change).replace(attention={"qkv_bias": "qv"})
    before = weights(config)
    after, line = surgery.drop_key_bias(surgery.add_key_bias(before)[0])
    assert after.config == config and unchanged_parameters(before, after) == set(rows(config))
    assert line == "blocks.attn.qkv.bias: the bias of keys removed, norm 0"


# Formats and files ----------------------------------------------------------------------------------------------------

# Name of a case -> config, operations, and names of the parameters that the operations have to read.
OPERATIONS = {
    "resize": (TINY, {"image_size": (16, 20)}, {"pos_embed"}),
    "patch": (TINY, {"image_size": (16, 24), "patch_size": 8}, {"patch_embed.proj.weight"}),
    "channels": (TINY, {"in_channels": 1}, {"patch_embed.proj.weight"}),
    "no head": (TINY, {"drop_head": True}, set()),
    "new head": (TINY, {"num_classes": 3}, set()),
    "fold": (TINY, {"fold_class_position": True}, {"pos_embed", "cls_token"}),
    "unfold": (TINY.replace(positions={"covers": "none"}), {"unfold_class_position": True}, {"pos_embed"}),
    "learn positions": (TINY.replace(**FIXED_TABLE), {"learn_positions": True}, set()),
    "add bias": (TINY.replace(attention={"qkv_bias": "none"}), {"add_key_bias": True}, set()),
    "drop bias": (TINY, {"drop_key_bias": True}, {"blocks.attn.qkv.bias"}),
}


@pytest.mark.parametrize(("config", "operation", "read"), OPERATIONS.values(), ids=OPERATIONS)
def test_operations_have_the_same_result_in_both_formats(config, operation, read):
    a, b = (surgery.apply(weights(config, format), operation)[0] for format in ("torch", "jax"))
    assert (a.format, b.format) == ("torch", "jax")
    assert set(validate(a)) == set(validate(b)) == unchanged_parameters(a, b)


@pytest.mark.parametrize("format", ["torch", "jax"])
@pytest.mark.parametrize(("config", "operation", "read"), OPERATIONS.values(), ids=OPERATIONS)
def test_only_changed_parameters_of_a_file_are_read(tmp_path, monkeypatch, config, operation, read, format):
    path = tmp_path / "a.safetensors"
    parity.save(path, weights(config, format).arrays, config, format)
    count, read_into = [], File.read_into
    checkpoint = parity.load(path)
    monkeypatch.setattr(File, "read_into", lambda self, out, at: (count.append(out.nbytes), read_into(self, out, at)))
    surgery.apply(checkpoint, operation)
    assert sum(count) == sum(8 * rows(config)[name].size for name in read)


def test_the_result_of_an_operation_on_a_file_can_be_written(tmp_path):
    parity.save(tmp_path / "a.safetensors", weights().arrays, TINY, "torch")
    after, _ = surgery.resize(parity.load(tmp_path / "a.safetensors"), (16, 20))
    parity.checkpoints.writing.write(after, tmp_path / "b.safetensors", "jax")
    written = parity.load(tmp_path / "b.safetensors")
    assert written.config == after.config and unchanged_parameters(after, written) == set(rows(TINY))


@pytest.fixture
def strict(monkeypatch):
    """Return a checkpoint in a format that can store no position table except one with rows for all tokens."""
    only = replace(get("torch"), name="strict", constraints={"positions.covers": "all"})
    known = formats.get
    for module in (parity.checkpoints.weights, conversion, surgery.edit):
        monkeypatch.setattr(module, "get", lambda name: only if name == "strict" else known(name))
    return replace(weights(), format="strict")


def test_a_format_that_cannot_store_the_new_model_is_replaced_by_torch(strict):
    after, _ = surgery.fold_class_position(strict)
    expected, _ = surgery.fold_class_position(weights())
    assert after.format == "torch" and unchanged_parameters(after, expected) == set(validate(after))


def test_a_format_that_can_store_the_new_model_is_kept(strict):
    assert surgery.resize(strict, (16, 20))[0].format == "strict"


def test_the_given_checkpoint_is_not_changed():
    before = weights()
    bits = {key: array.tobytes() for key, array in before.arrays.items()}
    surgery.apply(before, {"image_size": 16, "patch_size": 8, "in_channels": 1, "fold_class_position": True})
    assert bits == {key: array.tobytes() for key, array in before.arrays.items()}


LARGE = 40000.0  # finite in float16, and twice as much is infinite


@pytest.mark.parametrize(
    ("change", "operation", "parameter_name"),
    [
        ({}, {"in_channels": 1}, "patch_embed.proj.weight"),
        ({}, {"patch_size": (1, 1), "image_size": (2, 3)}, "patch_embed.proj.weight"),
        ({}, {"fold_class_position": True}, "cls_token"),
        ({}, {"image_size": (16, 24), "resampling": "hf"}, "pos_embed"),
        (
            {"positions": {"covers": "none", "factorized": True}},
            {"image_size": (16, 24), "resampling": "hf"},
            "pos_embed_y",
        ),
    ],
    ids=str,
)
def test_an_operation_that_would_make_a_finite_number_infinite_is_refused(change, operation, parameter_name):
    before = weights(TINY.replace(**change), dtype=np.float16)
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed", "pos_embed_y"):
        if name in before.arrays:
            before.arrays[name][:] = LARGE
    if "resampling" in operation:  # bicubic weights are larger than one beside a step
        table = before.arrays[parameter_name].reshape(-1, TINY.width)
        table[...] = 65000
        table[-1] = -65000
    with pytest.raises(InputError, match=f"^{parameter_name} would have the entry .* infinite in float16.*--dtype float32"):
        surgery.apply(before, operation)


# Several operations, and invalid input --------------------------------------------------------------------------------


def test_apply_equals_the_operations_one_by_one():
    operations = {"image_size": 16, "in_channels": 1, "num_classes": 2, "fold_class_position": True, "drop_key_bias": True}
    after, lines = surgery.apply(weights(), operations)
    step_by_step = weights()
    for operation, argument in [(surgery.resize, 16), (surgery.adapt_channels, 1), (surgery.new_head, 2)]:
        step_by_step, _ = operation(step_by_step, argument)
    step_by_step, _ = surgery.drop_key_bias(surgery.fold_class_position(step_by_step)[0])
    assert after.config == step_by_step.config
    assert unchanged_parameters(after, step_by_step) == set(validate(after))
    assert [line.split()[0] for line in lines] == [
        "image_size",
        "in_channels",
        "num_classes",
        "pos_embed",
        "blocks.attn.qkv.bias:",
    ]


def test_no_operation_changes_nothing():
    before = weights()
    assert surgery.apply(before, {}) == (before, [])


NO_PREFIX_ROWS = {"positions": {"covers": "none"}}
REFUSED = [
    ({}, {"image_size": (9, 12)}, "image size 9x12 is not a multiple of the patch size 4x4: resize images to 8x12"),
    ({}, {"patch_size": 5}, "image size 8x12 is not a multiple of the patch size 5x5"),
    ({}, {"image_size": (0, 4)}, "image_size is (0, 4): give a positive height and width in pixels"),
    ({}, {"image_size": "big"}, "image_size is 'big': give 2 numbers"),
    ({}, {"resampling": "tim"}, "unknown resampling 'tim'; did you mean 'timm'?"),
    ({}, {"resampling": "?"}, "unknown resampling '?': give one of timm, dinov2-reg, hf"),
    ({}, {"in_channels": 0}, "in_channels is 0: give a positive integer"),
    ({}, {"num_classes": 0}, "num_classes is 0: give the number of outputs, or remove the classifier with drop_head"),
    ({}, {"num_classes": -1}, "num_classes is -1: give the number of outputs, or remove the classifier with drop_head"),
    ({"num_classes": 0}, {"drop_head": True}, "there is no head to drop"),
    (
        NO_PREFIX_ROWS,
        {"fold_class_position": True},
        "pos_embed has rows for patches only, positions.covers='none': nothing to fold",
    ),
    (FIXED_TABLE, {"fold_class_position": True}, "positions.kind is 'fixed': only a learned table has rows to fold"),
    ({}, {"learn_positions": True}, "positions.kind is 'learned': only a fixed table can be written as a learned one"),
    ({}, {"unfold_class_position": True}, "pos_embed has rows for 1 of 1 prefix tokens: covers='all' adds none"),
    ({"positions": {"kind": "none"}}, {"unfold_class_position": True}, "positions.kind is 'none'"),
    ({}, {"add_key_bias": True}, "keys have a bias already"),
    ({"attention": {"qkv_bias": "qv"}}, {"drop_key_bias": True}, "keys have no bias to drop: attention.qkv_bias is 'qv'"),
    ({}, {"image_sise": 4}, "unknown surgery 'image_sise'; did you mean 'image_size'?"),
]


@pytest.mark.parametrize(("change", "operation", "what"), REFUSED, ids=[what for _, _, what in REFUSED])
def test_impossible_operations_are_refused_in_one_line(change, operation, what):
    with pytest.raises(InputError) as error:
        surgery.apply(weights(TINY.replace(**change)), operation)
    assert what in str(error.value) and "\n" not in str(error.value)


def test_resizing_without_a_size_is_refused():
    with pytest.raises(InputError, match="no size to resize to: give image_size, patch_size or resampling"):
        surgery.resize(weights())


def test_an_unknown_initialisation_law_is_refused():
    with pytest.raises(InputError, match=r"head.init is 'orthogonal'"):
        surgery.new_head(weights(), 3, init="orthogonal")


def test_the_table_of_relative_positions_is_not_resized():
    config = TINY.replace(positions={"kind": "none", "relative": "table"})
    with pytest.raises(InputError, match="the table of relative positions belongs to a grid of 2x3 patches"):
        surgery.resize(weights(config), image_size=(16, 16))
    resized, _ = surgery.resize(weights(config), image_size=(16, 24), patch_size=8)
    assert resized.config.grid == config.grid


def test_relative_positions_by_an_mlp_follow_a_new_image_size():
    config = TINY.replace(positions={"kind": "none", "relative": "mlp", "relative_dim": 7})
    resized, _ = surgery.resize(weights(config), image_size=(16, 16))
    assert torch_logits(resized, images(resized.config)).shape == (2, 5)
    assert unchanged_parameters(weights(config), resized) == set(rows(config))
