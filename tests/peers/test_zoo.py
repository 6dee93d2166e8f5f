"""No checkpoint is silently read as another function: one of each distinct model of timm and transformers.

`python -m benchmarks.zoo` goes through all of them.
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
from tests.peers.zoo.judging import ASSUMED, REFUSED, RIGHT, WRONG, Peer, judge

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
    "Data2VecVisionModel",
    "IJepaForImageClassification",
    "Aimv2VisionModel",
    "RfDetrDinov2Backbone",
)
SEEDS = (3, 4, 8, 9, 13, 14, 45, 195, 276, 297)  # for which timm takes the arguments together


def hold(library: ModuleType, name: str, options: dict[str, Any], folder: Path) -> None:
    """Hold every checkpoint of a model to "equal, refused, or a bare file whose assumptions explain the difference"."""
    peer = library.peer(name, **options)
    for way, path, bare in itertools.islice(library.cases(peer, folder), 2):  # test_hugging_face reads keys in memory too
        outcome = judge(peer, path, bare=bare)
        assert outcome.verdict in ((RIGHT, REFUSED, ASSUMED) if bare else (RIGHT, REFUSED)), (way, outcome)


@pytest.mark.parametrize("architecture", of_timm.DISTINCT)
def test_an_architecture_of_timm_is_read_as_its_own_function_or_refused(tmp_path: Path, architecture: str) -> None:
    side = of_timm.patch(architecture)  # a grid that is no square, and that has as many patches as one
    hold(of_timm, architecture, {"img_size": (2 * side, 8 * side)}, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_so_is_one_of_timm_with_random_arguments(tmp_path: Path, seed: int) -> None:
    hold(of_timm, *of_timm.drawn(seed), tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_transformers_is_read_as_its_own_function_or_refused(tmp_path: Path, name: str) -> None:
    hold(of_transformers, name, {}, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_so_is_one_of_transformers_with_random_fields(tmp_path: Path, seed: int) -> None:
    hold(of_transformers, *of_transformers.drawn(seed), tmp_path)


def plain(**changes: Any) -> Peer:
    """A ViT that is read right, with something else about it changed."""
    return dataclasses.replace(of_timm.peer("vit_tiny_patch16_224"), **changes)


@pytest.mark.parametrize("bare", [False, True])
def test_a_difference_that_no_assumption_names_is_found(tmp_path: Path, bare: bool) -> None:
    path = of_timm.bare(plain(), tmp_path / "model.pth") if bare else of_timm.folder(plain(), tmp_path / "folder")
    assert judge(plain(), path, bare=bare).verdict == RIGHT
    other = plain(run=lambda model, pixels: model(pixels) * (1 + 1e-9))
    assert judge(other, path, bare=bare).verdict == WRONG


def test_an_assumption_that_names_the_difference_explains_it(tmp_path: Path) -> None:
    peer = of_timm.peer("vit_tiny_patch16_224", act_layer="mish")
    outcome = judge(peer, of_timm.bare(peer, tmp_path / "model.pth"), bare=True)
    assert (outcome.verdict, outcome.told) == (ASSUMED, "mlp.activation='gelu' for Mish")
