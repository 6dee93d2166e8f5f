"""Whole runs of a tiny model: what they leave behind, how they end, and that a seed decides them bit for bit."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("grain")

import jax

import parity
from tests import ROOT
from train.cli import BAD_INPUT, told
from train.data.batches import Batch
from train.data.sources import Source, open_source
from train.jax import checkpoints
from train.jax.engine import JaxEngine
from train.jax.runtime import memory_told
from train.loop import session
from train.loop.curves import draw
from train.loop.interruption import Interruption
from train.loop.loop import Plan
from train.loop.request import Request
from train.loop.run_folder import Run
from train.loop.session import train
from train.loop.start_warnings import cautions
from train.loop.tensorboard import Events
from train.recipes import RECIPES, Augment, Known, Model, Optimizer, Recipe, model_config
from vit_spec import InputError

SMALL = ("patch_size=4", "width=32", "depth=2", "num_heads=2", "mlp_dim=64")
RECIPE = Recipe(
    model=Model(name="vit_ti16", changes=(*SMALL, "regularisation.drop_path=0.1")),
    augment=Augment(rotate=5, shift=0.05, scale=1.05),
    optimizer=Optimizer(lr=3e-3),
    epochs=2,
    log_every=5,
)
CONFIGURED = model_config(RECIPES["tiny"](Known(3, 3)).model, num_outputs=10, in_channels=1, size=(8, 8))
SPLIT = {"images": np.zeros((8, 8, 8), np.uint8), "labels": np.arange(8) % 2}
ARGUMENTS = ["--config", "tiny", "--model.image-size", "None", "--model.changes", *SMALL, "--log-every", "5"]


def trained(recipe: Recipe, make_engine: Any = JaxEngine) -> int:
    """Train by a recipe and return the exit status."""
    return train(Request("test", recipe, open_source(recipe.data, recipe.held_out), "python -m train.jax"), make_engine)


def started(*arguments: str, start_new_session: bool = False, **environment: str) -> subprocess.Popen[str]:
    """`python -m train.jax` as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "train.jax", *ARGUMENTS, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def records(run: Path) -> list[dict[str, Any]]:
    """What a run measured, without how long it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in parity.load(path).arrays.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    assert trained(replace(RECIPE, run=str(path))) == 0
    return path


# What a run leaves ----------------------------------------------------------------------------------------------------


def test_a_run_learns(run: Path) -> None:
    losses = [record["loss"] for record in records(run) if record["set"] == "held_out"]
    assert losses[-1] < losses[0] < np.log(10)


def test_a_run_leaves_its_config_metrics_curves_events_and_weights(run: Path) -> None:
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"config", "data", "metrics", "curves", "events", "weights", "best", "checkpoints"}


def test_the_config_says_recipe_model_and_data(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"]["epochs"] == 2 and config["model"]["image_size"] == [8, 8]
    assert config["data"] == {"task": "classes", "train": 1438, "held_out": 359, "classes": list("0123456789")}


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
    assert trained(replace(RECIPE, run=str(again))) == 0
    assert records(again) == records(run)
    for name in ("weights", "best"):
        one, other = weights(run / f"{name}.safetensors"), weights(again / f"{name}.safetensors")
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(InputError, match="exists already and holds no run"):
        trained(replace(RECIPE, run=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 32}, "its recipe.batch_size is 64, and here it is 32; give"),
        ({"batch_size": 32, "seed": 7, "ema": 0.9}, "here it is 32, and recipe.ema, recipe.seed too; give the same"),
        ({"model": Model(name="vit_ti16", changes=SMALL)}, "its recipe.model.changes is "),
        ({"held_out": 0.5}, "its recipe.held_out is None, and here it is 0.5"),
        ({"optimizer": Optimizer(lr=1e-3)}, "its recipe.optimizer.lr is 0.003, and here it is 0.001"),
    ],
)
def test_another_run_does_not_go_on_from_this_one(run: Path, change: dict[str, Any], said: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=re.escape(said)):
        trained(replace(RECIPE, run=str(run), **change))
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_finished_run_has_nothing_left_to_do(run: Path) -> None:
    before = records(run)
    assert trained(replace(RECIPE, run=str(run))) == 0
    assert records(run) == before


@pytest.mark.parametrize(("task", "metric"), [("labels", "auroc/7"), ("values", "r2")])
def test_labels_and_values_are_learnt_too(task: Any, metric: str, tmp_path: Path) -> None:
    assert trained(replace(RECIPE, task=task, run=str(tmp_path / "run"), epochs=3, tensorboard=False)) == 0
    looks = [record for record in records(tmp_path / "run") if record["set"] == "held_out"]
    assert metric in looks[0] and looks[-1]["loss"] < looks[0]["loss"]


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_a_picture_is_drawn_of_metrics_that_are_not_there_yet(task: Any, tmp_path: Path) -> None:
    draw(tmp_path / "curves.png", [], task, "nothing yet")
    assert (tmp_path / "curves.png").exists()


# How runs end ---------------------------------------------------------------------------------------------------------


def engine(folder: Path, **changes: Any) -> JaxEngine:
    recipe = replace(RECIPE, batch_size=4, **changes)
    config = model_config(recipe.model, num_outputs=1, in_channels=1, size=(8, 8))
    return JaxEngine(config, recipe, task="values", rate=lambda step: 1e-3, start=None, folder=folder)


def batch(target: float) -> Batch:
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)
    return Batch(images, np.full((4, 1), target, np.float32), np.arange(4), np.ones(4, bool))


def test_from_a_loss_that_is_not_finite_on_nothing_moves(tmp_path: Path) -> None:
    turned = engine(tmp_path)
    turned.step(batch(1.0))
    turned.save_weights(tmp_path / "before.safetensors")
    assert np.isnan(float(turned.step(batch(np.nan))["loss"]))
    turned.step(batch(1.0))
    turned.save_weights(tmp_path / "after.safetensors")
    before, after = (weights(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = replace(RECIPE, run=str(tmp_path / "run"), optimizer=Optimizer(lr=1e30), warmup=0)
    assert trained(wild) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and " at step 2 (images digit " in said and said.count("\n") == 1
    assert all(np.isfinite(array).all() for array in weights(tmp_path / "run").values())


def test_a_run_that_a_step_stopped_goes_on_without_that_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Spoilt(JaxEngine):
        def step(self, batch: Batch) -> Any:
            return super().step(batch._replace(targets=batch.targets * np.nan) if int(self._state.step) == 7 else batch)

    recipe = replace(RECIPE, task="values", epochs="10steps", save_every="5steps", run=str(tmp_path), tensorboard=False)
    assert trained(recipe, Spoilt) == 1
    assert "at step 8 " in capsys.readouterr().err
    assert trained(replace(recipe, non_finite="skip"), Spoilt) == 0
    said = capsys.readouterr().out
    assert "going on from step 5 of 10" in said and "1 of the steps, whose loss or gradient was not finite" in said


def test_an_unreadable_image_ends_the_run_by_its_name_and_saves_what_was_learnt(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    (tmp_path / "data" / "a" / "3.png").write_bytes(b"")
    recipe = replace(RECIPE, data=f"folder:{tmp_path}/data", batch_size=1, run=str(tmp_path / "run"), epochs=5)
    small = replace(recipe, model=replace(recipe.model, image_size=(8, 8)))
    with pytest.raises(
        InputError, match=r"3\.png is not an image.*; or train with --corrupt skip, .*; \d+ steps are saved: the same --run"
    ):
        trained(small)
    assert weights(tmp_path / "run")
    assert trained(replace(small, corrupt="skip")) == 0  # and from there


def test_where_images_are_skipped_the_run_counts_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    spoilt = [tmp_path / "a" / "3.png", tmp_path / "b" / "7.png"]
    for path in spoilt:
        path.write_bytes(b"")
    recipe = replace(RECIPE, data=f"folder:{tmp_path}", batch_size=4, run=str(tmp_path / "run"), corrupt="skip")
    assert trained(replace(recipe, model=replace(recipe.model, image_size=(8, 8)))) == 0
    assert f"2 images: {spoilt[0]}, {spoilt[1]}" in capsys.readouterr().out


def test_the_first_interruption_is_a_request_and_the_second_leaves() -> None:
    with Interruption() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("moment", "number"),
    [("folder", signal.SIGINT), (" left", signal.SIGTERM)],
    ids=["ctrl_c_while_compiling", "sigterm_after_a_look"],
)
def test_a_run_that_is_told_to_stop_leaves_weights_that_load(moment: str, number: int, tmp_path: Path) -> None:
    process = started("--epochs", "1000", "--run", str(tmp_path / "run"))
    assert process.stdout is not None
    while moment not in (line := process.stdout.readline()):
        assert line, process.stderr and process.stderr.read()
    time.sleep(0.3)
    process.send_signal(number)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert "interrupted" in said and f"python -m parity check {tmp_path / 'run'}" in said
    assert f"--run {tmp_path / 'run'}\n" in said[said.index("to go on") :]
    assert weights(tmp_path / "run")


def test_a_signal_to_all_processes_of_a_run_stops_the_trainer_and_not_those_that_prepare_images(tmp_path: Path) -> None:
    """As a terminal's Ctrl-C is, and many a cluster's SIGTERM."""
    process = started("--epochs", "1000", "--workers", "1", "--run", str(tmp_path / "run"), start_new_session=True)
    assert process.stdout is not None
    while " left" not in (line := process.stdout.readline()):
        assert line, process.stderr and process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors and "resource_tracker" not in errors
    assert "interrupted" in said and weights(tmp_path / "run")


def test_the_command_tells_bad_input_in_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    process = started("--data", f"folder:{tmp_path / 'none'}", "--run", str(tmp_path / "run"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors == f"error: {tmp_path / 'none'} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside\n"
    assert not (tmp_path / "run").exists()


# What is warned of ----------------------------------------------------------------------------------------------------


def photographs(root: Path, height: int, width: int) -> Source:
    """Five images of a size, and one that is smaller."""
    for i, size in enumerate([*[(width, height)] * 5, (8, 8)]):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(root / "ab"[i % 2] / f"{i}.png")
    return open_source(f"folder:{root}", 0.4)


@pytest.mark.parametrize(
    ("name", "size", "changes", "said"),
    [
        (
            "tiny",
            (300, 400),
            {},
            "300x400 are resized to 8x8, 37.5 times smaller a side: details are lost; --config vit_ti16 ",
        ),
        (
            "tiny",
            (400, 300),
            {"task": "labels"},
            "--config vit_ti16 --task labels resizes to 224x224, and --config finetune",
        ),
        ("tiny", (33, 500), {}, "images of 33x500 are resized to 8x8, 4.1 times smaller"),
        ("tiny", (31, 500), {}, None),
        ("vit_ti16", (800, 890), {}, None),
        (
            "vit_ti16",
            (1200, 1600),
            {},
            "to 224x224, 5.4 times smaller a side: details are lost; --model.image-size 448 448 ",
        ),
    ],
)
def test_images_that_lose_their_details_are_told_of_with_a_recipe_that_keeps_more(
    name: str, size: tuple[int, int], changes: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    source = photographs(tmp_path, *size)
    recipe = replace(RECIPES[name](Known(3, 3)), **changes)
    config = model_config(recipe.model, num_outputs=2, in_channels=3, size=None)
    found = cautions(Request(name, recipe, source, ""), config)
    assert said in found[0] if said else found == []


def test_small_images_that_are_all_alike_are_told_of_too(tmp_path: Path) -> None:
    for size, said in ((28, []), (40, ["--config vit_ti16 resizes to 80x80"])):
        np.savez(tmp_path / "x.npz", train_images=np.zeros((8, size, size), np.uint8), train_labels=np.arange(8) % 2)
        source, recipe = open_source(f"npz:{tmp_path / 'x.npz'}"), RECIPES["tiny"](Known(6, 1))
        found = cautions(Request("tiny", recipe, source, ""), CONFIGURED)
        assert len(found) == len(said) and all(what in line for what, line in zip(said, found, strict=True))


def test_weights_selected_by_the_test_split_are_told_of_with_what_to_do_instead(tmp_path: Path) -> None:
    arrays = {f"{name}_{what}": value for name in ("train", "val", "test") for what, value in SPLIT.items()}
    for names, held_out, warned in (
        (("train", "test"), None, True),
        (("train", "val", "test"), "test", True),
        (("train", "val", "test"), None, False),
        (("train", "test"), 0.5, False),
        (("test",), None, False),
    ):
        np.savez(tmp_path / "x.npz", **{key: value for key, value in arrays.items() if key.partition("_")[0] in names})
        source = open_source(f"npz:{tmp_path / 'x.npz'}", held_out)
        said = cautions(Request("tiny", Recipe(), source, ""), CONFIGURED)
        assert bool(said) == warned
    instead = "--held-out 0.1 selects them by a tenth of the training images"
    source = replace(open_source("digits"), split="test")
    assert instead in cautions(Request("tiny", Recipe(), source, ""), CONFIGURED)[0]


def test_warnings_stand_in_the_table_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = replace(open_source("digits"), split="test")
    recipe = replace(RECIPE, epochs="1steps", run=str(tmp_path / "run"), tensorboard=False)
    assert train(Request("tiny", recipe, source, ""), JaxEngine) == 0
    assert re.search(r"^warning +the best weights are selected by the test split", capsys.readouterr().out, re.MULTILINE)


def test_two_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    folders: list[Path] = []

    def make_engine(config: Any, recipe: Recipe, *, folder: Path, **_: Any) -> Any:
        folders.append(folder)
        if len(folders) < 2:
            with pytest.raises(InputError, match="enough"):
                trained(recipe, make_engine)
        raise InputError("enough")

    with pytest.raises(InputError, match="enough"):
        trained(RECIPE, make_engine)
    assert [folder.parent.name for folder in folders] == ["test-20260101-000000", "test-20260101-000000-2"]
    assert not list(tmp_path.iterdir())


# When things happen ---------------------------------------------------------------------------------------------------


def test_a_plan_looks_every_epoch_and_at_the_end() -> None:
    plan = Plan.of(replace(RECIPE, epochs=2.5, batch_size=10), images=100)
    assert (plan.total, plan.warmup, sorted(plan.looks)) == (25, 2.5, [10, 20, 25])


def test_a_run_has_at_least_one_step() -> None:
    assert Plan.of(replace(RECIPE, epochs=0.001), images=100).total == 1


def test_steps_to_profile_that_the_run_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match=re.escape("--profile 3 30 goes beyond the run, which has 20 steps")):
        Plan.of(Recipe(epochs="20steps", profile=(3, 30)), 1000)


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("values", {"loss": "sigmoid"}, ["values are learnt by mean squared error: loss does not count"]),
        ("values", {"label_smoothing": 0.1}, ["values are learnt by mean squared error: label_smoothing does not count"]),
        ("classes", {"warmup": "38steps"}, ["the warm-up is no shorter than the run: the learning rate comes to 0.0005"]),
        ("classes", {"warmup": 0.6, "cooldown": 0.6}, ["the cooldown begins within the warm-up"]),
        ("classes", {"batch_size": 2500}, ["a batch is more than all images: each is in it 2.5 times"]),
        ("classes", {"loss": "sigmoid", "label_smoothing": 0.1, "warmup": 0.6, "cooldown": 0.4}, []),
    ],
)
def test_what_a_recipe_asks_for_in_vain_is_said(task: Any, changes: dict[str, Any], said: list[str]) -> None:
    recipe = Recipe(epochs="20steps", **changes)
    found = session._without_effect(recipe, task, Plan.of(recipe, 1000))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_lengths_shorter_than_a_step_are_a_step_and_runs_without_end_are_refused() -> None:
    assert len(Plan.of(replace(RECIPE, epochs="5steps", save_every="1e-9epochs"), images=100).saves) == 5
    with pytest.raises(InputError, match=r"--epochs 1e\+30 are \S+ steps: give fewer"):
        Plan.of(replace(RECIPE, epochs=1e30), images=100)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = model_config(RECIPE.model, num_outputs=1, in_channels=1, size=(8, 8))
    with pytest.raises(InputError, match="cannot make the folder"):
        Run(tmp_path / "file" / "run", RECIPE, config, {})


# Going on ------------------------------------------------------------------------------------------------------------


class Stopped(RuntimeError):
    """As sudden as a power cut."""


def cut_off_after(steps: int, *, closes: bool = False) -> Any:
    """An engine whose process dies after so many steps; closes: and yet ends what it was writing."""

    class Mortal(JaxEngine):
        steps_left = steps

        def step(self, batch: Batch) -> Any:
            if not self.steps_left:
                raise Stopped
            self.steps_left -= 1
            return super().step(batch)

        def close(self) -> None:
            if self.steps_left or closes:
                super().close()

    return Mortal


LONGER = replace(RECIPE, save_every="7steps", log_every=4, tensorboard=False)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("runs") / "unbroken"
    assert trained(replace(LONGER, run=str(path))) == 0
    return records(path)


@pytest.mark.parametrize("steps", [3, 23, 44])
def test_a_run_that_was_cut_off_goes_on_to_the_same_losses(
    steps: int, unbroken: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(LONGER, run=str(tmp_path / "run"))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(steps))
    capsys.readouterr()
    assert trained(recipe) == 0
    assert records(tmp_path / "run") == unbroken
    went_on = re.search(r"going on from step (\d+) of 45", capsys.readouterr().out)
    assert steps - (int(went_on[1]) if went_on else 0) <= 7


def test_a_run_goes_on_without_the_file_of_weights_that_it_began_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start.safetensors"
    shutil.copy(run / "weights.safetensors", start)
    recipe = replace(LONGER, epochs=1, model=Model(), init=str(start), run=str(tmp_path / "run"))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(10, closes=True))
    start.unlink()
    assert trained(recipe) == 0
    assert "going on from step 7 of 22" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_taken(
    unbroken: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(30, closes=True))
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    bits = bytearray(largest.read_bytes())
    bits[len(bits) // 2] ^= 1
    largest.write_bytes(bits)
    assert trained(recipe) == 0
    said = capsys.readouterr()
    assert f"the checkpoint of step {newest.name} is damaged" in said.err and "going on from step 22 of 45" in said.out
    assert (run / "checkpoints-damaged" / newest.name).is_dir() and records(run) == unbroken


@pytest.mark.parametrize(("file", "left"), [("metrics/metrics", ""), ("_CHECKPOINT_METADATA", "[]")])
def test_a_state_whose_notes_are_damaged_is_put_aside(
    file: str, left: str, unbroken: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(30, closes=True))
    noted = [path.name for path in (run / "checkpoints").iterdir() if (path / file).exists()]
    newest = max(noted, key=int)
    (run / "checkpoints" / newest / file).write_text(left)
    assert trained(recipe) == 0
    assert f"the checkpoint of step {newest} is damaged (its notes cannot be read)" in capsys.readouterr().err
    assert (run / "checkpoints-damaged" / newest).is_dir() and records(run) == unbroken


NOTE: dict[str, Any] = {"last": {}, "best": {}, "window": [], "mean": {}, "unread": [], "skipped": 0, "looked": False}


@pytest.mark.parametrize(
    "odd", [None, [], {"skipped": "0"}, {"best": {"loss": 1.0}}, {"seconds": math.nan}, {"window": [1]}]
)
def test_a_note_that_no_run_writes_is_refused(odd: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = NOTE | {"seconds": 1.0} | odd if isinstance(odd, dict) else odd
    monkeypatch.setattr(JaxEngine, "restore", lambda self: (45, note))
    with pytest.raises(InputError, match=r"the note of the checkpoint of step 45 in .* is not what a run writes"):
        trained(replace(RECIPE, run=str(run)))


def test_a_run_without_a_readable_checkpoint_is_not_begun_anew_over_what_it_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(10, closes=True))
    before = records(run)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"")
    for _ in range(2):  # what is said once holds
        with pytest.raises(InputError, match=r"no checkpoint in .* can be read \(step 7: .*\): give --run a new folder"):
            trained(recipe)
    assert records(run) == before


def test_a_checkpoint_that_may_be_sound_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(17, closes=True))

    def refused(*arguments: Any) -> Any:
        raise ValueError("reading") from PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints.ocp.training.Checkpointer, "load", refused)
    with pytest.raises(InputError, match=r"of step 14 .* may be sound \(reading\): see to that"):
        trained(recipe)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"7", "14"}


def test_a_signal_that_comes_while_steps_are_under_way_waits_for_the_next(
    unbroken: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, log = replace(LONGER, run=str(tmp_path / "run")), Run.log

    def interrupted(self: Run, set_name: str, step: int, *rest: Any) -> None:
        if step == 8:  # two steps after it have begun
            signal.raise_signal(signal.SIGTERM)
        log(self, set_name, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", interrupted)
        assert trained(recipe) == 128 + signal.SIGTERM
    assert trained(recipe) == 0
    assert records(tmp_path / "run") == unbroken


@pytest.mark.parametrize("step", [22, 45])
def test_a_look_that_a_signal_cut_short_is_made_up_for(
    step: int, unbroken: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, evaluate = replace(LONGER, run=str(tmp_path / "run")), JaxEngine.evaluate

    def interrupted(self: JaxEngine, batch: Batch, *, raw: bool = False) -> Any:
        if int(self._state.step) == step:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, batch, raw=raw)

    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "evaluate", interrupted)
        for _ in range(2):  # and again, when it is made up for
            assert trained(recipe) == 128 + signal.SIGTERM
    assert trained(recipe) == 0
    assert records(tmp_path / "run") == unbroken


def test_the_state_of_the_best_look_is_kept_and_not_one_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.5, 0.7, 0.6])
    monkeypatch.setattr("train.loop.loop.score", lambda *_: {"accuracy": next(accuracies)})
    often = replace(LONGER, run=str(tmp_path), epochs="30steps", eval_every="10steps", save_every="5steps", keep=1)
    assert trained(often) == 0
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == {20, 30}


def test_a_checkpoint_of_a_newer_version_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    monkeypatch.setattr(checkpoints, "VERSION", 7)
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(10, closes=True))
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"of step 7 .* is of version 7, and 2 is the newest known here: update"):
        trained(recipe)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["7"]


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """A limit on the size of files, in bytes, stands for a full disk: it fails the same calls."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Of a run's files: its config, the weights, and what a checkpoint consists of.
@pytest.mark.parametrize("room", [300, 20_000, 130_000], ids="{} bytes".format)
def test_where_the_disk_is_full_one_line_says_so_and_the_run_goes_on_once_there_is_room(
    room: int, unbroken: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = replace(LONGER, run=str(run))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(10, closes=True))
    capfd.readouterr()
    with room_for(room):
        assert told(lambda: trained(recipe)) == BAD_INPUT
    errors = capfd.readouterr().err
    assert errors.startswith("error: ") and "make room" in errors and errors.count("\n") == 1, errors
    assert trained(recipe) == 0
    assert records(run) == unbroken


def test_a_run_that_found_no_room_for_its_first_file_can_begin_again(tmp_path: Path) -> None:
    config = model_config(RECIPE.model, num_outputs=1, in_channels=1, size=(8, 8))
    with room_for(100), pytest.raises(InputError, match=r"cannot write .*config.json \(File too large\): make room there"):
        Run(tmp_path / "run", RECIPE, config, {})
    assert Run(tmp_path / "run", RECIPE, config, {}).path == tmp_path / "run"


def test_a_run_does_not_wait_for_events_that_cannot_be_written(tmp_path: Path) -> None:
    events = Events(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    with room_for(100_000), pytest.raises(OSError, match="too large"):
        for step in range(20):
            events.picture(step, "noise", noise)
    events.close()


def test_events_are_written_without_torch(tmp_path: Path) -> None:
    script = "import sys; from train.loop.tensorboard import Events, Path; Events(Path(sys.argv[1])).close()"
    script += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert "tensorboardX" in done.stdout.split() and "torch" not in done.stdout.split(), done.stderr


def test_the_last_checkpoints_are_kept_and_the_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert trained(replace(LONGER, run=str(run), save_every="5steps", keep=2)) == 0
    looks = [record for record in records(run) if record["set"] == "held_out"]
    best = max(looks, key=lambda record: record["accuracy"])["step"]
    assert {int(path.name) for path in (run / "checkpoints").iterdir()} == {40, 45, best}


def test_records_of_a_killed_run_that_end_in_the_middle_of_a_line_are_taken_up(
    unbroken: list[dict[str, Any]], tmp_path: Path
) -> None:
    recipe = replace(LONGER, run=str(tmp_path / "run"))
    with pytest.raises(Stopped):
        trained(recipe, cut_off_after(30, closes=True))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"set": "train", "st')
    assert trained(recipe) == 0
    assert records(tmp_path / "run") == unbroken


# What a step is ------------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    turned, plain = (engine(tmp_path, non_finite=how) for how in ("skip", "stop"))
    for each, targets in ((turned, (1.0, np.nan, 2.0)), (plain, (1.0, 2.0))):
        for target in targets:
            each.step(batch(target))
    # Dropped paths are the step's own, so only the count of updates tells the two apart here: there is no other noise.
    assert int(turned._state.moments.updates) == int(plain._state.moments.updates) == 2
    assert int(turned._state.step) == 3 and bool(turned._state.sound)


def test_what_a_step_is_compiled_for_is_all_that_it_takes(tmp_path: Path) -> None:
    turned = engine(tmp_path)
    turned.step(batch(1.0))
    larger = batch(1.0)._replace(images=np.zeros((8, 8, 8, 1), np.uint8), targets=np.zeros((8, 1), np.float32))
    with pytest.raises(TypeError, match="differ from the types for which this computation was compiled"):
        turned.step(larger)


# Beside the run -------------------------------------------------------------------------------------------------------


def test_what_the_profiler_saw_of_chosen_steps_lies_in_the_folder(tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs="6steps", run=str(tmp_path / "run"), tensorboard=False, profile=(3, 4))
    assert trained(recipe) == 0
    [trace] = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000


def test_weights_and_biases_without_its_package_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match="pip install wandb"):
        trained(replace(RECIPE, run=str(tmp_path / "run"), wandb="project"))
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_told_in_a_line() -> None:
    said = r"not enough memory \(RESOURCE_EXHAUSTED: Out of memory\): give a smaller --batch-size"
    with pytest.raises(InputError, match=said), memory_told():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat some address")


def test_metrics_go_to_weights_and_biases_where_a_project_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Board:
        log = staticmethod(lambda metrics, step: logged.append((step, {*metrics})))
        finish = staticmethod(lambda: logged.append("finished"))

    def init(**options: Any) -> type[Board]:
        logged.append((options["project"], options["id"], options["resume"]))
        return Board

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recipe = replace(RECIPE, epochs="5steps", run=str(tmp_path / "run"), tensorboard=False, wandb="mine")
    assert trained(recipe) == 0
    assert logged[0] == ("mine", "run", "allow") and logged[-1] == "finished"
    assert (5, {"held_out/loss", "held_out/accuracy"}) in logged


def test_tensorboard_has_a_batch_as_it_was_shown_and_where_the_network_looked(run: Path) -> None:
    events = b"".join(path.read_bytes() for path in run.glob("events*"))
    assert events.count(b"\x89PNG") == 4 and b"shown" in events and b"attention" in events


def test_a_dry_run_does_one_step_of_the_run_and_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, rates, step = replace(RECIPE, epochs=50, run=str(tmp_path / "run")), [], JaxEngine.step

    def watched(self: JaxEngine, batch: Batch) -> Any:
        metrics = step(self, batch)
        rates.append(float(metrics["lr"]))
        return metrics

    monkeypatch.setattr(JaxEngine, "step", watched)
    assert train(Request("test", recipe, open_source("digits"), "", dry=True), JaxEngine) == 0
    assert rates == [pytest.approx(RECIPE.optimizer.lr)]  # not the zero that a warm-up begins with
    said = capsys.readouterr().out
    assert "1,123 of 64 images, 49.9" in said and "one step and a look at 64 images (loss " in said
    assert not (tmp_path / "run").exists()


# The running mean of weights ------------------------------------------------------------------------------------------


AVERAGED = replace(LONGER, ema=0.9999)


def test_a_run_with_a_running_mean_keeps_the_raw_weights_too_and_says_which_file_is_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "whole"
    assert trained(replace(AVERAGED, run=str(path))) == 0
    said = capsys.readouterr().out
    looks = {name: [r for r in records(path) if r["set"] == name] for name in ("train", "held_out", "held_out_raw")}
    assert [r["step"] for r in looks["held_out"]] == [r["step"] for r in looks["held_out_raw"]] == [22, 45]
    # With a constant memory the mean is 99.6 % initial weights: it stays where it began, at a loss of log 10.
    assert looks["held_out"][-1]["loss"] < 1.1 * looks["held_out_raw"][-1]["loss"] < 0.9 * np.log(10)
    mean, raw = weights(path / "weights.safetensors"), weights(path / "weights_raw.safetensors")
    assert mean.keys() == raw.keys() and any((mean[name] != raw[name]).any() for name in mean)
    for name, what in (("", "the running mean of weights"), ("_raw", "the weights themselves")):
        for row in ("best", "weights"):
            (line,) = [line for line in said.splitlines() if f"{path}/{row}{name}.safetensors" in line]
            assert what in line
    assert "| raw weights:  loss" in said

    cut = replace(AVERAGED, run=str(tmp_path / "cut"))
    with pytest.raises(Stopped):
        trained(cut, cut_off_after(23, closes=True))
    assert trained(cut) == 0
    assert records(tmp_path / "cut") == records(path)
    for name in ("weights", "weights_raw", "best", "best_raw"):
        whole, resumed = (weights(folder / f"{name}.safetensors") for folder in (path, tmp_path / "cut"))
        assert all(np.array_equal(whole[key], resumed[key]) for key in whole)


def test_a_mean_of_an_older_version_that_holds_initial_weights_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(AVERAGED, run=str(tmp_path / "run"))
    with monkeypatch.context() as older, pytest.raises(Stopped):
        older.setattr(checkpoints, "VERSION", 1)
        older.setattr("train.jax.engine.mean_share", lambda step, memory: 1 - memory)
        trained(recipe, cut_off_after(23, closes=True))
    assert trained(recipe) == 0
    assert "the mean of weights begins anew at step 22: an older version mixed initial weights" in capsys.readouterr().out
    looks = {r["set"]: r["loss"] for r in records(tmp_path / "run")}
    assert looks["held_out"] < 1.1 * looks["held_out_raw"]
