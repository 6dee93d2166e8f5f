"""Golden files: results of both twins are recorded and verified, and the report names the first tensor that changed.

`tests/goldens/versions` has two of them.  If a new version of a framework changes results for a good reason, record again:
`golden.record(Golden.read(path).config, path, force=True)`.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("jax")
pytest.importorskip("torch")

import parity
import vit_jax
import vit_spec
import vit_torch
from parity.__main__ import main
from parity.checkpoints import formats
from parity.checkpoints.conversion import to_torch
from parity.checkpoints.format_text import format_text
from parity.checkpoints.weights import Checkpoint
from parity.comparison import framework_settings, golden, reproducible_init
from parity.comparison.forward_backward import PassInputs, TorchTwin
from parity.comparison.golden import inputs, verification
from parity.comparison.golden.drift import changed_tensors
from parity.comparison.golden.file import Golden, Record
from parity.comparison.golden.inputs import checksums, make_inputs, recorded_inputs
from parity.comparison.golden.sketch import SKETCH_SIZE, sketch
from parity.comparison.tolerances import FLOAT64_TOLERANCE, MAX_TOLERANCE, RMS_ERROR_RATIO, five_sigma_factor
from tests import ROOT
from tests.twins import perturbed_params, small_config
from vit_spec import InputError

VERSIONS = ROOT / "tests" / "goldens" / "versions"
PLAIN = small_config(vit_spec.get("vit_s16"))
ONE = small_config(vit_spec.get("vit_s16"), depth=1)
TENSORS = 77


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a copy of a golden file of a small model, recorded on another machine."""
    path = tmp_path / "plain.npz"
    path.write_bytes((VERSIONS / "vit_s16.npz").read_bytes())
    return path


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a golden file that was recorded with given weights."""
    path = tmp_path_factory.mktemp("golden") / "weights.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
        golden.record(Checkpoint(PLAIN, "jax", _flat(perturbed_params(PLAIN))), path)
    return path


@pytest.fixture
def golden_file(path: Path) -> Golden:
    """Return the contents of the golden file at `path`."""
    return Golden.read(path)


# The golden files of this repository ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(each.stem for each in VERSIONS.glob("*.npz")))
def test_jax_and_torch_still_compute_the_recorded_results(name: str) -> None:
    found = golden.verify(VERSIONS / f"{name}.npz")
    assert found.passed, found.verdict
    assert len(found.now.float64_errors) == 2


def test_there_are_two_small_golden_files() -> None:
    sizes = [each.stat().st_size for each in VERSIONS.glob("*.npz")]
    assert len(sizes) == 2
    assert max(sizes) < 60_000


# Recording and verification -------------------------------------------------------------------------------------------


def test_a_recorded_file_verifies_and_a_second_recording_has_the_same_bytes(tmp_path: Path) -> None:
    golden.record(ONE, tmp_path / "first.npz")
    found = golden.verify(tmp_path / "first.npz")
    assert found.passed and not found.changed_environment
    replace(found.golden, records=(found.now,)).write(tmp_path / "second.npz")
    assert (tmp_path / "second.npz").read_bytes() == (tmp_path / "first.npz").read_bytes()


def test_the_path_is_checked_before_the_frameworks_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "installed_frameworks", lambda: pytest.fail("the frameworks were imported"))
    for name, message in (("a.npy", "ends in .npz"), ("nowhere/a.npz", "no folder"), ("old.npz", "exists")):
        (tmp_path / "old.npz").touch()
        with pytest.raises(InputError, match=message):
            golden.record(PLAIN, tmp_path / name)


def test_a_file_that_appears_while_a_golden_file_is_recorded_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "first.npz"
    with pytest.raises(InputError, match="exists: give another name"):
        golden.record(ONE, path, progress=lambda what: path.write_text("mine"))
    assert path.read_text() == "mine"


def test_seeded_weights_have_the_recorded_checksums_on_every_machine(golden_file: Golden) -> None:
    assert golden_file.config == PLAIN
    assert checksums(make_inputs(reproducible_init.weights(PLAIN, 0), 0)) == golden_file.checksums


def test_reading_and_writing_returns_the_same_bytes(golden_file: Golden, tmp_path: Path) -> None:
    """The stored files lack the config fields that were added later, so they are written once before the comparison."""
    golden_file.write(tmp_path / "first.npz")
    Golden.read(tmp_path / "first.npz").write(tmp_path / "second.npz")
    assert (tmp_path / "second.npz").read_bytes() == (tmp_path / "first.npz").read_bytes()


def test_reading_and_writing_keeps_every_recorded_array(golden_file: Golden, tmp_path: Path, path: Path) -> None:
    golden_file.write(tmp_path / "copy.npz")
    with np.load(path) as before, np.load(tmp_path / "copy.npz") as after:
        assert before.files == after.files
        assert all(before[name].tobytes() == after[name].tobytes() for name in before.files if name != "header")


def test_a_golden_file_has_every_intermediate_and_every_gradient(golden_file: Golden) -> None:
    names = [tensor.name for tensor in golden_file.tensors]
    assert names.index("blocks.0.attn.scores") < names.index("logits") < names.index("gradient of head.weight")
    assert {f"gradient of {name}" for name in vit_torch.ViT(PLAIN).state_dict()} < set(names)


@pytest.mark.parametrize(("absent", "other"), [("jax", "torch"), ("torch", "jax")])
def test_with_one_framework_missing_the_other_agrees_with_the_float64_reference_to_1e_13(
    absent: str, other: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (absent, f"vit_{absent}"):
        monkeypatch.setitem(sys.modules, name, None)
    found = golden.verify(path)
    assert set(found.now.float64_errors) == {other}
    assert np.nanmax(found.now.float64_errors[other]) < 1e-13
    assert f"{absent} was not verified: " in str(found)


def test_given_weights_verify_in_another_format(weights_path: Path) -> None:
    as_torch = Checkpoint(PLAIN, "torch", to_torch(perturbed_params(PLAIN), PLAIN))
    assert golden.verify(weights_path, weights=as_torch, only="torch").passed


SCALED = PLAIN.replace(norms={"layer_scale": 1e-4}, attention={"scale": 0.5})
NO_FUNCTION = {
    "initial layer scale": {"norms": {"layer_scale": 0.1}},
    "initial values": {"tokens": {"init": "normal(0.02)"}, "head": {"init": "zeros"}, "positions": {"table": "sincos_1d"}},
    "dropout": {"regularisation": {"drop_path": 0.1, "patch_drop": 0.5}},
    "normalization": {"pixels": {"mean": (0.4,), "std": (0.2,)}},
    "resampling": {"resampling": {"antialias": False}},
    "padding": {"tokens": {"pad": True}},
    "cropping": {"tokens": {"crop": True}},
    "the default head_dim": {"attention": {"head_dim": SCALED.head_dim}},
}
OTHER_FUNCTIONS = {
    "norms.eps": {"norms": {"eps": 1e-5}},
    "mlp.activation": {"mlp": {"activation": "gelu_tanh"}},
    "norms.layer_scale": {"norms": {"layer_scale": None}},
    "positions.kind": {"positions": {"kind": "none"}},
    "attention.scale": {"attention": {"scale": None}},
}


@pytest.fixture(scope="module")
def scaled(weights_path: Path) -> tuple[Golden, Checkpoint]:
    """Return a golden file of a model with layer scale, without results of that model, and its weights."""
    weights = Checkpoint(SCALED, "jax", _flat(perturbed_params(SCALED)))
    return replace(Golden.read(weights_path), config=SCALED, checksums=checksums(make_inputs(weights, 0))), weights


@pytest.mark.parametrize("change", NO_FUNCTION.values(), ids=NO_FUNCTION)
def test_fields_that_change_no_recorded_result_may_differ(
    change: dict[str, Any], scaled: tuple[Golden, Checkpoint]
) -> None:
    recorded, weights = scaled
    given = replace(weights, config=SCALED.replace(**change))
    assert recorded_inputs(recorded, given, "a.npz").checkpoint is given


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_fields_that_change_recorded_results_may_not_differ(name: str, scaled: tuple[Golden, Checkpoint]) -> None:
    recorded, weights = scaled
    given = replace(weights, config=SCALED.replace(**OTHER_FUNCTIONS[name], regularisation={"drop_path": 0.1}))
    with pytest.raises(InputError, match=rf"another config than these weights have \({name} was [^;]*\): give"):
        recorded_inputs(recorded, given, "a.npz")


def test_the_default_scale_of_attention_may_be_given(weights_path: Path) -> None:
    weights = Checkpoint(PLAIN.replace(attention={"scale": PLAIN.scale}), "jax", _flat(perturbed_params(PLAIN)))
    assert recorded_inputs(Golden.read(weights_path), weights, "a.npz").checkpoint is weights


# Weights that amplify rounding errors ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def amplified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    """Return a golden file of weights that amplify rounding errors beyond the usual tolerance, and the weights."""
    path, params = tmp_path_factory.mktemp("amplified") / "weights.npz", perturbed_params(PLAIN)
    params["blocks"]["attn"]["qkv"]["kernel"] *= np.float32(100)
    weights = Checkpoint(PLAIN, "jax", _flat(params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
        golden.record(weights, path)
    return path, weights


def test_weights_that_amplify_rounding_errors_are_recorded_and_verified_with_measured_tolerances(
    amplified: tuple[Path, Checkpoint],
) -> None:
    path, weights = amplified
    recorded = Golden.read(path)
    errors = recorded.records[0].float64_errors["torch"]
    tolerances = np.array([tensor.float64_tolerance for tensor in recorded.tensors])
    assert np.nanmax(errors) > FLOAT64_TOLERANCE and tolerances.max() < 1e-8
    other_machine = replace(recorded.records[0], float64_errors={"torch": np.maximum(errors, 0.9 * tolerances)})
    assert not changed_tensors(recorded, other_machine)
    found = golden.verify(path, weights=weights, only="torch")
    assert f"(tolerance up to {tolerances.max():.0e}, since the weights amplify rounding errors)" in found.verdict


def test_a_fault_shows_also_where_weights_amplify_rounding_errors(
    amplified: tuple[Path, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_fault(monkeypatch, vit_torch, mlp={"activation": "gelu_tanh"})
    found = golden.verify(amplified[0], weights=amplified[1], only="torch")
    assert (found.first["torch"].tensor, found.first["torch"].dtype) == ("blocks.0.mlp.activation", "float64")


def test_rounding_errors_of_ordinary_weights_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
    monkeypatch.setattr(verification, "measure_rounding_errors", lambda *arguments: pytest.fail("they were measured"))
    golden.record(ONE, tmp_path / "plain.npz")
    with np.load(tmp_path / "plain.npz") as file:
        assert "rounding" not in file
    assert all(tensor.float64_tolerance == FLOAT64_TOLERANCE for tensor in Golden.read(tmp_path / "plain.npz").tensors)


def with_rounding(golden_file: Golden, name: str, **rounding: float) -> Golden:
    """Return a golden file with measured rounding errors of one tensor."""
    tensors = (replace(each, **rounding) if each.name == name else each for each in golden_file.tensors)
    return replace(golden_file, tensors=tuple(tensors))


@pytest.mark.parametrize(("factor", "changed"), [(1 / 50, False), (19.0, False), (25.0, True)])
def test_a_float32_error_may_differ_by_the_measured_rounding_errors(
    golden_file: Golden, factor: float, changed: bool
) -> None:
    measured = with_rounding(with_float32_errors(golden_file, "blocks.0", factor), "blocks.0", float32_rounding=20e-6)
    assert bool(changed_tensors(measured, measured.records[1])) == changed


def test_tensors_that_are_mostly_rounding_error_in_float32_are_named_with_all_after_them(golden_file: Golden) -> None:
    measured = with_rounding(golden_file, "pool", float32_rounding=0.2)
    [unjudged] = measured.unjudged
    names = [tensor.name for tensor in golden_file.tensors]
    assert list(unjudged.names) == names[names.index("pool") :] and "change it by 2e-01 times its size" in str(unjudged)


def test_weights_whose_rounding_errors_would_hide_changes_are_not_recorded(golden_file: Golden) -> None:
    with pytest.raises(InputError, match=r"would hide changes, since 16 unit roundoffs .* change pool by 1\.0e-07 times"):
        verification._check_agreement(with_rounding(golden_file, "pool", float64_rounding=1e-7))


# Changes --------------------------------------------------------------------------------------------------------------


def plant_fault(monkeypatch: pytest.MonkeyPatch, twin: Any, **change: Any) -> None:
    """Change the config of every model that a twin builds."""
    right = twin.ViT
    monkeypatch.setattr(twin, "ViT", lambda config, execution: right(config.replace(**change), execution))


def set_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Replace versions in the environment that a verification records."""
    now = framework_settings.environment
    monkeypatch.setattr(framework_settings, "environment", lambda options=None: {**now(options), **versions})


def test_a_fault_is_reported_with_its_layer_and_the_versions_then_and_now(
    path: Path, golden_file: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_fault(monkeypatch, vit_torch, mlp={"activation": "gelu_tanh"})
    set_versions(monkeypatch, torch="99.1")
    found, then = golden.verify(path, only="torch"), golden_file.records[0].environment["torch"]
    assert not found.passed
    assert (found.first["torch"].tensor, found.first["torch"].dtype) == ("blocks.0.mlp.activation", "float64")
    assert "torch changed: blocks.0.mlp.activation differs by " in found.verdict
    assert f"Recorded with torch {then}" in found.verdict and "now torch 99.1" in found.verdict
    assert found.changed_environment["torch"] == [then, "99.1"]


def test_the_verdict_names_settings_that_differ_and_unchanged_versions_once(
    path: Path, golden_file: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = golden_file.records[0].environment
    now = {**then, "threads": {"jax": 9, "torch": 8}, "settings": {**then["settings"], "MKL_CBWR": {"torch": "AVX2"}}}
    errors = golden_file.records[0].float64_errors["torch"] + 1
    found = changed_tensors(golden_file, replace(golden_file.records[0], float64_errors={"torch": errors}))
    record = replace(golden_file.records[0], environment=now)
    verdict = golden.Verification("a.npz", golden_file, record, found).verdict
    assert verdict.count("numpy") == 1
    before = then["threads"]["torch"]
    assert verdict.endswith(f", as now; threads, torch: was {before}, is 8; MKL_CBWR, torch: was None, is AVX2")


def test_a_fault_is_reported_for_its_framework_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch, vit_jax, norms={"eps": 1e-5})
    found = golden.verify(path)
    assert found.first.keys() == {"jax"}
    assert (found.first["jax"].tensor, found.first["jax"].dtype) == ("blocks.0.norm1", "float64")


def test_the_same_change_in_both_frameworks_is_blamed_on_neither(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)
    plant_fault(monkeypatch, vit_torch, norms={"eps": 1e-5})
    assert "jax and torch changed by the same amount" in golden.verify(path).verdict


def test_a_larger_float32_error_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vit_torch.ViT

    class Coarse(right):  # type: ignore[misc, valid-type]
        def encode(self, x, tables, noise):
            return super().encode(x * (1 + (1e-5 * (x > 0) if x.dtype.itemsize == 4 else 0)), tables, noise)

    monkeypatch.setattr(vit_torch, "ViT", Coarse)
    found = golden.verify(path, only="torch")
    assert {each.dtype for each in found.changed_tensors} == {"float32"}
    assert found.first["torch"].tensor == "blocks.0.norm1"


def with_float32_errors(golden_file: Golden, name: str, factor: float) -> Golden:
    """Return a golden file with two records: torch's float32 error of one tensor is 1e-6 and `factor` times 1e-6."""
    at = [tensor.name for tensor in golden_file.tensors].index(name)
    records = []
    for error in (1e-6, factor * 1e-6):
        found = golden_file.records[0].float32_errors["torch"].copy()
        found[at] = error
        records.append(
            replace(golden_file.records[0], float32_errors={**golden_file.records[0].float32_errors, "torch": found})
        )
    return replace(golden_file, records=tuple(records))


# For a tensor of 2 images, 7 tokens and width 16; 0.5 is a tenth of 5e-6, in units of 1e-6.
ALLOWED = RMS_ERROR_RATIO * five_sigma_factor(224) + 0.5


@pytest.mark.parametrize("factor", [1 / 50, 1.01 * ALLOWED, 50.0])
def test_a_much_larger_or_smaller_float32_error_is_a_change(golden_file: Golden, factor: float) -> None:
    changed = with_float32_errors(golden_file, "blocks.0", factor)
    [only] = changed_tensors(changed, changed.records[1])
    assert (only.framework, only.tensor, only.dtype) == ("torch", "blocks.0", "float32")


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.99 * ALLOWED])
def test_a_similar_float32_error_is_no_change(golden_file: Golden, factor: float) -> None:
    changed = with_float32_errors(golden_file, "blocks.0", factor)
    assert not changed_tensors(changed, changed.records[1])


def test_the_gradient_of_a_single_parameter_is_not_tested_in_float32(golden_file: Golden) -> None:
    changed = with_float32_errors(golden_file, "gradient of blocks.0.norm1.bias", 5.0)
    assert not changed_tensors(changed, changed.records[1])


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose loss and gradients below the head overflow in float32."""
    path = tmp_path_factory.mktemp("overflowing") / "weights.safetensors"
    params = perturbed_params(ONE)
    params["head"]["kernel"] *= np.float32(1e38)
    parity.save(path, params, ONE, "jax")
    return path


def test_what_overflows_in_float32_is_named_when_it_is_recorded_and_verified(
    overflowing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
    file, words = str(tmp_path / "a.npz"), ["--weights", str(overflowing), "--only", "torch"]
    assert main(["golden", "record", str(overflowing), file]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not judged in float32: loss and ")]
    assert main(["golden", "verify", file, *words]) == 0
    assert capsys.readouterr().out.strip().endswith(f"float32 errors are as recorded; {line}")


@pytest.mark.parametrize("name", ["blocks.0", "gradient of blocks.0.norm1.bias"])
def test_a_float32_result_that_is_no_longer_finite_is_a_change(golden_file: Golden, name: str) -> None:
    """Also beside a result and a gradient that were not finite when they were recorded."""
    names = [tensor.name for tensor in golden_file.tensors]
    recorded = golden_file.records[0].float32_errors["torch"]
    recorded[[names.index("loss"), names.index("gradient of images")]] = np.inf
    assert golden_file.unjudged[0].names == ("loss", "gradient of images")
    found = recorded.copy()
    found[names.index(name)] = np.inf
    assert not changed_tensors(golden_file, golden_file.records[0])
    [only] = changed_tensors(golden_file, replace(golden_file.records[0], float32_errors={"torch": found}))
    assert (only.tensor, only.dtype, only.found) == (name.partition(" ")[0], "float32", np.inf)


def test_a_missing_intermediate_is_a_change(golden_file: Golden) -> None:
    at = [tensor.name for tensor in golden_file.tensors].index("pool")
    found = golden_file.records[0].float64_errors["jax"].copy()
    found[at] = np.nan
    now = replace(golden_file.records[0], float64_errors={**golden_file.records[0].float64_errors, "jax": found})
    [only] = changed_tensors(golden_file, now)
    assert str(only) == "pool is missing, has another shape, or is not finite in float64"


def test_facts_are_valid_json(path: Path) -> None:
    found = golden.verify(path, only="torch")
    assert json.loads(json.dumps(found.facts(), allow_nan=False))["passed"]


# History --------------------------------------------------------------------------------------------------------------


def test_appended_records_are_in_the_table_with_their_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch, vit_torch, norms={"eps": 1e-5})
    set_versions(monkeypatch, torch="99.1")
    golden.verify(path, only="torch", append=True)
    history = golden.table([path])
    [file] = history.facts()["files"]
    first, second = file["records"]
    assert file["file"] == str(path) and not first["changed_tensors"]
    change = second["changed_tensors"][0]
    assert [change[name] for name in ("framework", "dtype", "tensor")] == ["torch", "float64", "blocks.0.norm1"]
    [row] = [line for line in str(history).splitlines() if "99.1" in line]
    assert "torch: blocks.0.norm1" in row


def test_an_appended_record_does_not_change_the_reference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch, vit_torch, norms={"eps": 1e-5})
    golden.verify(path, only="torch", append=True)
    assert not golden.verify(path, only="torch").passed


def test_a_record_is_appended_to_the_target_of_a_link_and_in_the_home_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_measure", lambda golden, *rest: golden.records[0])
    monkeypatch.setenv("HOME", str(path.parent))
    path.with_name("link.npz").symlink_to("plain.npz")
    golden.verify(path.with_name("link.npz"), append=True)
    golden.verify("~/link.npz", append=True)
    assert path.with_name("link.npz").is_symlink() and len(Golden.read(path).records) == 3


def during_verification(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Make the next verification call `action` after its measurement."""
    measure = verification._measure

    def measure_and_act(*arguments: Any) -> Record:
        monkeypatch.setattr(verification, "_measure", measure)
        measured = measure(*arguments)
        action()
        return measured

    monkeypatch.setattr(verification, "_measure", measure_and_act)


def test_a_record_appended_during_a_verification_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during_verification(monkeypatch, lambda: golden.verify(path, only="jax", append=True))
    golden.verify(path, only="torch", append=True)
    assert [list(each.float64_errors) for each in Golden.read(path).records] == [["jax", "torch"], ["jax"], ["torch"]]


def test_nothing_is_appended_to_a_golden_file_that_was_replaced_during_the_verification(
    path: Path, golden_file: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_verification(monkeypatch, lambda: replace(golden_file, seed=7).write(path))
    with pytest.raises(InputError, match=r"plain.npz was replaced during the verification, and no record is appended"):
        golden.verify(path, only="torch", append=True)
    assert len(Golden.read(path).records) == 1 and Golden.read(path).seed == 7


def test_a_golden_file_replaced_while_a_record_is_written_is_not_overwritten(
    path: Path, golden_file: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Golden._write

    def replace_and_write(self: Golden, path: Path, *arguments: Any) -> None:  # as mv does, without the lock
        write(golden_file, other, True, lambda path: None)
        os.replace(other, path)
        write(self, path, *arguments)

    other = path.with_name("other.npz")
    monkeypatch.setattr(Golden, "_write", replace_and_write)
    with pytest.raises(InputError, match="was replaced during the verification"):
        golden_file.append(path, golden_file.records[0])
    assert len(Golden.read(path).records) == 1


# Random numbers and sketches ------------------------------------------------------------------------------------------


def test_random_numbers_are_the_same_with_every_version_and_machine() -> None:
    assert hashlib.sha256(reproducible_init.noise(0, "x", (3, 5)).tobytes()).hexdigest()[:16] == "ff32f420405c5547"


def test_random_numbers_have_the_requested_mean_and_standard_deviation() -> None:
    x = reproducible_init.noise(1, "x", (400_000,), 0.5, 2.0).astype(np.float64)
    assert abs(x.mean() - 0.5) < 5 * 2 / 400_000**0.5
    assert abs(x.std() - 2) < 5 * 2 / 800_000**0.5


def test_different_names_or_seeds_give_different_random_numbers() -> None:
    found = {reproducible_init.noise(seed, name, (4,)).tobytes() for seed in (0, 1) for name in ("a", "b")}
    assert len(found) == 4


def test_a_longer_random_array_begins_with_the_shorter_one() -> None:
    assert np.array_equal(reproducible_init.noise(0, "x", (2**20 + 5,))[:9], reproducible_init.noise(0, "x", (9,)))


@pytest.mark.parametrize("name", ["vit_s16", "dinov2_s14", "vit_s16_plain"])
def test_seeded_weights_have_neither_zeros_nor_ones_nor_repetitions(name: str) -> None:
    config = small_config(vit_spec.get(name))
    flat = np.concatenate([array.ravel() for array in reproducible_init.weights(config, 0).arrays.values()])
    assert not np.isin(flat, (0.0, 1.0)).any()
    assert len(np.unique(flat)) > 0.98 * len(flat)


def test_a_change_of_any_entry_changes_the_sketch() -> None:
    x = np.random.default_rng(0).standard_normal((7, 15))
    for i in range(x.size):
        changed = x.copy()
        changed.flat[i] += 1e-9
        assert np.linalg.norm(sketch(changed) - sketch(x)) == pytest.approx(1e-9, rel=1e-5)


def test_the_distance_of_sketches_estimates_the_distance_of_tensors() -> None:
    rng = np.random.default_rng(0)
    x, error = rng.standard_normal(10_000), rng.standard_normal(10_000)
    ratio = np.linalg.norm(sketch(x + error) - sketch(x)) / np.linalg.norm(error)
    assert abs(ratio - 1) < 4 / (2 * SKETCH_SIZE) ** 0.5


def test_a_small_tensor_is_its_own_sketch() -> None:
    assert np.array_equal(sketch(np.arange(6.0).reshape(2, 3)), np.arange(6.0))


# Bad input ------------------------------------------------------------------------------------------------------------


def edit_arrays(path: Path, target: Path, **arrays: Any) -> Path:
    """Write a copy of a golden file with some arrays replaced, or left out if None."""
    with np.load(path) as file:
        contents = {**file, **arrays}
    np.savez(target, **{name: array for name, array in contents.items() if array is not None})
    return target


def edit_header(path: Path, target: Path, **fields: Any) -> Path:
    """Write a copy of a golden file with some fields of the header replaced, or left out if None."""
    with np.load(path) as file:
        header = json.loads(file["header"].tobytes())
    text = json.dumps({name: value for name, value in {**header, **fields}.items() if value is not None})
    return edit_arrays(path, target, header=np.frombuffer(text.encode(), np.uint8))


HUGE = {**json.loads(PLAIN.to_json()), "depth": 10**9}
HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative seed": ({"seed": -1}, "seed is not between 0 and"),
    "a seed of many digits": ({"seed": 10**250}, "seed is not between 0 and"),
    "a config of absurd depth": ({"config": HUGE}, "gradients of 32 parameters, and its config has 12,000,000,008"),
    "another config": (
        {"config": json.loads(PLAIN.replace(mlp_dim=32).to_json())},
        "gradients do not have the names and shapes of its config's parameters",
    ),
    "an incomplete config": ({"config": {"width": -1}}, "required config fields are missing"),
    "no seed": ({"seed": None}, "missing or unexpected keys in its header: 'seed'"),
    "a seed that is text": ({"seed": "0"}, "seed in its header is a str"),
    "a later version": ({"golden": 2}, "npz has version 2, expected 1: update the package, or record it again$"),
    "no version": ({"golden": None}, "missing or unexpected keys in its header: 'golden'"),
    "tensors without names": ({"tensors": [[1, [2]]]}, "not a list of different names"),
    "a deeply nested record": ({"records": [{"environment": {"a": [[[[]]]]}, "frameworks": ["jax"]}]}, "record 0"),
    "no records": ({"records": []}, "its first record, which must have both frameworks"),
    "a record of another framework": ({"records": [{"environment": {}, "frameworks": ["tf"]}]}, "record 0"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_wrong_header_is_refused_in_one_line(case: str, path: Path, tmp_path: Path) -> None:
    fields, message = HEADERS[case]
    with pytest.raises(InputError, match=message) as error:
        Golden.read(edit_header(path, tmp_path / "bad.npz", **fields))
    assert "\n" not in str(error.value) and "bad.npz" in str(error.value)


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no header": ({"header": None}, "is not a golden file"),
    "no reference": ({"reference": None}, "reference is missing"),
    "a shorter reference": ({"reference": np.zeros(3)}, "expected float64"),
    "sizes in float32": ({"sizes": np.zeros(5, np.float32)}, "expected float64"),
    "no record": ({"records.0": None}, "records.0 is missing"),
    "another array": ({"more": np.zeros(3)}, "arrays that do not belong in a golden file"),
    "negative errors": ({"records.0": np.full((2, 2, TENSORS), -1.0)}, "negative errors"),
    "a record of NaN": ({"records.0": np.full((2, 2, TENSORS), np.nan)}, "no error of the logits"),
    "gradients of zeros": ({"sizes": np.zeros(TENSORS)}, "gradients are all zero"),
    "a header that is not JSON": ({"header": np.frombuffer(b"{", np.uint8)}, "not JSON"),
    "sizes for which no result differs": ({"sizes": np.full(TENSORS, 1e12)}, "its size of patch_embed.* does not fit"),
    "negative rounding errors": ({"rounding": np.full((2, TENSORS), -1.0)}, "rounding errors are NaN or negative"),
    "rounding errors of NaN": ({"rounding": np.full((2, TENSORS), np.nan)}, "rounding errors are NaN or negative"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_wrong_arrays_are_refused_in_one_line(case: str, path: Path, tmp_path: Path) -> None:
    arrays, message = ARRAYS[case]
    with pytest.raises(InputError, match=message) as error:
        Golden.read(edit_arrays(path, tmp_path / "bad.npz", **arrays))
    assert "\n" not in str(error.value) and "bad.npz" in str(error.value)


def test_nan_in_the_reference_is_refused(path: Path, golden_file: Golden, tmp_path: Path) -> None:
    reference = np.concatenate([tensor.sketch for tensor in golden_file.tensors])
    reference[5] = np.nan
    with pytest.raises(InputError, match="NaN"):
        Golden.read(edit_arrays(path, tmp_path / "bad.npz", reference=reference))


def test_the_size_of_a_tensor_whose_entries_are_all_known_is_exact(path: Path, golden_file: Golden, tmp_path: Path) -> None:
    at = [tensor.name for tensor in golden_file.tensors].index("logits")
    sizes = np.array([tensor.scale for tensor in golden_file.tensors])
    sizes[at] *= 1.001
    with pytest.raises(InputError, match="its size of logits does not fit"):
        Golden.read(edit_arrays(path, tmp_path / "bad.npz", sizes=sizes))


def test_no_rounding_errors_of_a_file_make_a_wrong_function_pass(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = edit_arrays(path, tmp_path / "wide.npz", rounding=np.full((2, TENSORS), np.inf))
    assert all(tensor.float64_tolerance == MAX_TOLERANCE["float64"] for tensor in Golden.read(file).tensors)
    plant_fault(monkeypatch, vit_torch, mlp={"activation": "gelu_tanh"})
    found = golden.verify(file, only="torch")
    assert not found.passed and len(found.golden.unjudged[0].names) == TENSORS


def test_a_model_that_does_not_fit_into_memory_is_refused_before_its_inputs_are_drawn(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "available_memory", lambda: 1000)
    monkeypatch.setattr(reproducible_init, "noise", lambda *arguments: pytest.fail("random numbers were drawn"))
    message = r"{}: a pass of its model in float64 takes at least 0\.0 GB of memory, and 0\.0 GB are available"
    with pytest.raises(InputError, match=message.format("plain.npz")):
        golden.verify(path)
    with pytest.raises(InputError, match=message.format("new.npz")):
        golden.record(PLAIN, tmp_path / "new.npz")


def test_images_are_compared_before_weights_are_drawn(path: Path, golden_file: Golden, tmp_path: Path) -> None:
    sums = {**golden_file.checksums, "images": "0"}
    file = edit_header(path, tmp_path / "bad.npz", checksums=sums)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="its seed no longer gives"):
        patch.setattr(reproducible_init, "weights", lambda *arguments: pytest.fail("weights were drawn"))
        golden.verify(file)


def test_a_truncated_golden_file_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cut\.npz is not an npz file that can be read, or is damaged"):
        Golden.read(tmp_path / "cut.npz")


def test_a_flipped_bit_is_refused_as_damage(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bit.npz").write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        Golden.read(tmp_path / "bit.npz")


def test_an_npz_of_weights_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", x=np.zeros(3))
    with pytest.raises(InputError, match="is not a golden file"):
        Golden.read(tmp_path / "weights.npz")


def test_a_missing_file_is_refused_with_the_nearest_name(path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'plain\.npz'"):
        golden.verify(path.with_name("plane.npz"))


def test_changed_random_numbers_are_not_blamed_on_a_framework(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducible_init, "_STD", reproducible_init._STD * 1.001)
    with pytest.raises(InputError, match="no fault of a framework"):
        golden.verify(path)


WRONG_WEIGHTS = {
    "none": (None, r"give that file with --weights FILE"),
    "of other values": (Checkpoint(PLAIN, "jax", {}), "other weights"),
    "of another config": (Checkpoint(PLAIN.replace(norms={"eps": 1e-5}), "jax", {}), r"norms\.eps was 1e-06 and is 1e-05"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_a_golden_file_of_given_weights_refuses_others(case: str, weights_path: Path) -> None:
    weights, message = WRONG_WEIGHTS[case]
    if weights is not None:
        weights = replace(weights, arrays=_flat(perturbed_params(weights.config, seed=1)))
    with pytest.raises(InputError, match=message):
        golden.verify(weights_path, weights=weights)


def test_a_golden_file_of_seeded_weights_takes_no_weights(path: Path) -> None:
    with pytest.raises(InputError, match="leave --weights out"):
        golden.verify(path, weights=reproducible_init.weights(PLAIN, 0))


def test_weights_that_compute_nan_are_not_recorded(tmp_path: Path) -> None:
    weights = perturbed_params(PLAIN)
    weights["blocks"]["norm1"]["scale"][:] = np.nan
    with pytest.raises(InputError, match=r"computes NaN or infinities, first at blocks\.0\.norm1"):
        golden.record(Checkpoint(PLAIN, "jax", _flat(weights)), tmp_path / "nan.npz")
    assert not list(tmp_path.iterdir())


def test_twins_that_disagree_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(inputs: PassInputs) -> TorchTwin:
        return TorchTwin(replace(inputs, images=inputs.images * np.float32(1.001)))

    monkeypatch.setattr(verification, "JaxTwin", other)
    with pytest.raises(InputError, match="twins must agree to record a golden file, and in float64 jax differs by"):
        golden.record(PLAIN, tmp_path / "wrong.npz")


def test_recording_requires_both_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent, message in (("jax", "jax is not installed"), ("torch", "jax and torch are not installed")):
        monkeypatch.setitem(sys.modules, absent, None)
        with pytest.raises(InputError, match=f"recorded with both frameworks, and the packages? {message}: pip install"):
            golden.record(PLAIN, tmp_path / "one.npz")


def test_verification_requires_a_framework(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flax", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="only torch is to be verified, and the package torch is not installed: pip"):
        golden.verify(path, only="torch")
    with pytest.raises(InputError, match="neither framework can run: the packages flax and torch are not installed: pip"):
        golden.verify(path)


UNWRITABLE = {
    "golden.safetensors": "ends in .npz",
    "nowhere/golden.npz": "no folder",
    "there.npz": "exists",
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_unwritable_path_is_refused_before_the_models_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "there.npz").touch()
    with pytest.raises(InputError, match=UNWRITABLE[name]):
        golden.record(vit_spec.get("vit_22b14"), tmp_path / name)


def test_force_replaces_golden_files_and_no_checkpoint(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
    parity.save(tmp_path / "weights.npz", perturbed_params(ONE), ONE, "jax")
    before = (tmp_path / "weights.npz").read_bytes()
    (tmp_path / "link.npz").symlink_to("weights.npz")
    for name in ("weights.npz", "link.npz"):
        assert main(["golden", "record", str(tmp_path / "weights.npz"), str(tmp_path / name), "--force"]) == 2
        assert f"{name} exists and is not a golden file: give another name" in capsys.readouterr().err
    with pytest.raises(InputError, match="is not a golden file"):  # also if it appears during the computation
        golden.record(ONE, tmp_path / "new.npz", force=True, progress=lambda what: (tmp_path / "new.npz").touch())
    assert (tmp_path / "weights.npz").read_bytes() == before
    golden.record(ONE, path, force=True)
    assert Golden.read(path).config == ONE


def test_a_model_is_given_by_name_or_by_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PLAIN.to_json())
    assert golden.read_model("vit_s16") == vit_spec.get("vit_s16")
    assert golden.read_model(str(tmp_path / "config.json")) == PLAIN
    with pytest.raises(InputError, match="neither a named model nor a file; did you mean 'vit_s16'"):
        golden.read_model("vit_s61")


def test_options_of_a_checkpoint_are_refused_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PLAIN.to_json())
    for name in ("vit_s16", str(tmp_path / "config.json")):
        with pytest.raises(InputError, match=r"are for a checkpoint, and .* is a config without weights: leave them out"):
            golden.read_model(name, given={"norms.eps": 1e-5})


# Commands -------------------------------------------------------------------------------------------------------------

# Which prefix and other arrays a checkpoint without a config has, and the options that then read it.
READING_OPTIONS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "--set": ("", {}, ["--set", "norms.eps=1e-5"]),
    "--strip": ("my.enc.", {}, ["--strip", "my.enc."]),
    "--ignore": ("", {"aux.w": np.ones(3, np.float32)}, ["--ignore", "aux[.].*"]),
    "--from": ("", {}, ["--from", "torch"]),
    "--format-file": ("own.", {}, ["--format-file", "own.txt"]),
}


@pytest.mark.parametrize("option", READING_OPTIONS)
def test_a_checkpoint_is_verified_with_the_options_with_which_it_was_recorded(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)  # to save time
    monkeypatch.chdir(tmp_path)
    prefix, more, words = READING_OPTIONS[option]
    Path("own.txt").write_text(format_text(formats.get("torch")).replace("\ndescription:", "\nstrip: own.\ndescription:"))
    state = {f"{prefix}{key}": np.asarray(value) for key, value in to_torch(perturbed_params(ONE), ONE).items()}
    save_file(state | more, "weights.safetensors")
    height, width = ONE.image_size
    options = [*words, "--set", f"num_heads={ONE.num_heads}", f"image_size={height}x{width}"]
    assert main(["golden", "record", "weights.safetensors", "golden.npz", *options]) == 0
    verify = ["golden", "verify", "golden.npz", "--only", "torch"]
    assert main([*verify, "--weights", "weights.safetensors", *options]) == 0


def test_options_of_weights_are_refused_without_weights(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["golden", "verify", str(path), "--set", "norms.eps=1e-5"]) == 2
    assert "say how --weights is read: give --weights, or leave them out" in capsys.readouterr().err


def test_a_file_that_is_no_golden_file_is_refused_before_others_are_computed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, "_measure", lambda *arguments: pytest.fail("a golden file was computed"))
    assert main(["golden", "verify", str(path), str(path.with_name("plane.npz"))]) == 2
    assert "did you mean 'plain.npz'" in capsys.readouterr().err


def test_results_before_an_error_are_printed(
    path: Path, weights_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_fault(monkeypatch, vit_torch, norms={"eps": 1e-5})
    words = ["golden", "verify", str(path), str(weights_path), "--only", "torch"]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "FAIL: " in printed.out and "torch changed: blocks.0.norm1 differs" in printed.out
    assert "give that file with --weights FILE" in printed.err


def test_json_does_not_pass_if_a_golden_file_was_not_verified(
    path: Path, weights_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["golden", "verify", str(path), str(weights_path), "--only", "torch", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and [each["passed"] for each in found["files"]] == [True]


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
