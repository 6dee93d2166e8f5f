"""The formats of jax-ml/bonsai compared with its own NNX classes, from a clone (see `jax_libraries`)."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax, checkpointing = pytest.importorskip("jax"), pytest.importorskip("orbax.checkpoint")
from flax import nnx, serialization
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

import parity
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests import ROOT
from tests.goldens.golden import noise
from tests.goldens.peers import rng_for
from tests.peers.jax_libraries import assert_gradients, clone, draw, flat, float64, load_module, nested
from tests.peers.proof import jax_logits, prove, relrms
from vit_spec import InputError

GUIDE = ROOT / "docs" / "guides" / "convert.md"
SOURCE, PEER = clone("jax-ml/bonsai")
VIT = load_module(SOURCE / "bonsai/models/vit/modeling.py", "bonsai_vit_modeling")
DINOV3 = load_module(SOURCE / "bonsai/models/dinov3/modeling.py", "bonsai_dinov3_modeling")

VIT_SIZES: dict[str, Any] = {
    "image_size": (12, 20),
    "patch_size": (4, 4),
    "num_channels": 3,
    "hidden_dim": 12,
    "attn_dropout_prob": 0.0,
    "dropout_prob": 0.0,
    "num_heads": 3,
    "mlp_dim": 18,
    "eps": 1e-12,
    "num_layers": 2,
    "num_labels": 5,
}
DINOV3_SIZES: dict[str, Any] = {
    "patch_size": (4, 4),
    "hidden_size": 16,
    "intermediate_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
}
VITS: dict[str, Any] = {
    "vit": VIT.ModelConfig(**VIT_SIZES),
    "vit_dropout": VIT.ModelConfig(**{**VIT_SIZES, "attn_dropout_prob": 0.1, "dropout_prob": 0.1}),
    "vit_square": VIT.ModelConfig(**{**VIT_SIZES, "image_size": (16, 16)}),
}
DINOV3S: dict[str, Any] = {
    "dinov3": DINOV3.ModelConfig(**DINOV3_SIZES),
    "dinov3_gated": DINOV3.ModelConfig(**DINOV3_SIZES, use_gated_mlp=True, hidden_act="silu"),
    "dinov3_all_biases": DINOV3.ModelConfig(**DINOV3_SIZES, key_bias=True),
    "dinov3_no_biases": DINOV3.ModelConfig(**DINOV3_SIZES, query_bias=False, value_bias=False, proj_bias=False),
}
REAL: dict[str, Any] = {"vit_p16_224": VIT.ModelConfig.vit_p16_224(), "dinov3_vits16": DINOV3.ModelConfig.dinov3_vits16()}
SMALL = {**VITS, **DINOV3S}
CONFIGS = {**SMALL, **REAL}
GIVEN: dict[str, dict[str, Any]] = {name: {"image_size": config.image_size} for name, config in VITS.items()} | {
    name: {"image_size": (12, 12), "num_heads": 2} for name in DINOV3S
}


def is_dinov3(name: str) -> bool:
    return name.startswith("dinov3")


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    """Return random weights of a model, by their paths in its state."""
    cls = DINOV3.Dinov3ViTModel if is_dinov3(name) else VIT.ViTClassificationModel
    shapes = flat(nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: cls(CONFIGS[name], rngs=nnx.Rngs(0))), nnx.Param)))
    rng = rng_for(name)
    return {key: draw(rng, key, like.shape) for key, like in shapes.items()}


def model(name: str, arrays: dict[str, Any]) -> Any:
    """Return bonsai's module with these weights, as bonsai itself loads them: merged from a pure dict."""
    cls = DINOV3.Dinov3ViTModel if is_dinov3(name) else VIT.ViTClassificationModel
    module = cls(CONFIGS[name], rngs=nnx.Rngs(0))
    graph, _, rest = nnx.split(module, nnx.Param, ...)
    module = nnx.merge(graph, nested(arrays), rest)
    module.eval()
    return module


def run(name: str, module: Any, images: np.ndarray) -> Any:
    """Return the outputs of bonsai's module for images (B, C, H, W)."""
    if is_dinov3(name):
        return module(images)["pooler_output"]
    return module(images.transpose(0, 2, 3, 1), rngs=None)


def outputs(name: str, images: np.ndarray) -> np.ndarray:
    with float64(VIT, DINOV3):
        arrays = {key: jax.numpy.asarray(value) for key, value in weights(name).items()}
        return np.asarray(run(name, model(name, arrays), images))


def images(name: str) -> np.ndarray:
    size = CONFIGS[name].image_size
    return noise(rng_for(name), (2, 3, *(size if isinstance(size, tuple) else (size, size))), 1.0)


def format_of(name: str) -> str:
    return f"bonsai-dinov3:{'gated' if 'gated' in name else 'mlp'}" if is_dinov3(name) else "bonsai-vit"


def save(name: str, path: Path, kind: str = "state") -> Path:
    """Save a model in float64 as its users do, and return the path."""
    with float64():
        state = nnx.state(model(name, {key: jax.numpy.asarray(value) for key, value in weights(name).items()}))
    params = nested(weights(name))
    match kind:
        case "msgpack":
            path = path.with_suffix(".msgpack")
            path.write_bytes(serialization.to_bytes(params))
        case "safetensors":
            path = path.with_suffix(".safetensors")
            save_file({key.replace("/", "."): value for key, value in weights(name).items()}, path)
        case "npz":
            path = path.with_suffix(".npz")
            np.savez(path, **weights(name))
        case _:
            tree = {"state": state, "pure dict": nnx.to_pure_dict(state), "training": {"model": state, "step": 3}}[kind]
            with float64(), checkpointing.StandardCheckpointer() as checkpointer:
                checkpointer.save(path.absolute(), tree)
    return path


@pytest.mark.parametrize("name", SMALL)
def test_the_twins_compute_the_outputs_and_gradients_of_bonsai(name: str, tmp_path: Path) -> None:
    x = images(name)
    expected = outputs(name, x)
    path = save(name, tmp_path / "theirs")
    checkpoint = prove(path, x, expected, format=format_of(name), peer=PEER, given=GIVEN[name])
    direction = noise(rng_for(f"direction {name}"), expected.shape, 1.0)
    with float64(VIT, DINOV3):
        arrays = {key: jax.numpy.asarray(value) for key, value in weights(name).items()}
        gradients = jax.grad(lambda arrays: (run(name, model(name, arrays), x) * direction).sum())(arrays)
    assert_gradients(checkpoint, x, direction, {key: np.asarray(value) for key, value in gradients.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_twins_compute_the_outputs_of_the_published_sizes(name: str, tmp_path: Path) -> None:
    x = images(name)
    save_file({key: value.astype(np.float32) for key, value in weights(name).items()}, tmp_path / "theirs.safetensors")
    prove(tmp_path / "theirs.safetensors", x, outputs(name, x), format=format_of(name), peer=PEER)


def test_the_twins_resample_positions_as_bonsai_does(tmp_path: Path) -> None:
    x = noise(rng_for("larger"), (2, 3, 24, 24), 1.0)
    checkpoint = parity.load(save("vit_square", tmp_path / "theirs"), given=GIVEN["vit_square"])
    assert relrms(jax_logits(checkpoint, x), outputs("vit_square", x)) <= FLOAT64_TOLERANCE


@pytest.mark.parametrize("kind", ["pure dict", "training", "msgpack", "safetensors", "npz"])
@pytest.mark.parametrize("name", ["vit_dropout", "dinov3_gated"])
def test_every_kind_of_file_has_the_same_weights(name: str, kind: str, tmp_path: Path) -> None:
    expected = parity.to_jax(parity.load(save(name, tmp_path / "state"), given=GIVEN[name]))
    checkpoint = parity.load(save(name, tmp_path / "other", kind), given=GIVEN[name])
    assert checkpoint.format == format_of(name)
    assert flat(parity.to_jax(checkpoint)).keys() == flat(expected).keys()
    assert all((value == flat(expected)[key]).all() for key, value in flat(parity.to_jax(checkpoint)).items())


@pytest.mark.parametrize("name", SMALL)
def test_bonsai_computes_the_same_bits_with_a_written_checkpoint(name: str, tmp_path: Path) -> None:
    parity.convert(save(name, tmp_path / "theirs"), tmp_path / "ours.safetensors", "jax", given=GIVEN[name])
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back", format_of(name), container="orbax")
    x = images(name)
    with float64(VIT, DINOV3):
        written = nnx.restore_int_paths(ocp.load(tmp_path / "back"))
        assert flat(written).keys() == weights(name).keys()
        np.testing.assert_array_equal(np.asarray(run(name, model(name, flat(written)), x)), outputs(name, x))


def test_a_model_that_bonsai_computes_otherwise_is_refused(tmp_path: Path) -> None:
    path = save("vit", tmp_path / "theirs")
    exact = {**GIVEN["vit"], "mlp.activation": "gelu"}
    with pytest.raises(InputError, match=r"mlp\.activation='gelu'"):
        parity.convert(path, tmp_path / "out.safetensors", "bonsai-vit", given=exact)
    headless, _ = parity.surgery.drop_head(parity.load(path, given=GIVEN["vit"]))
    with pytest.raises(InputError, match="cannot store num_classes=0"):
        parity.write(headless, tmp_path / "out.safetensors", "bonsai-vit")


def test_what_no_tensor_shows_is_an_assumption(tmp_path: Path) -> None:
    found = {each.field: each.value for each in parity.load(save("dinov3", tmp_path / "x"), given=GIVEN["dinov3"]).assumed}
    assert found["positions.rotary"] == "dinov3" and found["mlp.activation"] == "gelu_tanh" and found["norms.eps"] == 1e-5
    assert "bfloat16" in found["rotary rounding"]
    found = {each.field: each.value for each in parity.load(save("vit", tmp_path / "y"), given=GIVEN["vit"]).assumed}
    assert found["mlp.activation"] == "gelu_tanh" and found["norms.eps"] == 1e-12


def test_the_example_in_the_guide_saves_and_loads_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_example, load_example = re.findall(r"```python\n(.*?)```", GUIDE.read_text().partition("### NNX")[2], re.DOTALL)[
        :2
    ]
    source = {"model": VIT.ViTClassificationModel(CONFIGS["vit"], rngs=nnx.Rngs(0))}
    exec(save_example, source)
    parity.convert("bonsai-state", "bonsai-vit", "bonsai-vit", given=GIVEN["vit"], container="orbax")
    target = {"model": VIT.ViTClassificationModel(CONFIGS["vit"], rngs=nnx.Rngs(1))}
    exec(load_example, target)
    theirs, ours = (flat(nnx.to_pure_dict(nnx.state(each["model"]))) for each in (source, target))
    assert ours.keys() == theirs.keys() and all((ours[key] == theirs[key]).all() for key in theirs)
