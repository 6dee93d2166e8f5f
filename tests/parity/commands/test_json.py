"""The JSON objects that the commands print, and the page that lists their fields.

What commands compute takes long, so they print results that are made by hand, with an entry in every list.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import parity
from parity.__main__ import main
from parity.checkpoints.assumptions import Assumption, Override
from parity.checkpoints.preprocessing import Preprocessing
from parity.checkpoints.weights import Checkpoint
from parity.commands import checks, files
from parity.comparison import diagnosis, golden, twins, two_files
from parity.comparison.diagnosis.report import Cause, Diagnosis
from parity.comparison.framework_settings import Setting
from parity.comparison.golden.drift import Verification, changed_tensors
from parity.comparison.golden.file import Golden
from parity.comparison.invariance import twins as invariance_twins
from parity.comparison.invariance.report import Change, InvarianceReport
from parity.comparison.invariance.twins import TwinsInvariance
from parity.comparison.localisation import Bisection, Origin, Part
from parity.comparison.own_model.proof import Proof
from parity.comparison.report import OutputAgreement, Report, TensorComparison, Unjudged
from parity.comparison.tolerances import ErrorNorms
from parity.comparison.training import TrainingComparison
from parity.comparison.training.adamw import AdamWSettings
from parity.comparison.training.trajectories import ParameterDifference, TrainingCause
from parity.comparison.two_files import FileReport
from tests import ROOT
from tests.json_pages import documented_fields, fields
from tests.twins import perturbed_params
from vit_spec import ViTConfig

SECTIONS = {
    title: text
    for title, _, text in (
        section.partition("\n") for section in (ROOT / "docs" / "reference" / "json.md").read_text().split("\n## ")
    )
}
OF_SRC = documented_fields(SECTIONS["The checkpoint"])
TINY = ViTConfig(image_size=(4, 6), patch_size=2, width=8, depth=1, num_heads=2, mlp_dim=6, num_classes=3)
GOLDEN = ROOT / "tests" / "goldens" / "versions" / "vit_s16.npz"

ERROR = ErrorNorms.of(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
ORIGIN = Origin("blocks.0.norm1", Part("blocks.0.norm1", ""), 0.1, "jax")
TRAINING = TrainingComparison(
    config=TINY,
    steps=1,
    differences=(ParameterDifference("norm.weight", "weights", 0.1),),
    difference=0.1,
    losses=dict.fromkeys(("jax float64", "torch float64"), (1.0,)),
    settings=AdamWSettings(clip=1.0, eps=1e-8),
    causes=(TrainingCause(1, "gradient of norm.weight", "0, and 1 is expected"),),
    perturbed_differences=(1e-7,),
)
REPORT = Report(
    config=TINY,
    level="train",
    dtype="float32",
    measures=(TensorComparison("logits", ERROR, ERROR, ERROR), TensorComparison("gradient", ErrorNorms.infinite(2))),
    outputs={"jax float64": OutputAgreement(1.0, float("nan"))},
    origins=(ORIGIN,),
    bisection=Bisection("blocks.0", {"embed": 0.1}),
    training=TRAINING,
    audit=(Setting("x64", "off", None, "on", "float64"),),
    warnings=("the threads differ",),
    environment={"python": "3.12"},
    unjudged=(Unjudged("float32", ("logits",), "since it is noise"),),
)
FILE_REPORT = FileReport(
    differences={"logits": (0.1, 0.1)},
    origins=(ORIGIN,),
    config=("norms.eps is 1e-06 and 1e-05",),
    uncompared={"blocks.0.attn.scores": (None, (2, 2))},
    limits=("pixels.mean differs",),
)
CHANGE = Change("run twice", "float32", "output", False, float("inf"), 1.0, 3, 1e-5)
INVARIANCE = InvarianceReport("jax", "float32", (CHANGE,), {"other devices": "cpu is the only one"}, "cpu", {"numpy": "2"})
CAUSE = Cause(("LayerNorm eps is 1e-05",), ("eps",), float("inf"), "python -m parity convert ...")
DIAGNOSIS = Diagnosis(
    matched=(CAUSE,),
    before=float("inf"),
    tolerance=1e-6,
    dtype="float32",
    outputs=6,
    tried=3,
    pairs=2,
    runners_up=(CAUSE,),
    evidence=("norms.eps",),
    remarks=("a hint",),
    discarded=("another cause",),
)


def recording() -> Golden:
    """Return a golden file with an infinite result in float32."""
    recorded = Golden.read(GOLDEN)
    recorded.records[0].float32_errors["jax"][0] = np.inf
    return recorded


def verification() -> Verification:
    """Return a verification in which the JAX twin has changed, and PyTorch is not installed."""
    recorded = recording()
    errors = recorded.records[0].float64_errors["jax"].copy()
    errors[0] = np.nan
    now = replace(
        recorded.records[0],
        environment={"jax": "99"},
        float64_errors={"jax": errors},
        float32_errors={"jax": recorded.records[0].float32_errors["jax"]},
    )
    return Verification(str(GOLDEN), recorded, now, changed_tensors(recorded, now), {"torch": "torch"})


def with_every_field(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with an assumption, an override, a key that is not read, labels and preprocessing."""
    return replace(
        checkpoint,
        assumed=(Assumption("norms.eps", 1e-6, "as in most models"),),
        overridden=(Override("mlp.activation", "gelu", "relu"),),
        left=("a key",),
        labels=("a", "b", "c"),
        preprocessing=Preprocessing(size=(4, 6), resize="squash", resized=(4, 6)),
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command on a checkpoint, and returns its object; SRC and FOLDER are replaced."""
    params = perturbed_params(TINY)
    params["norm"]["bias"][...] = 0  # suspicious
    parity.save(tmp_path / "src.safetensors", params, TINY, "jax")
    source = with_every_field(parity.load(tmp_path / "src.safetensors"))
    derived = SimpleNamespace(checkpoint=source, text="", proof=Proof({"own": {"output": 1e-15}}))

    def record(model: Any, path: str, **_: Any) -> Golden:
        Path(path).write_bytes(b"golden")
        return recording()

    for module in (checks, files):
        monkeypatch.setattr(module, "load_source", lambda args: source)
    monkeypatch.setattr(files, "_derive_table", lambda args: derived)
    monkeypatch.setattr(twins, "compare", lambda *_, **__: REPORT)
    monkeypatch.setattr(two_files, "compare_files", lambda *_, **__: FILE_REPORT)
    monkeypatch.setattr(invariance_twins, "twins_invariance", lambda *_, **__: TwinsInvariance(INVARIANCE, INVARIANCE))
    monkeypatch.setattr(diagnosis, "diagnose_against", lambda *_, **__: DIAGNOSIS)
    monkeypatch.setattr(golden, "record", record)
    monkeypatch.setattr(golden, "verify", lambda *_, **__: verification())

    def run(command: str) -> dict[str, Any]:
        places = {"SRC": str(tmp_path / "src.safetensors"), "FOLDER": str(tmp_path), "GOLDEN": str(GOLDEN)}
        assert main([re.sub("|".join(places), lambda found: places[found[0]], word) for word in command.split()]) < 2
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.mark.parametrize(
    ("title", "command"),
    [
        ("check", "check SRC --json"),
        ("check --against", "check SRC --against SRC --json"),
        ("check --invariance", "check SRC --invariance --json"),
        ("diagnose", "diagnose SRC --against SRC --json"),
        ("golden record", "golden record SRC FOLDER/new.npz --json"),
        ("golden verify", "golden verify GOLDEN --json"),
        ("golden table", "golden table GOLDEN --json"),
        ("inspect", "inspect SRC --json"),
        ("convert", "convert SRC FOLDER/new.pth --to timm --dtype bfloat16 --like a:B --json"),
        ("formats", "formats --json"),
        ("formats --show", "formats --show timm --json"),
        ("models", "models --json"),
    ],
)
def test_the_page_lists_exactly_the_fields_of_each_command(run: Any, title: str, command: str) -> None:
    found, documented = run(command), documented_fields(SECTIONS[title])
    if "the-checkpoint" in SECTIONS[title]:
        documented |= OF_SRC
    assert documented == set(fields(found, documented))
    assert next(iter(found)) == "schema"
    assert f"| `schema` | text | `{found['schema']}` |" in SECTIONS[title]


def test_the_page_lists_exactly_the_fields_of_a_part() -> None:
    assert documented_fields(SECTIONS["Parts"]) == ORIGIN.part.facts().keys()


def test_a_field_that_a_page_lacks_is_found() -> None:
    assert set(fields({"a": [{"b": 1}, {"b": None, "c": {}}], "d": {"x": 1}}, {"a[].b", "d.*"})) == {"a[].b", "d.*"}
    assert set(fields({"a": {"b": 1, "c": []}, "d": [1]}, {"a.b"})) == {"a.b", "d[]"}
