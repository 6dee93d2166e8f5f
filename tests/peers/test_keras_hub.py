"""The format of keras-hub compared with its own classes on Keras' JAX backend, from the installed package."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
os.environ.setdefault("KERAS_BACKEND", "jax")
keras, keras_hub = pytest.importorskip("keras"), pytest.importorskip("keras_hub")
if keras.backend.backend() != "jax":
    pytest.skip("needs KERAS_BACKEND=jax", allow_module_level=True)
from keras.src.backend.common import dtypes
from keras.src.backend.jax import nn as keras_nn
from safetensors.numpy import load_file, save_file

import parity
from parity.checkpoints.conversion import converted_arrays
from tests import ROOT
from tests.goldens.golden import noise
from tests.goldens.peers import rng_for
from tests.peers.jax_libraries import assert_gradients, draw, float64
from tests.peers.proof import prove
from vit_spec import InputError

# Keras' own classes do not follow numpy's latest signature of __array__.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
PEER = f"keras-hub {importlib.metadata.version('keras-hub')}"
GUIDE = ROOT / "docs" / "guides" / "convert.md"
BACKBONE: dict[str, Any] = {
    "image_shape": (12, 20, 3),
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 3,
    "hidden_dim": 12,
    "mlp_dim": 18,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # name -> arguments of the backbone, of the classifier
    "classifier": ({}, {"num_classes": 5}),
    "hidden": ({"layer_norm_epsilon": 1e-5}, {"num_classes": 5, "intermediate_dim": 9}),
    "no_biases": ({"use_mha_bias": False, "use_patch_bias": False}, {"num_classes": 5}),
    "gap": ({"use_class_token": False}, {"num_classes": 5, "pooling": "gap"}),
    "gap_with_class_token": ({}, {"num_classes": 5, "pooling": "gap"}),
    "deep": ({"num_layers": 11}, {"num_classes": 5}),
    "backbone": ({}, None),
    "vit_base": (
        {
            "image_shape": (224, 224, 3),
            "patch_size": 16,
            "num_layers": 12,
            "num_heads": 12,
            "hidden_dim": 768,
            "mlp_dim": 3072,
        },
        {"num_classes": 1000},
    ),
}
SMALL = [name for name in CASES if name != "vit_base"]


def given(name: str) -> dict[str, Any]:
    """Return the fields that the variables do not show."""
    backbone, _ = CASES[name]
    if name == "vit_base":
        return {}
    epsilon = {"norms.eps": backbone["layer_norm_epsilon"]} if "layer_norm_epsilon" in backbone else {}
    pool = {"head.pool": "mean", "head.pool_prefix": True} if name == "gap_with_class_token" else {}
    return {"image_size": (12, 20), **epsilon, **pool}


def images(name: str) -> np.ndarray:
    height, width, _ = {**BACKBONE, **CASES[name][0]}["image_shape"]
    return noise(rng_for(name), (2, 3, height, width), 1.0)


@contextlib.contextmanager
def keras_in_float64() -> Iterator[None]:
    """Return a context within which Keras computes in float64, which it otherwise replaces by float32 on JAX."""
    policy, before, narrower = keras.config.dtype_policy(), keras.config.floatx(), dict(dtypes.BIT64_TO_BIT32_DTYPE)
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")  # of the images: a model casts them to the dtype of its input
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        with float64(keras_nn):
            yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(before)
        dtypes.BIT64_TO_BIT32_DTYPE.update(narrower)


@functools.cache
def model(name: str) -> Any:
    """Return a model with random weights in float64."""
    backbone_options, head = CASES[name]
    with keras_in_float64():
        result = keras_hub.models.ViTBackbone(**{**BACKBONE, **backbone_options})
        if head is not None:
            result = keras_hub.models.ViTImageClassifier(backbone=result, **head)
        rng = rng_for(name)
        for variable in result.weights:
            variable.assign(draw(rng, variable.path, tuple(variable.shape)))
    return result


def named(name: str) -> dict[str, np.ndarray]:
    with float64():
        return {variable.path: np.ascontiguousarray(variable) for variable in model(name).weights}


def run(name: str, variables: list[Any], x: np.ndarray) -> Any:
    """Return the outputs, of the backbone those of the class token."""
    found, _ = model(name).stateless_call(variables, [each.value for each in model(name).non_trainable_variables], x)
    return found if CASES[name][1] is not None else found[:, 0]


def outputs(name: str, x: np.ndarray) -> np.ndarray:
    with keras_in_float64():
        return np.asarray(run(name, [each.value for each in model(name).trainable_variables], x.transpose(0, 2, 3, 1)))


def save(name: str, path: Path) -> Path:
    save_file(named(name), path)
    return path


@pytest.mark.parametrize("name", SMALL)
def test_the_twins_compute_the_outputs_and_gradients_of_keras_hub(name: str, tmp_path: Path) -> None:
    x = images(name)
    expected = outputs(name, x)
    path = save(name, tmp_path / "theirs.safetensors")
    checkpoint = prove(path, x, expected, format="keras-hub", peer=PEER, given=given(name))
    direction = noise(rng_for(f"direction {name}"), expected.shape, 1.0)
    variables = model(name).trainable_variables
    with keras_in_float64():
        values = [each.value for each in variables]
        found = jax.grad(lambda values: (run(name, values, x.transpose(0, 2, 3, 1)) * direction).sum())(values)
    gradients = {each.path: np.asarray(gradient) for each, gradient in zip(variables, found, strict=True)}
    assert_gradients(checkpoint, x, direction, gradients)


@pytest.mark.slow
def test_the_twins_compute_the_outputs_of_a_real_size(tmp_path: Path) -> None:
    x = images("vit_base")
    path = save("vit_base", tmp_path / "theirs.safetensors")
    prove(path, x, outputs("vit_base", x), format="keras-hub", peer=PEER)


@pytest.mark.parametrize("name", SMALL)
def test_keras_hub_computes_the_same_bits_with_a_written_file(name: str, tmp_path: Path) -> None:
    path = save(name, tmp_path / "theirs.safetensors")
    parity.convert(path, tmp_path / "ours.safetensors", "jax", given=given(name))
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", "keras-hub")
    written, theirs = load_file(tmp_path / "back.safetensors"), named(name)
    assert written.keys() == theirs.keys()
    assert all(written[key].tobytes() == theirs[key].tobytes() for key in theirs)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("weights_only", [False, True], ids=["whole", "weights"])
def test_checkpoints_of_keras_orbax_callback_are_read(frozen: bool, weights_only: bool, tmp_path: Path) -> None:
    checkpoint_class = pytest.importorskip("orbax.checkpoint") and keras.callbacks.OrbaxCheckpoint
    backbone = keras_hub.models.ViTBackbone(**BACKBONE, dropout_rate=0.1)
    classifier = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=5)
    backbone.trainable = not frozen
    classifier.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = checkpoint_class(str(tmp_path / "run"), save_on_background=False, save_weights_only=weights_only)
    inputs = np.asarray(images("classifier").transpose(0, 2, 3, 1), np.float32)
    with pytest.warns() as _:  # Keras and grain warn about their own settings
        classifier.fit(inputs, np.array([1, 3]), epochs=1, callbacks=[callback], verbose=0)
    found = parity.load(tmp_path / "run" / "0" / "pytree", given=given("classifier"))
    assert found.format == "keras-hub"
    assert not weights_only or not any("optimizer" in line for line in found.left)
    written = dict(converted_arrays(found, "keras-hub"))
    expected = {each.path: np.asarray(each) for each in classifier.weights if "seed_generator" not in each.path}
    assert written.keys() == expected.keys() and all((written[key] == expected[key]).all() for key in expected)


@pytest.mark.parametrize("name", ["hidden", "gap", "gap_with_class_token", "backbone"])
def test_the_json_file_of_a_preset_determines_the_model(name: str, tmp_path: Path) -> None:
    model(name).save_to_preset(tmp_path / "preset")
    (tmp_path / "folder").mkdir()
    file = "config.json" if CASES[name][1] is None else "task.json"
    (tmp_path / "folder" / "config.json").write_text((tmp_path / "preset" / file).read_text())
    save(name, tmp_path / "folder" / "model.safetensors")
    found = parity.load(tmp_path / "folder")
    assert found.config == parity.load(save(name, tmp_path / "x.safetensors"), given=given(name)).config
    unknown = {"head.pool"} if name == "backbone" else set()
    assumed = {each.field for each in found.assumed if not each.field.startswith(("pixels.", "resampling."))}
    assert assumed == unknown
    content = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps({**content, "registered_name": "keras_hub>DINOV2Backbone"}))
    with pytest.raises(InputError, match="DINOV2Backbone"):
        parity.load(tmp_path / "folder")


def test_keras_own_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model("backbone").save_weights(tmp_path / "theirs.weights.h5")
    model("backbone").save(tmp_path / "theirs.keras")
    for name in ("theirs.weights.h5", "theirs.keras"):
        with pytest.raises(InputError, match=r"HDF5.*variable\.path") as raised:
            parity.load(tmp_path / name)
        assert "\n" not in str(raised.value)


def test_the_example_in_the_guide_names_the_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_example, load_example = re.findall(r"```python\n(.*?)```", GUIDE.read_text().partition("### Keras")[2], re.DOTALL)[
        :2
    ]
    source = {"model": keras_hub.models.ViTBackbone(**BACKBONE)}
    exec(save_example, source)
    assert parity.load("keras.npz", given=given("backbone")).format == "keras-hub"
    target = {"model": keras_hub.models.ViTBackbone(**BACKBONE)}
    exec(load_example, target)
    for ours, theirs in zip(target["model"].weights, source["model"].weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
