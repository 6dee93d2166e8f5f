"""The loop on an engine that has the members of the protocol and no others, and neither framework."""

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
from train.data.sources import open_source
from train.loop.engine import Engine, Evaluated, Note
from train.loop.loop import LAG
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


class Pending:
    """An array that a device still computes."""

    waited: ClassVar[list[int]] = []  # how many batches had been started when each was waited for
    started = 0

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        Pending.waited.append(Pending.started)
        return self.array


class FakeEngine:
    """Learns nothing, at once."""

    distributed, is_main, hardware, peak_rate, replicated, averages = False, True, "no device", 1e12, "", True

    def __init__(self, config: Any, recipe: Any, **options: Any) -> None:
        self.__config, self.__batch, self.__folder, self.__rate = (
            config,
            recipe.batch_size,
            options["folder"],
            options["rate"],
        )
        self.__step = 0

    @property
    def batch_rows(self) -> np.ndarray:
        return np.arange(self.__batch)

    def step(self, batch: Batch) -> Mapping[str, float]:
        self.__step += 1
        return {"loss": 1.0, "accuracy": 0.5, "grad_norm": 1.0, "lr": float(self.__rate(self.__step))}

    def evaluate(self, batch: Batch, *, raw: bool = False) -> Evaluated:
        Pending.started += not raw
        outputs = np.eye(self.__config.num_classes, dtype=np.float32)[batch.targets * (not raw)]
        return Evaluated(*map(Pending, (outputs, np.ones(len(outputs), np.float32), batch.read)))

    def attention(self, images: np.ndarray) -> np.ndarray:
        tokens = self.__config.num_tokens
        return np.full((len(images), self.__config.num_heads, tokens, tokens), 1 / tokens, np.float32)

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        parity.write(weights(self.__config, int(raw)), path, "jax", force=True)

    def save_checkpoint(self, step: int, note: Note) -> None:
        self.__folder.mkdir(exist_ok=True)
        (self.__folder / "newest.json").write_text(json.dumps([step, note]))

    def restore(self) -> tuple[int, Note] | None:
        newest = self.__folder / "newest.json"
        return tuple(json.loads(newest.read_text())) if newest.exists() else None  # type: ignore[return-value]

    def profile(self, folder: Path | None) -> None:
        raise AssertionError("no recipe here asks for it")

    def preempted(self) -> bool:
        return False

    def close(self) -> None:
        pass


def trained(recipe: Recipe) -> int:
    return train(Request("test", recipe, open_source(recipe.data, recipe.held_out), "python -m train.fake"), FakeEngine)


def test_the_fake_engine_has_the_members_of_the_protocol_and_no_others() -> None:
    members = {name for name in vars(Engine) if not name.startswith("_")}
    assert {name for name in vars(FakeEngine) if not name.startswith("_")} == members


def test_an_engine_with_the_members_of_the_protocol_trains_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, run=str(tmp_path / "run"))
    assert trained(replace(recipe, epochs="6steps")) == 0
    said = capsys.readouterr().out
    assert "no device" in said and "best" in said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {each["set"]: each["accuracy"] for each in records if each["set"] != "train"}
    assert scores["held_out"] == 1.0 and scores["held_out_raw"] < 0.2
    assert {"weights.safetensors", "best_raw.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert trained(recipe) == 0
    assert "going on from step 6 of 6" in capsys.readouterr().out


def test_evaluation_does_not_wait_for_each_batch(tmp_path: Path) -> None:
    Pending.started, Pending.waited[:] = 0, []
    assert trained(replace(RECIPE, run=str(tmp_path / "run"), eval_every="6steps", batch_size=32)) == 0
    batches = -(-len(open_source("digits").held_out) // 32)
    assert Pending.started == batches > LAG + 1
    assert Pending.waited[0] == LAG + 1 and Pending.waited[-1] == batches


def test_the_loop_loads_neither_framework(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, tests.train.loop.test_loop as t; from dataclasses import replace\n"
        "assert t.trained(replace(t.RECIPE, run=sys.argv[1])) == 0\n"
        "print('torch' in sys.modules, 'vit_jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout.endswith("False False\n"), done.stderr[-1000:]
