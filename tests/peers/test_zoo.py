"""No checkpoint of timm or transformers is silently read as another function; tested with one model of each kind.

`python -m benchmarks.zoo` checks all models.
"""

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for package in ("torch", "torchvision", "timm", "transformers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.peers.zoo import of_timm, of_transformers
from tests.peers.zoo.outcomes import ASSUMED, REFUSED, RIGHT, WRONG, Peer, check_reading

CLASSES = (
    "ViTForImageClassification",
    "ViTModel",
    "ViTForMaskedImageModeling",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "DeiTModel",
    "Dinov2ForImageClassification",
    "Dinov2Model",
    "Dinov2WithRegistersForImageClassification",
    "DINOv3ViTModel",
    "DINOv3ViTModel, gated",
    "SiglipVisionModel",
    "SiglipVisionModel, no head",
    "SiglipForImageClassification",
    "Siglip2VisionModel",
    "CLIPVisionModel",
    "CLIPForImageClassification",
    "ViTMAEModel",
    "ViTMSNForImageClassification",
    "BeitForImageClassification",
    "BeitForImageClassification, relative",
    "Data2VecVisionModel",
    "Data2VecVisionModel, shared",
    "IJepaForImageClassification",
    "Aimv2VisionModel",
    "RfDetrDinov2Backbone",
)
SEEDS = (2, 4, 5, 6, 8, 9, 14, 26, 45, 46)  # timm accepts the random arguments of these seeds


def assert_read_correctly(library: ModuleType, name: str, options: dict[str, Any], folder: Path) -> None:
    """Assert that each checkpoint of a model has an allowed outcome: see `outcomes`."""
    peer = library.peer(name, **options)
    # The first two ways only: test_hugging_face.py reads the third, state dicts in memory.
    for way, path, bare in itertools.islice(library.save_each_way(peer, folder), 2):
        outcome = check_reading(peer, path, bare=bare)
        assert outcome.verdict in ((RIGHT, REFUSED, ASSUMED) if bare else (RIGHT, REFUSED)), (way, outcome)


@pytest.mark.parametrize("architecture", of_timm.DISTINCT)
def test_an_architecture_of_timm_is_read_correctly_or_refused(tmp_path: Path, architecture: str) -> None:
    side = of_timm.patch_side(architecture)  # a grid that is not square, with as many patches as a square one
    assert_read_correctly(of_timm, architecture, {"img_size": (2 * side, 8 * side)}, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_architecture_of_timm_with_random_arguments_is_read_correctly_or_refused(tmp_path: Path, seed: int) -> None:
    assert_read_correctly(of_timm, *of_timm.random_variation(seed), tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_transformers_is_read_correctly_or_refused(tmp_path: Path, name: str) -> None:
    assert_read_correctly(of_transformers, name, {}, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_a_class_of_transformers_with_random_fields_is_read_correctly_or_refused(tmp_path: Path, seed: int) -> None:
    assert_read_correctly(of_transformers, *of_transformers.random_variation(seed), tmp_path)


def plain(**changes: Any) -> Peer:
    """Return a ViT that is read correctly, with some fields of `Peer` changed."""
    return dataclasses.replace(of_timm.peer("vit_tiny_patch16_224"), **changes)


@pytest.mark.parametrize("bare", [False, True])
def test_a_difference_that_no_assumption_explains_is_found(tmp_path: Path, bare: bool) -> None:
    path = (
        of_timm.save_state_dict(plain(), tmp_path / "model.pth")
        if bare
        else of_timm.save_folder(plain(), tmp_path / "folder")
    )
    assert check_reading(plain(), path, bare=bare).verdict == RIGHT
    other = plain(run=lambda model, pixels: model(pixels) * (1 + 1e-9))
    assert check_reading(other, path, bare=bare).verdict == WRONG


def test_a_difference_in_an_assumed_field_is_explained(tmp_path: Path) -> None:
    peer = of_timm.peer("vit_tiny_patch16_224", act_layer="mish")
    outcome = check_reading(peer, of_timm.save_state_dict(peer, tmp_path / "model.pth"), bare=True)
    assert (outcome.verdict, outcome.details) == (ASSUMED, "mlp.activation='gelu' for 'mish'")
