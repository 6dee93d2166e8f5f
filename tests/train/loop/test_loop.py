"""The training loop with an engine that has the members of the protocol and no others, and uses neither framework."""

import errno
import json
import math
import operator
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")
pytest.importorskip("sklearn")

import parity
import vit_spec
from parity.comparison.reproducible_init import weights
from tests import ROOT
from train.checkpoints.training_state import TrainingState
from train.cli import main
from train.data.batches import Batch
from train.data.sources import open_dataset
from train.loop.checkpoint_folder import CheckpointFolder, checkpoint_rank
from train.loop.engine import CheckpointCheck, Engine, EvalOutput, RestoredCheckpoint
from train.loop.loop import MAX_SKIPPED, METRICS_DELAY
from train.loop.loop_state import LoopState, equal_metrics
from train.loop.request import Request
from train.loop.session import train
from train.loop.weight_files import WeightFiles
from train.loop.write_files import convert_write_errors
from train.recipes import Model, Optimizer, Recipe
from vit_spec import InputError, ViTConfig, bounded_json
from vit_spec.cost import training_flops

pytestmark = pytest.mark.usefixtures("rendered_once")

RECIPE = Recipe(
    model=Model(name="vit_ti16", changes=("patch_size=4", "width=16", "depth=1", "num_heads=2", "mlp_dim=16")),
    epochs="6steps",
    eval_every="3steps",
    save_every="3steps",
    batch_size=64,
)


class PendingArray:
    """An array that counts as computed when it is converted to numpy."""

    started = 0  # batches whose evaluation has started
    started_at_wait: ClassVar[list[int]] = []  # `started` at each conversion

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        PendingArray.started_at_wait.append(PendingArray.started)
        return self.array


class FakeEngine:
    """An engine that computes nothing."""

    trainer = "train.fake"
    is_distributed, is_main, hardware, peak_flops, replication_note, has_ema = False, True, "no device", 1e12, "", True

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        self.__config, self.__batch_size = config, recipe.batch_size
        self.__folder, self.__learning_rate = options["folder"], options["learning_rate"]
        self.__step = 0

    @property
    def config(self) -> ViTConfig:
        return self.__config

    @property
    def batch_rows(self) -> np.ndarray:
        return np.arange(self.__batch_size)

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.__step += 1
        return {"loss": 1.0, "accuracy": 0.5, "grad_norm": 1.0, "lr": float(self.__learning_rate(self.__step))}

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        PendingArray.started += not raw
        outputs = np.eye(self.__config.num_classes, dtype=np.float32)[batch.targets * (not raw)]
        return EvalOutput(*map(PendingArray, (outputs, np.ones(len(outputs), np.float32), batch.readable)))

    def attention_maps(self, images: np.ndarray) -> np.ndarray:
        tokens = self.__config.num_tokens
        return np.full((len(images), self.__config.num_heads, tokens, tokens), 1 / tokens, np.float32)

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        parity.write(weights(self.__config, 2 * self.__step + raw), path, "jax", force=True)

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        folder = self.__folder / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new.json").write_text(json.dumps(loop_state.to_json()))
        (folder / "new.json").replace(folder / "state.json")

    def restore_checkpoint(
        self, step: int | None = None, *, check: CheckpointCheck | None = None
    ) -> RestoredCheckpoint | None:
        steps = [int(path.name) for path in self.__folder.glob("*")]
        if not steps or step not in (None, *steps):
            return None
        self.__step = max(steps) if step is None else step
        saved = json.loads((self.__folder / str(self.__step) / "state.json").read_text())
        state = LoopState.from_json(saved, "accuracy")
        if check is not None:
            check(self.__step, state)
        return RestoredCheckpoint(self.__step, state)

    def profile(self, folder: Path | None) -> None:
        raise AssertionError("no recipe of these tests profiles")

    def adopt(self, state: TrainingState, loop_state: LoopState, folder: Path) -> None:
        raise AssertionError("no run of these tests is another trainer's")

    def synchronize(self) -> None:
        pass

    def from_main(self, value: Any) -> Any:
        return value

    def should_stop(self) -> bool:
        return False

    def close(self) -> None:
        pass


def run_training(recipe: Recipe, make_engine: Any = FakeEngine) -> int:
    return train(Request("test", recipe, open_dataset(recipe.data, recipe.held_out), "python -m train.fake"), make_engine)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without their times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def weight_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("*.safetensors")}


def test_the_fake_engine_has_the_members_of_the_protocol_and_no_others() -> None:
    members = {name for name in vars(Engine) if not name.startswith("_")}
    assert {name for name in vars(FakeEngine) if not name.startswith("_")} == members


def test_an_engine_with_the_members_of_the_protocol_trains_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "run"))
    assert run_training(replace(recipe, epochs="6steps")) == 0
    printed = capsys.readouterr().out
    assert "no device" in printed and "best" in printed
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {each["set"]: each["accuracy"] for each in records if each["set"] != "train"}
    assert scores["held_out"] == 1.0 and scores["held_out_raw"] < 0.2
    assert {"weights.safetensors", "best_raw.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert run_training(recipe) == 0
    assert "resuming from step 6 of 6" in capsys.readouterr().out


def test_evaluation_does_not_wait_for_each_batch(tmp_path: Path) -> None:
    PendingArray.started, PendingArray.started_at_wait[:] = 0, []
    assert run_training(replace(RECIPE, run=str(tmp_path / "run"), eval_every="6steps", batch_size=32)) == 0
    batches = -(-len(open_dataset("digits").held_out) // 32)
    assert PendingArray.started == batches > METRICS_DELAY + 1
    assert PendingArray.started_at_wait[0] == METRICS_DELAY + 1 and PendingArray.started_at_wait[-1] == batches


class Declining(FakeEngine):
    """An engine whose second evaluation is the best: 5 of 10 classes are right, then 9, then 8, 7, ..."""

    right = (5, 9, 8, 7, 9, 8, 7, 10)
    has_ema = False

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        super().__init__(config, recipe, **options)
        self.step_number = 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.step_number += 1
        return super().step(batch)

    def restore_checkpoint(self, step: int | None = None, **options: Any) -> RestoredCheckpoint | None:
        restored = super().restore_checkpoint(step, **options)
        self.step_number = restored[0] if restored else 0
        return restored

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        found = super().evaluate(batch)
        wrong = batch.targets >= self.right[self.step_number - 1]
        outputs = np.where(wrong[:, None], np.roll(found.outputs.array, 1, axis=1), found.outputs.array)  # type: ignore[union-attr]
        return found._replace(outputs=outputs)


EVERY_STEP = replace(RECIPE, epochs="8steps", eval_every="1steps", save_every="100steps")


def test_a_run_stops_after_as_many_evaluations_without_a_better_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(EVERY_STEP, run=str(tmp_path / "run"), patience=3)
    assert run_training(recipe, Declining) == 0
    printed = capsys.readouterr().out
    assert re.search(r"finished +5 of 8 steps", printed)
    assert "3 evaluations without a better accuracy (--patience)" in printed
    assert re.search(f"to resume +python -m train.fake --run {tmp_path / 'run'} --patience 0\n", printed)
    assert [each["step"] for each in records(tmp_path / "run") if each["set"] == "held_out"] == [1, 2, 3, 4, 5]


def test_a_run_that_has_stopped_early_stays_so_until_it_gets_more_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(EVERY_STEP, run=str(tmp_path / "run"), patience=3)
    run_training(recipe, Declining)
    before = records(tmp_path / "run")
    assert run_training(recipe, Declining) == 0 and records(tmp_path / "run") == before
    assert run_training(replace(recipe, patience=5), Declining) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished") == 3 and "5 evaluations without a better accuracy" in printed
    assert records(tmp_path / "run")[-1]["step"] == 7
    assert run_training(replace(recipe, patience=0), Declining) == 0
    assert re.search(r"finished +8 of 8 steps", capsys.readouterr().out)


def test_a_run_that_has_stopped_early_resumes_with_another_recipe(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--model.changes", "depth=1", "width=16", "mlp_dim=16", "--epochs", "8steps", "--eval-every", "1steps"]
    assert command(*SMALL, *flags, "--patience", "2", "--run", run, make_engine=Declining) == 0
    assert records(run)[-1]["step"] == 4
    assert command("--resume", run, "--optimizer.lr", "1e-5", make_engine=Declining) == 0
    assert records(run)[-1]["step"] == 6  # two more evaluations
    for flag in ("--run", "--resume"):  # without a change
        assert command(flag, run, make_engine=Declining) == 0
        assert records(run)[-1]["step"] == 6


def test_the_last_evaluation_is_no_early_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_training(replace(EVERY_STEP, run=str(tmp_path / "run"), epochs="5steps", patience=3), Declining) == 0
    assert "stopped early" not in capsys.readouterr().out


class Exploding(Declining):
    """An engine whose outputs are NaN from the third evaluation on, for which `right` counts."""

    right = (1, 1, 10, 10)

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        found = super().evaluate(batch)
        return found._replace(losses=np.full(len(batch.rows), np.nan)) if self.step_number > 2 else found


def test_all_processes_decide_by_the_best_weights_that_the_main_one_reads(tmp_path: Path) -> None:
    """A network file system may show another process a folder without them: it does not restore them alone."""
    engine: Any = SimpleNamespace(is_main=False, from_main=lambda value: "sum")  # and nothing that restores
    unused: Any = None
    files = WeightFiles(engine, unused, unused, {"best.safetensors": {"step": 2, "sha256": "sum"}})
    assert files.restore_best(tmp_path / "best.safetensors", 4, is_newest=False, is_best=lambda state: False)


class WithOthers(FakeEngine):
    """One of several processes, another of which could not read an image."""

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        found = super().evaluate(batch)
        return found._replace(readable=batch.readable & (batch.rows != 1))


def test_held_out_images_that_another_process_could_not_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_training(replace(RECIPE, run=str(tmp_path / "run")), WithOthers) == 0
    assert re.search(r"\nunreadable +1 image: ", capsys.readouterr().out)


def test_an_evaluation_whose_loss_is_not_finite_is_never_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(EVERY_STEP, run=str(tmp_path / "run"), epochs="4steps")
    assert run_training(recipe, Exploding) == 1
    printed = capsys.readouterr().out
    assert printed.count("the held-out loss is nan: these weights are not the best, whatever their accuracy") == 2
    state = LoopState.from_json(json.loads((tmp_path / "run/checkpoints/4/state.json").read_text()), "accuracy")
    assert state is not None and state.scores.best["accuracy"] < 0.2 and state.scores.last["accuracy"] == 1
    assert state.evaluations_since_best == 3 and checkpoint_rank("classes", state) is None


@pytest.mark.parametrize("patience", [0, 2])
def test_a_run_that_ends_with_a_held_out_loss_that_is_not_finite_has_diverged(
    patience: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(EVERY_STEP, run=str(tmp_path / "run"), epochs="4steps", patience=patience)
    for _ in range(2):  # the second time it resumes at its end
        assert run_training(recipe, Exploding) == 1
        printed = capsys.readouterr()
        assert "finished" not in printed.out
        assert printed.err == (
            f"error: the held-out loss is nan after step {3 if patience else 4}, the last one, so the weights in "
            f"{tmp_path / 'run' / 'weights.safetensors'} are broken: start again with a lower --optimizer.lr, or --init "
            f"{tmp_path / 'run'} from its best weights\n"
        )


def test_an_undefined_metric_selects_no_weights_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.loop.loop.compute_metrics", lambda *_: {"accuracy": math.nan})
    assert run_training(replace(EVERY_STEP, run=str(tmp_path / "run"), patience=2)) == 0
    assert re.search(r"finished +8 of 8 steps", capsys.readouterr().out)
    assert not [*(tmp_path / "run").glob("best*")]
    state = LoopState.from_json(json.loads((tmp_path / "run/checkpoints/8/state.json").read_text()), "accuracy")
    assert state is not None and state.scores.best == state.scores_raw.best == {} and state.scores.last
    assert state.evaluations_since_best == 0 and checkpoint_rank("classes", state) is None


class Rising(Declining):
    """An engine whose loss is the number of the step; that of step 18 and later ones is NaN."""

    right = (5,) * 20

    def step(self, batch: Batch) -> Mapping[str, float]:
        metrics = super().step(batch)
        return {**metrics, "loss": self.step_number if self.step_number < 18 else math.nan}


def test_the_line_of_an_evaluation_has_the_training_metrics_since_the_last_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "run"), epochs="19steps", save_every="19steps", non_finite="skip")
    assert run_training(replace(recipe, log_every=6, eval_every="3steps"), Rising) == 0
    printed = capsys.readouterr().out
    means = {"3": "2.0000", "6": "3.5000", "9": "8.0000", "12": "9.5000", "15": "14.0000", "18": "15.0000"}
    assert dict(re.findall(r"step +(\d+)/19  loss (\S+) ", printed)) == means
    assert re.search(r"step 19/19  \| held out", printed)  # no step since the record counts


def test_a_newer_checkpoint_of_another_run_is_named_as_such(tmp_path: Path) -> None:
    """More --epochs, which its number of steps would call for, would not help."""
    run, other = tmp_path / "run", tmp_path / "other"
    assert run_training(replace(RECIPE, run=str(run))) == 0
    assert run_training(replace(RECIPE, run=str(other), epochs="9steps")) == 0
    shutil.copytree(other / "checkpoints" / "9", run / "checkpoints" / "9")
    with pytest.raises(InputError, match=f"the checkpoint of step 9 in {run / 'checkpoints'} is another run's "):
        run_training(replace(RECIPE, run=str(run)))


class Steady(FakeEngine):
    """An engine whose steps take 100 ms of a clock after a first one of 5 s, and whose evaluations take 1 s.

    The start of a profile takes 3 s, and its end too.
    A synchronous step has ended when `step` returns.  Otherwise, reading its metrics waits for its end.
    """

    is_synchronous = True
    now = 0.0

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        super().__init__(config, recipe, **options)
        self.step_seconds, self.device_free = 5.0, Steady.now

    def step(self, batch: Batch) -> Mapping[str, Any]:
        ends = self.device_free = max(Steady.now, self.device_free) + self.step_seconds
        self.step_seconds = 0.1
        if self.is_synchronous:
            Steady.now = ends
        return {name: Late(value, ends) for name, value in super().step(batch).items()}

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        Steady.now += 1.0
        return super().evaluate(batch, raw=raw)

    def profile(self, folder: Path | None) -> None:
        Steady.now += 3.0


class Late:
    """A metric that is known when the clock of `Steady` has reached a time."""

    def __init__(self, value: float, at: float) -> None:
        self.value, self.at = value, at

    def __float__(self) -> float:
        Steady.now = max(Steady.now, self.at)
        return self.value


@pytest.mark.parametrize("is_synchronous", [True, False])
@pytest.mark.parametrize(
    ("steps", "eval_every", "profile"), [(5, 2, None), (30, 15, None), (9, 9, (1, 2)), (9, 9, (3, 5)), (9, 9, (4, 8))]
)
def test_the_throughput_is_true_whether_or_not_steps_are_asynchronous(
    steps: int,
    eval_every: int,
    profile: tuple[int, int] | None,
    is_synchronous: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Steady, "is_synchronous", is_synchronous)
    monkeypatch.setattr(Steady, "now", 0.0)
    monkeypatch.setattr("train.loop.progress.time", SimpleNamespace(monotonic=lambda: Steady.now))
    epochs, every = f"{steps}steps", f"{eval_every}steps"
    recipe = replace(RECIPE, run=str(tmp_path / "run"), epochs=epochs, eval_every=every, save_every=epochs, batch_size=32)
    recipe = replace(recipe, profile=profile)
    assert run_training(recipe, Steady) == 0
    rates = [int(rate) for rate in re.findall(r" (\d+) images/s", capsys.readouterr().out)]
    assert len(rates) == -(-steps // eval_every)
    assert rates == pytest.approx([320] * len(rates), rel=0.01)


def test_the_share_of_peak_counts_the_tokens_that_patch_dropout_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class HalfOfPeak(Steady):
        def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
            super().__init__(config, recipe, **options)
            self.peak_flops = 2 * 640 * 3 * training_flops(config)

    monkeypatch.setattr(Steady, "now", 0.0)
    monkeypatch.setattr("train.loop.progress.time", SimpleNamespace(monotonic=lambda: Steady.now))
    model = replace(RECIPE.model, changes=(*RECIPE.model.changes, "regularisation.patch_drop=0.5"))
    assert run_training(replace(RECIPE, run=str(tmp_path / "run"), model=model), HalfOfPeak) == 0
    assert re.findall(r"(\S+) images/s  (\S+) of peak", capsys.readouterr().out) == [("640", "50%")] * 2


def test_the_share_of_peak_counts_the_forward_pass_of_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = vit_spec.get("vit_ti16", image_size=8, patch_size=2, in_channels=1, depth=4, num_classes=10)
    parity.write(weights(teacher, 0), tmp_path / "teacher.safetensors", "jax")

    class HalfOfPeak(Steady):
        def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
            super().__init__(config, recipe, **options)
            assert vit_spec.flops(teacher) > 100 * training_flops(config)
            self.peak_flops = 2 * 640 * (3 * training_flops(config) + vit_spec.flops(teacher))

    monkeypatch.setattr(Steady, "now", 0.0)
    monkeypatch.setattr("train.loop.progress.time", SimpleNamespace(monotonic=lambda: Steady.now))
    recipe = replace(RECIPE, run=str(tmp_path / "run"), teacher=str(tmp_path / "teacher.safetensors"))
    assert run_training(recipe, HalfOfPeak) == 0
    assert re.findall(r"(\S+) images/s  (\S+) of peak", capsys.readouterr().out) == [("640", "50%")] * 2


def test_frozen_parameters_leave_out_the_share_of_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "run"), optimizer=Optimizer(freeze=("blocks.*",)))
    assert run_training(recipe) == 0
    printed = capsys.readouterr().out
    assert printed.count(" images/s  ") == 2 and "of peak" not in printed


class Broken(FakeEngine):
    """An engine whose loss is NaN at the steps `broken`, from 1."""

    broken: ClassVar[Collection[int]] = range(2, 100)
    num_steps = 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.num_steps += 1
        return {**super().step(batch), "loss": math.nan if self.num_steps in self.broken else 1.0}


def test_a_run_stops_when_many_steps_in_a_row_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "run"), epochs="60steps", eval_every="1steps", non_finite="skip")
    assert run_training(recipe, Broken) == 1
    printed = capsys.readouterr()
    assert printed.out.count("the step is skipped") == MAX_SKIPPED
    assert printed.err.startswith(f"error: loss is nan at step {MAX_SKIPPED + 1} ") and printed.err.count("\n") == 1
    assert f"{MAX_SKIPPED} steps in a row are skipped, so the weights are probably the cause: start again" in printed.err
    assert f"or --init {tmp_path / 'run'} from its best weights" in printed.err


def test_bad_batches_between_good_ones_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "broken", {*range(2, 100)} - {MAX_SKIPPED})
    epochs = f"{2 * MAX_SKIPPED - 1}steps"
    recipe = replace(RECIPE, run=str(tmp_path / "run"), epochs=epochs, eval_every=epochs, non_finite="skip")
    assert run_training(recipe, Broken) == 0


def test_a_run_that_resumes_counts_the_steps_skipped_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Resuming(Broken):
        def restore_checkpoint(self, step: int | None = None, **options: Any) -> RestoredCheckpoint | None:
            restored = super().restore_checkpoint(step, **options)
            self.num_steps = restored.step if restored else 0
            return restored

    recipe = replace(RECIPE, run=str(tmp_path / "run"), epochs="12steps", eval_every="12steps", non_finite="skip")
    assert run_training(recipe, Resuming) == 0
    assert re.search(r"skipped +11 of the steps, the last 11 among them: ", capsys.readouterr().out)
    assert command("--resume", recipe.run, "--epochs", "60steps", make_engine=Resuming) == 1
    assert capsys.readouterr().err.startswith(f"error: loss is nan at step {MAX_SKIPPED + 1} ")


def test_a_loss_that_is_not_finite_names_the_weights_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may be broken: a loss that is not finite can follow from the update before."""
    assert run_training(replace(RECIPE, run=str(tmp_path / "run")), Broken) == 1
    where = tmp_path / "run" / "weights.safetensors"
    assert f"lower --optimizer.lr; the weights before this step are in {where}" in capsys.readouterr().err


# Profile --------------------------------------------------------------------------------------------------------------


class Profiled(Declining):
    """An engine that records when metrics are read and when a profile starts and stops."""

    recorded: ClassVar[list[str]] = []

    def step(self, batch: Batch) -> Mapping[str, Any]:
        metrics, number = super().step(batch), self.step_number

        class Loss:
            def __float__(self) -> float:
                Profiled.recorded.append(f"step {number} is finished")
                return 1.0

        self.recorded.append(f"step {number} is started")
        return {**metrics, "loss": Loss()}

    def profile(self, folder: Path | None) -> None:
        self.recorded.append("stop" if folder is None else "start")


@pytest.fixture
def profile_recipe(tmp_path: Path) -> Recipe:
    Profiled.recorded.clear()
    return replace(RECIPE, run=str(tmp_path / "run"), epochs="8steps", eval_every="8steps", save_every="8steps")


def profiled_steps() -> list[str]:
    """Return what was recorded from the start of the profile until its end."""
    return Profiled.recorded[Profiled.recorded.index("start") + 1 : Profiled.recorded.index("stop")]


def test_a_profile_has_its_steps_and_no_part_of_others(profile_recipe: Recipe) -> None:
    assert run_training(replace(profile_recipe, profile=(4, 5)), Profiled) == 0
    assert profiled_steps() == [f"step {number} is {what}" for what in ("started", "finished") for number in (4, 5)]


def test_a_resumed_run_profiles_the_steps_that_are_left(profile_recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_training(replace(profile_recipe, epochs="4steps"), Profiled) == 0
    source = open_dataset("digits")
    for steps in ((3, 6), (2, 7)):
        Profiled.recorded.clear()
        recipe = replace(profile_recipe, profile=steps)
        assert train(Request("test", recipe, source, "python -m train.fake", may_change=True), Profiled) == 0
        if steps == (3, 6):
            assert [each for each in profiled_steps() if "started" in each] == ["step 5 is started", "step 6 is started"]
    assert not Profiled.recorded
    assert "--profile 2 7: the run has done these steps already, and can profile only later" in capsys.readouterr().out


def test_a_run_that_ends_before_the_steps_to_profile_says_so(
    profile_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(profile_recipe, eval_every="1steps", patience=2, profile=(6, 7))
    assert run_training(recipe, Profiled) == 0
    assert re.search("not profiled +the run ended at step 4, before those of --profile 6 7", capsys.readouterr().out)


# Resuming with changes ------------------------------------------------------------------------------------------------

SMALL = ["--config", "tiny", "--epochs", "4steps", "--eval-every", "2steps", "--save-every", "2steps", "--no-tensorboard"]


def command(*arguments: Any, make_engine: Any = FakeEngine) -> int:
    """Run the command line of a trainer with an engine that computes nothing."""
    return main("train.fake", lambda request: train(request, make_engine), [str(each) for each in arguments])


@pytest.fixture(scope="module")
def original_small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("small") / "run"
    assert command(*SMALL, "--model.changes", "depth=1", "width=16", "mlp_dim=16", "--run", run) == 0
    return run


@pytest.fixture
def small_run(original_small_run: Path, tmp_path: Path) -> Path:
    """A finished run of four steps, which the test may change."""
    run = shutil.copytree(original_small_run, tmp_path / "run")
    edit_config(run, {"recipe.run": str(run)})
    return run


def config_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    return found


def test_a_run_resumes_with_its_own_recipe(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, saved = records(small_run), config_of(small_run)
    for flags in (["--run", small_run], ["--resume", small_run], ["--run", small_run, "--model.changes", "depth=1"]):
        assert command(*flags) == 0
        printed = capsys.readouterr().out
        assert "recipe         tiny, seed 0" in printed and "4 of 4 steps" in printed and "changed" not in printed
    assert records(small_run) == before and config_of(small_run) == saved and "lineage" not in saved


def test_the_table_at_the_start_says_that_a_folder_without_a_run_gets_the_default_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model.changes", "depth=1", "width=16", "num_heads=1", "mlp_dim=16", "--epochs", "1steps"]
    assert command(*flags, "--run", tmp_path / "run", "--dry-run") == 0
    line = f"{tmp_path / 'run'} holds no run (there is no config.json of one): this is a new run of vit_s16, the default"
    out, err = capsys.readouterr()
    assert f"assumed        {line}" in out and "holds no run" not in err
    assert command(*flags, "--config", "vit_s16", "--run", tmp_path / "run", "--dry-run") == 0
    assert "holds no run" not in capsys.readouterr().out
    assert command(*flags, "--run", tmp_path / "run", "--no-such-flag") == 2
    assert "holds no run" not in "".join(capsys.readouterr())


def test_a_dry_run_refuses_a_folder_that_the_run_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    for name, message in {
        "file": "cannot make the folder",
        "file/run": "cannot make the folder",
        "photos": "exists already and holds no run",
    }.items():
        assert command(*SMALL, "--run", tmp_path / name, "--dry-run") == 2
        assert message in capsys.readouterr().err
    model = ["--model.changes", "depth=1", "width=16", "mlp_dim=16"]
    assert command(*SMALL, *model, "--run", tmp_path / "new" / "run", "--dry-run") == 0
    assert not (tmp_path / "new").exists()


def test_a_dry_run_refuses_the_folder_of_another_run(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()}
    assert command("--run", small_run, "--seed", "1", "--dry-run") == 2
    assert f"{small_run} holds another run: its recipe.seed is 0" in capsys.readouterr().err
    assert command("--run", small_run, "--dry-run") == 0
    assert command("--resume", small_run, "--epochs", "8steps", "--dry-run") == 0
    assert {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()} == before


def test_a_dry_run_of_several_processes_is_refused_before_its_folder_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Distributed(FakeEngine):
        is_distributed = True

    (tmp_path / "file").touch()
    assert command(*SMALL, "--run", tmp_path / "file" / "run", "--dry-run", make_engine=Distributed) == 2
    assert "--dry-run runs in one process" in capsys.readouterr().err


def test_changes_of_a_resumed_run_are_recorded_and_shown(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--resume", small_run, "--epochs", "8steps", "--augment.mixup", "0.3") == 0
    line = "changed        epochs from 4steps to 8steps at step 4; augment.mixup from 0 to 0.3 at step 4\n"
    printed = capsys.readouterr().out
    assert line in printed and "8 of 8 steps" in printed
    assert config_of(small_run)["lineage"] == [
        {"step": 4, "changes": {"epochs": ["4steps", "8steps"], "augment.mixup": [0.0, 0.3]}}
    ]
    assert command("--run", small_run) == 0
    assert line in capsys.readouterr().out
    assert command("--resume", small_run, "--epochs", "9steps", "--optimizer.lr", "1e-5") == 0
    assert [each["step"] for each in config_of(small_run)["lineage"]] == [4, 8]
    assert records(small_run)[-1]["step"] == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "{run}", "--ema", "0.9"], "its recipe.ema is 0.0, and here it is 0.9"),
        (["--resume", "{run}", "--ema", "0.9"], "; --init {run} starts a new run from its weights"),
        (["--resume", "{run}", "--model.changes", "depth=2"], "its recipe.model.changes lacks 'depth=2'; give the same"),
        (["--resume", "{run}", "--optimizer.name", "sgd"], "its recipe.optimizer.name is adamw, and here it is sgd"),
        (["--resume", "{run}", "--optimizer.beta1", "0.5"], "its recipe.optimizer.beta1 is 0.9, and here it is 0.5"),
        (["--resume", "{run}", "--optimizer.beta2", "0.5"], "its recipe.optimizer.beta2 is 0.999, and here it is 0.5"),
        (["--resume", "{run}", "--seed", "1"], "its recipe.seed is 0"),
        (["--resume", "{run}", "--augment.share", "0.9"], "its recipe.augment.share is"),
        (["--run", "{run}", "--epochs", "8steps"], "; --resume {run} accepts this change"),
        (["--resume", "{run}", "--epochs", "3steps"], "--epochs 3steps are 3 steps, and the run has done 4: give more"),
        (["--resume", "{run}", "--epochs", "0.1"], "--epochs 0.1 are 2 steps, and the run has done 4: give more"),
        (["--resume", "{run}", "--config", "tiny"], "leave --config out"),
        (["--resume", "{run}", "--run", "other"], "leave --run out"),
        (["--resume", "nowhere"], "nowhere holds no run (there is no config.json of one): check the path"),
        (["--resume", "{run}s"], "{run}s holds no run (there is no config.json of one); did you mean 'run'?"),
        (["--resume", "{run}", "--epoch", "9"], "did you mean '--epochs'?"),
        (["--resume", "{run}", "--optimizer.lr", "-1"], "--optimizer.lr is -1: give a number from 0 to 1e30"),
    ],
)
def test_other_changes_of_a_run_are_refused_and_change_nothing(
    flags: list[str], message: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()}
    assert command(*(flag.format(run=small_run) for flag in flags)) == 2
    out, printed = capsys.readouterr()
    assert message.format(run=small_run) in printed and printed.count("\n") == 1 and not out
    after = {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()}
    assert after == before


class Recording(FakeEngine):
    """An engine that records the images of all batches, by their rows."""

    rows: ClassVar[list[int]] = []

    def step(self, batch: Batch) -> Mapping[str, float]:
        metrics = super().step(batch)
        self.rows.extend(batch.rows.tolist())
        return metrics


def test_a_resumed_run_with_another_batch_size_takes_the_images_that_follow(tmp_path: Path) -> None:
    def images(*runs: list[str]) -> list[int]:
        Recording.rows.clear()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for flags in runs:
            where = "--resume" if flags is not runs[0] else "--run"
            more = SMALL if where == "--run" else []
            assert command(*more, where, folder, *flags, make_engine=Recording) == 0
        return list(Recording.rows)

    whole = images(["--batch-size", "32", "--epochs", "640examples"])
    halves = images(
        ["--batch-size", "64", "--epochs", "256examples"],
        ["--batch-size", "32", "--epochs", "384examples"],
        ["--batch-size", "128", "--epochs", "640examples"],
    )
    assert halves == whole and len(whole) == 640


def photos(folder: Path) -> list[Path]:
    """Write 12 images of two classes, in turn, whose names are not UTF-8."""
    paths = [folder / "ab"[i % 2] / os.fsdecode(b"\xe9 %d.png" % i) for i in range(12)]
    for i, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 20 * i).save(path)
    return paths


def test_one_answer_for_all_images_is_scored_on_those_that_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in photos(tmp_path / "photos")[1::2]:
        path.write_bytes(b"")
    data = ["--data", f"folder:{tmp_path / 'photos'}", "--corrupt", "skip", "--held-out", "0.5"]
    assert command(*SMALL, *data, "--run", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "one answer for all images: 100.0%" in printed and "6 images: " in printed


def test_a_run_resumes_with_images_whose_names_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos")[-1].write_bytes(b"")
    data = ["--data", f"folder:{tmp_path / 'photos'}", "--corrupt", "skip", "--run", tmp_path / "run"]
    for changes in ([], ["--keep", "3"]):
        assert command(*SMALL, *data, *changes) == 0
        printed = capsys.readouterr().out
        assert f"unreadable         1 image: {tmp_path}/photos/b/\\udce9 11.png" in printed
    assert "resuming from step 4 of 4" in printed
    states = [path.read_text() for path in (tmp_path / "run" / "checkpoints").rglob("state.json")]
    assert states and all(bounded_json.parse_object(state.encode(), allow_nan=True) for state in states)


class Damaged(Recording):
    """An engine for which the newest checkpoint is damaged."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.folder = options["folder"]

    def restore_checkpoint(self, step: int | None = None, **options: Any) -> RestoredCheckpoint | None:
        if step is None:
            shutil.rmtree(max(self.folder.iterdir(), key=lambda path: int(path.name)))
        return super().restore_checkpoint(step, **options)


def test_a_change_begins_at_the_checkpoint_before_a_damaged_one(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint, of step 4, is damaged, and that of step 2 is restored."""
    change = ["--resume", small_run, "--batch-size", "32", "--epochs", "256examples"]
    assert command(*change, make_engine=Damaged) == 2
    printed = capsys.readouterr().err
    assert "the batch size has changed at step 4, whose checkpoint is damaged: give the same command again" in printed
    assert "lineage" not in config_of(small_run)
    Recording.rows.clear()
    assert command(*change, make_engine=Recording) == 0
    assert len(Recording.rows) == 256 - 2 * 64 and config_of(small_run)["lineage"][0]["step"] == 2


def test_a_change_that_is_lost_with_its_checkpoint_begins_earlier(small_run: Path) -> None:
    assert command("--resume", small_run, "--epochs", "6steps", "--optimizer.lr", "1e-5", make_engine=Damaged) == 0
    assert [each["step"] for each in config_of(small_run)["lineage"]] == [2]


@pytest.mark.parametrize(
    "lineage", [3, [3], [{"step": "x", "changes": {}}], [{"step": 1, "changes": {"batch_size": [1, "x"]}}]]
)
def test_a_damaged_lineage_is_refused_in_a_line(lineage: Any, small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(small_run) | {"lineage": lineage}
    (small_run / "config.json").write_text(json.dumps(config))
    assert command("--resume", small_run) == 2
    assert "has a lineage that no run writes" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [{"epochs": [1]}, {"colour": 1}, {"model": 3}, {"optimizer": {"name": 1, "lr": "x"}}])
def test_a_damaged_recipe_of_a_run_is_refused_in_a_line(
    damage: dict[str, Any], small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(small_run)
    config["recipe"] |= damage
    (small_run / "config.json").write_text(json.dumps(config))
    assert command("--resume", small_run) == 2
    printed = capsys.readouterr().err
    assert f"error: the recipe in {small_run / 'config.json'} cannot be read: " in printed and printed.count("\n") == 1
    assert f"put the file back as it was, or give --run a new folder and --init {small_run} to start" in printed


def test_a_recipe_of_a_run_that_is_no_object_is_refused_in_a_line(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_run / "config.json").write_text(json.dumps(config_of(small_run) | {"recipe": [1]}))
    assert command(*SMALL, "--run", small_run) == 2
    assert re.fullmatch("error: .* holds another run: its recipe.* not there, .*\n", capsys.readouterr().err)
    assert command("--resume", small_run) == 2
    assert "cannot be read: recipe is not an object with names and values" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--run", "--resume"])
def test_a_config_that_is_no_json_is_refused_in_a_line(
    flag: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_run / "config.json").write_text("")
    assert command(flag, small_run) == 2
    printed = capsys.readouterr().err
    assert "config.json cannot be read (not JSON: " in printed and printed.count("\n") == 1
    assert f"put it back as it was; or move it away, and give --run a new folder and --init {small_run} to" in printed


def test_a_run_without_clipping_resumes(tmp_path: Path) -> None:
    run = tmp_path / "unclipped"
    assert command(*SMALL, "--optimizer.clip", "inf", "--run", run) == 0
    assert config_of(run)["recipe"]["optimizer"]["clip"] == "inf"
    assert command("--resume", run, "--epochs", "6steps") == 0
    edit_config(run, {"recipe.optimizer.clip": math.inf})  # as older versions wrote it
    assert command("--resume", run, "--epochs", "6steps") == 0
    assert list(config_of(run)["lineage"][0]["changes"]) == ["epochs"]


def edit_config(run: Path, changes: dict[str, Any]) -> None:
    """Change fields of config.json, given their dotted names."""
    config = config_of(run)
    for name, value in changes.items():
        *parts, leaf = name.split(".")
        reduce(operator.getitem, parts, config)[leaf] = value
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe.optimizer.name": "lamb"}, "its recipe.optimizer.name is adamw, and here it is lamb"),
        ({"recipe.seed": 4}, "its recipe.seed is 0, and here it is 4"),
        ({"lineage": [{"step": 2, "changes": {"dtype": ["bfloat16", "float32"]}}]}, "its lineage is [], and here it is [{"),
    ],
)
def test_a_config_that_was_edited_after_its_checkpoint_is_refused(
    change: dict[str, Any], message: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(small_run, change)
    before = {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()}
    for flags in (["--run", small_run], ["--resume", small_run, "--epochs", "8steps"]):
        assert command(*flags) == 2
        printed = capsys.readouterr().err
        where = f"the checkpoint of step 4 in {small_run / 'checkpoints'} has other settings than config.json: {message}"
        assert where in printed and "put config.json back as it was, or move that checkpoint away" in printed
    assert {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_and_a_config_from_before_and_after_a_change_are_refused(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, fork = config_of(small_run), small_run.parent / "fork"
    shutil.copytree(small_run, fork)
    assert command("--resume", fork, "--epochs", "6steps", "--optimizer.lr", "0.25") == 0
    shutil.copytree(fork / "checkpoints" / "6", small_run / "checkpoints" / "6")
    (fork / "config.json").write_text(json.dumps(before))
    for path in (fork, small_run):
        assert command("--resume", path, "--epochs", "8steps", "--optimizer.lr", "0.5") == 2
        printed = capsys.readouterr().err
        assert "of step 6" in printed and "its recipe.optimizer.lr is 0.25, and here it is 0.0" in printed
        assert "and recipe.epochs, lineage differ too" in printed


def test_a_run_resumes_from_the_checkpoint_before_a_change(small_run: Path) -> None:
    """A process that ends before it saves a checkpoint leaves a config.json with changes that no checkpoint has."""

    class Ending(FakeEngine):
        def step(self, batch: Batch) -> Mapping[str, float]:
            raise InputError("ends before its first step")

    for epochs in ("6steps", "8steps"):
        assert command("--resume", small_run, "--epochs", epochs, make_engine=Ending) == 2
    assert [each["step"] for each in config_of(small_run)["lineage"]] == [4, 4]
    assert command("--run", small_run) == 0
    assert command("--run", small_run, "--workers", "1", "--keep", "3") == 0
    assert command("--resume", small_run, "--epochs", "9steps") == 0
    assert records(small_run)[-1]["step"] == 9


def test_a_checkpoint_of_a_version_that_recorded_no_settings_is_resumed(small_run: Path) -> None:
    path = small_run / "checkpoints" / "4" / "state.json"
    state = json.loads(path.read_text())
    del state["config"]
    path.write_text(json.dumps(state))
    edit_config(small_run, {"recipe.seed": 4})
    assert command("--resume", small_run, "--epochs", "6steps") == 0


@pytest.mark.parametrize(
    "change",
    [
        None,
        [],
        {"skipped": "0"},
        {"skipped": True},
        {"skipped_in_a_row": None},
        {"best": {"loss": 1.0}},
        {"seconds": math.nan},
        {"window": [1]},
        {"window": None},
        {"unread": [1]},
        {"best_files": {"best.safetensors": {"step": 1}}},
        {"config": {"lineage": 1}},
    ],
)
def test_a_loop_state_that_no_run_writes_is_refused(
    change: Any, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_run / "checkpoints" / "4" / "state.json"
    state = json.loads(path.read_text()) | change if isinstance(change, dict) else change
    path.write_text(json.dumps(state))
    assert command("--resume", small_run) == 2
    assert f"the checkpoint of step 4 in {path.parents[1]} has metadata that no run writes" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["last", "best", "looked", "window", "mean", "unread", "skipped", "seconds"])
def test_a_loop_state_without_a_key_that_every_version_writes_is_refused(
    key: str, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_run / "checkpoints" / "4" / "state.json"
    state = json.loads(path.read_text())
    del state[key]
    path.write_text(json.dumps(state))
    assert command("--resume", small_run) == 2
    assert "has metadata that no run writes" in capsys.readouterr().err


def test_checkpoints_keep_their_keys_and_those_of_older_versions_are_read() -> None:
    """The keys are those on disk: a renamed one would make every older checkpoint unreadable."""
    first_version = {
        "last": {"accuracy": 0.5},
        "looked": True,
        "best": {"accuracy": 0.75, "loss": math.inf},
        "window": [{"loss": 1.0}],
        "mean": {"loss": 2.0},
        "unread": ["a.png"],
        "skipped": 3,
        "seconds": 1.5,
    }
    added = {"run": "", "last_raw": {}, "best_raw": {}, "since_best": 0, "best_files": {}, "records": 0}
    added |= {"skipped_in_a_row": 0, "config": {}}
    state = LoopState.from_json(first_version, "accuracy")
    assert state is not None and state.to_json() == first_version | added
    newest = first_version | {
        "run": "ab",
        "last_raw": {"accuracy": 0.25},
        "best_raw": {"accuracy": 0.3},
        "since_best": 2,
        "best_files": {"best.safetensors": RECORDED},
        "records": 9,
        "skipped_in_a_row": 2,
        "config": {"recipe": {"epochs": 3}, "lineage": []},
    }
    state = LoopState.from_json(newest, "accuracy")
    assert state is not None and state.to_json() == newest


def test_a_run_that_cannot_resume_keeps_its_recipe(small_run: Path) -> None:
    class Refusing(FakeEngine):
        def restore_checkpoint(self, step: int | None = None, **options: Any) -> RestoredCheckpoint | None:
            raise InputError("the checkpoints are those of another trainer")

    saved = config_of(small_run)
    assert command("--resume", small_run, "--epochs", "8steps", make_engine=Refusing) == 2
    assert config_of(small_run) == saved


def test_a_run_of_an_earlier_version_has_no_name(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(small_run)
    del config["name"]
    (small_run / "config.json").write_text(json.dumps(config))
    assert command("--resume", small_run) == 0
    assert "recipe         run, seed 0" in capsys.readouterr().out


def test_the_loop_imports_neither_framework(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, tests.train.loop.test_loop as t; from dataclasses import replace\n"
        "assert t.run_training(replace(t.RECIPE, run=sys.argv[1])) == 0\n"
        "print('torch' in sys.modules, 'vit_jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout.endswith("False False\n"), done.stderr[-1000:]


# Weights after a run that ended early ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original_finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert run_training(replace(RECIPE, run=str(run))) == 0
    return run


@pytest.fixture
def finished(original_finished: Path, tmp_path: Path) -> Path:
    """A finished run of 6 steps, which the test may change.

    Its evaluations after 3 and 6 steps are equal: the first is the best.
    """
    return shutil.copytree(original_finished, tmp_path / "run")


RECORDED = {"step": 3, "sha256": "0" * 64}  # of a file of best weights


class FailingEngine(FakeEngine):
    """An engine that cannot write one file after some steps."""

    name, after, error = "", 0, OSError(errno.ENOSPC, "No space left on device")

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(batch)

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        if (path.name, self.steps) == (f"{self.name}.safetensors", self.after):
            raise self.error
        super().save_weights(path, raw=raw)


@pytest.mark.parametrize(
    ("name", "after"),
    [("best", 3), ("best_raw", 3), ("weights", 3), ("weights", 6), ("weights_raw", 3), ("weights_raw", 6)],
)
def test_after_a_failed_write_of_weights_a_resumed_run_ends_as_an_uninterrupted_one(
    name: str, after: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingEngine, "name", name)
    monkeypatch.setattr(FailingEngine, "after", after)
    recipe = replace(RECIPE, run=str(tmp_path / "failed"))
    with pytest.raises(
        InputError, match=rf"cannot write .*{name}.safetensors \(No space left on device\): make room there"
    ):
        run_training(recipe, FailingEngine)
    assert run_training(recipe) == 0
    assert weight_files(tmp_path / "failed") == weight_files(finished)
    assert records(tmp_path / "failed") == records(finished)


@pytest.mark.parametrize("remade", [False, True])
def test_a_write_into_a_run_whose_folder_is_gone_says_to_put_it_back(remade: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if remade:
        (run / "checkpoints").mkdir(parents=True)
    put_back = f"put the run's folder back (if something is at {run}, remove it first), then give the same --run to resume"
    gone = f"{run} is gone (it has no config.json): {put_back}"
    for error in (FileNotFoundError(errno.ENOENT, "No such file or directory"), InputError("no folder: create it first")):
        with pytest.raises(InputError) as found, convert_write_errors(run / "metrics.jsonl", run):
            raise error
        assert str(found.value) == f"the run's folder {gone}"
    written = CheckpointFolder(run / "checkpoints", "train.torch").write_error(IndexError("list index out of range"))
    assert str(written) == f"the run's folder {gone}"


def test_a_write_that_fails_in_a_run_whose_folder_is_there_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    with pytest.raises(InputError, match=r"metrics.jsonl \(No such file or directory\): correct that"):
        with convert_write_errors(tmp_path / "metrics.jsonl", tmp_path):
            raise missing
    error = CheckpointFolder(tmp_path / "checkpoints", "train.torch").write_error(missing)
    assert "checkpoints (No such file or directory): correct that, then" in str(error)


def test_a_full_disk_at_the_first_file_of_a_run_is_not_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.json \(No space left on device\): make room there"):
        with convert_write_errors(tmp_path / "data.json", tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")


class Moving(FakeEngine):
    """An engine whose run's folder is moved away during the step before a checkpoint; it makes the folder again."""

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        super().__init__(config, recipe, **options)
        self.run, self.step_number = options["folder"].parent, 0

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.step_number += 1
        if self.step_number == 3:
            self.run.rename(f"{self.run}-moved")
        return super().step(batch)


def test_a_run_whose_folder_is_moved_writes_no_checkpoint_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = replace(RECIPE, run=str(run), eval_every="6steps")
    with pytest.raises(InputError, match=r"is gone .*put the run's folder back .*, then give the same --run to resume$"):
        run_training(recipe, Moving)
    assert not run.exists()
    Path(f"{run}-moved").rename(run)
    assert run_training(recipe) == 0


class Replacing(Moving):
    """An engine whose run's folder is moved away, after the first records, and replaced by an empty one."""

    def step(self, batch: Batch) -> Mapping[str, float]:
        metrics = super().step(batch)
        self.run.mkdir(exist_ok=True)
        return metrics


def test_a_run_whose_folder_is_replaced_draws_no_curves_into_the_new_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"is gone \(it has no config\.json\): put the run's folder back"):
        run_training(replace(RECIPE, run=str(run), eval_every="2steps", save_every="2steps"), Replacing)
    assert not (run / "curves.png").exists()


@pytest.mark.parametrize("change", ["removed", "of another step"])
def test_weights_that_are_missing_or_of_another_step_are_restored(change: str, finished: Path) -> None:
    before = weight_files(finished)
    assert before["best.safetensors"] != before["weights.safetensors"]
    for name in before:
        config = parity.load(finished / name).config
        (finished / name).unlink()
        if change != "removed":
            parity.write(weights(config, 77), finished / name, "jax")
    assert run_training(replace(RECIPE, run=str(finished))) == 0
    assert weight_files(finished) == before


def test_best_weights_that_nothing_has_any_more_are_not_in_the_summary(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished / "checkpoints" / "3")
    (finished / "best.safetensors").unlink()
    capsys.readouterr()
    assert run_training(replace(RECIPE, run=str(finished))) == 0
    printed = capsys.readouterr().out
    assert f"the best weights, of {finished / 'best.safetensors'}, are lost" in printed
    assert not re.search(r"^best  ", printed, re.MULTILINE) and re.search(r"^best raw  ", printed, re.MULTILINE)


def test_best_weights_are_not_restored_from_a_checkpoint_with_another_evaluation(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_file, before = finished / "checkpoints" / "3" / "state.json", weight_files(finished)
    state = json.loads(state_file.read_text())
    state["last"]["loss"] += 0.5  # as in a run with another seed
    state_file.write_text(json.dumps(state))
    (finished / "best.safetensors").unlink()
    (finished / "best_raw.safetensors").unlink()
    capsys.readouterr()
    assert run_training(replace(RECIPE, run=str(finished))) == 0
    printed = capsys.readouterr().out
    assert "best.safetensors, are lost" in printed and "best_raw.safetensors is restored" in printed
    assert weight_files(finished) == {name: before[name] for name in before if name != "best.safetensors"}


def test_the_metrics_of_a_best_checkpoint_may_be_undefined() -> None:
    assert equal_metrics({"auroc": math.nan, "loss": 1.0}, {"auroc": float("nan"), "loss": 1.0})
    assert not equal_metrics({"auroc": math.nan, "loss": 1.0}, {"auroc": 0.5, "loss": 1.0})
    assert not equal_metrics({"loss": 1.0}, {"auroc": 0.5, "loss": 1.0})


def test_a_file_with_other_weights_than_the_lost_best_ones_is_moved_aside(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished / "checkpoints" / "3")
    config = parity.load(finished / "best.safetensors").config
    contents = []
    for seed, name in ((7, "best-unverified.safetensors"), (8, "best-unverified-2.safetensors")):
        for path in (finished / "checkpoints").glob("*/state.json"):  # the state of a run whose best weights are not lost
            state = json.loads(path.read_text())
            state |= {"best": state["last"], "best_files": state["best_files"] | {"best.safetensors": RECORDED}}
            path.write_text(json.dumps(state))
        parity.write(weights(config, seed), finished / "best.safetensors", "jax", force=True)
        contents.append((finished / "best.safetensors").read_bytes())
        capsys.readouterr()
        assert run_training(replace(RECIPE, run=str(finished))) == 0
        printed = capsys.readouterr().out
        assert f"has them; best.safetensors has other weights and is moved to {finished / name}" in printed
        assert (finished / name).read_bytes() == contents[-1]
    assert not (finished / "best.safetensors").exists()
    assert (finished / "best-unverified.safetensors").read_bytes() == contents[0]


# Files that are not those of the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights", "best", "weights_raw", "best_raw"])
def test_a_folder_with_the_name_of_a_weight_file_is_refused_before_the_run_resumes(name: str, finished: Path) -> None:
    path = finished / f"{name}.safetensors"
    path.unlink()
    path.mkdir()
    before = records(finished)
    with pytest.raises(InputError, match=rf"{path} is not a file: move it out of the run's folder, then give the same"):
        run_training(replace(RECIPE, run=str(finished)))
    assert records(finished) == before and path.is_dir()


@pytest.mark.parametrize("left", [0, 1])
def test_missing_records_are_reported(left: int, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:left]))
    capsys.readouterr()
    assert run_training(replace(RECIPE, run=str(finished))) == 0
    missing = f"{path} lacks {len(lines) - left} of the {len(lines)} records up to this step"
    assert missing in capsys.readouterr().out


def test_a_complete_history_is_not_reported_as_cut(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_training(replace(RECIPE, run=str(finished))) == 0
    assert "lacks" not in capsys.readouterr().out


# Runs without checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a file"])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_not_changed(left: str, finished: Path) -> None:
    checkpoints = finished / "checkpoints"
    shutil.rmtree(checkpoints)
    if left == "a file":
        checkpoints.write_text("")
    elif left == "an empty folder":
        checkpoints.mkdir()
    before = {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    what = (
        "is not a folder: put"
        if left == "a file"
        else r"and no checkpoints to resume from: put .*checkpoints back, or give"
    )
    with pytest.raises(InputError, match=what):
        run_training(replace(RECIPE, run=str(finished)))
    assert before == {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}


def test_a_run_killed_before_its_first_checkpoint_is_complete_starts_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "killed"))
    with monkeypatch.context() as patch:
        for name, value in (("name", "weights_raw"), ("after", 3), ("error", RuntimeError("killed"))):
            patch.setattr(FailingEngine, name, value)
        patch.setattr(FailingEngine, "save_checkpoint", lambda *_: None)
        with pytest.raises(RuntimeError, match="killed"):
            run_training(recipe, FailingEngine)
    assert "weights.safetensors" in weight_files(tmp_path / "killed")
    assert run_training(recipe) == 0
    assert weight_files(tmp_path / "killed") == weight_files(finished)
    assert not list((tmp_path / "killed").glob(".*"))


def test_a_run_that_diverged_before_its_first_checkpoint_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, step = replace(RECIPE, run=str(tmp_path / "run")), FakeEngine.step
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "step", lambda self, batch: {**step(self, batch), "loss": math.nan})
        assert run_training(recipe) == 1
    assert "weights.safetensors" in weight_files(tmp_path / "run")
    assert run_training(recipe) == 0
