"""Evaluation of frozen features: each method against an independent reference, and the command."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")
pytest.importorskip("sklearn")

from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import vit_spec
from parity.checkpoints.conversion import parameter, replace_parameters
from parity.checkpoints.surgery import drop_head
from parity.checkpoints.writing import write
from parity.comparison import reproducible_init
from tests import DATA
from train.data.augment import Augment
from train.data.batches import DataLoader
from train.data.sources import Dataset, open_dataset
from train.data.targets import targets_for_task
from train.evaluate import main
from train.inference import probes
from train.inference.model import load_predictor, load_trained_model, predict_all
from train.loop.metrics import compute_metrics
from train.loop.run_folder import RunFolder
from train.predict import main as predict
from train.recipes import Recipe
from vit_spec import InputError

CONFIG = vit_spec.get(
    "vit_ti16", image_size=(8, 8), patch_size=4, width=32, depth=1, num_heads=2, mlp_dim=64, in_channels=1, num_classes=10
)
RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 4, 200)
FEATURES = RNG.standard_normal((200, 6)) + 1.5 * RNG.standard_normal((4, 6))[CLASSES]
TRAIN, HELD_OUT = slice(0, 140), slice(140, 200)
VALUES = (FEATURES @ RNG.standard_normal((6, 2)) + RNG.standard_normal((200, 2)) + 3).astype(np.float32)
LABELS = (VALUES > 3).astype(np.float32)
CLASS_NAMES = ("apple", "fig", "quince")

Main = Callable[..., list[dict[str, Any]]]


# Nearest neighbours ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 140])
def test_neighbours_vote_as_in_scikit_learn(k: int) -> None:
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    reference.fit(FEATURES[TRAIN], CLASSES[TRAIN])
    found = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [k])
    assert np.array_equal(found[k], reference.predict(FEATURES[HELD_OUT]))


def test_neighbours_vote_as_in_a_plain_loop() -> None:
    found = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [5])[5]
    for image, chosen in zip(FEATURES[HELD_OUT], found, strict=True):
        cosines = [float(x @ image / np.sqrt(x @ x * (image @ image))) for x in FEATURES[TRAIN]]
        near = sorted(range(140), key=lambda i: -cosines[i])[:5]
        votes = [sum(np.exp(cosines[i] / 0.07) for i in near if CLASSES[i] == c) for c in range(4)]
        assert chosen == np.argmax(votes)


def test_several_values_of_k_give_the_results_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_SIMILARITIES", 1000)  # a few images at a time
    together = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [3, 20])
    monkeypatch.undo()
    for k, found in together.items():
        assert np.array_equal(found, probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [k])[k])


def test_of_equal_votes_the_lowest_class_wins() -> None:
    same = np.ones((4, 2))
    assert probes.knn(same, np.array([2, 1, 1, 2]), same[:1], [4])[4].tolist() == [1]


def test_more_neighbours_than_images_are_refused_and_the_error_names_those_that_fit() -> None:
    with pytest.raises(InputError, match=r"--k has 200, and there are 140 training images: give --k 10 20 100$"):
        probes.check_neighbours([10, 20, 100, 200], 140)


# Few-shot -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 140], ids=["more_features_than_images", "more_images_than_features"])
def test_few_shot_is_ridge_regression_to_targets_of_plus_and_minus_one(count: int) -> None:
    x, classes = FEATURES[:count], CLASSES[:count]
    mean, std = x.mean(0), x.std(0) + 1e-5
    wide, held_out = (np.c_[(each - mean) / std, np.full(len(each), 100.0)] for each in (x, FEATURES[HELD_OUT]))
    signs = np.where(classes[:, None] == np.arange(classes.max() + 1), 1.0, -1.0)
    found = probes.few_shot(x, classes, FEATURES[HELD_OUT], (0.5, 1024.0))
    for strength, chosen in found.items():
        reference = Ridge(alpha=strength, fit_intercept=False).fit(wide, signs)
        assert np.array_equal(chosen, reference.predict(held_out).argmax(1))


@pytest.mark.parametrize("count", [4, 140])
def test_solve_ridge_agrees_with_the_normal_equations(count: int) -> None:
    x, y = FEATURES[:count], VALUES[:count].astype(np.float64)
    direct = np.linalg.solve(x.T @ x + 0.3 * np.eye(6), x.T @ y)
    # 2e-16 times a condition number below 1e4
    np.testing.assert_allclose(probes.solve_ridge(x, y).weights(0.3), direct, rtol=1e-10)


def test_every_class_has_the_number_of_shots() -> None:
    rows = probes.draw_shots(CLASSES, 7, 0, "abcd")
    assert np.bincount(CLASSES[rows]).tolist() == [7] * 4 and len(set(rows.tolist())) == 28


def test_fewer_shots_are_a_subset_of_more() -> None:
    few, more = (set(probes.draw_shots(CLASSES, shots, 3, "abcd").tolist()) for shots in (2, 5))
    assert few < more


def test_shots_depend_on_the_seed_alone() -> None:
    one, same, other = (probes.draw_shots(CLASSES, 5, seed, "abcd").tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_classes_with_too_few_images_are_named() -> None:
    with pytest.raises(InputError, match=r"^3 shots need as many training images of every class, and 'b' has 2, 'c' has 1"):
        probes.draw_shots(np.array([0, 0, 0, 1, 1, 2]), 3, 0, "abc")


def test_a_class_without_images_is_skipped() -> None:
    assert probes.draw_shots(np.array([0, 2, 2]), 1, 0, "abc").shape == (2,)


# Linear probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peak", [-5.9, -1.3, 0.2, 4.0])
def test_the_penalty_is_found_to_an_eighth_of_a_decade_in_few_fits(peak: float) -> None:
    tried: list[float] = []

    def objective(strength: float) -> float:
        tried.append(strength)
        return -abs(np.log10(strength) - peak)

    strength, _ = probes.search_strength(objective)
    assert abs(np.log10(strength) - peak) <= 1 / 16 + 1e-9 and len(tried) == len(set(tried)) <= 15


def test_of_equally_good_penalties_the_largest_is_taken() -> None:
    assert probes.search_strength(lambda strength: 1.0) == (1e6, 1.0)


def test_the_probe_of_classes_is_logistic_regression_of_standardized_features() -> None:
    probe = probes.linear_probe("classes", FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    reference = LogisticRegression(C=1 / probe.strength, max_iter=1000)
    reference.fit(scaler.transform(FEATURES[TRAIN]), CLASSES[TRAIN])
    expected = reference.predict(scaler.transform(FEATURES[HELD_OUT]))
    assert np.array_equal(probe.outputs.argmax(1), expected) and probe.converged


def test_the_probe_of_two_classes_beats_the_majority_class() -> None:
    classes = CLASSES // 2
    probe = probes.linear_probe("classes", FEATURES[TRAIN], classes[TRAIN], FEATURES[HELD_OUT])
    assert probe.outputs.shape == (60, 2)
    assert (
        compute_metrics("classes", probe.outputs, classes[HELD_OUT], ("a", "b"))["accuracy"]
        > np.bincount(classes[HELD_OUT]).max() / 60
    )


def test_the_probe_of_labels_is_a_logistic_regression_for_each() -> None:
    probe = probes.linear_probe("labels", FEATURES[TRAIN], LABELS[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    for i in range(2):
        reference = LogisticRegression(C=1 / probe.strength, max_iter=1000)
        reference.fit(scaler.transform(FEATURES[TRAIN]), LABELS[TRAIN, i])
        expected = reference.decision_function(scaler.transform(FEATURES[HELD_OUT]))
        np.testing.assert_allclose(probe.outputs[:, i], expected, rtol=1e-9)  # the same fit twice


def test_a_label_without_training_images_does_not_change_the_others() -> None:
    wide = np.c_[LABELS, np.zeros(200, np.float32)]
    one = probes.linear_probe("labels", FEATURES[TRAIN], LABELS[TRAIN], FEATURES[HELD_OUT])
    other = probes.linear_probe("labels", FEATURES[TRAIN], wide[TRAIN], FEATURES[HELD_OUT])
    same = compute_metrics("labels", one.outputs, LABELS[HELD_OUT], ("a", "b"))
    assert same.items() <= compute_metrics("labels", other.outputs, wide[HELD_OUT], ("a", "b", "c")).items()


@pytest.mark.parametrize("label", [0, 1])
def test_a_label_that_all_or_no_training_images_have_is_certain(label: int) -> None:
    targets = np.full((140, 1), label, np.float32)
    outputs, converged = probes.LinearModels("labels", FEATURES[TRAIN], targets, FEATURES[HELD_OUT], 1)(1.0)
    assert np.array_equal(outputs, np.full((60, 1), np.inf if label else -np.inf)) and converged


def test_the_probe_of_values_is_ridge_regression() -> None:
    probe = probes.linear_probe("values", FEATURES[TRAIN], VALUES[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    reference = Ridge(alpha=probe.strength).fit(scaler.transform(FEATURES[TRAIN]), VALUES[TRAIN].astype(np.float64))
    np.testing.assert_allclose(probe.outputs, reference.predict(scaler.transform(FEATURES[HELD_OUT])), rtol=1e-9)


def test_a_constant_feature_changes_nothing() -> None:
    constant = np.c_[FEATURES, np.full(200, 7.0)]
    one, other = (probes.linear_probe("values", x[TRAIN], VALUES[TRAIN], x[HELD_OUT]).outputs for x in (FEATURES, constant))
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_metric_undefined_for_every_penalty_is_nan_and_the_largest_is_taken() -> None:
    probe = probes.linear_probe("labels", FEATURES[TRAIN], np.zeros((140, 1), np.float32), FEATURES[HELD_OUT])
    assert np.isnan(probe.validated) and probe.strength == 1e6


FEWEST_TARGETS = {
    "classes": np.zeros(2, np.int32),
    "labels": np.ones((3, 1), np.float32),
    "values": np.ones((3, 1), np.float32),
}


@pytest.mark.parametrize("task", FEWEST_TARGETS)
def test_too_few_images_for_a_validation_split_are_refused_with_the_number_needed(task: str) -> None:
    enough = FEWEST_TARGETS[task]
    assert [len(rows) for rows in probes.validation_split(task, enough)] == [len(enough) - 1, 1]
    with pytest.raises(InputError, match=rf"and {len(enough) - 1} images are too few: give at least {len(enough)} images"):
        probes.validation_split(task, enough[1:])


def test_a_fit_that_did_not_converge_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_ITERATIONS", 1)
    assert not probes.linear_probe("classes", FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT]).converged


# Features -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return open_dataset("digits")


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_features_times_the_head_are_the_logits(twin: str, digits: Dataset) -> None:
    pytest.importorskip(twin)
    checkpoint, few = reproducible_init.weights(CONFIG, 0), digits.held_out.take(np.arange(50))
    loader = DataLoader(few, targets_for_task(few, digits.classes, "classes", "classes"), CONFIG, 32, Augment())
    headless = load_predictor(drop_head(checkpoint)[0], twin)
    features = predict_all(loader, lambda batch: headless.predict(batch.images))
    whole = load_predictor(checkpoint, twin)
    logits = predict_all(loader, lambda batch: whole.predict(batch.images))
    assert features.shape == (50, 32)
    weight, bias = (parameter(checkpoint, f"head.{name}").astype(np.float64).T for name in ("weight", "bias"))
    # float32 sums of 32 products, with a relative error of at most 32 * 6e-8
    np.testing.assert_allclose(features @ weight + bias, logits, atol=2e-6 * np.abs(features).max())


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    """A run folder for the digits with random weights."""
    path = tmp_path_factory.mktemp("runs") / "drawn"
    RunFolder(path, Recipe(batch_size=256), CONFIG, {"task": "classes", "classes": list(digits.classes)})
    for name in ("weights", "best"):
        write(reproducible_init.weights(CONFIG, 0), path / f"{name}.safetensors", "jax")
    return path


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Main:
    """A function that runs the command with --json and returns its results."""

    def call(*arguments: Any, twin: str = "torch") -> list[dict[str, Any]]:
        pytest.importorskip(twin)
        assert main([*map(str, arguments), "--twin", twin, "--json"]) == 0
        return [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command, which must fail, and returns its error of one line."""

    def call(*arguments: Any) -> str:
        assert main([*map(str, arguments)]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return call


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_nearest_neighbours_of_random_features_beat_chance(run: Path, evaluate: Main, twin: str) -> None:
    found = evaluate(run, "--k", 5, 20, twin=twin)
    assert [each["k"] for each in found] == [5, 20] and found[0]["train"] == 1438
    # Chance is 0.1, with a standard deviation of 0.016 over 359 images.
    assert all(each["accuracy"] > 0.5 for each in found)


def test_few_shot_results_have_the_names_of_big_vision(run: Path, evaluate: Main) -> None:
    [found] = evaluate(run, "--method", "few-shot", "--shots", 5, "--seed", 7)
    assert list(found["draws"]) == [f"z/digits_5shot-seed-{seed}" for seed in (7, 8, 9)]
    assert found["accuracy"] == pytest.approx(np.mean(list(found["draws"].values())))


def test_the_same_seed_gives_the_same_table(run: Path, evaluate: Main) -> None:
    one, same, other = (evaluate(run, "--method", "few-shot", "--shots", 1, "--seed", seed) for seed in (0, 0, 3))
    assert one == same != other


def test_simple_models_of_features_have_intervals_and_the_linear_one_all_metrics(run: Path, evaluate: Main) -> None:
    nearest, linear = evaluate(run, "--method", "knn", "linear", "--k", 10)
    for found in (nearest, linear):
        low, high = found["intervals"]["accuracy"]
        assert low < found["accuracy"] < high
    assert {"balanced_accuracy", "f1", "auroc", "average_precision", "log_loss", "ece"} <= linear["intervals"].keys()
    assert linear["each"].keys() == set("0123456789") and 0 <= linear["constant"]["accuracy"] < 0.2


def test_a_linear_probe_of_values_reports_mae_and_r2(run: Path, evaluate: Main) -> None:
    [found] = evaluate(run, "--task", "values")
    assert found["method"] == "linear" and found["mae"] < 2.5 and found["r2"] > 0  # predicting the mean has an error of 2.5


def test_a_linear_probe_of_labels_reports_auroc_and_that_of_each(run: Path, evaluate: Main) -> None:
    [found] = evaluate(run, "--task", "labels", "--held-out", 0.8)
    assert found["auroc"] == pytest.approx(np.mean([found[f"auroc/{digit}"] for digit in range(10)]))
    assert found["auroc"] > 0.8  # chance is 0.5


def test_the_table_has_a_row_for_each_setting(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([str(run), "--method", "knn", "--twin", "torch"]) == 0
    said = capsys.readouterr().out
    assert "training images: 1,438 in " in said and len(re.findall(r"accuracy [\d.]+% \([\d.]+% to [\d.]+%\)", said)) == 4


def test_an_override_of_what_the_file_states_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([str(run), "--method", "knn", "--k", "5", "--twin", "torch", "--set", "norms.eps=0.5"]) == 0
    assert "override  norms.eps is 0.5 by --set; the file states 1e-06\n" in capsys.readouterr().out


def test_few_images_have_fewer_neighbours(make_run: Callable[[str], Path], evaluate: Main) -> None:
    assert [each["k"] for each in evaluate(make_run("stop"), "--method", "knn")] == [9]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with three training images of each of three classes, and two held-out images of each of two of them."""
    rng = np.random.default_rng(0)
    for name, count in (("train/apple", 3), ("train/fig", 3), ("train/quince", 3), ("val/apple", 2), ("val/fig", 2)):
        (tmp_path / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


@pytest.fixture
def make_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes a run on the photographs with a value of `corrupt`."""

    def make(corrupt: Any) -> Path:
        path = tmp_path_factory.mktemp("runs") / "drawn"
        recipe = Recipe(data=f"folder:{photos}", batch_size=4, corrupt=corrupt)
        RunFolder(path, recipe, CONFIG, {"task": "classes", "classes": list(CLASS_NAMES)})
        for name in ("weights", "best"):
            write(reproducible_init.weights(CONFIG, 0), path / f"{name}.safetensors", "jax")
        return path

    return make


def test_the_newest_weights_used_in_place_of_the_best_are_reported(
    make_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    run = make_run("skip")
    (run / "best.safetensors").unlink()
    assert main([str(run), "--k", "1", "--twin", "torch", "--json"]) == 0
    assert f"note: {run} has no best.safetensors: its newest weights are used" in capsys.readouterr().err


def test_an_undefined_metric_is_null_in_json(make_run: Callable[[str], Path], evaluate: Main) -> None:
    [found] = evaluate(make_run("stop"), "--task", "labels")
    assert found["auroc/quince"] is None and 0 <= found["auroc"] <= 1


def test_an_undefined_metric_is_nan_in_the_table(
    photos: Path, make_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    for name in ("apple", "quince"):  # no apple or quince is left for validation, and figs alone have no AUROC
        for i in (1, 2):
            (photos / f"train/{name}/{i}.png").unlink()
    assert main([str(make_run("stop")), "--task", "labels", "--twin", "torch"]) == 0
    assert "validation nan" in capsys.readouterr().out


def test_a_linear_probe_of_one_image_a_class_is_refused(
    photos: Path, make_run: Callable[[str], Path], refused: Callable[..., str]
) -> None:
    for name in CLASS_NAMES:
        for i in (1, 2):
            (photos / f"train/{name}/{i}.png").unlink()
    assert "give at least 2 images of a class, or --method knn\n" in refused(make_run("stop"), "--method", "linear")


def test_a_run_that_skips_corrupt_images_is_evaluated_without_them(
    photos: Path, make_run: Callable[[str], Path], evaluate: Main
) -> None:
    bad, run, found = [photos / "train/fig/1.png", photos / "val/apple/0.png"], make_run("skip"), []
    for each in bad:
        each.write_bytes(b"no image")
    found += evaluate(run, "--k", 1, "--method", "knn", "linear")
    for each in bad:
        each.unlink()
    without = evaluate(run, "--k", 1, "--method", "knn", "linear")
    assert [each.pop("not_read") for each in (*found, *without)] == [2, 2, 0, 0]
    assert found == without and found[0]["train"] == 8 and found[0]["held_out"] == 3


def test_images_that_are_left_out_are_named(
    photos: Path, make_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    bad = photos / "train/fig/1.png"
    bad.write_bytes(b"no image")
    assert main([str(make_run("skip")), "--k", "1", "--twin", "torch"]) == 0
    assert f"unreadable: 1 training image, left out: {bad}\n" in capsys.readouterr().out


def test_a_run_that_stops_at_corrupt_images_stops_the_evaluation_too(
    photos: Path, make_run: Callable[[str], Path], refused: Callable[..., str]
) -> None:
    bad = photos / "train/fig/1.png"
    bad.write_bytes(b"no image")
    assert str(bad) in refused(make_run("stop"), "--k", "1")


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A run that recorded its data, with a held-out share that is not the default; and the folder of its images."""
    images = tmp_path / "images"
    add_images(images, range(10))
    recipe = Recipe(data=f"folder:{images}", held_out=0.3, batch_size=4)
    source = open_dataset(recipe.data, recipe.held_out)
    folder = RunFolder(tmp_path / "run", recipe, CONFIG, {"task": "classes", "classes": list(CLASS_NAMES)}, source=source)
    for name in ("weights", "best"):
        write(reproducible_init.weights(CONFIG, 0), folder.path / f"{name}.safetensors", "jax")
    return folder.path, images


def add_images(folder: Path, numbers: Sequence[int]) -> None:
    rng = np.random.default_rng(numbers[0])
    for name in CLASS_NAMES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in numbers:
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / name / f"{i}.png")


def knn(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[dict[str, Any], str]:
    """Run the command with one neighbour; return its result, without the data's name, and what it warns of."""
    pytest.importorskip("torch")
    assert main([*map(str, arguments), "--k", "1", "--twin", "torch", "--json"]) == 0
    printed = capsys.readouterr()
    return {key: value for key, value in json.loads(printed.out).items() if key != "data"}, printed.err


def test_the_data_of_a_run_are_known_by_their_content_at_any_place(
    recorded: tuple[Path, Path], tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = recorded
    expected = knn(capsys, run)
    assert expected[0]["held_out"] == 9 and expected[1] == ""  # 30 %, not the default
    for spelled in (f"folder:{images}/", f"folder:{images}/../images"):
        assert knn(capsys, run, "--data", spelled) == expected
    images.rename(tmp_path / "moved")
    message = refused(run)
    assert f"the data that {run} was trained on cannot be opened" in message and "give it with --data" in message
    assert knn(capsys, run, "--data", f"folder:{tmp_path / 'moved'}") == expected


def test_data_that_have_changed_are_scored_only_on_request(
    recorded: tuple[Path, Path], refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = recorded
    add_images(images, range(20, 26))
    message = refused(run)
    assert "30 files before and 48 files now" in message and f"or give --data folder:{images}" in message
    result, warning = knn(capsys, run, "--data", f"folder:{images}")
    assert result["held_out"] == 15 and "images that it was trained on may be among the held-out ones" in warning


def test_files_that_a_run_was_trained_on_are_found_among_other_data(
    recorded: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = recorded
    add_images(images, range(20, 26))
    moved = images.rename(images.parent / "moved")
    (moved / "fig/1.png").write_bytes((moved / "fig/2.png").read_bytes())
    result, warning = knn(capsys, run, "--data", f"folder:{moved}")
    assert result["held_out"] == 9 and warning == (
        f"warning: 29 files of folder:{moved} are among the data that {run} was trained on: "
        "images that it was trained on may be among the held-out ones\n"
    )
    add_images(moved / "test", range(1, 11))  # a split of its own, of other images under the same names
    (moved / "train").mkdir()
    for name in CLASS_NAMES:
        (moved / name).rename(moved / "train" / name)
    assert knn(capsys, run, "--data", f"folder:{moved}")[1] == ""


def test_other_data_than_those_of_the_run_have_their_own_held_out_images(
    recorded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_images(tmp_path / "others", range(50, 60))
    result, warning = knn(capsys, recorded[0], "--data", f"folder:{tmp_path / 'others'}")
    assert result["held_out"] == 6 and warning == ""


@pytest.mark.parametrize("held_out", ["0.3", "0.6"])
def test_held_out_images_that_the_run_was_trained_on_are_counted(
    held_out: str, recorded: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = recorded
    _, warning = knn(capsys, run, "--held-out", held_out)
    trained_on = {str(name) for name in open_dataset(f"folder:{images}", 0.3).train.names}
    scored = open_dataset(f"folder:{images}", float(held_out)).held_out
    count = sum(str(name) in trained_on for name in scored.names)
    assert (count > 0) == (held_out == "0.6")
    assert warning == (f"warning: the run was trained on {count} of the {len(scored)} held-out images\n" if count else "")


def test_a_damaged_record_of_the_data_is_named(recorded: tuple[Path, Path], refused: Callable[..., str]) -> None:
    (recorded[0] / "data.json").write_text("{}")
    assert "data.json cannot be read" in refused(recorded[0])


def test_weights_without_a_run_need_data(tmp_path: Path, refused: Callable[..., str]) -> None:
    write(reproducible_init.weights(CONFIG, 0), tmp_path / "bare.safetensors", "jax")
    assert "give --data" in refused(tmp_path / "bare.safetensors")


def test_a_model_without_pooling_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    config = CONFIG.replace(num_classes=0, head={"pool": "none"})
    write(reproducible_init.weights(config, 0), tmp_path / "bare.safetensors", "jax")
    assert "no feature of an image" in refused(tmp_path / "bare.safetensors", "--data", "digits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "knn", "--task", "labels"], "give --method linear, or --task classes"),
        (["--k", "10", "2000"], "give --k 10"),
        (["--method", "few-shot", "--shots", "200"], "200 shots need as many training images of every class"),
        (["--method", "zero-shot"], "invalid choice"),
        (["--shots", "0"], "'0' is not a number of images: give 1 or more"),
        (["--seed", "-1"], "'-1' is not a seed: give 0 or more, below 2^63"),
        (["--metod", "knn"], "did you mean '--method'?"),
        (["--held-out", "test"], "has no split 'test'"),
    ],
)
def test_wrong_arguments_are_refused_before_an_image_is_read(
    arguments: list[str], message: str, run: Path, refused: Callable[..., str]
) -> None:
    assert message in refused(run, *arguments)


# The head -------------------------------------------------------------------------------------------------------------


def test_the_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_the_head_is_evaluated_by_default_and_scores_its_own_outputs(
    run: Path, evaluate: Main, digits: Dataset, twin: str
) -> None:
    [found] = evaluate(run, twin=twin)
    checkpoint, held_out = reproducible_init.weights(CONFIG, 0), digits.held_out
    loader = DataLoader(held_out, targets_for_task(held_out, digits.classes, "classes", "classes"), CONFIG, 64, Augment())
    predictor = load_predictor(checkpoint, twin)
    right = predict_all(loader, lambda batch: predictor.predict(batch.images)).argmax(1) == held_out.targets
    assert found["method"] == "head" and found["accuracy"] == pytest.approx(right.mean()) and found["held_out"] == 359
    low, high = found["intervals"]["accuracy"]
    assert low <= found["accuracy"] <= high and found["constant"]["accuracy"] == pytest.approx(37 / 359)
    assert list(found["each"]) == list(map(str, range(10)))


def test_scores_of_the_head_stand_beside_those_of_one_answer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([str(run), "--twin", "torch", "--resamples", "10"]) == 0
    said = capsys.readouterr().out
    assert "one answer for all images: 10.3%" in said and "training images:" not in said
    assert len(re.findall(r"^\d +3[5-7] +[\dn]", said, re.MULTILINE)) == 10


def make_photos(folder: Path, names: Sequence[str]) -> str:
    """Write two grey images of each class to train and val, and return the data set."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in names:
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / split / name / f"{i}.png")
    return f"folder:{folder}"


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Weights whose outputs have names, in another order than data sets list them."""
    weights = replace(reproducible_init.weights(CONFIG.replace(num_classes=3), 0), labels=("quince", "apple", "fig"))
    write(weights, tmp_path / "named.safetensors", "jax")
    return tmp_path / "named.safetensors"


def test_outputs_are_matched_with_classes_by_name(named: Path, evaluate: Main, tmp_path: Path) -> None:
    data = make_photos(tmp_path / "photos", ("apple", "fig", "quince"))
    [found] = evaluate(named, "--data", data, "--out", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == ["apple", "apple", "fig", "fig", "quince", "quince"]
    assert [Path(row["image"]).parent.name for row in rows] == [row["class"] for row in rows]
    assert found["accuracy"] == pytest.approx(np.mean([row["class"] == row["predicted"] for row in rows]))
    assert list(found["each"]) == ["quince", "apple", "fig"]
    loaded = load_trained_model(str(named))
    images = np.stack([np.asarray(Image.open(row["image"]))[..., None] for row in rows])
    expected = load_predictor(loaded.checkpoint, "torch").predict(images).argmax(1)
    assert [row["predicted"] for row in rows] == [("quince", "apple", "fig")[i] for i in expected]


@pytest.mark.parametrize("method", ["head", "linear"])
def test_classes_of_the_same_name_are_scored_each(method: str, evaluate: Main, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names, classes, pngs = ["crane", "heron", "crane"], [0, 1, 2, 2] * 5, []
    for pixels in np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8):
        Image.fromarray(pixels).save(png := BytesIO(), "PNG")
        pngs.append(png.getvalue())
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    for split in ("train", "test"):
        table = pa.table({"image": pngs, "label": classes}).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    weights = replace(reproducible_init.weights(CONFIG.replace(num_classes=3), 0), labels=tuple(names))
    write(weights, tmp_path / "weights.safetensors", "jax")
    report = ["--out", tmp_path / "out"] if method == "head" else []
    [found] = evaluate(tmp_path / "weights.safetensors", "--data", f"parquet:{tmp_path}", "--method", method, *report)
    unique = ["crane", "heron", "crane (2)"]
    assert {name: of["images"] for name, of in found["each"].items()} == dict(zip(unique, (5, 5, 10), strict=True))
    if report:
        for name in ("classes.csv", "confusion.csv"):
            header, *rows = csv.reader((tmp_path / "out" / name).read_text().splitlines())
            assert [row[0] for row in rows] == unique
        assert header[1:] == unique


def test_predict_and_evaluate_give_every_image_the_same_class(
    evaluate: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = reproducible_init.weights(CONFIG, 0)
    flat = {name: parameter(checkpoint, name) * np.float32(1e-4) for name in ("head.weight", "head.bias")}
    names = [f"{i:03}" for i in range(10)]
    weights = replace(replace_parameters(checkpoint, CONFIG, flat), labels=tuple(names))
    write(weights, tmp_path / "flat.safetensors", "jax")
    data = make_photos(tmp_path / "photos", names)
    evaluate(tmp_path / "flat.safetensors", "--data", data, "--out", tmp_path / "out", "--resamples", 2)
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").read_text().splitlines()))
    command = [str(tmp_path / "flat.safetensors"), *(row["image"] for row in rows), "--twin", "torch", "--json"]
    assert predict(command) == 0
    printed = [json.loads(line)["classes"] for line in capsys.readouterr().out.splitlines()]
    assert len({round(each["probability"], 4) for image in printed for each in image}) == 1  # differ in further digits
    assert [row["predicted"] for row in rows] == [image[0]["name"] for image in printed]


def test_data_may_lack_classes_of_the_head_but_have_no_others(
    named: Path, evaluate: Main, refused: Callable[..., str], tmp_path: Path
) -> None:
    [found] = evaluate(named, "--data", make_photos(tmp_path / "two", ("apple", "fig")))
    assert found["method"] == "head" and found["each"]["quince"]["recall"] is None
    data = make_photos(tmp_path / "others", ("apple", "pear", "fig"))
    assert "the data has the class 'pear', which the head does not have" in refused(
        named, "--data", data, "--method", "head"
    )
    [found] = evaluate(named, "--data", data)
    assert found["method"] == "knn" and found["k"] == 6


def test_a_head_of_another_size_or_task_is_refused(run: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    data = make_photos(tmp_path, ("apple", "fig"))
    line = refused(run, "--data", data, "--method", "head")
    assert "the data has the class 'apple', which the head does not have" in line
    assert "give --task classes" in refused(run, "--method", "head", "--task", "labels")
    headless = tmp_path / "headless.safetensors"
    write(reproducible_init.weights(CONFIG.replace(num_classes=0), 0), headless, "jax")
    assert "these weights have none: give --method knn" in refused(headless, "--data", "digits", "--method", "head")
    unnamed = tmp_path / "unnamed.safetensors"
    write(reproducible_init.weights(CONFIG, 0), unnamed, "jax")
    assert "the head has 10 outputs, and the data has 2 classes" in refused(unnamed, "--data", data, "--method", "head")


def test_a_report_has_scores_predictions_the_confusion_matrix_and_mistakes(
    run: Path, evaluate: Main, refused: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "report"
    [found] = evaluate(run, "--out", out, "--resamples", 10)
    assert {path.name for path in out.iterdir()} == {
        *("scores.json", "classes.csv", "predictions.csv", "confusion.csv", "confusion.png", "mistakes.png")
    }
    assert json.loads((out / "scores.json").read_text()) == found
    matrix = np.array([row[1:] for row in csv.reader((out / "confusion.csv").read_text().splitlines())][1:], int)
    assert matrix.sum() == 359 and matrix.trace() / 359 == pytest.approx(found["accuracy"])
    predictions = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
    assert sum(row["class"] == row["predicted"] for row in predictions) == matrix.trace()
    each = list(csv.DictReader((out / "classes.csv").read_text().splitlines()))
    assert [int(row["images"]) for row in each] == [of["images"] for of in found["each"].values()] == matrix.sum(1).tolist()
    for name in ("confusion.png", "mistakes.png"):
        with Image.open(out / name) as picture:
            assert picture.format == "PNG" and np.ptp(np.asarray(picture.convert("L"))) > 200
    assert "is not empty: give another folder, or --force" in refused(run, "--out", out)
    evaluate(run, "--out", out, "--resamples", 10, "--force")
    assert "--out reports on the head" in refused(run, "--method", "knn", "--out", tmp_path / "other")


@pytest.mark.parametrize("task", ["labels", "values"])
def test_heads_of_labels_and_values_are_scored(task: Any, evaluate: Main, tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = CONFIG if task == "labels" else CONFIG.replace(num_classes=1)
    names = list(map(str, range(10))) if task == "labels" else ["value"]
    RunFolder(path, Recipe(batch_size=256, task=task), config, {"task": task, "classes": names})
    checkpoint = replace(reproducible_init.weights(config, 0), task=task, labels=tuple(names))
    for name in ("weights", "best"):
        write(checkpoint, path / f"{name}.safetensors", "jax")
    [found] = evaluate(path, "--out", tmp_path / "out", "--resamples", 5)
    assert found["method"] == "head" and list(found["each"]) == names
    metrics = {"labels": ("auroc", "label_accuracy"), "values": ("mae", "rmse", "r2", "spearman")}[task]
    assert all(found["intervals"][metric][0] <= found["intervals"][metric][1] for metric in metrics)
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").read_text().splitlines()))
    errors = [float(row[name]) - float(row[f"predicted {name}"]) for row in rows for name in names]
    if task == "values":
        assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    else:
        assert found["label_accuracy"] == pytest.approx(np.mean(np.abs(errors) < 0.5))
    each = next(csv.DictReader((tmp_path / "out" / f"{task}.csv").read_text().splitlines()))
    assert ("images" in each) == ("images" in found["each"][names[0]]) == (task == "labels")
    assert (tmp_path / "out" / "mistakes.png").exists()


# Real weights ---------------------------------------------------------------------------------------------------------


def test_features_of_a_trained_model_reach_the_accuracy_of_its_own_head() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    weights = DATA / "weights" / "cifar10_vit" / "best_vit.pth"
    if not weights.exists():
        pytest.skip(f"needs {weights}, which is not part of the project")
    import parity

    checkpoint, source = parity.load(weights, given={"num_heads": 4}), open_dataset(f"parquet:{DATA / 'cifar10'}")
    headless, features, targets = load_predictor(drop_head(checkpoint)[0], "torch"), [], []
    for examples, step in ((source.train, 25), (source.held_out, 40)):
        few = examples.take(np.arange(0, len(examples), step))
        targets.append(few.targets)
        loader = DataLoader(few, targets_for_task(few, source.classes, "classes", "classes"), checkpoint.config, 50)
        features.append(predict_all(loader, lambda batch: headless.predict(batch.images)))
    found = probes.knn(features[0], targets[0], features[1], [20])[20]
    # Its head has 51.8 % on all 10,000 images; the standard deviation over 250 is 3.2 %, and 5 of them are 15.8 %.
    assert np.mean(found == targets[1]) > 0.518 - 0.158
