"""What a written file does not state is said when it is written: with the fields of these lines, a reader has the model."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.conversion import plan_conversion
from parity.checkpoints.field_defaults import DEFAULTS, NEUTRAL, affects_function
from parity.checkpoints.formats import OWN, formats, get
from parity.checkpoints.layout import Array
from parity.checkpoints.read_back import has_same_effect, unstated_fields
from parity.checkpoints.reading import first_valid_match
from parity.checkpoints.recognition import recognise
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from parity.comparison import reproducible_init
from tests.parity.checkpoints.test_conversions import PLAIN, STRUCTURES, can_store, storable_configs
from tests.peers.proof import torch_logits
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS, PARTS

SQUARE = PLAIN.replace(image_size=(32, 32), width=128, mlp_dim=48)  # two heads, as wide as those of most models
DINOV3 = vit_spec.get("dinov3_s16", image_size=(32, 32), width=128, num_heads=2, mlp_dim=48, depth=2)
# Field of `DEFAULTS` -> fields of another model, in which it has another value that no tensor shows.
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "positions.kind": {"positions.kind": "fixed", "positions.table": "sincos_1d"},
    "positions.rotary": {"positions.rotary": "eva"},
    "attention.scale": {"attention.scale": 0.3},
    "attention.value_skip": {"attention.value_skip": True},
    "norms.kind": {"norms.kind": "rms", "norms.bias": False},
    "norms.order": {"norms.order": "res_post"},
    "norms.eps": {"norms.eps": 3e-2},
    "mlp.activation": {"mlp.activation": "relu"},
    "head.pool": {"head.pool": "mean"},
}


def weights(config: ViTConfig) -> Checkpoint:
    """Return weights for which every field changes the outputs: none is zero or one."""
    checkpoint = reproducible_init.weights(config, 0)
    rng = np.random.default_rng(0)
    arrays = {
        key: np.float32(0.3) * rng.standard_normal(np.shape(each), np.float32) for key, each in checkpoint.arrays.items()
    }
    return Checkpoint(config, checkpoint.format, arrays)


def without_metadata(path: Path) -> Path:
    """Write the arrays of a safetensors file to another one, without its metadata, and return the path of that."""
    save_file(load_file(path), bare := path.with_name("bare.safetensors"))
    return bare


def fields_of(remarks: tuple[str, ...]) -> list[str]:
    """Return the fields that the remarks on a write name."""
    return [found[1] for line in remarks if (found := re.match(r"([a-z_.]+)=.* is only in our own metadata: ", line))]


def outputs(checkpoint: Checkpoint) -> Array:
    """Return the outputs for two random images."""
    config = checkpoint.config
    return torch_logits(checkpoint, np.random.default_rng(1).standard_normal((2, config.in_channels, *config.image_size)))


@pytest.mark.parametrize(
    ("format", "config", "fields"),
    [
        ("timm", SQUARE.with_fields({"norms.order": "res_post"}), ["norms.order"]),
        ("timm", SQUARE.with_fields({"head.pool": "mean"}), ["head.pool"]),
        ("timm", SQUARE.with_fields({"positions.rotary": "dinov3"}), ["positions.rotary", "positions.rotary_base"]),
        ("timm", SQUARE.with_fields({"positions.rotary": "eva"}), ["positions.rotary", "positions.rotary_grid"]),
        ("torch-encoder", SQUARE.with_fields({"norms.eps": 1e-5}), ["mlp.activation", "norms.order"]),
        (
            "torch-encoder",
            SQUARE.with_fields({"head.pool": "mean", "mlp.activation": "relu"}),
            ["norms.eps", "norms.order", "head.pool"],
        ),
        ("equimo", SQUARE.with_fields({"head.pool": "mean"}), ["mlp.activation", "norms.eps"]),
        ("article_dino", SQUARE.with_fields({"attention.scale": 0.3, "num_classes": 0}), ["num_heads", "attention.scale"]),
        ("dinov3", DINOV3, []),
        ("timm", DINOV3, ["head.pool"]),
    ],
)
def test_a_write_names_the_fields_without_which_a_reader_has_another_model(
    format: str, config: ViTConfig, fields: list[str], tmp_path: Path
) -> None:
    source = weights(config)
    remarks = write(source, tmp_path / "a.safetensors", format).remarks
    assert fields_of(remarks) == fields and len(remarks) == len(fields)
    bare, expected = without_metadata(tmp_path / "a.safetensors"), outputs(source)
    given = {name: config.at(name) for name in ["image_size", *fields]}
    assert np.array_equal(outputs(parity.load(bare, format=format, given=given)), expected)
    for name in fields:
        try:
            read = parity.load(bare, format=format, given={each: value for each, value in given.items() if each != name})
        except InputError:
            continue
        assert not np.allclose(outputs(read), expected, rtol=1e-7, atol=0), name


@pytest.mark.parametrize("format", [name for name in formats() if name not in OWN])
def test_with_the_fields_that_a_write_names_every_format_is_read_as_the_same_model(format: str, tmp_path: Path) -> None:
    count = 0
    for base in storable_configs(format)[:2]:
        configs = [base, *(try_changed(base, fields) for fields in OTHER_VALUES.values())]
        for config in configs:
            if config is None or not can_store(format, config):
                continue
            source = weights(config)
            path = tmp_path / "a.safetensors"
            remarks = write(source, path, format, force=True).remarks
            given = {name: config.at(name) for name in ["image_size", *fields_of(remarks)]}
            read = parity.load(without_metadata(path), format=format, given=given)
            assert np.array_equal(outputs(read), outputs(source)), (config, remarks)
            count += 1
    assert count >= 2


def try_changed(config: ViTConfig, fields: dict[str, Any]) -> ViTConfig | None:
    """Return a config with other values of some fields; None if they contradict the others."""
    try:
        return config.with_fields(fields)
    except InputError:
        return None


def test_the_json_files_of_a_library_state_fields_that_its_weights_do_not_show(tmp_path: Path) -> None:
    source = weights(SQUARE.with_fields({"norms.order": "res_post"}))
    assert fields_of(write(source, tmp_path / "a.safetensors", "timm").remarks) == ["norms.order"]
    assert not fields_of(write(source, f"{tmp_path / 'folder'}/", "timm").remarks)


def test_a_classifier_without_a_bias_is_not_lost_where_zeros_are_written(tmp_path: Path) -> None:
    assert write(weights(SQUARE.with_fields({"head.bias": False})), tmp_path / "a.safetensors", "timm").remarks == ()


class Unreadable(StoredArray):
    """An array of which only the shape and the dtype may be used."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, np.dtype(np.float32)

    def read(self, start: int, stop: int) -> Array:
        raise AssertionError("a parameter was read")


@cache
def planned(config: ViTConfig, format: str) -> list[Any]:
    """Return the plan to write a model whose arrays cannot be read."""
    layouts, sizes = get("torch").layouts(config).values(), config.sizes
    arrays = {key: Unreadable(layout.shape(sizes)) for layout in layouts for key in layout.keys(sizes)}
    return plan_conversion(Checkpoint(config, "torch", arrays), format)


@pytest.mark.parametrize("format", [name for name in formats() if name not in OWN])
def test_no_parameter_is_read(format: str) -> None:
    for config in storable_configs(format)[:5]:
        unstated_fields(config, format, planned(config, format), {})


# Options of the model -------------------------------------------------------------------------------------------------

# Models with options that no named model has.
MORE = (
    SQUARE.with_fields({"image_size": (40, 32), "tokens.pad": True}),
    SQUARE.with_fields({"image_size": (40, 32), "tokens.crop": True}),
    SQUARE.with_fields({"attention.head_dim": 32}),
)


def is_known_to_readers(name: str, config: ViTConfig) -> bool:
    """Return whether a reader of a file of the JAX twin without metadata has a field right, asks for it or assumes it."""
    matches = recognise({(each.key,): Unreadable(each.shape) for each in planned(config, "jax")}, {}, "jax")
    # Without these, a reader may refuse the file before it comes to the field.
    others = {"image_size", "tokens.pad", "positions.table", *DEFAULTS} - {name}
    given = {each: config.at(each) for each in others}
    try:
        _, read, assumed = first_valid_match(matches, given)
    except InputError:
        _, read, assumed = first_valid_match(matches, {**given, name: config.at(name)})
    return has_same_effect(name, config, read) or name in [each.field for each in assumed]


def test_every_default_is_tested_in_every_format() -> None:
    assert {*FIELDS, *PARTS} > {*NEUTRAL} and {*FIELDS} > {*DEFAULTS}
    missing = [name for name in DEFAULTS if affects_function(name) and name not in OTHER_VALUES]
    assert not missing, f"add another value of {', '.join(missing)} to OTHER_VALUES"


@pytest.mark.parametrize("name", [name for name in FIELDS if affects_function(name) and name not in DEFAULTS])
def test_every_option_is_shown_by_tensors_or_assumed_or_neutral(name: str) -> None:
    usual = ViTConfig(width=64, depth=1, num_heads=1, mlp_dim=64)
    others = [config for config in (*STRUCTURES, *MORE) if config.at(name) != usual.at(name)]
    assert others and all(is_known_to_readers(name, config) for config in others), (
        f"readers of a file without a config silently take {name} for {usual.at(name)!r}: add it to DEFAULTS in "
        f"parity/checkpoints/field_defaults.py, so that every format that cannot show it assumes it and says so, or to "
        f"NEUTRAL if it only matters in training or before the model; if tensors show it, read it in fields_from_tensors "
        f"and add a model with another value to STRUCTURES in test_conversions.py"
    )
