"""The installed version of vit-pytorch: files from before 1.0 are read, later ones are refused with the reason."""

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "vit_pytorch", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.goldens.peers import fill, float64, rng_for  # noqa: I001  # first: it makes torchvision importable
import torch
from vit_pytorch import SimpleViT, ViT

import parity
from tests.goldens.golden import noise
from tests.peers.proof import prove
from vit_spec import InputError

VERSION = importlib.metadata.version("vit-pytorch")
PLAIN = pytest.mark.skipif(not VERSION.startswith("0."), reason=f"vit-pytorch {VERSION} normalizes patches: needs 0.40.2")
NORMED = pytest.mark.skipif(VERSION.startswith("0."), reason=f"vit-pytorch {VERSION} does not normalize patches: needs 1.0")
SIZES = {"image_size": (12, 20), "patch_size": 4, "num_classes": 5, "dim": 12, "depth": 2, "heads": 3, "mlp_dim": 18}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {"vit": (ViT, {"dim_head": 6}), "simple": (SimpleViT, {"dim_head": 4})}
GIVEN = {"num_heads": 3, "image_size": (12, 20)}


@functools.cache
def model(name: str) -> Any:
    """Return a model of vit-pytorch with random weights, in float64."""
    cls, options = CASES[name]
    with float64():
        result = cls(**SIZES, **options).double().eval()
        fill(result, rng_for(name))
    return result


def save_original(name: str, tmp_path: Path) -> Path:
    """Save the state dict of a model of vit-pytorch, and return the path."""
    torch.save(model(name).state_dict(), tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


@PLAIN
@pytest.mark.parametrize("name", CASES)
def test_the_twins_compute_the_outputs_of_vit_pytorch(name: str, tmp_path: Path) -> None:
    images = noise(rng_for(name), (2, 3, 12, 20), 1.0)
    with float64():
        logits = model(name)(torch.tensor(images)).numpy()
    path = save_original(name, tmp_path)
    prove(path, images, logits, format=f"lucidrains:{name}", peer=f"vit-pytorch {VERSION}", given=GIVEN)


@PLAIN
@pytest.mark.parametrize("name", CASES)
def test_vit_pytorch_loads_a_written_file_bit_for_bit(name: str, tmp_path: Path) -> None:
    parity.convert(save_original(name, tmp_path), tmp_path / "ours.safetensors", "jax", given=GIVEN)
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.pth", "lucidrains")
    found, theirs = torch.load(tmp_path / "back.pth", weights_only=True), model(name).state_dict()
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[key], theirs[key]) for key in theirs)


@PLAIN
def test_the_table_of_positions_is_an_assumption_because_another_simple_vit_has_the_same_keys(tmp_path: Path) -> None:
    from vit_pytorch.simple_vit_3d import SimpleViT as VideoViT

    sizes = {**SIZES, "image_size": 12, "dim": 24}
    patch = sizes.pop("patch_size")
    video = VideoViT(**sizes, image_patch_size=patch, frames=1, frame_patch_size=1, dim_head=8)
    torch.save(video.state_dict(), tmp_path / "video.pth")
    assert video.state_dict().keys() == model("simple").state_dict().keys()
    found = {
        each.field: each.value for each in parity.load(tmp_path / "video.pth", given={**GIVEN, "image_size": 12}).assumed
    }
    assert found["positions.table"] == "sincos_2d_big_vision" and "channels of a pixel" in found["patch extraction"]


@PLAIN
def test_that_no_tokens_are_dropped_is_an_assumption_because_another_vit_has_the_same_keys(tmp_path: Path) -> None:
    from vit_pytorch.ats_vit import ViT as SamplingViT

    sampling = SamplingViT(**SIZES, max_tokens_per_depth=(8, 4), dim_head=6)  # of 15 patches
    torch.save(sampling.state_dict(), tmp_path / "sampling.pth")
    assert sampling.state_dict().keys() == model("vit").state_dict().keys()
    found = {each.field: each.value for each in parity.load(tmp_path / "sampling.pth", given=GIVEN).assumed}
    assert found["dropped tokens"] == "none"


@NORMED
@pytest.mark.parametrize("name", CASES)
def test_norms_around_the_projection_of_patches_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"to_patch_embedding\.1 and \.3 normalize patches"):
        parity.load(save_original(name, tmp_path), given=GIVEN)
