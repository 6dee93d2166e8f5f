"""The twins compute the same as independent implementations, so that a mistake common to both twins is found.

`tests/goldens` contains outputs of timm, transformers, torchvision, vit-pytorch, of the original code of Meta, Google and
OpenAI, and of literal transcripts of five articles, all run in float64.  `tests/goldens/make.py` writes them.
"""

from typing import Any

import numpy as np
import pytest

import parity
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.goldens.golden import FOLDER, Array, Golden, names, read
from vit_spec import ViTConfig


def torch_outputs(golden: Golden, config: ViTConfig) -> dict[str, Array]:
    """Return the outputs of the PyTorch twin for a golden file, in float64."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.ViT(config).double().eval()
    model.load_state_dict({key: torch.tensor(array) for key, array in golden.weights.items()})
    with torch.no_grad():
        logits, found = vit_torch.intermediates(model, torch.tensor(golden.images))
        if "attention" in golden.outputs:
            found["attention"] = vit_torch.attention_maps(model, torch.tensor(golden.images))
    return {key: value.numpy() for key, value in {**found, "logits": logits}.items()}


def jax_outputs(golden: Golden, config: ViTConfig) -> dict[str, Array]:
    """Return the outputs of the JAX twin for a golden file, in float64 on the CPU."""
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
        # Every file is another model to compile and runs once, so XLA's optimizations would cost more than they save.
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        found = lowered.compile(compiler_options=quick)(params, golden.images.transpose(0, 2, 3, 1))
        return {key: np.asarray(value) for key, value in found.items()}


TWINS = {"torch": torch_outputs, "jax": jax_outputs}


def relative_errors(golden: Golden, found: dict[str, Array]) -> dict[str, float]:
    """Return the relRMS of each output against the peer's."""
    result = {}
    for key, expected in golden.outputs.items():
        ours = found[key] if key == "logits" else found[key][:1]
        assert ours.shape == expected.shape and ours.dtype == np.float64, f"{key} has another shape or dtype"
        result[key] = float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
    return result


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("name", names())
def test_a_twin_computes_the_outputs_of_its_peer(name: str, twin: str) -> None:
    golden = read(name)
    found = relative_errors(golden, TWINS[twin](golden, golden.config))
    assert max(found.values()) <= FLOAT64_TOLERANCE, f"{golden.provenance['class']}: {golden.provenance['anchors']} {found}"


def test_every_golden_file_records_its_provenance() -> None:
    required = {"peer", "class", "date", "anchors"}
    provenances = {name: read(name).provenance for name in names()}
    assert not [name for name, each in provenances.items() if not required <= each.keys() or not all(each.values())]


def test_every_recipe_has_a_golden_file_and_every_file_a_recipe() -> None:
    recipes = [
        line.split("(")[0] for path in FOLDER.glob("from_*.py") for line in path.read_text().split("@case\ndef ")[1:]
    ]
    assert sorted(recipes) == names()


def test_the_golden_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.glob("*.npz")]
    assert max(sizes) < 60_000 and sum(sizes) < 1_000_000


@pytest.mark.parametrize("name", names())
def test_every_weight_of_a_golden_file_affects_the_outputs(name: str) -> None:
    torch = pytest.importorskip("torch")
    import vit_torch

    golden = read(name)
    model = vit_torch.ViT(golden.config).double().eval()
    model.load_state_dict({key: torch.tensor(array) for key, array in golden.weights.items()})
    model(torch.tensor(golden.images)).square().sum().backward()
    without_effect = {key for key, value in model.named_parameters() if value.grad is None or value.grad.norm() < 1e-6}
    # A bias of the keys adds the same number to all scores of a query, and the softmax ignores it.  So does the last bias
    # of relative positions without prefix tokens, to whose scores it would not be added.
    ignored = ("k_norm.bias",) if golden.config.num_prefix else ("k_norm.bias", "rel_pos.fc2.bias")
    assert not {key for key in without_effect if not key.endswith(ignored)}


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "another eps": ("timm_plain", {"norms": {"eps": 1.01e-6}}),
    "tanh for erf": ("timm_plain", {"mlp": {"activation": "gelu_tanh"}}),
    "another score scale": ("timm_plain", {"attention": {"scale": 0.5 + 1e-9}}),
    "no antialiasing": ("timm_resized", {"resampling": {"antialias": False}}),
    "antialiasing": ("timm_resized_bilinear", {"resampling": {"antialias": True}}),
    "no offset": ("meta_dino", {"resampling": {"offset": 0.0}}),
    "corners not aligned": ("torchvision_hidden", {"resampling": {"align_corners": False}}),
    "no value skip": ("lanl_rectangular", {"attention": {"value_skip": False}}),
    "scores scaled by head_dim": ("article_sincos", {"attention": {"scale": None}}),
    "pairs half a head apart": ("schh_rotary", {"positions": {"rotary": "dinov3"}}),
    "another rotary base": ("timm_dinov3", {"positions": {"rotary_base": 100.0001}}),
    "another order of the table": ("timm_sincos", {"positions": {"table": "sincos_2d_mae"}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_torch_twin_exceeds_the_tolerance(fault: str) -> None:
    name, changes = FAULTS[fault]
    golden = read(name)
    found = torch_outputs(golden, golden.config.replace(**changes))
    assert max(relative_errors(golden, found).values()) > 10 * FLOAT64_TOLERANCE


def test_a_planted_fault_in_the_jax_twin_exceeds_the_tolerance() -> None:
    golden = read("timm_plain")
    found = jax_outputs(golden, golden.config.replace(norms={"eps": 1.01e-6}))
    assert max(relative_errors(golden, found).values()) > 10 * FLOAT64_TOLERANCE
