"""benchmarks.scaling: its formulas against sums by hand, a compiled program against the estimate, and the page's tables."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("grain")

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.plans import fitting_plan, make_plan, smallest_batch
from benchmarks.scaling.times import (
    H100,
    Machine,
    Protocol,
    StepTimes,
    collective_time,
    group_shape,
    number_of_collectives,
    step_times,
)
from tests import ROOT

GIVEN = {"data": 4, "fsdp": 4, "tensor": 2}  # four nodes of eight devices
MACHINE = Machine("given", 1e3, 1000, 8, 100.0, 10.0, (Protocol(False, 0.0, 0.0, 0.0, 1.0),))


@pytest.mark.parametrize(
    ("axes", "nodes", "local"),
    [("tensor", 1, 2), ("fsdp", 1, 4), ("fsdp+tensor", 1, 8), ("data", 4, 1), ("data+fsdp", 4, 4)],
)
def test_a_collective_spans_the_nodes_of_its_devices(axes: str, nodes: int, local: int) -> None:
    assert group_shape(axes, GIVEN, 8) == (nodes, local)


@pytest.mark.parametrize(
    ("kind", "axes", "seconds"),
    [
        ("all-gather", "fsdp", 3 / 4 * 800 / 100),  # in a node
        ("reduce-scatter", "fsdp", 3 / 4 * 800 / 100),
        ("all-reduce", "tensor", 2 * 1 / 2 * 800 / 100),
        ("all-reduce", "data", 2 * 3 / 4 * 800 / 10),  # one device of each node
        ("all-reduce", "data+fsdp", 2 * 15 / 16 * 800 / 40),  # four devices of each node send to the next
    ],
)
def test_the_time_of_a_collective_follows_from_the_bytes_in_a_ring(kind: str, axes: str, seconds: float) -> None:
    assert collective_time(kind, axes, 800, GIVEN, MACHINE) == pytest.approx(seconds)


def test_devices_of_a_node_send_no_faster_to_other_nodes_than_inside() -> None:
    fast = replace(MACHINE, across=50.0)
    assert collective_time("all-gather", "data+fsdp+tensor", 800, GIVEN, fast) == pytest.approx(31 / 32 * 800 / 100)


def test_every_step_of_a_ring_or_tree_has_a_latency_and_the_fastest_protocol_is_taken() -> None:
    ring, tree = Protocol(False, 100.0, 1.0, 10.0, 1.0), Protocol(True, 200.0, 1.0, 10.0, 1.0)
    machine, axes = replace(MACHINE, protocols=(ring, tree)), "data+fsdp"
    # 15 steps of a ring, 3 of them between the four nodes; a tree has 3 inside a node and 2 between nodes.
    assert collective_time("all-gather", axes, 0, GIVEN, machine) == 100 + 12 * 1 + 3 * 10
    assert collective_time("all-reduce", axes, 0, GIVEN, machine) == 100 + 2 * (12 * 1 + 3 * 10)
    machine = replace(machine, protocols=(ring._replace(start=190.0), tree))
    assert collective_time("all-reduce", axes, 0, GIVEN, machine) == 200 + 2 * (3 * 1 + 2 * 10)
    assert collective_time("all-gather", axes, 0, GIVEN, machine) == 190 + 12 * 1 + 3 * 10  # no tree


def test_only_communication_along_data_and_fsdp_overlaps() -> None:
    assert StepTimes(6, 3, 1).efficiency == pytest.approx(0.6)
    assert StepTimes(6, 3, 1).best_efficiency == pytest.approx(6 / 7)
    assert StepTimes(6, 11, 1).best_efficiency == pytest.approx(0.5)


def test_the_time_of_a_step_of_vit_l16_is_that_of_the_sums_by_hand() -> None:
    """24 blocks of 4 * 1024^2 + 2 * 1024 * 4096 matrix entries, in bfloat16, in one node."""
    blocks, outside = 24 * 12 * 1024**2, 768 * 1024 + 1024 * 1000
    plan = make_plan("vit_l16", "fsdp=8", 8, 32)
    machine = replace(H100, protocols=(Protocol(False, 0.0, 0.0, 0.0, 1.0),))
    times = step_times(plan.config, plan.recipe, plan.sizes, plan.estimate, machine, 0.4)
    assert times.compute == pytest.approx(3 * 123.1e9 * 32 / (989.4e12 * 0.4), rel=1e-3)
    gathered, scattered = 2 * (2 * blocks + outside), 2 * (blocks + outside)
    norms, biases = 4 * (24 * 4 + 2) * 1024, 4 * (24 * 9 * 1024 + 1024 + 1000)
    vectors = norms + biases + 2 * (197 * 1024 + 1024)  # positions and the class token in bfloat16
    assert times.hidden == pytest.approx(7 / 8 * (gathered + scattered + 2 * vectors) / 450e9, rel=1e-9)
    assert times.exposed == 0


def test_the_gpu_compiler_sends_the_matrices_of_a_block_together() -> None:
    plan = make_plan("vit_l16", "data=-1,fsdp=8", 256, 16)
    counts = {
        key: number_of_collectives(*key, size, plan.config, plan.recipe, plan.sizes)
        for key, size in plan.estimate.transfers.items()
    }
    assert counts == {
        ("all-gather", "fsdp"): 49,
        ("reduce-scatter", "fsdp"): 25,
        ("all-reduce", "data"): 25,
        ("all-reduce", "data+fsdp"): 26,
    }


def test_the_first_plan_that_fits_recomputes_least() -> None:
    plan = fitting_plan("vit_l16", "data=-1", 8, H100)
    assert plan is not None and (plan.recipe.remat, plan.recipe.accumulate) == ("dots", 1)
    assert make_plan("vit_l16", "data=-1", 8, 512).memory > 0.9 * H100.memory >= plan.memory
    assert fitting_plan("vit_22b14", "data=-1", 256, H100) is None


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    ("name", "devices", "remat"), [("vit_l16", 64, "none"), ("vit_22b14", 16, "dots"), ("vit_22b14", 64, "full")]
)
def test_no_smaller_batch_pays_and_it_fits(name: str, devices: int, remat: str, overlaps: bool) -> None:
    plan = smallest_batch(name, "data=-1,fsdp=8", devices, H100, 0.4, overlaps)
    assert plan is not None and plan.recipe.remat == ("none" if overlaps else remat)
    images = plan.recipe.batch_size // devices
    smaller, found = (fitting_plan(name, "data=-1,fsdp=8", devices, H100, each) for each in (images - 1, images))
    assert found == plan and smaller is not None
    efficiency = [
        times.best_efficiency if overlaps else times.efficiency
        for times in (smaller.times(H100, 0.4), plan.times(H100, 0.4))
    ]
    assert efficiency[0] < 0.8 <= efficiency[1]


def test_some_meshes_have_no_efficient_batch_that_fits() -> None:
    assert smallest_batch("vit_l16", "data=-1,tensor=8", 64, H100, 0.4, True) is None
    assert smallest_batch("vit_22b14", "data=-1,tensor=8", 64, H100, 0.4, False) is None
    assert smallest_batch("vit_22b14", "data=-1", 64, H100, 0.4, True) is None


COMPILED = [
    ("vit_l16", "data=2,fsdp=8", "none"),
    ("vit_22b14", "data=2,fsdp=4,tensor=2", "full"),  # parallel blocks, attention pooling
]
PROGRAM = """
import json, sys, jax
from benchmarks.scaling.programs import compare
found = [compare(jax.devices(), *case, "cpu") for case in json.load(sys.stdin)]
print(json.dumps([[sorted((*key, size) for key, size in part.items()) for part in (f.program, f.estimate)] for f in found]))
print(json.dumps([f.arguments for f in found]))
"""


def test_programs_for_sixteen_simulated_devices_send_and_store_what_is_estimated() -> None:
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, cwd=ROOT, env=env, input=json.dumps(COMPILED), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    transfers, arguments = map(json.loads, run.stdout.splitlines())
    for case, (program, estimate) in zip(COMPILED, transfers, strict=True):
        assert program == estimate and program, case
    assert arguments == pytest.approx([1.0] * len(COMPILED), abs=1e-5)


def test_the_tables_of_the_page_are_those_that_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.scaling"])
    main()
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "measurements" / "scaling.md").read_text().partition("## Compared with compiled programs")[0]
    rows = [line for line in page.splitlines() if line.startswith(("| data", "| fsdp"))]
    assert len(rows) > 80 and not [row for row in rows if row not in printed]
