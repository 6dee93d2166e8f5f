"""Probes of frozen features: each against an independent reference, and the command from images to its table."""

import json
from collections.abc import Callable
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
from parity.checkpoints.surgery import drop_head
from parity.checkpoints.weights import parameter
from parity.checkpoints.writing import write
from parity.comparison import reproducible_init
from tests import DATA
from train.data.augment import Augment
from train.data.batches import Feed, targets
from train.data.sources import Source, open_source
from train.evaluate import main
from train.inference import probes
from train.inference.model import gathered, network
from train.loop.metrics import score
from train.loop.run_folder import Run
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
FRUIT = ("apple", "fig", "quince")

Main = Callable[..., list[dict[str, Any]]]


# Nearest neighbours ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 140])
def test_neighbours_vote_as_in_scikit_learn(k: int) -> None:
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    reference.fit(FEATURES[TRAIN], CLASSES[TRAIN])
    found = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [k])
    assert np.array_equal(found[k], reference.predict(FEATURES[HELD_OUT]))


def test_neighbours_vote_as_counted_one_by_one() -> None:
    found = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [5])[5]
    for image, chosen in zip(FEATURES[HELD_OUT], found, strict=True):
        cosines = [float(x @ image / np.sqrt(x @ x * (image @ image))) for x in FEATURES[TRAIN]]
        near = sorted(range(140), key=lambda i: -cosines[i])[:5]
        votes = [sum(np.exp(cosines[i] / 0.07) for i in near if CLASSES[i] == c) for c in range(4)]
        assert chosen == np.argmax(votes)


def test_several_numbers_of_neighbours_are_each_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SIMILARITIES", 1000)  # a few images at a time
    together = probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [3, 20])
    monkeypatch.undo()
    for k, found in together.items():
        assert np.array_equal(found, probes.knn(FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT], [k])[k])


def test_of_equal_votes_the_lowest_class_wins() -> None:
    same = np.ones((4, 2))
    assert probes.knn(same, np.array([2, 1, 1, 2]), same[:1], [4])[4].tolist() == [1]


def test_more_neighbours_than_images_are_refused_and_those_that_fit_are_named() -> None:
    with pytest.raises(InputError, match=r"--k has 200, and there are 140 training images: give --k 10 20 100$"):
        probes.check_neighbours([10, 20, 100, 200], 140)


# Few shots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 140], ids=["more_features_than_images", "more_images_than_features"])
def test_few_shots_are_ridge_regression_to_plus_and_minus_one(count: int) -> None:
    x, classes = FEATURES[:count], CLASSES[:count]
    mean, std = x.mean(0), x.std(0) + 1e-5
    wide, held_out = (np.c_[(each - mean) / std, np.full(len(each), 100.0)] for each in (x, FEATURES[HELD_OUT]))
    aims = np.where(classes[:, None] == np.arange(classes.max() + 1), 1.0, -1.0)
    found = probes.few_shot(x, classes, FEATURES[HELD_OUT], (0.5, 1024.0))
    for strength, chosen in found.items():
        reference = Ridge(alpha=strength, fit_intercept=False).fit(wide, aims)
        assert np.array_equal(chosen, reference.predict(held_out).argmax(1))


@pytest.mark.parametrize("count", [4, 140])
def test_least_squares_are_solved_as_the_normal_equations_say(count: int) -> None:
    x, y = FEATURES[:count], VALUES[:count].astype(np.float64)
    direct = np.linalg.solve(x.T @ x + 0.3 * np.eye(6), x.T @ y)
    np.testing.assert_allclose(probes.solve(x, y).weights(0.3), direct, rtol=1e-10)  # 2e-16 times a condition below 1e4


def test_every_class_gets_its_shots() -> None:
    rows = probes.draw_shots(CLASSES, 7, 0, "abcd")
    assert np.bincount(CLASSES[rows]).tolist() == [7] * 4 and len(set(rows.tolist())) == 28


def test_more_shots_contain_the_fewer() -> None:
    few, more = (set(probes.draw_shots(CLASSES, shots, 3, "abcd").tolist()) for shots in (2, 5))
    assert few < more


def test_a_seed_decides_the_shots() -> None:
    one, same, other = (probes.draw_shots(CLASSES, 5, seed, "abcd").tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_classes_with_too_few_images_are_named() -> None:
    with pytest.raises(InputError, match=r"^3 shots need as many training images of every class, and 'b' has 2, 'c' has 1"):
        probes.draw_shots(np.array([0, 0, 0, 1, 1, 2]), 3, 0, "abc")


def test_a_class_without_images_takes_no_part() -> None:
    assert probes.draw_shots(np.array([0, 2, 2]), 1, 0, "abc").shape == (2,)


# Linear probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peak", [-5.9, -1.3, 0.2, 4.0])
def test_the_strength_is_found_to_an_eighth_of_a_decade_in_few_fits(peak: float) -> None:
    tried: list[float] = []

    def worth(strength: float) -> float:
        tried.append(strength)
        return -abs(np.log10(strength) - peak)

    strength, _ = probes.searched(worth)
    assert abs(np.log10(strength) - peak) <= 1 / 16 + 1e-9 and len(tried) == len(set(tried)) <= 15


def test_of_equally_good_strengths_the_strongest_is_taken() -> None:
    assert probes.searched(lambda strength: 1.0) == (1e6, 1.0)


def test_classes_are_told_apart_by_logistic_regression_of_standardised_features() -> None:
    probe = probes.linear("classes", FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    reference = LogisticRegression(C=1 / probe.strength, max_iter=1000)
    reference.fit(scaler.transform(FEATURES[TRAIN]), CLASSES[TRAIN])
    expected = reference.predict(scaler.transform(FEATURES[HELD_OUT]))
    assert np.array_equal(probe.outputs.argmax(1), expected) and probe.converged


def test_two_classes_are_told_apart() -> None:
    classes = CLASSES // 2
    probe = probes.linear("classes", FEATURES[TRAIN], classes[TRAIN], FEATURES[HELD_OUT])
    assert probe.outputs.shape == (60, 2)
    assert (
        score("classes", probe.outputs, classes[HELD_OUT], ("a", "b"))["accuracy"]
        > np.bincount(classes[HELD_OUT]).max() / 60
    )


def test_each_label_is_a_regression_of_its_own() -> None:
    probe = probes.linear("labels", FEATURES[TRAIN], LABELS[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    for i in range(2):
        reference = LogisticRegression(C=1 / probe.strength, max_iter=1000)
        reference.fit(scaler.transform(FEATURES[TRAIN]), LABELS[TRAIN, i])
        expected = reference.decision_function(scaler.transform(FEATURES[HELD_OUT]))
        np.testing.assert_allclose(2 * probe.outputs[:, i], expected, rtol=1e-9)  # one fit, done twice


def test_a_label_that_no_training_image_has_leaves_the_others_alone() -> None:
    wide = np.c_[LABELS, np.zeros(200, np.float32)]
    one = probes.linear("labels", FEATURES[TRAIN], LABELS[TRAIN], FEATURES[HELD_OUT])
    other = probes.linear("labels", FEATURES[TRAIN], wide[TRAIN], FEATURES[HELD_OUT])
    same = score("labels", one.outputs, LABELS[HELD_OUT], ("a", "b"))
    assert same.items() <= score("labels", other.outputs, wide[HELD_OUT], ("a", "b", "c")).items()


def test_values_are_predicted_by_ridge_regression() -> None:
    probe = probes.linear("values", FEATURES[TRAIN], VALUES[TRAIN], FEATURES[HELD_OUT])
    scaler = StandardScaler().fit(FEATURES[TRAIN])
    reference = Ridge(alpha=probe.strength).fit(scaler.transform(FEATURES[TRAIN]), VALUES[TRAIN].astype(np.float64))
    np.testing.assert_allclose(probe.outputs, reference.predict(scaler.transform(FEATURES[HELD_OUT])), rtol=1e-9)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    constant = np.c_[FEATURES, np.full(200, 7.0)]
    one, other = (probes.linear("values", x[TRAIN], VALUES[TRAIN], x[HELD_OUT]).outputs for x in (FEATURES, constant))
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_metric_that_is_undefined_at_every_strength_is_nan_and_the_strongest_is_taken() -> None:
    probe = probes.linear("labels", FEATURES[TRAIN], np.zeros((140, 1), np.float32), FEATURES[HELD_OUT])
    assert np.isnan(probe.validated) and probe.strength == 1e6


FEWEST = {"classes": np.zeros(2, np.int32), "labels": np.ones((3, 1), np.float32), "values": np.ones((3, 1), np.float32)}


@pytest.mark.parametrize("task", FEWEST)
def test_how_many_images_there_must_be_to_keep_one_is_said(task: str) -> None:
    enough = FEWEST[task]
    assert [len(rows) for rows in probes.kept(task, enough)] == [len(enough) - 1, 1]
    with pytest.raises(
        InputError, match=rf"of these {len(enough) - 1} it could keep none: give at least {len(enough)} images"
    ):
        probes.kept(task, enough[1:])


def test_a_fit_that_did_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ITERATIONS", 1)
    assert not probes.linear("classes", FEATURES[TRAIN], CLASSES[TRAIN], FEATURES[HELD_OUT]).converged


# Features -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source("digits")


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_features_are_what_the_head_sees_of_each_image_once(twin: str, digits: Source) -> None:
    pytest.importorskip(twin)
    checkpoint, few = reproducible_init.weights(CONFIG, 0), digits.held_out.take(np.arange(50))
    feed = Feed(few, targets(few, digits.classes, "classes", "classes"), CONFIG, 32, Augment())
    headless = network(drop_head(checkpoint)[0], twin)
    features = gathered(feed, lambda batch: headless.outputs(batch.images))
    whole = network(checkpoint, twin)
    logits = gathered(feed, lambda batch: whole.outputs(batch.images))
    assert features.shape == (50, 32)
    weight, bias = (parameter(checkpoint, f"head.{name}").astype(np.float64).T for name in ("weight", "bias"))
    # float32 sums of 32 products, each off by 32 * 6e-8 of their size at most
    np.testing.assert_allclose(features @ weight + bias, logits, atol=2e-6 * np.abs(features).max())


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Source) -> Path:
    """A run on the digits, with weights that were drawn and not learnt."""
    path = tmp_path_factory.mktemp("runs") / "drawn"
    Run(path, Recipe(batch_size=256), CONFIG, {"task": "classes", "classes": list(digits.classes)})
    write(reproducible_init.weights(CONFIG, 0), path / "weights.safetensors", "jax")
    return path


@pytest.fixture
def results(capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command, and return its results."""

    def call(*arguments: Any, twin: str = "torch") -> list[dict[str, Any]]:
        pytest.importorskip(twin)
        assert main([*map(str, arguments), "--twin", twin, "--json"]) == 0
        return [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which fails, and return its one line."""

    def call(*arguments: Any) -> str:
        assert main([*map(str, arguments)]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return call


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_neighbours_of_even_drawn_features_beat_chance(run: Path, results: Main, twin: str) -> None:
    found = results(run, "--k", 5, 20, twin=twin)
    assert [each["k"] for each in found] == [5, 20] and found[0]["train"] == 1438
    assert all(each["accuracy"] > 0.5 for each in found)  # chance is 0.1, its deviation over 359 images 0.016


def test_few_shots_are_told_by_big_visions_names(run: Path, results: Main) -> None:
    [found] = results(run, "--method", "few-shot", "--shots", 5, "--seed", 7)
    assert list(found["draws"]) == [f"z/digits_5shot-seed-{seed}" for seed in (7, 8, 9)]
    assert found["accuracy"] == pytest.approx(np.mean(list(found["draws"].values())))


def test_the_same_seed_gives_the_same_table(run: Path, results: Main) -> None:
    one, same, other = (results(run, "--method", "few-shot", "--shots", 1, "--seed", seed) for seed in (0, 0, 3))
    assert one == same != other


def test_a_linear_probe_of_values_is_told_by_error_and_r2(run: Path, results: Main) -> None:
    [found] = results(run, "--task", "values")
    assert found["method"] == "linear" and found["mae"] < 2.5 and found["r2"] > 0  # guessing the mean is off by 2.5


def test_a_linear_probe_of_labels_is_told_by_auroc_and_that_of_each(run: Path, results: Main) -> None:
    [found] = results(run, "--task", "labels", "--held-out", 0.8)
    assert found["auroc"] == pytest.approx(np.mean([found[f"auroc/{digit}"] for digit in range(10)]))
    assert found["auroc"] > 0.8  # that of chance is 0.5


def test_the_table_has_a_line_for_each_setting(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([str(run), "--twin", "torch"]) == 0
    said = capsys.readouterr().out
    assert "training images: 1,438 in " in said and said.count("accuracy") == 4


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs of three classes to learn from, three of each, and of two of them to judge by, two of each."""
    rng = np.random.default_rng(0)
    for name, count in (("train/apple", 3), ("train/fig", 3), ("train/quince", 3), ("val/apple", 2), ("val/fig", 2)):
        (tmp_path / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


@pytest.fixture
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a run on the photographs that stopped at images that cannot be read, or skipped them."""

    def make(corrupt: Any) -> Path:
        path = tmp_path_factory.mktemp("runs") / "drawn"
        recipe = Recipe(data=f"folder:{photos}", batch_size=4, corrupt=corrupt)
        Run(path, recipe, CONFIG, {"task": "classes", "classes": list(FRUIT)})
        write(reproducible_init.weights(CONFIG, 0), path / "weights.safetensors", "jax")
        return path

    return make


def test_what_is_undefined_is_null_in_json(trained: Callable[[str], Path], results: Main) -> None:
    [found] = results(trained("stop"), "--task", "labels")
    assert found["auroc/quince"] is None and 0 <= found["auroc"] <= 1


def test_what_is_undefined_is_nan_in_the_table(
    photos: Path, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    for name in ("apple", "quince"):  # of one image none is kept to choose L2 by, and figs alone have no AUROC
        for i in (1, 2):
            (photos / f"train/{name}/{i}.png").unlink()
    assert main([str(trained("stop")), "--task", "labels", "--twin", "torch"]) == 0
    assert "that L2 was chosen by: nan" in capsys.readouterr().out


def test_a_linear_probe_of_one_image_a_class_is_refused(
    photos: Path, trained: Callable[[str], Path], refused: Callable[..., str]
) -> None:
    for name in FRUIT:
        for i in (1, 2):
            (photos / f"train/{name}/{i}.png").unlink()
    assert "give at least 2 images of a class, or --method knn\n" in refused(trained("stop"), "--method", "linear")


def test_a_run_that_skipped_images_is_judged_without_them(
    photos: Path, trained: Callable[[str], Path], results: Main
) -> None:
    bad, run, found = [photos / "train/fig/1.png", photos / "val/apple/0.png"], trained("skip"), []
    for each in bad:
        each.write_bytes(b"no image")
    found += results(run, "--k", 1, "--method", "knn", "linear")
    for each in bad:
        each.unlink()
    without = results(run, "--k", 1, "--method", "knn", "linear")
    assert [each.pop("not_read") for each in (*found, *without)] == [2, 2, 0, 0]
    assert found == without and found[0]["train"] == 8 and found[0]["held_out"] == 3


def test_the_images_that_were_left_out_are_named(
    photos: Path, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    bad = photos / "train/fig/1.png"
    bad.write_bytes(b"no image")
    assert main([str(trained("skip")), "--k", "1", "--twin", "torch"]) == 0
    assert f"not read: 1 training image, left out: {bad}\n" in capsys.readouterr().out


def test_a_run_that_stopped_at_such_images_stops_at_them_here(
    photos: Path, trained: Callable[[str], Path], refused: Callable[..., str]
) -> None:
    bad = photos / "train/fig/1.png"
    bad.write_bytes(b"no image")
    assert str(bad) in refused(trained("stop"), "--k", "1")


def test_weights_alone_need_data(tmp_path: Path, refused: Callable[..., str]) -> None:
    write(reproducible_init.weights(CONFIG, 0), tmp_path / "bare.safetensors", "jax")
    assert "give --data" in refused(tmp_path / "bare.safetensors")


def test_a_network_that_does_not_pool_has_no_features(tmp_path: Path, refused: Callable[..., str]) -> None:
    config = CONFIG.replace(num_classes=0, head={"pool": "none"})
    write(reproducible_init.weights(config, 0), tmp_path / "bare.safetensors", "jax")
    assert "no feature of an image" in refused(tmp_path / "bare.safetensors", "--data", "digits")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--method", "knn", "--task", "labels"], "give --method linear, or --task classes"),
        (["--k", "10", "2000"], "give --k 10"),
        (["--method", "few-shot", "--shots", "200"], "200 shots need as many training images of every class"),
        (["--method", "zero-shot"], "invalid choice"),
        (["--shots", "0"], "give at least 1"),
        (["--seed", "-1"], "no seed"),
        (["--metod", "knn"], "did you mean '--method'?"),
        (["--held-out", "test"], "has no split 'test'"),
    ],
)
def test_what_cannot_be_done_is_told_before_an_image_is_read(
    arguments: list[str], part: str, run: Path, refused: Callable[..., str]
) -> None:
    assert part in refused(run, *arguments)


# Real weights ---------------------------------------------------------------------------------------------------------


def test_features_of_a_trained_network_are_worth_what_its_own_head_makes_of_them() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    weights = DATA / "weights" / "cifar10_vit" / "best_vit.pth"
    if not weights.exists():
        pytest.skip(f"needs {weights}, which is not part of the project")
    import parity

    checkpoint, source = parity.load(weights, given={"num_heads": 4}), open_source(f"parquet:{DATA / 'cifar10'}")
    headless, features, answers = network(drop_head(checkpoint)[0], "torch"), [], []
    for examples, step in ((source.train, 25), (source.held_out, 40)):
        few = examples.take(np.arange(0, len(examples), step))
        answers.append(few.answers)
        feed = Feed(few, targets(few, source.classes, "classes", "classes"), checkpoint.config, 50)
        features.append(gathered(feed, lambda batch: headless.outputs(batch.images)))
    found = probes.knn(features[0], answers[0], features[1], [20])[20]
    # Its head has 51.8 % on all 10,000 images; the deviation over 250 is 3.2 %, and 5 of them are 15.8 %.
    assert np.mean(found == answers[1]) > 0.518 - 0.158
