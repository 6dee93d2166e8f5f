"""timm reads Google's npz files by its own loader, and computes from ours what the twins compute.

Of Google's formats it reads three: the published names of vision_transformer, and big_vision's two.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
from tests.goldens.golden import noise
from tests.google_names import google_names
from tests.peers.proof import prove
from vit_spec import ViTConfig

torch = pytest.importorskip("torch")
peers = pytest.importorskip("tests.goldens.peers")  # which mends torchvision, that timm imports
timm = pytest.importorskip("timm")

SMALL: dict[str, Any] = {
    "img_size": (12, 12),
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 1.5,
    "num_classes": 5,
    "act_layer": "gelu_tanh",
}
TOKEN: dict[str, Any] = {"class_token": True}
PATCHES: dict[str, Any] = {"class_token": False, "global_pool": "avg", "fc_norm": False}
MAP: dict[str, Any] = {"class_token": False, "global_pool": "map"}
# The format, and what timm's model is.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "token": ("google:pre-linen", TOKEN),
    "big_vision token": ("big_vision:loop", TOKEN | {"no_embed_class": True}),
    "big_vision token, stacked": ("big_vision:scan", TOKEN | {"no_embed_class": True}),
    "mean": ("big_vision:loop", PATCHES),
    "mean, stacked": ("big_vision:scan", PATCHES),
    "attention": ("big_vision:loop", MAP | {"num_classes": 0}),
    "attention, stacked": ("big_vision:scan", MAP),
}


def built(options: dict[str, Any]) -> Any:
    """timm's model, filled with noise, in float64; call this inside `float64`."""
    model = timm.models.VisionTransformer(**SMALL | options).double().eval()
    peers.fill(model, np.random.default_rng(0))
    return model


def names(model: Any, format: str) -> dict[str, np.ndarray]:
    """The weights of timm's model under Google's names, by hand."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    sizes = ViTConfig(width=12, depth=2, num_heads=3, mlp_dim=18)
    google = format.startswith("google")
    table = "Transformer/posembed_input/pos_embedding" if google else "pos_embedding"
    return google_names(state, sizes, table, old=google, scan=format.endswith("scan"))


def through_timm(path: Path, options: dict[str, Any], images: np.ndarray) -> np.ndarray:
    """The logits of a new model that loaded a file by timm's own loader."""
    with peers.float64():
        model = timm.models.VisionTransformer(**SMALL | options).double().eval()
        peers.fill(model, np.random.default_rng(1))
        model.load_pretrained(str(path))
        return model(torch.tensor(images)).numpy()


def written(name: str, tmp_path: Path) -> tuple[np.ndarray, np.ndarray, Path]:
    """Images, a timm model's logits, and its weights in a file of ours, which went through the twins' format."""
    format, options = MODELS[name]
    images = noise(np.random.default_rng(2), (2, 3, 12, 12), 1.0)
    with peers.float64():
        model = built(options)
        logits = model(torch.tensor(images)).numpy()
        np.savez(tmp_path / "theirs.npz", **names(model, format))
    prove(tmp_path / "theirs.npz", images, logits, format=format, peer=f"timm {timm.__version__}")
    parity.convert(tmp_path / "theirs.npz", tmp_path / "jax.safetensors", "jax")
    parity.convert(tmp_path / "jax.safetensors", tmp_path / "ours.npz", format)
    return images, logits, tmp_path / "ours.npz"


@pytest.mark.parametrize("name", MODELS)
def test_timm_computes_from_our_file_bit_for_bit_what_its_model_did(name: str, tmp_path: Path) -> None:
    images, logits, path = written(name, tmp_path)
    assert through_timm(path, MODELS[name][1], images).tobytes() == logits.tobytes()


@pytest.mark.parametrize("prefix", ["params/", "params/img/", "opt/target/"])
def test_timm_and_we_peel_the_same_wrappers(prefix: str, tmp_path: Path) -> None:
    name = "token" if prefix == "opt/target/" else "attention"
    images, logits, path = written(name, tmp_path)
    with np.load(path) as file:
        inside = {f"{prefix}{key}": array for key, array in file.items() if not key.startswith("__")}
    np.savez(tmp_path / "wrapped.npz", **inside)
    assert through_timm(tmp_path / "wrapped.npz", MODELS[name][1], images).tobytes() == logits.tobytes()
    prove(tmp_path / "wrapped.npz", images, logits, format=MODELS[name][0], peer=f"timm {timm.__version__}")


def test_the_gelu_that_timm_takes_by_default_is_not_googles(tmp_path: Path) -> None:
    images, logits, path = written("token", tmp_path)
    exact = through_timm(path, TOKEN | {"act_layer": "gelu"}, images)
    assert np.linalg.norm(exact - logits) > 1e-6 * np.linalg.norm(logits)
