"""The mapping between the parameters of a Flax model and of a PyTorch module: matching, conversion, ambiguous input."""

import numpy as np
import pytest

from parity.checkpoints.formats import get
from parity.comparison.any_model.correspondence import Pair, match
from parity.comparison.any_model.matching import PairEvidence
from parity.comparison.any_model.parameters import Axes
from tests.twins import small_models
from vit_spec import InputError


def dense(name, inputs, outputs, flax=True):
    """Return the shapes of a dense layer."""
    if flax:
        return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name, flax=True):
    """Return the shapes of a LayerNorm."""
    return {f"{name}/scale": (4,), f"{name}/bias": (4,)} if flax else {f"{name}.weight": (4,), f"{name}.bias": (4,)}


def lines(correspondence):
    """Return a dict from the flax layouts to the torch layouts."""
    return {str(pair.flax): str(pair.torch) for pair in correspondence.pairs}


def noise(shapes):
    """Return random arrays of these shapes."""
    rng = np.random.default_rng(0)
    return {key: np.asarray(rng.standard_normal(shape)) for key, shape in shapes.items()}


# Matching -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flax", "torch", "line"),
    [
        ((3, 4), (4, 3), "d/kernel | in out  <->  d.weight | out in"),
        ((3, 4), (3, 4), "d/kernel | in out  <->  d.weight | in out"),
        ((3, 4), (4, 3, 1, 1), "d/kernel | in out  <->  d.weight | out in 1 1"),
        ((5, 3, 4), (4, 3, 5), "d/kernel | x in out  <->  d.weight | out in x"),
        ((5, 6, 3, 4), (4, 3, 5, 6), "d/kernel | y x in out  <->  d.weight | out in y x"),
        ((5, 6, 1, 4), (4, 1, 5, 6), "d/kernel | y x in out  <->  d.weight | out in y x"),
        ((7, 5, 6, 3, 4), (4, 3, 7, 5, 6), "d/kernel | z y x in out  <->  d.weight | out in z y x"),
        ((3, 2, 5), (10, 3), "d/kernel | in head dim  <->  d.weight | (head dim) in"),
        ((2, 5, 3), (3, 10), "d/kernel | head dim out  <->  d.weight | out (head dim)"),
        ((4, 3, 2, 5), (30, 4), "d/kernel | in qkv head dim  <->  d.weight | (qkv head dim) in"),
    ],
)
def test_a_kernel_is_matched_by_the_convention_of_its_layer(flax, torch, line):
    [pair] = match({"d/kernel": flax}, {"d.weight": torch}).pairs
    assert str(pair) == line


@pytest.mark.parametrize(
    "name", ["my head", "x|y", "p <-> q", "{n}", "a{b+1}c", "(qkv=0 a)", "\n", "5%20", "kernel:0", "\u3000"]
)
def test_any_name_of_a_parameter_can_be_matched_and_written_in_a_line(name):
    shapes = {f"{name}/kernel": (3, 4), "0/bias": (4,)}, {f"{name}.weight": (4, 3), "0.bias": (4,)}
    found = match(*shapes)
    assert dict(found.keys()) == dict(zip(*shapes, strict=True))
    again = match(*shapes, layouts=[str(pair) for pair in found.pairs])
    assert again.pairs == found.pairs
    weights = noise(shapes[0])
    assert all(np.array_equal(found.to_flax(found.to_torch(weights))[key], array) for key, array in weights.items())
    zero = f"{str(found.pairs[0]).partition(' | ')[0]} | in out <-> 0"
    assert [*match(shapes[0], {"0.bias": (4,)}, layouts=[zero]).zeros[0].keys] == [f"{name}/kernel"]


def test_a_line_with_a_blank_in_a_key_is_refused_with_how_to_write_it():
    with pytest.raises(InputError, match=r"a key is written without blanks, as in my%20head/kernel$"):
        match({"my head/kernel": (3, 4)}, {"d.weight": (4, 3)}, layouts=["my head/kernel | in out <-> d.weight | out in"])


def test_layers_with_a_blank_in_their_names_are_one_line():
    flax, torch = ({**dense("a b0", 3, 4, side), **dense("a b1", 3, 4, side)} for side in (True, False))
    assert lines(match(flax, torch)) == {
        "a%20b{n}/kernel | in out": "a%20b{n}.weight | out in",
        "a%20b{n}/bias | width": "a%20b{n}.bias | width",
    }


def test_the_shape_of_a_scalar_is_named_as_it_is():
    with pytest.raises(InputError, match=r"torch's t \(\) and flax's beta \(\);"):
        match({"beta": ()}, {"t": ()}, layouts=[])
    assert [str(pair) for pair in match({"qkv": ()}, {"qkv": ()}).pairs] == ["qkv | 1  <->  qkv | 1"]


def test_a_parameter_that_only_one_side_ties_is_named():
    flax, torch = {"emb/embedding": (20, 8), "head/kernel": (8, 20)}, {"emb.weight": (20, 8)}
    evidence = PairEvidence(tied={"head.weight": "emb.weight"})
    message = r"^torch ties head.weight with emb.weight, and flax has head/kernel \(8, 20\) of its own: tie the two in flax"
    with pytest.raises(InputError, match=message):
        match(flax, torch, evidence=evidence)
    with pytest.raises(InputError, match=r"^no counterpart by name and shape for flax's scale \(8,\)"):
        match({"emb/embedding": (20, 8), "scale": (8,)}, torch, evidence=evidence)
    line = "head/kernel | in out <-> head.weight | out in"
    with pytest.raises(InputError, match=r"torch has head\.weight as emb\.weight, which is the same tensor"):
        match(flax, torch, layouts=[line], evidence=evidence)


def test_a_parameter_that_only_flax_ties_is_named():
    evidence = PairEvidence(axes={"emb.weight": Axes("row width"), "head.weight": Axes("out in")})
    message = r"^torch has head\.weight \(20, 8\) of its own, .* if flax uses emb/embedding for both, tie the two in torch"
    with pytest.raises(InputError, match=message):
        match({"emb/embedding": (20, 8)}, {"emb.weight": (20, 8), "head.weight": (20, 8)}, evidence=evidence)
    with pytest.raises(InputError, match=r"^no counterpart by name and shape for torch's head\.weight \(10, 8\)"):
        match({"emb/embedding": (20, 8)}, {"emb.weight": (20, 8), "head.weight": (10, 8)}, evidence=evidence)


def block(prefix: str, separator: str, names: tuple[str, str], has_bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block with a norm and a layer, whose names in the framework are `names`."""
    weights = {f"{prefix}{separator}norm{separator}{name}": (8,) for name in (names[1], "bias")}
    layer = f"{prefix}{separator}fc{separator}"
    return weights | {f"{layer}{names[0]}": (8, 8)} | ({f"{layer}bias": (8,)} if has_bias else {})


@pytest.mark.parametrize(("flax", "torch"), [(2, 3), (3, 1)])
def test_another_number_of_blocks_is_named(flax, torch):
    ours = {key: shape for n in range(flax) for key, shape in block(f"layer_{n}", "/", ("kernel", "scale")).items()}
    theirs = {key: shape for n in range(torch) for key, shape in block(f"blocks.{n}", ".", ("weight", "weight")).items()}
    with pytest.raises(InputError, match=rf"^flax has {flax} of layer_\{{n\}}, and torch {torch} of blocks\.\{{n\}}: give"):
        match(ours | {"head/kernel": (8, 5)}, theirs | {"head.weight": (5, 8)})


def test_a_bias_that_one_side_lacks_is_named():
    ours = block("layer_0", "/", ("kernel", "scale"), has_bias=False) | block("layer_1", "/", ("kernel", "scale"))
    theirs = {key: shape for n in range(2) for key, shape in block(f"blocks.{n}", ".", ("weight", "weight")).items()}
    line = "0 <-> blocks.0.fc.bias | width"
    message = r"^blocks\.0\.fc\.bias \(8,\) has no counterpart in flax, where layer_0/fc/kernel \(8, 8\) has no bias: add"
    with pytest.raises(InputError, match=rf"{message}.* '0 <-> blocks\.0\.fc\.bias \| width' in layouts"):
        match(ours, theirs)
    pairs = [str(pair) for pair in match(ours, theirs, layouts=[line]).pairs]
    assert "layer_{n}/fc/kernel | in out  <->  blocks.{n}.fc.weight | out in" in pairs


@pytest.mark.parametrize(
    "names", [("gamma", "beta"), ("g", "b"), ("w", "b"), ("weight", "b"), ("scale", "shift"), ("scale", "offset")]
)
@pytest.mark.parametrize("module", ["", "norm"])
def test_parameters_of_the_same_names_are_matched(module, names):
    flax = {f"{module}/{name}".lstrip("/"): (4,) for name in names}
    torch = {f"{module}.{name}".lstrip("."): (4,) for name in names}
    found = match({**flax, **dense("fc", 4, 2)}, {**torch, **dense("fc", 4, 2, flax=False)})
    assert {pair.flax.key.replace("/", "."): pair.torch.key for pair in found.pairs}.items() >= {
        (key, key) for key in torch
    }


def test_the_layers_of_haiku_are_matched():
    flax = {"layer_norm/scale": (4,), "layer_norm/offset": (4,), "linear/w": (4, 2), "linear/b": (2,)}
    found = match(flax, {**norm("ln", flax=False), **dense("fc", 4, 2, flax=False)})
    assert dict(found.keys()) == dict(zip(flax, ["ln.weight", "ln.bias", "fc.weight", "fc.bias"], strict=True))


@pytest.mark.parametrize(
    ("flax", "torch"),
    [
        ("query", "q_proj"),
        ("query", "wq"),
        ("value", "v_proj"),
        ("out", "o_proj"),
        ("attention", "self_attn"),
        ("MultiHeadDotProductAttention", "attn"),
        ("LayerNorm", "ln"),
        ("Dense", "linear"),
    ],
)
def test_different_spellings_of_a_word_match(flax, torch):
    others = {"first": "x", "second": "y"}
    left = {f"{name}/kernel": (4, 4) for name in (flax, *others)}
    right = {f"{name}.weight": (4, 4) for name in ("first", "second", torch)}
    assert lines(match(left, right))[f"{flax}/kernel | in out"] == f"{torch}.weight | out in"


def test_numbers_give_an_order_even_if_they_start_differently_and_skip_numbers():
    flax = dense("Dense_0", 4, 4) | dense("Dense_1", 4, 4) | dense("Dense_10", 4, 4)
    torch = dense("1", 4, 4, False) | dense("3", 4, 4, False) | dense("11", 4, 4, False)
    found = lines(match(flax, torch))
    assert [found[f"Dense_{n}/kernel | in out"] for n in (0, 1, 10)] == [f"{n}.weight | out in" for n in (1, 3, 11)]


def test_shapes_decide_where_names_do_not():
    found = lines(match(dense("a", 4, 6) | dense("b", 6, 4), dense("x", 6, 4, False) | dense("y", 4, 6, False)))
    assert found["a/kernel | in out"] == "y.weight | out in" and found["b/kernel | in out"] == "x.weight | out in"


def test_a_matrix_is_matched_transposed_if_both_ways_fit():
    flax = {"Dense_0/kernel": (4, 6), "Dense_1/kernel": (6, 4)}  # numbered in another order than torch's
    found = lines(match(flax, {"fc1.weight": (4, 6), "fc2.weight": (6, 4)}))
    assert found["Dense_1/kernel | in out"] == "fc1.weight | out in"


def test_names_decide_where_shapes_do_not():
    flax = {f"attn/{name}/kernel": (6, 2, 3) for name in ("key", "query", "value")}
    torch = {f"self_attn.{name}_proj.weight": (6, 6) for name in "qvk"}
    found = lines(match(flax, torch))
    assert found["attn/query/kernel | in head dim"] == "self_attn.q_proj.weight | (head dim) in"
    assert found["attn/value/kernel | in head dim"] == "self_attn.v_proj.weight | (head dim) in"


def test_a_fused_query_key_and_value_of_torch_matches_three_parameters():
    flax = {f"attn/{name}/kernel": (6, 2, 3) for name in ("key", "query", "value")}
    found = match(flax, {"attn.in_proj_weight": (18, 6)})
    assert lines(found)["attn/value/kernel | in head dim"] == "attn.in_proj_weight | (qkv=2 head dim) in"
    arrays = noise(flax)
    fused = np.concatenate([arrays[f"attn/{name}/kernel"].reshape(6, 6).T for name in ("query", "key", "value")])
    np.testing.assert_array_equal(found.to_torch(arrays)["attn.in_proj_weight"], fused)


def test_a_fused_matrix_that_torch_multiplies_from_the_right_is_split_by_columns():
    flax = {f"attn/{name}/kernel": (6, 2, 3) for name in ("key", "query", "value")}
    found = match(flax, {"attn.c_attn.weight": (6, 18)})
    assert lines(found)["attn/key/kernel | in head dim"] == "attn.c_attn.weight | in (qkv=1 head dim)"


def test_blocks_of_different_shapes_get_separate_lines():
    flax = {f"block_{n}/Conv_{m}/kernel": (3, 3, 2 if n == m == 0 else 4, 4) for n in range(2) for m in range(2)}
    torch = {f"layers.{n}.conv{m + 1}.weight": (4, 2 if n == m == 0 else 4, 3, 3) for n in range(2) for m in range(2)}
    found = lines(match(flax, torch))
    assert found["block_0/Conv_0/kernel | y x in out"] == "layers.0.conv1.weight | out in y x"
    assert found["block_1/Conv_0/kernel | y x in out"] == "layers.1.conv1.weight | out in y x"


def test_a_fused_query_key_and_value_of_flax_matches_three_parameters():
    flax = {"attn/qkv/kernel": (6, 3, 2, 3), "attn/qkv/bias": (3, 2, 3)}
    torch = {f"attn.{name}.{leaf}": shape for name in "qkv" for leaf, shape in (("weight", (6, 6)), ("bias", (6,)))}
    found, arrays = match(flax, torch), noise(flax)
    assert lines(found)["attn/qkv/kernel | in qkv=1 head dim"] == "attn.k.weight | (head dim) in"
    np.testing.assert_array_equal(found.to_torch(arrays)["attn.v.bias"], arrays["attn/qkv/bias"][2].reshape(6))


def test_stacked_blocks_match_numbered_modules():
    flax = {"blocks/fc/kernel": (3, 4, 5), "blocks/fc/bias": (3, 5)}
    torch = {key: shape for n in range(3) for key, shape in dense(f"layers.{n}.fc", 4, 5, False).items()}
    found, arrays = match(flax, torch), noise(flax)
    assert [str(pair) for pair in found.pairs] == [
        "blocks/fc/kernel | block in out  <->  layers.{block}.fc.weight | out in",
        "blocks/fc/bias | block width  <->  layers.{block}.fc.bias | width",
    ]
    np.testing.assert_array_equal(found.to_torch(arrays)["layers.2.fc.weight"], arrays["blocks/fc/kernel"][2].T)


def test_running_statistics_match_those_in_the_batch_stats_collection():
    flax = {"bn/scale": (4,), "bn/bias": (4,), "batch_stats/bn/mean": (4,), "batch_stats/bn/var": (4,)}
    torch = {f"norm.{leaf}": (4,) for leaf in ("weight", "bias", "running_mean", "running_var")}
    assert lines(match(flax, torch))["batch_stats/bn/var | width"] == "norm.running_var | width"


def test_running_statistics_of_a_function_with_the_names_of_torch_are_matched():
    names = ("bias", "running_mean", "running_var")
    flax = {f"n/{name}": (4,) for name in ("scale", *names)}
    torch = {f"n.{name}": (4,) for name in ("weight", *names)}
    assert dict(match(flax, torch).keys()) == {f"n/{name}": f"n.{name}" for name in names} | {"n/scale": "n.weight"}


def test_a_weight_that_is_computed_beside_a_bias_is_refused_or_matched_by_a_line():
    flax = {"c/kernel": (8, 4), "c/bias": (4,), "c/u": (4,)}
    torch = {"c.parametrizations.weight.original": (4, 8), "c.bias": (4,), "c.parametrizations.weight.0._u": (4,)}
    with pytest.raises(InputError, match=r"^no counterpart for torch's c.parametrizations.weight.original, from which the"):
        match(flax, torch)
    line = "c/kernel | in out <-> c.parametrizations.weight.original | out in"
    keys = match(flax, torch, layouts=[line]).keys()
    assert dict(keys) == dict(zip(flax, torch, strict=True))


@pytest.mark.parametrize("names", small_models())
def test_the_mapping_of_the_twins_equals_that_of_their_formats(names):
    config = small_models()[names]
    declared = [get(format).layouts(config) for format in ("jax", "torch")]
    sizes = config.sizes
    shapes = [{key: row.shape(sizes) for row in column.values() for key in row.keys(sizes)} for column in declared]
    mapping = match(*shapes)
    entries = {key: np.arange(np.prod(shape)).reshape(shape) for key, shape in shapes[0].items()}
    converted = mapping.to_torch(entries)
    for parameter, source in declared[0].items():
        target = declared[1][parameter]
        for key, indices in target.indexed_keys(sizes, {}):
            axes = [axis.parameter_axis for axis in target.array_axes]
            expected = source.view(entries[source.key], sizes, indices, axes)
            np.testing.assert_array_equal(converted[key], expected.reshape(target.shape(sizes)), err_msg=key)


# Conversion ---------------------------------------------------------------------------------------------------------


def test_a_round_trip_is_exact_to_the_bit():
    flax = {f"layer_{n}/attn/{name}/kernel": (6, 2, 3) for n in range(2) for name in ("key", "query", "value")}
    found = match(flax, {f"layers.{n}.attn.in_proj_weight": (18, 6) for n in range(2)})
    arrays = noise(flax)
    back = found.to_flax(found.to_torch(arrays))
    assert back.keys() == arrays.keys() and all(np.array_equal(back[key], arrays[key]) for key in arrays)


def test_scalars_and_single_outputs_are_converted():
    flax = {"scale": (), "head/kernel": (4, 1), "head/bias": (1,)}
    torch = {"s": (), "head.weight": (1, 4), "head.bias": (1,)}
    converted = match(flax, torch).to_torch(noise(flax))
    assert converted["s"] == noise(flax)["scale"] and {key: array.shape for key, array in converted.items()} == torch


# Notes and text -----------------------------------------------------------------------------------------------------


def test_a_square_kernel_is_marked_as_matched_by_convention():
    [pair] = match({"d/kernel": (4, 4)}, {"d.weight": (4, 4)}).pairs
    assert str(pair.torch) == "d.weight | out in" and pair.note.startswith("by convention: square")


def test_a_match_by_the_order_of_numbers_alone_is_marked():
    found = match(norm("LayerNorm_0") | norm("LayerNorm_1"), norm("norm1", False) | norm("norm2", False))
    assert [pair.note for pair in found.pairs] == ["by order"] * 4
    numbered = match(norm("norm1") | norm("norm2"), norm("norm1", False) | norm("norm2", False))
    assert not any(pair.note for pair in numbered.pairs)


def test_a_kernel_that_is_not_square_has_no_note():
    [pair] = match({"d/kernel": (4, 3)}, {"d.weight": (3, 4)}).pairs
    assert not pair.note


def test_printed_lines_can_be_given_as_layouts():
    flax = {f"layer_{n}/attn/{name}/kernel": (6, 2, 3) for n in range(2) for name in ("key", "query", "value")}
    torch = {f"layers.{n}.attn.in_proj_weight": (18, 6) for n in range(2)}
    found = match(flax, torch)
    assert match(flax, torch, layouts=[str(pair) for pair in found.pairs]).pairs == tuple(
        Pair(pair.flax, pair.torch, pair.sizes) for pair in found.pairs
    )


def test_a_buffer_without_a_counterpart_is_listed():
    found = match(dense("d", 3, 4), dense("d", 3, 4, False) | {"mask": (5, 5)}, optional={"mask"})
    assert "mask: a buffer or frozen parameter without a counterpart" in str(found)


# Refusals, and layouts that resolve ambiguity -----------------------------------------------------------------------

LEFT = {key: shape for n in range(2) for name in "ab" for key, shape in norm(f"block_{n}/{name}").items()}
RIGHT = {key: shape for n in range(2) for name in "xy" for key, shape in norm(f"layers.{n}.{name}", False).items()}


def test_ambiguous_parameters_are_refused_with_the_candidates_and_a_line_that_selects_one():
    with pytest.raises(InputError) as error:
        match(LEFT, RIGHT)
    message = str(error.value)
    assert "layers.0.x.weight (4,)" in message and "block_0/a/scale (4,)" in message and "block_0/b/scale (4,)" in message
    assert "such as 'block_0/a/scale | width <-> layers.0.x.weight | width'" in message and "\n" not in message


def test_a_line_for_one_parameter_decides_its_module_and_the_other_candidate():
    found = match(LEFT, RIGHT, layouts=["block_{n}/b/scale | width <-> layers.{n}.x.weight | width"])
    assert {str(pair) for pair in found.pairs} >= {
        "block_{n}/b/scale | width  <->  layers.{n}.x.weight | width",
        "block_{n}/b/bias | width  <->  layers.{n}.x.bias | width",
        "block_{n}/a/bias | width  <->  layers.{n}.y.bias | width",
    }


def test_a_line_overrides_the_convention():
    line = "d/kernel | in out <-> d.weight | in out"
    [pair] = match({"d/kernel": (4, 4)}, {"d.weight": (4, 4)}, layouts=[line]).pairs
    assert str(pair.torch) == "d.weight | in out"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("d/kernel | in out", "write it as `flax key | axes <-> torch key | axes`"),
        ("d/kernel | in out <-> d.weight | out", "both sides must have the same axes"),
        ("d/kernels | in out <-> d.weight | out in", "flax has no d/kernels; did you mean 'd/kernel'"),
        ("d/kernel | in out <-> d.weigh | out in", "torch has no d.weigh; did you mean 'd.weight'"),
        ("d/kernel | out in <-> d.weight | out in", "do not fit d/kernel (3, 4) and d.weight (4, 3)"),
        ("d/kernel | in out a <-> d.weight | out in a", "flax's d/kernel has shape (3, 4), not 3 dimensions"),
        ("d/kernel | (a b) out <-> d.weight | out (b a)", "the shapes do not determine the lengths of a, b"),
        ("d/kernel | in out <-> d.weight | (z=4 out) in", "do not fit d/kernel (3, 4) and d.weight (4, 3)"),
        ("d/kernel | in out <-> d.weight | (-z=4 out) in", "only a whole axis of an array can be reversed, not z"),
        ("d/kernel | in <-> 0", "flax's d/kernel has shape (3, 4), not 1 dimensions"),
        ("0 <-> d.weigh | out in", "torch has no d.weigh; did you mean 'd.weight'"),
    ],
)
def test_a_wrong_line_is_refused_and_quoted(line, message):
    with pytest.raises(InputError) as error:
        match({"d/kernel": (3, 4)}, {"d.weight": (4, 3)}, layouts=[line])
    assert line in str(error.value) and message in str(error.value)


def test_lines_that_overlap_are_refused():
    lines = ["a/kernel | in out <-> d.weight | out in", "b/kernel | in out <-> d.weight | out in"]
    with pytest.raises(InputError, match=r"another line also covers entries of d\.weight"):
        match({"a/kernel": (3, 4), "b/kernel": (3, 4)}, {"d.weight": (4, 3)}, layouts=lines)


def test_an_array_that_a_line_covers_only_in_part_is_refused():
    with pytest.raises(InputError, match=r"no counterpart .* torch's d\.weight"):
        match({"q/kernel": (3, 4)}, {"d.weight": (8, 3)}, layouts=["q/kernel | in out <-> d.weight | (qk=0 out) in"])


def test_parameters_without_a_counterpart_are_refused_by_name():
    with pytest.raises(InputError, match=r"no counterpart .* torch's y\.weight \(6, 3\).* flax's x/kernel \(3, 5\)"):
        match({"x/kernel": (3, 5)}, {"y.weight": (6, 3)})


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 2)])
def test_an_array_of_many_axes_is_matched(shape):
    """Such as the weight of a Conv3d of Equinox, or the complex weight of a Fourier layer as two numbers."""
    [pair] = match({"c/weight": shape}, {"c.weight": shape}).pairs
    assert str(pair.flax).partition("| ")[2] == str(pair.torch).partition("| ")[2]


def test_a_line_can_reverse_axes():
    shapes = {"up/kernel": (2, 3, 5, 4)}, {"up.weight": (5, 4, 2, 3)}
    line = "up/kernel | -y -x in out <-> up.weight | in out y x"
    mapping = match(*shapes, layouts=[line])
    assert " ".join(str(mapping.pairs[0]).split()) == line
    kernel = np.random.default_rng(0).normal(size=shapes[0]["up/kernel"])
    torch = mapping.to_torch({"up/kernel": kernel})
    np.testing.assert_array_equal(torch["up.weight"], kernel[::-1, ::-1].transpose(2, 3, 0, 1))
    np.testing.assert_array_equal(mapping.to_flax(torch)["up/kernel"], kernel)
    both = match(*shapes, layouts=["up/kernel | -y x in out <-> up.weight | in out -y -x"])
    assert both.pairs[0].reversed_axes == ("x",)


def test_order_of_use_decides_before_names_if_the_evidence_says_so():
    flax = norm("input_norm") | norm("second")
    torch = norm("input_layernorm", flax=False) | norm("post_input_norm", flax=False)
    keys = ["input_norm/scale", "second/scale"], ["post_input_norm.weight", "input_layernorm.weight"]
    by_name = dict(match(flax, torch, evidence=PairEvidence(keys)).keys())
    assert by_name["input_norm/scale"] == "input_layernorm.weight"
    mapping = match(flax, torch, evidence=PairEvidence(keys, uses_first=True))
    assert dict(mapping.keys())["input_norm/scale"] == "post_input_norm.weight"
    assert all("by order of use" in pair.note for pair in mapping.pairs)


# Names with the same words.
ALIKE = [("norm", "norm2"), ("norm", "ln"), ("proj", "out_proj"), ("fc", "fc2"), ("mlp", "ffn"), ("w", "w2")]


@pytest.mark.parametrize("names", ALIKE)
@pytest.mark.parametrize(
    ("of_flax", "of_torch"),
    [
        ("{}", "{}"),
        ("layers_{n}/{}", "layers.{n}.{}"),
        ("Encoder_0/{}", "net.encoder.{}"),
        ("block_{n}/{}", "layers.{n}.{}"),
    ],
)
def test_the_same_name_decides_before_the_order_of_use_where_all_have_the_same_words(of_flax, of_torch, names):
    flax = [f"{of_flax.format(name, n=n)}/scale" for n in range(2) for name in names]
    torch = [f"{of_torch.format(name, n=n)}.weight" for n in range(2) for name in names]
    shapes = [dict.fromkeys(keys, (4,)) for keys in (flax, torch)]
    uses = [*dict.fromkeys(flax)], [*dict.fromkeys(torch)][::-1]
    mapping = match(*shapes, evidence=PairEvidence(uses))
    assert dict(mapping.keys()) == dict(zip(flax, torch, strict=True))
    by_use = match(*shapes, evidence=PairEvidence(uses, uses_first=True))
    assert by_use.contradicts_names(mapping)


@pytest.mark.parametrize(
    ("flax_names", "torch_names", "is_contradiction"),
    [
        (("query_ln", "key_ln"), ("q_norm", "k_norm"), True),
        (("qn", "kn"), ("norm_q", "norm_k"), True),
        (("query/norm", "key/norm"), ("q.norm", "k.norm"), True),
        (("gate", "up"), ("gate_proj", "up_proj"), True),
        (("gate_dense", "up_dense"), ("proj_gate", "proj_up"), True),
        (("norm_attn", "norm_mlp"), ("norm_input", "norm_post_attn"), False),  # "post" is a word of one side alone
        (("proj", "down"), ("up", "out"), False),  # only "proj" and "out" sound alike
        (("linear", "lin"), ("fc", "dense"), False),  # all have the same words
    ],
)
def test_order_of_use_contradicts_names_that_words_decide(flax_names, torch_names, is_contradiction):
    keys = [[f"attn/{name}/scale" for name in flax_names], [f"attn.{name}.weight" for name in torch_names]]
    shapes = [{key: (4,) for key in several} for several in keys]
    lines = [f"{a} | width <-> {b} | width" for a, b in zip(keys[0], reversed(keys[1]), strict=True)]
    other, by_names = match(*shapes, layouts=lines), match(*shapes, evidence=PairEvidence((keys[0], keys[1])))
    pairs = list(zip(keys[0], reversed(keys[1]), strict=True))
    assert other.contradicts_names(by_names) == (pairs if is_contradiction else [])


@pytest.mark.parametrize(
    ("flax_names", "is_contradiction"), [(("bias_ih", "bias_hh"), True), (("of_input", "of_state"), False)]
)
def test_order_of_use_contradicts_names_without_the_layer_that_torch_adds(flax_names, is_contradiction):
    torch = ("gru.bias_ih_l0", "gru.bias_hh_l0")

    def mapping(keys):
        layouts = [f"{a} | width <-> {b} | width" for a, b in zip(flax_names, keys, strict=True)]
        return match(dict.fromkeys(flax_names, (4,)), dict.fromkeys(torch, (4,)), layouts=layouts)

    pairs = list(zip(flax_names, reversed(torch), strict=True))
    contradicting = mapping(reversed(torch)).contradicts_names(mapping(torch))
    assert contradicting == (pairs if is_contradiction else [])


def test_order_of_use_keeps_to_the_blocks_that_names_have_matched():
    """Block 1 of flax runs after block 2; its norms, which no name matches, belong to its own kernels."""
    flax, torch = {}, {}
    for n in range(3):
        flax |= {f"h/{n}/attn/query/kernel": (4, 6), f"h/{n}/ln1/scale": (4,), f"h/{n}/ln2/scale": (4,)}
        torch |= {
            f"layers.{n}.attn.q.weight": (6, 4),
            f"layers.{n}.pre_norm.weight": (4,),
            f"layers.{n}.last_norm.weight": (4,),
        }
    uses = [f"h/{n}/{name}/scale" for n in (0, 2, 1) for name in ("ln1", "ln2")]
    other = [f"layers.{n}.{name}_norm.weight" for n in range(3) for name in ("pre", "last")]
    keys = dict(match(flax, torch, evidence=PairEvidence((uses, other))).keys())
    assert {a: b for a, b in keys.items() if "ln" in a} == {
        f"h/{n}/ln{m}/scale": f"layers.{n}.{name}_norm.weight" for n in range(3) for m, name in ((1, "pre"), (2, "last"))
    }


def test_blocks_that_have_other_parts_are_matched_by_the_order_of_use():
    """The second norm is in block 0 of flax, and in block 1 of torch."""
    flax = {f"h/{n}/attn/query/kernel": (4, 6) for n in range(2)} | {"h/0/ln1/scale": (4,), "h/0/ln2/scale": (4,)}
    torch = {f"layers.{n}.attn.q.weight": (6, 4) for n in range(2)}
    torch |= {"layers.0.first_norm.weight": (4,), "layers.1.second_norm.weight": (4,)}
    uses = (["h/0/ln1/scale", "h/0/ln2/scale"], ["layers.0.first_norm.weight", "layers.1.second_norm.weight"])
    keys = dict(match(flax, torch, evidence=PairEvidence(uses)).keys())
    assert keys["h/0/ln1/scale"] == "layers.0.first_norm.weight"
    assert keys["h/0/ln2/scale"] == "layers.1.second_norm.weight"


def test_a_model_that_does_not_use_all_parameters_is_matched_in_the_order_of_their_declaration():
    flax, torch = norm("a") | norm("b"), norm("x", flax=False) | norm("y", flax=False)
    mapping = match(flax, torch, evidence=PairEvidence((["b/scale", "a/scale"], ["x.weight", "y.weight"])))
    assert dict(mapping.keys())["b/scale"] == "x.weight"
    mapping = match(flax, torch, evidence=PairEvidence((["b/scale"], ["x.weight", "y.weight"])))
    assert dict(mapping.keys())["b/scale"] == "y.weight"
    mapping = match(flax, torch, evidence=PairEvidence((["b/scale"], ["x.weight"])))
    assert dict(mapping.keys())["b/scale"] == "x.weight"


def test_a_fused_query_key_and_value_with_more_words_is_split():
    flax = {f"attention/{name}/kernel": (8, 8) for name in ("query", "key", "value")}
    mapping = match(flax, {"attn.attention_qkv.weight": (24, 8)})
    assert [str(pair.torch) for pair in mapping.pairs][1] == "attn.attention_qkv.weight | (qkv=1 out) in"


def test_the_class_of_a_transposed_convolution_reverses_its_kernel():
    evidence = PairEvidence(axes={"up.weight": Axes("in out")})
    [pair] = match({"up/kernel": (2, 2, 3, 4)}, {"up.weight": (3, 4, 2, 2)}, evidence=evidence).pairs
    assert pair.flax_line == "up/kernel | -y -x in out" and not pair.note
    [pair] = match({"up/kernel": (2, 2, 4, 3)}, {"up.weight": (3, 4, 2, 2)}, evidence=evidence).pairs
    assert pair.flax_line == "up/kernel | y x in out" and not pair.note  # with transpose_kernel=True
    [pair] = match({"up/kernel": (2, 2, 4, 4)}, {"up.weight": (4, 4, 2, 2)}, evidence=evidence).pairs
    assert pair.flax_line == "up/kernel | -y -x in out" and "as many channels in as out" in pair.note


def test_lines_hold_parameters_at_zero():
    flax = {"cell/i/bias": (3,), "cell/n/bias": (3,), "key/bias": (2,)}
    lines = [
        "cell/i/bias | dim <-> bias_i | (gate=0 dim)",
        "cell/n/bias | dim <-> bias_i | (gate=1 dim)",
        "0 <-> bias_h | (gate=1 dim:3)",
        "key/bias | width <-> 0",
        "0 <-> bias_h | (gate=0 dim:3)",
    ]
    mapping = match(flax, {"bias_i": (6,), "bias_h": (6,)}, layouts=lines)
    assert "key/bias | width  <->  0" in str(mapping)
    arrays = {"cell/i/bias": np.ones(3), "cell/n/bias": np.full(3, 2.0), "key/bias": np.zeros(2)}
    torch = mapping.to_torch(arrays)
    np.testing.assert_array_equal(torch["bias_i"], [1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(torch["bias_h"], np.zeros(6))
    np.testing.assert_equal(mapping.to_flax(torch), arrays)
    with pytest.raises(InputError, match=r"no counterpart .* torch's bias_h"):
        match(flax, {"bias_i": (6,), "bias_h": (6,)}, layouts=[lines[0], lines[1], lines[2], lines[3]])


def test_two_parameters_of_one_module_with_the_same_role_are_both_matched():
    flax = {"norm/scale": (3,), "norm/weight": (5,)}
    mapping = match(flax, {"norm.scale": (3,), "norm.weight": (5,)})
    assert {(a, b) for pair in mapping.pairs for a, b, *_ in pair.arrays()} == {
        ("norm/scale", "norm.scale"),
        ("norm/weight", "norm.weight"),
    }


def test_lengths_in_a_line_give_the_order_inside_a_patch():
    line = "embed/kernel | (c:3 y:2 x:4) out <-> embed.weight | out (y x c)"
    pair = Pair.parse(line, {"embed/kernel": (24, 5)}, {"embed.weight": (5, 24)})
    assert (pair.sizes["c"], pair.sizes["y"], pair.sizes["x"], pair.sizes["out"]) == (3, 2, 4, 5)
    [found] = match({"embed/kernel": (24, 5)}, {"embed.weight": (5, 24)}, layouts=[line]).pairs
    flax = np.arange(120.0).reshape(24, 5)
    torch = match({"embed/kernel": (24, 5)}, {"embed.weight": (5, 24)}, layouts=[line]).to_torch({"embed/kernel": flax})
    np.testing.assert_array_equal(torch["embed.weight"], flax.reshape(3, 2, 4, 5).transpose(3, 1, 2, 0).reshape(5, 24))
    assert found.sizes == pair.sizes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "k | (c y) out <-> w | out (y c)",
            "do not determine the lengths of c, y; write each length after its axis, as in c:4",
        ),
        ("k | (c:2 y) out <-> w | out (y c:3)", "c has the lengths 2 and 3"),
        ("k | (c:2 y) out <-> w | out (y c:2) ", ""),
        ("k | (c:5 y) out <-> w | out (y c)", "do not fit"),
    ],
)
def test_wrong_lengths_are_refused(line, message):
    shapes = {"k": (24, 5)}, {"w": (5, 24)}
    if not message:
        assert Pair.parse(line, *shapes).sizes["y"] == 12
        return
    with pytest.raises(InputError, match=message):
        Pair.parse(line, *shapes)


SEPARATE = {f"attn/{name}/kernel": (6, 2, 3) for name in ("query", "key", "value")}
FUSED = {
    "kv": {"attn.to_q.weight": (6, 6), "attn.to_kv.weight": (12, 6)},
    "qkv": {"attn.to_qkv.weight": (18, 6)},
    "separate": {f"attn.to_{name}.weight": (6, 6) for name in "qkv"},
}


@pytest.mark.parametrize("kind", FUSED)
def test_queries_keys_and_values_match_however_they_are_fused(kind):
    found = lines(match(SEPARATE, FUSED[kind]))
    expected = {"kv": "to_kv.weight | (kv=1 head dim) in", "qkv": "to_qkv.weight | (qkv=2 head dim) in"}
    assert found["attn/value/kernel | in head dim"] == f"attn.{expected.get(kind, 'to_v.weight | (head dim) in')}"


def test_a_fused_kernel_of_flax_matches_a_partly_fused_one():
    found = match({"attn/qkv/kernel": (6, 18)}, FUSED["kv"])
    flax = np.arange(108.0).reshape(6, 18)
    torch = found.to_torch({"attn/qkv/kernel": flax})
    np.testing.assert_array_equal(torch["attn.to_q.weight"], flax[:, :6].T)
    np.testing.assert_array_equal(torch["attn.to_kv.weight"], flax[:, 6:].T)


def test_gates_in_separate_arrays_match_stacked_ones_by_lines():
    flax = {f"cell/i{gate}/kernel": (3, 4) for gate in "ifgo"}
    given = [f"cell/i{gate}/kernel | in width <-> lstm.weight_ih_l0 | (gate={n} width) in" for n, gate in enumerate("ifgo")]
    found = match(flax, {"lstm.weight_ih_l0": (16, 3)}, layouts=given)
    arrays = {key: np.full((3, 4), n, float) for n, key in enumerate(flax)}
    torch = found.to_torch(arrays)["lstm.weight_ih_l0"]
    np.testing.assert_array_equal(torch[::4, 0], np.arange(4.0))


def test_lines_that_differ_in_a_part_of_an_axis_are_not_folded():
    flax = {f"layer_{n}/{name}/bias": (2, 3) for n, name in enumerate(("query", "key", "value"))}
    found = match(flax, {"layer.qkv.bias": (18,)})
    assert len(found.pairs) == 3 and "{n}" not in str(found)


def test_the_short_names_of_models_written_as_functions_match():
    found = lines(match({"fc/w": (3, 4), "fc/b": (4,)}, {"fc.weight": (4, 3), "fc.bias": (4,)}))
    assert found == {"fc/w | in out": "fc.weight | out in", "fc/b | width": "fc.bias | width"}


TWO_LAYERS = {"fc1.weight": (96, 64), "fc1.bias": (96,), "fc2.weight": (10, 96), "fc2.bias": (10,)}


@pytest.mark.parametrize(
    "keys",
    [
        ("w1", "b1", "w2", "b2"),
        ("W1", "B1", "W2", "B2"),
        ("fc1_kernel", "fc1_bias", "fc2_kernel", "fc2_bias"),
        tuple(TWO_LAYERS),
        ("hidden_w", "hidden_b", "out_w", "out_b"),
        ("0/0", "0/1", "1/0", "1/1"),
        ("l1/W", "l1/b", "l2/W", "l2/b"),
    ],
    ids=" ".join,
)
def test_names_of_functions_are_split(keys: tuple[str, ...]) -> None:
    flax = dict(zip(keys, [(64, 96), (96,), (96, 10), (10,)], strict=True))
    uses = (list(keys), list(TWO_LAYERS))
    mapping = match(flax, TWO_LAYERS, evidence=PairEvidence(uses, splits_names=True))
    assert dict(mapping.keys()) == dict(zip(keys, TWO_LAYERS, strict=True))


def test_a_refusal_quotes_a_line_with_the_keys() -> None:
    with pytest.raises(InputError, match=r"such as 'mix \| a b <-> net.weight \| b a' if that is right"):
        match({"mix": (3, 5), "b": (7,)}, {"net.weight": (5, 3), "net.bias": (5,)})
