"""Whole runs of a tiny model in both trainers: files, ends, resuming, and the same seed gives the same run bit for bit."""

import ast
import json
import os
import re
import resource
import shutil
import signal
import struct
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
from unittest import mock

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("grain")

import jax

import parity
from parity.commands.run_command import BAD_INPUT, run_command
from tests import ROOT
from tests.hostile_files import FILES
from train.data.batches import Batch
from train.data.sources import Dataset, open_dataset
from train.jax import checkpoints
from train.jax import engine as jax_engine
from train.jax.engine import JaxEngine
from train.jax.runtime import one_line_errors
from train.loop import run_tables, session
from train.loop.curves import draw_curves
from train.loop.interruption import Interruption
from train.loop.lineage import image_offset
from train.loop.loop_state import LoopState
from train.loop.request import Request
from train.loop.run_folder import RunFolder
from train.loop.saved_run import ADDED
from train.loop.schedule import Schedule
from train.loop.session import train
from train.loop.start_warnings import start_warnings
from train.loop.tensorboard import EventWriter
from train.plan import print_plan
from train.recipes import RECIPES, Augment, DataInfo, Model, Optimizer, Recipe, model_config
from train.torch.engine import TorchEngine
from vit_spec import InputError

pytestmark = pytest.mark.usefixtures("rendered_once")

SMALL = ("patch_size=4", "width=32", "depth=2", "num_heads=2", "mlp_dim=64")
RECIPE = Recipe(
    model=Model(name="vit_ti16", changes=(*SMALL, "regularisation.drop_path=0.1")),
    augment=Augment(rotate=5, shift=0.05, scale=1.05),
    optimizer=Optimizer(lr=3e-3),
    epochs=2,  # of 11 steps
    batch_size=128,
    log_every=5,
)
SHORT_RECIPE = replace(RECIPE, epochs="6steps", tensorboard=False)
TINY_CONFIG = model_config(RECIPES["tiny"](DataInfo(3, 3)).model, num_outputs=10, in_channels=1, size=(8, 8))
SPLIT = {"images": np.zeros((8, 8, 8), np.uint8), "labels": np.arange(8) % 2}
ARGUMENTS = ["--config", "tiny", "--model.image-size", "None", "--model.changes", *SMALL, "--log-every", "5"]


ENGINES = {"jax": JaxEngine, "torch": TorchEngine}


@pytest.fixture(scope="module", params=ENGINES)
def trainer(request: pytest.FixtureRequest) -> Any:
    """The class of the engine of each trainer."""
    return ENGINES[request.param]


jax_only = pytest.mark.parametrize("trainer", ["jax"], indirect=True)
# Of what the loop does with any engine; PyTorch's compiles nothing.
torch_only = pytest.mark.parametrize("trainer", ["torch"], indirect=True)


def run_training(recipe: Recipe, make_engine: Any = JaxEngine) -> int:
    """Train with a recipe and return the exit status."""
    return train(Request("test", recipe, open_dataset(recipe.data, recipe.held_out), "python -m train.jax"), make_engine)


def start_trainer(
    *arguments: str, name: str = "jax", start_new_session: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start `python -m train.jax`, or that of another name, as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", f"train.{name}", *ARGUMENTS, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without their times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in parity.load(path).arrays.items()}


# Fields of a recipe that are not in the compiled functions of an engine.  The length of the run is in the learning rate.
NOT_COMPILED = {
    "init",
    "run",
    "epochs",
    "log_every",
    "eval_every",
    "patience",
    "save_every",
    "keep",
    "tensorboard",
    "wandb",
    "profile",
}


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[dict[Any, Any]]:
    """Trace and compile each function of an engine once for all engines with the same settings; return what they share.

    Most runs of this module differ only in when they end.  They also share the initial state, which is copied for each.
    A test whose claim is about tracing or initialization empties the dictionary for a while.
    """
    shared: dict[Any, Any] = {}

    def share(engine: JaxEngine, name: str, make: Any) -> Any:
        rates = tuple(float(engine._learning_rate(float(step))) for step in range(100))
        recipe = {field: value for field, value in vars(engine._recipe).items() if field not in NOT_COMPILED}
        settings = repr((engine.config, recipe, engine._task, rates))
        key = name, settings, jax_engine.ema_step_size  # one test replaces this function
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def make_state(self: JaxEngine, start: Any) -> Any:
        if start is not None:
            return original_state(self, start)
        initial = share(self, "state", lambda: jax.tree.map(np.array, original_state(self, None)))
        return jax.device_put(jax.tree.map(np.copy, initial), self.shardings)

    original_state = JaxEngine._make_state
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shardings", "compiled_step", "_compiled_eval", "_compiled_attention"):
            make = vars(JaxEngine)[name].func
            patch.setattr(
                JaxEngine, name, property(lambda self, name=name, make=make: share(self, name, lambda: make(self)))
            )
        patch.setattr(JaxEngine, "_make_state", make_state)
        yield shared
        shared.clear()


@pytest.fixture(scope="module")
def run(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "first"
    assert run_training(replace(RECIPE, run=str(path)), trainer) == 0
    return path


# Files of a run -------------------------------------------------------------------------------------------------------


def test_a_run_lowers_the_held_out_loss(run: Path) -> None:
    losses = [record["loss"] for record in records(run) if record["set"] == "held_out"]
    assert losses[-1] < losses[0] < np.log(10)


def test_a_run_writes_its_config_metrics_curves_events_and_weights(run: Path) -> None:
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"config", "data", "metrics", "curves", "events", "weights", "best", "checkpoints"}


def test_config_json_has_recipe_model_and_data(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"]["epochs"] == 2 and config["model"]["image_size"] == [8, 8]
    assert config["data"] == {"task": "classes", "train": 1438, "held_out": 359, "classes": list("0123456789")}


def test_training_is_recorded_every_log_every_steps_and_at_the_end_and_evaluation_every_epoch(run: Path) -> None:
    steps = {name: [r["step"] for r in records(run) if r["set"] == name] for name in ("train", "held_out")}
    assert steps == {"train": [5, 10, 15, 20, 22], "held_out": [11, 22]}


def test_the_curves_are_a_png_of_1650_x_600_pixels(run: Path) -> None:
    with Image.open(run / "curves.png") as picture:
        assert picture.size == (1650, 600)


def test_a_run_folder_loads_in_torch(run: Path) -> None:
    pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.load(run)
    model = model[0] if isinstance(model, tuple) else model
    assert model.config.num_classes == 10 and model.config.in_channels == 1


def test_the_same_seed_gives_the_same_run_bit_for_bit(
    trainer: Any, run: Path, programs: dict[Any, Any], tmp_path: Path
) -> None:
    again = tmp_path / "again"
    with mock.patch.dict(programs, clear=True):
        assert run_training(replace(RECIPE, run=str(again)), trainer) == 0
    assert records(again) == records(run)
    for name in ("weights", "best"):
        one, other = weights(run / f"{name}.safetensors"), weights(again / f"{name}.safetensors")
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_folder_without_a_run_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(InputError, match="exists already and holds no run"):
        run_training(replace(RECIPE, run=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 32}, "its recipe.batch_size is 128, and here it is 32; give"),
        ({"batch_size": 32, "seed": 7, "ema": 0.9}, "here it is 32, and recipe.ema, recipe.seed differ too; give the same"),
        ({"model": Model(name="vit_ti16", changes=SMALL)}, "its recipe.model.changes has 'regularisation.drop_path=0.1', "),
        ({"held_out": 0.5}, "its recipe.held_out is None, and here it is 0.5"),
        ({"optimizer": Optimizer(lr=1e-3)}, "its recipe.optimizer.lr is 0.003, and here it is 0.001"),
    ],
)
def test_a_run_with_other_settings_is_refused_and_the_folder_is_not_changed(
    trainer: Any, run: Path, change: dict[str, Any], message: str
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=re.escape(message)):
        run_training(replace(RECIPE, run=str(run), **change), trainer)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_resumes_through_a_path_with_parent_folders(
    trainer: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_training(replace(RECIPE, run=f"{run.parent}/../{run.parent.name}/{run.name}"), trainer) == 0
    assert "resuming from step 22 of 22" in capsys.readouterr().out


@torch_only
def test_a_run_resumes_from_a_replaced_checkpoint_beside_the_folder_that_checkpoints_links_to(
    trainer: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, elsewhere = tmp_path / "run", tmp_path / "disk" / "states"
    shutil.copytree(run, copy)
    elsewhere.parent.mkdir()
    (copy / "checkpoints").rename(elsewhere.with_name("states-replaced"))
    elsewhere.mkdir()
    (copy / "checkpoints").symlink_to(elsewhere)
    assert run_training(replace(RECIPE, run=str(copy)), trainer) == 0
    assert "resuming from step 22 of 22" in capsys.readouterr().out
    assert {path.name for path in elsewhere.iterdir()} == {"11", "22"}


def test_a_finished_run_can_be_started_again_without_a_change(trainer: Any, run: Path) -> None:
    before = records(run)
    assert run_training(replace(RECIPE, run=str(run)), trainer) == 0
    assert records(run) == before


@pytest.mark.parametrize("rng", ["own", "shared"])
def test_a_run_of_a_version_without_newer_fields_resumes_with_their_defaults(
    trainer: Any, run: Path, rng: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    saved = json.loads((old / "config.json").read_text())
    for field in ADDED:
        del saved["recipe"][field.removeprefix("recipe.")]
    (old / "config.json").write_text(json.dumps(saved))
    recipe = replace(RECIPE, run=str(old), rng=rng)
    if rng == "own":
        assert run_training(recipe, trainer) == 0
        assert "lineage" not in json.loads((old / "config.json").read_text())
    else:
        with pytest.raises(InputError, match=r"its recipe\.rng is own, and here it is shared"):
            run_training(recipe, trainer)


@torch_only
@pytest.mark.parametrize(("task", "metric"), [("labels", "auroc/7"), ("values", "r2")])
def test_labels_and_values_can_be_trained(trainer: Any, task: Any, metric: str, tmp_path: Path) -> None:
    assert run_training(replace(RECIPE, task=task, run=str(tmp_path / "run"), epochs=3, tensorboard=False), trainer) == 0
    evaluations = [record for record in records(tmp_path / "run") if record["set"] == "held_out"]
    assert metric in evaluations[0] and evaluations[-1]["loss"] < evaluations[0]["loss"]


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_curves_of_a_run_without_records_can_be_drawn(task: Any, tmp_path: Path) -> None:
    draw_curves(tmp_path / "curves.png", [], task, "nothing yet")
    assert (tmp_path / "curves.png").exists()


# How runs end ---------------------------------------------------------------------------------------------------------


VALUES_RECIPE = replace(
    RECIPE, task="values", epochs="10steps", save_every="5steps", batch_size=4, warmup=0, tensorboard=False
)


def make_engine(trainer: Any, folder: Path, **changes: Any) -> Any:
    """Return the engine of a run of `VALUES_RECIPE`, with which it shares its compiled functions."""
    recipe = replace(VALUES_RECIPE, **changes)
    config = model_config(recipe.model, num_outputs=1, in_channels=1, size=(8, 8))
    schedule = Schedule.from_recipe(recipe, len(open_dataset("digits").train))
    return trainer(
        config,
        recipe,
        task="values",
        learning_rate=lambda step: schedule.learning_rate(recipe, step),
        initial_weights=None,
        folder=folder,
    )


def batch(target: float) -> Batch:
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)
    return Batch(images, np.full((4, 1), target, np.float32), np.arange(4), np.ones(4, bool))


def test_after_a_loss_that_is_not_finite_no_weight_changes(trainer: Any, tmp_path: Path) -> None:
    engine = make_engine(trainer, tmp_path)
    engine.step(batch(1.0))
    engine.save_weights(tmp_path / "before.safetensors")
    assert np.isnan(float(engine.step(batch(np.nan))["loss"]))
    engine.step(batch(1.0))
    engine.save_weights(tmp_path / "after.safetensors")
    before, after = (weights(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_a_loss_that_is_not_finite_stops_the_run_and_the_message_names_the_step(
    trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divergent = replace(RECIPE, run=str(tmp_path / "run"), optimizer=Optimizer(lr=1e30), warmup=0)
    assert run_training(divergent, trainer) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and " at step 2 (images digit " in printed and printed.count("\n") == 1
    assert all(np.isfinite(array).all() for array in weights(tmp_path / "run").values())


def test_a_run_stopped_by_a_non_finite_step_resumes_with_skip(
    trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class BrokenStepEngine(trainer):  # type: ignore[misc]
        def step(self, batch: Batch) -> Any:
            return super().step(batch._replace(targets=batch.targets * np.nan) if int(self.state.step) == 7 else batch)

    recipe = replace(VALUES_RECIPE, run=str(tmp_path))
    assert run_training(recipe, BrokenStepEngine) == 1
    assert "at step 8 " in capsys.readouterr().err
    assert run_training(replace(recipe, non_finite="skip"), BrokenStepEngine) == 0
    printed = capsys.readouterr().out
    assert (
        "resuming from step 5 of 10" in printed and "1 of the steps: their loss or gradient norm was not finite" in printed
    )


@torch_only
def test_an_unreadable_image_stops_the_run_which_names_it_and_saves_a_checkpoint(trainer: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    (tmp_path / "data" / "a" / "3.png").write_bytes(b"")
    recipe = replace(RECIPE, data=f"folder:{tmp_path}/data", batch_size=1, run=str(tmp_path / "run"), epochs=5)
    small = replace(recipe, model=replace(recipe.model, image_size=(8, 8)))
    with pytest.raises(
        InputError,
        match=r"3\.png is not an image.*; or skip damaged images with --corrupt skip; .*; \d+ steps are saved: ",
    ):
        run_training(small, trainer)
    assert weights(tmp_path / "run")
    assert run_training(replace(small, corrupt="skip"), trainer) == 0  # resumes


def test_skipped_images_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    damaged = [tmp_path / "a" / "3.png", tmp_path / "b" / "7.png"]
    for path in damaged:
        path.write_bytes(b"")
    recipe = replace(RECIPE, data=f"folder:{tmp_path}", batch_size=4, run=str(tmp_path / "run"), corrupt="skip")
    assert run_training(replace(recipe, model=replace(recipe.model, image_size=(8, 8))), TorchEngine) == 0
    assert f"2 images: {damaged[0]}, {damaged[1]}" in capsys.readouterr().out


def test_the_first_ctrl_c_asks_to_stop_and_the_second_raises_keyboard_interrupt() -> None:
    with Interruption() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("moment", "number"),
    [("folder", signal.SIGINT), (" left", signal.SIGTERM)],
    ids=["ctrl_c_while_compiling", "sigterm_after_an_evaluation"],
)
def test_a_run_stopped_by_a_signal_has_weights_that_load(moment: str, number: int, tmp_path: Path) -> None:
    process = start_trainer("--epochs", "1000", "--run", str(tmp_path / "run"))
    assert process.stdout is not None
    while moment not in (line := process.stdout.readline()):
        assert line, process.stderr and process.stderr.read()
    time.sleep(0.3)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert "interrupted" in printed and f"python -m parity check {tmp_path / 'run'}" in printed
    assert f"--run {tmp_path / 'run'}\n" in printed[printed.index("to resume") :]
    assert weights(tmp_path / "run")


def test_a_signal_to_the_process_group_stops_the_trainer_and_not_its_data_workers(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole process group, and many clusters do so with SIGTERM."""
    process = start_trainer("--epochs", "1000", "--workers", "1", "--run", str(tmp_path / "run"), start_new_session=True)
    assert process.stdout is not None
    while " left" not in (line := process.stdout.readline()):
        assert line, process.stderr and process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in errors and "resource_tracker" not in errors
    assert "interrupted" in printed and weights(tmp_path / "run")


def test_bad_input_is_reported_in_one_line_and_no_folder_is_made(tmp_path: Path) -> None:
    process = start_trainer("--data", f"folder:{tmp_path / 'none'}", "--run", str(tmp_path / "run"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors == f"error: {tmp_path / 'none'} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside\n"
    assert not (tmp_path / "run").exists()


# Warnings -------------------------------------------------------------------------------------------------------------


def photographs(root: Path, height: int, width: int) -> Dataset:
    """Make a data set of five images of a size and one smaller image."""
    for i, size in enumerate([*[(width, height)] * 5, (8, 8)]):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(root / "ab"[i % 2] / f"{i}.png")
    return open_dataset(f"folder:{root}", 0.4)


@pytest.mark.parametrize(
    ("name", "size", "changes", "message"),
    [
        (
            "tiny",
            (300, 400),
            {},
            "300x400 are resized to 8x8, 37.5 times smaller on each side, and lose details; --config vit_ti16 ",
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
            "to 224x224, 5.4 times smaller on each side, and lose details; --model.image-size 448 448 ",
        ),
    ],
)
def test_images_that_lose_details_give_a_warning_that_names_what_keeps_more(
    name: str, size: tuple[int, int], changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    source = photographs(tmp_path, *size)
    recipe = replace(RECIPES[name](DataInfo(3, 3)), **changes)
    config = model_config(recipe.model, num_outputs=2, in_channels=3, size=None)
    found = start_warnings(Request(name, recipe, source, ""), config)
    assert message in found[0] if message else found == []


def test_downscaled_images_of_a_known_size_give_a_warning(tmp_path: Path) -> None:
    for size, expected in ((28, []), (40, ["--config vit_ti16 resizes to 80x80"])):
        np.savez(tmp_path / "x.npz", train_images=np.zeros((8, size, size), np.uint8), train_labels=np.arange(8) % 2)
        source, recipe = open_dataset(f"npz:{tmp_path / 'x.npz'}"), RECIPES["tiny"](DataInfo(6, 1))
        found = start_warnings(Request("tiny", recipe, source, ""), TINY_CONFIG)
        assert len(found) == len(expected) and all(what in line for what, line in zip(expected, found, strict=True))


def test_selecting_weights_on_the_test_split_gives_a_warning_with_an_alternative(tmp_path: Path) -> None:
    arrays = {f"{name}_{what}": value for name in ("train", "val", "test") for what, value in SPLIT.items()}
    for names, held_out, warned in (
        (("train", "test"), None, True),
        (("train", "val", "test"), "test", True),
        (("train", "val", "test"), None, False),
        (("train", "test"), 0.5, False),
        (("test",), None, False),
    ):
        np.savez(tmp_path / "x.npz", **{key: value for key, value in arrays.items() if key.partition("_")[0] in names})
        source = open_dataset(f"npz:{tmp_path / 'x.npz'}", held_out)
        warnings = start_warnings(Request("tiny", Recipe(), source, ""), TINY_CONFIG)
        assert bool(warnings) == warned
    instead = "--held-out 0.1 selects them on a tenth of the training images"
    source = replace(open_dataset("digits"), split="test")
    assert instead in start_warnings(Request("tiny", Recipe(), source, ""), TINY_CONFIG)[0]


@pytest.mark.parametrize("labels", [[[0, 1], [0, 1]], [[0, 1], [1, 1]]], ids=["all equal", "one differs"])
def test_held_out_images_with_the_same_labels_give_a_warning(labels: list[list[int]], tmp_path: Path) -> None:
    images, training = np.zeros((4, 8, 8), np.uint8), [[0, 1], [1, 0]] * 2
    np.savez(
        tmp_path / "x.npz", train_images=images, train_labels=training, val_images=images[: len(labels)], val_labels=labels
    )
    request = Request("tiny", Recipe(), open_dataset(f"npz:{tmp_path / 'x.npz'}"), "")
    expected = ["all held-out images have the same labels, so auroc is undefined"] * (labels[0] == labels[1])
    assert [line.partition(":")[0] for line in start_warnings(request, TINY_CONFIG)] == expected
    assert not start_warnings(request._replace(dry_run=True), TINY_CONFIG)  # its held-out images are others


def test_warnings_are_in_the_start_up_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = replace(open_dataset("digits"), split="test")
    recipe = replace(SHORT_RECIPE, run=str(tmp_path / "run"))
    assert train(Request("tiny", recipe, source, ""), TorchEngine) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^warning +the best weights are selected on the test split", printed, re.MULTILINE)
    assert "1,438 images, 359 held out, 10 classes: 0, 1, 2, 3, 4, ...\n" in printed


def test_two_runs_started_in_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    folders: list[Path] = []

    def make_engine(config: Any, recipe: Recipe, *, folder: Path, **_: Any) -> Any:
        folders.append(folder)
        if len(folders) < 2:
            with pytest.raises(InputError, match="enough"):
                run_training(recipe, make_engine)
        raise InputError("enough")

    with pytest.raises(InputError, match="enough"):
        run_training(RECIPE, make_engine)
    assert [folder.parent.name for folder in folders] == ["test-20260101-000000", "test-20260101-000000-2"]
    assert not list(tmp_path.iterdir())


# The schedule ---------------------------------------------------------------------------------------------------------


def test_a_schedule_evaluates_every_epoch_and_at_the_end() -> None:
    schedule = Schedule.from_recipe(replace(RECIPE, epochs=2.5, batch_size=10), images=100)
    assert (schedule.total, schedule.warmup, sorted(schedule.eval_steps)) == (25, 2.5, [10, 20, 25])


def test_a_schedule_continues_with_another_batch_size() -> None:
    """After ten steps of 10 images, an epoch of 100 images has five steps of 20."""
    recipe = replace(RECIPE, epochs=4, batch_size=20, warmup=0.0, cooldown=0.0, eval_every=1)
    lineage = [{"step": 10, "changes": {"batch_size": [10, 20]}}]
    schedule = Schedule.from_recipe(recipe, 100, image_offset(lineage, 20))
    assert schedule.image_offset == -100 and schedule.total == 25 and schedule.epochs == 4
    assert sorted(step for step in schedule.eval_steps if step > 10) == [15, 20, 25] and schedule.epoch(10) == 1
    whole = Schedule.from_recipe(replace(recipe, batch_size=10), 100)
    for now, then in ((10, 10), (15, 20), (24, 38)):
        assert schedule.learning_rate(recipe, now) == pytest.approx(whole.learning_rate(recipe, then))
    in_steps = Schedule.from_recipe(replace(recipe, epochs="30steps", eval_every="7steps"), 100, -100)
    assert in_steps.total == 30 and sorted(in_steps.eval_steps) == [7, 14, 21, 28, 30]
    lineage.append({"step": 15, "changes": {"batch_size": [20, 50], "epochs": [4, 8]}})
    assert image_offset(lineage, 50) == 10 * 10 + 5 * 20 - 15 * 50


def test_a_run_has_at_least_one_step() -> None:
    assert Schedule.from_recipe(replace(RECIPE, epochs=0.001), images=100).total == 1


def test_steps_to_profile_that_the_run_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match=re.escape("--profile 3 30 goes beyond the run of 20 steps")):
        Schedule.from_recipe(Recipe(epochs="20steps", profile=(3, 30)), 1000)


@pytest.mark.parametrize(
    ("task", "changes", "messages"),
    [
        ("values", {"loss": "sigmoid"}, ["--task values uses the mean squared error and ignores loss"]),
        ("values", {"label_smoothing": 0.1}, ["--task values uses the mean squared error and ignores label_smoothing"]),
        (
            "classes",
            {"warmup": "38steps"},
            ["the warm-up is at least as long as the run: the learning rate ends at 0.0005"],
        ),
        (
            "classes",
            {"epochs": "1steps"},
            ["the learning rate is 0 at every step, and nothing is trained: give more --epochs or --warmup 0"],
        ),
        ("classes", {"epochs": "1steps", "warmup": 0}, []),
        (
            "classes",
            {"optimizer": Optimizer(lr=0)},
            ["the learning rate is 0 at every step, and nothing is trained: give a larger --optimizer.lr"],
        ),
        ("classes", {"warmup": 0.6, "cooldown": 0.6}, ["the cooldown begins before the warm-up ends"]),
        ("classes", {"batch_size": 2500}, ["a batch is larger than the training set: each image is in it 2.5 times"]),
        ("classes", {"loss": "sigmoid", "label_smoothing": 0.1, "warmup": 0.6, "cooldown": 0.4}, []),
    ],
)
def test_settings_without_effect_are_listed(task: Any, changes: dict[str, Any], messages: list[str]) -> None:
    recipe = Recipe(**{"epochs": "20steps"} | changes)
    found = run_tables.ineffective_settings(recipe, task, Schedule.from_recipe(recipe, 1000))
    assert len(found) == len(messages) and all(line.startswith(start) for line, start in zip(found, messages, strict=True))


@pytest.mark.parametrize(
    ("missing", "rows"),
    [
        (
            "",
            {
                "compare the twins": "python -m parity check 'a run'",
                "load": 'vit_jax.load("a run"), vit_torch.load("a run")',
            },
        ),
        ("flax", {"load": 'vit_torch.load("a run")'}),
        ("torch", {"load": 'vit_jax.load("a run")'}),
    ],
)
def test_the_summary_names_only_twins_that_are_installed(
    missing: str, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "missing_packages", lambda *packages: [each for each in packages if each == missing])
    assert run_tables.twin_rows(Path("a run")) == rows


def test_the_summary_loads_a_run_whose_path_has_quotes() -> None:
    path = "runs/é \"a\" 'b'"
    first = ast.parse(run_tables.twin_rows(Path(path))["load"], mode="eval").body.elts[0]  # type: ignore[attr-defined]
    assert ast.literal_eval(first.args[0]) == path


@pytest.mark.parametrize(("warmup", "text"), [("0steps", "0 steps"), ("1steps", "1 step"), ("2steps", "2 steps")])
def test_a_warm_up_of_one_step_is_one_step(warmup: str, text: str) -> None:
    source: Any = SimpleNamespace(train=range(1000), held_out=range(9), classes=("a", "b"), task="classes")
    recipe = Recipe(epochs="20steps", warmup=warmup)
    rows = run_tables.start_table(
        Request("tiny", recipe, source, ""), TINY_CONFIG, Schedule.from_recipe(recipe, 1000), "", Path(), {}, [], []
    )
    assert f"up to 0.001 in {text}, then cosine" in dict(rows)["learning rate"]


def test_settings_that_are_adapted_to_the_data_are_named_as_typed() -> None:
    source: Any = SimpleNamespace(train=range(1000), channels=1, size=(8, 8))
    recipe = RECIPES["vit_s16"](DataInfo(1000, 1, (8, 8)))
    [line] = run_tables.scaling_notes("vit_s16", replace(recipe, batch_size=32), source)
    assert "adapted to 1,000 images" in line and "--epochs 10 (90), " in line and "--augment.mixup 0 (0.2)" in line
    assert "batch" not in line  # the user's choice


def test_intervals_are_at_least_a_step_and_endless_runs_are_refused() -> None:
    assert len(Schedule.from_recipe(replace(RECIPE, epochs="5steps", save_every="1e-9epochs"), images=100).save_steps) == 5
    with pytest.raises(InputError, match=r"--epochs 1e\+30 are \S+ steps: give fewer"):
        Schedule.from_recipe(replace(RECIPE, epochs=1e30), images=100)


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = model_config(RECIPE.model, num_outputs=1, in_channels=1, size=(8, 8))
    with pytest.raises(InputError, match="cannot make the folder"):
        RunFolder(tmp_path / "file" / "run", RECIPE, config, {})
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(InputError, match="link is a link to gone, which does not exist: give another with --run"):
        RunFolder(tmp_path / "link", RECIPE, config, {})


# Resuming -------------------------------------------------------------------------------------------------------------


class Killed(RuntimeError):
    """Ends a run without any cleanup by the loop, as a power cut does."""


def engine_that_dies_after(steps: int, trainer: Any = JaxEngine, *, finishes_writing: bool = False) -> Any:
    """Return an engine that raises `Killed` after so many steps.

    trainer: the class of the engine.
    finishes_writing: whether checkpoints that have started are completed.
    """

    class DyingEngine(trainer):  # type: ignore[misc]
        steps_left = steps

        def step(self, batch: Batch) -> Any:
            if not self.steps_left:
                raise Killed
            self.steps_left -= 1
            return super().step(batch)

        def close(self) -> None:
            if self.steps_left or finishes_writing:
                super().close()

    return DyingEngine


LONG_RECIPE = replace(RECIPE, save_every="7steps", log_every=4, tensorboard=False)
ONE_CHECKPOINT_RECIPE = replace(LONG_RECIPE, save_every="100steps", keep=1)


@pytest.fixture(scope="module")
def reference(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("runs") / "reference"
    assert run_training(replace(LONG_RECIPE, run=str(path)), trainer) == 0
    return records(path)


@pytest.fixture(scope="module")
def original_killed_run(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "killed"
    with pytest.raises(Killed):
        run_training(replace(LONG_RECIPE, run=str(path)), engine_that_dies_after(15, trainer, finishes_writing=True))
    return path


@pytest.fixture
def killed_run(original_killed_run: Path, tmp_path: Path) -> Path:
    """A run of 15 of 22 steps with complete checkpoints, which the test may change; the newest are of steps 11 and 14."""
    return shutil.copytree(original_killed_run, tmp_path / "run")


@pytest.mark.parametrize("steps", [3, 12])  # before and after the first checkpoint, of step 7
def test_a_killed_run_resumes_to_the_same_records(
    trainer: Any,
    steps: int,
    reference: list[dict[str, Any]],
    programs: dict[Any, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(LONG_RECIPE, run=str(tmp_path / "run"))
    with pytest.raises(Killed):
        run_training(recipe, engine_that_dies_after(steps, trainer))
    capsys.readouterr()
    # As in a new process, whose compilation outlasts the writes that the threads of this one still do.
    with mock.patch.dict(programs, clear=True):
        assert run_training(recipe, trainer) == 0
    assert records(tmp_path / "run") == reference
    match = re.search(r"resuming from step (\d+) of 22", capsys.readouterr().out)
    assert steps - (int(match[1]) if match else 0) <= 7


@torch_only
def test_a_run_resumes_without_the_file_of_its_initial_weights(
    trainer: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start.safetensors"
    shutil.copy(run / "weights.safetensors", start)
    recipe = replace(LONG_RECIPE, epochs=1, model=Model(), init=str(start), run=str(tmp_path / "run"))
    with pytest.raises(Killed):
        run_training(recipe, engine_that_dies_after(10, trainer, finishes_writing=True))
    start.unlink()
    request = Request("test", recipe, open_dataset("digits"), "", dry_run=True)
    assert train(request, trainer) == print_plan(trainer.trainer, request, "1x80GiB") == 0
    assert run_training(recipe, trainer) == 0
    assert "resuming from step 7 of 11" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_moved_away_and_the_one_before_is_restored(
    trainer: Any, reference: list[dict[str, Any]], killed_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max((killed_run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    bits = bytearray(largest.read_bytes())
    bits[len(bits) // 2] ^= 1
    largest.write_bytes(bits)
    assert run_training(replace(LONG_RECIPE, run=str(killed_run)), trainer) == 0
    printed = capsys.readouterr()
    assert (
        f"the checkpoint of step {newest.name} is damaged" in printed.err and "resuming from step 11 of 22" in printed.out
    )
    assert (killed_run / "checkpoints-damaged" / newest.name).is_dir() and records(killed_run) == reference


@jax_only
@pytest.mark.parametrize(("file", "left"), [("metrics/metrics", ""), ("_CHECKPOINT_METADATA", "[]")])
def test_a_checkpoint_with_damaged_metadata_is_moved_away(
    file: str, left: str, reference: list[dict[str, Any]], killed_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = [path.name for path in (killed_run / "checkpoints").iterdir() if (path / file).exists()]
    newest = max(noted, key=int)
    (killed_run / "checkpoints" / newest / file).write_text(left)
    assert run_training(replace(LONG_RECIPE, run=str(killed_run))) == 0
    assert f"the checkpoint of step {newest} is damaged (its metadata cannot be read)" in capsys.readouterr().err
    assert (killed_run / "checkpoints-damaged" / newest).is_dir() and records(killed_run) == reference


@pytest.fixture
def truncated_run(run: Path, tmp_path: Path) -> Path:
    """A finished run whose newest checkpoint, of step 22, is damaged."""
    copy = shutil.copytree(run, tmp_path / "run")
    files = [path for path in (copy / "checkpoints" / "22").rglob("*") if path.is_file()]
    os.truncate(max(files, key=lambda path: path.stat().st_size), 1000)
    return copy


TRUNCATED = r"the checkpoint of step 22 is damaged \([^\n]+\); it was moved to [^\n]+\n"


@jax_only
def test_a_truncated_checkpoint_of_orbax_is_reported_in_a_line(truncated_run: Path) -> None:
    """Orbax abandons its other reads when one fails; each of them would print a traceback, some when the process exits."""
    command = [sys.executable, "-m", "train.jax", "--run", truncated_run]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0 and "resuming from step 11 of 22" in done.stdout
    assert re.fullmatch(TRUNCATED, done.stderr)


@torch_only
def test_a_truncated_checkpoint_of_pytorch_is_reported_in_a_line(
    trainer: Any, truncated_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_training(replace(RECIPE, run=str(truncated_run)), trainer) == 0
    out, errors = capfd.readouterr()
    assert "resuming from step 11 of 22" in out and re.fullmatch(TRUNCATED, errors)


def test_a_checkpoint_under_the_name_of_another_step_is_moved_away(
    trainer: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copytree(copy / "checkpoints" / "22", copy / "checkpoints" / "9999")
    assert run_training(replace(RECIPE, run=str(copy)), trainer) == 0
    printed = capsys.readouterr()
    assert "the checkpoint of step 9999 is damaged (its content is that of step 22)" in printed.err
    assert "resuming from step 22 of 22" in printed.out and (copy / "checkpoints-damaged" / "9999").is_dir()


def test_a_checkpoint_of_another_run_is_refused(trainer: Any, run: Path, killed_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(killed_run / "checkpoints", copy / "checkpoints")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    ids = [json.loads((path / "config.json").read_text())["id"] for path in (killed_run, copy)]
    message = (
        f"the checkpoint of step 14 in {copy / 'checkpoints'} is another run's (id {ids[0]}; config.json has {ids[1]})"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        run_training(replace(RECIPE, run=str(copy)), trainer)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_a_checkpoint_of_another_optimizer_than_that_of_the_config_is_refused_before_its_arrays_are_read(
    trainer: Any, run: Path, tmp_path: Path
) -> None:
    copy, recipe = tmp_path / "run", replace(RECIPE, run=str(tmp_path / "run"), optimizer=Optimizer(name="sgd", lr=3e-3))
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    config["recipe"]["optimizer"]["name"] = "sgd"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"step 22 .* its recipe\.optimizer\.name is adamw, and here it is sgd; put"):
        run_training(recipe, trainer)
    assert {path.name for path in (copy / "checkpoints").iterdir()} == {"11", "22"}


def put_pipe(state: Path) -> None:
    (state / "manifest.ocdbt").unlink()
    os.mkfifo(state / "manifest.ocdbt")


def put_hole(state: Path) -> None:
    os.truncate(next((state / "d").iterdir()), 2**36)


def put_hostile_tree(state: Path) -> None:
    hostile = FILES["orbax: a compressed OCDBT manifest of 2**28 files"](state.parent)
    shutil.copy(hostile / "params" / "manifest.ocdbt", state / "manifest.ocdbt")
    shutil.rmtree(hostile)


@jax_only
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put_pipe, "state/manifest.ocdbt is neither a file nor a folder"),
        (put_hole, "68,719,476,736 bytes, of which only"),
        (put_hostile_tree, "state/manifest.ocdbt describes a tree that takes more than 1 GiB of memory"),
    ],
)
def test_a_checkpoint_that_orbax_cannot_open_safely_is_moved_away(
    damage: Any, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copytree(copy / "checkpoints" / "22", copy / "checkpoints" / "9999")
    damage(copy / "checkpoints" / "9999" / "state")
    assert run_training(replace(RECIPE, run=str(copy))) == 0
    printed = capsys.readouterr()
    assert "the checkpoint of step 9999 is damaged (" in printed.err and message in printed.err, printed.err
    assert "resuming from step 22 of 22" in printed.out and (copy / "checkpoints-damaged" / "9999").is_dir()


def test_a_loop_state_that_no_run_writes_is_refused(trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sys.modules[trainer.__module__].CheckpointStore
    restore_newest = store.restore_newest

    def restore_other(self: Any, target: Any, check: Any) -> Any:
        return restore_newest(self, target, lambda step, _: check(step, {"skipped": "0"}))

    monkeypatch.setattr(store, "restore_newest", restore_other)
    with pytest.raises(InputError, match=r"the checkpoint of step 22 in .* has metadata that no run writes"):
        run_training(replace(RECIPE, run=str(run)), trainer)


def test_a_run_without_a_readable_checkpoint_is_refused_and_not_overwritten(trainer: Any, killed_run: Path) -> None:
    before = records(killed_run)
    for path in (killed_run / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"")
    for _ in range(2):  # the second attempt is refused too
        with pytest.raises(InputError, match=r"no checkpoint in .* can be read \(step 14: .*\): give --run a new folder"):
            run_training(replace(LONG_RECIPE, run=str(killed_run)), trainer)
    assert records(killed_run) == before


@jax_only
def test_a_checkpoint_without_read_permission_is_not_moved_away(killed_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*arguments: Any) -> Any:
        raise ValueError("reading") from PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints.ocp.training.Checkpointer, "load", raise_error)
    with pytest.raises(InputError, match=r"of step 14 .* may be intact \(.*Permission denied\): remove the cause"):
        run_training(replace(LONG_RECIPE, run=str(killed_run)))
    assert {path.name for path in (killed_run / "checkpoints").iterdir()} == {"11", "14"}


@torch_only
def test_a_signal_that_comes_between_steps_stops_after_the_next_step(
    trainer: Any, reference: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, log = replace(LONG_RECIPE, run=str(tmp_path / "run")), RunFolder.log

    def interrupt_and_log(self: RunFolder, set_name: str, step: int, *rest: Any) -> None:
        if step == 8:  # two later steps have started
            signal.raise_signal(signal.SIGTERM)
        log(self, set_name, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", interrupt_and_log)
        assert run_training(recipe, trainer) == 128 + signal.SIGTERM
    assert run_training(recipe, trainer) == 0
    assert records(tmp_path / "run") == reference


@torch_only
@pytest.mark.parametrize("step", [11, 22])
def test_an_evaluation_cut_short_by_a_signal_is_repeated_on_resume(
    trainer: Any, step: int, reference: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, evaluate = replace(LONG_RECIPE, run=str(tmp_path / "run")), trainer.evaluate

    def interrupt_and_evaluate(self: Any, batch: Batch, *, raw: bool = False) -> Any:
        if int(self.state.step) == step:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, batch, raw=raw)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", interrupt_and_evaluate)
        for _ in range(2):  # the second signal comes while the evaluation is repeated
            assert run_training(recipe, trainer) == 128 + signal.SIGTERM
    assert run_training(recipe, trainer) == 0
    assert records(tmp_path / "run") == reference


@pytest.fixture(scope="module")
def run_with_one_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of JAX that a signal has stopped in its first evaluation, with a checkpoint of step 11."""
    path, evaluate = tmp_path_factory.mktemp("runs") / "stopped", JaxEngine.evaluate

    def interrupt_and_evaluate(self: JaxEngine, batch: Batch, *, raw: bool = False) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(self, batch, raw=raw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JaxEngine, "evaluate", interrupt_and_evaluate)
        assert run_training(replace(ONE_CHECKPOINT_RECIPE, run=str(path))) == 128 + signal.SIGTERM
    assert [each.name for each in (path / "checkpoints").iterdir()] == ["11"]
    return path


@jax_only
@pytest.mark.parametrize("moment", ["before the write", "a full disk", "before the old one is removed"])
def test_the_only_checkpoint_is_replaced_without_a_moment_at_which_there_is_none(
    moment: str,
    reference: list[dict[str, Any]],
    run_with_one_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = shutil.copytree(run_with_one_checkpoint, tmp_path / "run")
    recipe = replace(ONE_CHECKPOINT_RECIPE, run=str(run))

    class KilledEngine(JaxEngine):
        def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
            super().save_checkpoint(step, loop_state)
            raise Killed

        def close(self) -> None:
            if moment == "before the old one is removed":
                self._checkpoint_store._checkpointer.close()

    def kill(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "before the write":
            patch.setattr(checkpoints.ocp.training.Checkpointer, "save_async", kill)
        if moment == "a full disk":
            with max_file_size(130_000), pytest.raises(InputError, match="cannot write a checkpoint"):
                run_training(recipe)
        else:
            with pytest.raises((Killed, KeyboardInterrupt)):
                run_training(recipe, KilledEngine)
    # After a failed write, the old checkpoint has its name again at once.
    assert (run / "checkpoints" / "11").exists() == (moment != "before the write")
    assert (run / "checkpoints-replaced" / "11").exists() == (moment != "a full disk")
    assert run_training(recipe) == 0
    assert records(run) == reference
    assert not (run / "checkpoints-replaced").exists()


@pytest.mark.parametrize(("each", "best"), [((0.5, 0.7, 0.6), 20), ((0.7, 0.7, 0.6), 10)])
def test_the_checkpoint_of_the_best_evaluation_is_kept_and_restores_the_best_weights(
    trainer: Any, each: tuple[float, ...], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter(each)
    monkeypatch.setattr("train.loop.loop.compute_metrics", lambda *_: {"accuracy": next(accuracies)})
    frequent = replace(LONG_RECIPE, run=str(tmp_path), eval_every="10steps", save_every="5steps", keep=1)
    assert run_training(frequent, trainer) == 0
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == {best, 22}
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    assert len({*before.values()}) == 2
    for path in before:
        path.unlink()
    assert run_training(frequent, trainer) == 0
    assert before == {path: path.read_bytes() for path in before}


def test_a_checkpoint_of_a_newer_version_is_refused_and_not_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    recipe = replace(LONG_RECIPE, run=str(run))
    monkeypatch.setattr(checkpoints, "VERSION", 7)
    with pytest.raises(Killed):
        run_training(recipe, engine_that_dies_after(10, finishes_writing=True))
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"of step 7 .* has version 7, and this package reads versions up to 4: update"):
        run_training(recipe)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["7"]


@contextmanager
def max_file_size(count: int) -> Iterator[None]:
    """Limit the size of files, in bytes, in place of a full disk: the same system calls fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# The limits make different files fail: the config, the weights, or those of a checkpoint.
@pytest.mark.parametrize("room", [300, 20_000, 130_000], ids="{} bytes".format)
def test_a_full_disk_is_reported_in_one_line_and_the_run_resumes_once_there_is_room(
    trainer: Any, room: int, reference: list[dict[str, Any]], killed_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(LONG_RECIPE, run=str(killed_run))
    capfd.readouterr()
    with max_file_size(room):
        assert run_command(lambda: run_training(recipe, trainer)) == BAD_INPUT
    errors = capfd.readouterr().err
    assert errors.startswith("error: ") and "make room" in errors and errors.count("\n") == 1, errors
    assert run_training(recipe, trainer) == 0
    assert records(killed_run) == reference


def test_a_run_that_could_not_write_its_first_file_can_be_started_again(tmp_path: Path) -> None:
    config = model_config(RECIPE.model, num_outputs=1, in_channels=1, size=(8, 8))
    with (
        max_file_size(100),
        pytest.raises(InputError, match=r"cannot write .*config.json \(File too large\): make room there"),
    ):
        RunFolder(tmp_path / "run", RECIPE, config, {})
    assert RunFolder(tmp_path / "run", RECIPE, config, {}).path == tmp_path / "run"


def test_events_that_cannot_be_written_raise_and_do_not_block(tmp_path: Path) -> None:
    events = EventWriter(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    with max_file_size(100_000), pytest.raises(OSError, match="too large"):
        for step in range(20):
            events.add_image(step, "noise", noise)
    events.close()


def test_events_with_nan_print_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = EventWriter(tmp_path)
    events.add_scalars(1, {"held_out/loss": float("nan")})
    events.close()
    assert not caplog.records


@pytest.mark.parametrize("after", [0, 10])
def test_events_hide_those_of_later_steps_in_earlier_files(after: int, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    EventWriter(tmp_path, after).close()
    [content], offset, events = [path.read_bytes() for path in tmp_path.iterdir()], 0, []
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        events.append(Event.FromString(content[offset + 12 : offset + 12 + length]))
        offset += length + 16
    assert (events[-1].session_log.status, events[-1].step) == (SessionLog.START, after + 1)


def test_writing_events_does_not_import_torch(tmp_path: Path) -> None:
    script = "import sys; from train.loop.tensorboard import EventWriter, Path; EventWriter(Path(sys.argv[1])).close()"
    script += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert "tensorboardX" in done.stdout.split() and "torch" not in done.stdout.split(), done.stderr


def test_the_newest_checkpoints_and_the_best_are_kept(trainer: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_training(replace(LONG_RECIPE, run=str(run), save_every="5steps", keep=2), trainer) == 0
    evaluations = [record for record in records(run) if record["set"] == "held_out"]
    best = max(evaluations, key=lambda record: record["accuracy"])["step"]
    assert {int(path.name) for path in (run / "checkpoints").iterdir()} == {20, 22, best}


@torch_only
def test_records_that_end_in_the_middle_of_a_line_can_be_resumed(
    trainer: Any, reference: list[dict[str, Any]], killed_run: Path
) -> None:
    with (killed_run / "metrics.jsonl").open("a") as file:
        file.write('{"set": "train", "st')
    assert run_training(replace(LONG_RECIPE, run=str(killed_run)), trainer) == 0
    assert records(killed_run) == reference


# A step ---------------------------------------------------------------------------------------------------------------


def test_a_non_finite_step_is_skipped_with_non_finite_skip(tmp_path: Path) -> None:
    engine, plain = (make_engine(JaxEngine, tmp_path, non_finite=how) for how in ("skip", "stop"))
    for each, targets in ((engine, (1.0, np.nan, 2.0)), (plain, (1.0, 2.0))):
        for target in targets:
            each.step(batch(target))
    # The noise of drop path depends on the step, so weights differ: only the number of updates can be compared.
    assert int(engine.state.moments.updates) == int(plain.state.moments.updates) == 2
    assert int(engine.state.step) == 3 and bool(engine.state.sound)


def test_a_batch_of_another_shape_is_an_error_and_not_compiled_again(tmp_path: Path) -> None:
    engine = make_engine(JaxEngine, tmp_path)
    engine.step(batch(1.0))
    larger = batch(1.0)._replace(images=np.zeros((8, 8, 8, 1), np.uint8), targets=np.zeros((8, 1), np.float32))
    with pytest.raises(TypeError, match="differ from the types for which this computation was compiled"):
        engine.step(larger)


# Profiler, TensorBoard, Weights & Biases, dry run ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # of torch: one or two steps are profiled
def test_the_profile_of_chosen_steps_is_in_the_run_folder(trainer: Any, tmp_path: Path) -> None:
    recipe = replace(SHORT_RECIPE, run=str(tmp_path / "run"), profile=(3, 4))
    assert run_training(recipe, trainer) == 0
    name = "*.xplane.pb" if trainer is JaxEngine else "*.pt.trace.json"
    [trace] = (tmp_path / "run" / "profile").rglob(name)
    assert trace.stat().st_size > 10_000


def test_wandb_without_its_package_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match="pip install wandb"):
        run_training(replace(RECIPE, run=str(tmp_path / "run"), wandb="project"))
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_reported_in_one_line() -> None:
    printed = r"not enough memory \(RESOURCE_EXHAUSTED: Out of memory\): give a smaller --batch-size"
    with pytest.raises(InputError, match=printed), one_line_errors():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat some address")


def test_the_end_of_another_process_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="another process of the run has ended: start all processes"), one_line_errors():
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer")
    with pytest.raises(ValueError, match="something else"), one_line_errors():
        raise ValueError("something else")


def test_metrics_are_logged_to_wandb_if_a_project_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Board:
        log = staticmethod(lambda metrics, step: logged.append((step, {*metrics})))
        finish = staticmethod(lambda: logged.append("finished"))

    def init(**options: Any) -> type[Board]:
        logged.append([options[name] for name in ("project", "id", "name", "resume")])
        return Board

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recipe = replace(SHORT_RECIPE, run=str(tmp_path / "run"), wandb="mine")
    assert run_training(recipe, TorchEngine) == 0
    run_id = json.loads((tmp_path / "run" / "config.json").read_text())["id"]  # another run may have the folder's name
    assert logged[0] == ["mine", run_id, "run", "allow"] and logged[-1] == "finished"
    assert (6, {"held_out/loss", "held_out/accuracy"}) in logged


def test_tensorboard_has_training_images_and_attention_maps(run: Path) -> None:
    events = b"".join(path.read_bytes() for path in run.glob("events*"))
    assert events.count(b"\x89PNG") == 4 and b"shown" in events and b"attention" in events


def test_a_dry_run_does_one_step_at_the_peak_learning_rate_and_saves_nothing(
    trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, rates, step = replace(RECIPE, epochs=50, batch_size=64, run=str(tmp_path / "run")), [], trainer.step

    def record_rate(self: Any, batch: Batch) -> Any:
        metrics = step(self, batch)
        rates.append(float(metrics["lr"]))
        return metrics

    monkeypatch.setattr(trainer, "step", record_rate)
    assert train(Request("test", recipe, open_dataset("digits"), "", dry_run=True), trainer) == 0
    assert rates == [pytest.approx(RECIPE.optimizer.lr)]  # not 0, with which the warm-up begins
    printed = capsys.readouterr().out
    assert "1,123 of 64 images, 49.9" in printed and "one step and an evaluation of 64 images (loss " in printed
    assert not (tmp_path / "run").exists()


# The EMA of the weights -----------------------------------------------------------------------------------------------


EMA_RECIPE = replace(LONG_RECIPE, ema=0.9999)


def test_a_run_with_ema_saves_the_raw_weights_too_and_prints_which_file_is_which(
    trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "whole"
    assert run_training(replace(EMA_RECIPE, run=str(path)), trainer) == 0
    printed = capsys.readouterr().out
    evaluations = {name: [r for r in records(path) if r["set"] == name] for name in ("train", "held_out", "held_out_raw")}
    assert [r["step"] for r in evaluations["held_out"]] == [r["step"] for r in evaluations["held_out_raw"]] == [11, 22]
    # With a constant decay the EMA would be 99.6 % initial weights: its loss would stay at log 10.
    assert evaluations["held_out"][-1]["loss"] < 1.1 * evaluations["held_out_raw"][-1]["loss"] < 0.9 * np.log(10)
    mean, raw = weights(path / "weights.safetensors"), weights(path / "weights_raw.safetensors")
    assert mean.keys() == raw.keys() and any((mean[name] != raw[name]).any() for name in mean)
    for name, what in (("", "the moving average of the weights"), ("_raw", "the weights themselves")):
        for row in ("best", "weights"):
            (line,) = [line for line in printed.splitlines() if f"{path}/{row}{name}.safetensors" in line]
            assert what in line
    assert "| raw weights:  loss" in printed

    cut = replace(EMA_RECIPE, run=str(tmp_path / "cut"))
    with pytest.raises(Killed):
        run_training(cut, engine_that_dies_after(12, trainer, finishes_writing=True))
    assert run_training(cut, trainer) == 0
    assert records(tmp_path / "cut") == records(path)
    for name in ("weights", "weights_raw", "best", "best_raw"):
        whole, resumed = (weights(folder / f"{name}.safetensors") for folder in (path, tmp_path / "cut"))
        assert all(np.array_equal(whole[key], resumed[key]) for key in whole)


def test_an_ema_of_an_older_version_that_contains_initial_weights_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(EMA_RECIPE, run=str(tmp_path / "run"))
    with monkeypatch.context() as older, pytest.raises(Killed):
        older.setattr(checkpoints, "VERSION", 1)
        older.setattr("train.jax.engine.ema_step_size", lambda step, decay: 1 - decay)
        run_training(recipe, engine_that_dies_after(12, finishes_writing=True))
    assert run_training(recipe) == 0
    assert "the EMA restarts at step 11: an older version mixed the initial weights into it" in capsys.readouterr().out
    evaluations = {r["set"]: r["loss"] for r in records(tmp_path / "run")}
    assert evaluations["held_out"] < 1.1 * evaluations["held_out_raw"]
