"""torchvision's format compared with torchvision's own class."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("torch", "torchvision", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.goldens.peers import fill, float64, rng_for  # noqa: I001  # first: it makes torchvision importable
import torch
import torchvision
from torchvision.models.vision_transformer import VisionTransformer

import parity
from tests.goldens.golden import noise
from tests.peers.proof import prove

PEER = f"torchvision {torchvision.__version__.partition('+')[0]}"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden": {"representation_size": 9},
    "other_sizes": {"image_size": 16, "patch_size": 8, "hidden_dim": 20, "num_heads": 5, "num_layers": 1},
}


def options(name: str) -> dict[str, Any]:
    """Return the arguments of torchvision's class."""
    sizes = {"image_size": 12, "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 12, "mlp_dim": 18}
    return {**sizes, "num_classes": 5, **CASES[name]}


@functools.cache
def model(name: str) -> VisionTransformer:
    with float64():
        result = VisionTransformer(**options(name)).eval()
        fill(result, rng_for(name))
    return result


def images(name: str) -> np.ndarray:
    size = model(name).image_size
    return noise(rng_for(name), (2, 3, size, size), 1.0)


def logits(name: str) -> np.ndarray:
    with float64():
        return model(name)(torch.tensor(images(name))).numpy()


def legacy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names of torchvision 0.12."""
    return {key.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): value for key, value in state.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("table", ["mlp", "legacy"])
def test_the_twins_compute_the_outputs_of_torchvision(name: str, table: str, tmp_path: Path) -> None:
    state = dict(model(name).state_dict())
    torch.save(legacy(state) if table == "legacy" else state, tmp_path / "theirs.pth")
    given = {"num_heads": options(name)["num_heads"]}
    prove(tmp_path / "theirs.pth", images(name), logits(name), format=f"torchvision:{table}", peer=PEER, given=given)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("table", ["mlp", "legacy"])
def test_torchvision_loads_a_written_file_and_computes_the_same_bits(name: str, table: str, tmp_path: Path) -> None:
    torch.save(model(name).state_dict(), tmp_path / "theirs.pth")
    given = {"num_heads": options(name)["num_heads"]}
    parity.convert(tmp_path / "theirs.pth", tmp_path / "ours.safetensors", "jax", given=given)
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.pth", f"torchvision:{table}")
    expected = logits(name)
    with float64():
        loaded = VisionTransformer(**options(name)).eval()
        loaded.load_state_dict(torch.load(tmp_path / "back.pth", weights_only=True), strict=True)
        assert np.array_equal(loaded(torch.tensor(images(name))).numpy(), expected)
