"""Formats that users define in a file: reading, writing, round trips, and one line for every mistake."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.__main__ import main
from parity.checkpoints import format_file, formats, ignored_keys
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.format_file import parse_format, read_format
from parity.checkpoints.format_text import format_text
from parity.checkpoints.formats.definition import digest
from parity.checkpoints.sidecar import sidecar_path
from parity.checkpoints.weights import Checkpoint
from parity.comparison import reproducible_init
from tests.parity.checkpoints.test_conversions import NAMES, storable_configs
from vit_spec import InputError, ViTConfig

# The heads of each block are apart, and so are their queries, keys and values; patches have their channels last.
APART = """
# The ViT of a laboratory.
name: lab
description: one array for each head
set: norms.eps=1e-5
set: mlp.activation=relu
words: qkv = q k v
strip: net.trunk.
ignore: criterion[.].*   weights of the classes in the loss

cls_token               | token                                          | width
pos_embed               | positions                                      | token width
patch_embed.proj.weight | to_patches.w                                   | width (ph pw rgb)
patch_embed.proj.bias   | to_patches.b                                   | width
blocks.norm1.weight     | layers.{block+1}.before.g                      | width
blocks.norm1.bias       | layers.{block+1}.before.b                      | width
blocks.attn.qkv.weight  | layers.{block+1}.heads.{head}.{qkv}.w          | width dim
blocks.attn.qkv.bias    | layers.{block+1}.heads.{head}.{qkv}.b          | dim
blocks.attn.proj.weight | layers.{block+1}.merge.w                       | (head dim) width
blocks.attn.proj.bias   | layers.{block+1}.merge.b                       | width
blocks.norm2.weight     | layers.{block+1}.between.g                     | width
blocks.norm2.bias       | layers.{block+1}.between.b                     | width
blocks.mlp.fc1.weight   | layers.{block+1}.up.w                          | width ff
blocks.mlp.fc1.bias     | layers.{block+1}.up.b                          | ff
blocks.mlp.fc2.weight   | layers.{block+1}.down.w                        | ff width
blocks.mlp.fc2.bias     | layers.{block+1}.down.b                        | width
norm.weight             | last.g                                         | width
norm.bias               | last.b                                         | width
head.weight?            | classes.w                                      | feature label
head.bias?              | classes.b                                      | label
"""
NORMS, MLP = {"eps": 1e-5}, {"activation": "relu"}
CONFIG = ViTConfig(
    image_size=(24, 40), patch_size=(4, 8), width=36, depth=3, num_heads=3, mlp_dim=20, num_classes=5
).replace(norms=NORMS, mlp=MLP)
LARGE = vit_spec.get("vit_s16", image_size=(64, 96), num_classes=11, norms=NORMS, mlp=MLP)  # 12 blocks of width 384


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """Forget the formats that a test registers."""
    with formats.registered():
        yield


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "lab.txt").write_text(APART)
    return tmp_path / "lab.txt"


def write_table(tmp_path: Path, text: str) -> Path:
    (tmp_path / "other.txt").write_text(text)
    return tmp_path / "other.txt"


def arrays_of(config: ViTConfig, format: str = "torch") -> dict[str, np.ndarray]:
    """Return random weights of a config in a format."""
    return dict(converted_arrays(reproducible_init.weights(config, 0), format))


def foreign_arrays(config: ViTConfig) -> dict[str, np.ndarray]:
    """Return the arrays that the laboratory's own program would save, made without the table."""
    mine, (ph, pw), c = arrays_of(config), config.patch_size, config.in_channels
    heads, dim, width = config.num_heads, config.head_dim, config.width
    patches = mine["patch_embed.proj.weight"].reshape(width, c, ph, pw).transpose(0, 2, 3, 1)
    out = {
        "token": mine["cls_token"][0, 0],
        "positions": mine["pos_embed"][0],
        "to_patches.w": patches.reshape(width, ph * pw * c),
        "to_patches.b": mine["patch_embed.proj.bias"],
        "last.g": mine["norm.weight"],
        "last.b": mine["norm.bias"],
        "classes.w": mine["head.weight"].T,
        "classes.b": mine["head.bias"],
    }
    for n in range(config.depth):
        block, other = f"blocks.{n}.", f"layers.{n + 1}."
        qkv = mine[f"{block}attn.qkv.weight"].reshape(3, heads, dim, width)
        bias = mine[f"{block}attn.qkv.bias"].reshape(3, heads, dim)
        for head in range(heads):
            for index, word in enumerate("qkv"):
                out[f"{other}heads.{head}.{word}.w"] = qkv[index, head].T
                out[f"{other}heads.{head}.{word}.b"] = bias[index, head]
        out |= {f"{other}before.{leaf[0]}": mine[f"{block}norm1.{name}"] for leaf, name in (("g", "weight"), ("b", "bias"))}
        out |= {
            f"{other}between.{leaf[0]}": mine[f"{block}norm2.{name}"] for leaf, name in (("g", "weight"), ("b", "bias"))
        }
        for word, name in (("merge", "attn.proj"), ("up", "mlp.fc1"), ("down", "mlp.fc2")):
            out |= {f"{other}{word}.w": mine[f"{block}{name}.weight"].T, f"{other}{word}.b": mine[f"{block}{name}.bias"]}
    return {key: np.ascontiguousarray(array) for key, array in out.items()}


def save(path: Path, arrays: dict[str, np.ndarray], prefix: str = "", **others: np.ndarray) -> Path:
    save_file({**{prefix + key: array for key, array in arrays.items()}, **others}, path)
    return path


def is_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    """Return whether two dictionaries have the same keys and bits."""
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


GIVEN = {"image_size": CONFIG.image_size, "patch_size": CONFIG.patch_size}


# Reading and writing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, LARGE], ids=["small", "vit_s16"])
def test_a_file_of_another_program_is_read_and_written_bit_for_bit(tmp_path: Path, table: Path, config: ViTConfig) -> None:
    foreign = foreign_arrays(config)
    assert parity.register_format(table) == "lab"
    given = {"image_size": config.image_size, "patch_size": config.patch_size}
    found = parity.load(save(tmp_path / "theirs.safetensors", foreign), given=given)
    assert found.format.partition("@")[0] == "lab"
    assert found.config == config
    assert is_equal(dict(converted_arrays(found, "torch")), arrays_of(config))
    assert parity.write(found, tmp_path / "again.safetensors", "lab").format == found.format
    assert is_equal(load_file(tmp_path / "again.safetensors"), foreign)


def test_the_table_is_preferred_to_formats_that_fit_too(tmp_path: Path) -> None:
    text = format_text(formats.get("torch")).replace("my_torch", "ours") + "set: norms.eps=1e-3\nset: num_heads=3\n"
    parity.register_format(write_table(tmp_path, text))
    found = parity.load(save(tmp_path / "a.safetensors", arrays_of(CONFIG)), given=GIVEN)
    assert (found.format.partition("@")[0], found.config.norms.eps) == ("ours", 1e-3)


def test_wrappers_of_the_table_are_removed_and_its_ignored_keys_reported(tmp_path: Path, table: Path) -> None:
    loss = {"model.criterion.weight": np.ones((5, 5), np.float32)}
    path = save(tmp_path / "a.safetensors", foreign_arrays(CONFIG), "model.net.trunk.", **loss)
    with pytest.raises(InputError):
        parity.load(path, given=GIVEN)
    parity.register_format(table)
    found = parity.load(path, given=GIVEN)
    assert found.left == ("model.criterion.weight: weights of the classes in the loss",)
    assert is_equal(dict(converted_arrays(found, "torch")), arrays_of(CONFIG))
    with pytest.raises(InputError, match=r"unexpected model\.other\.weight"):
        parity.load(save(path, foreign_arrays(CONFIG), "model.net.trunk.", **{"model.other.weight": np.ones(3)}))


def test_a_constant_of_the_table_must_have_its_values(tmp_path: Path, table: Path) -> None:
    mask = np.tril(np.ones((3, 3), np.float32))
    table.write_text(APART + f"constant: layers[.]\\d+[.]mask {digest(mask)} a mask that the class makes\n")
    parity.register_format(table)
    arrays = foreign_arrays(CONFIG) | {f"layers.{n}.mask": mask.copy() for n in (1, 2, 3)}
    found = parity.load(save(tmp_path / "a.safetensors", arrays), given=GIVEN)
    assert found.left == ("layers.1.mask and 2 more: a mask that the class makes",)
    for changed in (mask.T.copy(), mask.astype(np.float64), mask.reshape(1, 9)):
        arrays["layers.2.mask"] = changed
        with pytest.raises(InputError, match=r"layers\.2\.mask is a constant for \S+lab\.txt, but has other values"):
            parity.load(save(tmp_path / "a.safetensors", arrays), given=GIVEN)


def test_the_wrapper_of_one_table_is_no_wrapper_for_other_formats(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    with pytest.raises(InputError, match=r"--strip net\.trunk\. reads the model"):
        parity.load(save(tmp_path / "a.safetensors", arrays_of(CONFIG), "net.trunk."))


def test_fields_of_the_table_are_known_and_the_rest_is_assumed(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    path = save(tmp_path / "a.safetensors", foreign_arrays(CONFIG))
    assumed = {each.field for each in parity.load(path, given=GIVEN).assumed}
    assert not assumed & {"norms.eps", "mlp.activation", "num_heads", "head.num_heads"}
    assert {"head.pool", "norms.order", "residual connections", "further operations"} <= assumed


def test_a_proven_table_assumes_nothing_about_the_behaviour(tmp_path: Path, table: Path) -> None:
    table.write_text(APART + "proven: against models:Lab, relRMS 1e-15 in float64\n")
    parity.register_format(table)
    found = parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), given=GIVEN)
    assert "residual connections" not in {each.field for each in found.assumed}


def test_fields_with_several_numbers_are_known(tmp_path: Path, table: Path) -> None:
    table.write_text(
        APART + "set: image_size=24x40\nset: patch_size=4x8\nset: pixels.mean=(0.1, 0.2, 0.3)\nset: pixels.std=(0.5,)\n"
    )
    parity.register_format(table)
    found = parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)))
    assert found.config == CONFIG.replace(pixels={"mean": (0.1, 0.2, 0.3), "std": (0.5,)})
    parity.write(found, tmp_path / "b.safetensors", "lab")
    with pytest.raises(InputError, match=r"cannot store pixels.mean=\(0.5,\), only \(0.1, 0.2, 0.3\)"):
        parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "c.safetensors", "lab")


def test_a_contradiction_between_table_and_tensors_is_refused(tmp_path: Path, table: Path) -> None:
    table.write_text(APART + "set: num_classes=10\n")
    parity.register_format(table)
    with pytest.raises(InputError, match=r"lab\.txt sets num_classes=10, but the tensors show 5: correct it"):
        parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), given=GIVEN)


def test_a_field_of_a_table_that_does_not_fit_the_tensors_is_refused_with_its_line(tmp_path: Path, table: Path) -> None:
    table.write_text(APART.replace("set: mlp", "set: in_channels=4\nset: mlp"))
    parity.register_format(table)
    problem = "4 channels of patches of 4x4 are 64 values, the projection takes 96: "
    remedy = r"correct .*lab\.txt:6, which sets in_channels=4, or give --set patch_size=HxW"
    with pytest.raises(InputError, match=f"{problem}{remedy}$"):
        parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), given={"num_heads": 3})


def test_a_contradiction_between_table_and_command_is_refused(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    with pytest.raises(InputError, match=r"lab\.txt sets norms.eps=1e-05, but --set gives 1e-06: correct one of them"):
        parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), given={**GIVEN, "norms.eps": 1e-6})


def test_an_activation_that_contradicts_a_gated_mlp_is_refused(tmp_path: Path, table: Path) -> None:
    gated = APART.replace(".up.w                          | width ff", ".up.{glu}.w | width ff").replace(
        ".up.b                          | ff", ".up.{glu}.b | ff"
    )
    table.write_text(gated.replace("relu", "swiglu"))
    with formats.registered(read_format(table)):
        config = CONFIG.replace(mlp={"activation": "swiglu"})
        arrays = {key: np.array(array) for key, array in arrays_of(config, "lab").items()}
        assumed = parity.load(save(tmp_path / "a.safetensors", arrays), given=GIVEN).assumed
        assert [each.value for each in assumed if each.field == "MLP gate"] == ["SiLU of glu=0"]
    table.write_text(gated)
    parity.register_format(table)
    with pytest.raises(InputError, match=r"lab\.txt sets mlp.activation='relu', but the tensors show 'swiglu'"):
        parity.load(save(tmp_path / "a.safetensors", arrays), given=GIVEN)


@pytest.mark.parametrize("key", ["layers.2.heads.1.k.w", "layers.1.heads.0.q.b", "last.g", "token"])
def test_a_missing_key_is_named(tmp_path: Path, table: Path, key: str) -> None:
    parity.register_format(table)
    arrays = foreign_arrays(CONFIG)
    del arrays[key]
    with pytest.raises(InputError, match=f"missing {re.escape(key)}"):
        parity.load(save(tmp_path / "a.safetensors", arrays), format="lab", given=GIVEN)


def test_a_line_that_no_key_meets_is_named_with_its_place(tmp_path: Path, table: Path) -> None:
    table.write_text(APART.replace("last.g ", "final.g"))
    parity.register_format(table)
    with pytest.raises(InputError, match=r"missing final\.g \(\S+lab\.txt:27\); unexpected last\.g"):
        parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), format="lab", given=GIVEN)


def test_a_second_layer_that_no_key_meets_is_named_with_its_place(tmp_path: Path) -> None:
    own = write_table(tmp_path, APART.replace("down.w", "donw.w"))
    with pytest.raises(InputError, match=r"missing layers.{block\+1}.donw.w .*other.txt:25.*unexpected layers.1.down.w"):
        parity.load(save(tmp_path / "own.safetensors", foreign_arrays(CONFIG)), format=parity.register_format(own))


def test_channels_that_a_table_calls_rows_are_refused(tmp_path: Path) -> None:
    config = LARGE.replace(num_classes=0)
    own = write_table(tmp_path, format_text(formats.get("torch")).replace("width rgb ph pw", "width ph pw rgb"))
    path = save(tmp_path / "own.safetensors", arrays_of(config))
    with pytest.raises(InputError, match=r"16 channels of 3x16 pixels, or 3 channels of 16x16 .* correct the table"):
        parity.load(path, format=parity.register_format(own))


def test_arrays_without_entries_are_reported(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    path = save(tmp_path / "own.safetensors", foreign_arrays(CONFIG), unused=np.zeros((0, 3), np.float32))
    assert any("unused: without entries" in line for line in parity.load(path, given=GIVEN).left)


def test_a_projection_that_no_key_meets_is_named_with_its_place(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    with pytest.raises(InputError, match=r"no key to_patches\.w \(\S+lab\.txt:13\) among"):
        parity.load(save(tmp_path / "a.safetensors", arrays_of(CONFIG)), format="lab")


def test_a_parameter_that_may_be_absent_is_left_out(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    arrays = {key: array for key, array in foreign_arrays(CONFIG).items() if not key.startswith("classes")}
    assert parity.load(save(tmp_path / "a.safetensors", arrays), given=GIVEN).config.num_classes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"norms": {"eps": 1e-6}},
            r"cannot store norms\.eps=1e-06, only 1e-05: choose another format \(timm, .*\), or change \S+lab\.txt",
        ),
        ({"tokens": {"registers": 2}}, r"has no key for reg_token"),
        ({"attention": {"qkv_bias": "none"}}, r"needs blocks\.attn\.qkv\.bias \(\S+lab\.txt:18\), which the model lacks"),
    ],
)
def test_a_model_that_the_table_cannot_express_is_not_written(
    tmp_path: Path, table: Path, change: dict[str, Any], message: str
) -> None:
    parity.register_format(table)
    weights = reproducible_init.weights(CONFIG.replace(**change), 0)
    with pytest.raises(InputError, match=message):
        parity.write(weights, tmp_path / "a.safetensors", "lab")
    assert not (tmp_path / "a.safetensors").exists()


def test_heads_from_one_in_a_key_before_the_block_are_counted(tmp_path: Path) -> None:
    text = APART.replace("layers.{block+1}.heads.{head}.{qkv}", "h{head+1}.{qkv}.{block}")
    parity.register_format(write_table(tmp_path, text))
    written = tmp_path / "a.safetensors"
    parity.write(reproducible_init.weights(CONFIG, 0), written, "lab")
    arrays = load_file(written)
    assert "h3.v.2.w" in arrays
    found = parity.load(save(tmp_path / "bare.safetensors", arrays), given=GIVEN)
    assert found.config == CONFIG
    assert is_equal(dict(converted_arrays(found, "torch")), arrays_of(CONFIG))


def test_a_config_json_of_another_model_beside_the_weights_is_not_obeyed(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lab", "hidden_size": 36}))
    found = parity.load(save(tmp_path / "model.safetensors", foreign_arrays(CONFIG)), format="lab", given=GIVEN)
    assert "config.json: format lab has no such file" in found.left


# Files that are written in a format of a user -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own.safetensors", "own.npz", "own.msgpack"])
def test_a_written_file_is_read_without_the_table(tmp_path: Path, table: Path, name: str) -> None:
    with formats.registered(read_format(table)):
        parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / name, "lab")
    found = parity.load(tmp_path / name)
    assert found.config == CONFIG and is_equal(dict(converted_arrays(found, "torch")), arrays_of(CONFIG))
    assert "lab" not in formats.formats()  # it is not tried on other files


def test_a_written_file_keeps_its_table_when_the_table_changes(tmp_path: Path, table: Path) -> None:
    """With (dim head) for (head dim) every shape is the same, and every head is wrong."""
    parity.register_format(table)
    parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "a.safetensors", "lab")
    before = parity.load(tmp_path / "a.safetensors")
    table.write_text(APART.replace("(head dim) width", "(dim head) width"))
    parity.register_format(table)
    for found in (before, parity.load(tmp_path / "a.safetensors"), parity.load(tmp_path / "a.safetensors", format="lab")):
        assert is_equal(dict(converted_arrays(found, "torch")), arrays_of(CONFIG))
    other = parity.load(save(tmp_path / "bare.safetensors", load_file(tmp_path / "a.safetensors")), given=GIVEN)
    assert not is_equal(dict(converted_arrays(other, "torch")), arrays_of(CONFIG))


def test_a_written_file_without_its_table_is_refused(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "a.msgpack", "lab")
    sidecar = sidecar_path(tmp_path / "a.msgpack")
    notes = json.loads(sidecar.read_text())
    for entry in notes.values():
        del entry["format_table"]
        entry["format"] = "lab@00000000"
    sidecar.write_text(json.dumps(notes))
    with pytest.raises(InputError, match="unknown version 00000000 of format 'lab': give its table with --format-file"):
        parity.load(tmp_path / "a.msgpack")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (APART.replace("1e-5", "1e-4"), r"its metadata names the format 'lab@\w+', but has the table of 'lab@\w+'"),
        ("name: timm\n" + APART.split("\n\n")[-1], "'timm' is the name of a built-in format"),
        (APART.replace("eps=1e-5", "epss=1"), r"its metadata entry format_table:5: set: norms.epss is not a field"),
        ("#\n" * 1_000_000, "its metadata entry format_table has more than 1,048,576 characters"),
    ],
)
def test_a_hostile_table_in_a_file_is_refused(tmp_path: Path, table: Path, stored: str, message: str) -> None:
    parity.register_format(table)
    parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "a.msgpack", "lab")
    sidecar = sidecar_path(tmp_path / "a.msgpack")
    notes = json.loads(sidecar.read_text())
    for entry in notes.values():
        entry["format_table"] = stored
    sidecar.write_text(json.dumps(notes))
    with pytest.raises(InputError, match=message):
        parity.load(tmp_path / "a.msgpack")


# Built-in formats as files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_format_as_a_file_has_the_same_layouts(name: str) -> None:
    text = format_text(formats.get(name))
    fields = [line for line in text.splitlines() if line.startswith("set:")]
    plain = parse_format("\n".join(line for line in text.splitlines() if line not in fields), "a.txt")
    parse_format(text, "a.txt")
    assert storable_configs(name)
    for config in storable_configs(name):
        expected = formats.get(name).layouts(config)
        found = plain.layouts(config)
        assert {each: str(layout) for each, layout in found.items()} == {each: str(expected[each]) for each in expected}
        assert [layout.keys(config.sizes) for layout in found.values()] == [
            each.keys(config.sizes) for each in expected.values()
        ]


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_format_as_a_file_reads_the_same_weights(tmp_path: Path, name: str) -> None:
    format = parse_format(format_text(formats.get(name)), "a.txt")
    for config in storable_configs(name)[:2]:
        arrays = {key: np.ascontiguousarray(array) for key, array in arrays_of(config, name).items()}
        fields = ("image_size", "patch_size", "in_channels", "num_heads", "norms.order")
        given = {each: config.at(each) for each in fields if each not in format.definition.fields}
        expected = parity.load(save(tmp_path / "a.safetensors", arrays), format=name, given=given)
        with formats.registered(format):
            found = parity.load(tmp_path / "a.safetensors", format=format.name, given=given)
            assert is_equal(dict(converted_arrays(found, "torch")), dict(converted_arrays(expected, "torch")))


def test_a_format_of_a_user_as_a_file_is_the_same_format(table: Path) -> None:
    format = read_format(table)
    again = parse_format(format_text(format), "again.txt")
    assert format.definition and again.definition
    assert again.definition.table == format.definition.table
    assert (again.definition.wrappers, again.definition.ignored) == (format.definition.wrappers, format.definition.ignored)


# Mistakes in a table --------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown axis": (
        ("| width (ph pw rgb)", "| widht (ph pw rgb)"),
        r"13: 'widht' is not an axis of a ViT; did you mean 'width'",
    ),
    "axis of another parameter": (
        ("| width (ph pw rgb)", "| width (ph pw head)"),
        r"13: patch_embed.proj.weight has the axes",
    ),
    "missing axis": (
        ("{head}.{qkv}.b ", "{head}.b       "),
        r"18: blocks.attn.qkv.bias has the axes block dim head qkv, but",
    ),
    "unknown parameter": (
        ("norm.weight   ", "normm.weight  "),
        r"no ViT has a parameter 'normm.weight'; did you mean 'norm.wei",
    ),
    "unknown word": (("words:", "word:"), r":7: unknown word 'word:'; did you mean 'words'"),
    "one bar": (("token        ", "token | cls  "), r":11: 'cls_token .*' is not `parameter \| key \| axes`"),
    "field": (("norms.eps=1e-5", "norms.epz=1e-5"), r":5: set: norms.epz is not a field of the config; did you mean"),
    "value": (("=relu", "=rleu"), r":6: mlp.activation is 'rleu': give one of"),
    "twice": (("set: mlp", "set: norm_eps=1e-6\nset: mlp"), r":6: norms.eps is set twice: leave one of the lines out"),
    "words twice": (("strip:", "words: qkv = a b c\nstrip:"), r":8: a second line with words for qkv"),
    "ignored twice": (("ignore:", "ignore: criterion[.].* x\nignore:"), r":10: a second line for criterion"),
    "expression": (("criterion[.].*  ", "criterion[.*  "), r":9: 'criterion\[\.\*' is not a regular expression"),
    "whole axis": (
        ("| token width", "| token=1:token width"),
        r":12: .*token=\{index\}:token is all of the axis: write token",
    ),
    "empty segment": (("| feature label", "| [~() feature] label"), r":29: .*write \[segments\]"),
    "control character": (("# The ViT", "# The\x0cset: norms.eps=1"), r":2: the character '\\x0c' has no place in a line"),
    "bidirectional": (("one array", "one \u202earray"), r":4: the character '\\u202e' has no place"),
    "same line": (
        ("last.g  ", "last.h | width\nnorm.weight | last.g "),
        r":28: a second line for norm.weight with the same axes",
    ),
    "no queries": (("blocks.attn.qkv.weight  |", "# |"), r"no line for blocks.attn.qkv.weight"),
    "large number": (("| dim\n", "| dim=99999999\n"), r":18: .*'dim=99999999' is not an axis"),
    "no value": (("norms.eps=1e-5", "norms.eps"), r":5: set: 'norms.eps' sets nothing"),
    "two words": (("q k v", "q k"), r":7: qkv needs 3 different words, but has 'q k'"),
    "words of heads": (("words: qkv", "words: head"), r":7: 'head = q k v': write it as `words: qkv = q k v`"),
    "no reason": (("criterion[.].*   weights of the classes in the loss", "criterion[.].*"), r":9: no reason"),
    "second name": (("description:", "name:"), r":4: a second line `name:`"),
    "empty": (("name: lab", "name:"), r":3: nothing follows `name:`"),
    "digest": (("ignore: criterion[.].*  ", "constant: a b"), r":9: 'b' is not a digest of 12 hexadecimal digits"),
    "bad name": (("name: lab", "name: l/b"), r"'l/b' is not a name of a format"),
    "built-in name": (("name: lab", "name: timm"), r"'timm' is the name of a built-in format"),
    "same key": (("last.b ", "last.g "), r":28: last.g is the key of norm.weight too, on line 27"),
    "braces": (("to_patches.w ", "to_{width}.w "), r":13: .*width appears more than once"),
    "projection in parts": (
        ("to_patches.w                                   | width (ph pw rgb)", "to_{rgb}.w | width (ph pw)"),
        r":13: the key of patch_embed.proj.weight has braces: it must be one array",
    ),
    "no projection": (("patch_embed.proj.weight |", "# |"), r"no line for patch_embed.proj.weight"),
    "long line": (("# The ViT", "# " + "x" * 3000), r":2: a line of more than 2000 characters"),
    "beyond": (
        ("norm.bias  ", "blocks.attn.q_bias | layers.{block+1}.x | (qkv=3 head dim)\nnorm.bias  "),
        r":28: qkv=3 is beyond the end of qkv, which has 3 indices",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_table_is_one_line_with_its_place(tmp_path: Path, mistake: str) -> None:
    (old, new), message = MISTAKES[mistake]
    assert old in APART
    path = write_table(tmp_path, APART.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        parity.register_format(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_that_does_not_exist_or_is_no_text_is_one_line(tmp_path: Path, table: Path) -> None:
    with pytest.raises(InputError, match=r"format file \S+ does not exist; did you mean 'lab.txt'"):
        parity.register_format(tmp_path / "lab.tx")
    with pytest.raises(InputError, match=r"is a folder: give the file of a format$"):
        parity.register_format(tmp_path)
    table.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        parity.register_format(table)
    table.write_bytes(b"#" * (format_file.MAX_BYTES + 1))
    with pytest.raises(InputError, match="has more than 1,048,576 bytes"):
        parity.register_format(table)


def fused(fc1: str, qkv: str) -> str:
    """Return a table in which one array has the first layer of the MLP and the queries, keys and values."""
    text = APART.replace("layers.{block+1}.up.w                          | width ff", f"layers.{{block+1}}.all.w | {fc1}")
    return text.replace("layers.{block+1}.heads.{head}.{qkv}.w          | width dim", f"layers.{{block+1}}.all.w | {qkv}")


@pytest.mark.parametrize(
    ("fc1", "qkv", "message"),
    [
        ("[ff ~(qkv head dim)] width", "[(qkv head dim) ~ff] width", r"the same entries of \S+ belong to two parameters"),
        ("[ff ~(qkv head dim)] width", "[~ff (qkv head dim)] width", ""),
        ("[ff ~(qkv head dim)] width", "[~ff (qkv head dim)] 1 width", r"the lines give the array \S+ different shapes"),
    ],
)
def test_parameters_that_share_an_array_do_not_share_entries(tmp_path: Path, fc1: str, qkv: str, message: str) -> None:
    parity.register_format(write_table(tmp_path, fused(fc1, qkv)))
    weights, target = reproducible_init.weights(CONFIG, 0), tmp_path / "a.safetensors"
    if message:
        with pytest.raises(InputError, match=rf"other\.txt:1\d and \S*other\.txt:2\d: {message}"):
            parity.write(weights, target, "lab")
        return
    parity.write(weights, target, "lab")
    assert is_equal(dict(converted_arrays(parity.load(target), "torch")), arrays_of(CONFIG))


def test_parts_that_overlap_only_in_models_of_some_sizes_are_refused(tmp_path: Path) -> None:
    """Two vectors of 36 entries, each of which leaves 4 entries to the other."""
    text = APART.replace(
        "layers.{block+1}.merge.b                       | width", "layers.{block+1}.both | [width ~(glu glu)]"
    )
    text = text.replace(
        "layers.{block+1}.between.b                     | width", "layers.{block+1}.both | [~(glu glu) width]"
    )
    parity.register_format(write_table(tmp_path, text))
    for width in (4, 36):  # of width 4, the vectors are adjacent
        config, target = CONFIG.replace(width=width, num_heads=1), tmp_path / f"{width}.safetensors"
        if width == 4:
            parity.write(reproducible_init.weights(config, 0), target, "lab")
            assert is_equal(dict(converted_arrays(parity.load(target), "torch")), arrays_of(config))
        else:
            with pytest.raises(
                InputError, match=r"the same entries of layers\.\{block\+1\}\.both belong to two parameters"
            ):
                parity.write(reproducible_init.weights(config, 0), target, "lab")
            assert not target.exists()


def test_a_part_that_is_longer_than_its_array_is_refused(tmp_path: Path) -> None:
    text = APART.replace("before.g                      | width", "before.g | ff=0:width")
    parity.register_format(write_table(tmp_path, text))
    with pytest.raises(InputError, match=r"other\.txt:15: ff=0:width ends at 36, beyond the 20 indices of ff"):
        parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "a.safetensors", "lab")


def test_fields_that_a_written_file_does_not_show_are_named(tmp_path: Path, table: Path) -> None:
    parity.register_format(table)
    weights = reproducible_init.weights(CONFIG.replace(attention={"scale": 0.1}, norms={"order": "post"}), 0)
    remarks = " ".join(parity.write(weights, tmp_path / "a.safetensors", "lab").remarks)
    assert "attention.scale=0.1 is only in our own metadata" in remarks and "norms.order='post'" in remarks
    [remark] = parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "b.safetensors", "lab").remarks
    assert remark == "patch_size=(4, 8) is only in our own metadata: other libraries must be given it"  # patches are flat


def test_two_tables_that_fit_are_an_assumption_and_of_one_name_an_error(tmp_path: Path, table: Path) -> None:
    """They differ in the order of the entries of a head, which no shape shows."""
    other = write_table(tmp_path, APART.replace("(head dim) width", "(dim head) width").replace("name: lab", "name: lab2"))
    path = save(tmp_path / "a.safetensors", foreign_arrays(CONFIG))
    with formats.registered(read_format(table), read_format(other)):
        found = parity.load(path, given=GIVEN)
        assert Assumption("format", "lab", "not lab2, which fits too: choose with --from") in found.assumed
        assert "format" not in {each.field for each in parity.load(path, format="lab2", given=GIVEN).assumed}
    other.write_text(other.read_text().replace("name: lab2", "name: lab"))
    with pytest.raises(InputError, match=r"other\.txt: another format file defines 'lab' too"):
        formats.registered(read_format(table), read_format(other)).__enter__()


@pytest.mark.parametrize("words", ["query key value", "q k raw_value"])
def test_keys_that_containers_change_are_refused(tmp_path: Path, words: str) -> None:
    text = (
        APART.replace("q k v", words)
        .replace(".", "/")
        .replace("layers/{block+1}/heads/{head}/{qkv}/w", "l/{block}/{head}/{qkv}")
    )
    lines = [line.replace("/", ".", line.partition("|")[0].count("/")) for line in text.splitlines()]
    text = "\n".join(lines).replace("norms/eps", "norms.eps").replace("mlp/activation", "mlp.activation")
    with pytest.raises(InputError, match=r"ends or begins like the names that NNX and Keras add"):
        parse_format(text.replace("strip: net/trunk/\n", "").replace("ignore: criterion[/]/*", "ignore: x"), "a.txt")


def test_patches_of_which_two_axes_are_merged_need_their_size(tmp_path: Path, table: Path) -> None:
    table.write_text(APART.replace("width (ph pw rgb)", "width (ph pw) rgb"))
    parity.register_format(table)
    arrays = foreign_arrays(CONFIG)
    arrays["to_patches.w"] = arrays["to_patches.w"].reshape(36, 32, 3)
    path = save(tmp_path / "a.safetensors", arrays)
    with pytest.raises(InputError, match="the tensors do not show in_channels and patch_size: give --set"):
        parity.load(path)
    found = parity.load(path, given={**GIVEN, "in_channels": 3})
    assert is_equal(dict(converted_arrays(found, "torch")), arrays_of(CONFIG))


def test_many_numbers_in_keys_take_little_time(tmp_path: Path) -> None:
    """Two numbers before that of the block were expanded to all pairs."""
    text = APART.replace(
        "layers.{block+1}.heads.{head}.{qkv}.w          | width dim", "q.{head}.{dim}.{block}.w | qkv width"
    )
    parity.register_format(write_table(tmp_path, text))
    arrays = foreign_arrays(CONFIG) | {f"q.{n}.{n}.0.w": np.ones((3, 36), np.float32) for n in range(2000)}
    with pytest.raises(InputError):
        parity.load(save(tmp_path / "a.safetensors", arrays), format="lab", given=GIVEN)


def test_a_table_begins_with_the_mark_of_its_encoding(table: Path) -> None:
    expected = read_format(table).definition
    table.write_bytes(b"\xef\xbb\xbf" + APART.replace("\n", "\r\n").encode())
    found = read_format(table).definition
    assert found and expected and found.table == expected.table


@pytest.mark.parametrize("is_zero", [True, False])
def test_entries_that_no_line_reads_must_be_zero(tmp_path: Path, is_zero: bool) -> None:
    """Queries and values have biases, and the array has room for one of the keys too."""
    text = APART.replace(
        "blocks.attn.qkv.bias    | layers.{block+1}.heads.{head}.{qkv}.b          | dim",
        "blocks.attn.q_bias | layers.{block+1}.qkv.b | (qkv=0 head dim)\n"
        "blocks.attn.v_bias | layers.{block+1}.qkv.b | (qkv=2 head dim)",
    )
    parity.register_format(write_table(tmp_path, text))
    config = CONFIG.replace(attention={"qkv_bias": "qv"})
    parity.write(reproducible_init.weights(config, 0), tmp_path / "a.safetensors", "lab")
    arrays = {key: array.copy() for key, array in load_file(tmp_path / "a.safetensors").items()}
    if not is_zero:
        arrays["layers.2.qkv.b"][config.width] = 1e-3
    path = save(tmp_path / "bare.safetensors", arrays)
    if is_zero:
        assert is_equal(dict(converted_arrays(parity.load(path, given=GIVEN), "torch")), arrays_of(config))
    else:
        with pytest.raises(
            InputError, match=r"layers\.2\.qkv\.b has entries other than zero that no line of the table reads"
        ):
            parity.load(path, given=GIVEN)


@pytest.mark.parametrize("key", ["h{block}{head}.{qkv}.w", "layers.{block}.up.w"])
def test_two_parameters_or_indices_do_not_have_the_same_key(tmp_path: Path, key: str) -> None:
    """Head 11 of block 1 and head 1 of block 11; the key of another line."""
    text = APART.replace("layers.{block+1}.heads.{head}.{qkv}.w ", f"{key} ")
    if "head" not in key:
        text = text.replace("| width dim", "| width (qkv head dim)")
    parity.register_format(write_table(tmp_path, text))
    config = CONFIG.replace(depth=12, num_heads=12)
    with pytest.raises(InputError, match=r"is the key (for two indices of h|of layers)"):
        parity.write(reproducible_init.weights(config, 0), tmp_path / "a.safetensors", "lab")
    assert not (tmp_path / "a.safetensors").exists()


def test_an_expression_that_takes_too_long_is_one_line(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_keys, "_MAX_SECONDS", 0.5)
    table.write_text(APART.replace("criterion[.].*  ", "(a*)*b"))
    parity.register_format(table)
    path = save(tmp_path / "a.safetensors", foreign_arrays(CONFIG), **{"a" * 40: np.ones(3, np.float32)})
    with pytest.raises(InputError, match=r"lab\.txt: ignore: '\(a\*\)\*b' takes more than 0\.5 s"):
        parity.load(path, given=GIVEN)


def test_a_table_that_ignores_its_own_parameter_is_refused(tmp_path: Path, table: Path) -> None:
    table.write_text(APART.replace("criterion[.].*", "last[.].*     "))
    parity.register_format(table)
    with pytest.raises(InputError, match=r"lab\.txt ignores last\.b, a parameter of its table: correct one of them"):
        parity.load(save(tmp_path / "a.safetensors", foreign_arrays(CONFIG)), given=GIVEN)


# The command line -----------------------------------------------------------------------------------------------------

SIZES = ("--set", "image_size=24x40", "patch_size=4x8", "num_heads=3")


def test_the_commands_take_a_table_in_both_directions(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(tmp_path / "theirs.safetensors", foreign_arrays(CONFIG))
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.safetensors"
    with_table = ("--format-file", str(table))
    assert main(["convert", str(theirs), str(ours), "--to", "torch", *with_table, *SIZES]) == 0
    assert main(["convert", str(ours), str(back), "--to", "lab", *with_table]) == 0
    assert is_equal(load_file(back), foreign_arrays(CONFIG))
    assert main(["inspect", str(theirs), "--from", "lab", *with_table, *SIZES]) == 0
    assert "lab" not in formats.formats()
    capsys.readouterr()
    assert main(["formats", *with_table]) == 0
    assert "one array for each head" in capsys.readouterr().out


def test_a_table_that_the_command_does_not_use_is_an_error(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = save(tmp_path / "a.safetensors", arrays_of(CONFIG)), tmp_path / "b.safetensors"
    assert main(["convert", str(path), str(target), "--to", "google", "--format-file", str(table), *SIZES]) == 2
    assert f"{table} is not used: {path} is in format timm" in capsys.readouterr().err
    assert not target.exists()


def test_formats_show_prints_a_file_that_format_file_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--show", "hf-vit:v5"]) == 0
    path = write_table(tmp_path, capsys.readouterr().out)
    assert main(["formats", "--show", "my_hf_vit", "--format-file", str(path), "--json"]) == 0
    assert "blocks.attn.qkv.weight" in json.loads(capsys.readouterr().out)["text"]
    assert main(["formats", "--show", "hf-vitt"]) == 2
    assert "did you mean 'hf-vit'" in capsys.readouterr().err


def test_formats_show_prints_the_table_in_a_file(tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity.write(reproducible_init.weights(CONFIG, 0), tmp_path / "own.safetensors", parity.register_format(table))
    with formats.registered():
        assert main(["formats", "--show", str(tmp_path / "own.safetensors")]) == 0
    printed = parse_format(capsys.readouterr().out, "printed")
    assert printed.definition and printed.definition.version == read_format(table).definition.version


def test_diagnose_prints_a_command_with_the_table(tmp_path: Path) -> None:
    from parity.comparison.diagnosis.remedy import CommandLineSource, _convert_command

    command = _convert_command({"norms.eps": 1e-6}, (), CommandLineSource("a.pth", format_files=("lab.txt",)))
    assert command.startswith("python -m parity convert a.pth FIXED.safetensors --to torch --format-file lab.txt")


def test_a_checkpoint_in_memory_has_the_version_of_its_table(table: Path) -> None:
    parity.register_format(table)
    found = dict(converted_arrays(reproducible_init.weights(CONFIG, 0), "lab"))
    checkpoint = Checkpoint(CONFIG, formats.get("lab").full_name(CONFIG), found)
    assert is_equal(dict(converted_arrays(checkpoint, "torch")), arrays_of(CONFIG))
