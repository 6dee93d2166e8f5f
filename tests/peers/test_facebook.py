"""DeiT, DINO, DINOv2, DINOv3, MAE and CLIP in their own repositories' files, against timm's models and timm's loaders."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

for package in ("torch", "torchvision", "timm", "jax"):
    if importlib.util.find_spec(package) is None:  # importing torchvision has to wait for what mends it
        pytest.skip(f"needs {package}", allow_module_level=True)

import torch

import parity
from parity.comparison.tolerances import FUNCTION
from tests.peers.facebook import CASES, PEER
from tests.peers.proof import prove, relrms


def saved(name: str, tmp_path: Path) -> Path:
    torch.save(CASES[name].file(), tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def back(name: str, tmp_path: Path) -> Path:
    """Their file, converted to JAX and back."""
    case, ours = CASES[name], tmp_path / "ours.safetensors"
    parity.convert(saved(name, tmp_path), ours, "jax", given=case.given)
    parity.convert(ours, tmp_path / "back.pth", case.format)
    return tmp_path / "back.pth"


@pytest.mark.parametrize("name", CASES)
def test_the_twins_compute_what_timm_computes_with_the_repositorys_file(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    prove(saved(name, tmp_path), case.images, case.logits(), format=case.format, peer=PEER, given=case.given)


@pytest.mark.parametrize("name", CASES)
def test_timms_own_loader_reads_what_is_written_and_computes_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    state = torch.load(back(name, tmp_path), weights_only=True)
    found, expected = case.logits(case.read_by_timm(state)), case.logits()
    if name == "dinov2_registers":  # timm adds two parameters to read it
        assert relrms(found, expected) <= FUNCTION
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mae", "clip")])  # of these a tower is written
def test_what_is_written_has_every_key_of_the_original_and_no_other(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].state()
    found = torch.load(back(name, tmp_path), weights_only=True)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in theirs.items()}
