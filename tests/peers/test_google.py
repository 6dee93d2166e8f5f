"""timm's own loader of Google's npz files reads the files written here, and timm computes the outputs of the twins.

The loader reads three of Google's formats: the published names of vision_transformer, and the two of big_vision.
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
peers = pytest.importorskip("tests.goldens.peers")  # makes torchvision importable, which timm imports
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
# Name -> the format, and options of timm's model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "token": ("google:pre-linen", TOKEN),
    "big_vision token": ("big_vision:loop", TOKEN | {"no_embed_class": True}),
    "big_vision token, stacked": ("big_vision:scan", TOKEN | {"no_embed_class": True}),
    "mean": ("big_vision:loop", PATCHES),
    "mean, stacked": ("big_vision:scan", PATCHES),
    "attention": ("big_vision:loop", MAP | {"num_classes": 0}),
    "attention, stacked": ("big_vision:scan", MAP),
}


def random_model(options: dict[str, Any]) -> Any:
    """Return timm's model with random weights in float64; call this inside `float64`."""
    model = timm.models.VisionTransformer(**SMALL | options).double().eval()
    peers.fill(model, np.random.default_rng(0))
    return model


def google_arrays(model: Any, format: str) -> dict[str, np.ndarray]:
    """Return the weights of timm's model under Google's names, renamed without `parity`."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    sizes = ViTConfig(width=12, depth=2, num_heads=3, mlp_dim=18)
    google = format.startswith("google")
    table = "Transformer/posembed_input/pos_embedding" if google else "pos_embedding"
    return google_names(state, sizes, table, old=google, scan=format.endswith("scan"))


def timm_logits(path: Path, options: dict[str, Any], images: np.ndarray) -> np.ndarray:
    """Return the logits of a new model with the weights that timm's own loader reads from a file."""
    with peers.float64():
        model = timm.models.VisionTransformer(**SMALL | options).double().eval()
        peers.fill(model, np.random.default_rng(1))
        model.load_pretrained(str(path))
        return model(torch.tensor(images)).numpy()


def written_by_parity(name: str, tmp_path: Path) -> tuple[np.ndarray, np.ndarray, Path]:
    """Return images, timm's logits, and the path of the weights after conversion to the JAX twin's format and back."""
    format, options = MODELS[name]
    images = noise(np.random.default_rng(2), (2, 3, 12, 12), 1.0)
    with peers.float64():
        model = random_model(options)
        logits = model(torch.tensor(images)).numpy()
        np.savez(tmp_path / "theirs.npz", **google_arrays(model, format))
    prove(tmp_path / "theirs.npz", images, logits, format=format, peer=f"timm {timm.__version__}")
    parity.convert(tmp_path / "theirs.npz", tmp_path / "jax.safetensors", "jax")
    parity.convert(tmp_path / "jax.safetensors", tmp_path / "ours.npz", format)
    return images, logits, tmp_path / "ours.npz"


@pytest.mark.parametrize("name", MODELS)
def test_timm_computes_the_same_bits_from_a_written_file(name: str, tmp_path: Path) -> None:
    images, logits, path = written_by_parity(name, tmp_path)
    assert timm_logits(path, MODELS[name][1], images).tobytes() == logits.tobytes()


@pytest.mark.parametrize("prefix", ["params/", "params/img/", "opt/target/"])
def test_timm_and_parity_both_remove_a_prefix_of_the_keys(prefix: str, tmp_path: Path) -> None:
    name = "token" if prefix == "opt/target/" else "attention"
    images, logits, path = written_by_parity(name, tmp_path)
    with np.load(path) as file:
        inside = {f"{prefix}{key}": array for key, array in file.items() if not key.startswith("__")}
    np.savez(tmp_path / "wrapped.npz", **inside)
    assert timm_logits(tmp_path / "wrapped.npz", MODELS[name][1], images).tobytes() == logits.tobytes()
    prove(tmp_path / "wrapped.npz", images, logits, format=MODELS[name][0], peer=f"timm {timm.__version__}")


def test_timms_default_gelu_is_not_googles(tmp_path: Path) -> None:
    images, logits, path = written_by_parity("token", tmp_path)
    exact = timm_logits(path, TOKEN | {"act_layer": "gelu"}, images)
    assert np.linalg.norm(exact - logits) > 1e-6 * np.linalg.norm(logits)
