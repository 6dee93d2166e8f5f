"""Check and diagnosis of planted faults: a mistake in a twin, a format or an optimizer is detected and its part is named.

To save time, only some of the faults are planted here; `python -m benchmarks.faults` plants all of them.
"""

import sys
from collections.abc import Iterator

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("optax")
torch = pytest.importorskip("torch")

from tests.faults import FAULTS, Fault, plant_fault
from tests.faults.outcomes import names_cause, names_part, run_check, run_diagnosis


@pytest.fixture(scope="module", autouse=True)
def _single_thread() -> Iterator[None]:
    """Run PyTorch on one thread; for such small models a second one only adds overhead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _pytest_params(faults: list[Fault]) -> list[object]:
    return [pytest.param(fault, id=fault.id.replace(" ", "-")) for fault in faults]


ONE_OF_EACH_FILE = list({fault.file: fault for fault in FAULTS if not fault.ambiguity}.values())


@pytest.mark.parametrize("fault", _pytest_params(ONE_OF_EACH_FILE))
def test_the_check_fails_and_names_the_part(fault: Fault) -> None:
    report = run_check(fault, backward=False, steps=3)
    assert names_part(fault, report), report.verdict


@pytest.mark.parametrize("fault", _pytest_params([fault for fault in FAULTS if fault.ambiguity]))
def test_the_check_fails_although_the_part_is_ambiguous(fault: Fault) -> None:
    assert not run_check(fault, backward=False).passed


@pytest.mark.parametrize("fault", _pytest_params([fault for fault in FAULTS[::8] if fault.cause]))
def test_the_diagnosis_names_the_cause(fault: Fault) -> None:
    diagnosis = run_diagnosis(fault)
    assert names_cause(fault, diagnosis), diagnosis.verdict


def test_few_parts_are_ambiguous() -> None:
    assert sum(bool(fault.ambiguity) for fault in FAULTS) <= 0.05 * len(FAULTS)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_a_fault_is_removed_after_its_block(file: str) -> None:
    import vit_jax
    import vit_torch
    from parity.checkpoints.formats import get

    originals = vit_jax.ViT, vit_torch.ViT, get("jax"), get("torch")
    with plant_fault(next(fault for fault in FAULTS if fault.file == file)):
        assert (
            sys.modules["vit_jax"].ViT,
            sys.modules["vit_torch"].ViT,
            get("jax"),
            get("torch"),
        ) != originals
    assert (sys.modules["vit_jax"].ViT, sys.modules["vit_torch"].ViT, get("jax"), get("torch")) == originals


def test_each_fault_is_one_distinct_change_that_compiles() -> None:
    assert all(compile(fault.faulty_source(), fault.file, "exec") for fault in FAULTS)
    changes = {(fault.file, fault.old, fault.new, str(fault.changes)) for fault in FAULTS}
    assert len(changes) == len(FAULTS)
