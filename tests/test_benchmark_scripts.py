"""The scripts of benchmarks that no other test runs: each as small as it can be, since nothing here depends on times."""

import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import parity
import vit_spec
from parity.comparison import reproducible_init
from tests import ROOT
from tests.twins import perturbed_params

for package in ("jax", "torch", "grain"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

SIZES: dict[str, Any] = {"width": 24, "depth": 1, "num_heads": 3, "mlp_dim": 48, "num_classes": 1000}
TINY = vit_spec.get("vit_ti16").replace(image_size=(32, 32), **SIZES)
IN_PEERS = {"timm_architectures", "zoo"}  # tests.peers runs them, and they import many packages
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser" in path.read_text()} - IN_PEERS

Run = Callable[..., str]


def load(name: str) -> Any:
    """Return a module of benchmarks; skip the test if a package that it imports is not installed."""
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if importlib.util.find_spec(package):  # of which a module was moved
            raise
        pytest.skip(f"needs {package}")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a script with arguments, and returns what it prints.

    Every named model is a tiny one.  Keywords replace values of the module.
    """
    monkeypatch.setattr(vit_spec, "get", lambda name, **changes: TINY)

    def run(name: str, *arguments: str, **values: Any) -> str:
        module = load(name)
        for attribute, value in values.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", sorted(SCRIPTS - {"__main__"}))
def test_a_script_prints_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit:
        load(name).main()
    assert exit.value.code in (0, None) and "usage: " in capsys.readouterr().out


def test_attention(run: Run) -> None:
    assert "ratio: " in run("attention", PAIRS=1)


def test_gelu(run: Run) -> None:
    assert "| vit_jax | " in run("gelu", SHAPE=(2, 3), TURNS=1)


def test_full_size(run: Run) -> None:
    printed = run("full_size", "vit_s16", FUSION={"fused": {}})
    assert "| vit_s16 | fused | " in printed and printed.endswith("| PASS |\n")


def test_invariance(run: Run) -> None:
    assert "| vit_s16 | jax | " in run("invariance")


def test_tolerances() -> None:
    tolerances = load("tolerances")
    report = tolerances.compare(TINY, perturbed_params(TINY), level="function", backward=False)
    assert tolerances.fault_outcome(report) == "makes no difference"


def test_compile_forward(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    large = TINY.replace(image_size=(224, 224), patch_size=(112, 112))
    monkeypatch.setattr(vit_spec, "get", lambda name, **changes: large)
    printed = run("compile_forward", MODELS=("vit_s16",), BATCH_SIZES=(1,), TURNS=1, SECONDS_OF_A_TURN=0.0)
    assert "| vit_s16 | 1 | " in printed


def test_trainer_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vit_spec, "get", lambda name, **changes: TINY)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    load("trainer_steps").answer("train.torch", "vit_s16", 1, "float32")
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.parametrize(("name", "arguments"), [("cpu_options", []), ("revisions", ["HEAD", "--turns", "1"])])
def test_scripts_of_processes_that_take_turns(name: str, arguments: list[str], run: Run) -> None:
    if name == "revisions" and not (ROOT / ".git").exists():
        pytest.skip("needs a clone")
    turn = load("trainer_steps").Turn(1.0, 2.0, 3.0)
    printed = run(name, *arguments, take_turns=lambda cases, turns: {case: [turn] for case in cases})
    assert "| 1.00 (1.00 to 1.00) |" in printed


def test_doubtful_classes(run: Run, tmp_path: Path) -> None:
    config = TINY.replace(image_size=(8, 8), patch_size=(8, 8), in_channels=1, pixels={"mean": (0.5,), "std": (0.5,)})
    weights = tmp_path / "weights.safetensors"
    parity.save(weights, reproducible_init.weights(config, 0).arrays, config, "jax")
    assert "right of the first" in run("doubtful_classes", str(weights), "digits", DRAWS=1)


def test_fuzz(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.setrlimit", lambda *limits: None)  # it would hold for all further tests
    assert "memory grew by" in run("fuzz", "--seconds", "0.1")


def photographs(folder: Path) -> Path:
    """Write two photographs in each of two class folders, and return the folder."""
    rng = np.random.default_rng(0)
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(folder / name)
    return folder


def test_input(run: Run) -> None:
    pytest.importorskip("sklearn")
    assert "RandAugment takes" in run("input", "--images", "2", "--runs", "1")


def test_input_pipeline(run: Run, tmp_path: Path) -> None:
    sizes = ["--config", "vit_ti16", "--batch-size", "1", "--steps", "1", "--runs", "1", "--model.changes", "depth=1"]
    options = ["--trainer", "train.torch", "--workers", "0", *sizes]
    assert "1 steps of 1 images per run" in run("input_pipeline", str(photographs(tmp_path)), *options)


def test_similar_images(run: Run, tmp_path: Path) -> None:
    assert "| grey | 4 | " in run("similar_images", str(photographs(tmp_path)))


@pytest.mark.parametrize("name", ["conversion", "loading", "checkpointing"])
def test_lines(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vit_spec, "get", lambda name, **changes: TINY)
    lines = load("lines")
    monkeypatch.setattr(lines, "RUNS", 1)
    text, figures = lines.LINES[name](tmp_path)
    assert " MB" in text and json.loads(json.dumps(figures)) == figures


def test_random_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    assert "| train.jax | " in run("random_numbers", "--batch-size", "1", "--turns", "1")


def test_recognition(run: Run) -> None:
    assert "vit_b16 in timm" in run("recognition", "--runs", "1", hostile_keys=dict)


@pytest.mark.parametrize(("name", "values"), [("twin_runs", {"PERTURBED_RUNS": {"float32": 1}}), ("hand_over", {})])
def test_runs_of_both_trainers(name: str, values: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(name, "--config", "tiny", "--steps", "2", "--dtype", "float32", **values)
    assert ": the weights after 2 steps" in capsys.readouterr().out
