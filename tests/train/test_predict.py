"""Predictions of a trained model: the same with either twin, with the preprocessing of the run."""

import csv
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")

import parity
import vit_spec
from parity.checkpoints import formats
from parity.checkpoints.conversion import parameter, replace_parameters
from parity.checkpoints.format_text import format_text
from parity.checkpoints.writing import convert, write
from parity.comparison import reproducible_init
from tests import ROOT
from train.data.augment import Augment, resize_and_center_crop
from train.inference.model import load_predictor, load_trained_model
from train.inference.prediction import BATCH_SIZE, named_predictions
from train.inference.prediction_files import open_features, open_rows
from train.inference.report import Report
from train.inference.twins import choose_twin
from train.loop.run_folder import RunFolder
from train.predict import main
from train.recipes import Recipe, Task
from vit_spec import ViTConfig

DATA = ROOT.parent / "shared" / "data"
CONFIG = vit_spec.get(
    "vit_ti16", image_size=(8, 8), patch_size=4, width=32, depth=2, num_heads=2, mlp_dim=64, num_classes=3
)
GREY = CONFIG.replace(in_channels=1)
CLASS_NAMES = ("apple", "fig", "quince")

Main = Callable[..., str]


def make_run(path: Path, config: ViTConfig = CONFIG, task: str = "classes", recipe: Recipe | None = None) -> Path:
    """Make a run folder with random weights."""
    classes = list(CLASS_NAMES) if config.num_classes == 3 else [str(i) for i in range(10)]
    data = {"task": task, "train": 8, "held_out": 2, "classes": classes}
    RunFolder(path, recipe or Recipe(data="folder:fruit"), config, data)
    for name in ("weights", "best"):
        write(reproducible_init.weights(config, 0), path / f"{name}.safetensors", "jax")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """The paths of ten images of different sizes."""
    rng, paths = np.random.default_rng(0), [tmp_path / f"{i}.png" for i in range(10)]
    for i, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (9 + i, 14, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str]) -> Main:
    """A function that runs the command and returns what it prints."""

    def call(*arguments: Any) -> str:
        pytest.importorskip("torch")
        assert main([*map(str, arguments), "--twin", "torch"]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Main:
    """A function that runs the command, which must fail, and returns its error of one line."""

    def call(*arguments: Any) -> str:
        pytest.importorskip("torch")
        assert main([*map(str, arguments), "--twin", "torch"]) == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return call


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def torch_logits(run: Path, pixels: np.ndarray) -> np.ndarray:
    """Return the logits of the PyTorch twin for images (B, H, W, C) uint8, without the command."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.load(run)
    x = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    return model(x).detach().double().numpy()


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_both_twins_print_the_same(task: str, tmp_path: Path, photos: list[str], capsys: pytest.CaptureFixture) -> None:
    for framework in ("jax", "torch"):
        pytest.importorskip(framework)
    run, texts = make_run(tmp_path / "run", task=task), []
    for twin in ("jax", "torch"):
        assert main([str(run), *photos, "--twin", twin]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and photos[9] in texts[0]


def test_probabilities_are_the_softmax_of_the_preprocessed_image(run: Path, photos: list[str], predict: Main) -> None:
    fitted = np.stack([np.asarray(resize_and_center_crop(Image.open(path), (8, 8))) for path in photos])
    x = np.exp(torch_logits(run, fitted))
    expected = x / x.sum(1, keepdims=True)
    for row, printed in zip(expected, parse_json_lines(predict(run, *photos, "--json")), strict=True):
        probabilities = {each["name"]: each["probability"] for each in printed["classes"]}
        assert probabilities == {name: pytest.approx(p, rel=1e-5) for name, p in zip(CLASS_NAMES, row, strict=True)}


def test_the_top_classes_are_printed_most_probable_first(run: Path, photos: list[str], predict: Main) -> None:
    whole, [top] = (parse_json_lines(predict(run, photos[0], "--json", *more)) for more in ((), ("--top", 2)))
    probabilities = [each["probability"] for each in whole[0]["classes"]]
    assert probabilities == sorted(probabilities, reverse=True) and top["classes"] == whole[0]["classes"][:2]


def test_labels_with_a_probability_above_one_half_are_printed() -> None:
    found = named_predictions("labels", CLASS_NAMES, [-3.0, 0.1, 2.0], 1)
    assert found == [("quince", pytest.approx(0.880797, abs=1e-6)), ("fig", pytest.approx(0.524979, abs=1e-6))]


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_classes_and_labels_are_chosen_by_outputs_that_are_not_rounded(size: float) -> None:
    def chosen(task: Task, output: list[float]) -> list[str]:
        return [name for name, _ in named_predictions(task, tuple("abcde"), np.multiply(size, output), 5)]

    assert chosen("classes", [-16.0, -12.0, 20.0, -8.0, -12.0]) == ["c", "d", "b", "e", "a"]  # at 1.0, only c is above 1e-4
    assert chosen("labels", [-1.0, 1.0, 20.0, 0.0, 3.0]) == ["c", "e", "b"]


def test_an_image_without_any_label_is_reported(tmp_path: Path, photos: list[str], predict: Main) -> None:
    run = make_run(tmp_path / "run", task="labels")
    checkpoint = replace_parameters(
        reproducible_init.weights(CONFIG, 0), CONFIG, {"head.bias": np.full(3, -30, np.float32)}
    )
    write(checkpoint, run / "best.safetensors", "jax", force=True)
    assert predict(run, photos[0]) == f"{photos[0]}\n  no label with a probability above 0.5\n"


def test_values_are_printed_with_four_digits_and_written_with_7(tmp_path: Path, photos: list[str], predict: Main) -> None:
    run = make_run(tmp_path / "run", task="values")
    [written] = parse_json_lines(predict(run, photos[0], "--json"))
    pixels = np.asarray(resize_and_center_crop(Image.open(photos[0]), (8, 8)))[None]
    values = [each["value"] for each in written["values"]]
    assert values == pytest.approx(torch_logits(run, pixels)[0].tolist(), rel=1e-6)
    printed = [float(line.split()[1]) for line in predict(run, photos[0]).splitlines()[1:]]
    assert printed == [float(f"{value:.4g}") for value in values]


def test_a_single_value_is_called_value(tmp_path: Path, photos: list[str], predict: Main) -> None:
    run = make_run(tmp_path / "run", CONFIG.replace(num_classes=1), "values")
    [printed] = parse_json_lines(predict(run, photos[0], "--json"))
    assert [each["name"] for each in printed["values"]] == ["value"]


def test_images_of_several_batches_have_the_predictions_of_single_images(
    run: Path, photos: list[str], predict: Main
) -> None:
    assert len(photos) > BATCH_SIZE
    assert predict(run, *photos) == "".join(predict(run, path) for path in photos)


# Arguments ------------------------------------------------------------------------------------------------------------


def test_the_best_weights_of_a_run_are_used(run: Path, photos: list[str], predict: Main) -> None:
    newest = predict(run, photos[0])
    write(reproducible_init.weights(CONFIG, 1), run / "best.safetensors", "jax", force=True)
    assert predict(run, photos[0]) == predict(run / "best.safetensors", photos[0]) != newest


def test_a_run_in_the_home_folder_is_read_with_its_config(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    found, same = load_trained_model(f"~/{run.name}"), load_trained_model(str(run))
    assert found.run == run and (found.data, found.checkpoint.path) == (same.data, same.checkpoint.path)


def test_the_best_weights_of_a_run_without_the_newest_are_used(run: Path, photos: list[str], predict: Main) -> None:
    (run / "weights.safetensors").unlink()
    assert predict(run, photos[0]) == predict(run / "best.safetensors", photos[0])


@pytest.mark.parametrize("place", ["", "weights.safetensors", "best.safetensors"])
def test_the_newest_weights_used_in_place_of_the_best_are_reported(
    place: str, run: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    if place != "best.safetensors":
        (run / "best.safetensors").unlink()
    assert main([str(run / place), photos[0], "--twin", "torch"]) == 0
    line = f"note: {run} has no best.safetensors: its newest weights are used, {run / 'weights.safetensors'}\n"
    assert capsys.readouterr().err == ("" if place else line)


def test_a_file_in_a_run_folder_has_the_class_names_of_the_run(run: Path, photos: list[str], predict: Main) -> None:
    write(reproducible_init.weights(CONFIG, 1), run / "best.safetensors", "jax", force=True)
    [printed] = parse_json_lines(predict(run / "weights.safetensors", photos[0], "--json"))
    assert {each["name"] for each in printed["classes"]} == set(CLASS_NAMES)


def test_a_file_without_class_names_has_class_numbers(tmp_path: Path, photos: list[str], predict: Main) -> None:
    write(reproducible_init.weights(CONFIG, 0), tmp_path / "bare.pth", "torch")
    [printed] = parse_json_lines(predict(tmp_path / "bare.pth", "--set", "num_heads=2", photos[0], "--json"))
    assert {each["name"] for each in printed["classes"]} == {"0", "1", "2"}


def test_a_converted_run_keeps_its_class_names_and_preprocessing(tmp_path: Path, photos: list[str], predict: Main) -> None:
    run = make_run(tmp_path / "run", recipe=Recipe(data="folder:fruit", augment=Augment(share=0.5, held_out_filter="box")))
    convert(run, tmp_path / "a.npz", "torch")
    convert(tmp_path / "a.npz", tmp_path / "b.pth", "timm")
    assert predict(run, photos[3]) == predict(tmp_path / "b.pth", photos[3])


def test_assumptions_are_printed_as_notes(tmp_path: Path, photos: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    weights = parity.to_torch(reproducible_init.weights(CONFIG, 0))
    torch.save(weights, tmp_path / "bare.pth")
    assert main([str(tmp_path / "bare.pth"), photos[0], "--set", "num_heads=2", "--twin", "torch"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and "mlp.activation='gelu'" in notes[0] and "num_heads" not in notes[0]
    assert "the preprocessing of images, assumed: shorter side resized to 8 (bicubic)" in notes[1]


def test_an_override_of_what_the_file_states_is_printed_as_a_note(
    run: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main([str(run), photos[0], "--set", "norms.eps=0.5", "num_heads=2", "--twin", "torch"]) == 0
    assert capsys.readouterr().err == "note: norms.eps is 0.5 by --set; the file states 1e-06\n"


def test_weights_in_a_format_of_the_user_have_the_same_predictions(
    run: Path, tmp_path: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "lab.txt"
    table.write_text(format_text(formats.get("google:linen")).replace("my_google", "lab"))
    weights = convert(run / "best.safetensors", tmp_path / "run.npz", "google:linen").path
    with np.load(weights) as arrays:  # without the metadata, as another program saves them
        np.savez(tmp_path / "bare.npz", **{key: array for key, array in arrays.items() if array.dtype.kind == "f"})
    outputs = []
    with formats.registered():
        for options in (["--from", "google:linen"], ["--from", "lab", "--format-file", str(table)]):
            given = ["--set", "num_heads=2", "image_size=8", "norms.eps=1e-6", "mlp.activation=gelu_tanh"]
            assert main([str(tmp_path / "bare.npz"), photos[0], *options, *given, "--twin", "torch"]) == 0
            outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "%" in outputs[0]


def test_terminal_escapes_in_class_names_are_escaped(tmp_path: Path, photos: list[str], predict: Main) -> None:
    names = ("\x1b[2J", "a\nb", "c" * 500)
    write(replace(reproducible_init.weights(CONFIG, 0), labels=names), tmp_path / "odd.npz", "jax")
    text = predict(tmp_path / "odd.npz", photos[0])
    assert r"\x1b[2J" in text and r"a\nb" in text and "\x1b" not in text and max(map(len, text.splitlines())) < 100


def test_class_names_can_be_read_from_a_file(run: Path, photos: list[str], predict: Main) -> None:
    (run / "names.txt").write_text("a\nb\nc\n")
    [printed] = parse_json_lines(predict(run, photos[0], "--classes", run / "names.txt", "--json"))
    assert {each["name"] for each in printed["classes"]} == {"a", "b", "c"}


def test_class_names_may_follow_a_byte_order_mark_and_have_line_separators_of_unicode(
    run: Path, photos: list[str], predict: Main
) -> None:
    (run / "names.txt").write_bytes("\ufeffa\r\nb\u2028\x85b \rc\n\n".encode())
    [printed] = parse_json_lines(predict(run, photos[0], "--classes", run / "names.txt", "--json"))
    assert {each["name"] for each in printed["classes"]} == {"a", "b\u2028\x85b", "c"}


def test_images_are_preprocessed_like_the_held_out_set_of_the_run(tmp_path: Path, photos: list[str], predict: Main) -> None:
    augment = Augment(share=0.5, held_out_filter="box")
    run = make_run(tmp_path / "run", recipe=Recipe(data="folder:fruit", augment=augment))
    resize_and_center_crop(Image.open(photos[3]), (8, 8), 0.5, "box").save(tmp_path / "fitted.png")
    plain = make_run(tmp_path / "plain")
    cut, whole = (
        parse_json_lines(predict(*each, "--json"))[0] for each in ((run, photos[3]), (plain, tmp_path / "fitted.png"))
    )
    assert cut["classes"] == whole["classes"]


def test_a_colour_image_is_converted_for_a_grey_model(tmp_path: Path, photos: list[str], predict: Main) -> None:
    run = make_run(tmp_path / "run", GREY)
    Image.open(photos[0]).convert("L").save(tmp_path / "grey.png")
    colour, grey = parse_json_lines(predict(run, photos[0], tmp_path / "grey.png", "--json"))
    assert colour["classes"] == grey["classes"]


# Attention ------------------------------------------------------------------------------------------------------------


def test_attention_maps_are_written_as_a_png(run: Path, photos: list[str], predict: Main) -> None:
    pytest.importorskip("matplotlib")
    text = predict(run, *photos, "--maps", run / "maps.png")
    assert text.endswith(f"wrote {run / 'maps.png'}\n")
    with Image.open(run / "maps.png") as picture:
        assert picture.format == "PNG" and picture.getpixel((0, 0))[:3] == (255, 255, 255)


def test_a_picture_of_many_maps_is_about_square_and_at_most_max_side_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from train.loop import attention_maps

    monkeypatch.setattr(attention_maps, "MAX_SIDE", 800)
    attention_maps.draw_attention_maps(
        tmp_path / "maps.png", np.zeros((40, 8, 8, 1), np.uint8), np.ones((40, 2, 2), np.float32), ["fig"] * 40
    )
    with Image.open(tmp_path / "maps.png") as picture:
        assert max(picture.size) == 800 and 0.8 < picture.width / picture.height < 1.25


def test_each_image_is_drawn_beside_its_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from train.loop.attention_maps import CELL_SIDE, GAP, TITLE_HEIGHT, draw_attention_maps

    images = np.stack([np.full((8, 8, 3), shade, np.uint8) for shade in (10, 70, 130, 190)])
    draw_attention_maps(tmp_path / "maps.png", images, np.ones((4, 2, 2), np.float32), [""] * 4)
    with Image.open(tmp_path / "maps.png") as picture:
        for i, shade in enumerate((10, 70, 130, 190)):
            left, top = 2 * CELL_SIDE * (i % 3), (TITLE_HEIGHT + CELL_SIDE - GAP / 2) * (i // 3) + TITLE_HEIGHT
            image, under = ((150 * (x + CELL_SIDE / 2), 150 * (top + CELL_SIDE / 2)) for x in (left, left + CELL_SIDE))
            assert picture.getpixel(image)[:3] == (shade,) * 3
            red, _, blue = picture.getpixel(under)[:3]
            assert red > blue + 100
            assert picture.getpixel((150 * left + 1, 150 * (top - TITLE_HEIGHT / 2)))[:3] == (255,) * 3


@pytest.mark.parametrize("class_token", [True, False])
def test_a_map_is_the_attention_of_the_class_token_or_the_mean_of_all_tokens(class_token: bool) -> None:
    pytest.importorskip("matplotlib")
    from train.loop.attention_maps import patch_attention

    kept = {} if class_token else {"tokens": {"class_token": False}, "head": {"pool": "mean"}}
    config = CONFIG.replace(image_size=(8, 12), **kept)
    tokens = config.num_prefix + 6
    weights = np.random.default_rng(0).random((2, 2, tokens, tokens), np.float32)
    printed = patch_attention(weights, config)
    rows = range(1) if class_token else range(tokens)
    for image, row, column in np.ndindex(2, 2, 3):
        patch = config.num_prefix + 3 * row + column
        each = [weights[image, head, query, patch] for head in range(2) for query in rows]
        assert printed[image, row, column] == pytest.approx(np.mean(each), rel=1e-6)  # float32 sums of at most 12 values


def test_both_twins_have_the_same_attention_maps(run: Path) -> None:
    for framework in ("jax", "torch"):
        pytest.importorskip(framework)
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    checkpoint = reproducible_init.weights(CONFIG, 0)
    one, other = (load_predictor(checkpoint, twin).attention_maps(images) for twin in ("jax", "torch"))
    assert one.shape == (2, 2, 5, 5)
    np.testing.assert_allclose(one, other, rtol=1e-5)  # float32 rounding of 1.2e-7 through two blocks


def test_an_existing_picture_is_replaced_only_with_force(
    run: Path, photos: list[str], predict: Main, refused: Main
) -> None:
    pytest.importorskip("matplotlib")
    picture = run / "maps.png"
    picture.write_bytes(b"old")
    assert f"--maps {picture} exists: give another name, or --force" in refused(run, photos[0], "--maps", picture)
    assert picture.read_bytes() == b"old"
    predict(run, photos[0], "--maps", picture, "--force")
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"


def test_maps_never_replace_an_image_that_is_read(run: Path, photos: list[str], refused: Main) -> None:
    before = Path(photos[1]).read_bytes()
    (run / "link.png").symlink_to(photos[1])
    for picture in (photos[1], run / "link.png"):
        message = refused(run, *photos[:2], "--maps", picture, "--force")
        assert f"--maps {picture} is one of the files to read, and is not replaced" in message
    assert Path(photos[1]).read_bytes() == before


def test_maps_that_cannot_be_written_leave_the_old_picture_and_are_named(
    run: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    import_module("train.loop.attention_maps")  # its bytecode would be cut short by the limit, and stay on the disk
    picture = run / "maps.png"
    picture.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # in place of a full disk
    try:
        assert main([str(run), photos[0], "--maps", str(picture), "--force", "--twin", "torch"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    expected = f"error: cannot write {picture} (File too large): correct that, or give another name\n"
    assert capsys.readouterr().err == expected
    assert picture.read_bytes() == b"old" and {path.name for path in run.glob("*map*")} == {"maps.png"}


# Many images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A folder with five images at two depths, a hidden one, and a text file."""
    rng, folder = np.random.default_rng(1), tmp_path / "album"
    for name in ("b.png", "a.PNG", "sub/c.jpg", "sub/deep/d.png", "sub/deep/e.webp", ".hidden.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def names_of(text: str, album: Path) -> list[str]:
    return [str(Path(each["image"]).relative_to(album)) for each in parse_json_lines(text)]


def test_folders_patterns_and_lists_stand_for_their_images(run: Path, album: Path, predict: Main) -> None:
    every = ["a.PNG", "b.png", "sub/c.jpg", "sub/deep/d.png", "sub/deep/e.webp"]
    assert sorted(names_of(predict(run, album, "--json"), album)) == every
    assert names_of(predict(run, f"{album}/**/*.png", "--json"), album) == ["b.png", "sub/deep/d.png"]
    (album / "list.txt").write_text(f"\ufeff{album}/sub/c.jpg\n\n{album}/b.png\n")
    text = predict(run, f"@{album}/list.txt", album / "a.PNG", "--json")
    assert names_of(text, album) == ["sub/c.jpg", "b.png", "a.PNG"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(run: Path, album: Path, predict: Main) -> None:
    (album / "b.png").rename(album / "[b].png")
    assert names_of(predict(run, album / "[b].png", "--json"), album) == ["[b].png"]


def test_predictions_are_written_as_csv_json_lines_and_parquet(
    run: Path, album: Path, tmp_path: Path, predict: Main
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    printed = parse_json_lines(predict(run, album, "--json"))
    for suffix in ("csv", "jsonl", "parquet"):
        assert predict(run, album, "--out", tmp_path / f"out.{suffix}") == f"wrote {tmp_path / f'out.{suffix}'}\n"
    assert parse_json_lines((tmp_path / "out.jsonl").read_text()) == printed
    expected = [
        {"image": each["image"]}
        | {f"class_{i}": one["name"] for i, one in enumerate(each["classes"], 1)}
        | {f"probability_{i}": one["probability"] for i, one in enumerate(each["classes"], 1)}
        for each in printed
    ]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == expected
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert rows == [{name: str(value) for name, value in each.items()} for each in expected]


def test_names_of_images_that_are_not_utf8_or_have_line_breaks_are_written_with_escapes(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    name, escaped = os.fsdecode(b"\xe9\n1.png"), "\\udce9\n1.png"
    for suffix in ("csv", "parquet"):
        with open_rows(tmp_path / f"out.{suffix}", force=False) as write_row:
            write_row({"image": name})
    with open_features(tmp_path / "features.npy", force=False) as append:
        append(name, np.zeros(2, np.float32))
    Report(tmp_path).write_predictions(["image"], [[name]])
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [{"image": escaped}]
    assert (tmp_path / "features.txt").read_text() == escaped.replace("\n", "\\n") + "\n"
    for table in ("out.csv", "predictions.csv"):
        with (tmp_path / table).open(newline="") as file:
            assert list(csv.DictReader(file)) == [{"image": escaped}]


@pytest.mark.parametrize("task", ["labels", "values"])
def test_tables_of_labels_and_values_have_a_column_for_each(task: str, album: Path, tmp_path: Path, predict: Main) -> None:
    run = make_run(tmp_path / "run", task=task)
    predict(run, album / "b.png", "--out", tmp_path / "out.csv")
    [row] = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    x = torch_logits(run, np.asarray(resize_and_center_crop(Image.open(album / "b.png"), (8, 8)))[None])[0]
    expected = x if task == "values" else 1 / (1 + np.exp(-x))
    assert [float(row[name]) for name in CLASS_NAMES] == pytest.approx(expected.tolist(), rel=1e-5)


def test_labels_of_the_same_name_have_a_column_each(run: Path, album: Path, tmp_path: Path, predict: Main) -> None:
    (tmp_path / "names.txt").write_text("fig\nfig\napple\n")
    [printed] = parse_json_lines(predict(run, album / "b.png", "--json", "--classes", tmp_path / "names.txt"))
    assert sorted(each["name"] for each in printed["classes"]) == ["apple", "fig", "fig (2)"]
    labels = make_run(tmp_path / "labels", task="labels")
    predict(labels, album / "b.png", "--classes", tmp_path / "names.txt", "--out", tmp_path / "out.csv")
    x = torch_logits(labels, np.asarray(resize_and_center_crop(Image.open(album / "b.png"), (8, 8)))[None])[0]
    header, row = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert header == ["image", "fig", "fig (2)", "apple"]
    assert list(map(float, row[1:])) == pytest.approx((1 / (1 + np.exp(-x))).tolist(), rel=1e-5)


@pytest.mark.parametrize("task", ["labels", "values"])
def test_a_number_of_classes_is_refused_for_labels_and_values(
    task: str, tmp_path: Path, photos: list[str], refused: Main
) -> None:
    run = make_run(tmp_path / "run", task=task)
    line = refused(run, photos[0], "--top", "2")
    assert line == f"error: --top is for classes, and the outputs of {run} are {task}: leave --top out\n"


def test_a_label_named_like_the_column_of_images_is_refused(
    album: Path, tmp_path: Path, refused: Main, predict: Main
) -> None:
    run = make_run(tmp_path / "run", task="labels")
    (run / "names.txt").write_text("image\nfig\nquince\n")
    arguments = (run, album, "--classes", run / "names.txt", "--out")
    assert "two columns named image" in refused(*arguments, tmp_path / "out.csv")
    predict(*arguments, tmp_path / "out.jsonl")


def test_an_image_that_cannot_be_read_is_left_out_of_the_file(
    run: Path, album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (album / "sub/c.jpg").write_bytes(b"no image")
    assert main([str(run), str(album), "--twin", "torch", "--out", str(tmp_path / "out.jsonl"), "--tta", "flip"]) == 2
    assert capsys.readouterr().err.count(f"{album / 'sub/c.jpg'} is not an image") == 1
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_features_are_those_of_the_model_without_its_head(run: Path, album: Path, tmp_path: Path, predict: Main) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    predict(run, album, "--features", tmp_path / "features.npy")
    predict(run, album, "--features", tmp_path / "features.parquet")
    names, found = (tmp_path / "features.txt").read_text().splitlines(), np.load(tmp_path / "features.npy")
    assert found.shape == (5, 32) and found.dtype == np.float32
    table = pq.read_table(tmp_path / "features.parquet").to_pylist()
    assert [row["image"] for row in table] == names
    assert np.array_equal(np.array([row["features"] for row in table], np.float32), found)
    head = {name: parameter(load_trained_model(str(run)).checkpoint, f"head.{name}") for name in ("weight", "bias")}
    fitted = np.stack([np.asarray(resize_and_center_crop(Image.open(name).convert("RGB"), (8, 8))) for name in names])
    np.testing.assert_allclose(found @ head["weight"].T + head["bias"], torch_logits(run, fitted), atol=1e-5)


def test_a_model_without_a_head_has_features(tmp_path: Path, album: Path, predict: Main) -> None:
    write(reproducible_init.weights(CONFIG.replace(num_classes=0), 0), tmp_path / "bare.safetensors", "jax")
    predict(tmp_path / "bare.safetensors", album, "--features", tmp_path / "features.npy")
    assert np.load(tmp_path / "features.npy").shape == (5, 32)


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
@pytest.mark.parametrize("tta", ["flip", "five-crop"])
def test_predictions_of_several_views_are_the_mean(task: str, tta: str, album: Path, tmp_path: Path, predict: Main) -> None:
    run = make_run(tmp_path / "run", task=task)
    image = Image.open(album / "b.png")  # 24x16 pixels
    whole = np.asarray(resize_and_center_crop(image, (8, 8)))
    if tta == "flip":
        views = [whole, whole[:, ::-1]]
    else:  # 8 / 0.875 pixels are 9, and the longer side has 14
        large = np.asarray(image.resize((14, 9), Image.Resampling.BICUBIC))
        views = [large[y : y + 8, x : x + 8] for y, x in ((0, 3), (0, 0), (0, 6), (1, 0), (1, 6))]
    x = torch_logits(run, np.stack(views))
    if task == "classes":
        x = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    elif task == "labels":
        x = 1 / (1 + np.exp(-x))
    predict(run, album / "b.png", "--tta", tta, "--out", tmp_path / "out.csv")
    [row] = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    if task == "classes":
        row = {row[f"class_{i}"]: row[f"probability_{i}"] for i in (1, 2, 3)}
    assert [float(row[name]) for name in CLASS_NAMES] == pytest.approx(x.mean(0).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{album}", "--out", "p.txt"], "give a name that ends in .csv or .jsonl or .parquet"),
        (["{album}", "--features", "f.csv"], "give a name that ends in .npy or .parquet"),
        (["{album}", "--features", "f.npy", "--out", "p.csv"], "leave --out out"),
        (["{album}", "--features", "f.npy", "--maps", "m.png"], "leave --maps out"),
        (["{album}", "--features", "f.npy", "--json"], "leave --json out"),
        (["{album}", "--features", "f.npy", "--top", "5"], "leave --top out"),
        (["{album}", "--maps", "m.png", "--tta", "flip"], "leave --tta out"),
        (["{album}/*.gif"], "no file matches"),
        (["@{album}/none.txt"], "cannot be read"),
        (["{run}"], "has no images"),
        (["{album}", "--out", "{album}/b.csv"], "exists: give another name, or --force"),
    ],
)
def test_wrong_inputs_and_outputs_are_refused_in_a_line(
    arguments: list[str], message: str, run: Path, album: Path, refused: Main
) -> None:
    (album / "b.csv").write_text("mine")
    assert message in refused(run, *(each.format(album=album, run=run) for each in arguments))
    assert (album / "b.csv").read_text() == "mine"


def test_an_interrupted_file_leaves_the_old_one(run: Path, album: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "out.csv").write_text("old")

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.inference.prediction.named_predictions", interrupt)
    with suppress(KeyboardInterrupt):
        main([str(run), str(album), "--twin", "torch", "--out", str(tmp_path / "out.csv"), "--force"])
    assert (tmp_path / "out.csv").read_text() == "old"


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_damaged_image_is_named(run: Path, photos: list[str], refused: Main) -> None:
    Path(photos[1]).write_bytes(b"no image")
    assert f"{photos[1]} is not an image" in refused(run, *photos)


def test_damaged_images_are_named_and_the_others_are_predicted(
    run: Path, photos: list[str], predict: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = (photos[0], photos[4]), [*photos[1:4], *photos[5:]]
    expected = predict(run, *good, "--json")
    for path in bad:
        Path(path).write_bytes(b"no image")
    assert main([str(run), *photos, "--twin", "torch", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == expected
    assert [line.split()[1] for line in printed.err.splitlines()] == list(bad)


def test_maps_are_drawn_for_the_readable_images(run: Path, photos: list[str], predict: Main) -> None:
    pytest.importorskip("matplotlib")
    predict(run, photos[0], photos[2], "--maps", run / "without.png")
    Path(photos[1]).write_bytes(b"no image")
    assert main([str(run), *photos[:3], "--twin", "torch", "--maps", str(run / "with.png")]) == 2
    assert (run / "with.png").read_bytes() == (run / "without.png").read_bytes()


def test_without_a_readable_image_no_maps_are_written(run: Path, photos: list[str], refused: Main) -> None:
    Path(photos[0]).write_bytes(b"no image")
    refused(run, photos[0], "--maps", run / "maps.png")
    assert not (run / "maps.png").exists()


def test_the_error_for_a_misspelt_path_names_the_nearest(run: Path, photos: list[str], refused: Main) -> None:
    assert "did you mean '9.png'?" in refused(run, photos[9].replace("9.png", "99.png"))


def test_a_file_of_class_names_with_too_few_lines_is_refused(run: Path, photos: list[str], refused: Main) -> None:
    (run / "names.txt").write_text("a\nb\n")
    assert "has 2 lines, and the model has 3 classes" in refused(run, photos[0], "--classes", run / "names.txt")


@pytest.mark.parametrize(("text", "line"), [("a\n\nc\n", 2), ("a\n \nc", 2), ("\na\nb", 1)])
def test_a_blank_line_is_no_class_name(text: str, line: int, run: Path, photos: list[str], refused: Main) -> None:
    (run / "names.txt").write_text(text)
    assert f"names.txt, line {line}, is blank: " in refused(run, photos[0], "--classes", run / "names.txt")


def test_class_names_in_utf_16_are_refused(run: Path, photos: list[str], refused: Main) -> None:
    (run / "names.txt").write_bytes("a\nb\nc\n".encode("utf-16-le"))
    assert "NUL, as text in UTF-16 does" in refused(run, photos[0], "--classes", run / "names.txt")


def test_weights_without_a_head_are_refused(tmp_path: Path, photos: list[str], refused: Main) -> None:
    write(reproducible_init.weights(CONFIG.replace(num_classes=0), 0), tmp_path / "bare.safetensors", "jax")
    assert "has no head" in refused(tmp_path / "bare.safetensors", photos[0])


def test_outputs_that_are_not_finite_are_refused(run: Path, photos: list[str], refused: Main) -> None:
    checkpoint = reproducible_init.weights(CONFIG, 0)
    broken = {name: np.full_like(array, np.nan) for name, array in checkpoint.arrays.items()}
    write(replace(checkpoint, arrays=broken), run / "best.safetensors", "jax", force=True)
    assert f"the outputs for {photos[0]} are not finite" in refused(run, *photos)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--maps", "maps.jpg"], "give a name that ends in .png"),
        (["--maps", "nowhere/maps.png"], "no folder nowhere; make it first"),
        (["--top", "0"], "give 1 or more"),
        (["--twin", "tensorflow"], "invalid choice"),
        (["--topp", "3"], "unrecognized arguments: --topp 3; did you mean '--top'?; see python -m train.predict --help"),
        (["--clases=names.txt"], "did you mean '--classes'?"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, run: Path, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), photos[0], *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_config_of_another_version_is_refused(run: Path, photos: list[str], refused: Main) -> None:
    (run / "config.json").write_text(json.dumps({"recipe": {}, "data": {}}))
    assert "is of another version" in refused(run, photos[0])


def test_a_run_without_weights_is_refused(run: Path, photos: list[str], refused: Main) -> None:
    for path in run.glob("*.safetensors"):
        path.unlink()
    assert "is a run without weights yet" in refused(run, photos[0])


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_importing_the_command_imports_no_framework(command: str) -> None:
    code = f"import sys, train.{command}; print(*({{'jax', 'flax', 'torch', 'grain', 'PIL'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("command", ["predict", "evaluate"])
@pytest.mark.parametrize(
    ("missing", "twin", "message"),
    [
        (["grain"], [], "package grain is not installed: pip install '.[train]'"),
        (["PIL"], [], "package PIL is not installed: pip install '.[train]'"),
        (["jax"], ["--twin", "jax"], "package jax is not installed: pip install '.[jax]'"),
        (["torch", "PIL"], ["--twin", "torch"], "packages torch and PIL are not installed: pip install '.[torch,train]'"),
        (["flax", "torch", "PIL"], [], "packages flax and PIL are not installed: pip install '.[jax,train]'"),
    ],
)
def test_missing_packages_are_reported_in_a_line_before_anything_is_read(
    command: str,
    missing: list[str],
    twin: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    arguments = ["no_run", *(["no.png"] if command == "predict" else []), *twin]
    assert import_module(f"train.{command}").main(arguments) == 2
    assert capsys.readouterr().err == f"error: the {message} in the checkout\n"


def test_without_a_named_twin_one_that_lacks_a_package_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_twin(None) == "jax"
    monkeypatch.setitem(sys.modules, "flax", None)
    assert choose_twin(None) == "torch"


# Real weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", ["jax", "torch"])
def test_a_trained_model_has_the_outputs_of_its_own_code(twin: str) -> None:
    pytest.importorskip(twin)
    folder = DATA / "weights" / "cifar10_vit"
    if not folder.exists():
        pytest.skip(f"needs {folder}, which is not part of the project")
    model, oracle = (
        load_trained_model(str(folder / "best_vit.pth"), given={"num_heads": 4}),
        np.load(folder / "oracle_logits.npz"),
    )
    printed = load_predictor(model.checkpoint, twin).predict(oracle["images"])
    # float32 rounding through six blocks, of logits up to 5.7
    np.testing.assert_allclose(printed, oracle["logits"], atol=1e-4)
