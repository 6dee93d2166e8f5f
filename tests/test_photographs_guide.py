"""The commands of docs/guides/photographs.md, as they stand, with the installed wheel, in a folder with photographs."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

pytest.importorskip("torch")
pytest.importorskip("grain")

import vit_spec
from parity.checkpoints.writing import write
from parity.comparison.reproducible_init import weights
from tests import ROOT
from tests.test_wheel import site  # noqa: F401  # a fixture
from train.data.sources import open_dataset

GUIDE = (ROOT / "docs" / "guides" / "photographs.md").read_text()
COMMANDS = re.findall(r"^python (-m .*)$", GUIDE, re.MULTILINE)
CLASSES = ("beach", "forest", "night")


def photograph(kind: str, rng: np.random.Generator) -> Image.Image:
    """Return a picture of sky and ground in the colours of a kind, of a random size."""
    sky, ground = {"beach": ((120, 180, 240), (230, 200, 140)), "forest": ((170, 200, 210), (30, 90, 40))}.get(
        kind, ((15, 15, 45), (40, 35, 30))
    )
    height, width = rng.integers(90, 160, 2)
    pixels = np.empty((height, width, 3))
    pixels[: height // 2], pixels[height // 2 :] = sky, ground
    noisy = pixels + rng.normal(0, 40, pixels.shape) + rng.normal(0, 25, 3)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder with photographs: those of the classes, and new ones."""
    path, rng = tmp_path_factory.mktemp("photographer"), np.random.default_rng(0)
    for kind in CLASSES:
        (path / "photos" / kind).mkdir(parents=True)
        for i in range(14):
            photograph(kind, rng).save(path / "photos" / kind / f"{i}.jpg", quality=90)
    (path / "new_photos").mkdir()
    for i, kind in enumerate(CLASSES):
        photograph(kind, rng).save(path / "new_photos" / f"{i} {kind}.png")
    return path


# Runs modules, each as `python -m MODULE ARGUMENT ...` does, and prints a form feed after the output of each.
RUN_MODULES = """
import json, runpy, sys
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        assert error.code == 0, module
    print(end="\\f")
"""


@pytest.fixture(scope="module")
def outputs(folder: Path, site: Path) -> dict[str, str]:  # noqa: F811
    """Return what each command prints.  Instead of the one that downloads weights, those of a small ViT are written.

    One process runs all commands, because most of them import PyTorch, which takes longer than what they do.
    """
    [download] = [command for command in COMMANDS if "hf://" in command]
    config = vit_spec.get("vit_ti16", image_size=32, patch_size=8, width=32, depth=2, num_heads=2, mlp_dim=64)
    write(weights(config, 0), folder / shlex.split(download)[4], "torch")
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    others = [command for command in COMMANDS if command != download]
    modules = json.dumps([shlex.split(command)[1:] for command in others])
    run = [sys.executable, "-c", RUN_MODULES, modules]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return dict(zip(others, done.stdout.split("\f")[:-1], strict=True))


def test_the_guide_goes_from_photographs_to_predictions() -> None:
    assert [command.split()[1] for command in COMMANDS] == [
        *("train.torch", "parity", "train.torch", "train.evaluate", "train.torch", "train.predict", "parity")
    ]


def test_the_data_are_checked(folder: Path, outputs: dict[str, str]) -> None:
    assert "27 training images, 6 held out" in outputs[COMMANDS[0]]
    assert (folder / "findings.csv").read_text().startswith("kind,set,image")


def test_the_model_is_scored_on_images_that_it_has_not_seen(
    folder: Path, outputs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = json.loads((folder / "report" / "scores.json").read_text())
    low, high = scores["intervals"]["accuracy"]
    assert scores["held_out"] == 9 and 0 <= low <= scores["accuracy"] <= high <= 1
    assert scores["accuracy"] > scores["constant"]["accuracy"] == pytest.approx(1 / 3)
    assert "one answer for all images: 33.3%" in outputs[COMMANDS[3]]
    with (folder / "report" / "predictions.csv").open() as file:
        tested = [row["image"] for row in csv.DictReader(file)]
    monkeypatch.chdir(folder)
    source = open_dataset("folder:photos?test=0.2")
    seen = {*source.train.names, *source.held_out.names}
    assert len(seen) == 33 and len({*tested}) == 9 and seen.isdisjoint(tested)
    for picture in ("confusion.png", *(["mistakes.png"] if scores["accuracy"] < 1 else [])):
        with Image.open(folder / "report" / picture) as image:
            assert image.format == "PNG" and min(image.size) > 100


def test_the_run_is_longer_and_says_since_when(folder: Path, outputs: dict[str, str]) -> None:
    config = json.loads((folder / "runs" / "photos" / "config.json").read_text())
    [change] = config["lineage"]
    assert change["changes"] == {"epochs": [60.0, 80.0]} and config["recipe"]["epochs"] == 80
    assert f"epochs from 60 to 80 at step {change['step']}" in outputs[COMMANDS[4]]


def test_new_photographs_get_their_classes(folder: Path, outputs: dict[str, str]) -> None:
    assert "wrote predictions.csv" in outputs[COMMANDS[5]]
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).stem.split()[1] for row in rows] == [*CLASSES]
    assert sum(row["class_1"] in row["image"] for row in rows) >= 2


def test_the_model_can_leave_the_project(folder: Path, outputs: dict[str, str]) -> None:
    assert json.loads((folder / "photos-hf" / "config.json").read_text())["id2label"]["2"] == "night"
