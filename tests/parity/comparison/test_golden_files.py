"""Golden files: what both twins agreed on once is verified later, and what moved is named.

`tests/goldens/versions` holds two of this project's own.  When a new version of a framework moves one for a good reason:
`golden.record(Golden.read(path).config, path, force=True)`.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import vit_jax
import vit_spec
import vit_torch
from parity.checkpoints.weights import Checkpoint, to_torch
from parity.comparison import framework_settings, golden, reproducible_init
from parity.comparison.forward_backward import Subject, TorchTwin
from parity.comparison.golden import verification
from parity.comparison.golden.drift import moved
from parity.comparison.golden.file import Golden
from parity.comparison.golden.sketch import KEPT, sketch
from parity.comparison.golden.subject import checksums, shown
from parity.comparison.tolerances import RATIO, luck
from tests import ROOT
from tests.twins import perturbed, small
from vit_spec import InputError

VERSIONS = ROOT / "tests" / "goldens" / "versions"
PLAIN = small(vit_spec.get("vit_s16"))
TENSORS = 77


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of a golden of a small model, recorded on another machine."""
    path = tmp_path / "plain.npz"
    path.write_bytes((VERSIONS / "vit_s16.npz").read_bytes())
    return path


@pytest.fixture(scope="module")
def of_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "weights.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "JaxTwin", TorchTwin)  # which is quicker
        golden.record(Checkpoint(PLAIN, "jax", _flat(perturbed(PLAIN))), path)
    return path


@pytest.fixture
def recorded(path: Path) -> Golden:
    return Golden.read(path)


# The goldens of this project's own versions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(each.stem for each in VERSIONS.glob("*.npz")))
def test_jax_and_torch_compute_what_they_did_when_this_was_recorded(name: str) -> None:
    found = golden.verify(VERSIONS / f"{name}.npz")
    assert found.passed, found.verdict
    assert len(found.now.function) == 2


def test_there_are_goldens_of_versions_and_they_are_small() -> None:
    sizes = [each.stat().st_size for each in VERSIONS.glob("*.npz")]
    assert len(sizes) == 2
    assert max(sizes) < 60_000


# Recorded, and verified -----------------------------------------------------------------------------------------------


def test_what_is_recorded_verifies_and_is_the_same_bytes_twice(tmp_path: Path) -> None:
    golden.record(small(vit_spec.get("vit_s16"), depth=1), tmp_path / "first.npz")
    found = golden.verify(tmp_path / "first.npz")
    assert found.passed and not found.changed
    replace(found.golden, records=(found.now,)).write(tmp_path / "second.npz")
    assert (tmp_path / "second.npz").read_bytes() == (tmp_path / "first.npz").read_bytes()


def test_drawn_weights_make_the_recorded_reference_whatever_the_machine(recorded: Golden) -> None:
    assert recorded.config == PLAIN
    assert checksums(shown(reproducible_init.weights(PLAIN, 0), 0)) == recorded.checksums


def test_what_is_read_is_what_was_written(recorded: Golden, tmp_path: Path, path: Path) -> None:
    recorded.write(tmp_path / "copy.npz")
    assert (tmp_path / "copy.npz").read_bytes() == path.read_bytes()


def test_every_intermediate_and_every_gradient_is_in_it(recorded: Golden) -> None:
    names = [tensor.name for tensor in recorded.tensors]
    assert names.index("blocks.0.attn.scores") < names.index("logits") < names.index("gradient of head.weight")
    assert {f"gradient of {name}" for name in vit_torch.ViT(PLAIN).state_dict()} < set(names)


@pytest.mark.parametrize(("absent", "other"), [("jax", "torch"), ("torch", "jax")])
def test_where_a_framework_is_missing_the_other_alone_computes_the_float64_reference_to_1e_13(
    absent: str, other: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (absent, f"vit_{absent}"):
        monkeypatch.setitem(sys.modules, name, None)
    found = golden.verify(path)
    assert set(found.now.function) == {other}
    assert np.nanmax(found.now.function[other]) < 1e-13
    assert f"{absent} was not verified: " in str(found)


def test_weights_of_a_file_verify_in_another_format(of_weights: Path) -> None:
    as_torch = Checkpoint(PLAIN, "torch", to_torch(perturbed(PLAIN), PLAIN))
    assert golden.verify(of_weights, weights=as_torch, only="torch").passed


# What moved is named --------------------------------------------------------------------------------------------------


def faulty(monkeypatch: pytest.MonkeyPatch, twin: Any, **change: Any) -> None:
    right = twin.ViT
    monkeypatch.setattr(twin, "ViT", lambda config, execution: right(config.replace(**change), execution))


def later(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    now = framework_settings.environment
    monkeypatch.setattr(framework_settings, "environment", lambda options=None: {**now(options), **versions})


def test_a_fault_names_the_layer_and_the_versions_then_and_now(
    path: Path, recorded: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, vit_torch, mlp={"activation": "gelu_tanh"})
    later(monkeypatch, torch="99.1")
    found, then = golden.verify(path, only="torch"), recorded.records[0].environment["torch"]
    assert not found.passed
    assert (found.first["torch"].tensor, found.first["torch"].dtype) == ("blocks.0.mlp.activation", "float64")
    assert "torch moved: blocks.0.mlp.activation is " in found.verdict
    assert f"Recorded with torch {then}" in found.verdict and "now torch 99.1" in found.verdict
    assert found.changed["torch"] == [then, "99.1"]


def test_a_fault_names_the_framework_that_it_is_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, vit_jax, norms={"eps": 1e-5})
    found = golden.verify(path)
    assert found.first.keys() == {"jax"}
    assert (found.first["jax"].tensor, found.first["jax"].dtype) == ("blocks.0.norm1", "float64")


def test_what_moves_both_alike_is_blamed_on_neither(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "JaxTwin", TorchTwin)
    faulty(monkeypatch, vit_torch, norms={"eps": 1e-5})
    assert "jax and torch moved alike" in golden.verify(path).verdict


def test_a_twin_that_is_coarser_in_float32_alone_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vit_torch.ViT

    class Coarse(right):  # type: ignore[misc, valid-type]
        def encode(self, x, tables):
            return super().encode(x * (1 + (1e-5 * (x > 0) if x.dtype.itemsize == 4 else 0)), tables)

    monkeypatch.setattr(vit_torch, "ViT", Coarse)
    found = golden.verify(path, only="torch")
    assert {each.dtype for each in found.moved} == {"float32"}
    assert found.first["torch"].tensor == "blocks.0.norm1"


def with_precision(recorded: Golden, name: str, factor: float) -> Golden:
    """The golden, with torch's float32 distance of one tensor set to 1e-6 then, and `factor` times that now."""
    at = [tensor.name for tensor in recorded.tensors].index(name)
    records = []
    for distance in (1e-6, factor * 1e-6):
        found = recorded.records[0].precision["torch"].copy()
        found[at] = distance
        records.append(replace(recorded.records[0], precision={**recorded.records[0].precision, "torch": found}))
    return replace(recorded, records=tuple(records))


ALLOWED = RATIO * luck(224) + 0.5  # of 2 images, 7 tokens and width 16, and of a tenth of 5e-6


@pytest.mark.parametrize("factor", [1 / 50, 1.01 * ALLOWED, 50.0])
def test_a_float32_distance_that_is_another_is_named_in_either_direction(recorded: Golden, factor: float) -> None:
    changed = with_precision(recorded, "blocks.0", factor)
    [only] = moved(changed, changed.records[1])
    assert (only.framework, only.tensor, only.dtype) == ("torch", "blocks.0", "float32")


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.99 * ALLOWED])
def test_a_float32_distance_of_another_processor_is_no_verdict(recorded: Golden, factor: float) -> None:
    changed = with_precision(recorded, "blocks.0", factor)
    assert not moved(changed, changed.records[1])


def test_one_parameters_gradient_is_not_judged_in_float32(recorded: Golden) -> None:
    changed = with_precision(recorded, "gradient of blocks.0.norm1.bias", 5.0)
    assert not moved(changed, changed.records[1])


def test_an_intermediate_that_is_not_there_any_more_has_moved(recorded: Golden) -> None:
    at = [tensor.name for tensor in recorded.tensors].index("pool")
    found = recorded.records[0].function["jax"].copy()
    found[at] = np.nan
    now = replace(recorded.records[0], function={**recorded.records[0].function, "jax": found})
    [only] = moved(recorded, now)
    assert str(only) == "pool is missing, of another shape, or not finite in float64"


def test_facts_are_json(path: Path) -> None:
    found = golden.verify(path, only="torch")
    assert json.loads(json.dumps(found.facts(), allow_nan=False))["passed"]


# History --------------------------------------------------------------------------------------------------------------


def test_records_are_added_and_the_table_marks_what_moved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, vit_torch, norms={"eps": 1e-5})
    later(monkeypatch, torch="99.1")
    golden.verify(path, only="torch", append=True)
    history = golden.table([path])
    first, second = history.facts()[str(path)]
    assert not first["moved"]
    assert second["moved"][0] == "torch float64 blocks.0.norm1"
    [row] = [line for line in str(history).splitlines() if "99.1" in line]
    assert "torch: blocks.0.norm1" in row


def test_an_added_record_does_not_move_the_bar(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, vit_torch, norms={"eps": 1e-5})
    golden.verify(path, only="torch", append=True)
    assert not golden.verify(path, only="torch").passed


# Drawn, and sketched --------------------------------------------------------------------------------------------------


def test_drawn_numbers_are_those_of_every_version_and_machine() -> None:
    assert hashlib.sha256(reproducible_init.noise(0, "x", (3, 5)).tobytes()).hexdigest()[:16] == "ff32f420405c5547"


def test_drawn_numbers_have_their_mean_and_deviation() -> None:
    x = reproducible_init.noise(1, "x", (400_000,), 0.5, 2.0).astype(np.float64)
    assert abs(x.mean() - 0.5) < 5 * 2 / 400_000**0.5
    assert abs(x.std() - 2) < 5 * 2 / 800_000**0.5


def test_streams_of_two_names_or_two_seeds_are_others() -> None:
    found = {reproducible_init.noise(seed, name, (4,)).tobytes() for seed in (0, 1) for name in ("a", "b")}
    assert len(found) == 4


def test_a_longer_stream_begins_with_the_shorter() -> None:
    assert np.array_equal(reproducible_init.noise(0, "x", (2**20 + 5,))[:9], reproducible_init.noise(0, "x", (9,)))


@pytest.mark.parametrize("name", ["vit_s16", "dinov2_s14", "vit_s16_plain"])
def test_drawn_weights_have_no_zero_no_one_and_no_repetition(name: str) -> None:
    config = small(vit_spec.get(name))
    flat = np.concatenate([array.ravel() for array in reproducible_init.weights(config, 0).arrays.values()])
    assert not np.isin(flat, (0.0, 1.0)).any()
    assert len(np.unique(flat)) > 0.98 * len(flat)


def test_a_sketch_sees_a_change_of_any_entry() -> None:
    x = np.random.default_rng(0).standard_normal((7, 15))
    for i in range(x.size):
        changed = x.copy()
        changed.flat[i] += 1e-9
        assert np.linalg.norm(sketch(changed) - sketch(x)) == pytest.approx(1e-9, rel=1e-5)


def test_a_sketch_tells_distances_within_what_32_sums_scatter_by() -> None:
    rng = np.random.default_rng(0)
    x, error = rng.standard_normal(10_000), rng.standard_normal(10_000)
    ratio = np.linalg.norm(sketch(x + error) - sketch(x)) / np.linalg.norm(error)
    assert abs(ratio - 1) < 4 / (2 * KEPT) ** 0.5


def test_a_small_tensor_is_its_own_sketch() -> None:
    assert np.array_equal(sketch(np.arange(6.0).reshape(2, 3)), np.arange(6.0))


# Bad input ------------------------------------------------------------------------------------------------------------


def edited(path: Path, target: Path, **arrays: Any) -> Path:
    """A copy of a golden with some arrays replaced, or left out where None."""
    with np.load(path) as file:
        held = {**file, **arrays}
    np.savez(target, **{name: array for name, array in held.items() if array is not None})
    return target


def with_header(path: Path, target: Path, **fields: Any) -> Path:
    with np.load(path) as file:
        header = json.loads(file["header"].tobytes())
    text = json.dumps({name: value for name, value in {**header, **fields}.items() if value is not None})
    return edited(path, target, header=np.frombuffer(text.encode(), np.uint8))


HUGE = {**json.loads(PLAIN.to_json()), "depth": 10**9}
HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative seed": ({"seed": -1}, "none that numbers can be drawn from"),
    "a seed of many digits": ({"seed": 10**250}, "none that numbers can be drawn from"),
    "a config of absurd depth": ({"config": HUGE}, "gradients of 32 parameters, where its config has 12,000,000,008"),
    "another config": ({"config": json.loads(PLAIN.replace(mlp_dim=32).to_json())}, "gradients of other parameters"),
    "a config that is none": ({"config": {"width": -1}}, "lacks"),
    "no seed": ({"seed": None}, "lacks or should not have 'seed'"),
    "a seed that is text": ({"seed": "0"}, "seed in its header is a str"),
    "a later version": ({"golden": 2}, "version 2"),
    "tensors without names": ({"tensors": [[1, [2]]]}, "not different names"),
    "a record nested without end": ({"records": [{"environment": {"a": [[[[]]]]}, "frameworks": ["jax"]}]}, "record 0"),
    "no records": ({"records": []}, "the recording itself"),
    "a record of another framework": ({"records": [{"environment": {}, "frameworks": ["tf"]}]}, "record 0"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_wrong_is_refused_in_a_line(case: str, path: Path, tmp_path: Path) -> None:
    fields, told = HEADERS[case]
    with pytest.raises(InputError, match=told) as error:
        Golden.read(with_header(path, tmp_path / "bad.npz", **fields))
    assert "\n" not in str(error.value) and "bad.npz" in str(error.value)


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no header": ({"header": None}, "no golden file"),
    "no reference": ({"reference": None}, "reference is nothing"),
    "a shorter reference": ({"reference": np.zeros(3)}, "expected float64"),
    "a reference of float32": ({"sizes": np.zeros(5, np.float32)}, "expected float64"),
    "no record": ({"records.0": None}, "records.0 is nothing"),
    "another array": ({"more": np.zeros(3)}, "none of a golden file's"),
    "negative distances": ({"records.0": np.full((2, 2, TENSORS), -1.0)}, "negative distances"),
    "a record of nothing": ({"records.0": np.full((2, 2, TENSORS), np.nan)}, "none of the logits"),
    "gradients of zeros": ({"sizes": np.zeros(TENSORS)}, "gradients are all zero"),
    "a header that is no JSON": ({"header": np.frombuffer(b"{", np.uint8)}, "not JSON"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_are_wrong_are_refused_in_a_line(case: str, path: Path, tmp_path: Path) -> None:
    arrays, told = ARRAYS[case]
    with pytest.raises(InputError, match=told) as error:
        Golden.read(edited(path, tmp_path / "bad.npz", **arrays))
    assert "\n" not in str(error.value) and "bad.npz" in str(error.value)


def test_nan_in_the_reference_is_refused(path: Path, recorded: Golden, tmp_path: Path) -> None:
    reference = np.concatenate([tensor.kept for tensor in recorded.tensors])
    reference[5] = np.nan
    with pytest.raises(InputError, match="NaN"):
        Golden.read(edited(path, tmp_path / "bad.npz", reference=reference))


def test_a_truncated_golden_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cut\.npz is not an npz file that can be read, or is damaged"):
        Golden.read(tmp_path / "cut.npz")


def test_a_flipped_bit_is_refused_and_not_blamed_on_a_framework(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bit.npz").write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        Golden.read(tmp_path / "bit.npz")


def test_weights_in_an_npz_are_no_golden(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", x=np.zeros(3))
    with pytest.raises(InputError, match="no golden file"):
        Golden.read(tmp_path / "weights.npz")


def test_a_file_that_is_not_there_is_told_with_the_nearest_name(path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'plain\.npz'"):
        golden.verify(path.with_name("plane.npz"))


def test_a_changed_stream_is_told_from_a_changed_framework(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducible_init, "_STD", reproducible_init._STD * 1.001)
    with pytest.raises(InputError, match="no framework is to blame"):
        golden.verify(path)


OTHERS = {
    "none": (None, r"give it with --weights FILE"),
    "of other values": (Checkpoint(PLAIN, "jax", {}), "other weights"),
    "of another config": (Checkpoint(PLAIN.replace(norms={"eps": 1e-5}), "jax", {}), r"norms\.eps was 1e-06 and is 1e-05"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_golden_of_weights_takes_its_own_alone(case: str, of_weights: Path) -> None:
    weights, told = OTHERS[case]
    if weights is not None:
        weights = replace(weights, arrays=_flat(perturbed(weights.config, seed=1)))
    with pytest.raises(InputError, match=told):
        golden.verify(of_weights, weights=weights)


def test_a_golden_of_drawn_weights_takes_no_others(path: Path) -> None:
    with pytest.raises(InputError, match="leave --weights out"):
        golden.verify(path, weights=reproducible_init.weights(PLAIN, 0))


def test_weights_that_give_nan_are_not_recorded(tmp_path: Path) -> None:
    weights = perturbed(PLAIN)
    weights["blocks"]["norm1"]["scale"][:] = np.nan
    with pytest.raises(InputError, match=r"computes NaN or infinities, first at blocks\.0\.norm1"):
        golden.record(Checkpoint(PLAIN, "jax", _flat(weights)), tmp_path / "nan.npz")
    assert not list(tmp_path.iterdir())


def test_twins_that_disagree_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(subject: Subject) -> TorchTwin:
        return TorchTwin(replace(subject, images=subject.images * np.float32(1.001)))

    monkeypatch.setattr(verification, "JaxTwin", other)
    with pytest.raises(InputError, match="what both twins agree on, and in float64 jax is"):
        golden.record(PLAIN, tmp_path / "wrong.npz")


def test_a_missing_framework_is_asked_for_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vit_jax", None)
    with pytest.raises(InputError, match="not installed: install it"):
        golden.record(PLAIN, tmp_path / "one.npz")


def test_no_framework_at_all_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vit_jax", "vit_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="neither framework can run"):
        golden.verify(path)


TARGETS = {
    "golden.safetensors": "ends in .npz",
    "nowhere/golden.npz": "no folder",
    "there.npz": "exists",
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_path_that_cannot_be_written_to_is_refused_before_anything_is_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "there.npz").touch()
    with pytest.raises(InputError, match=TARGETS[name]):
        golden.record(vit_spec.get("vit_22b14"), tmp_path / name)


def test_a_golden_is_of_a_name_or_of_a_config_or_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PLAIN.to_json())
    assert golden.read_subject("vit_s16") == vit_spec.get("vit_s16")
    assert golden.read_subject(str(tmp_path / "config.json")) == PLAIN
    with pytest.raises(InputError, match="neither a named model nor a file; did you mean 'vit_s16'"):
        golden.read_subject("vit_s61")


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
