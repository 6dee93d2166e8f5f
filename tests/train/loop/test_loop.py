"""The training loop with an engine that has the members of the protocol and no others, and uses neither framework."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("grain")
pytest.importorskip("sklearn")

import parity
from parity.comparison.reproducible_init import weights
from tests import ROOT
from train.data.batches import Batch
from train.data.sources import open_dataset
from train.loop.engine import Engine, EvalOutput, LoopState
from train.loop.loop import METRICS_DELAY
from train.loop.request import Request
from train.loop.session import train
from train.recipes import Model, Recipe

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

    is_distributed, is_main, hardware, peak_flops, replication_note, has_ema = False, True, "no device", 1e12, "", True

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        self.__config, self.__batch_size = config, recipe.batch_size
        self.__folder, self.__learning_rate = options["folder"], options["learning_rate"]
        self.__step = 0

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
        parity.write(weights(self.__config, int(raw)), path, "jax", force=True)

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        self.__folder.mkdir(exist_ok=True)
        (self.__folder / "newest.json").write_text(json.dumps([step, loop_state]))

    def restore_checkpoint(self) -> tuple[int, LoopState] | None:
        newest = self.__folder / "newest.json"
        return tuple(json.loads(newest.read_text())) if newest.exists() else None  # type: ignore[return-value]

    def profile(self, folder: Path | None) -> None:
        raise AssertionError("no recipe of these tests profiles")

    def should_stop(self) -> bool:
        return False

    def close(self) -> None:
        pass


def run_training(recipe: Recipe) -> int:
    return train(Request("test", recipe, open_dataset(recipe.data, recipe.held_out), "python -m train.fake"), FakeEngine)


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


def test_the_loop_imports_neither_framework(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, tests.train.loop.test_loop as t; from dataclasses import replace\n"
        "assert t.run_training(replace(t.RECIPE, run=sys.argv[1])) == 0\n"
        "print('torch' in sys.modules, 'vit_jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout.endswith("False False\n"), done.stderr[-1000:]
