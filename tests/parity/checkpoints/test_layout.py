"""The layout language, and the copy between two layouts, against arrays made by hand and by an independent rule."""

from itertools import product
from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vit_spec
from parity.checkpoints.formats import Format, formats, get
from parity.checkpoints.layout import PIECE, STRIP, Layout, parts, runs
from vit_spec import InputError, ViTConfig, rows

SIZES = {"block": 2, "qkv": 3, "head": 2, "dim": 4, "width": 5}
QKV = {"qkv": ("query", "key", "value")}


def moved(source, target, arrays, sizes=SIZES):
    """The arrays of the target layout."""
    out = {}
    for key, at in target.places(sizes, {}):
        whole = np.empty(prod(target.shape(sizes)), next(iter(arrays.values())).dtype)
        for start, place in runs(source, target, sizes, at):
            for first, entries in parts(source, target, sizes, place, reader(arrays)):
                whole[start + first :][: len(entries)] = entries
        out[key] = whole.reshape(target.shape(sizes))
    return out


def reader(arrays):
    return lambda key, first, last: arrays[key].reshape(-1)[first:last]


# The language -------------------------------------------------------------------------------------------------------


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
def test_a_layout_prints_as_it_was_written(line):
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
def test_a_malformed_line_is_quoted_with_what_is_wrong(line, what):
    with pytest.raises(InputError) as error:
        Layout.parse(line)
    assert line.strip() in str(error.value) and what in str(error.value)


def test_keys_and_shape_of_a_layout():
    layout = Layout.parse("blocks.{block}.attn.qkv.weight | (qkv head dim) 1 width")
    assert layout.keys(SIZES) == ["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"]
    assert layout.shape(SIZES) == (24, 1, 5)


def test_a_spelled_axis_takes_its_words_and_the_others_count_from_zero():
    layout = Layout.parse("{block}.{qkv} | head", QKV)
    assert layout.keys(SIZES) == ["0.query", "0.key", "0.value", "1.query", "1.key", "1.value"]


# The copy, by hand --------------------------------------------------------------------------------------------------


def test_a_patch_kernel_goes_from_oihw_to_hwio():
    sizes = {"width": 2, "rgb": 3, "ph": 4, "pw": 5}
    oihw = np.arange(120.0).reshape(2, 3, 4, 5)
    out = moved(Layout.parse("w | width rgb ph pw"), Layout.parse("k | ph pw rgb width"), {"w": oihw}, sizes)
    np.testing.assert_array_equal(out["k"], oihw.transpose(2, 3, 1, 0))


HEADS = Layout.parse("kernel | head dim width")
HEADS_ARRAY = np.array([[[100 * h + 10 * d + w for w in range(5)] for d in range(4)] for h in range(2)], np.float32)
MERGED_ARRAY = np.stack([HEADS_ARRAY[h, d] for h in range(2) for d in range(4)], axis=1)


def test_merged_heads_are_head_by_head():
    out = moved(HEADS, Layout.parse("weight | width (head dim)"), {"kernel": HEADS_ARRAY})
    np.testing.assert_array_equal(out["weight"], MERGED_ARRAY)


def test_a_wrong_merge_round_trips_and_only_the_hand_made_array_shows_it():
    wrong = Layout.parse("weight | width (dim head)")
    out = moved(HEADS, wrong, {"kernel": HEADS_ARRAY})
    np.testing.assert_array_equal(moved(wrong, HEADS, out)["kernel"], HEADS_ARRAY)
    assert not np.array_equal(out["weight"], MERGED_ARRAY)


def test_fused_and_stacked_becomes_split_and_unrolled():
    fused = Layout.parse("qkv | block width qkv head dim")
    split = Layout.parse("layer.{block}.{qkv}.weight | (head dim) width", QKV)
    array = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 4))
    out = moved(fused, split, {"qkv": array})
    assert list(out) == split.keys(SIZES)
    for block, (i, name) in product(range(2), enumerate(("query", "key", "value"))):
        np.testing.assert_array_equal(out[f"layer.{block}.{name}.weight"], array[block, :, i].reshape(5, 8).T)


def test_one_entry_an_array_is_filled_too():
    stacked, spelled = Layout.parse("all | block"), Layout.parse("{block} | 1")
    out = moved(spelled, stacked, {"0": np.array([7.0]), "1": np.array([8.0])})
    np.testing.assert_array_equal(out["all"], [7, 8])
    assert moved(stacked, spelled, out)["1"] == [8]


# The copy, in general -----------------------------------------------------------------------------------------------


@st.composite
def two_layouts(draw):
    """Sizes, and two layouts of the same words: each word spelled, bare or merged, in any order, between ones."""
    words = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=5, unique=True))
    sizes = {word: draw(st.integers(1, 3)) for word in words}
    spellings = {word: tuple(f"{word}{n}" for n in range(size)) for word, size in sizes.items() if draw(st.booleans())}

    def layout(name):
        order = draw(st.permutations(words))
        spelled = draw(st.integers(0, len(words)))
        dims = []
        for word in order[spelled:]:
            if dims and dims[-1] and draw(st.booleans()):
                dims[-1].append(word)
            else:
                dims += [[]] * draw(st.integers(0, 1)) + [[word]]
        axes = " ".join(f"({' '.join(dim)})" if len(dim) > 1 else "".join(dim) or "1" for dim in dims) or "1"
        return Layout.parse(".".join([name, *(f"{{{word}}}" for word in order[:spelled])]) + f" | {axes}", spellings)

    return sizes, words, layout("source"), layout("target")


def laid_out(layout, canonical, words, sizes):
    """The arrays of a layout by the definition, one key at a time."""
    arrays, axes = {}, [axis.word for axis in layout.flat]
    for place in product(*(range(sizes[word]) for word in layout.spelled)):
        at, part, left = dict(zip(layout.spelled, place, strict=True)), canonical, list(words)
        for word, n in at.items():
            part = np.take(part, n, axis=left.index(word))
            left.remove(word)
        spelling = {word: layout.spellings[word][n] if word in layout.spellings else n for word, n in at.items()}
        shape = [prod(sizes[axis.word] for axis in dim) for dim in layout.dims]
        arrays[layout.key.format(**spelling)] = part.transpose([left.index(word) for word in axes]).reshape(shape)
    return arrays


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


@given(two_layouts(), st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]), st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_any_layout_becomes_any_other_and_comes_back_bit_by_bit(drawn, dtype, seed):
    sizes, words, source, target = drawn
    shape = [sizes[word] for word in words]
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)  # NaNs among them
    canonical = bits.view(dtype).reshape(shape)
    given_arrays = laid_out(source, canonical, words, sizes)
    out = moved(source, target, given_arrays, sizes)
    assert same_bits(out, laid_out(target, canonical, words, sizes))
    assert same_bits(moved(target, source, out, sizes), given_arrays)


def test_each_entry_of_the_source_is_read_once():
    split, fused = Layout.parse("{block}.{qkv} | (head dim)", QKV), Layout.parse("qkv | qkv head block dim")
    read = []

    def note(key, first, last):
        read.append((key, first, last))
        return np.zeros(last - first)

    for _ in parts(split, fused, SIZES, {}, note):
        pass
    assert sorted(read) == sorted((key, 0, 8) for key in split.keys(SIZES))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a | block width dim", "b | block width dim"),  # alike: pieces of the array
        ("a | block width dim", "b | block dim width"),  # rows become columns: a block at a time
        ("a.{block} | width dim", "b | block dim width"),
        ("a | block width dim", "b.{block} | dim width"),
    ],
)
def test_no_more_than_a_block_is_held_at_a_time(source, target):
    sizes = {"block": 5, "width": 700, "dim": 900}
    source, target, block = Layout.parse(source), Layout.parse(target), 700 * 900
    array = np.random.default_rng(0).integers(0, 2**32, (5, 700, 900), np.uint32)
    arrays = {"a": array} if source.dims[0][0].word == "block" else {f"a.{n}": array[n] for n in range(5)}
    largest = {"read": 0, "made": 0}

    def read(key, first, last):
        largest["read"] = max(largest["read"], last - first)
        return arrays[key].reshape(-1)[first:last].copy()

    for key, at in target.places(sizes, {}):
        for start, place in runs(source, target, sizes, at):
            for first, entries in parts(source, target, sizes, place, read):
                largest["made"] = max(largest["made"], len(entries))
                whole = array if "{block}" not in target.key else array[int(key.rpartition(".")[2])]
                expected = whole if source.words[-1] == target.words[-1] else np.swapaxes(whole, -1, -2)
                np.testing.assert_array_equal(entries, expected.reshape(-1)[start + first :][: len(entries)])
    assert largest["read"] <= max(block, PIECE // 4)
    assert largest["made"] <= (PIECE if source.words[-1] == target.words[-1] else STRIP) // 4


# Parts of an array --------------------------------------------------------------------------------------------------


def test_a_part_is_read_from_its_place():
    bias = np.arange(24.0)
    values = moved(Layout.parse("qkv.bias | (qkv=2 head dim)"), Layout.parse("v | head dim"), {"qkv.bias": bias})
    np.testing.assert_array_equal(values["v"], bias[16:].reshape(2, 4))


def test_an_axis_may_lie_on_a_longer_one():
    sizes = {**SIZES, "kv": 2}
    fused = np.arange(120.0).reshape(24, 5)
    source, target = (
        Layout.parse("w | (qkv=1:kv head dim) width"),
        Layout.parse("{kv} | width head dim", {"kv": ("k", "v")}),
    )
    out = moved(source, target, {"w": fused}, sizes)
    np.testing.assert_array_equal(out["k"], fused[8:16].T.reshape(5, 2, 4))
    np.testing.assert_array_equal(out["v"], fused[16:].T.reshape(5, 2, 4))


def test_a_part_is_not_moved_to_as_if_it_were_all():
    with pytest.raises(ValueError, match="more than one parameter"):
        moved(Layout.parse("v | head dim"), Layout.parse("qkv.bias | (qkv=2 head dim)"), {"v": np.zeros((2, 4))})


def test_layouts_of_other_axes_are_never_moved():
    with pytest.raises(ValueError, match="same axes"):
        moved(HEADS, Layout.parse("weight | width head"), {"kernel": HEADS_ARRAY})


# Formats ------------------------------------------------------------------------------------------------------------

TINY = ViTConfig(image_size=4, patch_size=2, width=8, depth=2, num_heads=2, mlp_dim=6, num_classes=3)
SWITCHES = {"tokens": {"distillation": True, "registers": 1}, "norms": {"before_blocks": True, "layer_scale": 1.0}}
EVERYTHING = [
    TINY.replace(**SWITCHES, attention={"qk_norm": True, "qkv_bias": "qv"}, head={"hidden": 5}),
    TINY.replace(norms={"after_pool": True}, head={"pool": "attention"}),
    TINY.replace(mlp={"activation": "swiglu"}, head={"pool": "attention"}),
]


def column(line):
    """The torch format with one line in place of the parameter's own."""
    name = line.partition("|")[0].strip()
    others = [other for other in get("torch").tables[""].splitlines() if other.partition("|")[0].strip() != name]
    return Format("toy", "a toy", ".", {"": "\n".join([*others, line])}, spellings=QKV)


@pytest.mark.parametrize("name", vit_spec.names())
@pytest.mark.parametrize("format", ["jax", "torch"])
def test_every_named_model_has_a_place_in_both_twins(name, format):
    config = vit_spec.get(name)
    assert list(get(format).layouts(config)) == list(rows(config))


@pytest.mark.parametrize("format", ["jax", "torch"])
def test_a_table_names_no_parameter_that_no_model_has(format):
    named = {line.partition("|")[0].strip() for line in get(format).tables[""].splitlines() if line.strip()}
    assert named == {name for config in EVERYTHING for name in rows(config)}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("cls_token | cls_token | 1 1", "one must hold the axes width"),
        ("cls_token | cls_token | width width", "width appears more than once"),
        (
            "blocks.attn.proj.weight | blocks.{block}.attn.proj.weight | width head",
            "must hold the axes block width head dim",
        ),
        ("norm.weight | norm.bias | width", "several parameters under one key: norm.bias"),
    ],
)
def test_a_format_cannot_drop_or_share_what_a_parameter_has(line, what):
    with pytest.raises(InputError, match=what):
        column(line).layouts(TINY)


def test_a_format_that_cannot_hold_a_config_says_which_parameter():
    table = "\n".join(line for line in get("torch").tables[""].splitlines() if not line.strip().startswith("reg_token"))
    config = TINY.replace(tokens={"registers": 2})
    with pytest.raises(InputError, match="format 'toy' has no place for reg_token"):
        Format("toy", "a toy", ".", {"": table}).layouts(config)


def test_a_spelling_has_a_word_for_every_place():
    line = "blocks.attn.qkv.weight | {block}.{qkv} | (head dim) width"
    assert column(line).layouts(TINY)
    short = Format("toy", "a toy", ".", column(line).tables, spellings={"qkv": ("query", "key")})
    with pytest.raises(InputError, match="spells qkv as"):
        short.layouts(TINY)


@pytest.mark.parametrize("name", formats())
def test_every_table_of_a_format_can_be_read(name):
    format = get(name)
    for variant in format.tables:
        known = {row for config in EVERYTHING for row in rows(config)}
        assert set(format.lines(variant)) <= known


def test_an_unknown_variant_says_the_nearest():
    name = next(name for name in formats() if len(get(name).tables) > 1)
    first = next(iter(get(name).tables))
    with pytest.raises(InputError, match=f"no variant '{first}x'; did you mean '{first}'"):
        get(f"{name}:{first}x")


def test_an_unknown_format_says_the_nearest():
    with pytest.raises(InputError, match="unknown format 'pytorch'; did you mean 'torch'"):
        get("pytorch")
