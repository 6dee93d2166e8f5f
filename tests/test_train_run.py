"""Whole runs of a tiny model: what they leave behind, how they end, and that a seed decides them bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("grain")

import parity
from train.cli import parse
from train.curves import draw
from train.data import Batch
from train.interruption import Interruption
from train.jax_engine import JaxEngine
from train.loop import Plan
from train.recipes import Augment, Model, Optimizer, Recipe, model_config
from train.run import Run
from train.session import train
from vit_spec import InputError

ROOT = Path(__file__).parents[1]
SMALL = ("patch_size=4", "width=32", "depth=2", "num_heads=2", "mlp_dim=64")
RECIPE = Recipe(
    model=Model(name="vit_ti16", changes=(*SMALL, "regularisation.drop_path=0.1")),
    augment=Augment(rotate=5, shift=0.05, scale=1.05),
    optimizer=Optimizer(lr=3e-3),
    epochs=2,
    log_every=5,
)
ARGUMENTS = ["--config", "tiny", "--model.image-size", "None", "--model.changes", *SMALL, "--log-every", "5"]


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python -m train.jax` as a user starts it."""
    command = [sys.executable, "-m", "train.jax", *ARGUMENTS, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def records(run: Path) -> list[dict[str, Any]]:
    """What a run measured, without how long it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in parity.load(path).arrays.items()}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled for these tests is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    assert train("test", replace(RECIPE, run=str(path)), JaxEngine) == 0
    return path


# What a run leaves ----------------------------------------------------------------------------------------------------


def test_a_run_learns(run: Path) -> None:
    losses = [record["loss"] for record in records(run) if record["set"] == "held_out"]
    assert losses[-1] < losses[0] < np.log(10)


def test_a_run_leaves_its_config_metrics_curves_events_and_weights(run: Path) -> None:
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"config", "metrics", "curves", "events", "weights", "best"}


def test_the_config_says_recipe_and_model(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"]["epochs"] == 2 and config["model"]["image_size"] == [8, 8]


def test_training_is_recorded_every_few_steps_and_held_out_images_every_epoch(run: Path) -> None:
    steps = {name: [r["step"] for r in records(run) if r["set"] == name] for name in ("train", "held_out")}
    assert steps == {"train": [*range(5, 46, 5)], "held_out": [22, 45]}


def test_the_curves_are_a_picture(run: Path) -> None:
    with Image.open(run / "curves.png") as picture:
        assert picture.size == (1650, 600)


def test_the_weights_carry_the_config_and_load_in_torch(run: Path) -> None:
    pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.load(run)
    model = model[0] if isinstance(model, tuple) else model
    assert model.config.num_classes == 10 and model.config.in_channels == 1


def test_the_same_seed_gives_the_same_run_bit_for_bit(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert train("test", replace(RECIPE, run=str(again)), JaxEngine) == 0
    assert records(again) == records(run)
    for name in ("weights", "best"):
        one, other = weights(run / f"{name}.safetensors"), weights(again / f"{name}.safetensors")
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_run_never_writes_into_a_folder_that_exists(run: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        train("test", replace(RECIPE, run=str(run)), JaxEngine)


@pytest.mark.parametrize(("task", "metric"), [("labels", "auroc/7"), ("values", "r2")])
def test_labels_and_values_are_learnt_too(task: Any, metric: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, task=task, run=str(tmp_path / "run"), epochs=3, tensorboard=False)
    assert train("test", recipe, JaxEngine) == 0
    looks = [record for record in records(tmp_path / "run") if record["set"] == "held_out"]
    assert metric in looks[0] and looks[-1]["loss"] < looks[0]["loss"]


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_a_picture_is_drawn_of_metrics_that_are_not_there_yet(task: Any, tmp_path: Path) -> None:
    draw(tmp_path / "curves.png", [], task, "nothing yet")
    assert (tmp_path / "curves.png").exists()


# How runs end ---------------------------------------------------------------------------------------------------------


def engine(recipe: Recipe) -> JaxEngine:
    config = model_config(recipe.model, num_outputs=1, in_channels=1, grid=(2, 2))
    return JaxEngine(config, replace(recipe, task="values", batch_size=4), warmup=0, total=10)


def batch(target: float) -> Batch:
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)
    return Batch(images, np.full((4, 1), target, np.float32), np.arange(4))


def test_from_a_loss_that_is_not_finite_on_nothing_moves(tmp_path: Path) -> None:
    turned = engine(RECIPE)
    turned.step(batch(1.0))
    turned.save(tmp_path / "before.safetensors")
    assert np.isnan(float(turned.step(batch(np.nan))["loss"]))
    turned.step(batch(1.0))
    turned.save(tmp_path / "after.safetensors")
    before, after = (weights(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = replace(RECIPE, run=str(tmp_path / "run"), optimizer=Optimizer(lr=1e30), warmup=0)
    assert train("test", wild, JaxEngine) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and " at step 2 (images digit " in said and said.count("\n") == 1
    assert all(np.isfinite(array).all() for array in weights(tmp_path / "run").values())


def test_an_unreadable_image_ends_the_run_by_its_name_and_saves_what_was_learnt(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "a" / "3.png").write_bytes(b"")
    recipe = replace(RECIPE, data=f"folder:{tmp_path}", batch_size=1, run=str(tmp_path / "run"), epochs=5)
    small = replace(recipe, model=replace(recipe.model, image_size=(8, 8)))
    with pytest.raises(InputError, match=r"3\.png is not an image.*what was learnt in \d+ steps is in "):
        train("test", small, JaxEngine)
    assert weights(tmp_path / "run")


def test_the_first_interruption_is_a_request_and_the_second_leaves() -> None:
    with Interruption() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("moment", ["folder", " left"], ids=["while_compiling", "after_a_look"])
def test_an_interrupted_run_leaves_weights_that_load(moment: str, tmp_path: Path) -> None:
    process = started("--epochs", "1000", "--run", str(tmp_path / "run"))
    assert process.stdout is not None
    while moment not in (line := process.stdout.readline()):
        assert line, process.stderr and process.stderr.read()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "interrupted" in said and f"python -m parity check {tmp_path / 'run'}" in said
    assert weights(tmp_path / "run")


def test_the_command_trains_on_a_mesh_of_devices_as_on_one(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--run"]
    process = started(*arguments, str(tmp_path / "4"), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "data=4" in said
    name, recipe = parse("train.jax", [*ARGUMENTS, *arguments, str(tmp_path / "1")])
    assert train(name, recipe, JaxEngine) == 0
    one, four = ([record["loss"] for record in records(tmp_path / count)] for count in "14")
    assert one == pytest.approx(four, rel=1e-3)


def test_the_command_tells_bad_input_in_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    process = started("--data", f"folder:{tmp_path / 'none'}", "--run", str(tmp_path / "run"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == f"error: {tmp_path / 'none'} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside\n"
    assert not (tmp_path / "run").exists()


# When things happen ---------------------------------------------------------------------------------------------------


def test_a_plan_looks_every_epoch_and_at_the_end() -> None:
    plan = Plan.of(replace(RECIPE, epochs=2.5, batch_size=10), images=100)
    assert (plan.total, plan.warmup, sorted(plan.looks)) == (25, 2.5, [10, 20, 25])


def test_a_run_has_at_least_one_step() -> None:
    assert Plan.of(replace(RECIPE, epochs=0.001), images=100).total == 1


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = model_config(RECIPE.model, num_outputs=1, in_channels=1, grid=(2, 2))
    with pytest.raises(InputError, match="cannot make the folder"):
        Run(tmp_path / "file" / "run", RECIPE, config)
