"""Surgery against the functions of timm, in float64: what it makes of a model is what they make of it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peers = pytest.importorskip("tests.goldens.peers")  # first: it mends what timm imports
timm = pytest.importorskip("timm")

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models._manipulate import adapt_input_conv

import parity
from parity.checkpoints import surgery
from parity.checkpoints.weights import Checkpoint, parameter
from tests.peers.proof import relrms, through_jax, through_torch
from vit_spec import ViTConfig

CONFIG = ViTConfig(image_size=(16, 24), patch_size=8, width=12, depth=2, num_heads=3, mlp_dim=18, num_classes=5)
EXACT = 1e-12
MODES = {"timm": ("bicubic", True), "hf": ("bicubic", False), "flexivit": ("bilinear", False), "naflex": ("bilinear", True)}


def peer(**changes):
    """A ViT of timm with weights of noise, in float64."""
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


def weights(model):
    return Checkpoint(CONFIG, "torch", {key: value.detach().clone() for key, value in model.state_dict().items()})


def noise(channels, height, width):
    return np.random.default_rng(1).normal(size=(2, channels, height, width))


def same(found, theirs):
    return relrms(found, theirs.detach().numpy()) <= EXACT


@pytest.mark.parametrize("twin", [through_torch, through_jax])
@pytest.mark.parametrize(
    "sizes",
    [
        {"image_size": (40, 16)},
        {"patch_size": (4, 6)},
        {"image_size": (32, 30), "patch_size": (16, 10)},
    ],
    ids=str,
)
def test_a_resized_model_is_timms_after_set_input_size(sizes, twin):
    with peers.float64():
        model = peer()
        after, _ = surgery.resize(weights(model), **sizes)
        model.set_input_size(sizes.get("image_size"), sizes.get("patch_size"))
        images = noise(3, *after.config.image_size)
        assert same(twin(after, images), model(torch.tensor(images)))


@pytest.mark.parametrize("mode", MODES)
def test_a_projection_is_resampled_as_by_timm(mode):
    kernel, antialias = MODES[mode]
    with peers.float64():
        model = peer()
        theirs = resample_patch_embed(model.patch_embed.proj.weight, [4, 12], kernel, antialias)
        after, _ = surgery.resize(weights(model), (8, 24), patch_size=(4, 12), resampling=mode)
        assert same(parameter(after, "patch_embed.proj.weight"), theirs)


@pytest.mark.parametrize("mode", MODES)
def test_positions_are_resampled_as_by_timm(mode):
    kernel, antialias = MODES[mode]
    with peers.float64():
        model = peer()
        theirs = resample_abs_pos_embed(model.pos_embed, [5, 2], [2, 3], 1, kernel, antialias)
        after, _ = surgery.resize(weights(model), (40, 16), resampling=mode)
        assert same(parameter(after, "pos_embed"), theirs[0])


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 7])
def test_channels_are_adapted_as_by_timm(channels):
    with peers.float64():
        model = peer()
        theirs = adapt_input_conv(channels, model.patch_embed.proj.weight)
        after, _ = surgery.adapt_channels(weights(model), channels)
        assert same(parameter(after, "patch_embed.proj.weight"), theirs)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_of_another_base_are_adapted_as_by_timm(channels):
    with peers.float64():
        model = peer(in_chans=2)
        two = Checkpoint(CONFIG.replace(in_channels=2), "torch", weights(model).arrays)
        theirs = adapt_input_conv(channels, model.patch_embed.proj.weight, base_chans=2)
        after, _ = surgery.adapt_channels(two, channels)
        assert same(parameter(after, "patch_embed.proj.weight"), theirs)


def test_a_folded_model_is_timms_without_rows_for_its_tokens():
    with peers.float64():
        model = peer()
        after, _ = surgery.fold_class_position(weights(model))
        folded = peer(no_embed_class=True)
        folded.load_state_dict(parity.to_torch(after))
        images = torch.tensor(noise(3, *CONFIG.image_size))
        assert same(folded(images).numpy(), model(images))


def test_without_its_head_a_model_is_timms_without_classes():
    with peers.float64():
        model = peer()
        after, _ = surgery.drop_head(weights(model))
        model.reset_classifier(0)
        images = noise(3, *CONFIG.image_size)
        assert same(through_torch(after, images), model(torch.tensor(images)))
