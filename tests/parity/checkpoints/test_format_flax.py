"""Checkpoints of the Flax classes of transformers v4: configs, keys and float64 logits.

`tests/goldens/from_transformers_flax.py` wrote the files with `save_pretrained`.
"""

import json
import re

import numpy as np
import pytest

import parity
from tests.goldens.golden import read
from tests.peers.proof import prove
from vit_spec import InputError, ViTConfig

FORMATS = {
    "hf_flax_vit": "hf-flax:classifier",
    "hf_flax_vit_pooler": "hf-flax:bare",
    "hf_flax_dinov2": "hf-flax-dinov2:classifier",
    "hf_flax_dinov2_gated": "hf-flax-dinov2:bare-gated",
    "hf_flax_clip": "hf-flax-clip",
    "hf_flax_clip_both": "hf-flax-clip",
}
WEIGHTS = "flax_model.msgpack"


@pytest.fixture
def folder(request, tmp_path):
    """Write the files of a golden file, which `save_pretrained` wrote, to a folder, and return it."""
    for name, content in read(request.param).files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


with_every_folder = pytest.mark.parametrize(
    ("folder", "name"), [(n, n) for n in FORMATS], indirect=["folder"], ids=list(FORMATS)
)


def is_same(a, b):
    """Return whether two dictionaries of arrays have the same keys and bytes."""
    return a.keys() == b.keys() and all(np.asarray(a[key]).tobytes() == np.asarray(b[key]).tobytes() for key in a)


@with_every_folder
def test_both_twins_compute_the_outputs_of_the_flax_class(folder, name):
    golden = read(name)
    peer = f"{golden.provenance['peer']} {golden.provenance['class'].rpartition('.')[2]}"
    prove(folder / WEIGHTS, golden.images, golden.outputs["logits"], format=FORMATS[name], peer=peer)


@with_every_folder
def test_a_folder_determines_the_whole_config(folder, name):
    assert parity.load(folder / WEIGHTS).config == read(name).config


@with_every_folder
def test_the_weights_are_those_of_the_golden_file(folder, name):
    pytest.importorskip("torch")
    found = parity.to_torch(parity.load(folder / WEIGHTS))
    weights = read(name).weights
    assert is_same({key: value.double().numpy() for key, value in found.items()}, weights)


@with_every_folder
def test_conversion_to_the_jax_twin_and_back_preserves_every_bit(folder, name):
    before = parity.load(folder / WEIGHTS)
    parity.convert(folder / WEIGHTS, folder / "jax.safetensors", "jax")
    parity.convert(folder / "jax.safetensors", folder / "back.msgpack", FORMATS[name])
    assert is_same(parity.load(folder / "back.msgpack").arrays, before.arrays)


@with_every_folder
def test_a_written_config_json_has_the_values_of_save_pretrained(folder, name):
    config, theirs = parity.load(folder / WEIGHTS).config, json.loads((folder / "config.json").read_text())
    if "vision_config" in theirs:
        with pytest.raises(InputError, match="num_classes=0"):
            parity.checkpoints.formats.get("hf-flax-clip").library.contents(config)
        return
    ours = parity.checkpoints.formats.get(FORMATS[name]).library.contents(config)["config.json"]
    skipped = {"architectures", "layerscale_value", "use_mask_token"}
    differing = {key for key in ours.keys() & theirs.keys() - skipped if ours[key] != theirs[key]}
    assert differing <= {"hidden_act"}  # transformers has two names for tanh GELU


@pytest.mark.parametrize("folder", ["hf_flax_vit"], indirect=True)
def test_keys_joined_by_dots_in_safetensors_are_recognised(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    before = parity.load(folder / WEIGHTS)
    arrays = {key.replace("/", "."): np.asarray(array) for key, array in before.arrays.items()}
    numpy.save_file(arrays, folder / "model.safetensors", {"format": "flax"})
    after = parity.load(folder / "model.safetensors")
    assert after.format == "hf-flax:classifier" and after.config == before.config and is_same(after.arrays, before.arrays)


@pytest.mark.parametrize("folder", ["hf_flax_clip_both"], indirect=True)
def test_the_text_tower_is_reported_and_not_read(folder):
    [line] = parity.load(folder / WEIGHTS).left
    assert line == "text_model/embeddings/position_embedding/embedding and 20 more: the text tower"


@pytest.mark.parametrize("folder", ["hf_flax_dinov2"], indirect=True)
def test_a_layerscale_value_other_than_one_is_refused(folder):
    config = json.loads((folder / "config.json").read_text()) | {"layerscale_value": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"layerscale_value 0\.5, by which FlaxDinov2 multiplies"):
        parity.load(folder / WEIGHTS)


@pytest.mark.parametrize("folder", ["hf_flax_vit"], indirect=True)
def test_an_unsupported_activation_is_refused_by_name(folder):
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="hidden_act 'tanh'"):
        parity.load(folder / WEIGHTS)


@pytest.mark.parametrize("folder", ["hf_flax_vit"], indirect=True)
def test_without_config_json_the_defaults_of_the_class_are_reported_as_assumptions(folder):
    (folder / "config.json").unlink()
    checkpoint = parity.load(folder / WEIGHTS, given={"num_heads": 3})
    assert checkpoint.config.norms.eps == 1e-12 and "norms.eps" in {each.field for each in checkpoint.assumed}


TINY = ViTConfig(image_size=12, patch_size=4, width=12, depth=1, num_heads=3, mlp_dim=24, num_classes=5)


@pytest.mark.parametrize(
    ("format", "changes", "what"),
    [
        ("hf-flax", {"positions": {"kind": "fixed", "table": "sincos_1d"}}, "positions.kind='fixed'"),
        ("hf-flax", {"positions": {"covers": "none"}}, "positions.covers='none'"),
        ("hf-flax", {"image_size": (12, 20)}, "image_size=(12, 20)"),
        ("hf-flax", {"num_classes": 0, "head": {"hidden": 9}}, "head.hidden=9"),
        ("hf-flax", {"head": {"pool": "mean"}}, "head.pool='mean'"),
        ("hf-flax", {"attention": {"scale": 0.3}}, "attention.scale=0.3"),
        ("hf-flax", {"norms": {"before_blocks": True}}, "norms.before_blocks=True"),
        ("hf-flax", {"norms": {"layer_scale": 1.0}}, "no key for blocks.ls1.gamma"),
        ("hf-flax", {"mlp": {"activation": "swiglu"}}, "mlp.activation='swiglu'"),
        ("hf-flax", {"head": {"hidden": 12}}, "no key for pre_logits.weight"),
        ("hf-flax-dinov2", {"norms": {"layer_scale": 1.0}}, "head.pool='token'"),
        ("hf-flax-clip", {"norms": {"before_blocks": True}}, "tokens.patch_bias=True"),
    ],
)
def test_a_config_that_the_format_cannot_store_is_refused_by_field(format, changes, what):
    with pytest.raises(InputError, match=re.escape(what)):
        parity.checkpoints.formats.get(format).layouts(TINY.replace(**changes))


@pytest.mark.parametrize(
    ("format", "changes", "what"),
    [
        ("hf-flax-clip", {}, "num_classes=5"),
        ("hf-flax-dinov2", {"mlp_dim": 18}, "mlp_dim=18"),
        ("hf-flax-dinov2", {"mlp_dim": 18, "mlp": {"activation": "swiglu"}}, "mlp_dim=18"),
    ],
)
def test_a_config_that_config_json_cannot_express_is_refused_by_field(format, changes, what):
    with pytest.raises(InputError, match=re.escape(what)):
        parity.checkpoints.formats.get(format).library.contents(TINY.replace(**changes))
