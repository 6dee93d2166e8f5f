"""More comparisons with transformers: other image sizes, models with two towers, preprocessing."""

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import torch

import parity
from parity.checkpoints.formats.hf_classes import CLASSES
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.goldens.golden import noise
from tests.goldens.peers import fill, float64, rng_for
from tests.peers.hugging_face import CASES, MAE, PEER, SIZES
from tests.peers.proof import prove, prove_gradients, relrms, torch_logits
from vit_spec import InputError

CASE = {case.name: case for case in CASES}
TEXT = {"vocab_size": 20, "max_position_embeddings": 4, "bos_token_id": 0, "eos_token_id": 1}
RESAMPLING = ["vit_no_bias", "deit_features", "dinov2", "dinov2_reg", "dinov3_gated", "siglip", "clip", "beit_absolute"]


@pytest.mark.parametrize("name", RESAMPLING)
def test_positions_are_resampled_to_another_image_size_as_in_transformers(tmp_path, name):
    case = CASE[name]
    case.model().save_pretrained(tmp_path)
    images = noise(rng_for(name), (2, 3, 8, 20), 1.0)
    model, _ = case.exact()
    options = {} if "dino" in name else {"interpolate_pos_encoding": True}
    with float64():
        expected = case.run(model, images, **options)
    assert relrms(torch_logits(parity.load(tmp_path), images), expected) <= FLOAT64_TOLERANCE


def two_tower_model(name):
    """Return a model with an image tower, a text tower and random weights."""
    cls = getattr(transformers, name)
    config = cls.config_class(vision_config=SIZES, text_config={**SIZES, **TEXT}, projection_dim=5)
    model = cls(config).eval()
    with torch.no_grad():
        fill(model, rng_for(name))
    return model


@pytest.mark.parametrize("name, format", [("CLIPModel", "hf-clip:v4"), ("SiglipModel", "hf-siglip:v4")])
def test_the_image_tower_of_a_model_with_two_towers_is_read(tmp_path, name, format):
    model = two_tower_model(name)
    model.save_pretrained(tmp_path)
    images = noise(rng_for("towers"), (2, 3, 12, 12), 1.0)
    with float64():
        exact = two_tower_model(name).double()
        exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
        logits = exact.vision_model(torch.tensor(images)).pooler_output
        logits = exact.visual_projection(logits) if name == "CLIPModel" else logits
    checkpoint = prove(tmp_path, images, logits.numpy(), format=format, peer=PEER)
    assert any("the text tower" in line for line in checkpoint.left)


def test_the_encoder_of_a_masked_autoencoder_is_read(tmp_path):
    cls = transformers.ViTMAEForPreTraining
    model = cls(cls.config_class(**{**SIZES, **MAE}))
    with torch.no_grad():
        fill(model, rng_for("masked autoencoder"))
    model.save_pretrained(tmp_path)
    checkpoint = parity.load(tmp_path)
    assert checkpoint.format == "hf-vit-mae:v4" and any("decoder" in line for line in checkpoint.left)
    assert torch.equal(parity.to_torch(checkpoint)["norm.weight"], model.vit.layernorm.weight)


def test_a_deit_that_classifies_by_the_class_token_alone_is_refused(tmp_path):
    cls = transformers.DeiTForImageClassification
    cls(cls.config_class(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="only DeiTForImageClassificationWithTeacher is supported"):
        parity.load(tmp_path)


@pytest.mark.parametrize("name", ["BeitForMaskedImageModeling", "BeitForSemanticSegmentation", "BeitBackbone"])
def test_a_beit_that_returns_no_single_vector_is_refused(tmp_path, name):
    cls = getattr(transformers, name)
    stages = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]} if name == "BeitForSemanticSegmentation" else {}
    cls(cls.config_class(**{**SIZES, **stages})).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"its class is '{name}', whose output is .*: not supported"):
        parity.load(tmp_path)


def test_a_beit_with_both_kinds_of_relative_positions_is_refused(tmp_path):
    cls, both = transformers.BeitModel, {"use_relative_position_bias": True, "use_shared_relative_position_bias": True}
    cls(cls.config_class(**SIZES, **both)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="use_relative_position_bias and use_shared_relative_position_bias: both together"):
        parity.load(tmp_path)


@pytest.mark.parametrize("name", ["beit", "beit_shared", "beit_class_token", "data2vec", "data2vec_tables"])
def test_the_twins_have_the_gradients_of_transformers(tmp_path, name):
    """With respect to the tables of relative positions, layer scale, and the biases of queries and values, too."""
    case = CASE[name]
    case.model().save_pretrained(tmp_path)
    model, _ = case.exact()
    torch.save(model.state_dict(), tmp_path / "state.pth")  # with the keys of the gradients, beside config.json
    model.register_forward_hook(lambda model, arguments, out: case.logits(out))
    prove_gradients(parity.load(tmp_path / "state.pth"), case.images(), model)


REAL = {**SIZES, "hidden_size": 192, "intermediate_size": 768, "image_size": 64, "patch_size": 16, "num_labels": 0}


@pytest.mark.parametrize("name", ["DeiTForImageClassification", "CLIPForImageClassification"])
def test_a_class_without_its_classifier_that_the_twins_cannot_express_is_refused(tmp_path, name):
    cls = getattr(transformers, name)
    fields = {"vision_config": REAL, "num_labels": 0} if name.startswith("CLIP") else REAL
    cls(cls.config_class(**fields)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"its class is '{name}', whose output is .*: not supported"):
        parity.load(tmp_path)


@pytest.mark.parametrize("name", ["Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone"])
def test_the_last_feature_map_of_a_backbone_is_that_of_the_twins_or_it_is_refused(tmp_path, name):
    """The twins' mean of the patches, which they compute if they are given that pool, is that of the feature map."""
    cls = getattr(transformers, name)
    with float64():
        model = cls(cls.config_class(**REAL, out_indices=[1, 2])).eval()
        fill(model, rng_for(name))
    images = noise(rng_for(name), (1, 3, 64, 64), 1.0)
    model.double().save_pretrained(tmp_path / "last")
    with float64(), torch.no_grad():
        expected = model(torch.tensor(images)).feature_maps[-1].mean((2, 3)).numpy()
    found = parity.load(tmp_path / "last")
    assert "outputs" in {each.field for each in found.assumed}
    pooled = parity.Checkpoint(found.config.replace(head={"pool": "mean"}), "torch", parity.to_torch(found))
    assert relrms(torch_logits(pooled, images), expected) <= FLOAT64_TOLERANCE
    cls(cls.config_class(**REAL, out_indices=[1])).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"its config\.json says out_indices \[1\], which omits the last block"):
        parity.load(tmp_path / "other")


@pytest.mark.parametrize("name", ["vit", "dinov2_gated", "clip"])
def test_transformers_normalizes_images_as_the_config_says(tmp_path, name):
    case = CASE[name]
    case.model().save_pretrained(tmp_path / "original")
    parity.convert(tmp_path / "original", f"{tmp_path / 'written'}/", case.format)
    pixels = np.random.default_rng(0).integers(0, 256, (3, *case.size), np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "written")
    found = processor(torch.tensor(pixels), return_tensors="pt")["pixel_values"][0].numpy()
    mean, std = (
        np.reshape(values, (-1, 1, 1)) for values in vars(parity.load(tmp_path / "written").config.pixels).values()
    )
    assert relrms(found, (pixels / 255 - mean) / std) < 1e-6  # in float32


def test_a_model_type_without_a_format_is_refused_by_name(tmp_path):
    cls = transformers.IJepaModel
    cls(cls.config_class(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="model_type 'ijepa', which is not a known ViT; known are vit, "):
        parity.load(tmp_path)


def test_the_supported_classes_exist_in_transformers():
    assert all(hasattr(transformers, name) for name in CLASSES)


def test_the_folder_of_a_custom_class_is_refused(tmp_path):
    class ViTWithAMean(transformers.ViTPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.vit = transformers.ViTModel(config, add_pooling_layer=False)
            self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
            self.post_init()

    ViTWithAMean(transformers.ViTConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="says that its class is 'ViTWithAMean', which is not one of transformers'"):
        parity.load(tmp_path)
