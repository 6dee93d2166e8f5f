"""Pictures of a run: image grids, attention maps and learning curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.augment import Mix
from train.data.batches import Batch
from train.loop.pictures import image_grid, overlay_attention, training_images


def test_an_image_grid_has_the_images_in_order_and_is_padded_with_white() -> None:
    images = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3, 1)
    found = image_grid(images)
    assert found.shape == (4, 9, 3)
    for i, image in enumerate(images):
        y, x = i // 3 * 2, i % 3 * 3
        assert np.array_equal(found[y : y + 2, x : x + 3], np.broadcast_to(image, (2, 3, 3)))
    assert (found[2:, 6:] == 255).all()


def test_training_images_are_mixed_as_in_training() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 2, 3, 1), np.uint8)
    batch = Batch(images, np.zeros(4, np.int32), np.arange(4), np.ones(4, bool))
    half = Mix(np.float32(0.75), np.array([0, 0, 1, 3], np.int32), np.float32(0.5))
    expected = np.rint(0.75 * images + 0.25 * np.roll(images, 2, 0))
    expected[:, 0] = np.roll(images, 2, 0)[:, 0]
    assert np.array_equal(training_images(batch, 2), images)
    assert np.array_equal(training_images(batch._replace(mix=half), 2), expected)


def test_the_patch_with_the_most_attention_has_the_strongest_colour() -> None:
    images = np.full((1, 4, 6, 3), 100, np.uint8)
    maps = np.array([[[0.1, 0.0, 0.4], [0.0, 0.2, 0.0]]], np.float32)
    found = overlay_attention(images, maps).astype(int)
    redness = (found[..., 0] - found[..., 2])[0]
    assert np.array_equal(np.argsort(-redness[::2, ::2], axis=None)[:3], [2, 4, 0])
    assert redness[0, 2] == redness[2, 0] == 0 and (redness[:2, 4:] == redness[0, 4]).all()


TRAINED = {"set": "train", "step": 1, "epoch": 0.5, "loss": 2.0, "label_accuracy": 0.5, "grad_norm": 1.0, "lr": 1e-3}
SKIPPED = {"set": "train", "step": 2, "epoch": 1.0, "lr": 1e-3}
EVALUATED = {"set": "held_out", "step": 2, "epoch": 1.0, "loss": 2.0, "auroc": 0.75}


@pytest.mark.filterwarnings("error")
def test_names_with_dollar_signs_or_letters_without_a_glyph_are_no_formulas_and_give_no_warning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from train.inference.report import draw_confusion, draw_images
    from train.loop.attention_maps import draw_attention_maps
    from train.loop.curves import draw_curves
    from train.loop.pictures import encode_png

    names, images = ["$_$ 猫", "$\\frac$"], np.zeros((2, 4, 4, 3), np.uint8)
    assert encode_png(draw_confusion(np.eye(2, dtype=int), names)).startswith(b"\x89PNG")
    assert encode_png(draw_images(images, names)).startswith(b"\x89PNG")
    draw_attention_maps(tmp_path / "maps.png", images, np.ones((2, 2, 2), np.float32), names)
    draw_curves(tmp_path / "curves.png", [], "classes", names[1])


def draw(path: Path, *records: dict[str, Any]) -> bytes:
    pytest.importorskip("matplotlib")
    from train.loop.curves import draw_curves

    draw_curves(path, list(records), "labels", "a run")
    return path.read_bytes()


def test_curves_can_be_drawn_of_skipped_steps_which_have_no_loss(tmp_path: Path) -> None:
    assert draw(tmp_path / "curves.png", TRAINED, SKIPPED, EVALUATED).startswith(b"\x89PNG")


def test_the_curves_of_a_run_that_diverges_at_once_have_room(tmp_path: Path) -> None:
    # matplotlib warns if the labels leave no room for the axes, and a warning is an error here.
    assert draw(tmp_path / "curves.png", TRAINED | {"lr": 1e30}).startswith(b"\x89PNG")


@pytest.mark.parametrize("undefined", [None, math.nan], ids=["read_as_null", "as_computed"])
def test_the_curves_show_the_last_metric_that_is_defined(tmp_path: Path, undefined: float | None) -> None:
    later = {"set": "held_out", "step": 4, "epoch": 2.0, "loss": 1.0}
    found = draw(tmp_path / "with.png", TRAINED, EVALUATED, later | {"auroc": undefined})
    assert found == draw(tmp_path / "without.png", TRAINED, EVALUATED, later)


@pytest.mark.parametrize(
    "odd", [{"step": 1}, {"loss": "x"}, {"epoch": [1]}, {"epoch": None}, {"loss": 10**250}, {"auroc": 1e308}], ids=str
)
def test_the_curves_leave_out_records_that_no_run_writes(tmp_path: Path, odd: dict[str, Any]) -> None:
    record = odd if "step" in odd else EVALUATED | {"loss": None, "auroc": None} | odd
    found = draw(tmp_path / "with.png", TRAINED, EVALUATED, record)
    assert found == draw(tmp_path / "without.png", TRAINED, EVALUATED)


def test_the_curves_replace_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "curves.png").symlink_to("other")
    draw(tmp_path / "curves.png", TRAINED)
    assert (tmp_path / "other").read_text() == "kept" and not (tmp_path / "curves.png").is_symlink()
