"""ViTConfig: JSON, derived sizes, changes, and error messages for invalid values."""

import dataclasses
import json
import re
import typing

import numpy as np
import pytest

from vit_spec import (
    Attention,
    Head,
    InputError,
    Mlp,
    Norms,
    Pixels,
    Positions,
    Regularisation,
    Resampling,
    Tokens,
    ViTConfig,
    get,
    names,
    position_table,
)
from vit_spec.config import FIELDS, PARTS, coerce_field

SMALL = ViTConfig(image_size=(32, 48), width=24, depth=2, num_heads=2, mlp_dim=40)

# Every field differs from its default.
RICH = ViTConfig(
    image_size=(32, 48),
    patch_size=(8, 16),
    in_channels=2,
    width=24,
    depth=2,
    num_heads=2,
    mlp_dim=40,
    num_classes=5,
    pixels=Pixels(mean=(0.1, 0.2), std=(0.3, 0.4)),
    tokens=Tokens(registers=3, patch_bias=False, init="uniform(-1, 1)", pad=True),
    positions=Positions(kind="fixed", table="sincos_2d_timm", covers="class", rotary="axial", rotary_base=50.0),
    resampling=Resampling(kernel="bilinear", antialias=False, offset=0.1),
    attention=Attention(head_dim=8, qkv_bias="qv", proj_bias=False, scale=0.25, qk_norm=True),
    mlp=Mlp(activation="swiglu"),
    norms=Norms(eps=1e-5, before_blocks=True, after_blocks=False, after_pool=True, shared_norm=True, layer_scale=0.1),
    head=Head(pool="token_mean", hidden=7, bias=False, init="zeros"),
    regularisation=Regularisation(pos_drop=0.1, patch_drop=0.2, attn_drop=0.3, mlp_drop=0.4, drop_path=0.5),
)


# JSON -------------------------------------------------------------------------------------------------------


def test_json_round_trips_every_named_model():
    assert [name for name in names() if ViTConfig.from_json(get(name).to_json()) != get(name)] == []


def test_json_round_trips_every_field():
    assert ViTConfig.from_json(RICH.to_json()) == RICH


def test_json_is_one_line_with_every_field():
    text = RICH.to_json()
    assert "\n" not in text
    assert set(json.loads(text)) == {field.name for field in dataclasses.fields(ViTConfig)}


def test_fields_that_json_omits_take_their_defaults():
    text = '{"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 40, "norms": {"eps": 1e-5}}'
    assert ViTConfig.from_json(text) == ViTConfig(width=24, depth=2, num_heads=2, mlp_dim=40, norms=Norms(eps=1e-5))


def test_json_with_an_unknown_key_is_refused():
    with pytest.raises(InputError, match="unknown config field wdth; did you mean 'width'"):
        ViTConfig.from_json(with_key("wdth"))


def test_json_with_an_unknown_nested_key_is_refused():
    for part in PARTS:
        with pytest.raises(InputError, match=rf"unknown config field {part}\.novel"):
            ViTConfig.from_json(with_key("novel", part))


def test_json_with_a_number_for_a_nested_object_is_refused():
    for part, kind in PARTS.items():
        fields = json.loads(SMALL.to_json()) | {part: 3}
        with pytest.raises(InputError, match=f"{part} is 3: expected an object with the fields of {kind.__name__}"):
            ViTConfig.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the config cannot be read (not JSON: "),
        (f'{{"width": {"9" * 400}}}', "... has more than 300 digits"),
        ("[]", "the config is a JSON list: expected an object with the fields of ViTConfig"),
        ('{"width": 24}', "required config fields are missing: add depth, num_heads, mlp_dim"),
        (SMALL.to_json().replace('"width": 24', '"width": "24"'), "width is '24': give an integer"),
        (SMALL.to_json().replace("1e-06", "NaN"), "the config cannot be read (NaN is not valid JSON)"),
    ],
)
def test_invalid_json_is_refused(text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ViTConfig.from_json(text)


def with_key(key, part=None):
    """Return the JSON of a config with an additional key, at the top level or in the nested object `part`."""
    fields = json.loads(SMALL.to_json())
    (fields if part is None else fields[part])[key] = 1
    return json.dumps(fields)


# Values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["image_size", "patch_size"])
def test_one_integer_means_a_square(field):
    assert getattr(SMALL.replace(**{field: 16}), field) == (16, 16)


def test_a_list_becomes_a_tuple():
    assert SMALL.replace(image_size=[32, 64]).image_size == (32, 64)


@pytest.mark.parametrize("value", [np.int64(48), np.int32(48)])
def test_a_numpy_integer_becomes_a_python_integer(value):
    assert type(SMALL.replace(width=value).width) is int


def test_an_integer_becomes_a_float_in_a_float_field():
    assert type(SMALL.replace(attention={"scale": 2}).attention.scale) is float


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.width = 32


def test_equal_configs_have_equal_hashes():
    assert hash(SMALL) == hash(ViTConfig.from_json(SMALL.to_json()))
    assert len({SMALL, SMALL.replace(), SMALL.replace(depth=3)}) == 2


def test_cached_sizes_do_not_change_equality():
    fresh = ViTConfig.from_json(SMALL.to_json())
    assert fresh.sizes
    assert fresh == ViTConfig.from_json(SMALL.to_json())


def test_head_dim_is_width_over_num_heads_unless_given():
    assert SMALL.head_dim == 12
    assert SMALL.replace(attention={"head_dim": 5}).head_dim == 5


def test_scale_is_the_inverse_root_of_head_dim_unless_given():
    assert SMALL.scale == 12**-0.5
    assert SMALL.replace(attention={"scale": 0.5}).scale == 0.5


def test_the_grid_is_rows_then_columns():
    assert SMALL.grid == (2, 3)


@pytest.mark.parametrize("order", ["mae", "timm"])
def test_a_width_of_4_has_the_sine_cosine_tables_of_mae_and_timm(order):
    config = SMALL.replace(width=4, positions={"kind": "fixed", "table": f"sincos_2d_{order}"})
    (table,) = position_table(config, config.grid)
    assert table.shape[1] == 4 and np.isfinite(table).all()


def test_padding_rounds_the_grid_up():
    assert SMALL.replace(tokens={"pad": True}).grid_of(33, 48) == (3, 3)


@pytest.mark.parametrize(("covers", "rows"), [("all", 1 + 4 + 6), ("class", 1 + 6), ("none", 6)])
def test_the_position_table_has_rows_for_the_chosen_prefix_tokens(covers, rows):
    assert SMALL.replace(tokens={"registers": 4}, positions={"covers": covers}).sizes["token"] == rows


# Changes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norms", "has_second", "has_second_scale"),
    [
        (Norms(), True, False),
        (Norms(layer_scale=0.1), True, True),
        (Norms(layer_scale=0.0, mlp_layer_scale=False), True, False),
        (Norms(layer_scale=0.0, shared_norm=True), False, True),
        (Norms(layer_scale=0.1, order="parallel"), False, False),
        (Norms(layer_scale=0.1, order="post"), True, True),
    ],
)
def test_the_mlp_of_a_block_has_a_norm_and_a_layer_scale_unless_it_shares_them_or_has_none(
    norms, has_second, has_second_scale
):
    assert (norms.has_second, norms.has_second_scale) == (has_second, has_second_scale)


def test_only_swiglu_is_gated():
    kinds = typing.get_args(typing.get_type_hints(Mlp)["activation"])
    assert [kind for kind in kinds if Mlp(activation=kind).is_gated] == ["swiglu"]


def test_replace_changes_only_the_named_fields():
    changed = RICH.replace(depth=3, norms={"eps": 1e-3})
    assert changed == dataclasses.replace(RICH, depth=3, norms=dataclasses.replace(RICH.norms, eps=1e-3))


def test_replace_accepts_a_complete_nested_dataclass():
    assert RICH.replace(norms=Norms()).norms == Norms()


def test_replace_does_not_change_the_original():
    text = SMALL.to_json()
    SMALL.replace(depth=3, norms={"eps": 1e-3})
    assert SMALL.to_json() == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widht": 24}, "unknown config field widht; did you mean 'width'?"),
        ({"norm": {"eps": 1}}, "unknown config field norm; did you mean 'norms'?"),
        ({"norms": {"epsilon": 1}}, "unknown config field norms.epsilon; did you mean 'eps'?"),
        ({"qwerty": 1}, "unknown config field qwerty; the fields are image_size, patch_size, in_channels, width"),
        ({"mlp": {"qwerty": 1}}, "unknown config field mlp.qwerty; the fields are activation"),
    ],
)
def test_an_unknown_field_error_suggests_a_similar_field_or_lists_all(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        SMALL.replace(**changes)


def test_with_fields_changes_only_the_dotted_fields():
    assert RICH.with_fields({"depth": 5, "norms.eps": 1e-3}) == RICH.replace(depth=5, norms={"eps": 1e-3})


def test_from_fields_is_the_config_of_these_fields_and_the_defaults():
    assert ViTConfig.from_fields({name: RICH.at(name) for name in FIELDS}) == RICH
    required = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 40}
    assert ViTConfig.from_fields({**required, "norms.eps": 1e-5}) == ViTConfig(**required, norms=Norms(eps=1e-5))
    with pytest.raises(InputError, match="required config fields are missing: add depth, num_heads, mlp_dim"):
        ViTConfig.from_fields({"width": 24})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("norms.epsilon", "unknown config field norms.epsilon; did you mean 'norms.eps'?"),
        ("eps", "unknown config field eps; did you mean 'norms.eps'?"),
        ("qwerty", "unknown config field qwerty; the fields are image_size, patch_size, in_channels, width"),
        ("norms", "unknown config field norms"),
    ],
)
def test_every_lookup_of_a_dotted_field_refuses_an_unknown_one_alike(name, message):
    for look_up in (
        SMALL.at,
        lambda field: SMALL.with_fields({field: 1}),
        lambda field: ViTConfig.from_fields({field: 1}),
        lambda field: coerce_field(field, 1),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            look_up(name)


# Errors -----------------------------------------------------------------------------------------------------

WRONG_TYPES = [
    ({"width": "24"}, "width is '24': give an integer"),
    ({"width": 24.0}, "width is 24.0: give an integer"),
    ({"depth": True}, "depth is True: give an integer"),
    ({"image_size": "224"}, "image_size is '224': give 2 numbers, such as (224, 224)"),
    ({"image_size": (32, 32, 3)}, "image_size is (32, 32, 3): give 2 numbers, such as (224, 224)"),
    ({"image_size": (32, 32.5)}, "image_size is 32.5: give an integer"),
    ({"patch_size": None}, "patch_size is None: give 2 numbers"),
    ({"pixels": {"mean": 0.5}}, "pixels.mean is 0.5: give one or more numbers, such as (0.5, 0.5, 0.5)"),
    ({"pixels": {"mean": ()}}, "pixels.mean is (): give one or more numbers"),
    ({"pixels": {"std": (float("nan"),)}}, "pixels.std is nan: give a finite number"),
    ({"norms": 1e-6}, "norms is 1e-06: give a vit_spec.Norms(...)"),
    ({"norms": Head()}, "give a vit_spec.Norms(...)"),
    ({"norms": {"eps": "1e-6"}}, "norms.eps is '1e-6': give a finite number"),
    ({"norms": {"eps": True}}, "norms.eps is True: give a finite number"),
    ({"attention": {"scale": float("inf")}}, "attention.scale is inf: give a finite number"),
    ({"tokens": {"class_token": 1}}, "tokens.class_token is 1: give True or False"),
    ({"tokens": {"init": 0.02}}, "tokens.init is 0.02: give a string"),
    ({"attention": {"qkv_bias": True}}, "attention.qkv_bias is True: give one of qkv, qv, none"),
    ({"positions": {"kind": "lerned"}}, "positions.kind is 'lerned': give one of learned, fixed, none; did you mean"),
    (
        {"positions": {"covers": "cls"}},
        "positions.covers is 'cls': give one of all, class, none; did you mean 'class'?",
    ),
    ({"positions": {"rotary": "axil"}}, "did you mean 'axial'?"),
    ({"resampling": {"kernel": "cubic"}}, "resampling.kernel is 'cubic': give one of bicubic, bilinear; did you mean"),
    ({"mlp": {"activation": "gelutanh"}}, "did you mean 'gelu_tanh'?"),
    ({"head": {"pool": "map"}}, "head.pool is 'map': give one of token, mean, token_mean, attention, none"),
]

OUT_OF_RANGE = [
    ({"in_channels": 0}, "in_channels is 0: give a positive integer"),
    ({"width": 0}, "width is 0: give a positive integer"),
    ({"depth": -1}, "depth is -1: give a positive integer"),
    ({"num_heads": 0}, "num_heads is 0: give a positive integer"),
    ({"mlp_dim": 0}, "mlp_dim is 0: give a positive integer"),
    ({"num_classes": -1}, "num_classes is -1: give the number of outputs, or 0 for a model without a classifier"),
    ({"image_size": (0, 32)}, "image_size is (0, 32): give a positive height and width in pixels"),
    ({"patch_size": (16, 0)}, "patch_size is (16, 0): give a positive height and width in pixels"),
    ({"pixels": {"std": (0.0,)}}, "pixels.std is (0.0,): give positive numbers"),
    ({"tokens": {"registers": -1}}, "tokens.registers is -1: give 0 or more"),
    ({"tokens": {"init": "normal"}}, "tokens.init is 'normal': give one of zeros, ones, constant(0.1)"),
    ({"tokens": {"init": "normal(-1)"}}, "give a positive standard deviation"),
    ({"tokens": {"init": "uniform(1, 0)"}}, "bounds with low < high"),
    ({"head": {"init": "zeroes"}}, "head.init is 'zeroes': give one of zeros"),
    ({"head": {"init": "constant(nan)"}}, "head.init is 'constant(nan)': give one of"),
    ({"positions": {"table": "sincos_2d_mea"}}, "did you mean 'sincos_2d_mae'?"),
    ({"positions": {"relative": "mlp"}}, "positions.relative_dim is None: give a positive integer for"),
    ({"positions": {"relative": "table", "relative_dim": 8}}, "positions.relative_dim is 8: give a positive integer for"),
    ({"positions": {"relative_shared": True}}, "positions.relative_shared=True needs positions.relative"),
    (
        {"positions": {"relative": "table"}, "regularisation": {"patch_drop": 0.1}},
        "positions.relative='table' excludes regularisation.patch_drop: set it to 0",
    ),
    ({"positions": {"rotary_base": 0.0}}, "positions.rotary_base is 0.0: give a positive number"),
    (
        {"resampling": {"antialias": False, "offset": 1.0}},
        "resampling.offset is 1.0: give a number of at least 0 and less than 1",
    ),
    ({"attention": {"head_dim": 0}}, "attention.head_dim is 0: give a positive integer"),
    ({"attention": {"scale": 0.0}}, "attention.scale is 0.0: give a positive number, or None"),
    ({"norms": {"eps": 0.0}}, "norms.eps is 0.0: give a positive number such as 1e-6"),
    ({"head": {"hidden": 0}}, "head.hidden is 0: give a positive integer, or None"),
    ({"regularisation": {"pos_drop": 1.0}}, "regularisation.pos_drop is 1.0: give a probability"),
    ({"regularisation": {"patch_drop": -0.1}}, "regularisation.patch_drop is -0.1: give a probability"),
    ({"regularisation": {"attn_drop": 2.0}}, "regularisation.attn_drop is 2.0: give a probability"),
    ({"regularisation": {"mlp_drop": 1.0}}, "regularisation.mlp_drop is 1.0: give a probability"),
    ({"regularisation": {"drop_path": 1.0}}, "regularisation.drop_path is 1.0: give a probability"),
]

TOO_LARGE = [  # as a size, as an integer of more digits than Python prints by default, and as a float
    ({"width": 2**63}, "width is a number of 64 bits: give a smaller one"),
    ({"image_size": 16**5000}, "image_size is a number of 20001 bits: give a smaller one"),
    ({"norms": {"eps": 10**400}}, "give a finite number"),
]

OUTSIDE_FLOAT32 = [  # numbers that a model computes with become infinite or 0
    ({"attention": {"scale": 1e300}}, "attention.scale is 1e+300: give a finite number, at most 3.4e+38"),
    ({"norms": {"layer_scale": -1e39}}, "norms.layer_scale is -1e+39: give a finite number, at most 3.4e+38"),
    ({"head": {"init": "constant(1e39)"}}, "head.init is 'constant(1e39)': its samples overflow float32; give numbers of"),
    ({"head": {"init": "normal(1e38)"}}, "its samples overflow float32; give numbers of at most 3.4e+37"),
    ({"tokens": {"init": "uniform(-2e38, 2e38)"}}, "its samples overflow float32; give numbers of at most 1.7e+38"),
    ({"positions": {"table": "trunc_normal(1e300)"}}, "positions.table is 'trunc_normal(1e300)': its samples overflow"),
    ({"pixels": {"std": (0.5, 0.5, 1e-320)}}, "1e-320): give positive numbers, at least 1.2e-38"),
    ({"norms": {"eps": 1e-60}}, "norms.eps is 1e-60: give a positive number such as 1e-6, at least 1.2e-38"),
]

NO_CLASS_TOKEN = {"class_token": False}
CONTRADICTIONS = [
    ({"image_size": (33, 47)}, "image size 33x47 is not a multiple of the patch size 16x16: resize images to 32x48"),
    ({"image_size": (33, 47)}, "or set tokens.pad=True"),
    ({"num_heads": 5}, "width 24 is not divisible by num_heads 5: change one of them, or set"),
    ({"pixels": {"mean": (0.1, 0.2)}}, "pixels.mean has 2 values for 3 channels: give one value for all channels, or"),
    ({"tokens": NO_CLASS_TOKEN}, "head.pool='token' needs a class token: set tokens.class_token=True, or head.pool="),
    ({"tokens": NO_CLASS_TOKEN, "head": {"pool": "token_mean"}}, "head.pool='token_mean' needs a class token"),
    ({"tokens": NO_CLASS_TOKEN | {"distillation": True}}, "tokens.distillation=True needs a class token"),
    (
        {"tokens": {"distillation": True}, "head": {"pool": "mean"}},
        "tokens.distillation=True needs head.pool='token'",
    ),
    (
        {"tokens": NO_CLASS_TOKEN, "head": {"pool": "mean"}, "positions": {"covers": "class"}},
        "positions.covers='class' needs a class token: set tokens.class_token=True, or positions.covers='none'",
    ),
    (
        {"positions": {"kind": "fixed"}},
        "positions.table is 'normal(0.02)': for positions.kind='fixed', give one of sincos_1d",
    ),
    ({"positions": {"table": "sincos_2d_mae"}, "width": 26}, "a 2-D sine-cosine table needs a multiple of 4"),
    ({"positions": {"table": "sincos_2d_big_vision"}, "width": 4}, "and 'sincos_2d_big_vision' at least 8"),
    (
        {"positions": {"rotary": "axial"}, "width": 20},
        "head_dim is 10: positions.rotary needs a multiple of 4",
    ),
    ({"resampling": {"align_corners": True}}, "resampling.antialias and resampling.align_corners cannot be combined"),
    (
        {"resampling": {"align_corners": True, "antialias": False, "offset": 0.1}},
        "resampling.offset and resampling.align_corners cannot be combined",
    ),
    ({"attention": {"proj": False, "head_dim": 6}}, "num_heads 2 times head_dim 6 is 12, but attention.proj=False or"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_TYPES + OUT_OF_RANGE + OUTSIDE_FLOAT32 + CONTRADICTIONS, ids=str)
def test_the_error_for_an_invalid_value_is_one_line_and_says_what_to_change(change, message):
    with pytest.raises(InputError) as refusal:
        SMALL.replace(**change)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("change", "message"), TOO_LARGE, ids=["size", "pair", "float"])
def test_the_error_for_a_too_large_number_does_not_print_it(change, message):
    with pytest.raises(InputError) as refusal:
        SMALL.replace(**change)
    assert message in str(refusal.value)


@pytest.mark.parametrize("size", [(33, 32), (0, 32), (32, -16)])
def test_a_size_that_is_not_a_multiple_of_the_patch_size_is_refused(size):
    with pytest.raises(InputError, match=r"is not a multiple of the patch size 16x16: resize images to \d+x\d+"):
        SMALL.grid_of(*size)


@pytest.mark.parametrize("size", [(15, 32), (32, 15), (0, 32)])
def test_a_size_smaller_than_a_patch_cannot_be_cropped(size):
    with pytest.raises(InputError, match=r"is smaller than the patch size 16x16.*: resize images to at least 16x16$"):
        SMALL.replace(tokens={"crop": True}).grid_of(*size)


def test_a_model_with_relative_positions_refuses_images_of_another_size():
    model = SMALL.replace(positions={"relative": "table"})
    assert model.grid_of(*model.image_size) == model.grid
    with pytest.raises(InputError, match="image size 16x16 does not fit the relative positions of this model"):
        model.grid_of(16, 16)
