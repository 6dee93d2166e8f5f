"""What a network says of images: the same from either twin, of images brought to size as a run's held-out ones are."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")

import parity
import vit_spec
from parity.checkpoints.weights import edited
from parity.checkpoints.writing import convert, write
from parity.comparison import reproducible_init
from tests import ROOT
from train.data.augment import Augment, fit
from train.inference.model import network, opened
from train.loop.run_folder import Run
from train.predict import TOGETHER, answers, main
from train.recipes import Recipe
from vit_spec import ViTConfig

DATA = ROOT.parent / "shared" / "data"
CONFIG = vit_spec.get(
    "vit_ti16", image_size=(8, 8), patch_size=4, width=32, depth=2, num_heads=2, mlp_dim=64, num_classes=3
)
GREY = CONFIG.replace(in_channels=1)
FRUIT = ("apple", "fig", "quince")

Main = Callable[..., str]


def a_run(path: Path, config: ViTConfig = CONFIG, task: str = "classes", recipe: Recipe | None = None) -> Path:
    """A run's folder, as a run leaves it, with weights that were drawn and not learnt."""
    classes = list(FRUIT) if config.num_classes == 3 else [str(i) for i in range(10)]
    data = {"task": task, "train": 8, "held_out": 2, "classes": classes}
    Run(path, recipe or Recipe(data="folder:fruit"), config, data)
    write(reproducible_init.weights(config, 0), path / "weights.safetensors", "jax")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run")


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Ten photographs of different sizes."""
    rng, paths = np.random.default_rng(0), [tmp_path / f"{i}.png" for i in range(10)]
    for i, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (9 + i, 14, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command, and return what it printed."""

    def call(*arguments: Any) -> str:
        pytest.importorskip("torch")
        assert main([*map(str, arguments), "--twin", "torch"]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command, which fails, and return its one line."""

    def call(*arguments: Any) -> str:
        pytest.importorskip("torch")
        assert main([*map(str, arguments), "--twin", "torch"]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return call


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def logits(run: Path, pixels: np.ndarray) -> np.ndarray:
    """What PyTorch says of images (B, H, W, C) uint8, asked without the command."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.load(run)
    x = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    return model(x).detach().double().numpy()


# What is said ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_both_twins_print_the_same(task: str, tmp_path: Path, photos: list[str], capsys: pytest.CaptureFixture) -> None:
    for framework in ("jax", "torch"):
        pytest.importorskip(framework)
    run, texts = a_run(tmp_path / "run", task=task), []
    for twin in ("jax", "torch"):
        assert main([str(run), *photos, "--twin", twin]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and photos[9] in texts[0]


def test_probabilities_are_the_softmax_of_the_fitted_image(run: Path, photos: list[str], said: Main) -> None:
    fitted = np.stack([np.asarray(fit(Image.open(path), (8, 8))) for path in photos])
    x = np.exp(logits(run, fitted))
    expected = x / x.sum(1, keepdims=True)
    for row, found in zip(expected, objects(said(run, *photos, "--json")), strict=True):
        chances = {each["name"]: each["probability"] for each in found["classes"]}
        assert chances == {name: pytest.approx(p, abs=6e-5) for name, p in zip(FRUIT, row, strict=True)}  # of 4 digits


def test_the_likeliest_classes_come_first_and_no_more_than_asked_for(run: Path, photos: list[str], said: Main) -> None:
    whole, [top] = (objects(said(run, photos[0], "--json", *more)) for more in ((), ("--top", 2)))
    chances = [each["probability"] for each in whole[0]["classes"]]
    assert chances == sorted(chances, reverse=True) and top["classes"] == whole[0]["classes"][:2]


def test_labels_are_said_where_they_are_likelier_than_not() -> None:
    assert answers("labels", FRUIT, [-3.0, 0.1, 2.0], 1) == [("quince", 0.8808), ("fig", 0.525)]


def test_that_no_label_holds_is_said(tmp_path: Path, photos: list[str], said: Main) -> None:
    run = a_run(tmp_path / "run", task="labels")
    checkpoint = edited(reproducible_init.weights(CONFIG, 0), CONFIG, {"head.bias": np.full(3, -30, np.float32)})
    write(checkpoint, run / "best.safetensors", "jax")
    assert said(run, photos[0]) == f"{photos[0]}\n  no label above one half\n"


def test_values_are_said_with_four_digits() -> None:
    assert answers("values", ("age",), [61.23456], 5) == [("age", 61.23)]


def test_classes_read_as_a_number_make_one_value(tmp_path: Path, photos: list[str], said: Main) -> None:
    run = a_run(tmp_path / "run", CONFIG.replace(num_classes=1), "values")
    [found] = objects(said(run, photos[0], "--json"))
    assert [each["name"] for each in found["values"]] == ["value"]


def test_images_of_more_than_one_batch_are_said_one_by_one(run: Path, photos: list[str], said: Main) -> None:
    assert len(photos) > TOGETHER
    assert said(run, *photos) == "".join(said(run, path) for path in photos)


# What is asked --------------------------------------------------------------------------------------------------------


def test_the_best_weights_of_a_run_are_taken(run: Path, photos: list[str], said: Main) -> None:
    newest = said(run, photos[0])
    write(reproducible_init.weights(CONFIG, 1), run / "best.safetensors", "jax")
    assert said(run, photos[0]) == said(run / "best.safetensors", photos[0]) != newest


def test_a_file_in_a_run_has_the_runs_classes(run: Path, photos: list[str], said: Main) -> None:
    write(reproducible_init.weights(CONFIG, 1), run / "best.safetensors", "jax")
    [found] = objects(said(run / "weights.safetensors", photos[0], "--json"))
    assert {each["name"] for each in found["classes"]} == set(FRUIT)


def test_a_bare_file_has_class_numbers(tmp_path: Path, photos: list[str], said: Main) -> None:
    write(reproducible_init.weights(CONFIG, 0), tmp_path / "bare.pth", "torch")
    [found] = objects(said(tmp_path / "bare.pth", "--set", "num_heads=2", photos[0], "--json"))
    assert {each["name"] for each in found["classes"]} == {"0", "1", "2"}


def test_a_converted_run_has_its_classes_and_its_preprocessing(tmp_path: Path, photos: list[str], said: Main) -> None:
    run = a_run(tmp_path / "run", recipe=Recipe(data="folder:fruit", augment=Augment(share=0.5, held_out_filter="box")))
    convert(run, tmp_path / "a.npz", "torch")
    convert(tmp_path / "a.npz", tmp_path / "b.pth", "timm")
    assert said(run, photos[3]) == said(tmp_path / "b.pth", photos[3])


def test_what_nothing_tells_is_said_beside_the_answers(
    tmp_path: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    weights = parity.to_torch(reproducible_init.weights(CONFIG, 0))
    torch.save(weights, tmp_path / "bare.pth")
    assert main([str(tmp_path / "bare.pth"), photos[0], "--set", "num_heads=2", "--twin", "torch"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and "mlp.activation='gelu'" in notes[0] and "num_heads" not in notes[0]
    assert "how images are prepared: assumed, shorter side to 8 (bicubic)" in notes[1]


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path: Path, photos: list[str], said: Main) -> None:
    names = ("\x1b[2J", "a\nb", "c" * 500)
    write(replace(reproducible_init.weights(CONFIG, 0), labels=names), tmp_path / "odd.npz", "jax")
    text = said(tmp_path / "odd.npz", photos[0])
    assert r"\x1b[2J" in text and r"a\nb" in text and "\x1b" not in text and max(map(len, text.splitlines())) < 100


def test_names_of_classes_come_from_a_file(run: Path, photos: list[str], said: Main) -> None:
    (run / "names.txt").write_text("a\nb\nc\n")
    [found] = objects(said(run, photos[0], "--classes", run / "names.txt", "--json"))
    assert {each["name"] for each in found["classes"]} == {"a", "b", "c"}


def test_images_are_cut_as_the_runs_held_out_ones(tmp_path: Path, photos: list[str], said: Main) -> None:
    augment = Augment(share=0.5, held_out_filter="box")
    run = a_run(tmp_path / "run", recipe=Recipe(data="folder:fruit", augment=augment))
    fit(Image.open(photos[3]), (8, 8), 0.5, "box").save(tmp_path / "fitted.png")
    plain = a_run(tmp_path / "plain")
    cut, whole = (objects(said(*each, "--json"))[0] for each in ((run, photos[3]), (plain, tmp_path / "fitted.png")))
    assert cut["classes"] == whole["classes"]


def test_a_colour_image_is_shown_in_grey_to_a_network_of_grey(tmp_path: Path, photos: list[str], said: Main) -> None:
    run = a_run(tmp_path / "run", GREY)
    Image.open(photos[0]).convert("L").save(tmp_path / "grey.png")
    colour, grey = objects(said(run, photos[0], tmp_path / "grey.png", "--json"))
    assert colour["classes"] == grey["classes"]


# Attention ------------------------------------------------------------------------------------------------------------


def test_maps_are_a_picture(run: Path, photos: list[str], said: Main) -> None:
    pytest.importorskip("matplotlib")
    text = said(run, *photos, "--maps", run / "maps.png")
    assert text.endswith(f"wrote {run / 'maps.png'}\n")
    with Image.open(run / "maps.png") as picture:
        assert picture.format == "PNG" and picture.getpixel((0, 0))[:3] == (255, 255, 255)


def test_a_picture_of_many_maps_is_about_square_and_no_larger_than_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from train.loop import attention_maps

    monkeypatch.setattr(attention_maps, "LARGEST", 800)
    attention_maps.draw(
        tmp_path / "maps.png", np.zeros((40, 8, 8, 1), np.uint8), np.ones((40, 2, 2), np.float32), ["fig"] * 40
    )
    with Image.open(tmp_path / "maps.png") as picture:
        assert max(picture.size) == 800 and 0.8 < picture.width / picture.height < 1.25


def test_each_image_lies_beside_its_map_under_its_title(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from train.loop.attention_maps import GAP, SIDE, TITLE, draw

    images = np.stack([np.full((8, 8, 3), shade, np.uint8) for shade in (10, 70, 130, 190)])
    draw(tmp_path / "maps.png", images, np.ones((4, 2, 2), np.float32), [""] * 4)
    with Image.open(tmp_path / "maps.png") as picture:
        for i, shade in enumerate((10, 70, 130, 190)):
            left, top = 2 * SIDE * (i % 3), (TITLE + SIDE - GAP / 2) * (i // 3) + TITLE
            image, under = ((150 * (x + SIDE / 2), 150 * (top + SIDE / 2)) for x in (left, left + SIDE))
            assert picture.getpixel(image)[:3] == (shade,) * 3
            red, _, blue = picture.getpixel(under)[:3]
            assert red > blue + 100
            assert picture.getpixel((150 * left + 1, 150 * (top - TITLE / 2)))[:3] == (255,) * 3


@pytest.mark.parametrize("class_token", [True, False])
def test_a_map_is_what_the_class_token_or_all_tokens_look_at(class_token: bool) -> None:
    pytest.importorskip("matplotlib")
    from train.loop.attention_maps import looked_at

    kept = {} if class_token else {"tokens": {"class_token": False}, "head": {"pool": "mean"}}
    config = CONFIG.replace(image_size=(8, 12), **kept)
    tokens = config.num_prefix + 6
    weights = np.random.default_rng(0).random((2, 2, tokens, tokens), np.float32)
    found = looked_at(weights, config)
    rows = range(1) if class_token else range(tokens)
    for image, row, column in np.ndindex(2, 2, 3):
        patch = config.num_prefix + 3 * row + column
        each = [weights[image, head, query, patch] for head in range(2) for query in rows]
        assert found[image, row, column] == pytest.approx(np.mean(each), rel=1e-6)  # float32 sums of at most 12


def test_both_twins_look_at_the_same(run: Path) -> None:
    for framework in ("jax", "torch"):
        pytest.importorskip(framework)
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    checkpoint = reproducible_init.weights(CONFIG, 0)
    one, other = (network(checkpoint, twin).attention(images) for twin in ("jax", "torch"))
    assert one.shape == (2, 2, 5, 5)
    np.testing.assert_allclose(one, other, rtol=1e-5)  # float32 of 1.2e-7, through two blocks


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_damaged_image_is_named(run: Path, photos: list[str], refused: Main) -> None:
    Path(photos[1]).write_bytes(b"no image")
    assert f"{photos[1]} is not an image" in refused(run, *photos)


def test_of_many_images_each_damaged_one_is_named_and_all_others_are_answered(
    run: Path, photos: list[str], said: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = (photos[0], photos[4]), [*photos[1:4], *photos[5:]]
    expected = said(run, *good, "--json")
    for path in bad:
        Path(path).write_bytes(b"no image")
    assert main([str(run), *photos, "--twin", "torch", "--json"]) == 2
    found = capsys.readouterr()
    assert found.out == expected
    assert [line.split()[1] for line in found.err.splitlines()] == list(bad)


def test_maps_are_of_the_images_that_can_be_read(run: Path, photos: list[str], said: Main) -> None:
    pytest.importorskip("matplotlib")
    said(run, photos[0], photos[2], "--maps", run / "without.png")
    Path(photos[1]).write_bytes(b"no image")
    assert main([str(run), *photos[:3], "--twin", "torch", "--maps", str(run / "with.png")]) == 2
    assert (run / "with.png").read_bytes() == (run / "without.png").read_bytes()


def test_without_any_image_that_can_be_read_there_is_no_map(run: Path, photos: list[str], refused: Main) -> None:
    Path(photos[0]).write_bytes(b"no image")
    refused(run, photos[0], "--maps", run / "maps.png")
    assert not (run / "maps.png").exists()


def test_of_a_misspelt_image_the_nearest_is_named(run: Path, photos: list[str], refused: Main) -> None:
    assert "did you mean '9.png'?" in refused(run, photos[9].replace("9.png", "99.png"))


def test_a_list_of_classes_has_a_line_for_each(run: Path, photos: list[str], refused: Main) -> None:
    (run / "names.txt").write_text("a\nb\n")
    assert "has 2 lines, and the network 3 classes" in refused(run, photos[0], "--classes", run / "names.txt")


def test_weights_without_a_head_have_nothing_to_say(tmp_path: Path, photos: list[str], refused: Main) -> None:
    write(reproducible_init.weights(CONFIG.replace(num_classes=0), 0), tmp_path / "bare.safetensors", "jax")
    assert "has no head" in refused(tmp_path / "bare.safetensors", photos[0])


def test_weights_that_are_not_finite_are_told_of(run: Path, photos: list[str], refused: Main) -> None:
    checkpoint = reproducible_init.weights(CONFIG, 0)
    broken = {name: np.full_like(array, np.nan) for name, array in checkpoint.arrays.items()}
    write(replace(checkpoint, arrays=broken), run / "best.safetensors", "jax")
    assert f"no finite numbers for {photos[0]}" in refused(run, *photos)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--maps", "maps.jpg"], "let its name end in .png"),
        (["--maps", "nowhere/maps.png"], "make nowhere first"),
        (["--top", "0"], "give at least 1"),
        (["--twin", "tensorflow"], "invalid choice"),
        (["--topp", "3"], "unrecognized arguments: --topp 3; did you mean '--top'?; see python -m train.predict --help"),
        (["--clases=names.txt"], "did you mean '--classes'?"),
    ],
)
def test_options_that_make_no_sense_are_told_of(
    arguments: list[str], part: str, run: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), photos[0], *arguments]) == 2
    assert part in capsys.readouterr().err


def test_the_config_of_another_version_is_told_of(run: Path, photos: list[str], refused: Main) -> None:
    (run / "config.json").write_text(json.dumps({"recipe": {}, "data": {}}))
    assert "is of another version" in refused(run, photos[0])


def test_a_run_without_weights_yet_is_told_of(run: Path, photos: list[str], refused: Main) -> None:
    (run / "weights.safetensors").unlink()
    assert "is a run without weights yet" in refused(run, photos[0])


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_no_framework_is_loaded_before_the_arguments_are_understood(command: str) -> None:
    code = f"import sys, train.{command}; print(*({{'jax', 'flax', 'torch', 'grain'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# Real weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_a_trained_network_says_what_its_own_code_says(twin: str) -> None:
    pytest.importorskip(twin)
    folder = DATA / "weights" / "cifar10_vit"
    if not folder.exists():
        pytest.skip(f"needs {folder}, which is not part of the project")
    frozen, oracle = opened(str(folder / "best_vit.pth"), given={"num_heads": 4}), np.load(folder / "oracle_logits.npz")
    found = network(frozen.checkpoint, twin).outputs(oracle["images"])
    np.testing.assert_allclose(found, oracle["logits"], atol=1e-4)  # float32 through six blocks, of logits up to 5.7
