"""Training on meshes of eight simulated devices and of two processes: losses as on one device, memory as estimated."""

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
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
from tests.shared_results import compute_once
from train.jax.cluster import check_same_on_all_processes, join_cluster
from train.jax.engine import JaxEngine
from train.jax.parameter_tree import mesh_axes, tree
from train.mesh import (
    AXES,
    Parameter,
    Shard,
    axis_sizes,
    images_per_device,
    is_shared_by_heads,
    parameters,
    parse_mesh,
    replication_note,
    shard_dims,
)
from train.recipes import Recipe
from vit_spec import InputError, Row, ViTConfig

MESHES = ["data=8", "fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2"]
CONFIG = vit_spec.get("vit_ti16", num_classes=10)


def start_process(module: str, *arguments: str, devices: int, **environment: str) -> subprocess.Popen[str]:
    """Start a Python module in a process with simulated devices; XLA optimises little, to compile quickly."""
    simulated = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {simulated} {environment.pop('XLA_FLAGS', '')}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def process_output(process: subprocess.Popen[str]) -> str:
    """Wait for a process, check that it succeeded, and return its output."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-2000:]
    return output


def free_address() -> str:
    """Return an address of this machine at which no program listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@contextmanager
def process_pair(module: str, *arguments: str, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes of one run, with two simulated devices each; kill them at the end."""
    cluster = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"} | environment
    first, second = (start_process(module, *arguments, devices=2, JAX_PROCESS_ID=str(i), **cluster) for i in range(2))
    with first, second:
        try:
            yield [first, second]
        finally:
            first.kill()
            second.kill()


def pair_outputs(module: str, *arguments: str, **environment: str) -> list[str]:
    """Return the outputs of two processes of one run."""
    with process_pair(module, *arguments, **environment) as processes:
        return [process_output(process) for process in processes]


def measure_once(factory: pytest.TempPathFactory, devices: int, *arguments: str) -> Any:
    """Return the results of `tests.meshes`; one pytest-xdist worker computes them, the others read its file."""

    def compute(path: Path) -> None:
        path.write_text(process_output(start_process("tests.meshes", *arguments, devices=devices)))

    path = compute_once(factory, f"meshes-{devices}{''.join(arguments)}.json", compute)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def eight_device_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure_once(tmp_path_factory, 8, *MESHES)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def one_device_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure_once(tmp_path_factory, 1, "data=1")["data=1"]  # type: ignore[no-any-return]


# Eight simulated devices ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_losses_on_a_mesh_equal_the_losses_on_one_device(
    mesh: str, eight_device_results: dict[str, Any], one_device_results: dict[str, Any]
) -> None:
    # In float64, the losses differ by the order of sums: a few roundings of 1e-16, which accumulate over three steps.
    np.testing.assert_allclose(eight_device_results[mesh]["losses"], one_device_results["losses"], rtol=1e-10)


@pytest.mark.slow
def test_a_student_on_a_mesh_learns_what_it_learns_on_one_device(
    eight_device_results: dict[str, Any], one_device_results: dict[str, Any]
) -> None:
    one, other = one_device_results["taught"], eight_device_results["data=2,fsdp=2,tensor=2"]["taught"]
    assert one
    np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_arguments_of_a_step_take_the_estimated_memory(mesh: str, eight_device_results: dict[str, Any]) -> None:
    measured, estimated = eight_device_results[mesh]["arguments"]
    assert estimated <= measured <= 1.05 * estimated


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_has_exactly_the_estimated_transfers(mesh: str, eight_device_results: dict[str, Any]) -> None:
    measured, estimated = eight_device_results[mesh]["transfers"]
    assert measured == estimated


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("part", ["parameters", "optimizer state", "EMA"])
def test_each_part_of_the_state_takes_the_estimated_memory(
    part: str, mesh: str, eight_device_results: dict[str, Any]
) -> None:
    measured, estimated = eight_device_results[mesh]["state"][part]
    assert measured == estimated


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_image_of_a_batch_is_loaded_and_processes_load_the_same_or_disjoint_images(
    mesh: str, eight_device_results: dict[str, Any]
) -> None:
    rows_of_processes = {tuple(rows) for rows in eight_device_results[mesh]["rows_of_device_pairs"]}
    assert sorted(row for rows in rows_of_processes for row in rows) == list(range(32))


# Two processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_device_and_the_estimated_memory_and_transfers(
    one_device_results: dict[str, Any],
) -> None:
    """On a mesh of data and fsdp, which those of eight devices have only with a third axis or alone."""
    mesh = "data=2,fsdp=2"
    for output in pair_outputs("tests.meshes", mesh):
        found = json.loads(output.splitlines()[-1])[mesh]  # gloo prints its connections in the lines before
        np.testing.assert_allclose(found["losses"], one_device_results["losses"], rtol=1e-10)
        assert found["gathered"] == [8]  # the checksums of the initial weights, and no weights
        for measured, estimated in (found["transfers"], *found["state"].values()):
            assert measured == estimated
        measured, estimated = found["arguments"]
        assert estimated <= measured <= 1.05 * estimated


@pytest.mark.slow
def test_the_end_of_process_0_is_told_in_a_line_and_a_signal_to_one_of_two_processes_stops_both(tmp_path: Path) -> None:
    """Process 0 starts JAX's coordination service, without which JAX would abort the other one with a stack of C++.

    The run resumes after it, at the same address.
    """
    model = ["--model.changes", "patch_size=2", "width=32", "depth=1", "num_heads=2", "mlp_dim=64"]
    lengths = ["--epochs", "60steps", "--eval-every", "60steps", "--save-every", "10steps"]
    # JAX checks for a signal about once per second, so the steps must not be too short.
    layout = ["--batch-size", "256", "--mesh", "data=2,fsdp=2", "--run", str(tmp_path)]
    arguments = ["--config", "tiny", *model, *lengths, *layout]
    address = free_address()

    def saved_steps() -> set[int]:  # names that are no numbers are of unfinished checkpoints
        return {int(path.name) for path in tmp_path.glob("checkpoints/*") if path.name.isdecimal()}

    with process_pair("tests.quick_heartbeat", *arguments, JAX_COORDINATOR_ADDRESS=address) as (first, second):
        while not saved_steps():
            assert first.poll() is None and second.poll() is None
            time.sleep(0.02)
        first.kill()
        first.communicate(timeout=60)
        _, errors = second.communicate(timeout=60)
    message = "another process of the run has ended: start all processes again with the same --run"
    assert (second.returncode, errors) == (2, f"error: {message}\n")
    before, lines = saved_steps(), [""]
    with process_pair("tests.quick_heartbeat", *arguments, JAX_COORDINATOR_ADDRESS=address) as (first, second):
        assert first.stdout
        while not lines[-1].startswith("folder"):
            lines.append(first.stdout.readline())
            assert lines[-1], first.communicate()
        second.send_signal(signal.SIGTERM)
        output = "".join([*lines, first.stdout.read()])  # communicate() would lose what is buffered
        for process in (first, second):
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 128 + signal.SIGTERM, errors[-2000:]
    assert "fsdp=2 (4 x" in output and f"resuming from step {max(before)}" in output
    assert max(saved_steps()) > max(before)
    with pytest.raises(ConnectionRefusedError):  # no service is left behind
        socket.create_connection(("localhost", int(address.rpartition(":")[2])))


def test_a_signal_before_the_first_step_of_a_resumed_run_stops_it_after_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX numbers the calls of `should_stop`; it agrees to stop at call 1, which is not a step number of the run."""
    engine = JaxEngine(
        CONFIG, Recipe(batch_size=1), task="classes", learning_rate=float, initial_weights=None, folder=tmp_path
    )
    monkeypatch.setattr(JaxEngine, "is_distributed", True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda number: number == 1)
    assert [engine.should_stop(), engine.should_stop()] == [True, False]


@pytest.mark.parametrize(
    ("address", "count", "index", "message"),
    [
        ("localhost:1234", None, "0", "set JAX_NUM_PROCESSES and JAX_PROCESS_ID too, to integers"),
        ("localhost:1234", "two", "0", "set JAX_NUM_PROCESSES and JAX_PROCESS_ID too, to integers"),
        ("localhost:1234", "2", "2", "JAX_PROCESS_ID is 2 and JAX_NUM_PROCESSES 2: number the processes from 0 to 1"),
        ("localhost:99999", "2", "0", "'localhost:99999': give HOST:PORT of process 0, with a port from 1 to 65535"),
        ("localhost", "2", "0", "'localhost': give HOST:PORT"),
        ("localhost:", "2", "0", "'localhost:': give HOST:PORT"),
    ],
)
def test_an_invalid_description_of_the_cluster_is_refused(
    address: str, count: str | None, index: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": count, "PROCESS_ID": index}.items():
        if value is not None:
            monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(InputError, match=message):
        join_cluster()


def test_other_weights_in_another_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process places the entries of its devices, so a device would have other weights than its neighbours."""
    checksums: list[np.ndarray] = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: checksums.append(x) or np.array(checksums[-2:]))
    for array in (np.zeros(3), np.zeros(3)):
        check_same_on_all_processes({"a": array}, "the weights")
    with pytest.raises(InputError, match="the weights differ between the processes of the run: let all"):
        check_same_on_all_processes({"a": np.ones(3)}, "the weights")


# The dtype of transfers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_bfloat16_computation_matrices_and_their_gradients_are_sent_in_bfloat16(tmp_path: Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=spmd-partitioning --xla_dump_hlo_module_re=.*_train.*"
    process_output(start_process("tests.meshes", "--bfloat16", "data=2,fsdp=2,tensor=2", devices=8, XLA_FLAGS=flags))
    # XLA for CPU converts them to float32 afterwards, so the output of the partitioner is checked.
    text = next(tmp_path.glob("*after_spmd-partitioning*")).read_text()
    collectives_found = re.findall(r" = (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce)\(", text)
    sizes = [(kind, dtype, math.prod(map(int, dims.split(",")))) for dtype, dims, kind in collectives_found if "," in dims]
    biases = 3 * 32  # entries of those of queries, keys and values, whose gradients are sums in float32
    kinds = {(kind, dtype) for kind, dtype, size in sizes if size > biases}
    assert kinds == {("all-gather", "bf16"), ("all-reduce", "bf16")}


# Meshes and sharding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("data=3", 8, "has a product of 3 for 8 devices"),
        ("data=-1,fsdp=3", 8, "has a product of 3 for 8 devices"),
        ("data=-1,fsdp=-1", 8, "has -1 for data and fsdp: only one axis may be -1"),
        ("fdsp=8", 8, "did you mean 'fsdp'"),
        ("data=8,data=1", 8, "'data=1' is not understood"),
        ("data", 8, "'data' is not understood"),
        ("data=0", 8, "'data=0' is not understood"),
        ("tensor=8", 8, "does not divide the 3 heads"),
    ],
)
def test_an_invalid_mesh_is_refused_in_one_line(text: str, devices: int, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        axis_sizes(text, devices, CONFIG)
    assert "\n" not in str(refused.value)


def test_an_indivisible_batch_size_is_refused_with_the_next_divisible_one() -> None:
    with pytest.raises(InputError, match=r"by 8 \(mesh axes data and fsdp\) times 3 parts .*: give 120"):
        images_per_device(100, 3, {"data": 4, "fsdp": 2, "tensor": 2})


def test_an_axis_of_length_minus_1_takes_the_remaining_devices() -> None:
    assert parse_mesh("data=-1,fsdp=4", 32) == {"data": 8, "fsdp": 4, "tensor": 1}


def sharding_axes(sizes: dict[str, int], **changes: Any) -> dict[str, tuple[str | None, ...]]:
    """Return the mesh axis that shards each dimension of each parameter in the JAX twin, by row name."""
    config = CONFIG.replace(**changes)
    axes_by_name: dict[str, tuple[str | None, ...]] = {}
    tree(config, lambda parameter: axes_by_name.update({parameter.row.name: mesh_axes(parameter, config, sizes)}))
    return axes_by_name


def test_matrices_are_sharded_by_width_and_by_heads_or_hidden_units() -> None:
    axes_by_name = sharding_axes({"data": 1, "fsdp": 2, "tensor": 3})
    assert axes_by_name["blocks.attn.qkv.weight"] == (None, "fsdp", None, "tensor", None)  # block width qkv head dim
    assert axes_by_name["blocks.mlp.fc2.weight"] == (None, "tensor", "fsdp")  # block ff width


SHARDED = {
    "vit_s16": {},
    "dinov3_h16plus": {},  # a gated MLP: `(glu ff) width`
    "siglip_so400m16": {},
    "vit_b16 with attention pooling": {"head": {"pool": "attention"}},
    "vit_b16 with biases of q and v": {"attention": {"qkv_bias": "qv"}},
    "vit_b16 with a hidden layer": {"head": {"hidden": 96}},
}


def device_entries(
    array: np.ndarray, shards: tuple[Shard, ...], sizes: dict[str, int], device: dict[str, int]
) -> np.ndarray:
    """Return the shard of an array that is on one device."""
    for dim, shard in enumerate(shards):
        if shard.axis:
            grouped = np.split(array, shard.groups, axis=dim)
            parts = [np.split(group, sizes[shard.axis], axis=dim)[device[shard.axis]] for group in grouped]
            array = np.concatenate(parts, axis=dim)
    return array


def numbered_array(row: Row, layout: Layout, config: ViTConfig) -> np.ndarray:
    """Return the array of a format that contains a parameter: its entries are numbered, all others are -1."""
    blocks = [word for word in row.axes if not any(axis.parameter_axis == word for dim in layout.dims for axis in dim)]
    axes = [axis for dim in layout.dims for axis in dim]
    order = [row.axes.index(word) for word in (*blocks, *(axis.parameter_axis for axis in axes if axis.parameter_axis))]
    values = np.arange(row.size).reshape(row.shape).transpose(order)
    values = values.reshape(
        *values.shape[: len(blocks)], *(config.sizes[a.parameter_axis] if a.parameter_axis else 1 for a in axes)
    )
    array = np.full([*values.shape[: len(blocks)], *(config.sizes[axis.name] for axis in axes)], -1)
    array[(..., *(slice(a.start, a.start + (config.sizes[a.parameter_axis] if a.parameter_axis else 1)) for a in axes))] = (
        values
    )
    lengths = [math.prod(config.sizes[axis.name] for axis in dim) for dim in layout.dims]
    return array.reshape(*values.shape[: len(blocks)], *lengths)


@pytest.mark.parametrize("format", ["jax", "torch"])
@pytest.mark.parametrize("name", SHARDED)
def test_a_device_has_the_same_entries_of_a_parameter_in_every_format(name: str, format: str) -> None:
    sides = {"image_size": (32, 48), "patch_size": (8, 16), "width": 48, "num_heads": 4, "mlp_dim": 56, "depth": 2}
    config = vit_spec.get(name.split()[0]).replace(**sides, num_classes=12).replace(**SHARDED[name])
    sizes = {"data": 1, "fsdp": 4, "tensor": 2}
    for row_name, parameter in parameters(config, format).items():
        row, array = parameter.row, numbered_array(parameter.row, get(format).layouts(config)[row_name], config)
        key_axes = array.ndim - len(parameter.dims)  # axes in the key: one array per block
        shards = (*(Shard(),) * key_axes, *shard_dims(parameter, config, sizes))
        canonical = shard_dims(Parameter(row, tuple((word,) for word in row.axes)), config, sizes)
        for fsdp, tensor in itertools.product(range(4), range(2)):
            device = {"fsdp": fsdp, "tensor": tensor}
            found = device_entries(array, shards, sizes, device)
            wanted = device_entries(np.arange(row.size).reshape(row.shape), canonical, sizes, device)
            assert np.array_equal(np.sort(found[found >= 0]), np.sort(wanted.ravel())), row_name


def test_merged_dimensions_are_sharded_within_each_of_their_groups() -> None:
    config = vit_spec.get("dinov3_h16plus")
    found = parameters(config, "torch")
    sizes = {"data": 1, "fsdp": 4, "tensor": 2}
    assert shard_dims(found["blocks.attn.qkv.weight"], config, sizes) == (Shard("tensor", 3), Shard("fsdp"))
    assert shard_dims(found["blocks.mlp.fc1.weight"], config, sizes) == (Shard("tensor", 2), Shard("fsdp"))
    assert shard_dims(found["blocks.attn.proj.weight"], config, sizes) == (Shard("fsdp"), Shard("tensor"))


def test_a_mesh_axis_does_not_shard_a_dimension_that_it_does_not_divide() -> None:
    axes_by_name = sharding_axes({"data": 1, "fsdp": 5, "tensor": 3})
    assert {name for axes in axes_by_name.values() for name in axes} == {None, "tensor"}


def test_parameters_without_weight_decay_are_replicated_along_fsdp() -> None:
    axes_by_name = sharding_axes({"data": 1, "fsdp": 2, "tensor": 1})
    assert {name for name, axes in axes_by_name.items() if "fsdp" not in axes} == {
        name for name, row in vit_spec.rows(CONFIG).items() if not row.decays
    }


@pytest.mark.parametrize("bias", [True, False])
def test_the_norms_of_queries_and_keys_are_shared_by_all_heads(bias: bool) -> None:
    options: dict[str, Any] = {
        "attention": {"qk_norm": True, "out_norm": True, "qkv_bias": "qv"},
        "head": {"pool": "attention"},
    }
    rotary = {"rotary": "mixed", "relative": "table"}
    config = vit_spec.get("vit_s16").replace(**options, positions=rotary, norms={"bias": bias, "kind": "layer"})
    kinds = ("weight", "bias") if bias else ("weight",)
    expected = {f"blocks.attn.{norm}.{kind}" for norm in ("q_norm", "k_norm") for kind in kinds}
    assert {name for name, row in vit_spec.rows(config).items() if is_shared_by_heads(row)} == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 1, "fsdp": 5, "tensor": 1},
            r"100\.0% .* not sharded by fsdp=5: blocks\.mlp\.fc1\.weight 32\.1%, .*, \.\.\.",
        ),
        ({"data": 1, "fsdp": 5, "tensor": 2}, r"100\.0% of the weights are not sharded by fsdp=5: .*"),
        ({"data": 1, "fsdp": 2, "tensor": 1}, ""),
        ({"data": 8, "fsdp": 1, "tensor": 1}, ""),
    ],
)
def test_parameters_that_stay_replicated_are_named(sizes: dict[str, int], message: str) -> None:
    config = vit_spec.get("vit_s16", num_classes=1000)
    assert re.fullmatch(message, replication_note(config, sizes))


# benchmarks.jax_program -----------------------------------------------------------------------------------------------

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


def collectives_of_program() -> list[tuple[str, str, int, int]]:
    """Return kind, axes, executions per step and bytes of each collective of `PROGRAM`."""
    return [(c.kind, c.axes, c.times, sum(size for _, size in c.arrays)) for c in collectives(PROGRAM, SIZES)]


def test_collectives_in_a_loop_count_once_per_iteration() -> None:
    assert collectives_of_program()[:2] == [("all-gather", "fsdp", 15, 128), ("all-reduce", "data+fsdp", 3, 36)]


def test_an_asynchronous_collective_counts_once_with_all_its_results() -> None:
    gathered, summed, earlier = collectives_of_program()[2:5]
    assert gathered == ("all-gather", "tensor", 1, 32 + 8)
    assert summed == ("all-reduce", "tensor", 1, 24)
    assert earlier == ("all-reduce", "tensor", 1, 24 + 8)  # as the XLA of jax 0.10 writes it


def test_a_reduce_scatter_counts_with_the_whole_array() -> None:
    assert collectives_of_program()[5] == ("reduce-scatter", "data", 1, 24)


def test_a_permutation_is_along_the_axis_on_which_its_devices_differ() -> None:
    assert collectives_of_program()[6] == ("collective-permute", "fsdp", 1, 10)


def test_a_loop_with_collectives_and_an_unknown_trip_count_is_refused() -> None:
    with pytest.raises(ValueError, match="its trip count is not known"):
        list(collectives(PROGRAM.replace('"n":"5"', ""), SIZES))


def test_groups_of_devices_that_are_not_along_mesh_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="not along axes of the mesh"):
        list(collectives(PROGRAM.replace("{{0,4},{1,5},{2,6},{3,7}}", "{{0,3},{1,2},{4,7},{5,6}}"), SIZES))


def test_the_mesh_of_the_collectives_tests_has_all_axes() -> None:
    assert set(SIZES) == set(AXES)
