"""The formats of Hugging Face: reading files and folders, and configs that they cannot store.

`tests/peers/test_hugging_face.py` compares them with transformers itself.
"""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get, hf_beit, hf_clip, hf_dinov2, hf_dinov3, hf_siglip, hf_vit
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from vit_spec import InputError, ViTConfig
from vit_spec.positions import relative_index

VIT = ViTConfig(image_size=12, patch_size=4, width=12, depth=2, num_heads=3, mlp_dim=24, num_classes=5)
BARE = VIT.replace(num_classes=0)
DINO = {"norms": {"layer_scale": 1.0}, "head": {"pool": "token_mean"}}
PATCHES = {"class_token": False}
ROTARY = {"kind": "none", "rotary": "dinov3"}
BEIT = {
    "positions": {"kind": "none", "relative": "table"},
    "attention": {"qkv_bias": "qv"},
    "norms": {"eps": 1e-12, "layer_scale": 0.1, "after_blocks": False, "after_pool": True},
    "head": {"pool": "mean"},
}
CONFIGS = {
    "hf-vit": VIT.replace(norms={"eps": 1e-12}),
    "hf-deit": VIT.replace(tokens={"distillation": True}, norms={"eps": 1e-12}),
    "hf-dinov2": VIT.replace(**DINO),
    "hf-dinov2-reg": VIT.replace(**DINO, tokens={"registers": 2}, positions={"covers": "class"}),
    "hf-dinov3": BARE.replace(num_heads=1, positions=ROTARY, tokens={"registers": 2}, norms={"layer_scale": 1.0}),
    "hf-siglip": BARE.replace(tokens=PATCHES, head={"pool": "attention"}),
    "hf-clip": VIT.replace(tokens={"patch_bias": False}, norms={"before_blocks": True}, head={"bias": False}),
    "hf-vit-mae": BARE.replace(norms={"eps": 1e-12}),
    "hf-beit": VIT.replace(**BEIT),
    "hf-data2vec": VIT.replace(**BEIT).replace(positions={"relative_shared": True}),
}
HEADS = {"num_heads": 1}  # no tensor shows it
NAMES_BY_KEYS = [name for name in CONFIGS if name != "hf-vit-mae"]  # "hf-vit-mae" has the keys of "hf-vit"


def random_checkpoint(config, seed=0):
    """Return a checkpoint with random weights in the format of the PyTorch twin."""
    rng, format = np.random.default_rng(seed), get("torch")
    keys = {key: layout for layout in format.layouts(config).values() for key in layout.keys(config.sizes)}
    arrays = {key: rng.normal(size=layout.shape(config.sizes)).astype(np.float32) for key, layout in keys.items()}
    return Checkpoint(config, "torch", arrays)


def file_without_metadata(tmp_path, config, to, prefix="", **more):
    """Write a file with the arrays of a format and no metadata, as other software does, and return its path."""
    arrays = {f"{prefix}{key}": array for key, array in converted_arrays(random_checkpoint(config), to)}
    save_file({**arrays, **more}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def write_config_json(tmp_path, **fields):
    """Write a config.json beside the weights of `file_without_metadata`."""
    (tmp_path / "config.json").write_text(json.dumps(fields))


# Recognition ----------------------------------------------------------------------------------------------------------


def recognised_format(tmp_path, format, prefix=""):
    """Return the format that `parity` recognises in a file without metadata whose keys have a prefix."""
    config = CONFIGS[format.partition(":")[0]]
    path = file_without_metadata(tmp_path, config, format, prefix)
    return parity.load(path, given=HEADS if config.positions.relative == "none" else None).format


def test_a_file_is_recognised_by_its_keys(tmp_path):
    variants = [f"{name}:{layout}" for name in NAMES_BY_KEYS for layout in ("v4", "v5") if layout in get(name).tables]
    assert [recognised_format(tmp_path, variant) for variant in variants] == variants


def test_a_prefix_of_all_keys_is_removed(tmp_path):
    cases = [(name, prefix) for name in NAMES_BY_KEYS for prefix in ("module.", "_orig_mod.", "model.")]
    found = [(recognised_format(tmp_path, name, prefix).partition(":")[0], prefix) for name, prefix in cases]
    assert found == cases


def remove_metadata(folder):
    """Remove this project's metadata from the weights in a folder, as transformers does when it saves them again."""
    path = folder / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt"})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_folder_is_read_back_bit_for_bit(tmp_path, name):
    config = CONFIGS[name]
    write(random_checkpoint(config), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    found = parity.load(tmp_path / "out")
    assert found.format.partition(":")[0] == name
    expected = dict(converted_arrays(random_checkpoint(config), "torch"))
    assert all(np.array_equal(array, expected[key]) for key, array in converted_arrays(found, "torch"))


@pytest.mark.parametrize("named", [["ViTWithAMean"], ["ViTModel", "ViTWithAMean"], "ViTWithAMean", [7]], ids=str)
def test_the_folder_of_a_custom_class_is_refused(tmp_path, named):
    """`save_pretrained` writes the name of a custom class, which may have the same keys and pool otherwise."""
    write(random_checkpoint(VIT), f"{tmp_path / 'out'}/", "hf-vit")
    remove_metadata(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": named}))
    with pytest.raises(InputError, match="which is not one of transformers'"):
        parity.load(tmp_path / "out")


WIDE = ViTConfig(image_size=64, patch_size=16, width=192, depth=2, num_heads=3, mlp_dim=768, num_classes=0)
LAYER_SCALE = {"norms": {"layer_scale": 1.0}}
MODELS = {  # model_type -> format, and a config without a classifier
    "vit": ("hf-vit", WIDE.replace(norms={"eps": 1e-12})),
    "deit": ("hf-deit", WIDE.replace(tokens={"distillation": True}, norms={"eps": 1e-12})),
    "dinov2": ("hf-dinov2", WIDE.replace(**LAYER_SCALE)),
    "dinov2_with_registers": (
        "hf-dinov2-reg",
        WIDE.replace(**LAYER_SCALE, tokens={"registers": 2}, positions={"covers": "class"}),
    ),
    "dinov3_vit": ("hf-dinov3", WIDE.replace(**LAYER_SCALE, positions=ROTARY, tokens={"registers": 2})),
    "siglip_vision_model": ("hf-siglip", WIDE.replace(tokens=PATCHES, head={"pool": "attention"})),
    "clip_vision_model": ("hf-clip", WIDE.replace(tokens={"patch_bias": False}, norms={"before_blocks": True})),
    "vit_mae": ("hf-vit-mae", WIDE.replace(norms={"eps": 1e-12})),
    "beit": ("hf-beit", WIDE.replace(**BEIT)),
    "data2vec-vision": ("hf-data2vec", WIDE.replace(**BEIT)),
}


def folder_of_class(tmp_path, model_type, named, changes=(), **fields):
    """Write a folder as transformers does for a class, and return its path.

    Args:
        model_type: a key of `MODELS`.
        named: the content of `architectures` in its config.json; None to leave it out.
        changes: changes of the config.
        fields: further fields of its config.json.
    """
    name, config = MODELS[model_type]
    tmp_path.mkdir(exist_ok=True)
    write(random_checkpoint(config.replace(**dict(changes))), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text()) | {"architectures": named} | fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return tmp_path / "out"


@pytest.mark.parametrize("model_type", ["dinov2", "dinov2_with_registers"])
@pytest.mark.parametrize("prefix", ["", "TF", "Flax"])
def test_a_dinov2_for_classification_without_a_classifier_returns_the_class_token_and_the_mean(
    tmp_path, model_type, prefix
):
    model = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[model_type]
    found = parity.load(folder_of_class(tmp_path, model_type, [f"{prefix}{model}ForImageClassification"]))
    assert (found.config.head.pool, found.config.num_classes, found.assumed) == ("token_mean", 0, ())
    found = parity.load(folder_of_class(tmp_path / "model", model_type, [f"{prefix}{model}Model"]))
    assert (found.config.head.pool, found.assumed) == ("token", ())


@pytest.mark.parametrize("name", ["hf-dinov2", "hf-dinov2-reg"])
def test_a_dinov2_that_returns_the_class_token_and_the_mean_is_written_with_its_class(tmp_path, name):
    config = CONFIGS[name].replace(num_classes=0)
    write(random_checkpoint(config), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    assert parity.load(tmp_path / "out").config.head.pool == "token_mean"


UNSUPPORTED_CLASSES = [
    ("deit", "DeiTForImageClassification", "the class token alone"),
    ("clip_vision_model", "CLIPForImageClassification", "the mean of the patches before the last norm"),
    ("siglip_vision_model", "SiglipForImageClassification", "the mean of the patches after the last norm"),
    ("beit", "BeitBackbone", "feature maps without a norm"),
    ("beit", "BeitForMaskedImageModeling", "logits of visual tokens for each patch"),
    ("beit", "BeitForSemanticSegmentation", "logits for each pixel"),
    ("data2vec-vision", "Data2VecVisionForSemanticSegmentation", "logits for each pixel"),
]


@pytest.mark.parametrize("model_type, name, words", UNSUPPORTED_CLASSES)
def test_a_class_that_the_format_cannot_express_is_refused_without_a_classifier(tmp_path, model_type, name, words):
    with pytest.raises(InputError, match=f"class is '{name}', whose output is {words}: not supported") as caught:
        parity.load(folder_of_class(tmp_path, model_type, [name]))
    assert "\n" not in str(caught.value)


CONVENTIONS = [
    ("vit", "ViTModel", "all tokens"),
    ("vit", "ViTForMaskedImageModeling", "a reconstruction of the image"),
    ("deit", "DeiTModel", "all tokens"),
    ("deit", "DeiTForMaskedImageModeling", "a reconstruction of the image"),
    ("vit_mae", "ViTMAEModel", "all tokens"),
    ("vit_mae", "ViTMAEForPreTraining", "a reconstruction of the image"),
    ("dinov2", "Dinov2Backbone", "feature maps"),
    ("dinov2_with_registers", "Dinov2WithRegistersBackbone", "feature maps"),
    ("dinov3_vit", "DINOv3ViTBackbone", "feature maps"),
]


@pytest.mark.parametrize("model_type, name, returned", CONVENTIONS)
def test_the_outputs_of_a_class_that_returns_no_single_vector_are_an_assumption(tmp_path, model_type, name, returned):
    [found] = parity.load(folder_of_class(tmp_path, model_type, [name])).assumed
    token = "the mean of the class token and the distillation token" if model_type == "deit" else "the class token"
    assert (found.field, found.value) == ("outputs", f"{token}, after the last norm; {name} returns {returned}")


CLASS_TOKEN = {"norms": {"after_blocks": True, "after_pool": False}, "head": {"pool": "token"}}  # of Beit
LAST_BLOCK = {"norms": {"after_blocks": False, "after_pool": False}, "head": {"pool": "token"}}
EXACT = [
    ("vit", "ViTForImageClassification", {}),
    ("vit", "ViTForImageClassification", {"num_classes": 7}),
    ("vit", "ViTModel", {"head": {"hidden": 192}}),
    ("deit", "DeiTForImageClassificationWithTeacher", {}),
    ("dinov2", "Dinov2Model", {}),
    ("dinov3_vit", "DINOv3ViTModel", {}),
    ("siglip_vision_model", "SiglipVisionModel", {}),
    ("clip_vision_model", "CLIPVisionModel", {}),
    ("clip_vision_model", "CLIPVisionModelWithProjection", {"num_classes": 7, "head": {"bias": False}}),
    ("beit", "BeitModel", {}),
    ("beit", "BeitModel", CLASS_TOKEN),
    ("beit", "BeitForImageClassification", {"num_classes": 7}),
    ("data2vec-vision", "Data2VecVisionForImageClassification", {}),
    ("data2vec-vision", "Data2VecVisionForImageClassification", {**CLASS_TOKEN, "num_classes": 7}),
]


@pytest.mark.parametrize("model_type, name, changes", EXACT)
def test_nothing_is_assumed_of_a_class_that_returns_what_the_twins_compute(tmp_path, model_type, name, changes):
    assert parity.load(folder_of_class(tmp_path, model_type, [name], changes)).assumed == ()


@pytest.mark.parametrize("model_type", MODELS)
def test_the_outputs_are_an_assumption_if_config_json_names_no_class(tmp_path, model_type):
    found = {each.field: each.value for each in parity.load(folder_of_class(tmp_path, model_type, None)).assumed}
    assert found["outputs"].endswith("; config.json names no class in architectures")


CONTRADICTORY_CLASSES = [
    ("vit", ["ViTModel"], {"num_classes": 7}, "'ViTModel', which has no classifier, but the weights have one"),
    ("vit", ["ViTForMaskedImageModeling"], {"num_classes": 7}, "which has no classifier, but the weights have one"),
    ("vit", ["ViTForImageClassification"], {"head": {"hidden": 192}}, "which has no pooler, but the weights have one"),
    ("clip_vision_model", ["CLIPVisionModelWithProjection"], {}, "which has a projection, but the weights have none"),
    ("clip_vision_model", ["CLIPModel"], {}, "which has a projection, but the weights have none"),
    ("vit", ["ViTMAEModel"], {}, "'ViTMAEModel', which is not one of transformers' for model_type 'vit'"),
    ("dinov2", ["Dinov2WithRegistersModel"], {}, "which is not one of transformers' for model_type 'dinov2'"),
    ("vit", ["ViTModel", "ViTForImageClassification"], {}, "names several classes, 'ViTModel', 'ViTFor"),
]


@pytest.mark.parametrize("model_type, named, changes, words", CONTRADICTORY_CLASSES)
def test_a_class_that_contradicts_the_weights_or_the_model_type_is_refused(tmp_path, model_type, named, changes, words):
    with pytest.raises(InputError, match=words) as caught:
        parity.load(folder_of_class(tmp_path, model_type, named, changes))
    assert "\n" not in str(caught.value)


BACKBONES = [("dinov2", "Dinov2Backbone"), ("dinov3_vit", "DINOv3ViTBackbone")]


@pytest.mark.parametrize("model_type, name", BACKBONES)
@pytest.mark.parametrize(
    "fields, omitted",
    [
        ({"out_indices": [1]}, r"out_indices \[1\]"),
        ({"out_indices": 1}, "out_indices 1"),
        ({"out_indices": [0, -2]}, r"out_indices \[0, -2\]"),
        ({"out_features": ["stem", "stage1"]}, r"out_features \['stem', 'stage1'\]"),
        ({"out_features": []}, r"out_features \[\]"),
    ],
)
def test_a_backbone_that_omits_the_last_block_is_refused(tmp_path, model_type, name, fields, omitted):
    with pytest.raises(InputError, match=f"says {omitted}, which omits the last block") as caught:
        parity.load(folder_of_class(tmp_path, model_type, [name], **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type, name", BACKBONES)
@pytest.mark.parametrize(
    "fields", [{"out_indices": [1, 2]}, {"out_indices": [-1]}, {"out_features": ["stage2"], "out_indices": [2]}], ids=str
)
def test_a_backbone_with_the_last_block_is_read(tmp_path, model_type, name, fields):
    assert parity.load(folder_of_class(tmp_path, model_type, [name], **fields)).config.head.pool == "token"


def test_a_backbone_without_the_last_norm_is_refused(tmp_path):
    """DINOv3ViTBackbone always normalizes the last block."""
    with pytest.raises(InputError, match="says apply_layernorm False: only feature maps after the last norm"):
        parity.load(folder_of_class(tmp_path / "a", "dinov2", ["Dinov2Backbone"], apply_layernorm=False))
    assert parity.load(folder_of_class(tmp_path / "b", "dinov3_vit", ["DINOv3ViTBackbone"], apply_layernorm=False))


def test_the_stages_of_a_backbone_do_not_matter_to_other_classes(tmp_path):
    fields = {"out_indices": [1], "out_features": ["stage1"], "apply_layernorm": False}
    assert parity.load(folder_of_class(tmp_path, "dinov2", ["Dinov2Model"], **fields)).assumed == ()


def test_unmasked_patches_are_an_assumption_unless_config_json_masks_none(tmp_path):
    path = folder_of_class(tmp_path, "vit_mae", ["ViTMAEModel"], mask_ratio=0.75)
    assert {"masked patches": "none"}.items() <= {each.field: each.value for each in parity.load(path).assumed}.items()


def test_the_pool_of_a_classifier_without_config_json_is_an_assumption(tmp_path):
    """A ViTModel with a layer called classifier has the keys of ViTForImageClassification, however it pools."""
    found = parity.load(file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit"), given=HEADS)
    assert "head.pool" in {each.field for each in found.assumed}


OPTIONS = [
    ("hf-vit", {"num_classes": 0, "image_size": (8, 12), "patch_size": (4, 2), "head": {"hidden": 7}}),
    ("hf-vit", {"in_channels": 1, "num_classes": 1, "attention": {"qkv_bias": "none"}, "mlp": {"activation": "relu"}}),
    ("hf-vit", {"norms": {"eps": 1e-5}, "pixels": {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}}),
    ("hf-deit", {"num_classes": 0, "mlp": {"activation": "none"}}),
    ("hf-dinov2", {"mlp_dim": 16, "mlp": {"activation": "swiglu"}, "norms": {"layer_scale": 0.5}}),
    ("hf-dinov3", {"tokens": {"registers": 0}, "attention": {"qkv_bias": "qv"}, "mlp": {"activation": "swiglu"}}),
    ("hf-dinov3", {"attention": {"qkv_bias": "none", "proj_bias": False}, "positions": {"rotary_base": 50.0}}),
    *((name, {"norms": {"layer_scale": 0.0}}) for name in ("hf-dinov2", "hf-dinov2-reg", "hf-dinov3")),
    ("hf-clip", {"num_classes": 0, "head": {"bias": True}, "mlp": {"activation": "quick_gelu"}}),
    ("hf-beit", {"num_classes": 0, "positions": {"kind": "learned", "relative_shared": True}}),
    ("hf-beit", {**CLASS_TOKEN, "positions": {"kind": "learned", "relative": "none"}, "mlp": {"activation": "relu"}}),
    ("hf-beit", {**LAST_BLOCK, "num_classes": 0}),
    ("hf-beit", {"norms": {"eps": 1e-6, "layer_scale": None}, "image_size": 14, "tokens": {"crop": True}}),
    ("hf-data2vec", {"num_classes": 0}),
    ("hf-data2vec", {**LAST_BLOCK, "num_classes": 0}),
    ("hf-data2vec", {**CLASS_TOKEN, "num_classes": 0}),
]


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in CONFIGS), *OPTIONS])
def test_config_json_determines_the_whole_config(tmp_path, name, changes):
    config = CONFIGS[name].replace(**changes)
    write(random_checkpoint(config), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    found = parity.load(tmp_path / "out").config
    assert found == config.replace(resampling=found.resampling)  # which config.json does not state


@pytest.mark.parametrize("module", [hf_beit, hf_clip, hf_dinov2, hf_dinov3, hf_siglip, hf_vit], ids=lambda each: each.NAME)
def test_every_field_with_a_default_changes_the_config_or_is_refused(tmp_path, module):
    """A field that is accepted and not read would give a model that computes another function."""
    config = BARE.replace(head={"hidden": 12}) if module is hf_vit else CONFIGS[module.NAME]
    write(random_checkpoint(config), f"{tmp_path / 'out'}/", module.NAME)
    remove_metadata(tmp_path / "out")
    path, ignored = tmp_path / "out" / "config.json", []
    content, expected = json.loads(path.read_text()), parity.load(tmp_path / "out").config
    for field, default in module.DEFAULTS.items():
        value = content.get(field, default)
        other = "relu" if isinstance(value, str) else not value if isinstance(value, bool) else 2 * value
        path.write_text(json.dumps({**content, field: other}))
        try:
            ignored += [field] if parity.load(tmp_path / "out").config == expected else []
        except InputError:
            continue
    assert ignored == []


@pytest.mark.parametrize(("model_type", "name"), [("beit", "BeitModel"), ("data2vec-vision", "Data2VecVisionModel")])
@pytest.mark.parametrize(("changes", "token"), [(CLASS_TOKEN, "norm"), (LAST_BLOCK, "block")], ids=["norm", "block"])
def test_the_output_of_a_beit_without_a_pooler_is_an_assumption(tmp_path, model_type, name, changes, token):
    """A BeitModel without mean pooling has a pooler without parameters."""
    found = {each.field: each.value for each in parity.load(folder_of_class(tmp_path, model_type, [name], changes)).assumed}
    why = "the weights lack the pooler of BeitModel" if name == "BeitModel" else "Data2VecVisionModel returns all tokens"
    text = f"the class token, after the last {token}; {why}"
    assert found == ({} if (name, token) == ("BeitModel", "norm") else {"outputs": text})


@pytest.mark.parametrize("prefix", ["", "beit."])
def test_the_index_of_relative_positions_in_old_files_is_not_read(tmp_path, prefix):
    index = f"{prefix}encoder.layer.0.attention.attention.relative_position_bias.relative_position_index"
    variant = "hf-beit:v4" if prefix else "hf-beit:v4-bare"
    config = CONFIGS["hf-beit"].replace(num_classes=5 if prefix else 0)
    values = relative_index(config.grid, config.num_prefix).astype(np.int64)
    found = parity.load(file_without_metadata(tmp_path, config, variant, **{index: values}))
    assert found.format == variant
    assert [line for line in found.left if "numbers that follow from the grid of patches" in line]


BEIT_JSON = {"model_type": "beit", "image_size": 12, "patch_size": 4, "hidden_size": 12, "use_relative_position_bias": True}


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"use_shared_relative_position_bias": True},
            "and use_shared_relative_position_bias: both together",
        ),
        ({"use_relative_position_bias": False}, "positions.relative='none', but its tensors show 'table'"),
        ({"use_absolute_position_embeddings": True}, "have a position table, and the file has none"),
        ({"use_mean_pooling": False}, "norms.after_blocks=True, but its tensors show False"),
        ({"layer_scale_init_value": 0.0}, r"4 unexpected: 'beit\.encoder\.layer\.0\.lambda_1'"),
        ({"layer_scale_init_value": "small"}, "says layer_scale_init_value 'small': a number was expected"),
        ({"use_mean_pooling": "false"}, "says use_mean_pooling 'false': true or false was expected"),
        ({"image_size": [12, 20]}, r"says image_size \[12, 20\]: only squares are supported"),
        ({"patch_size": [4, 2]}, r"says patch_size \[4, 2\]: only squares are supported"),
        ({"head_dim": 5}, "head_dim=5, which format 'hf-beit' does not know"),
        ({"num_attention_heads": 4}, "num_heads=4, but its tensors show 3"),
    ],
)
def test_a_config_json_that_contradicts_a_beit_is_refused(tmp_path, fields, words):
    path = file_without_metadata(tmp_path, CONFIGS["hf-beit"], "hf-beit")
    stated = {"num_attention_heads": 3, "architectures": ["BeitForImageClassification"]}
    write_config_json(tmp_path, **{**BEIT_JSON, **stated, **fields})
    with pytest.raises(InputError, match=words) as caught:
        parity.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", ""])
def test_a_beit_with_tables_of_both_kinds_or_a_bias_of_keys_is_refused(tmp_path, file):
    table = "beit.encoder.relative_position_bias.relative_position_bias_table"
    bias = "beit.encoder.layer.0.attention.attention.key.bias"
    for key, shape in ((table, (28, 3)), (bias, (12,))):
        path = file_without_metadata(tmp_path, CONFIGS["hf-beit"], "hf-beit", **{key: np.ones(shape, np.float32)})
        if file:
            write_config_json(tmp_path, **BEIT_JSON, num_attention_heads=3, architectures=["BeitForImageClassification"])
        with pytest.raises(InputError, match=r"table|key\.bias") as caught:
            parity.load(path)
        assert "\n" not in str(caught.value)


def test_config_json_distinguishes_vit_and_vit_mae(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit-mae"], "hf-vit-mae")
    write_config_json(tmp_path, model_type="vit_mae", hidden_size=12, num_attention_heads=3, image_size=12, patch_size=4)
    assert parity.load(path).format == "hf-vit-mae:v4-bare"


def test_assumptions_about_a_state_dict_without_config_json_are_reported(tmp_path):
    found = parity.load(file_without_metadata(tmp_path, CONFIGS["hf-siglip"], "hf-siglip"), given=HEADS)
    assert {each.field for each in found.assumed} >= {"norms.eps", "mlp.activation", "image_size", "pixels.mean"}
    assert found.config.mlp.activation == "gelu_tanh"


COMMON_BEHAVIOUR = {
    *("residual connections", "norms without weights", "attention pattern", "patch extraction", "use of blocks"),
    "further operations",
}


@pytest.mark.parametrize("format", [*(name for name, _ in MODELS.values()), "hf-flax", "hf-flax-dinov2", "hf-flax-clip"])
def test_every_behaviour_that_no_tensor_shows_is_an_assumption_without_config_json(tmp_path, format):
    """Custom code has the names of transformers and other functions, as it has those of timm."""
    configs = {name: config for name, config in MODELS.values()}
    config = configs[{"hf-flax": "hf-vit"}.get(format, format.replace("flax-", ""))]
    path = file_without_metadata(tmp_path, config, format)
    found = {each.field: each.value for each in parity.load(path, format=format).assumed}
    assert COMMON_BEHAVIOUR | {"outputs"} <= found.keys()
    beit = format in ("hf-beit", "hf-data2vec")
    assert ("use of positions" in found) == (format != "hf-dinov3" and not beit)
    assert ("relative positions" in found) == beit
    assert ("head.pool_heads" in found) == (format == "hf-siglip")
    assert ("mean pooling" in found) == (format != "hf-siglip" and not beit)
    assert ("masked patches" in found) == (format == "hf-vit-mae")


@pytest.mark.parametrize("name", ["hf-dinov2", "hf-dinov3"])
def test_the_gate_of_an_mlp_is_an_assumption_without_config_json(tmp_path, name):
    config = dict(MODELS.values())[name].replace(mlp={"activation": "swiglu"})
    found = {each.field for each in parity.load(file_without_metadata(tmp_path, config, name)).assumed}
    assert "MLP gate" in found


@pytest.mark.parametrize("classes, pool", [(0, "token"), (7, "token_mean")])
def test_the_pool_of_dinov2_is_an_assumption_without_config_json(tmp_path, classes, pool):
    """Its class for classification without a classifier has the keys of its model."""
    config = dict(MODELS.values())["hf-dinov2"].replace(num_classes=classes, head={"pool": pool})
    path = file_without_metadata(tmp_path, config, "hf-dinov2")
    assert ("head.pool", pool) in {(each.field, each.value) for each in parity.load(path).assumed}
    if not classes:
        assert parity.load(path, given={"head.pool": "token_mean"}).config.head.pool == "token_mean"


def test_the_activation_of_the_pooler_is_an_assumption_without_config_json(tmp_path):
    path = file_without_metadata(tmp_path, WIDE.replace(head={"hidden": 192}), "hf-vit")
    found = {each.field: each.value for each in parity.load(path).assumed}
    assert (found["activation of pre_logits"], found["outputs"]) == ("tanh", "those of the pooler")


def test_pixel_statistics_of_rgb_are_not_assumed_for_other_channels(tmp_path):
    config = CONFIGS["hf-dinov2"].replace(in_channels=1)
    assert parity.load(file_without_metadata(tmp_path, config, "hf-dinov2"), given=HEADS).config.pixels.mean == (0.5,)


def test_text_towers_and_position_ids_are_ignored_with_the_reason(tmp_path):
    more = {"text_model.final_layer_norm.weight": np.ones(7, np.float32), "logit_scale": np.ones((), np.float32)}
    more["vision_model.embeddings.position_ids"] = np.arange(10)[None]
    found = parity.load(file_without_metadata(tmp_path, CONFIGS["hf-clip"], "hf-clip", **more), given=HEADS)
    assert [line.partition(": ")[2] for line in found.left] == [
        "the text tower",
        "scale or bias for the comparison of images with texts",
        "the numbers 0, 1, 2, ...",
    ]


# config.json ----------------------------------------------------------------------------------------------------------


def test_config_json_states_what_tensors_do_not_show(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    fields = {"num_attention_heads": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "image_size": 12, "patch_size": 4}
    write_config_json(tmp_path, model_type="vit", **fields)
    config = parity.load(path).config
    assert (config.num_heads, config.mlp.activation, config.norms.eps) == (2, "gelu_tanh", 1e-3)


def test_fields_left_out_of_config_json_have_the_librarys_defaults(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-siglip"], "hf-siglip")
    vision = {"model_type": "siglip_vision_model", "image_size": 12, "patch_size": 4}
    write_config_json(tmp_path, model_type="siglip", vision_config=vision)
    config = parity.load(path).config
    assert (config.num_heads, config.mlp.activation, config.norms.eps) == (12, "gelu_tanh", 1e-6)


def test_preprocessor_config_json_states_the_pixel_statistics(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    pixels = {"do_normalize": True, "image_mean": [0.1, 0.2, 0.2], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    config = parity.load(path, given=HEADS).config
    assert (config.pixels.mean, config.pixels.std) == ((0.1, 0.2, 0.2), (0.5,))


def test_weights_with_an_adapter_beside_them_are_refused(tmp_path):
    """transformers merges the adapter into the weights when it loads them."""
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match=r"adapter_config\.json says that these weights have an adapter"):
        parity.load(path, given=HEADS)


@pytest.mark.parametrize("mean", [[], ["a"], {}, [[0.5]]])
def test_a_mean_that_is_not_a_number_is_refused(tmp_path, mean):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": 0.5}))
    with pytest.raises(InputError, match=r"image_mean .*: numbers were expected"):
        parity.load(path, given=HEADS)


def test_images_that_are_not_normalized_have_mean_zero_and_std_one(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False, "image_mean": [0.1]}))
    config = parity.load(path, given=HEADS).config
    assert (config.pixels.mean, config.pixels.std) == ((0.0,), (1.0,))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "swin"}, "model_type 'swin', which is not a known ViT; known are"),
        ({"model_type": "deit"}, "model_type 'deit', which has other keys than"),
        ({"a_field_of_next_year": 1}, "a_field_of_next_year=1, which format 'hf-vit' does not know"),
        ({"is_decoder": True}, "is_decoder=True, which format 'hf-vit' does not know"),
        ({"qkv_bias": False}, "attention.qkv_bias='none', but its tensors show 'qkv'"),
        ({"qkv_bias": "false"}, "its config.json says qkv_bias 'false': true or false was expected"),
        ({"qkv_bias": None}, "its config.json says qkv_bias None: true or false was expected"),
        ({"layer_norm_eps": None}, "its config.json says layer_norm_eps None: a number was expected"),
        ({"layer_norm_eps": "1e-5"}, "its config.json says layer_norm_eps '1e-5': a number was expected"),
        ({"num_attention_heads": True}, "its config.json says num_attention_heads True: a number was expected"),
        ({"apply_layernorm": "false"}, "its config.json says apply_layernorm 'false': true or false was expected"),
        ({"num_labels": 3}, "its config.json says num_labels 3, but its tensors show 5 outputs"),
        ({"num_labels": None}, "its config.json says num_labels None, but its tensors show 5 outputs"),
        ({"hidden_act": "gelu_10"}, "hidden_act 'gelu_10', supported are gelu, "),
        ({"hidden_act": ["gelu"]}, r"hidden_act \['gelu'\], supported are"),
        (
            {"vision_config": {"layer_norm_eps": 0.1}},
            "vision_config={'layer_norm_eps': 0.1}, which format 'hf-vit' does not know",
        ),
        ({"hidden_size": 768}, "width=768, but its tensors show 12"),
        ({"image_size": "large"}, "image_size 'large'"),
        ({"patch_size": 6}, r"patch_size=\(6, 6\), but its tensors show \(4, 4\)"),
        ({"image_size": 16}, "an image of 16x16 has 16 patches of 4x4, the position table 10 rows"),
    ],
)
def test_a_contradictory_or_unknown_config_json_is_refused(tmp_path, fields, words):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"], "hf-vit")
    write_config_json(tmp_path, **{"model_type": "vit", "image_size": 12, "patch_size": 4, **fields})
    with pytest.raises(InputError, match=words) as caught:
        parity.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "num_labels"), [("hf-vit", 5), ("hf-siglip", 0), ("hf-vit-bare", 2), ("hf-clip", 2)])
def test_the_number_of_classes_in_config_json_is_that_of_a_classifier_if_there_is_one(tmp_path, name, num_labels):
    """A model without a classifier has any number of classes, and CLIP's output is a projection."""
    config = CONFIGS[name.removesuffix("-bare")]
    config, name = (config.replace(num_classes=0), "hf-vit") if name.endswith("-bare") else (config, name)
    write(random_checkpoint(config), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_labels": num_labels}))
    assert parity.load(tmp_path / "out").config.num_classes == config.num_classes


@pytest.mark.parametrize(
    ("name", "field", "changes"),
    [
        ("hf-dinov2", "use_swiglu_ffn", {"mlp": {"activation": "swiglu"}, "mlp_dim": 16}),
        ("hf-dinov3", "use_gated_mlp", {"mlp": {"activation": "swiglu"}}),
    ],
)
def test_config_json_states_the_gate_of_the_mlps(tmp_path, name, field, changes):
    """No activation is an assumption then, and a contradiction is refused."""
    write(random_checkpoint(CONFIGS[name].replace(**changes)), f"{tmp_path / 'out'}/", name)
    remove_metadata(tmp_path / "out")
    found = parity.load(tmp_path / "out")
    assert found.config.mlp.activation == "swiglu" and "mlp.activation" not in {each.field for each in found.assumed}
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: False}))
    with pytest.raises(InputError, match=f"says {field} False, but its tensors show MLPs with a gate"):
        parity.load(tmp_path / "out")


def test_a_pooler_with_another_activation_is_refused(tmp_path):
    path = file_without_metadata(tmp_path, BARE.replace(head={"hidden": 12}), "hf-vit")
    write_config_json(tmp_path, model_type="vit", image_size=12, patch_size=4, pooler_act="relu")
    with pytest.raises(InputError, match="pooler_act 'relu'"):
        parity.load(path)


@pytest.mark.parametrize("name", ["hf-vit", "hf-deit"])
@pytest.mark.parametrize("part", ["pooler", "decoder"])
def test_a_layer_that_the_librarys_class_does_not_have_is_an_assumption(tmp_path, name, part):
    key = f"{name.removeprefix('hf-')}.pooler.dense.weight" if part == "pooler" else "decoder.0.weight"
    path = file_without_metadata(tmp_path, CONFIGS[name], name, **{key: np.ones((12, 12), np.float32)})
    assert part in {each.field for each in parity.load(path, given=HEADS).assumed}
    write_config_json(tmp_path, model_type=name.removeprefix("hf-"), image_size=12, patch_size=4, num_attention_heads=3)
    assert part in {each.field for each in parity.load(path).assumed}


BARE_CLASSES = {  # class -> its fields of config.json, and the variants of its format with a module around it, and without
    "ViTModel": ({"intermediate_size": 24}, "hf-vit:v4", "hf-vit:v4-bare"),
    "Dinov2Model": ({"mlp_ratio": 2}, "hf-dinov2:v4", "hf-dinov2:v4-bare"),
    "FlaxViTModel": ({"intermediate_size": 24}, "hf-flax:classifier", "hf-flax:bare"),
    "FlaxDinov2Model": ({"mlp_ratio": 2}, "hf-flax-dinov2:classifier", "hf-flax-dinov2:bare"),
    "FlaxDinov2Model with a gate": (
        {"mlp_ratio": 2, "use_swiglu_ffn": True},
        "hf-flax-dinov2:classifier-gated",
        "hf-flax-dinov2:bare-gated",
    ),
}


@pytest.mark.parametrize("case", BARE_CLASSES)
def test_a_module_around_a_class_without_a_prefix_is_an_assumption(tmp_path, case):
    """The keys of the class itself do not begin with vit or dinov2."""
    more, around, alone = BARE_CLASSES[case]
    name = case.split()[0]
    kind = name.removeprefix("Flax").removesuffix("Model").lower()
    config = CONFIGS[f"hf-{kind}"].replace(num_classes=0, head={"pool": "token"}, image_size=(12, 12), patch_size=(4, 4))
    if "use_swiglu_ffn" in more:
        config = config.replace(mlp={"activation": "swiglu"}, mlp_dim=16)
    fields = {"image_size": 12, "patch_size": 4, "hidden_size": 12, "num_attention_heads": 3, **more}
    for format, named in ((around, True), (alone, False)):
        path = file_without_metadata(tmp_path, config, format)
        write_config_json(tmp_path, model_type=kind, architectures=[name], **fields)
        found = parity.load(path)
        assert found.format == format
        assert ({"code around the model", "further operations"} <= {each.field for each in found.assumed}) == named


def test_a_class_with_a_classifier_that_the_weights_lack_is_refused(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-vit"].replace(num_classes=0), "hf-vit:v4")
    fields = {"model_type": "vit", "image_size": 12, "patch_size": 4, "num_attention_heads": 3}
    write_config_json(tmp_path, **fields, architectures=["ViTForImageClassification"], id2label={"0": "a", "1": "b"})
    with pytest.raises(
        InputError, match="'ViTForImageClassification', which has a classifier of 2 classes, but the weights"
    ):
        parity.load(path)
    write_config_json(tmp_path, **fields, architectures=["ViTForImageClassification"], id2label={})
    assert parity.load(path).config.num_classes == 0


@pytest.mark.parametrize("key", ["logit_scale", "text_model.0.weight"])
def test_a_layer_named_as_a_text_tower_is_an_assumption_beside_a_class_without_one(tmp_path, key):
    path = file_without_metadata(tmp_path, CONFIGS["hf-siglip"], "hf-siglip", **{key: np.ones(3, np.float32)})
    fields = {"image_size": 12, "patch_size": 4, "num_attention_heads": 3}
    write_config_json(tmp_path, model_type="siglip_vision_model", architectures=["SiglipVisionModel"], **fields)
    assert key.partition(".")[0] in {each.field for each in parity.load(path).assumed}
    write_config_json(tmp_path, model_type="siglip", architectures=["SiglipModel"], vision_config=fields)
    assert key.partition(".")[0] not in {each.field for each in parity.load(path).assumed}


def test_a_vit_within_a_model_of_another_type_is_read_away_from_its_config_json(tmp_path):
    """As the vision tower of a LLaVA: the messages lead to it."""
    language = {"lm_head.weight": np.ones((3, 3), np.float32), "model.language_model.norm.weight": np.ones(3, np.float32)}
    prefix = "model.vision_tower."
    path = file_without_metadata(tmp_path, CONFIGS["hf-clip"], "hf-clip:v5", prefix, **language)
    write_config_json(tmp_path, model_type="llava", vision_config={"model_type": "clip_vision_model"})
    with pytest.raises(InputError, match=r"'llava', .* a ViT is a part of it, move the weights away from config\.json"):
        parity.load(path)
    (tmp_path / "config.json").unlink()
    pattern = "(lm_head|language_model)([.].*)?"
    with pytest.raises(
        InputError, match=re.escape(f"--strip {prefix} with --ignore '{pattern}' (if the model does not use")
    ):
        parity.load(path)
    assert parity.load(path, strip=prefix, ignore=[pattern], given=HEADS).format == "hf-clip:v5"


def test_vision_config_dict_replaces_vision_config_with_its_defaults(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-clip"], "hf-clip")
    fields = {"image_size": 12, "patch_size": 4, "num_attention_heads": 3}
    first = {**fields, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
    write_config_json(tmp_path, model_type="clip", vision_config=first, vision_config_dict=fields)
    config = parity.load(path).config
    assert (config.mlp.activation, config.norms.eps) == ("quick_gelu", 1e-5)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_fields_outside_of_the_vision_config_of_two_towers_are_refused_without_one(tmp_path, name):
    """They were not read, and the model had the default of 12 heads."""
    write(random_checkpoint(CONFIGS[f"hf-{name}"]), f"{tmp_path / 'out'}/", f"hf-{name}")
    remove_metadata(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text()) | {"architectures": None}
    path.write_text(json.dumps({**content, "model_type": name}))
    words = f"type '{name}', which has two towers, but has .*hidden_size.* of vision_config: give model_type '{name}_vision"
    with pytest.raises(InputError, match=words):
        parity.load(tmp_path / "out")
    path.write_text(json.dumps({"model_type": name, "vision_config": content}))
    assert parity.load(tmp_path / "out").config.num_heads == 3


@pytest.mark.parametrize(
    ("name", "key", "shape", "words"),
    [
        ("hf-vit", "vit.embeddings.patch_embeddings.projection.weight", (12, 3, 2, 4, 4), "it is a model of videos"),
        (
            "hf-siglip",
            "vision_model.embeddings.patch_embedding.weight",
            (12, 48),
            r"flattened patches, as in .* \(NaFlex\)",
        ),
    ],
)
def test_the_projection_of_another_kind_of_model_is_named(tmp_path, name, key, shape, words):
    """The file is whole: to fetch it again is no advice."""
    path = file_without_metadata(tmp_path, CONFIGS[name], name, **{key: np.zeros(shape, np.float32)})
    with pytest.raises(InputError, match=words) as caught:
        parity.load(path, given=HEADS)
    assert key.rpartition("vit.")[2] in str(caught.value) and "again" not in str(caught.value)


def test_a_siglip_without_its_attention_pooling_is_named(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-siglip"], "hf-siglip")
    save_file({key: array for key, array in load_file(path).items() if ".head." not in key}, path)
    with pytest.raises(InputError, match=r"no head\.probe: only SigLIP with its attention pooling is supported"):
        parity.load(path, given=HEADS)


def test_a_decoder_that_is_not_that_of_mae_is_refused(tmp_path):
    path = file_without_metadata(
        tmp_path, CONFIGS["hf-vit-mae"], "hf-vit-mae", "vit.", **{"decoder.2.weight": np.ones(3, np.float32)}
    )
    with pytest.raises(InputError, match=r"unexpected decoder\.2\.weight"):
        parity.load(path, given=HEADS)


def test_a_gated_dinov3_with_another_activation_is_refused(tmp_path):
    path = file_without_metadata(tmp_path, CONFIGS["hf-dinov3"].replace(mlp={"activation": "swiglu"}), "hf-dinov3")
    write_config_json(tmp_path, model_type="dinov3_vit", image_size=12, patch_size=4, use_gated_mlp=True, hidden_act="gelu")
    with pytest.raises(InputError, match="hidden_act 'gelu' for a gated MLP"):
        parity.load(path)


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hf-dinov2", "hf-dinov2-reg", "hf-dinov3"])
def test_the_mask_token_is_written_as_zeros(tmp_path, name):
    write(random_checkpoint(CONFIGS[name]), tmp_path / "a.safetensors", name)
    [token] = [array for key, array in load_file(tmp_path / "a.safetensors").items() if key.endswith("mask_token")]
    assert token.size == 12 and not token.any()


def test_an_mlp_width_that_config_json_cannot_express_is_refused_for_a_folder(tmp_path):
    with pytest.raises(InputError, match="mlp_dim=18 of width 12 has no integer mlp_ratio"):
        write(random_checkpoint(CONFIGS["hf-dinov2"].replace(mlp_dim=18)), f"{tmp_path / 'out'}/", "hf-dinov2")


def test_an_mlp_width_that_config_json_cannot_express_is_accepted_for_a_file(tmp_path):
    config = CONFIGS["hf-dinov2"].replace(mlp_dim=18)
    write(random_checkpoint(config), tmp_path / "a.safetensors", "hf-dinov2")
    assert parity.load(tmp_path / "a.safetensors").config == config


def test_the_written_mlp_ratio_of_the_giant_is_the_published_one():
    config = vit_spec.get("dinov2_g14", positions={"covers": "all"})
    assert get("hf-dinov2").library.contents(config)["config.json"]["mlp_ratio"] == 4


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("hf-vit", {"head": {"pool": "mean"}}, "head.pool='mean', only 'token'"),
        ("hf-vit", {"head": {"hidden": 7}}, "no key for pre_logits.weight"),
        ("hf-vit", {"head": {"bias": False}}, "head.bias=False"),
        ("hf-vit", {"mlp": {"activation": "swiglu"}}, "mlp.activation='swiglu'"),
        ("hf-vit", {"positions": {"kind": "fixed", "table": "sincos_2d_mae"}}, "positions.kind='fixed'"),
        ("hf-vit", {"positions": {"covers": "none"}}, "positions.covers='none'"),
        ("hf-vit", {"positions": {"rotary": "axial"}}, "positions.rotary='axial'"),
        ("hf-vit", {"attention": {"qkv_bias": "qv"}}, "no key for blocks.attn.q_bias"),
        ("hf-vit", {"attention": {"qk_norm": True}}, "no key for blocks.attn.q_norm.weight"),
        ("hf-vit", {"attention": {"proj": False}}, "attention.proj=False"),
        ("hf-vit", {"attention": {"proj_bias": False}}, "attention.proj_bias=False"),
        ("hf-vit", {"attention": {"scale": 0.5}}, "attention.scale=0.5"),
        ("hf-vit", {"attention": {"head_dim": 8}}, "attention.head_dim=8"),
        ("hf-vit", {"attention": {"value_skip": True}}, "attention.value_skip=True"),
        ("hf-vit", {"norms": {"after_blocks": False}}, "norms.after_blocks=False"),
        ("hf-vit", {"norms": {"after_pool": True}}, "norms.after_pool=True"),
        ("hf-vit", {"norms": {"shared_norm": True}}, "norms.shared_norm=True"),
        ("hf-vit", {"norms": {"before_blocks": True}}, "norms.before_blocks=True"),
        ("hf-vit", {"norms": {"layer_scale": 1.0}}, "no key for blocks.ls1.gamma"),
        ("hf-vit", {"tokens": {"registers": 1}}, "no key for reg_token"),
        ("hf-vit", {"tokens": {"distillation": True}}, "no key for dist_token"),
        ("hf-vit", {"tokens": {"patch_bias": False}}, "tokens.patch_bias=False"),
        ("hf-deit", {"tokens": {"distillation": False}}, "tokens.distillation=False"),
        ("hf-dinov2", {"head": {"pool": "token"}}, "head.pool='token', only 'token_mean'"),
        ("hf-dinov2", {"num_classes": 0, "head": {"pool": "mean"}}, "head.pool='mean', only 'token' or 'token_mean'"),
        ("hf-dinov2", {"norms": {"layer_scale": None}}, "norms.layer_scale=None"),
        ("hf-dinov2", {"image_size": (12, 20)}, r"image_size=\(12, 20\), only \(12, 12\)"),
        ("hf-dinov2:v5", {"mlp": {"activation": "swiglu"}}, "an MLP that is gated in its variant 'v5'"),
        ("hf-dinov2-reg", {"positions": {"covers": "none"}}, "positions.covers='none'"),
        ("hf-dinov2-reg", {"tokens": {"registers": 0}}, "tokens.registers=0, only positive numbers"),
        ("hf-dinov3", {"positions": {"rotary": "none"}}, "positions.rotary='none'"),
        ("hf-dinov3", {"num_classes": 5}, "num_classes=5"),
        ("hf-siglip", {"attention": {"qkv_bias": "none"}}, "attention.qkv_bias='none'"),
        ("hf-siglip", {"num_classes": 5}, "no key for head.weight"),
        ("hf-siglip", {"patch_size": (4, 6)}, r"patch_size=\(4, 6\)"),
        ("hf-clip", {"head": {"bias": True}}, "head.bias=True"),
        ("hf-clip", {"norms": {"before_blocks": False}}, "norms.before_blocks=False"),
        ("hf-vit-mae", {"num_classes": 5}, "no key for head.weight"),
        ("hf-beit", {"attention": {"qkv_bias": "qkv"}}, "attention.qkv_bias='qkv', only 'qv'"),
        ("hf-beit", {"image_size": (12, 20)}, r"image_size=\(12, 20\), only \(12, 12\)"),
        ("hf-beit", {"positions": {"relative": "mlp", "relative_dim": 4}}, "positions.relative='mlp'"),
        (
            "hf-beit",
            {"head": {"pool": "token"}},
            "'token' with norms.after_blocks=False and norms.after_pool=True",
        ),
        ("hf-beit", LAST_BLOCK, "head.pool='token' with norms.after_blocks=False and norms.after_pool=False"),
        ("hf-beit", {"norms": {"layer_scale": 0.0}}, "norms.layer_scale=0.0, only positive numbers"),
        ("hf-beit", {"head": {"pool_prefix": True}}, "head.pool_prefix=True"),
        ("hf-data2vec", {"tokens": {"registers": 1}}, "no key for reg_token"),
        ("hf-data2vec", {"head": {"hidden": 7}}, "head.hidden=7"),
    ],
)
def test_a_config_that_the_format_cannot_store_is_refused_by_field(name, changes, words):
    config = CONFIGS[name.partition(":")[0]].replace(**changes)
    with pytest.raises(InputError, match=words):
        get(name).layouts(config)


OTHER_KEYS = {  # file beside the weights -> its content, a key of them, and the route that the message names
    "config.json": (
        {"model_type": "beit"},
        "beit/embeddings/patch_embeddings/projection/kernel",
        r"of transformers' Flax BEiT, .*: load them with from_flax=True in transformers 4, and save them as PyTorch's",
    ),
    "open_clip_config.json": (
        {"model_cfg": {"vision_cfg": {"layers": 12}}},
        "visual.trunk.blocks.0.norm1.weight",
        r"describes a model that has other keys than .*: give the open_clip_config.json of these weights",
    ),
}


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_weights_that_their_own_config_file_does_not_describe_are_named_with_a_route(tmp_path, name):
    content, key, message = OTHER_KEYS[name]
    save_file({key: np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        parity.load(tmp_path)
