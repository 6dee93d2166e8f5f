"""Golden files of `assert_parity`, written and verified without pytest; the plugin is in test_assert_parity.py."""

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")

from flax import linen

from parity.comparison.any_model import compare_models, golden_outputs
from parity.comparison.any_model.report import PairReport
from vit_spec import InputError

VALUES = np.random.default_rng(0).normal(size=(8, 32))
MASKED = np.where(np.arange(32) < 28, VALUES, -1e30)
LARGE_COLUMN = np.where(np.arange(32) < 31, VALUES, 1e7)
IDENTIFIERS = 10**12 + np.arange(32)


@pytest.fixture(scope="module")
def passed() -> PairReport:
    params = {"params": {"kernel": np.ones((4, 2), np.float32), "bias": np.zeros(2, np.float32)}}
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return compare_models(linen.Dense(2).apply, params, torch.nn.Linear(4, 2), rows)


def with_output(report: PairReport, output: Any, float32: Any = None, **changes: Any) -> PairReport:
    """Return a report with another output of both models, and with another one in float32 if it is given."""
    runs = {
        run: {"output": output if float32 is None or run.endswith("float64") else float32}
        for run in ("torch float64", "flax float64", "torch float32", "flax float32")
    }
    return dataclasses.replace(report, runs=runs, **changes)


@pytest.mark.parametrize(
    ("recorded", "now", "difference"),
    [
        (MASKED, np.where(MASKED == -1e30, MASKED, VALUES * (1 + 1e-9)), "9.4e-10"),
        (LARGE_COLUMN, np.where(LARGE_COLUMN == 1e7, LARGE_COLUMN, VALUES * (1 + 1e-7)), "1.0e-07"),
        (IDENTIFIERS, IDENTIFIERS + 1, "1.0e+00"),
    ],
    ids=["masked", "small", "integers"],
)
def test_a_golden_file_shows_differences_that_large_entries_hide(
    passed: PairReport, tmp_path: Path, recorded: Any, now: Any, difference: str
) -> None:
    path = tmp_path / "a.npz"
    golden_outputs.record(path, with_output(passed, recorded), "test_it")
    assert golden_outputs.verify(path, with_output(passed, recorded), "test_it") == []
    lines = golden_outputs.verify(path, with_output(passed, now), "test_it")
    assert [line.partition(":")[0] for line in lines] == ["flax has changed", "torch has changed"]
    assert all(f"in float64 output differs by {difference} from the recorded output" in line for line in lines)


def test_a_golden_file_shows_float32_errors_that_masked_entries_hide(passed: PairReport, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    golden_outputs.record(path, with_output(passed, MASKED), "test_it")
    less_precise = with_output(passed, MASKED, np.where(MASKED == -1e30, MASKED, VALUES * (1 + 1e-4)))
    lines = golden_outputs.verify(path, less_precise, "test_it")
    assert len(lines) == 2 and all("in float32 the error of output is 9" in line for line in lines)


def with_rows(report: PairReport, **changes: Any) -> PairReport:
    """Return a report with other facts in the rows of all tensors."""
    return dataclasses.replace(report, rows=tuple(dataclasses.replace(row, **changes) for row in report.rows))


@pytest.mark.parametrize("side", ["recorded", "now"])
def test_a_golden_file_has_the_tolerances_in_float64_of_the_comparison(
    passed: PairReport, tmp_path: Path, side: str
) -> None:
    reports = {"recorded": with_output(passed, VALUES), "now": with_output(passed, VALUES * (1 + 1e-11))}
    amplified = {**reports, side: with_rows(reports[side], float64_tolerance=1e-10)}
    path = tmp_path / "a.npz"
    for each, n_changes in ((reports, 2), (amplified, 0)):
        golden_outputs.record(path, each["recorded"], "test_it")
        assert len(golden_outputs.verify(path, each["now"], "test_it")) == n_changes
    golden_outputs.record(path, with_rows(passed, float64_tolerance=1e-3), "test_it")
    with pytest.raises(InputError, match="its tolerances have the wrong type"):
        golden_outputs.verify(path, passed, "test_it")


def test_a_golden_file_shows_no_float32_errors_of_long_sums(passed: PairReport, tmp_path: Path) -> None:
    exact, in_another_order = (with_output(passed, VALUES, VALUES * (1 + error)) for error in (1e-7, 2e-5))
    long_sum = with_rows(in_another_order, rounded=(1e-7, 1e-7))
    path = tmp_path / "a.npz"
    for recorded, now in ((exact, long_sum), (long_sum, exact), (long_sum, long_sum), (in_another_order, long_sum)):
        golden_outputs.record(path, recorded, "test_it")
        assert golden_outputs.verify(path, now, "test_it") == []
    golden_outputs.record(path, long_sum, "test_it")
    assert len(golden_outputs.verify(path, in_another_order, "test_it")) == 2


def test_a_golden_file_of_level_function_is_refused_at_level_precision(passed: PairReport, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    golden_outputs.record(path, with_output(passed, VALUES, level="function"), "test_it")
    assert golden_outputs.verify(path, with_output(passed, VALUES, level="function"), "test_it") == []
    with pytest.raises(InputError, match="has no errors of level 'precision': record it again with --parity-record"):
        golden_outputs.verify(path, with_output(passed, VALUES), "test_it")
    golden_outputs.record(path, with_output(passed, VALUES), "test_it")
    assert golden_outputs.verify(path, with_output(passed, 2 * VALUES, level="function"), "test_it")


@pytest.mark.parametrize(
    ("kind", "name", "now", "expected"),
    [
        ("weights", "a", "(2,) 3", r"other weights \(1 of 2 differs: a has other values, or another dtype\)"),
        ("weights", "c", "(2,) 3", r"other weights \(1 of 3 differs: c was not recorded\)"),
        (
            "inputs",
            "input 0",
            "(5, 4) 3",
            r"other inputs \(1 of 1 differs: input 0 has the shape \(5, 4\), and \(3, 4\) was ",
        ),
    ],
    ids=["weights", "more weights", "inputs"],
)
@pytest.mark.parametrize("has_fingerprints", [True, False])
def test_a_golden_file_says_which_arrays_were_others(
    passed: PairReport, tmp_path: Path, kind: str, name: str, now: str, expected: str, has_fingerprints: bool
) -> None:
    path, then = tmp_path / "a.npz", {"weights": {"a": "(2,) 1", "b": "(2,) 2"}, "inputs": {"input 0": "(3, 4) 1"}}
    golden_outputs.record(path, dataclasses.replace(passed, fingerprints=then if has_fingerprints else {}), "test_it")
    other = dataclasses.replace(passed, digest="0", fingerprints={**then, kind: {**then[kind], name: now}})
    with pytest.raises(InputError, match=expected if has_fingerprints else "recorded with other weights or inputs: record"):
        golden_outputs.verify(path, other, "test_it")


def test_a_golden_file_names_its_outputs_if_the_models_return_others(passed: PairReport, tmp_path: Path) -> None:
    path, runs = tmp_path / "a.npz", {"torch float64": {"logits": VALUES}}
    golden_outputs.record(path, passed, "test_it")
    with pytest.raises(InputError, match=r"with other outputs \('output'; the models return 'logits'\): record it again"):
        golden_outputs.verify(path, dataclasses.replace(passed, runs=runs), "test_it")


def test_a_failed_write_leaves_the_earlier_golden_file(
    passed: PairReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "goldens" / "a.npz"
    golden_outputs.record(path, passed, "test_it")
    before = path.read_bytes()

    def fill_the_disk(file: Path, **_: Any) -> None:
        file.write_bytes(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fill_the_disk)
    with pytest.raises(InputError, match=r"cannot write .*a.npz \(No space left on device\): correct that, and record it"):
        golden_outputs.record(path, passed, "test_it")
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
