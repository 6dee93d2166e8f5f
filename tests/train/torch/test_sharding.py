"""Several processes: every mesh gives the step of one process in float64; runs resume on another mesh and stop together."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("grain")

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import ROOT
from tests.shared_results import compute_once
from tests.torch_meshes import CONFIG, MODELS, OPTIMIZERS, RECIPE, RESUMED, SCALE_FREE, make_engine
from train.torch import tensor_parallel
from train.torch.cluster import _cuda_device, _first_host, join_cluster
from train.torch.sharding import local, on_host
from train.torch.tensor_support import check_tensor_support
from vit_spec import InputError

MESHES = ("data=2,fsdp=2", "data=2,tensor=2", "fsdp=2,tensor=2")
SMALL = ("patch_size=4", "width=32", "depth=2", "num_heads=2", "mlp_dim=64")


def start(count: int, *command: str) -> list[subprocess.Popen[str]]:
    """Start the processes of a run as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=shared | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return exit status, output and errors of each process."""
    ended = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process gives, and each mesh of four."""

    def compute(path: Path) -> None:
        started = [
            start(count, "tests.torch_meshes", f"{path}/{count}", *meshes) for count, meshes in ((1, ("",)), (4, MESHES))
        ]
        for ended in map(finish, started):
            assert all(status == 0 for status, *_ in ended), ended[0][2][-2000:]

    path = compute_once(tmp_path_factory, "torch-meshes", compute)
    one, others = (pickle.loads((path / str(count) / "results.pickle").read_bytes()) for count in (1, 4))
    return dict(one | others)


def assert_same(one: dict[str, Any], other: dict[str, Any], *, without_key_biases: bool = False) -> None:
    """Assert that weights agree to 1e-10."""
    for name, entries in other.items():
        a, b = one[name], entries
        if without_key_biases and name.endswith("qkv.bias"):  # the gradient is zero for keys
            a, b = (each.reshape(3, -1)[::2] for each in (a, b))
        assert np.abs(a - b).max() <= 1e-10 * np.abs(b).max(), name


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_steps_of_one_process_in_float64(mesh: str, found: dict[str, Any]) -> None:
    one, other = found["one"], found[mesh]
    for part in ("all parameters", "whole all parameters"):
        assert other[part][0] == pytest.approx(one[part][0], rel=1e-10)
        assert_same(other[part][1], one[part][1])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_evaluates_the_newest_weights(mesh: str, found: dict[str, Any]) -> None:
    """Before a step and after it: FSDP2 must not compute with what it gathered for the evaluation before."""
    for ours, theirs in zip(found[mesh]["evaluated"], found["one"]["evaluated"], strict=True):
        assert np.array(ours, float) == pytest.approx(np.array(theirs, float), rel=1e-10)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mesh_gives_the_update_of_every_optimizer(name: str, mesh: str, found: dict[str, Any]) -> None:
    losses, weights = found[mesh][name]
    assert losses == pytest.approx(found["one"][name][0], rel=1e-10)
    assert_same(weights, found["one"][name][1], without_key_biases=name in SCALE_FREE)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_mesh_gives_the_steps_of_models_with_other_parts(name: str, mesh: str, found: dict[str, Any]) -> None:
    losses, weights = found[mesh][name]
    assert losses == pytest.approx(found["one"][name][0], rel=1e-10)
    assert_same(weights, found["one"][name][1])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_student_on_a_mesh_learns_what_it_learns_in_one_process(mesh: str, found: dict[str, Any]) -> None:
    losses, weights = found[mesh]["taught"]
    assert losses == pytest.approx(found["one"]["taught"][0], rel=1e-10)
    assert_same(weights, found["one"]["taught"][1])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_on_another_mesh(name: str, mesh: str, found: dict[str, Any]) -> None:
    (losses, weights), (expected, whole) = found[mesh]["resumed"][name], found["one"][f"whole {name}"]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert_same(weights, whole, without_key_biases=name == "adafactor")


def test_matrices_are_sharded_along_fsdp_and_nothing_else_is(found: dict[str, Any]) -> None:
    whole = found["one"]["entries"]
    assert 0.9 < 2 * (whole - found["data=2,fsdp=2"]["entries"]) / whole < 1


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the first of two, whose collectives do nothing."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:It seems like you did not set/select the default device")  # by torch 2.9
def test_what_checkpoints_have_of_a_tensor_on_gpus_is_on_the_cpu(fake_group: None) -> None:
    try:
        mesh, entries = init_device_mesh("cuda", (1, 2), mesh_dim_names=("data", "fsdp")), torch.ones(2, 3)
    except ZeroDivisionError:
        pytest.skip("this version of torch makes a mesh of GPUs only where there is one")
    on_gpus = DTensor.from_local(entries.to("meta"), mesh, (Replicate(), Shard(0)), run_check=False)
    tensor = on_host(entries, on_gpus)
    assert isinstance(tensor, DTensor) and (tensor.shape, tensor.placements) == ((4, 3), on_gpus.placements)
    assert local(tensor).data_ptr() == entries.data_ptr()


def test_a_device_gathers_one_tensor_of_a_checkpoint_at_a_time(
    fake_group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, gathered, whole_of = make_engine("tensor=2", tmp_path), list[Any](), tensor_parallel.whole_of

    def gather(*arguments: Any) -> torch.Tensor:
        assert all(earlier() is None for earlier in gathered)
        whole = whole_of(*arguments)
        gathered.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(tensor_parallel, "whole_of", gather)
    target = engine._snapshot(is_empty=True)
    assert not gathered  # to restore needs no more than the checkpoint
    for name, tensor in engine._snapshot().tensors.items():
        assert (target.tensors[name].shape, target.tensors[name].dtype) == (tensor.shape, tensor.dtype)
    assert len(gathered) > 2


# Commands -------------------------------------------------------------------------------------------------------------


def train(path: Path, mesh: str) -> list[str]:
    """Return the arguments of a run of a tiny model."""
    model = ["--config", "tiny", "--model.image-size", "None", "--model.changes", *SMALL]
    return ["train.torch", "--epochs", "40", "--save-every", "10steps", "--run", str(path), "--mesh", mesh, *model]


def wait_for_checkpoint(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not any(path.glob("checkpoints/*/checkpoint.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_to_one_process_stops_all_and_the_end_of_one_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    processes = start(2, *train(path, "fsdp=2"))
    wait_for_checkpoint(path)
    processes[1].send_signal(signal.SIGTERM)
    (status, printed, _), other = finish(processes)
    assert (status, other[0]) == (143, 143) and "to resume" in printed and not other[1]
    processes = start(2, *train(path, "data=2"))
    processes[0].stdout.readline()  # type: ignore[union-attr]
    while " left" not in processes[0].stdout.readline():  # type: ignore[union-attr]
        pass
    processes[1].kill()
    (status, _, errors), _ = finish(processes)
    assert (
        status == 2
        and errors == "error: another process of the run has ended: start all processes again with the same --run\n"
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mlp": {"norm": True}}, "mlp.norm"),
        ({"attention": {"out_norm": True}}, "attention.out_norm"),
        ({"attention": {"proj": False}}, "attention.proj=False"),
        ({"attention": {"value_skip": True}}, "attention.value_skip"),
    ],
)
def test_models_that_tensor_cannot_divide_are_refused(changes: dict[str, Any], name: str) -> None:
    check_tensor_support(CONFIG, RECIPE)
    with pytest.raises(InputError, match=f"train.torch cannot divide models with {name} by --mesh tensor: give data"):
        check_tensor_support(CONFIG.replace(**changes), RECIPE)


@pytest.mark.parametrize("name", ["attn_drop", "mlp_drop"])
def test_dropout_of_heads_and_hidden_units_along_tensor_needs_shared_random_numbers(name: str, fake_group: None) -> None:
    """The parts of PyTorch's generator would be equal: two heads or units of different processes had one mask."""
    config = CONFIG.replace(regularisation={name: 0.5})
    make_engine("tensor=2", config=config, rng="shared")
    make_engine("data=2", config=config)
    make_engine("tensor=2", config=CONFIG.replace(regularisation={"drop_path": 0.5, "pos_drop": 0.5}))
    with pytest.raises(InputError, match=f"one mask of regularisation.{name}: give --rng shared"):
        make_engine("tensor=2", config=config)


def test_variables_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="WORLD_SIZE is set and LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not: start"):
        join_cluster()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_variables_that_are_no_integers_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for variable, value in (given | {name: "two"}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=f"{name} is 'two': set it to an integer"):
        join_cluster()


def test_a_process_that_sees_one_gpu_takes_it_and_others_take_that_of_their_local_rank() -> None:
    assert [_cuda_device(rank, count) for rank, count in ((0, 1), (3, 1), (0, 4), (3, 4))] == [0, 0, 0, 3]
    with pytest.raises(InputError, match="LOCAL_RANK is 4 and this machine has 4 GPUs: start one process for each GPU"):
        _cuda_device(4, 4)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node[003-007,9],other", "node003"), ("a1", "a1"), ("gpu-a,gpu-b", "gpu-a"), ("n-[12,14]", "n-12"), ("", "")],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, host: str) -> None:
    assert _first_host(nodes) == host
