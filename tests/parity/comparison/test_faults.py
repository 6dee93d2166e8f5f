"""A mistake that is planted in a twin, a column or an optimizer is found, and its part is named.

Here are every fifth of the faults, for the sake of time; `python -m benchmarks.faults` plants them all.
"""

import sys
from collections.abc import Iterator

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("optax")
torch = pytest.importorskip("torch")

from tests.faults import FAULTS, Fault, planted
from tests.faults.outcomes import checked, diagnosed, explained, named


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For models this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SOME = FAULTS[::5]


def _each(faults: list[Fault]) -> list[object]:
    return [pytest.param(fault, id=fault.id.replace(" ", "-")) for fault in faults]


@pytest.mark.parametrize("fault", _each([fault for fault in SOME if not fault.unnamed]))
def test_the_check_fails_and_names_the_part(fault: Fault) -> None:
    report = checked(fault, backward=False, steps=20)
    assert named(fault, report), report.verdict


@pytest.mark.parametrize("fault", _each([fault for fault in FAULTS if fault.unnamed]))
def test_the_check_fails_where_the_part_cannot_be_told(fault: Fault) -> None:
    assert not checked(fault, backward=False).passed


@pytest.mark.parametrize("fault", _each([fault for fault in SOME if fault.cause]))
def test_the_diagnosis_names_the_cause(fault: Fault) -> None:
    found = diagnosed(fault)
    assert explained(fault, found), found.verdict


def test_few_parts_cannot_be_told() -> None:
    assert sum(bool(fault.unnamed) for fault in FAULTS) <= 0.05 * len(FAULTS)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_a_fault_is_gone_after_its_block(file: str) -> None:
    import vit_jax
    import vit_torch
    from parity.checkpoints.formats import get

    before = vit_jax.ViT, vit_torch.ViT, get("jax"), get("torch")
    with planted(next(fault for fault in FAULTS if fault.file == file)):
        assert (
            sys.modules["vit_jax"].ViT,
            sys.modules["vit_torch"].ViT,
            get("jax"),
            get("torch"),
        ) != before
    assert (sys.modules["vit_jax"].ViT, sys.modules["vit_torch"].ViT, get("jax"), get("torch")) == before


def test_a_fault_is_one_change_of_what_computes() -> None:
    assert all(compile(fault.mistaken(), fault.file, "exec") for fault in FAULTS)
    changes = {(fault.file, fault.old, fault.new, str(fault.changes)) for fault in FAULTS}
    assert len(changes) == len(FAULTS)
