"""The twins compute what implementations that nobody here wrote compute; so they cannot share a mistake.

`tests/goldens` holds the outputs of timm, transformers, torchvision, vit-pytorch, of the original code of Meta, Google and
OpenAI, and of literal transcripts of five articles, all run in float64; `tests/goldens/make.py` wrote them.
"""

from typing import Any

import numpy as np
import pytest

import parity
from parity.comparison.tolerances import FUNCTION
from tests.goldens.golden import FOLDER, Array, Golden, names, read
from vit_spec import ViTConfig


def through_torch(golden: Golden, config: ViTConfig) -> dict[str, Array]:
    """The PyTorch twin's answer to a golden file, in float64."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.ViT(config).double().eval()
    model.load_state_dict({key: torch.tensor(array) for key, array in golden.weights.items()})
    with torch.no_grad():
        logits, found = vit_torch.intermediates(model, torch.tensor(golden.images))
        if "attention" in golden.outputs:
            found["attention"] = vit_torch.attention_maps(model, torch.tensor(golden.images))
    return {key: value.numpy() for key, value in {**found, "logits": logits}.items()}


def through_jax(golden: Golden, config: ViTConfig) -> dict[str, Array]:
    """The JAX twin's answer to a golden file, in float64 on CPU."""
    jax = pytest.importorskip("jax")
    import vit_jax

    params: Any = parity.to_jax(golden.weights, config)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        model = vit_jax.ViT(config)

        def run(params: Any, images: Any) -> dict[str, Any]:
            logits, found = vit_jax.intermediates(model, params, images)
            if "attention" in golden.outputs:
                found["attention"] = vit_jax.attention_maps(model, params, images)
            return {**found, "logits": logits}

        lowered = jax.jit(run).lower(params, golden.images.transpose(0, 2, 3, 1))
        # Every file is a model of its own to compile, and runs once: do not polish what is compiled.
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        found = lowered.compile(compiler_options=quick)(params, golden.images.transpose(0, 2, 3, 1))
        return {key: np.asarray(value) for key, value in found.items()}


TWINS = {"torch": through_torch, "jax": through_jax}


def distances(golden: Golden, found: dict[str, Array]) -> dict[str, float]:
    """relRMS of each output from the peer's."""
    result = {}
    for key, expected in golden.outputs.items():
        ours = found[key] if key == "logits" else found[key][:1]
        assert ours.shape == expected.shape and ours.dtype == np.float64, f"{key} is of another kind"
        result[key] = float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
    return result


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("name", names())
def test_a_twin_computes_what_its_peer_computed(name: str, twin: str) -> None:
    golden = read(name)
    found = distances(golden, TWINS[twin](golden, golden.config))
    assert max(found.values()) <= FUNCTION, f"{golden.provenance['class']}: {golden.provenance['anchors']} {found}"


@pytest.mark.parametrize("name", names())
def test_a_golden_file_records_where_it_comes_from(name: str) -> None:
    assert {"peer", "class", "date", "anchors"} <= read(name).provenance.keys()
    assert all(read(name).provenance.values())


def test_every_recipe_has_its_golden_file_and_every_file_its_recipe() -> None:
    recipes = [
        line.split("(")[0] for path in FOLDER.glob("from_*.py") for line in path.read_text().split("@case\ndef ")[1:]
    ]
    assert sorted(recipes) == names()


def test_the_golden_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.glob("*.npz")]
    assert max(sizes) < 60_000 and sum(sizes) < 800_000


@pytest.mark.parametrize("name", names())
def test_a_golden_file_sees_every_weight(name: str) -> None:
    torch = pytest.importorskip("torch")
    import vit_torch

    golden = read(name)
    model = vit_torch.ViT(golden.config).double().eval()
    model.load_state_dict({key: torch.tensor(array) for key, array in golden.weights.items()})
    model(torch.tensor(golden.images)).square().sum().backward()
    unseen = {key for key, value in model.named_parameters() if value.grad is None or value.grad.norm() < 1e-6}
    # What is added to all keys alike raises all scores of a query alike, and the softmax forgets it.
    assert not {key for key in unseen if not key.endswith("k_norm.bias")}


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "another eps": ("timm_plain", {"norms": {"eps": 1.01e-6}}),
    "tanh for erf": ("timm_plain", {"mlp": {"activation": "gelu_tanh"}}),
    "another score scale": ("timm_plain", {"attention": {"scale": 0.5 + 1e-9}}),
    "no antialiasing": ("timm_resized", {"resampling": {"antialias": False}}),
    "antialiasing": ("timm_resized_bilinear", {"resampling": {"antialias": True}}),
    "no offset": ("meta_dino", {"resampling": {"offset": 0.0}}),
    "corners not aligned": ("torchvision_hidden", {"resampling": {"align_corners": False}}),
    "values not added": ("lanl_rectangular", {"attention": {"value_skip": False}}),
    "scores by head width": ("article_sincos", {"attention": {"scale": None}}),
    "pairs half a head apart": ("schh_rotary", {"positions": {"rotary": "dinov3"}}),
    "another rotary base": ("timm_dinov3", {"positions": {"rotary_base": 100.0001}}),
    "another order of the table": ("timm_sincos", {"positions": {"table": "sincos_2d_mae"}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    name, changes = FAULTS[fault]
    golden = read(name)
    assert max(distances(golden, through_torch(golden, golden.config.replace(**changes))).values()) > 10 * FUNCTION


def test_a_planted_fault_is_seen_in_the_functional_twin() -> None:
    golden = read("timm_plain")
    found = through_jax(golden, golden.config.replace(norms={"eps": 1.01e-6}))
    assert max(distances(golden, found).values()) > 10 * FUNCTION
