"""`check --against`: the part that changes the outputs is named; NaN agrees with nothing."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import vit_spec
from parity.checkpoints.conversion import to_torch
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison import two_files
from parity.comparison.forward_backward import TorchTwin
from parity.comparison.localisation import Origin, Part
from parity.comparison.two_files import FileReport, compare_files
from tests.extreme_weights import CONFIGS, flatten_params
from tests.twins import perturbed_params, small_config
from vit_spec import InputError
from vit_torch import ViT

PLAIN = small_config(vit_spec.get("vit_s16"))
TINY = CONFIGS["width 2, three blocks"]


def altered(**factors: float) -> Checkpoint:
    """Return a checkpoint in which some arrays are multiplied by a factor; "__" separates the words of a path."""
    params = perturbed_params(TINY)
    arrays = flatten_params(params)
    for name, factor in factors.items():
        arrays[name.replace("__", "/")] *= np.float32(factor)
    return as_checkpoint(params, TINY, "jax")


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the PyTorch twin in the place of the JAX twin, to save the time of XLA's compiler."""
    monkeypatch.setattr(two_files, "JaxTwin", partial(TorchTwin, attention="explicit"))


def reordered(params: dict[str, Any]) -> None:
    """Reverse the order of the hidden units of the first block, which changes no output."""
    mlp = params["blocks"]["mlp"]
    mlp["fc1"]["kernel"][0] = mlp["fc1"]["kernel"][0, :, ::-1].copy()
    mlp["fc1"]["bias"][0] = mlp["fc1"]["bias"][0, ::-1].copy()
    mlp["fc2"]["kernel"][0] = mlp["fc2"]["kernel"][0, ::-1].copy()


def test_parts_that_do_not_change_the_outputs_are_not_named_first(torch_alone: None) -> None:
    params, other = perturbed_params(TINY), perturbed_params(TINY)
    reordered(other)
    other["blocks"]["mlp"]["fc2"]["bias"][2] *= 2
    report = compare_files(as_checkpoint(params, TINY, "jax"), as_checkpoint(other, TINY, "jax"))
    assert str(report.part) == "blocks.2.mlp.fc2"
    assert str(report.origins[0].part).startswith("blocks.0.mlp.fc1")
    assert report.verdict.endswith("parts differ without changing the outputs")


def test_the_verdict_says_that_parts_of_the_named_block_may_not_change_the_outputs() -> None:
    names = ("blocks.1.attn.qkv", "blocks.1.mlp.fc2", "blocks.10.norm1")
    first, same, other = (Origin(name, Part(name, ""), 1.0, "torch") for name in names)
    same_block, other_block = (FileReport({"logits": (1.0, 1.0)}, (first, more), ()).verdict for more in (same, other))
    assert same_block.endswith("; 1 further part differs, and within blocks.1 some may not change the outputs")
    assert other_block.endswith("; 1 further part differs")


def test_a_table_that_all_blocks_use_is_named_although_the_first_stage_is_right(torch_alone: None) -> None:
    config = small_config(vit_spec.get("dinov3_s16"))
    params, other = perturbed_params(config), perturbed_params(config)
    other["blocks"]["mlp"]["fc2"]["bias"][1] *= 2
    turned = config.replace(positions={"rotary_base": 10.0})
    report = compare_files(as_checkpoint(params, config, "jax"), as_checkpoint(other, turned, "jax"))
    assert str(report.part) in ("cosines", "sines") and report.harmless == 0
    assert "blocks.1.mlp.fc2" in {str(origin.part) for origin in report.origins}


def with_fields(**fields: Any) -> Checkpoint:
    """Return a checkpoint with some config fields changed; parameters that its config has in addition are zero."""
    config = PLAIN.replace(**fields)
    zeros = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in ViT(config).state_dict().items()}
    state = to_torch(perturbed_params(PLAIN), PLAIN)
    return Checkpoint(config, "torch", {name: state.get(name, zero) for name, zero in zeros.items()})


def test_a_part_of_another_shape_is_named_and_not_the_part_that_reads_it(torch_alone: None) -> None:
    other = with_fields(num_heads=4)
    other.arrays["blocks.1.mlp.fc2.bias"] *= 2
    report = compare_files(with_fields(), other)
    assert [str(origin.part) for origin in report.origins] == ["blocks.0.attn.qkv", "blocks.1.mlp.fc2"]
    assert "blocks.0.attn.qkv, which has another shape: (2, 7, 3, 2, 8) and (2, 7, 3, 4, 4); 1 further" in report.verdict
    assert f"{len(report.uncompared)} tensors were not compared" in str(report)
    shapes = {"first": [2, 2, 7, 7], "second": [2, 4, 7, 7]}
    assert report.facts()["uncompared"]["blocks.0.attn.scores"] == shapes


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_that_only_one_file_has_is_named_and_not_the_part_that_reads_it(is_first: bool, torch_alone: None) -> None:
    files = with_fields(), with_fields(norms={"after_blocks": False})
    report = compare_files(*(files if is_first else reversed(files)))
    assert [str(origin.part) for origin in report.origins] == ["norm"]
    assert f"is norm, which only the {'first' if is_first else 'second'} file has" in report.verdict


@pytest.mark.parametrize(
    ("common", "change", "end"),
    [
        (
            {},
            {"pixels": {"mean": (0.4,), "std": (0.2,)}},
            "pixels.mean and pixels.std differ, so the same picture gives other outputs",
        ),
        (
            {},
            {"resampling": {"antialias": False}},
            "resampling.antialias differs, so images of another size may give other outputs",
        ),
        (
            {"positions": {"rotary": "eva"}},
            {"positions": {"rotary": "eva", "rotary_grid": (2, 3)}},
            "positions.rotary_grid differs, so images of another size may give other outputs",
        ),
        (
            {"positions": {"kind": "none"}},
            {"positions": {"covers": "none", "factorized": True}},
            "positions.kind and positions.factorized differ, so images of another size may give other outputs",
        ),
        (
            {},
            {"positions": {"relative": "table"}},
            "positions.relative differs, so images of another size may give other outputs",
        ),
        (  # a single patch, so these tables and rotations are those of position 0
            {"image_size": 16, "positions": {"kind": "fixed", "table": "sincos_2d_mae", "rotary": "eva"}},
            {"positions": {"kind": "fixed", "table": "sincos_2d_big_vision", "rotary": "eva", "rotary_base": 10.0}},
            "positions.table and positions.rotary_base differ, so images of another size may give other outputs",
        ),
    ],
)
def test_the_verdict_names_differences_that_normalized_images_of_one_size_do_not_show(
    common: dict[str, Any], change: dict[str, Any], end: str, torch_alone: None
) -> None:
    report = compare_files(with_fields(**common), with_fields(**{**common, **change}))
    assert report.passed
    size = "16x16" if common.get("image_size") else "32x48"
    assert report.verdict.startswith(f"PASS: the same function of normalized images of {size}, outputs agree to 0.0e+00")
    assert report.verdict.endswith(f"in float64; {end}") and report.facts()["notes"] == [end]


def test_one_mean_for_all_channels_is_the_same_normalization(torch_alone: None) -> None:
    report = compare_files(with_fields(), with_fields(pixels={"mean": (0.5,) * 3}))
    assert report.verdict == "PASS: the same function, outputs agree to 0.0e+00 in float64"


def test_initial_values_and_unused_options_of_positions_do_not_limit_the_verdict(torch_alone: None) -> None:
    report = compare_files(with_fields(), with_fields(positions={"table": "normal(0.5)", "rotary_base": 10.0}))
    assert report.verdict == "PASS: the same function, outputs agree to 0.0e+00 in float64"


CONSTANT_OUTPUTS = "; the classifier gives the same outputs for all images, so the features before it were compared"


@pytest.mark.parametrize("fields", [{}, {"head": {"hidden": 12}}, {"tokens": {"distillation": True}}], ids=str)
def test_features_are_compared_if_the_classifier_gives_the_same_outputs_for_all_images(
    fields: dict[str, Any], torch_alone: None
) -> None:
    config = PLAIN.replace(**fields)
    files = [as_checkpoint(to_torch(perturbed_params(config), config), config, "torch") for _ in range(3)]
    for file in files:
        file.arrays.update({key: array * 0 for key, array in file.arrays.items() if key.startswith("head")})
    files[2].arrays["blocks.1.mlp.fc2.bias"] *= 2
    same, other = (compare_files(files[0], each) for each in files[1:])
    agreement = "PASS: the same function, features agree to 0.0e+00 in float64"
    assert same.passed and same.verdict == agreement + CONSTANT_OUTPUTS
    assert same.facts()["notes"] == [CONSTANT_OUTPUTS.removeprefix("; ")]
    assert not other.passed and str(other.part) == "blocks.1.mlp.fc2"
    assert other.verdict.startswith("FAIL: another function before the classifier, features differ by ")
    assert other.verdict.endswith(CONSTANT_OUTPUTS)


def test_outputs_that_are_the_same_for_all_images_and_differ_fail(torch_alone: None) -> None:
    one, other = altered(head__kernel=0), altered(head__kernel=0, head__bias=2)
    assert str(compare_files(one, other).part) == "head"


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_models_that_compute_nan_are_not_compared(number: float) -> None:
    """Both files give the same NaN, although they are different models."""
    one, other = altered(head__bias=number), altered(head__bias=number, cls_token=2)
    message = r"^the model of a\.npz computes NaN or infinities, first at head: .* inspect a\.npz"
    with pytest.raises(InputError, match=message):
        compare_files(one, other, sources=("a.npz", "b.npz"))
