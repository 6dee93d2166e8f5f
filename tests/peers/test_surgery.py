"""Surgery compared with the corresponding functions of timm: the models are equal in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peers = pytest.importorskip("tests.goldens.peers")  # first: it makes torchvision importable, which timm imports
timm = pytest.importorskip("timm")

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models._manipulate import adapt_input_conv

import parity
from parity.checkpoints import surgery
from parity.checkpoints.conversion import parameter
from parity.checkpoints.weights import Checkpoint
from tests.peers.proof import jax_logits, relrms, torch_logits
from vit_spec import ViTConfig

CONFIG = ViTConfig(image_size=(16, 24), patch_size=8, width=12, depth=2, num_heads=3, mlp_dim=18, num_classes=5)
EXACT = 1e-12
MODES = {"timm": ("bicubic", True), "hf": ("bicubic", False), "flexivit": ("bilinear", False), "naflex": ("bilinear", True)}


def timm_model(**changes):
    """Return a ViT of timm with random weights in float64."""
    options = {
        "img_size": CONFIG.image_size,
        "patch_size": 8,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 1.5,
    }
    model = timm.models.VisionTransformer(num_classes=5, **options | changes).double().eval()
    peers.fill(model, np.random.default_rng(0))
    return model


def checkpoint_of(model):
    """Return a model of timm as a checkpoint."""
    return Checkpoint(CONFIG, "torch", {key: value.detach().clone() for key, value in model.state_dict().items()})


def noise(channels, height, width):
    return np.random.default_rng(1).normal(size=(2, channels, height, width))


def is_equal(found, theirs):
    return relrms(found, theirs.detach().numpy()) <= EXACT


@pytest.mark.parametrize("twin", [torch_logits, jax_logits])
@pytest.mark.parametrize(
    "sizes",
    [
        {"image_size": (40, 16)},
        {"patch_size": (4, 6)},
        {"image_size": (32, 30), "patch_size": (16, 10)},
    ],
    ids=str,
)
def test_a_resized_model_equals_timms_after_set_input_size(sizes, twin):
    with peers.float64():
        model = timm_model()
        after, _ = surgery.resize(checkpoint_of(model), **sizes)
        model.set_input_size(sizes.get("image_size"), sizes.get("patch_size"))
        images = noise(3, *after.config.image_size)
        assert is_equal(twin(after, images), model(torch.tensor(images)))


@pytest.mark.parametrize("mode", MODES)
def test_the_patch_projection_is_resampled_as_in_timm(mode):
    kernel, antialias = MODES[mode]
    with peers.float64():
        model = timm_model()
        theirs = resample_patch_embed(model.patch_embed.proj.weight, [4, 12], kernel, antialias)
        after, _ = surgery.resize(checkpoint_of(model), (8, 24), patch_size=(4, 12), resampling=mode)
        assert is_equal(parameter(after, "patch_embed.proj.weight"), theirs)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "flexivit_small"])
def test_a_model_of_timm_is_resized_as_timm_resizes_it_when_it_loads_it(tmp_path, name):
    """timm loads FlexiViTs with bilinear tables of positions and of patches, and others with bicubic ones."""
    sizes = {"embed_dim": 12, "depth": 1, "num_heads": 3, "num_classes": 5}
    with peers.float64():
        model = timm.create_model(name, img_size=64, patch_size=16, **sizes)
        peers.fill(model, np.random.default_rng(0))
        timm.models.save_for_hf(
            model, tmp_path, model_args=sizes | {"img_size": 64, "patch_size": 16}, safe_serialization=True
        )
        file = {"file": str(tmp_path / "model.safetensors"), "hf_hub_id": None, "num_classes": 5}
        resized = {"img_size": (60, 72), "patch_size": 12, "pretrained": True, "pretrained_cfg_overlay": file}
        theirs = timm.create_model(name, **sizes, **resized)
        after, _ = surgery.resize(parity.load(tmp_path), (60, 72), patch_size=12)
        for key in ("patch_embed.proj.weight", "pos_embed"):
            found, expected = parameter(after, key), theirs.state_dict()[key].numpy()
            assert relrms(found, expected.reshape(found.shape)) < 1e-6  # timm resamples in float32


@pytest.mark.parametrize("mode", MODES)
def test_positions_are_resampled_as_in_timm(mode):
    kernel, antialias = MODES[mode]
    with peers.float64():
        model = timm_model()
        theirs = resample_abs_pos_embed(model.pos_embed, [5, 2], [2, 3], 1, kernel, antialias)
        after, _ = surgery.resize(checkpoint_of(model), (40, 16), resampling=mode)
        assert is_equal(parameter(after, "pos_embed"), theirs[0])


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 7])
def test_channels_are_adapted_as_in_timm(channels):
    with peers.float64():
        model = timm_model()
        theirs = adapt_input_conv(channels, model.patch_embed.proj.weight)
        after, _ = surgery.adapt_channels(checkpoint_of(model), channels)
        assert is_equal(parameter(after, "patch_embed.proj.weight"), theirs)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_of_a_model_with_two_are_adapted_as_in_timm(channels):
    with peers.float64():
        model = timm_model(in_chans=2)
        two = Checkpoint(CONFIG.replace(in_channels=2), "torch", checkpoint_of(model).arrays)
        theirs = adapt_input_conv(channels, model.patch_embed.proj.weight, base_chans=2)
        after, _ = surgery.adapt_channels(two, channels)
        assert is_equal(parameter(after, "patch_embed.proj.weight"), theirs)


def test_a_model_with_a_folded_class_position_equals_timms_with_no_embed_class():
    with peers.float64():
        model = timm_model()
        after, _ = surgery.fold_class_position(checkpoint_of(model))
        folded = timm_model(no_embed_class=True)
        folded.load_state_dict(parity.to_torch(after))
        images = torch.tensor(noise(3, *CONFIG.image_size))
        assert is_equal(folded(images).numpy(), model(images))


def test_a_model_with_a_fixed_table_equals_timms_with_the_learned_one():
    """It is as the linear-head recipes train it: without a class token, with mean pooling."""
    config = CONFIG.replace(
        tokens={"class_token": False},
        positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
        head={"pool": "mean"},
    )
    with peers.float64():
        model = timm_model(class_token=False, global_pool="avg", fc_norm=False)
        state = {key: value.detach().clone() for key, value in model.state_dict().items() if key != "pos_embed"}
        before = Checkpoint(config, "torch", state)
        model.load_state_dict(parity.to_torch(surgery.learn_positions(before)[0]))
        images = noise(3, *CONFIG.image_size)
        assert is_equal(torch_logits(before, images), model(torch.tensor(images)))


def test_a_model_without_its_head_equals_timms_after_reset_classifier():
    with peers.float64():
        model = timm_model()
        after, _ = surgery.drop_head(checkpoint_of(model))
        model.reset_classifier(0)
        images = noise(3, *CONFIG.image_size)
        assert is_equal(torch_logits(after, images), model(torch.tensor(images)))
