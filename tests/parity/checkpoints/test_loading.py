"""`vit_jax.load` and `vit_torch.load` read files of either twin's format."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")

import parity
import vit_jax
import vit_spec
import vit_torch
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import InputError

CONFIG = small_config(vit_spec.get("dinov3_s16plus")).replace(num_classes=5)


@pytest.fixture(scope="module", params=["jax", "torch"])
def saved_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the same weights in the format of one of the twins, and return the path."""
    params: Any = perturbed_params(CONFIG)
    path = tmp_path_factory.mktemp("load") / "weights.safetensors"
    weights = params if request.param == "jax" else parity.to_torch(params, CONFIG)
    parity.save(path, weights, CONFIG, request.param)
    return path


def test_vit_jax_loads_a_file_of_either_format(saved_file: Path) -> None:
    model, params = vit_jax.load(saved_file)
    assert model.config == CONFIG
    for mine, expected in zip(jax.tree.leaves(params), jax.tree.leaves(perturbed_params(CONFIG)), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_vit_jax_warns_of_parameters_that_jax_will_round(tmp_path: Path) -> None:
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), perturbed_params(CONFIG))
    parity.save(tmp_path / "wide.safetensors", params, CONFIG, "jax")
    with pytest.warns(
        UserWarning, match=r"wide\.safetensors: params are float64, which jax will round: .*jax_enable_x64"
    ) as found:
        _, loaded = vit_jax.load(tmp_path / "wide.safetensors")
    assert [warning.filename for warning in found] == [__file__]
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(loaded))
    with jax.enable_x64(True):
        vit_jax.load(tmp_path / "wide.safetensors")


def test_vit_torch_loads_a_file_of_either_format_in_evaluation_mode(saved_file: Path) -> None:
    model = vit_torch.load(saved_file)
    assert model.config == CONFIG and not model.training
    expected = vit_torch.ViT(CONFIG).eval()
    expected.load_state_dict(parity.to_torch(perturbed_params(CONFIG), CONFIG))
    x = torch.tensor(random_images(CONFIG)).permute(0, 3, 1, 2)
    assert torch.equal(model(x), expected(x))


def test_a_folder_loads_as_the_weights_in_it(saved_file: Path) -> None:
    assert vit_torch.load(saved_file.parent).config == CONFIG


def test_load_takes_the_execution_options(saved_file: Path) -> None:
    model = vit_torch.load(saved_file, vit_torch.Execution(dtype=torch.bfloat16))
    assert model(torch.tensor(random_images(CONFIG)).permute(0, 3, 1, 2)).dtype == torch.bfloat16
    functional, _ = vit_jax.load(saved_file, vit_jax.Execution(remat="full"))
    assert functional.execution.remat == "full"


def test_a_loaded_model_can_be_trained(saved_file: Path) -> None:
    model = vit_torch.load(saved_file).train()
    model(torch.tensor(random_images(CONFIG)).permute(0, 3, 1, 2)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("twin", [vit_jax, vit_torch])
def test_a_user_package_that_shadows_parity_is_reported(monkeypatch: pytest.MonkeyPatch, twin: Any) -> None:
    def shadowed(package: str) -> None:
        raise InputError(f"{package} is another")

    monkeypatch.setattr(sys.modules[f"{twin.__name__}.api"], "check_not_shadowed", shadowed)
    with pytest.raises(InputError, match="parity is another"):
        twin.load("a.pth")
