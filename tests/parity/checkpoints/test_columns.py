"""Parameters that a format stores in pieces, or as a grid: reading, writing, and conversion from any way to any other."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints import formats, surgery
from parity.checkpoints.columns import Piece, align, row_column
from parity.checkpoints.conversion import converted_arrays, parameter
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.inspection import list_parameters
from parity.checkpoints.layout import Layout
from parity.checkpoints.weights import Checkpoint
from parity.comparison import reproducible_init
from vit_spec import InputError, ViTConfig

CONFIG = ViTConfig(
    image_size=(24, 40), patch_size=(8, 8), width=48, depth=3, num_heads=3, mlp_dim=80, num_classes=5
).replace(positions={"covers": "none"})
LARGE = vit_spec.get("vit_s16").replace(depth=2, positions={"covers": "none"})

QKV = "blocks.attn.qkv.weight"

# Ways to store queries, keys and values -> the lines of the table, where w stands for the parameter.
WAYS = {
    "one": ("w | blocks.{block}.all | (qkv head dim) width",),
    "last": ("w | blocks.{block}.all | width (head dim qkv)",),
    "stacked": ("w | all | block qkv head dim width",),
    "numbered": ("w | blocks.{block}.h{head+1}.m{qkv+1} | dim width",),
    "named": ("w | blocks.{block}.{qkv}.w | (head dim) width",),
    "q kv": ("w[qkv=0] | blocks.{block}.q | (head dim) width", "w[qkv=1:kv] | blocks.{block}.kv | width (kv head dim)"),
    "qk v": ("w[qkv=0:kv] | blocks.{block}.qk | (head kv dim) width", "w[qkv=2] | blocks.{block}.v | head dim width"),
    "kv first": (
        "w[qkv=1:kv] | blocks.{block}.{kv}.w | (head dim) width",
        "w[qkv=0] | q.{block} | width (head dim)",
    ),
    "packed": ("w[qkv=0] | all | block qkv=0 head dim width", "w[qkv=1:kv] | all | block qkv=1:kv head dim width"),
    "apart": tuple(f"w[qkv={n}] | {key}.{{block}} | head dim width" for n, key in enumerate("xyz")),
}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """Forget the formats that a test registers."""
    with formats.registered():
        yield


def define(lines: dict[str, tuple[str, ...]], config: ViTConfig = CONFIG) -> str:
    """Define a format like the twin's with other lines for some parameters, which these call w; return its name."""
    table = []
    for name, layout in formats.get("torch").layouts(config).items():
        table += [f"{name}{line[1:]}" for line in lines.get(name, (f"w | {layout}",))]
    words = {"{qkv}": "words: qkv = query key value", "{kv}": "words: kv = k v"}
    text = ["name: own", f"set: num_heads={config.num_heads}", *table]
    text += [line for axis, line in words.items() if axis in "".join(table)]
    format = parse_format("\n".join(text), "own.txt")
    formats.register(format)
    return formats.add_version(format)


def torch_weights(config: ViTConfig = CONFIG) -> Checkpoint:
    """Return random weights in the twin's format."""
    return converted(reproducible_init.weights(config, 0), "torch")


def converted(checkpoint: Checkpoint, to: str) -> Checkpoint:
    """Return a checkpoint in another format."""
    return Checkpoint(checkpoint.config, to, dict(converted_arrays(checkpoint, to)))


def is_equal(first: Checkpoint, second: Checkpoint) -> bool:
    """Return whether two checkpoints have the same keys and bits."""
    arrays = [{key: np.asarray(array) for key, array in each.arrays.items()} for each in (first, second)]
    return arrays[0].keys() == arrays[1].keys() and all(np.array_equal(arrays[0][key], arrays[1][key]) for key in arrays[0])


def qkv_of(arrays: dict[str, np.ndarray], way: str, block: int) -> np.ndarray:
    """Return (qkv, head, dim, width) of a block, taken from the arrays of one of `WAYS` by hand."""
    h, w, a = CONFIG.num_heads, CONFIG.width, arrays
    d, b = w // h, block
    ways: dict[str, Callable[[], np.ndarray]] = {
        "one": lambda: a[f"blocks.{b}.all"].reshape(3, h, d, w),
        "last": lambda: a[f"blocks.{b}.all"].reshape(w, h, d, 3).transpose(3, 1, 2, 0),
        "stacked": lambda: a["all"][b],
        "numbered": lambda: np.array([[a[f"blocks.{b}.h{n}.m{m}"] for n in (1, 2, 3)] for m in (1, 2, 3)]),
        "named": lambda: np.array([a[f"blocks.{b}.{n}.w"].reshape(h, d, w) for n in ("query", "key", "value")]),
        "q kv": lambda: np.array([a[f"blocks.{b}.q"].reshape(h, d, w), *a[f"blocks.{b}.kv"].T.reshape(2, h, d, w)]),
        "qk v": lambda: np.array([*a[f"blocks.{b}.qk"].reshape(h, 2, d, w).transpose(1, 0, 2, 3), a[f"blocks.{b}.v"]]),
        "kv first": lambda: np.array(
            [each.reshape(h, d, w) for each in (a[f"q.{b}"].T, a[f"blocks.{b}.k.w"], a[f"blocks.{b}.v.w"])]
        ),
        "packed": lambda: a["all"][b],
        "apart": lambda: np.array([a[f"{n}.{b}"] for n in "xyz"]),
    }
    return ways[way]()


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_store_queries_keys_and_values_is_written_as_its_table_says(way: str) -> None:
    weights = torch_weights()
    stored = converted(weights, define({QKV: WAYS[way]}))
    for block, expected in enumerate(parameter(weights, QKV)):
        assert np.array_equal(qkv_of(dict(stored.arrays), way, block), expected)
    assert np.array_equal(parameter(stored, QKV), parameter(weights, QKV))
    assert is_equal(converted(stored, "torch"), weights)


@pytest.mark.parametrize(("first", "second"), list(product(WAYS, WAYS)))
def test_any_way_is_converted_to_any_other_without_loss(first: str, second: str) -> None:
    weights = torch_weights()
    one = converted(weights, define({QKV: WAYS[first]}))
    with formats.registered():
        other = define({QKV: WAYS[second]})
        assert is_equal(converted(one, other), converted(weights, other))


@pytest.mark.parametrize("config", [CONFIG, LARGE], ids=["small", "vit_s16"])
def test_a_file_in_pieces_is_recognised_and_read_and_written_bit_for_bit(tmp_path: Path, config: ViTConfig) -> None:
    bias = ("w[qkv=0] | blocks.{block}.q.bias | (head dim)", "w[qkv=1:kv] | blocks.{block}.kv.bias | (kv head dim)")
    gate = ("w[glu=1] | blocks.{block}.up.weight | ff width", "w[glu=0] | blocks.{block}.gate.weight | width ff")
    config = config.replace(mlp={"activation": "swiglu", "bias": False})
    own = define({QKV: WAYS["q kv"], "blocks.attn.qkv.bias": bias, "blocks.mlp.fc1.weight": gate}, config)
    weights = torch_weights(config)
    theirs = dict(converted(weights, own).arrays)
    qkv = np.asarray(weights.arrays["blocks.1.attn.qkv.weight"])
    assert np.array_equal(theirs["blocks.1.kv"].T, qkv[config.width :])
    assert np.array_equal(
        theirs["blocks.1.up.weight"], np.asarray(weights.arrays["blocks.1.mlp.fc1.weight"])[config.mlp_dim :]
    )
    save_file({key: np.ascontiguousarray(array) for key, array in theirs.items()}, tmp_path / "own.safetensors")
    found = parity.load(tmp_path / "own.safetensors", given={"image_size": config.image_size})
    assert found.config.replace(pixels=config.pixels) == config
    assert is_equal(converted(found, "torch"), weights)
    parity.write(found, tmp_path / "again.safetensors", own)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == theirs.keys()
    assert all(np.array_equal(again[key], theirs[key]) for key in again)
    pair = {each.name: each for each in list_parameters(found)}[f"{QKV}[qkv=1:kv]"]
    assert (pair.entries, pair.arrays) == (2 * config.depth * config.width**2, config.depth)


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    theirs = dict(converted(torch_weights(), define({QKV: WAYS["q kv"]})).arrays)
    del theirs["blocks.2.kv"]
    save_file(theirs, tmp_path / "own.safetensors")
    with pytest.raises(InputError, match=r"missing blocks\.2\.kv"):
        parity.load(tmp_path / "own.safetensors")


def test_pieces_of_different_dtypes_are_refused() -> None:
    checkpoint = converted(torch_weights(), define({QKV: WAYS["q kv"]}))
    arrays = {key: array.astype(np.float16) if key.endswith("kv") else array for key, array in checkpoint.arrays.items()}
    with pytest.raises(InputError, match="kv is float16 and float32, expected one of them"):
        converted(Checkpoint(CONFIG, checkpoint.format, arrays), "torch")


def test_surgery_changes_parameters_in_pieces() -> None:
    bias = ("w[qkv=0] | blocks.{block}.q.bias | (head dim)", "w[qkv=1:kv] | blocks.{block}.kv.bias | (kv head dim)")
    own = define({"blocks.attn.qkv.bias": bias})
    stored = converted(torch_weights(), own)
    dropped, _ = surgery.drop_key_bias(stored)
    again, _ = surgery.add_key_bias(dropped)
    assert dropped.format == "torch"  # the table has no line for the bias of queries and values alone
    assert np.array_equal(again.arrays["blocks.0.attn.qkv.bias"][: CONFIG.width], stored.arrays["blocks.0.q.bias"])


# A grid of positions --------------------------------------------------------------------------------------------------

GRID = ("w | grid | 1 row column width",)
GRID_FIRST = ("w | grid | width row column",)


@pytest.mark.parametrize("lines", [GRID, GRID_FIRST], ids=["last", "first"])
def test_positions_are_stored_as_a_grid(tmp_path: Path, lines: tuple[str]) -> None:
    weights, own = torch_weights(), define({"pos_embed": lines})
    stored = converted(weights, own)
    rows = np.asarray(weights.arrays["pos_embed"])[0].reshape(3, 5, CONFIG.width)
    assert np.array_equal(stored.arrays["grid"], rows[None] if lines == GRID else rows.transpose(2, 0, 1))
    assert is_equal(converted(stored, "torch"), weights)
    save_file({key: np.ascontiguousarray(each) for key, each in stored.arrays.items()}, tmp_path / "own.safetensors")
    found = parity.load(tmp_path / "own.safetensors")
    assert found.config.replace(pixels=CONFIG.pixels) == CONFIG  # the shape shows the image size
    assert "image_size" not in {each.field for each in found.assumed}


def test_a_grid_has_no_place_for_prefix_tokens() -> None:
    own, config = define({"pos_embed": GRID}), CONFIG.replace(positions={"covers": "all"})
    with pytest.raises(InputError, match="stores pos_embed as a grid, which has no place for prefix tokens"):
        converted(torch_weights(config), own)


def test_positions_in_a_grid_are_resized() -> None:
    weights = torch_weights()
    stored = converted(weights, define({"pos_embed": GRID}))
    grown = [surgery.apply(each, {"image_size": (32, 48)})[0] for each in (weights, stored)]
    assert grown[1].arrays["grid"].shape == (1, 4, 6, CONFIG.width)
    assert is_equal(converted(grown[1], "torch"), grown[0])


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (WAYS["q kv"][:1], "write a line for each of the 3 indices of qkv, once"),
        ((*WAYS["q kv"], "w[qkv=1] | k.{block} | (head dim) width"), "write a line for each of the 3 indices of qkv, once"),
        ((*WAYS["one"], *WAYS["q kv"]), "divide one axis, or none"),
        (("w[qkv=2:kv] | a.{block} | (kv head dim) width",), r"w.*\[qkv=2:kv\] is beyond the end of qkv"),
        (("w[qkv=0 | a.{block} | (head dim) width",), "is not a parameter: write its name, name"),
        (("w[head=0] | a.{block} | (qkv dim) width",), "head is not one of qkv, kv, glu, xy, yx"),
        (("w[qkv=0:q] | a.{block} | (q head dim) width",), "q is not one of qkv, kv, glu, xy, yx"),
        (("w[glu=0] | a.{block} | (head dim) width",), "has the axes block dim head qkv width, and not glu"),
        (("w[qkv=0] | a.{block} | (qkv head dim) width",), "has the axes block dim head width, but the line has"),
        (("w[qkv=0]? | a.{block} | (head dim) width", WAYS["q kv"][1]), "has a [?], but .* has none"),
    ],
)
def test_a_mistake_in_pieces_is_one_line(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        define({QKV: lines})
    assert "\n" not in str(raised.value)
    assert "own.txt" in str(raised.value)


def test_a_piece_and_its_text() -> None:
    for text in ("pos_embed", "blocks.attn.qkv.weight[qkv=0]", "blocks.attn.qkv.weight[qkv=1:kv]"):
        assert str(Piece.parse(text)) == text


def test_columns_are_aligned_in_the_order_of_the_target() -> None:
    target = {QKV: Layout.parse("{block} | qkv head dim width"), "norm.weight": Layout.parse("n | width")}
    found = align(row_column(CONFIG), target)
    assert [list(column) for column in found] == [list(target), list(target)]
