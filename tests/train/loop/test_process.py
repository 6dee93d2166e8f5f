"""Processes that Slurm starts, and those that it only reserves room for; and the memory that a process keeps."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests import ROOT
from train.loop.process import SRUN_VARIABLES, is_started_by_srun
from vit_spec import InputError

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SRUN_VARIABLES, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("count", [None, "", "1"])
def test_one_task_needs_no_srun(count: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if count is not None:
        monkeypatch.setenv("SLURM_NTASKS", count)
    assert not is_started_by_srun()


def test_processes_of_srun_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM_NTASKS="2", **STEP)
    assert is_started_by_srun()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert is_started_by_srun()


@pytest.mark.parametrize(
    "variables",
    [
        {},  # the shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # the script of sbatch
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # the shell of salloc as a step of its own
    ],
)
@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_tasks_that_srun_has_not_started_are_refused_in_a_line(
    trainer: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(trainer)
    cluster = import_module(f"train.{trainer}.cluster")
    for name in ("WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    set_variables(monkeypatch, SLURM_NTASKS="8", **variables)
    with pytest.raises(
        InputError, match="SLURM_NTASKS is 8, and srun has not started this process: start it with srun, or"
    ):
        cluster.join_cluster()


STEPS = """
import resource

import numpy as np

from train.loop import process

process.SMALL_ARRAYS = 50 << 20
process.keep_freed_memory()
state = [np.ones(1 << 20, np.uint8) for _ in range({state})]
{release}
kept = []
for step in range(4):
    memory = np.ones(200 << 20, np.uint8)
    kept.append(np.ones(1 << 20, np.uint8))
    del memory
    kept.append(np.ones(1 << 20, np.uint8))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.parametrize(
    ("state", "release"),
    [(1, ""), (100, "process.release_freed_memory()")],  # MiB: the larger one fills the block for small arrays
)
def test_a_step_reuses_its_memory_although_small_arrays_outlive_it(state: int, release: str) -> None:
    code = STEPS.format(state=state, release=release)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, *_, last = map(int, run.stdout.split())
    assert 200 < first and last - first < 20


RELEASE = """
import numpy as np

from train.loop import process


def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))


process.SMALL_ARRAYS = 50 << 20
process.keep_freed_memory()
pieces = [np.ones(20 << 20, np.uint8) for _ in range(10)]
kept = pieces[9]
del pieces
print(resident())
process.release_freed_memory()
print(resident())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident memory from /proc")
def test_freed_memory_is_returned_on_request_although_it_is_kept() -> None:
    run = subprocess.run([sys.executable, "-c", RELEASE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before > 200 and after < before - 150
