"""Models with the parameter names of a known library but another function: the difference is read, refused or reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
import vit_spec
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint
from tests.twins import perturbed_params, random_images
from vit_spec import InputError, ViTConfig

torch = pytest.importorskip("torch")

from torch import Tensor, nn

import vit_torch

CONFIG = vit_spec.get("vit_ti16", depth=1, num_classes=7, image_size=(48, 64))
GRID, HEADS = (3, 4), 3
State = dict[str, Tensor]


def perturbed_state(config: ViTConfig) -> State:
    """Return perturbed weights in float64 with timm's names."""
    return {key: value.double() for key, value in parity.to_torch(perturbed_params(config), config).items()}


def images() -> Tensor:
    """Return images, (2, 3, H, W), in float64."""
    return torch.from_numpy(np.asarray(random_images(CONFIG), np.float64)).permute(0, 3, 1, 2)


def outputs(path: Path, **given: Any) -> np.ndarray:
    """Return the outputs in float64 of the PyTorch twin with the weights of a file."""
    with pytest.warns(parity.AssumptionWarning), torch.no_grad():
        model = vit_torch.load(path, given={"image_size": CONFIG.image_size} | given)
        return model.double()(images()).numpy()


def assumptions(path: Path) -> dict[str, Any]:
    """Return the assumptions about a file: field -> value."""
    found = parity.load(path, given={"image_size": CONFIG.image_size})
    return {each.field: each.value for each in found.assumed}


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# Other code with timm's names -----------------------------------------------------------------------------------------


class LookAlike:
    """A ViT with timm's names; subclasses replace one step."""

    def __init__(self, state: State) -> None:
        self.state = state

    def norm(self, name: str, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], 1e-6)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def patches(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x, self.state["patch_embed.proj.weight"], self.state["patch_embed.proj.bias"], 16)
        return x.flatten(2).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        if "cls_token" in self.state:
            x = torch.cat([self.state["cls_token"].expand(len(x), -1, -1), x], 1)
        return x + self.state["pos_embed"]

    def split(self, qkv: Tensor) -> Tensor:
        return qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.linear("blocks.0.attn.qkv", x))
        mixed = self.scores(q, k).softmax(-1) @ v
        return self.linear("blocks.0.attn.proj", mixed.transpose(1, 2).flatten(2))

    def residual(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def block(self, x: Tensor) -> Tensor:
        x = self.residual(x, self.attention(self.norm("blocks.0.norm1", x)))
        hidden = nn.functional.gelu(self.linear("blocks.0.mlp.fc1", self.norm("blocks.0.norm2", x)))
        return self.residual(x, self.linear("blocks.0.mlp.fc2", hidden))

    def pool(self, x: Tensor) -> Tensor:
        x = self.norm("norm", x)
        return x[:, 0] if "cls_token" in self.state else x.mean(1)

    def __call__(self, x: Tensor) -> np.ndarray:
        return self.linear("head", self.pool(self.block(self.tokens(self.patches(x))))).numpy()


class ScaledResidual(LookAlike):  # zihangJiang/TokenLabeling, tlt/models/lvvit.py, skip_lam=2
    def residual(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch / 2


class InterleavedQKV(LookAlike):
    def split(self, qkv: Tensor) -> Tensor:
        return qkv.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)


class DistanceBias(LookAlike):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        return super().scores(q, k) - 0.1 * (places[:, None] - places).abs()


class ColumnMajorPatches(LookAlike):
    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x).unflatten(1, GRID).transpose(1, 2).flatten(1, 2)


class ClassTokenLast(LookAlike):
    def tokens(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.state["cls_token"].expand(len(x), -1, -1)], 1) + self.state["pos_embed"]

    def pool(self, x: Tensor) -> Tensor:
        return self.norm("norm", x)[:, -1]


class BlocksAppliedTwice(LookAlike):
    def block(self, x: Tensor) -> Tensor:
        return super().block(super().block(x))


class MeanBeforeNorm(LookAlike):  # facebookresearch/SlowFast, models/video_model_builder.py, USE_MEAN_POOLING
    def pool(self, x: Tensor) -> Tensor:
        return self.norm("norm", x.mean(1))


class Temperature(LookAlike):
    def __call__(self, x: Tensor) -> np.ndarray:
        return super().__call__(x) / 0.1


NO_CLASS_TOKEN = {"tokens": {"class_token": False}, "head": {"pool": "mean"}}
# Class -> fields of the config, the field of the assumption, and words of its value.
DIFFERENCES: dict[type[LookAlike], tuple[dict[str, Any], str, str]] = {
    ScaledResidual: ({}, "residual connections", "added unscaled"),
    InterleavedQKV: ({}, "queries, keys and values", "all queries, then all keys"),
    DistanceBias: ({}, "attention pattern", "scores without a bias"),
    ColumnMajorPatches: ({}, "patch extraction", "row by row"),
    ClassTokenLast: ({}, "use of positions", "a class token's row first"),
    BlocksAppliedTwice: ({}, "use of blocks", "each once"),
    MeanBeforeNorm: (NO_CLASS_TOKEN, "mean pooling", "after the last norm"),
    Temperature: ({}, "outputs", "unscaled"),
}


@pytest.mark.parametrize("fields", [{}, NO_CLASS_TOKEN], ids=["class token", "mean"])
def test_a_look_alike_without_a_difference_has_the_same_outputs(tmp_path: Path, fields: Any) -> None:
    state = perturbed_state(CONFIG.replace(**fields))
    torch.save(state, tmp_path / "a.pth")
    assert relative_error(outputs(tmp_path / "a.pth"), LookAlike(state)(images())) < 1e-13


@pytest.mark.parametrize("model", DIFFERENCES, ids=lambda model: model.__name__)
def test_each_difference_of_code_with_timms_names_is_an_assumption(tmp_path: Path, model: type[LookAlike]) -> None:
    fields, name, words = DIFFERENCES[model]
    state = perturbed_state(CONFIG.replace(**fields))
    torch.save(state, tmp_path / "a.pth")
    assert relative_error(outputs(tmp_path / "a.pth"), model(state)(images())) > 1e-3
    assert words in assumptions(tmp_path / "a.pth")[name]


# Other code with Google's names ---------------------------------------------------------------------------------------

LINEN = CONFIG.replace(mlp={"activation": "gelu_tanh"})


def write_weights(path: Path, config: ViTConfig, format: str) -> Callable[[], np.ndarray]:
    """Write weights in one of Google's formats, and return a function that computes the outputs of their model."""
    state = perturbed_state(config)
    np.savez(path, **dict(converted_arrays(Checkpoint(config, "torch", state), format)))
    model = vit_torch.ViT(config).double().eval()
    model.load_state_dict(state)
    return lambda: model(images()).detach().numpy()


@pytest.mark.parametrize("fields", [{}, NO_CLASS_TOKEN], ids=["token", "gap"])
def test_positions_that_googles_files_do_not_store_are_an_assumption(tmp_path: Path, fields: Any) -> None:
    path = tmp_path / "a.npz"  # google-research/vision_transformer, Encoder(add_position_embedding=False)
    expected = write_weights(path, LINEN.replace(**fields, positions={"kind": "none"}), "google:linen")()
    assert assumptions(path)["positions.kind"] == "fixed"
    assert relative_error(outputs(path), expected) > 1e-3
    assert relative_error(outputs(path, **{"positions.kind": "none"}), expected) < 1e-13


@pytest.mark.parametrize("fields", [{}, NO_CLASS_TOKEN], ids=["tok", "gap"])
def test_sinusoids_of_big_vision_are_read_with_and_without_a_class_token(tmp_path: Path, fields: Any) -> None:
    path = tmp_path / "a.npz"  # posemb="sincos2d"
    positions = {"kind": "fixed", "table": "sincos_2d_big_vision", "covers": "all" if fields else "none"}
    expected = write_weights(path, LINEN.replace(**fields, positions=positions), "big_vision")()
    assert relative_error(outputs(path), expected) < 1e-13


@pytest.mark.parametrize("format", ["google:linen", "scenic", "big_vision", "big_vision-old:root"])
def test_each_difference_of_code_with_googles_names_is_an_assumption(tmp_path: Path, format: str) -> None:
    covers = {"positions": {"covers": "none"}} if format == "big_vision" else {}
    write_weights(tmp_path / "a.npz", LINEN.replace(**covers, head={"hidden": 192}), format)
    found = assumptions(tmp_path / "a.npz")
    assert found["activation of pre_logits"] == "tanh"  # none in early versions of big_vision
    assert found["norms without weights"] == "none"  # norm_pre_logits of google-research/l2p
    assert found["outputs"] == "those of the classifier, unscaled"  # temperature of google-research/l2p
    assert "by a softmax" in found["attention pattern"]  # TopViT of google-research/google-research


def test_score_scale_and_rotary_positions_of_googles_names_are_assumptions(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.npz", LINEN, "google:linen")
    assert {"attention.scale", "positions.rotary"} <= assumptions(tmp_path / "a.npz").keys()


# Others ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["timm", "mae", "hf-vit"])
def test_a_patch_projection_with_channels_last_is_refused(tmp_path: Path, format: str) -> None:
    """MLX stores (width, 16, 16, 3), which PyTorch reads as 16 channels and patches of 16 x 3."""
    config = CONFIG.replace(num_classes=0, image_size=(64, 64))
    arrays = dict(converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), format))
    transposed = {key: array.transpose(0, 2, 3, 1).copy() if array.ndim == 4 else array for key, array in arrays.items()}
    np.savez(tmp_path / "a.npz", **transposed)
    with pytest.raises(
        InputError, match="16 channels of 16x3 pixels, or 3 channels of 16x16 if the channels are last"
    ) as error:
        parity.load(tmp_path / "a.npz")
    assert "\n" not in str(error.value)
    assert parity.load(tmp_path / "a.npz", given={"in_channels": 16}).config.in_channels == 16


def test_openclips_pooling_is_an_assumption_without_its_json_file(tmp_path: Path) -> None:
    config = vit_spec.get("clip_b16", depth=1, width=192, num_heads=3, mlp_dim=768, num_classes=7, image_size=(64, 64))
    arrays = dict(converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), "openai-clip:tower"))
    np.savez(tmp_path / "a.npz", **arrays)
    found = {each.field: each.value for each in parity.load(tmp_path / "a.npz").assumed}
    assert found["mean pooling"] == "if any, after the last norm"  # final_ln_after_pool


def test_the_scale_of_rotary_coordinates_is_an_assumption(tmp_path: Path) -> None:
    """DINOv3's pos_embed_rope_normalize_coords has no key, and changes the outputs of images that are not square."""
    config = vit_spec.get("dinov3_s16", depth=1)
    arrays = dict(converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), "dinov3:mlp"))
    fixed = {key: np.asarray(array) for key, array in get("dinov3:mlp").constant_arrays(config).items()}
    np.savez(tmp_path / "a.npz", **fixed | arrays)
    found = {each.field: each.value for each in parity.load(tmp_path / "a.npz").assumed}
    assert found["rotary coordinates"] == "rows divided by the number of rows, columns by the number of columns"
    assert {"norms.order", "attention pattern", "use of blocks", "queries, keys and values"} <= found.keys()


@pytest.mark.parametrize("trained", [False, True])
def test_an_unused_norm_is_an_assumption_only_if_it_was_trained(tmp_path: Path, trained: bool) -> None:
    size: dict[str, Any] = {"depth": 1, "width": 192, "num_heads": 3, "mlp_dim": 768, "image_size": (64, 64)}
    config = vit_spec.get("article_multihead", num_classes=7, **size)
    format = get("article_multihead")
    arrays = dict(
        converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), "article_multihead")
    ) | format.constant_arrays(config)
    if trained:
        arrays["vit.0.norm.weight"] = arrays["vit.0.norm.weight"] * 1.5
    np.savez(tmp_path / "a.npz", **arrays)
    fields = {each.field for each in parity.load(tmp_path / "a.npz", given={"num_heads": 3}).assumed}
    assert ("vit.{block}.norm" in fields) == trained


@pytest.mark.parametrize("format", ["lucidrains:vit", "torchvision", "dinov2:mlp"])
def test_each_difference_of_modified_copies_of_a_library_is_an_assumption(tmp_path: Path, format: str) -> None:
    config = CONFIG.replace(image_size=(64, 64), norms={"eps": 1e-5})
    if format.startswith("lucidrains"):  # no bias of queries, keys and values, and a norm after the pool only
        config = config.replace(attention={"qkv_bias": "none"}, norms={"after_blocks": False, "after_pool": True})
    if format.startswith("dinov2"):  # SimMIM's encoders, whose mask_token is DINOv2's too
        config = config.replace(num_classes=0, norms={"layer_scale": 1.0})
    arrays = dict(converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), format)) | get(
        format
    ).constant_arrays(config)
    np.savez(tmp_path / "a.npz", **arrays)
    found = parity.load(tmp_path / "a.npz")
    assert found.format == format or found.format.startswith(f"{format}:")
    names = {each.field for each in found.assumed}
    assert {"norms.order", "attention pattern", "use of blocks", "head.pool"} <= names
    assert ("mean pooling" in names) == config.norms.after_blocks  # a mean after the pooled feature's norm is another shape
    if format != "torchvision":  # whose class calls torch.nn.MultiheadAttention
        assert {"attention.scale", "positions.rotary", "queries, keys and values"} <= names


@pytest.mark.parametrize(("format", "layer"), [("hf-vit", "intermediate.dense"), ("hf-flax", "intermediate/dense")])
def test_a_file_without_the_first_layer_of_its_mlps_is_refused(tmp_path: Path, format: str, layer: str) -> None:
    config = CONFIG.replace(image_size=(64, 64))
    arrays = dict(converted_arrays(Checkpoint(config, "torch", perturbed_state(config)), format))
    incomplete = {key: array for key, array in arrays.items() if not (layer in key and array.ndim == 2)}
    assert len(incomplete) == len(arrays) - 1
    np.savez(tmp_path / "a.npz", **incomplete)
    with pytest.raises(InputError, match=f"missing .*{layer}") as error:
        parity.load(tmp_path / "a.npz")
    assert "\n" not in str(error.value)
