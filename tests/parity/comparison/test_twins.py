"""What a comparison says: the part that is at fault, the same bytes twice, and one line to what cannot be compared."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import vit_spec
import vit_torch
from parity.checkpoints.weights import held
from parity.comparison.disk_cache import Spool
from parity.comparison.forward_backward import Subject, TorchTwin
from parity.comparison.localisation import Part
from parity.comparison.report import Report
from parity.comparison.tolerances import Budget, Error
from parity.comparison.twins import compare
from tests.twins import perturbed, pictures, small
from vit_spec import InputError, ViTConfig

CONFIG = small(vit_spec.get("vit_s16"), depth=4)
QUICK = {"xla_backend_optimization_level": 0}


def compared(config: ViTConfig = CONFIG, **options: Any) -> Report:
    options = {"images": pictures(config), "xla_options": QUICK, **options}
    return compare(config, options.pop("params", None) or perturbed(config), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_its_gate(dtype: Any) -> None:
    report = compared(dtype=dtype)
    assert report.passed, report.verdict
    assert all(m.jax and m.jax.relative_rms(m.scale) > 1e-6 for m in report.measures if m.name.endswith("norm1"))


def test_the_same_comparison_gives_the_same_bytes() -> None:
    one, other = (json.dumps(compared().facts(), allow_nan=False) for _ in range(2))
    assert one == other


def test_every_level_adds_to_the_one_before() -> None:
    function = compared(level="function", backward=False)
    train = compared(level="train", steps=2)
    assert all(m.jax is None for m in function.measures) and function.training is None
    assert {m.name for m in function.measures} < {m.name for m in train.measures}
    assert train.training is not None and train.training.steps == 2
    assert train.passed, train.verdict


def test_swapping_twins_finds_the_block_that_isolation_names(monkeypatch: pytest.MonkeyPatch) -> None:
    right, weights = vit_torch.ViT, perturbed(CONFIG)

    class Wrong(right):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, execution: Any = None) -> None:
            super().__init__(config, execution)
            self.blocks[2].norm2.eps = 1e-3

    monkeypatch.setattr(vit_torch, "ViT", Wrong)
    report = compared(params=weights, backward=False)
    assert str(report.part) == "blocks.2.norm2"
    assert {str(origin.part) for origin in report.origins} == {"blocks.2.norm2"}
    assert report.bisection is not None and report.bisection.stage == "blocks.2"
    assert len(report.bisection.runs) <= 3
    assert report.facts()["first"] == {
        "name": "blocks.2.norm2",
        "module": "blocks.2.norm2",
        "operation": "",
        "way": "forward",
    }


def test_stochastic_depth_acts_and_is_the_same_for_both_twins() -> None:
    images = pictures(CONFIG)
    report = compared(level="function", drop_path=0.6)
    assert report.passed, report.verdict
    losses = {
        rate: float(TorchTwin(Subject(held(perturbed(CONFIG), CONFIG, "jax"), images, 0, rate)).run().values["loss"])
        for rate in (0.0, 0.6)
    }
    assert losses[0.0] != losses[0.6]


def test_a_model_that_computes_nan_is_refused_in_one_line() -> None:
    params = perturbed(CONFIG)
    params["norm"]["scale"][0] = np.nan
    with pytest.raises(InputError, match="NaN or infinities, first at norm: look at its weights") as error:
        compared(params=params)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("level", "funktion"), ("dtype", "float64")])
def test_a_word_that_means_nothing_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is '{value}': give one of "):
        compared(**{name: value})


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1: give a number from 0"):
        compared(seed=-1, images=None)


def test_a_checkpoint_of_another_config_is_refused() -> None:
    checkpoint = held(perturbed(CONFIG), CONFIG, "jax")
    with pytest.raises(InputError, match="of another config"):
        compare(CONFIG.replace(norms={"eps": 1e-5}), checkpoint)


NAMES = ["patch_embed.proj", "patch_embed", "embed", "blocks.0.norm1", "blocks.0.attn.q", "blocks.0.attn.k"]
NAMES += ["blocks.0.attn.scores", "blocks.0.attn.heads", "blocks.0.attn.proj", "blocks.0.attn", "blocks.0", "norm"]
PLACES = {
    "blocks.0.norm1": "blocks.0.norm1",
    "blocks.0.attn.scores": "blocks.0.attn: scores",
    "blocks.0.attn": "blocks.0.attn: output",
    "embed": "embed",
    "norm": "norm",
    "gradient of blocks.0.attn.proj.weight": "blocks.0.attn.proj.weight on the way back",
    "gradient at blocks.0.attn.q": "blocks.0.attn: scores on the way back",
    "gradient at embed": "blocks.0.norm1 on the way back",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_part_is_named_down_to_its_operation(name: str) -> None:
    assert str(Part.of(name, NAMES)) == PLACES[name]


def test_tensors_on_disk_come_back_as_they_were() -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.float32(3).reshape(()), "c": np.zeros((0, 2), np.float32)}
    spool = Spool(arrays)
    assert list(spool) == list(arrays) and "d" not in spool
    assert all(np.array_equal(spool[name], array) and spool[name].dtype == array.dtype for name, array in arrays.items())


def test_an_error_knows_its_sign_its_direction_and_the_tolerance_that_would_pass() -> None:
    b = np.array([1.0, -2.0, 4.0])
    error = Error.of(b + 0.3, b)
    assert error.bias() == pytest.approx(0.3 / np.sqrt(7))
    assert Error.of(-b, b).cosine == -1
    np.testing.assert_allclose(b + 0.3, b, rtol=error.tolerance * (1 + 1e-12), atol=error.tolerance)
    assert not np.allclose(b + 0.3, b, rtol=error.tolerance * 0.99, atol=error.tolerance * 0.99)


def test_the_ceiling_of_half_precision_is_five_of_its_roundings() -> None:
    assert Budget("bfloat16").ceiling == 5 * 2**-8
    assert Budget("bfloat16", 1e-15).ceiling == Budget("bfloat16").ceiling
    assert Budget("float32", 2e-14).ceiling == pytest.approx(2e-14 * 2**29)


def test_a_few_entries_may_be_nearly_zero_by_chance_and_many_may_not() -> None:
    def error(relative: float, entries: int) -> Error:
        return Error.of(np.full(entries, 1 + relative), np.ones(entries))

    assert Budget().holds(error(1.2e-5, 2), error(6e-6, 2))
    assert not Budget().holds(error(1.2e-5, 1000), error(6e-6, 1000))
    assert not Budget().holds(error(2e-4, 2), error(2e-4, 2))
