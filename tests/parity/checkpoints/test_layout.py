"""The layout language, and conversions between layouts, compared with arrays by hand and with an independent conversion."""

from dataclasses import replace
from itertools import product
from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vit_spec
from parity.checkpoints.columns import parameter_of
from parity.checkpoints.formats import Format, formats, get
from parity.checkpoints.formats.format import no_fields
from parity.checkpoints.layout import COPY_CHUNK, READ_CHUNK, Layout, convert_chunks, split_by_source
from vit_spec import InputError, ViTConfig, rows

SIZES = {"block": 2, "qkv": 3, "head": 2, "dim": 4, "width": 5}
QKV = {"qkv": ("query", "key", "value")}


def convert(source, target, arrays, sizes=SIZES):
    """Convert arrays to the target layout with the functions under test."""
    out = {}
    for key, indices in target.indexed_keys(sizes, {}):
        array = np.empty(prod(target.shape(sizes)), next(iter(arrays.values())).dtype)
        for start, part in split_by_source(source, target, sizes, indices):
            for first, entries in convert_chunks(source, target, sizes, part, reader(arrays)):
                array[start + first :][: len(entries)] = entries
        out[key] = array.reshape(target.shape(sizes))
    return out


def reader(arrays):
    """Return a function that reads a range of the entries of an array, as `convert_chunks` expects."""
    return lambda key, first, last: arrays[key].reshape(-1)[first:last]


# The language ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "blocks.{block}.attn.qkv.weight | (qkv head dim) width",
        "blocks/attn/qkv/kernel | block width qkv head dim",
        "layer.{block}.attention.{qkv}.weight | (head dim) width",
        "cls_token | 1 1 width",
        "blocks.{block}.attn.qkv.bias | (qkv=2 head dim)",
        "in_proj_weight | (qkv=1:kv head dim) width",
    ],
)
def test_str_of_a_layout_is_the_line_that_was_parsed(line):
    assert str(Layout.parse(line)) == line


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("no bar at all", "one bar"),
        ("| width", "one bar"),
        ("key |", "one bar"),
        ("key | width | head", "one bar"),
        ("a key | width", "no blanks"),
        ("blocks.{block.weight | width", "braces"),
        ("blocks.block}.weight | width", "braces"),
        ("blocks.{}.weight | width", "braces"),
        ("blocks.{Block}.weight | width", "braces"),
        ("blocks.{{block}}.weight | width", "braces"),
        ("key | (head dim", "'(head' is not an axis"),
        ("key | head dim)", "'dim)' is not an axis"),
        ("key | ((head dim) width)", "'((head' is not an axis"),
        ("key | ()", "'()' is not an axis"),
        ("key | (1 width)", "'(1 width)' is not an axis"),
        ("key | 2 width", "'2' is not an axis"),
        ("key | (qkv=q head)", "'(qkv=q head)' is not an axis"),
        ("key | qkv=1:", "'qkv=1:' is not an axis"),
        ("key | head,dim", "'head,dim' is not an axis"),
        ("key | width width", "width appears more than once"),
        ("blocks.{block} | block width", "block appears more than once"),
    ],
)
def test_a_malformed_line_is_refused(line, what):
    with pytest.raises(InputError) as error:
        Layout.parse(line)
    assert line.strip() in str(error.value) and what in str(error.value)


def test_keys_and_shape_of_a_layout():
    layout = Layout.parse("blocks.{block}.attn.qkv.weight | (qkv head dim) 1 width")
    assert layout.keys(SIZES) == ["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"]
    assert layout.shape(SIZES) == (24, 1, 5)


def test_an_axis_in_a_key_is_written_as_words_or_numbers():
    layout = Layout.parse("{block}.{qkv} | head", QKV)
    assert layout.keys(SIZES) == ["0.query", "0.key", "0.value", "1.query", "1.key", "1.value"]


# Conversions, by hand -------------------------------------------------------------------------------------------------


def test_a_patch_kernel_is_converted_from_oihw_to_hwio():
    sizes = {"width": 2, "rgb": 3, "ph": 4, "pw": 5}
    oihw = np.arange(120.0).reshape(2, 3, 4, 5)
    out = convert(Layout.parse("w | width rgb ph pw"), Layout.parse("k | ph pw rgb width"), {"w": oihw}, sizes)
    np.testing.assert_array_equal(out["k"], oihw.transpose(2, 3, 1, 0))


HEADS = Layout.parse("kernel | head dim width")
HEADS_ARRAY = np.array([[[100 * h + 10 * d + w for w in range(5)] for d in range(4)] for h in range(2)], np.float32)
MERGED_ARRAY = np.stack([HEADS_ARRAY[h, d] for h in range(2) for d in range(4)], axis=1)


def test_merged_heads_are_stored_head_by_head():
    out = convert(HEADS, Layout.parse("weight | width (head dim)"), {"kernel": HEADS_ARRAY})
    np.testing.assert_array_equal(out["weight"], MERGED_ARRAY)


def test_a_wrong_merge_passes_a_round_trip_but_not_the_hand_made_array():
    wrong = Layout.parse("weight | width (dim head)")
    out = convert(HEADS, wrong, {"kernel": HEADS_ARRAY})
    np.testing.assert_array_equal(convert(wrong, HEADS, out)["kernel"], HEADS_ARRAY)
    assert not np.array_equal(out["weight"], MERGED_ARRAY)


def test_a_fused_stacked_array_is_converted_to_split_unrolled_ones():
    fused = Layout.parse("qkv | block width qkv head dim")
    split = Layout.parse("layer.{block}.{qkv}.weight | (head dim) width", QKV)
    array = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 4))
    out = convert(fused, split, {"qkv": array})
    assert list(out) == split.keys(SIZES)
    for block, (i, name) in product(range(2), enumerate(("query", "key", "value"))):
        np.testing.assert_array_equal(out[f"layer.{block}.{name}.weight"], array[block, :, i].reshape(5, 8).T)


def test_arrays_of_one_entry_are_converted():
    stacked, spelled = Layout.parse("all | block"), Layout.parse("{block} | 1")
    out = convert(spelled, stacked, {"0": np.array([7.0]), "1": np.array([8.0])})
    np.testing.assert_array_equal(out["all"], [7, 8])
    assert convert(stacked, spelled, out)["1"] == [8]


# Conversions, in general ----------------------------------------------------------------------------------------------


@st.composite
def two_layouts(draw):
    """Draw sizes and two layouts of the same axes.

    Each axis is in the key, in the array or merged, in any order; dimensions of length one are inserted.
    """
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=5, unique=True))
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    spellings = {name: tuple(f"{name}{n}" for n in range(size)) for name, size in sizes.items() if draw(st.booleans())}

    def layout(prefix):
        order = draw(st.permutations(names))
        in_key = draw(st.integers(0, len(names)))
        dims = []
        for name in order[in_key:]:
            if dims and dims[-1] and draw(st.booleans()):
                dims[-1].append(name)
            else:
                dims += [[]] * draw(st.integers(0, 1)) + [[name]]
        axes = " ".join(f"({' '.join(dim)})" if len(dim) > 1 else "".join(dim) or "1" for dim in dims) or "1"
        return Layout.parse(".".join([prefix, *(f"{{{name}}}" for name in order[:in_key])]) + f" | {axes}", spellings)

    return sizes, names, layout("source"), layout("target")


def expected_arrays(layout, canonical, names, sizes):
    """Return the arrays of a layout for an array with the axes `names`, computed as the language is defined, key by key."""
    arrays, axes = {}, [axis.parameter_axis for axis in layout.array_axes]
    for numbers in product(*(range(sizes[name]) for name in layout.key_axes)):
        indices, part, remaining = dict(zip(layout.key_axes, numbers, strict=True)), canonical, list(names)
        for name, n in indices.items():
            part = np.take(part, n, axis=remaining.index(name))
            remaining.remove(name)
        words = {name: layout.spellings[name][n] if name in layout.spellings else n for name, n in indices.items()}
        shape = [prod(sizes[axis.parameter_axis] for axis in dim) for dim in layout.dims]
        arrays[layout.key.format(**words)] = part.transpose([remaining.index(name) for name in axes]).reshape(shape)
    return arrays


def same_bits(a, b):
    """Return whether two dictionaries of arrays have the same keys, shapes, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


@given(two_layouts(), st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]), st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_any_layout_converts_to_any_other_and_back_bit_for_bit(drawn, dtype, seed):
    sizes, names, source, target = drawn
    shape = [sizes[name] for name in names]
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)  # NaNs among them
    canonical = bits.view(dtype).reshape(shape)
    given_arrays = expected_arrays(source, canonical, names, sizes)
    out = convert(source, target, given_arrays, sizes)
    assert same_bits(out, expected_arrays(target, canonical, names, sizes))
    assert same_bits(convert(target, source, out, sizes), given_arrays)


def test_each_entry_of_the_source_is_read_once():
    split, fused = Layout.parse("{block}.{qkv} | (head dim)", QKV), Layout.parse("qkv | qkv head block dim")
    read = []

    def recorder(key, start, stop):
        read.append((key, start, stop))
        return np.zeros(stop - start)

    for _ in convert_chunks(split, fused, SIZES, {}, recorder):
        pass
    assert sorted(read) == sorted((key, 0, 8) for key in split.keys(SIZES))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a | block width dim", "b | block width dim"),  # in the same order: chunks of the array
        ("a | block width dim", "b | block dim width"),  # transposed: one block at a time
        ("a.{block} | width dim", "b | block dim width"),
        ("a | block width dim", "b.{block} | dim width"),
    ],
)
def test_at_most_one_block_is_in_memory(source, target):
    sizes = {"block": 5, "width": 700, "dim": 900}
    source, target, block = Layout.parse(source), Layout.parse(target), 700 * 900
    array = np.random.default_rng(0).integers(0, 2**32, (5, 700, 900), np.uint32)
    arrays = {"a": array} if source.dims[0][0].parameter_axis == "block" else {f"a.{n}": array[n] for n in range(5)}
    largest = {"read": 0, "chunk": 0}  # entries of 4 bytes

    def read(key, start, stop):
        largest["read"] = max(largest["read"], stop - start)
        return arrays[key].reshape(-1)[start:stop].copy()

    same_order = source.parameter_axes[-1] == target.parameter_axes[-1]
    for key, indices in target.indexed_keys(sizes, {}):
        for start, part in split_by_source(source, target, sizes, indices):
            for first, entries in convert_chunks(source, target, sizes, part, read):
                largest["chunk"] = max(largest["chunk"], len(entries))
                original = array if "{block}" not in target.key else array[int(key.rpartition(".")[2])]
                expected = original if same_order else np.swapaxes(original, -1, -2)
                np.testing.assert_array_equal(entries, expected.reshape(-1)[start + first :][: len(entries)])
    assert largest["read"] <= max(block, READ_CHUNK // 4)
    assert largest["chunk"] <= (READ_CHUNK if same_order else COPY_CHUNK) // 4


# Parts of an array ----------------------------------------------------------------------------------------------------


def test_a_part_of_an_array_is_read():
    bias = np.arange(24.0)
    values = convert(Layout.parse("qkv.bias | (qkv=2 head dim)"), Layout.parse("v | head dim"), {"qkv.bias": bias})
    np.testing.assert_array_equal(values["v"], bias[16:].reshape(2, 4))


def test_an_axis_can_be_part_of_a_longer_axis():
    sizes = {**SIZES, "kv": 2}
    fused = np.arange(120.0).reshape(24, 5)
    source, target = (
        Layout.parse("w | (qkv=1:kv head dim) width"),
        Layout.parse("{kv} | width head dim", {"kv": ("k", "v")}),
    )
    out = convert(source, target, {"w": fused}, sizes)
    np.testing.assert_array_equal(out["k"], fused[8:16].T.reshape(5, 2, 4))
    np.testing.assert_array_equal(out["v"], fused[16:].T.reshape(5, 2, 4))


def test_converting_to_a_part_of_an_array_is_refused():
    with pytest.raises(ValueError, match="more than one parameter"):
        convert(Layout.parse("v | head dim"), Layout.parse("qkv.bias | (qkv=2 head dim)"), {"v": np.zeros((2, 4))})


def test_layouts_of_different_axes_are_not_converted():
    with pytest.raises(ValueError, match="same axes"):
        convert(HEADS, Layout.parse("weight | width head"), {"kernel": HEADS_ARRAY})


# Formats --------------------------------------------------------------------------------------------------------------

TINY = ViTConfig(image_size=4, patch_size=2, width=8, depth=2, num_heads=2, mlp_dim=6, num_classes=3)
OPTIONS = {"tokens": {"distillation": True, "registers": 1}, "norms": {"before_blocks": True, "layer_scale": 1.0}}
CONFIGS = [
    TINY.replace(**OPTIONS, attention={"qk_norm": True, "qkv_bias": "qv"}, head={"hidden": 5}),
    TINY.replace(norms={"after_pool": True}, head={"pool": "attention"}),
    TINY.replace(mlp={"activation": "swiglu"}, head={"pool": "attention"}),
    TINY.replace(positions={"rotary": "mixed"}, attention={"out_norm": True}, norms={"after_patches": True}),
    TINY.replace(mlp={"norm": True}, head={"pool": "attention"}),
    TINY.replace(positions={"covers": "none", "factorized": True}),
    *(
        TINY.replace(positions={"relative": kind, "relative_dim": dim, "relative_shared": shared})
        for kind, dim in (("table", None), ("mlp", 3))
        for shared in (True, False)
    ),
]


def toy_format(line):
    """Return the torch format with one line of its table replaced."""
    name = line.partition("|")[0].strip()
    others = [other for other in get("torch").tables[""].splitlines() if other.partition("|")[0].strip() != name]
    return Format("toy", "a toy", ".", {"": "\n".join([*others, line])}, assumed_behaviour=no_fields, spellings=QKV)


@pytest.mark.parametrize("format", ["jax", "torch"])
def test_both_twins_have_a_layout_for_every_parameter_of_every_named_model(format):
    models = {name: vit_spec.get(name) for name in vit_spec.names()}
    failing = [name for name, config in models.items() if list(get(format).layouts(config)) != list(rows(config))]
    assert not failing


@pytest.mark.parametrize("format", ["jax", "torch"])
def test_the_tables_of_the_twins_have_exactly_the_parameters_that_models_can_have(format):
    named = {line.partition("|")[0].strip() for line in get(format).tables[""].splitlines() if line.strip()}
    assert named == {name for config in CONFIGS for name in rows(config)}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("cls_token | cls_token | 1 1", "has no key, or several, for cls_token with the axes width"),
        ("cls_token | cls_token | width width", "width appears more than once"),
        (
            "blocks.attn.proj.weight | blocks.{block}.attn.proj.weight | width head",
            "for blocks.attn.proj.weight with the axes block width head dim",
        ),
        ("norm.weight | norm.bias | width", "several parameters under one key: norm.bias"),
    ],
)
def test_a_table_that_drops_an_axis_or_shares_a_key_is_refused(line, what):
    with pytest.raises(InputError, match=what):
        toy_format(line).layouts(TINY)


def test_a_format_without_a_key_for_a_parameter_names_it():
    table = "\n".join(line for line in get("torch").tables[""].splitlines() if not line.strip().startswith("reg_token"))
    config = TINY.replace(tokens={"registers": 2})
    with pytest.raises(InputError, match="format 'toy' has no key for reg_token"):
        Format("toy", "a toy", ".", {"": table}, assumed_behaviour=no_fields).layouts(config)


def test_spellings_must_have_a_word_for_every_index():
    line = "blocks.attn.qkv.weight | {block}.{qkv} | (head dim) width"
    assert toy_format(line).layouts(TINY)
    short = replace(toy_format(line), spellings={"qkv": ("query", "key")})
    with pytest.raises(InputError, match="spells qkv as"):
        short.layouts(TINY)


def test_only_naflex_and_the_twins_store_factorized_positions():
    tables = [(name, variant) for name in formats() for variant in get(name).tables]
    found = {name for name, variant in tables if "pos_embed_y" in get(name).table_layouts(variant)}
    assert found == {"timm-naflex", "torch", "jax"}


def test_every_table_of_every_format_parses_and_names_known_parameters():
    known = {row for config in CONFIGS for row in rows(config)}
    tables = [(name, variant) for name in formats() for variant in get(name).tables]
    named = {f"{name}:{variant}": set(map(parameter_of, get(name).table_layouts(variant))) for name, variant in tables}
    unknown = {table: parameters - known for table, parameters in named.items()}
    assert not {table: names for table, names in unknown.items() if names}


def test_an_unknown_variant_suggests_the_nearest():
    name = next(name for name in formats() if len(get(name).tables) > 1)
    first = next(iter(get(name).tables))
    with pytest.raises(InputError, match=f"no variant '{first}x'; did you mean '{first}'"):
        get(f"{name}:{first}x")


def test_an_unknown_format_suggests_the_nearest():
    with pytest.raises(InputError, match="unknown format 'pytorch'; did you mean 'torch'"):
        get("pytorch")


def test_numbers_in_keys_may_begin_at_another_number():
    layout = Layout.parse("layer_{block+1}/{qkv}/kernel | width", {"qkv": ("query", "key", "value")})
    keys = layout.keys({"block": 2, "qkv": 3, "width": 4})
    assert keys == [f"layer_{n}/{word}/kernel" for n in (1, 2) for word in ("query", "key", "value")]
    assert layout.key_axes == ["block", "qkv"] and str(layout) == "layer_{block+1}/{qkv}/kernel | width"
    with pytest.raises(InputError, match="qkv is written as words"):
        Layout.parse("layer/{qkv+1}/kernel | width", {"qkv": ("query", "key", "value")})
