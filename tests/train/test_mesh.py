"""Every mesh of eight devices trains alike, holds what it should and sends what it should: simulated, and as processes."""

import fcntl
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("grain")

import numpy as np
from jax.experimental import multihost_utils

import vit_spec
from benchmarks.jax_program import collectives
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Layout
from tests import ROOT
from train.jax.engine import JaxEngine
from train.jax.parameter_tree import mesh_axes, tree
from train.jax.sharding import join_cluster
from train.mesh import AXES, Parameter, Shard, parameters, parse, replicated, share_batch, sizes_for, split
from train.recipes import Recipe
from vit_spec import InputError, Row, ViTConfig

MESHES = ["data=8", "fsdp=8", "tensor=8", "data=2,fsdp=4", "data=2,fsdp=2,tensor=2"]  # benchmarks/mesh.py takes all ten
CONFIG = vit_spec.get("vit_ti16", num_classes=10)


def started(module: str, *arguments: str, devices: int, **environment: str) -> subprocess.Popen[str]:
    """A python module with so many simulated devices; it compiles quickly and not well."""
    simulated = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {simulated} {environment.pop('XLA_FLAGS', '')}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What a process printed."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-2000:]
    return output


@contextmanager
def two(module: str, *arguments: str, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that share a run, with two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    cluster = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"} | environment
    first, second = (started(module, *arguments, devices=2, JAX_PROCESS_ID=str(i), **cluster) for i in range(2))
    with first, second:
        try:
            yield [first, second]
        finally:
            first.kill()
            second.kill()


def both(module: str, *arguments: str, **environment: str) -> list[str]:
    """What two processes printed that share a run."""
    with two(module, *arguments, **environment) as processes:
        return [ended(process) for process in processes]


def once(factory: pytest.TempPathFactory, devices: int, *arguments: str) -> dict[str, Any]:
    """What `tests.meshes` finds: found out by one of the processes that run the tests, and read by the others."""
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    found = folder / f"meshes-{devices}{''.join(arguments)}.json"
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(ended(started("tests.meshes", *arguments, devices=devices)))
        return json.loads(found.read_text())


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, 8, *MESHES)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return once(tmp_path_factory, 1, "data=1")["data=1"]["losses"]


# What eight devices do ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_losses_are_those_of_one_device(mesh: str, eight: dict[str, Any], one: list[float]) -> None:
    # float64: what is left is the order of sums, a few units of 1e-16 each, that three steps carry on
    np.testing.assert_allclose(eight[mesh]["losses"], one, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_is_given_no_more_than_was_planned(mesh: str, eight: dict[str, Any]) -> None:
    given, planned = eight[mesh]["arguments"]
    assert planned <= given <= 1.05 * planned


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_send_each_other_what_was_planned_and_nothing_else(mesh: str, eight: dict[str, Any]) -> None:
    sent, planned = eight[mesh]["transfers"]
    assert sent == planned


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("part", ["parameters", "optimizer", "running mean"])
def test_a_device_holds_its_part_of_the_state(part: str, mesh: str, eight: dict[str, Any]) -> None:
    here, planned = eight[mesh]["held"][part]
    assert here == planned


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_processes_feed_every_image_and_those_with_other_images_no_image_twice(mesh: str, eight: dict[str, Any]) -> None:
    shares = {tuple(rows) for rows in eight[mesh]["shares"]}
    assert sorted(row for rows in shares for row in rows) == list(range(32))


# What several processes do --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_as_one_device_does(one: list[float]) -> None:
    meshes = ("data=2,fsdp=2",)
    for output in both("tests.meshes", *meshes):
        found = json.loads(output.splitlines()[-1])  # ahead of it gloo tells of its connections
        for mesh in meshes:
            np.testing.assert_allclose(found[mesh]["losses"], one, rtol=1e-10)


@pytest.mark.slow
def test_two_processes_share_a_run_of_which_one_is_told_to_stop_and_both_do_and_go_on(tmp_path: Path) -> None:
    size = ["--model.changes", "patch_size=2", "width=32", "depth=2", "num_heads=2", "mlp_dim=64"]
    lengths = ["--epochs", "30steps", "--eval-every", "15steps", "--save-every", "15steps"]
    # A second may pass until jax looks whether there was a signal: steps must not be too short.
    shared = ["--config", "tiny", *size, *lengths, "--batch-size", "256", "--mesh", "data=2,fsdp=2", "--run", str(tmp_path)]
    with two("train.jax", *shared) as processes:
        assert processes[0].stdout
        while not (line := processes[0].stdout.readline()).startswith("folder"):
            assert line, processes[0].communicate()
        processes[1].send_signal(signal.SIGTERM)
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 128 + signal.SIGTERM, errors[-2000:]
    first, second = both("train.jax", *shared)
    assert "fsdp=2 (4 x" in first and "going on from step" in first and "finished" in first
    assert "finished" not in second


def test_a_notice_ahead_of_a_resumed_runs_first_step_stops_it_after_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jax then settles on the number that follows 0, which is none of the run's."""
    engine = JaxEngine(CONFIG, Recipe(batch_size=1), task="classes", rate=float, start=None, folder=tmp_path)
    monkeypatch.setattr(JaxEngine, "distributed", True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda number: number == 1)
    assert [engine.preempted(), engine.preempted()] == [True, False]


@pytest.mark.parametrize("beside", [{}, {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}])
def test_a_cluster_that_is_described_in_part_is_told(beside: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JAX_COORDINATOR_ADDRESS": "localhost:1234", **beside}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="give JAX_NUM_PROCESSES and JAX_PROCESS_ID beside it, numbers both"):
        join_cluster()


# What fetches and sums are in ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_and_their_gradients_travel_in_bfloat16_where_the_model_computes_in_it(tmp_path: Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=spmd-partitioning --xla_dump_hlo_module_re=.*_train.*"
    ended(started("tests.meshes", "--bfloat16", "data=2,fsdp=2,tensor=2", devices=8, XLA_FLAGS=flags))
    # XLA for CPU widens them afterwards: what counts is what the partitioner wrote.
    text = next(tmp_path.glob("*after_spmd-partitioning*")).read_text()
    found = re.findall(r" = (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce)\(", text)
    kinds = {(kind, dtype) for dtype, dims, kind in found if "," in dims}
    assert kinds == {("all-gather", "bf16"), ("all-reduce", "bf16")}


# Rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "devices", "said"),
    [
        ("data=3", 8, "makes 3 of 8 devices"),
        ("data=-1,fsdp=3", 8, "makes 3 of 8 devices"),
        ("data=-1,fsdp=-1", 8, "leaves data and fsdp open: only one of them may be -1"),
        ("fdsp=8", 8, "did you mean 'fsdp'"),
        ("data=8,data=1", 8, "'data=1' is not understood"),
        ("data", 8, "'data' is not understood"),
        ("data=0", 8, "'data=0' is not understood"),
        ("tensor=8", 8, "does not divide the 3 heads"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_a_line(text: str, devices: int, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        sizes_for(text, devices, CONFIG)
    assert "\n" not in str(refused.value)


def test_a_batch_that_the_devices_do_not_divide_is_refused_with_the_next_that_they_do() -> None:
    with pytest.raises(InputError, match=r"8 devices that share it times 3 parts .*: give 120"):
        share_batch(100, 3, {"data": 4, "fsdp": 2, "tensor": 2})


def test_an_axis_that_is_left_open_takes_what_is_left() -> None:
    assert parse("data=-1,fsdp=4", 32) == {"data": 8, "fsdp": 4, "tensor": 1}


def places(sizes: dict[str, int], **changes: Any) -> dict[str, tuple[str | None, ...]]:
    config = CONFIG.replace(**changes)
    found: dict[str, tuple[str | None, ...]] = {}
    tree(config, lambda parameter: found.update({parameter.row.name: mesh_axes(parameter, config, sizes)}))
    return found


def test_matrices_are_split_by_width_and_by_heads_or_hidden_units() -> None:
    found = places({"data": 1, "fsdp": 2, "tensor": 3})
    assert found["blocks.attn.qkv.weight"] == (None, "fsdp", None, "tensor", None)  # block width qkv head dim
    assert found["blocks.mlp.fc2.weight"] == (None, "tensor", "fsdp")  # block ff width


SHARDED = {
    "vit_s16": {},
    "dinov3_h16plus": {},  # a gated MLP: `(glu ff) width`
    "siglip_so400m16": {},
    "vit_b16 with attention pooling": {"head": {"pool": "attention"}},
    "vit_b16 with biases of q and v": {"attention": {"qkv_bias": "qv"}},
    "vit_b16 with a hidden layer": {"head": {"hidden": 96}},
}


def entries_of(array: np.ndarray, shards: tuple[Shard, ...], sizes: dict[str, int], device: dict[str, int]) -> np.ndarray:
    """The entries of an array that one device has."""
    for dim, shard in enumerate(shards):
        if shard.axis:
            grouped = np.split(array, shard.groups, axis=dim)
            parts = [np.split(group, sizes[shard.axis], axis=dim)[device[shard.axis]] for group in grouped]
            array = np.concatenate(parts, axis=dim)
    return array


def numbered(row: Row, layout: Layout, config: ViTConfig) -> np.ndarray:
    """The array of a format with the entries of a parameter numbered, and -1 where another parameter has its place."""
    blocks = [word for word in row.axes if not any(axis.word == word for dim in layout.dims for axis in dim)]
    axes = [axis for dim in layout.dims for axis in dim]
    order = [row.axes.index(word) for word in (*blocks, *(axis.word for axis in axes if axis.word))]
    values = np.arange(row.size).reshape(row.shape).transpose(order)
    values = values.reshape(*values.shape[: len(blocks)], *(config.sizes[a.word] if a.word else 1 for a in axes))
    array = np.full([*values.shape[: len(blocks)], *(config.sizes[axis.holder] for axis in axes)], -1)
    array[(..., *(slice(a.start, a.start + (config.sizes[a.word] if a.word else 1)) for a in axes))] = values
    lengths = [math.prod(config.sizes[axis.holder] for axis in dim) for dim in layout.dims]
    return array.reshape(*values.shape[: len(blocks)], *lengths)


@pytest.mark.parametrize("format", ["jax", "torch"])
@pytest.mark.parametrize("name", SHARDED)
def test_a_device_has_the_same_entries_of_a_parameter_in_either_twin(name: str, format: str) -> None:
    sides = {"image_size": (32, 48), "patch_size": (8, 16), "width": 48, "num_heads": 4, "mlp_dim": 56, "depth": 2}
    config = vit_spec.get(name.split()[0]).replace(**sides, num_classes=12).replace(**SHARDED[name])
    sizes = {"data": 1, "fsdp": 4, "tensor": 2}
    for row_name, parameter in parameters(config, format).items():
        row, array = parameter.row, numbered(parameter.row, get(format).layouts(config)[row_name], config)
        keyed = array.ndim - len(parameter.dims)  # axes that lie in the key: the blocks, one array each
        shards = (*(Shard(),) * keyed, *split(parameter, config, sizes))
        canonical = split(Parameter(row, tuple((word,) for word in row.axes)), config, sizes)
        for fsdp, tensor in itertools.product(range(4), range(2)):
            device = {"fsdp": fsdp, "tensor": tensor}
            found = entries_of(array, shards, sizes, device)
            wanted = entries_of(np.arange(row.size).reshape(row.shape), canonical, sizes, device)
            assert np.array_equal(np.sort(found[found >= 0]), np.sort(wanted.ravel())), row_name


def test_merged_dimensions_are_sharded_within_each_of_their_groups() -> None:
    config = vit_spec.get("dinov3_h16plus")
    found = parameters(config, "torch")
    sizes = {"data": 1, "fsdp": 4, "tensor": 2}
    assert split(found["blocks.attn.qkv.weight"], config, sizes) == (Shard("tensor", 3), Shard("fsdp"))
    assert split(found["blocks.mlp.fc1.weight"], config, sizes) == (Shard("tensor", 2), Shard("fsdp"))
    assert split(found["blocks.attn.proj.weight"], config, sizes) == (Shard("fsdp"), Shard("tensor"))


def test_an_axis_that_does_not_divide_a_dimension_leaves_it_whole() -> None:
    found = places({"data": 1, "fsdp": 5, "tensor": 3})
    assert {name for axes in found.values() for name in axes} == {None, "tensor"}


def test_vectors_and_tables_are_whole_along_fsdp() -> None:
    found = places({"data": 1, "fsdp": 2, "tensor": 1})
    assert {name for name, axes in found.items() if "fsdp" not in axes} == {
        name for name, row in vit_spec.rows(CONFIG).items() if not row.decays
    }


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"data": 1, "fsdp": 5, "tensor": 1},
            r"100\.0% .* not split by fsdp=5: blocks\.mlp\.fc1\.weight 32\.1%, .*, \.\.\.",
        ),
        ({"data": 1, "fsdp": 5, "tensor": 2}, r"100\.0% of the weights are not split by fsdp=5: .*"),
        ({"data": 1, "fsdp": 2, "tensor": 1}, ""),
        ({"data": 8, "fsdp": 1, "tensor": 1}, ""),
    ],
)
def test_weights_that_a_mesh_leaves_whole_are_told(sizes: dict[str, int], said: str) -> None:
    config = vit_spec.get("vit_s16", num_classes=1000)
    assert re.fullmatch(said, replicated(config, sizes))


# Reading a program ----------------------------------------------------------------------------------------------------

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
PROGRAM = """HloModule step

%inner (p: f32[4]) -> f32[4] {
  %g = f32[8,4]{1,0} all-gather(%x), replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
}

%outer (p: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %r = (f32[8]{0}, f32[]) all-reduce(%a, %b), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %v = f32[4]{0} while(%p), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %s = ((f32[4]{0}, bf16[2]{0}), (f32[8]{0}, bf16[4]{0})) all-gather-start(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %d = (f32[8]{0}, bf16[4]{0}) all-gather-done(%s)
  %u = ((f32[6]{0}), f32[6]{0}) all-reduce-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %z = (f32[6]{0}, f32[2]{0}) all-reduce-start(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %t = f32[3]{0} reduce-scatter(%a), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add
  ROOT %e = u8[10]{0} collective-permute(%a), source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}
}
"""


def read() -> list[tuple[str, str, int, int]]:
    return [(c.kind, c.axes, c.times, sum(size for _, size in c.arrays)) for c in collectives(PROGRAM, SIZES)]


def test_what_loops_hold_counts_as_often_as_they_turn() -> None:
    assert read()[:2] == [("all-gather", "fsdp", 15, 128), ("all-reduce", "data+fsdp", 3, 36)]


def test_what_starts_and_ends_apart_counts_once_with_all_its_results() -> None:
    gathered, summed, earlier = read()[2:5]
    assert gathered == ("all-gather", "tensor", 1, 32 + 8)
    assert summed == ("all-reduce", "tensor", 1, 24)
    assert earlier == ("all-reduce", "tensor", 1, 24 + 8)  # as the XLA of jax 0.10 writes it


def test_what_is_scattered_counts_whole() -> None:
    assert read()[5] == ("reduce-scatter", "data", 1, 24)


def test_what_is_passed_on_goes_along_the_axis_that_it_changes() -> None:
    assert read()[6] == ("collective-permute", "fsdp", 1, 10)


def test_a_loop_of_unknown_length_that_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="says not how often"):
        list(collectives(PROGRAM.replace('"n":"5"', ""), SIZES))


def test_groups_that_are_no_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="no axes of the mesh"):
        list(collectives(PROGRAM.replace("{{0,4},{1,5},{2,6},{3,7}}", "{{0,3},{1,2},{4,7},{5,6}}"), SIZES))


def test_the_axes_of_the_rules_are_those_of_the_mesh() -> None:
    assert set(SIZES) == set(AXES)
