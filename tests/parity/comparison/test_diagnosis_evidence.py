"""Diagnosis of outputs that carry little information: it claims no more than these outputs can show."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import vit_torch
from parity import Checkpoint
from parity.checkpoints.conversion import parameter
from parity.checkpoints.surgery.edit import to_float64
from parity.comparison.diagnosis import Diagnosis, diagnose, diagnose_against, expected_outputs, read_expected_outputs
from parity.comparison.diagnosis.chance import EffectDistribution
from parity.comparison.diagnosis.diagnose import _images_that_differ
from parity.comparison.diagnosis.evaluator import Result
from parity.comparison.diagnosis.hypothesis import Hypothesis, Runner, Trial
from parity.comparison.diagnosis.numeric_hypotheses import scale_factors
from parity.comparison.diagnosis.score_bias import score_biases
from parity.comparison.diagnosis.search import CauseSearch, SearchResult
from parity.comparison.diagnosis.suspects import find_likeliest_suspect
from tests.parity.comparison.test_diagnosis import PLAIN, State, checkpoint, float64_outputs, model_outputs, uint8_images
from vit_spec import InputError, ViTConfig, rows

ONE_CLASS = PLAIN.replace(num_classes=1)


@pytest.fixture(autouse=True)
def _few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run fewer models with one layer changed, to save time."""
    monkeypatch.setattr("parity.comparison.diagnosis.layer_search.MAX_MODELS", 80)


def trial_of(config: ViTConfig, images: np.ndarray) -> Trial:
    weights = {name: to_float64(parameter(checkpoint(config), name)) for name in rows(config)}
    return Trial(config, weights, images, None)


def float64_intermediates(config: ViTConfig, state: State, images: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model = vit_torch.ViT(config, vit_torch.Execution(attention="explicit")).eval().double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    pixels = [np.array(values) for values in (config.pixels.mean, config.pixels.std)]
    with torch.no_grad():
        x = torch.tensor((images / 255 - pixels[0]) / pixels[1]).permute(0, 3, 1, 2)
        logits, values = vit_torch.intermediates(model, x)
    return logits.numpy(), {name: value.numpy() for name, value in values.items()}


# Intermediates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks.0", "blocks.1"])
def test_an_intermediate_that_differs_is_no_match_although_the_logits_are_right(name: str) -> None:
    logits, values = float64_intermediates(PLAIN, checkpoint().arrays, uint8_images())
    wrong = values[name].copy()
    wrong[-1, 1:] *= 1.7  # patch tokens of the last image
    inner = {each: values[each] for each in ("patch_embed", "blocks.0", "blocks.1")} | {name: wrong}
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN, inner), pairs=0)
    assert not diagnosis.passed and diagnosis.verdict.startswith("UNKNOWN: 40 outputs agree")
    assert f"the first layer that differs is {name}, by" in diagnosis.verdict


def diagnose_relu(wrong: str) -> Diagnosis:
    """Diagnose outputs of a model with relu, given intermediates of which one, `wrong`, has another fault."""
    logits, values = float64_intermediates(PLAIN.replace(mlp={"activation": "relu"}), checkpoint().arrays, uint8_images())
    inner = {name: values[name].copy() for name in ("patch_embed", "blocks.0", "blocks.1")}
    inner[wrong][:, 1:] *= 1.7
    return diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN, inner), pairs=0)


def test_a_difference_that_a_cause_leaves_in_a_later_layer_is_said() -> None:
    diagnosis = diagnose_relu("blocks.1")
    assert diagnosis.verdict.startswith("FOUND: activation is relu;") and "differs is blocks.0, by" in diagnosis.suspect
    assert "but intermediates still differ, by another fault: the first layer that differs is blocks.1" in diagnosis.verdict


@pytest.mark.parametrize("wrong", ["patch_embed", "blocks.0"])
def test_a_cause_that_leaves_the_first_layer_that_differs_is_not_found(wrong: str) -> None:
    diagnosis = diagnose_relu(wrong)
    assert diagnosis.matched == () and diagnosis.verdict.startswith("UNKNOWN: activation is relu would explain the outputs")
    assert f"with it, the first layer that differs is {wrong}, by" in diagnosis.verdict and wrong in diagnosis.suspect


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_intermediates_may_be_less_precise_than_the_logits(kind: str) -> None:
    logits, values = float64_intermediates(PLAIN, checkpoint().arrays, uint8_images())
    inner = {name: values[name].astype(kind) for name in ("blocks.0", "blocks.1", "blocks.1.attn.scores")}
    assert diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN, inner), pairs=0).passed


def test_an_intermediate_in_bfloat16_is_the_only_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = vit_torch.model.Mlp.forward, iter(range(PLAIN.depth))

    def forward(self: Any, x: Any, noise: Any = None) -> Any:
        y = original(self, x, noise) * (1 + 3e-6)  # rounds a few values to the other neighbour, as another machine does
        return y.bfloat16().to(y.dtype) if next(calls) == 0 else y

    with monkeypatch.context() as patch:
        patch.setattr(vit_torch.model.Mlp, "forward", forward)
        logits, values = float64_intermediates(PLAIN, checkpoint().arrays, uint8_images())
    inner = {name: values[name].astype("f4") for name in ("blocks.0", "blocks.1")}
    monkeypatch.setattr("parity.comparison.diagnosis.layer_search.MAX_MODELS", 300)
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits.astype("f4"), PLAIN, inner), pairs=0)
    assert diagnosis.verdict.startswith("FOUND: blocks.0.mlp: rounded to bfloat16;"), diagnosis.verdict
    assert "another fault" not in diagnosis.verdict and len(diagnosis.matched) == 1
    assert not any("second" in remark for remark in diagnosis.remarks)


def test_another_checkpoint_with_other_intermediates_may_compute_the_same_function() -> None:
    other = checkpoint()
    for name in [name for name in other.arrays if "attn.qkv" in name]:
        other.arrays[name][:32] *= -1  # queries and keys
    diagnosis = diagnose_against(checkpoint(), other, pairs=0)
    assert diagnosis.passed and any("attn.qkv.weight" in line for line in diagnosis.evidence)


# Images in another order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[1, 0], [0, 0]])
def test_the_outputs_of_other_images_with_the_same_corners_are_not_reused(order: list[int]) -> None:
    images = uint8_images()[:2].transpose(0, 3, 1, 2) / 255
    images[:, :, 0, 0] = 0.0
    runner = Runner()
    runner.run(trial_of(PLAIN, images))
    reordered = runner.run(trial_of(PLAIN, images[order]))
    assert np.array_equal(reordered, Runner().run(trial_of(PLAIN, images[order])))


# Images that may mislead ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_images_without_detail_do_not_show_that_nothing_is_wrong(activation: str) -> None:
    images = np.zeros((4, *PLAIN.image_size, 3), np.uint8) + np.array([30, 90, 160, 220], np.uint8)[:, None, None, None]
    logits = float64_outputs(PLAIN.replace(mlp={"activation": activation}), checkpoint().arrays, images)
    diagnosis = diagnose(checkpoint(), expected_outputs(images, logits, PLAIN), pairs=0)
    assert "nothing is wrong" not in diagnosis.verdict and diagnosis.passed == (activation == "gelu")
    assert "have no detail to show faults in the pixels of a patch or the order of patches" in diagnosis.verdict


def test_floats_in_the_range_of_pixels_may_be_inputs_of_the_model() -> None:
    images = uint8_images() / 255
    unnormalized = PLAIN.replace(pixels={"mean": (0.0,), "std": (1.0,)})
    logits = float64_outputs(unnormalized, checkpoint().arrays, 255 * images)
    diagnosis = diagnose(checkpoint(), expected_outputs(images, logits, PLAIN), pairs=0)
    assert "images are taken for pixels, because all are in [0, 1]" in diagnosis.remarks
    assert diagnosis.matched and "if the model was given them as they are" in diagnosis.verdict
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN), pairs=0)
    assert diagnosis.matched and "; but" not in diagnosis.verdict


# Few independent outputs ----------------------------------------------------------------------------------------------


def test_equal_outputs_are_counted_once() -> None:
    effects = np.random.default_rng(0).standard_normal((100, 1, 5))
    assert EffectDistribution.of(effects).independent_outputs(1e-3) == 5
    assert EffectDistribution.of(np.repeat(effects, 8, 1)).independent_outputs(1e-3) == 5
    assert EffectDistribution.of([]).independent_outputs(1e-3) == 0


def test_a_small_remainder_is_likely_by_chance_if_there_are_few_outputs() -> None:
    rng = np.random.default_rng(0)
    few, many = (EffectDistribution.of(rng.standard_normal((100, size))) for size in (2, 40))
    assert few.chance(0.1, models=1000) == 1 and many.chance(0.1, models=1000) < 1e-6
    assert many.chance(0.9, models=1000) == 1
    assert few.chance(1e-9, numbers=2) == 1  # as many numbers as outputs


def test_no_number_is_solved_for_from_equal_images() -> None:
    images = uint8_images(ONE_CLASS)[[0] * 9]
    logits = model_outputs(ONE_CLASS, checkpoint(ONE_CLASS).arrays, images) * np.float32(1.1)
    diagnosis = diagnose(checkpoint(ONE_CLASS), expected_outputs(images, logits, ONE_CLASS), pairs=0)
    assert diagnosis.matched == () and not any("fit as well" in str(cause) for cause in diagnosis.runners_up)


def test_two_outputs_name_no_layer() -> None:
    config = PLAIN.replace(num_classes=2)
    images = uint8_images(config)[:1]
    logits = model_outputs(config, checkpoint(config).arrays, images) + np.float32([[0.03, -0.05]])
    diagnosis = diagnose(checkpoint(config), expected_outputs(images, logits, config), pairs=0)
    assert diagnosis.matched == () and diagnosis.suspect.startswith("the logits alone do not identify the layer. To")


@pytest.mark.parametrize("distance", [0.0, 1e-4])
def test_equal_and_nearly_equal_images_give_no_bias_of_the_scores(distance: float) -> None:
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 1, (1, 3, *PLAIN.image_size)) + distance * rng.uniform(0, 1, (4, 3, *PLAIN.image_size))
    trial = trial_of(PLAIN, images)
    _, values = float64_intermediates(PLAIN, checkpoint().arrays, 255 * images.transpose(0, 2, 3, 1))
    scores = {f"blocks.{n}.attn.scores": 6 * np.tanh(values[f"blocks.{n}.attn.scores"] / 6) for n in range(PLAIN.depth)}
    assert not list(score_biases(trial, expected_outputs(images, np.ones((4, 5)), PLAIN, scores)))


def test_equal_entries_are_no_evidence_of_decimal_rounding() -> None:
    logits = np.tile([[0.25, 1.5, -2.5, 3.25, 0.75]], (8, 1))
    assert expected_outputs(uint8_images(), logits, PLAIN).rounding.digits == ""


def test_every_layer_that_explains_the_difference_is_named() -> None:
    rng = np.random.default_rng(0)
    before, missing, other = rng.standard_normal((3, 8, 5))
    effects = EffectDistribution.of(rng.standard_normal((100, 40)))
    changed = [("head", before + 2 * missing), ("norm", before + missing + 0.1 * other), ("blocks.0", before + other)]
    suspect = find_likeliest_suspect(before, before + missing, changed, effects, 100, 40)
    assert str(suspect).startswith("head, norm or an earlier layer: a change of one of these outputs alone would")
    alone = find_likeliest_suspect(before, before + missing, changed[:1], effects, 100, 40)
    assert str(alone).startswith("head or an earlier layer: a change of this output alone would explain 100%")


@pytest.mark.parametrize("share", [0.45, 0.55])
def test_a_layer_that_explains_less_than_half_of_the_difference_is_not_the_likeliest(share: float) -> None:
    rng = np.random.default_rng(0)
    before, missing, other = rng.standard_normal((3, 400, 5))
    other -= missing * (other * missing).sum() / (missing * missing).sum()
    other *= np.linalg.norm(missing) / np.linalg.norm(other)
    effects = EffectDistribution.of(rng.standard_normal((100, 2000)))
    changed = [("blocks.0.attn.qkv", before + math.sqrt(share) * missing + math.sqrt(1 - share) * other)]
    suspect = find_likeliest_suspect(before, before + missing, changed, effects, 100, 2000)
    text = f"the likeliest is blocks.0.attn.qkv, which would explain {share:.0%} of the difference"
    assert (text in str(suspect)) == (share > 0.5) and "blocks.0 (the output of" in str(suspect)


def test_layers_that_are_as_likely_are_named_together() -> None:
    rng = np.random.default_rng(0)
    before, missing, other = rng.standard_normal((3, 400, 5))
    effects = EffectDistribution.of(rng.standard_normal((100, 2000)))
    changed = [("blocks.1", before + missing + 0.8 * other), ("blocks.2", before + missing + 0.78 * other)]
    suspect = find_likeliest_suspect(before, before + missing, changed, effects, 100, 2000)
    assert "the likeliest are blocks.2 and blocks.1, each of which would explain up to 6" in str(suspect)


# A second cause that explains nothing --------------------------------------------------------------------------------


def test_a_second_cause_that_explains_little_of_what_the_first_leaves_is_not_named() -> None:
    images = uint8_images()
    logits = float64_outputs(PLAIN, checkpoint().arrays, 255 * (images / 255) ** 2.2)  # nearly another normalization
    expected = expected_outputs(images, logits, PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected, pairs=50)
    singles = search._distinct_results(search._try_single_causes())
    errors = {single.name: single.error for single in singles}
    pairs = search._try_pairs(singles)
    assert all(pair.error <= 0.71 * min(errors[cause.name] for cause in pair.causes) for pair in pairs)


def test_a_bias_that_is_left_out_is_named_once() -> None:
    state = checkpoint().arrays
    state["blocks.1.mlp.fc2.bias"] *= 0
    expected = expected_outputs(uint8_images(), model_outputs(PLAIN, state, uint8_images()), PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected)
    search.evaluator.effects = EffectDistribution.of(np.eye(search.subset.logits.size))
    families = {family.hypothesis_at((1.0,), 1).name: family for family in scale_factors(PLAIN)}
    (solved,) = search.evaluator.solve_each([families["blocks.mlp.fc2.bias of block 1: multiplied by 1"]])
    assert solved.name == "blocks.mlp.fc2.bias of block 1: left out"


# Half precision -------------------------------------------------------------------------------------------------------


def test_a_change_that_removes_half_of_the_error_does_not_match() -> None:
    logits = model_outputs(PLAIN, checkpoint().arrays, uint8_images()) * 1.04
    expected = expected_outputs(uint8_images(), torch.tensor(logits).bfloat16().float().numpy(), PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected)
    halved, explained = (
        Result((Hypothesis("it is a cause", "family"),), search.full_trial, search.full.outputs, error)
        for error in (1.7e-2, 1.7e-3)
    )
    assert search.tolerance > 1.7e-2 and search.full.error > search.tolerance
    assert not search.matches(halved, search.full.error) and search.matches(explained, search.full.error)


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_that_a_model_amplifies_is_not_a_fault(seed: int) -> None:
    config = PLAIN.replace(depth=4, num_classes=100)
    file = checkpoint(config, seed)
    for tensor in file.arrays.values():
        tensor *= 3
    generator = torch.Generator().manual_seed(0)  # each weight gets a rounding error that the search cannot reproduce
    rounded = {
        name: tensor * (1 + 2.0**-9 * (2 * torch.rand(tensor.shape, generator=generator) - 1))
        for name, tensor in file.arrays.items()
    }
    execution = vit_torch.Execution(dtype=torch.bfloat16)
    logits = model_outputs(config, rounded, uint8_images(config)[:4], execution)
    diagnosis = diagnose(file, expected_outputs(uint8_images(config)[:4], logits, config), pairs=100)
    assert diagnosis.before > 2e-2 and diagnosis.passed and not diagnosis.matched, diagnosis.verdict
    assert "the rounding to bfloat16 could cause" in diagnosis.verdict


def test_a_pair_of_roundings_is_no_single_rounding() -> None:
    expected = expected_outputs(uint8_images(), model_outputs(PLAIN, checkpoint().arrays, uint8_images()) * 1.5, PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected)
    rounding = Hypothesis("weights and activations are bfloat16", "dtype rounding", lowers_precision_of="model")
    one, two = (Result(causes, search.full_trial, search.full.outputs, 0.1) for causes in ((rounding,), (rounding,) * 2))
    assert search.matches(one, search.full.error) and not search.matches(two, search.full.error)


def test_numbers_of_half_precision_are_not_printed_numbers() -> None:
    logits = torch.linspace(0.5, 1.0, 40).bfloat16().double().numpy().reshape(8, 5)
    assert expected_outputs(uint8_images(), logits, PLAIN).rounding.digits == ""


def test_a_solved_number_has_the_digits_that_the_outputs_determine() -> None:
    right = PLAIN.replace(norms={"eps": 2e-2})
    noise = 1 + 1e-2 * np.random.default_rng(0).standard_normal((8, 5))
    logits = torch.tensor(float64_outputs(right, checkpoint().arrays, uint8_images()) * noise).bfloat16().float().numpy()
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN), pairs=0)
    names = [str(cause) for cause in (*diagnosis.matched, *diagnosis.runners_up)]
    assert any(name.startswith("LayerNorm eps is 0.02") for name in names), names
    assert diagnosis.matched == () or "fit as well" in str(diagnosis.matched[0])


def test_of_causes_with_equal_outputs_the_one_with_the_rounder_number_comes_first() -> None:
    right = checkpoint().arrays
    for name in ("weight", "bias"):
        right[f"blocks.1.mlp.fc2.{name}"] *= 0.9
    expected = expected_outputs(uint8_images(), model_outputs(PLAIN, right, uint8_images()), PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected)
    search.evaluator.effects = EffectDistribution.of(np.eye(search.subset.logits.size))
    families = {family.hypothesis_at((1.0,), 1).family: family for family in scale_factors(PLAIN)}
    solved = search.evaluator.solve_each(families[f"factor of blocks.1.{part}"] for part in ("sum", "mlp"))
    assert [match.name for match in search._confirm(solved)] == [
        "blocks.1.mlp: multiplied by 0.9",
        "blocks.1.sum: multiplied by 1.111111",
    ]


def test_drop_path_that_is_left_on_is_not_blamed_on_the_embedding_alone() -> None:
    state = checkpoint().arrays
    for name in [name for name in state if ".attn.proj." in name or ".mlp.fc2." in name]:
        state[name] = state[name] / 0.9
    expected = expected_outputs(uint8_images(), model_outputs(PLAIN, state, uint8_images()), PLAIN)
    search = CauseSearch(trial_of(PLAIN, expected.images), expected)
    search.evaluator.effects = EffectDistribution.of(np.eye(search.subset.logits.size))
    families = {family.hypothesis_at((1.0,), 1).family: family for family in scale_factors(PLAIN)}
    solved = search.evaluator.solve_each(families[f"factor of {what}"] for what in ("embed", "attention and MLP"))
    assert "what attention and MLP add: multiplied by 1.111111" in [match.name for match in search._confirm(solved)]


def test_a_match_within_the_rounding_of_the_weights_does_not_claim_that_nothing_is_wrong() -> None:
    state = checkpoint().arrays
    file = Checkpoint(PLAIN, "torch", {name: tensor.bfloat16() for name, tensor in state.items()})
    logits = float64_outputs(PLAIN, state, uint8_images())
    diagnosis = diagnose(file, expected_outputs(uint8_images(), logits, PLAIN), pairs=0)
    assert (
        diagnosis.passed and "nothing is wrong" not in diagnosis.verdict and "is rounding error" not in diagnosis.precision
    )
    assert "the rounding of the weights to bfloat16 could cause" in diagnosis.verdict and "blocks.0" in diagnosis.verdict


# Images that differ ---------------------------------------------------------------------------------------------------


def test_images_that_alone_differ_are_named_and_all_errors_are_those_of_all_images() -> None:
    config = PLAIN.replace(num_classes=100)
    images = uint8_images(config)[:4]
    logits = float64_outputs(config, checkpoint(config).arrays, images)
    logits[3] = logits[3, ::-1].copy()
    diagnosis = diagnose(checkpoint(config), expected_outputs(images, logits, config), pairs=0)
    assert any("only the outputs of 1 of 4 images differ (counted from 0: 3)" in remark for remark in diagnosis.remarks)
    assert diagnosis.matched == () and all(1e-2 < cause.error < diagnosis.before for cause in diagnosis.runners_up)
    assert "do not identify the layer" in diagnosis.suspect


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 0, 2]])
def test_outputs_of_images_in_another_order_are_named(order: list[int]) -> None:
    images = uint8_images()[:3]
    logits = float64_outputs(PLAIN, checkpoint().arrays, images)
    diagnosis = diagnose(checkpoint(), expected_outputs(images, logits[order], PLAIN), pairs=0)
    text = f"the outputs are those of the images in the order {', '.join(map(str, order))} (counted from 0)"
    assert text in diagnosis.remarks and not diagnosis.matched
    assert not any(
        "in the order" in remark for remark in diagnose(checkpoint(), expected_outputs(images, logits, PLAIN)).remarks
    )


@pytest.mark.parametrize(("errors", "different"), [((9.0, 9.0, 0.5), [0, 1]), ((1.5, 1.2, 0.8), []), ((9.0, 9.0, 9.0), [])])
def test_a_tolerance_among_errors_of_similar_size_does_not_tell_images_apart(
    errors: tuple[float, ...], different: list[int]
) -> None:
    expected = expected_outputs(uint8_images()[:3], np.ones((3, 5)), PLAIN)
    outputs = expected.logits * (1 + 1e-3 * np.array(errors)[:, None])
    baseline = Result((), trial_of(PLAIN, expected.images), outputs, 1e-2)
    assert _images_that_differ(expected, SearchResult(baseline, 1e-3, (), (), 1)) == different


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images", "blocks.0"])
def test_compressed_zeros_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"images": uint8_images(), "logits": np.ones((8, 5), np.float32)}
    arrays[name] = np.zeros((8, 5 << 20), bool)
    np.savez_compressed(tmp_path / "expected.npz", **arrays)
    with pytest.raises(InputError, match=f"bytes as float64, most of them '{name}'") as error:
        read_expected_outputs(tmp_path / "expected.npz", PLAIN)
    assert "\n" not in str(error.value)
