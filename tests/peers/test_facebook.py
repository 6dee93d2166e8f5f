"""Files of the repositories of DeiT, DINO, DINOv2, DINOv3, MAE and CLIP, compared with timm's models and timm's loaders."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

for package in ("torch", "torchvision", "timm", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

import torch

import parity
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.peers.facebook import CASES, PEER
from tests.peers.proof import prove, relrms


def save_original(name: str, tmp_path: Path) -> Path:
    """Save the file of the repository, and return its path."""
    torch.save(CASES[name].file(), tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def round_trip(name: str, tmp_path: Path) -> Path:
    """Convert a file of the repository to the JAX twin's format and back; return the path."""
    case, ours = CASES[name], tmp_path / "ours.safetensors"
    parity.convert(save_original(name, tmp_path), ours, "jax", given=case.given)
    parity.convert(ours, tmp_path / "back.pth", case.format)
    return tmp_path / "back.pth"


@pytest.mark.parametrize("name", CASES)
def test_the_twins_compute_timms_outputs_from_a_file_of_the_repository(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    prove(save_original(name, tmp_path), case.images, case.logits(), format=case.format, peer=PEER, given=case.given)


@pytest.mark.parametrize("name", CASES)
def test_timms_own_loader_reads_a_written_file_and_computes_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    state = torch.load(round_trip(name, tmp_path), weights_only=True)
    found, expected = case.logits(case.read_by_timm(state)), case.logits()
    if name == "dinov2_registers":  # timm's loader adds the class token and its position, which rounds
        assert relrms(found, expected) <= FLOAT64_TOLERANCE
    else:
        assert np.array_equal(found, expected)


# Of MAE and CLIP, only the encoder and the image tower are written.
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mae", "clip")])
def test_a_written_file_has_exactly_the_keys_and_shapes_of_the_original(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].state()
    found = torch.load(round_trip(name, tmp_path), weights_only=True)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in theirs.items()}
