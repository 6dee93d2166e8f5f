"""`python -m benchmarks`: what it measures, in which processes, and what it reports.  Nothing here depends on times."""

import importlib.util
import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
import vit_spec
from benchmarks import __main__ as command
from benchmarks import conversion, gpu_steps, lines, machine, plan, profile_step, report, turns, worker
from benchmarks.machine import product_flops, product_shapes, revision
from benchmarks.peers import LIBRARIES, Contestant, contestants, make_inputs
from benchmarks.worker_process import Json
from parity.comparison import reproducible_init
from tests import ROOT
from vit_spec import ViTConfig

for package in ("jax", "torch"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

TINY = vit_spec.get("vit_ti16").replace(image_size=(32, 32), width=24, depth=2, num_heads=3, mlp_dim=48, num_classes=7)


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every named model be a tiny one, computed by one thread, since threads wait for one another beside other work.

    Nothing here depends on times, so a timing is one call.
    """
    monkeypatch.setattr(command, "named_config", lambda model: TINY)
    monkeypatch.setattr(turns, "SECONDS_OF_CALLS", {"cpu": 0.0, "gpu": 0.0})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_command_measures_peers_beside_the_twins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--turns", "2", "--only", "vit_jax", "timm", "bonsai", "--batch", "vit_ti16=3"]
    outputs = [tmp_path / "results.json", tmp_path / "results.svg"]
    assert command.main([*options, "--json", str(outputs[0]), "--picture", str(outputs[1])]) == 0
    found = json.loads(outputs[0].read_text())

    results = {result["contestant"]: result for result in found["results"]}
    has_timm = importlib.util.find_spec("timm") is not None
    assert list(results) == ["vit_jax", *(["vit_torch", "timm"] if has_timm else [])]
    for result in results.values():
        assert max(error for what in plan.MEASURES for error in result[f"errors_of_{what}"].values()) < 2e-6
        assert result["errors_of_step"].keys() == result["errors_of_gradient"].keys() == {"loss", "norm of the gradient"}
        assert result["device"] == "cpu"
        assert result["compilations_in_turns"] == 0
        assert result["first_step_seconds"] > 0 and result["peak_memory_bytes"] > 0
        assert (result["model"], result["batch_size"], result["allocator"]) == ("vit_ti16", 3, "freed memory kept")
        assert result["versions"].keys() >= {result["framework"]}
        assert result["seconds"].keys() == {"step", "gradient", "forward", "latency"}
        for values in result["seconds"].values():
            assert len(values["turns"]) == 2 and 0 < values["least"] <= values["median"] <= values["most"]
    if has_timm:
        assert results["timm"]["reference"] == "vit_torch" and "vit_torch" in results["timm"]["beside"]
        assert results["timm"]["ratio_to_reference"].keys() == {"step", "gradient", "forward", "latency"}

    skipped = {each["contestant"]: each["reason"] for each in found["skipped"]}
    assert skipped["bonsai"] == "clone its repository and give --source bonsai=PATH"
    assert {"processor", "instructions", "cores", "memory_bytes", "python", "system"} <= found["hardware"].keys()
    assert found["revision"] == revision(ROOT) and found["versions"].keys() >= {"jax", "torch"}
    assert found["bandwidth"]["best"] > 0 and found["products"][0]["flops_per_second"]["best"] > 0
    assert found["device"] == "cpu" and found["turns"] == 2 and found["lines"] == {} and found["date"]

    printed = capsys.readouterr().out
    assert "| vit_jax | " in printed and "- bonsai, vit_ti16: clone its repository" in printed
    assert "<svg" in outputs[1].read_text()


def test_the_plan_for_gpus_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "frameworks", lambda: ["torch"])
    own = [Contestant("vit_jax", dtype="bfloat16"), Contestant("vit_torch", dtype="bfloat16")]
    on_gpu = plan.gpu_plan({"vit_s16": 2}, [each.name for each in own], turns=1)
    assert on_gpu.device == "gpu" and on_gpu.blocks[0].contestants == tuple(own)
    on_cpu = plan.Plan("cpu", on_gpu.blocks, on_gpu.turns)
    (results,) = command.run(on_cpu, {"vit_s16": TINY}, {})
    assert [result["contestant"] for result in results["results"]] == ["vit_jax-bfloat16", "vit_torch-bfloat16"]
    compared = [result[f"errors_of_{what}"] for result in results["results"] for what in ("step", "forward", "latency")]
    assert all(0 < error < 5e-2 for errors in compared for error in errors.values())
    assert all(result["seconds"].keys() == {"step", "latency"} for result in results["results"])
    results["results"][0]["device"] = "NVIDIA H100 80GB HBM3"
    assert report.share_of_peak(results, results["results"][0])


def test_a_contestant_with_other_outputs_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "TOLERANCE", {"float32": 1e-12})
    monkeypatch.setattr(turns, "frameworks", lambda: ["torch"])
    assert command.main(["--quick", "--only", "vit_torch", "--turns", "1"]) == 1
    found = capsys.readouterr().out
    assert "- vit_torch, vit_ti16: differs from our twin: step: loss: relative error " in found


def test_without_a_gpu_the_option_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    monkeypatch.setattr(turns, "frameworks", lambda: ["torch"])
    assert command.main(["--gpu", "--models", "vit_s16"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no framework finds a GPU: leave --gpu out") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "tim"], "--only tim is no contestant or measurement; did you mean 'timm'?"),
        (["--model", "vit_s16"], "unrecognized arguments: --model vit_s16; did you mean '--models'?"),
        (["--batch", "vit_s61=3"], "--batch vit_s61; did you mean 'vit_s16'?"),
        (["--batch", "vit_s16=none"], "--batch vit_s16=none: give a positive number of images"),
        (["--batch", "vit_s16"], "--batch vit_s16: give NAME=VALUE"),
        (["--source", "big_visoin=."], "--source big_visoin; did you mean 'big_vision'?"),
        (["--source", "bonsai=missing"], "--source bonsai=missing: there is no such folder"),
        (["--quick", "--gpu"], "--quick and --gpu are different plans: give one of them"),
        (["--quick", "--only", "loading"], "--only loading is not measured with --quick or --gpu"),
        (["--turns", "0"], "--turns is 0: give at least 1"),
        (["--picture", "results.png"], "--picture results.png does not end in .svg"),
        (["--json", "missing/results.json"], "missing/results.json cannot be written"),
        (["--json", "/proc/results.json"], "/proc/results.json cannot be written"),
        (["--json", "."], ". cannot be written: it is a folder"),
        (["--picture", "results.svg", "--only", "check"], "--picture draws contestants, and --only check has none"),
    ],
)
def test_bad_arguments_are_reported_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


class FakeProcess:
    """A worker process that measures nothing.  `failing` has the (contestant, request, number of the request) that fail."""

    def __init__(self, failing: dict[tuple[str, str, int], Json]) -> None:
        self._failing, self._asked, self._name = failing, Counter[str](), ""

    def ask(self, do: str, **request: Any) -> Json:
        self._asked[do] += 1
        if do == "prepare":
            self._name = Contestant(**request["contestant"]).name
        outputs: Json = {"seconds": 1.0, "seconds_with_building": 1.0, "bytes": 1, "count": 0}
        outputs |= {"errors": {"logits": 0.0}} if do == "first" else {}
        machine = {"bytes_per_second": 1e9, "device": "cpu", "device_bytes": None, "flops": 1e11}
        versions = {"versions": dict.fromkeys(["torch", "jax", "timm", "equimo"], "0")}
        name = self._name or request["framework"]
        failure = self._failing.get((name, do, self._asked[do])) or self._failing.get((name, request.get("what", ""), 1))
        return failure or outputs | machine | versions

    def close(self) -> None:
        pass


KILLED = {"error": "the process ended with exit code -9"}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, int], Json]:
    """Replace the worker processes by fakes, and return the failures, to which a test adds some."""
    found: dict[tuple[str, str, int], Json] = {}
    monkeypatch.setattr(turns, "worker", lambda device, folder: nullcontext(FakeProcess(found)))
    monkeypatch.setattr(command, "revision", lambda path: "0123456789abcdef")
    return found


QUICK = ["--quick", "--turns", "2", "--only", "vit_jax", "vit_torch", "timm", "equimo"]


@pytest.mark.parametrize("request_", [("run", 4), ("compilations", 2)], ids=["in a turn", "after the turns"])
def test_a_contestant_that_dies_is_left_out_and_the_others_are_kept(
    request_: tuple[str, int], failing: dict[Any, Json], tmp_path: Path
) -> None:
    failing["vit_torch", *request_] = KILLED
    path = tmp_path / "results.json"
    assert command.main([*QUICK, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    references = {result["contestant"]: result["reference"] for result in found["results"]}
    assert references == {"vit_jax": None, "timm": None, "equimo": "vit_jax"}
    assert {each["contestant"]: each["reason"] for each in found["skipped"]} == {"vit_torch": KILLED["error"]}
    assert [len(result["ratio_to_reference"]) for result in found["results"]] == [0, 0, 4]


def test_a_run_in_which_every_contestant_dies_says_so(
    failing: dict[Any, Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing.update({(name, "run", 3): KILLED for name in ("vit_jax", "vit_torch", "timm", "equimo")})
    path = tmp_path / "results.svg"
    assert command.main([*QUICK, "--picture", str(path)]) == 0
    found = capsys.readouterr()
    assert found.out.count("exit code -9") == 4 and f"{path} is not written" in found.err and not path.exists()


@pytest.mark.parametrize(
    ("what", "name", "error", "limit"),
    [
        ("step", "loss", 1e-4, 1e-5),
        ("step", "norm of the gradient", 1e-2, 1e-3),
        ("gradient", "norm of the gradient", 1e-4, 1e-5),
        ("forward", "logits", 1e-4, 1e-5),
        ("latency", "logits", float("nan"), 1e-5),
    ],
)
def test_a_contestant_whose_function_has_other_outputs_is_left_out(
    what: str, name: str, error: float, limit: float, failing: dict[Any, Json], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["timm", what, 1] = {"errors": {name: error}, "seconds_with_building": 1.0}
    assert command.main(QUICK) == 1
    reason = f"differs from our twin: {what}: {name}: relative error {error:.1e}, allowed {limit:.0e}"
    assert f"- timm, vit_ti16: {reason}" in capsys.readouterr().out


def test_results_are_written_after_each_block(failing: dict[Any, Json], tmp_path: Path) -> None:
    path, models, run = tmp_path / "results.json", ["vit_ti16", "vit_s16"], turns.Measurement.run

    def interrupted(measurement: turns.Measurement) -> None:
        if measurement._block.model == models[1]:
            raise KeyboardInterrupt
        run(measurement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns.Measurement, "run", interrupted)
        assert command.main([*QUICK, "--models", *models, "--json", str(path)]) == 130
    assert {result["model"] for result in json.loads(path.read_text())["results"]} == {models[0]}


def test_rates_of_a_framework_that_fails_are_left_out(
    failing: dict[Any, Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing["jax", "bandwidth", 1] = KILLED
    path = tmp_path / "results.json"
    assert command.main([*QUICK, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["bandwidth"] == {"jax": None, "torch": 1e9, "best": 1e9}
    assert "jax: bandwidth not measured: the process ended with exit code -9" in capsys.readouterr().err
    failing["torch", "bandwidth", 1] = KILLED
    assert command.main(QUICK) == 2
    assert "error: no framework can copy an array: torch: the process ended" in capsys.readouterr().err


def test_other_measurements_have_their_figures_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = conversion.Runs([2.0, 3.0, 4.0], [1.0, 1.0, 1.5], [1 << 20, 2 << 20, 1 << 20])
    monkeypatch.setattr(lines.conversion, "write_source", lambda path, config: path.write_bytes(b"0" * 1_000_000))
    monkeypatch.setattr(lines.conversion, "compare_with_cp", lambda *args: measured)
    text, figures = lines.convert(tmp_path)
    assert text.endswith("torch to jax: 3.00 (2.00 to 4.00) times cp, 1.00 (1.00 to 1.50) GB/s, 2 MiB anonymous")
    assert figures == measured._asdict()
    monkeypatch.setattr(lines, "measure", lambda name, folder, say: {"text": text, "figures": figures})
    path = tmp_path / "results.json"
    assert command.main(["--only", "conversion", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["lines"]["conversion"]["figures"]["times_cp"] == [2.0, 3.0, 4.0]
    assert found["versions"]["torch"] and f"- conversion: {text}" in capsys.readouterr().out


def test_outputs_in_float64_are_those_of_either_twin(tmp_path: Path) -> None:
    inputs = make_inputs(TINY, worker.CHECKED_IMAGES + 1)
    parity.save(tmp_path / "a.safetensors", reproducible_init.weights(TINY, 0).arrays, TINY, "jax")
    checkpoint = parity.load(tmp_path / "a.safetensors")
    of_torch, of_jax = (worker.float64_outputs(framework, checkpoint, inputs) for framework in ("torch", "jax"))
    for name, values in of_torch.items():
        np.testing.assert_allclose(values, of_jax[name], rtol=1e-9)


def test_the_processor_is_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    core = f"{names}flags\t\t: fma avx2 avx512f avx512_bf16\n\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda path: 2 * core)
    found = machine.hardware()
    assert (found["processor"], found["vendor"], found["family"], found["model"]) == (
        "AMD EPYC",
        "AuthenticAMD",
        "25",
        "17",
    )
    assert found["instructions"] == ["avx2", "avx512f", "avx512_bf16"]
    assert report._processor(found) == "AMD EPYC (family 25 model 17, avx2 avx512f avx512_bf16)"


def test_an_unknown_model_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    assert command.main(["--models", "vit_s61"]) == 2
    assert "unknown model 'vit_s61'; did you mean 'vit_s16'?" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_groups_have_each_contestant_beside_the_twin_that_it_is_compared_with(size: int) -> None:
    block = plan.Block("vit_s16", 32, True, tuple(contestants()))
    found = plan.groups(block, size)
    assert all(len(group) <= size for group in found)
    for contestant in block.contestants:
        assert any({contestant, contestant.reference} <= set(group) for group in found)


def test_a_first_step_is_timed_alone_on_cpus_and_beside_other_frameworks_on_gpus() -> None:
    jax, torch, compiled = Contestant("vit_jax"), Contestant("vit_torch"), Contestant("timm", compiled=True)
    group = (jax, torch, Contestant("big_vision"), compiled)
    assert plan.lanes(group, "cpu", timed=True) == [group]
    assert plan.lanes(group, "cpu", timed=False) == [(each,) for each in group]
    for timed in (True, False):
        assert plan.lanes(group, "gpu", timed=timed) == [(torch,), (compiled,), (jax, Contestant("big_vision"))]


def test_the_reference_of_a_contestant_computes_the_same_function_in_the_same_way() -> None:
    config = vit_spec.get("vit_s16")
    for contestant in contestants():
        reference = contestant.reference
        assert reference.config(config) == contestant.config(config) and reference.dtype == contestant.dtype
        if not contestant.is_twin:
            assert reference.is_twin and reference.of.framework == contestant.of.framework
            assert reference.compiled == contestant.compiled


def without_head(config: ViTConfig) -> ViTConfig:
    """Return the config without layers after the blocks, and without those that compute biases of the scores."""
    head = {"pool": "mean", "hidden": None, "pool_heads": None, "pool_prefix": False}
    positions = {"relative": "none", "relative_dim": None, "relative_shared": False}
    return config.replace(num_classes=0, tokens={"distillation": False}, head=head, positions=positions)


def test_the_measured_products_are_those_of_patch_embedding_and_blocks_of_every_named_model() -> None:
    configs = {name: without_head(vit_spec.get(name)) for name in vit_spec.names()}
    differing = [
        name for name, config in configs.items() if product_flops(product_shapes(config, 3)) != 3 * vit_spec.flops(config)
    ]
    assert not differing


def test_the_default_plan_measures_every_library_and_both_settings_of_the_allocator() -> None:
    found = plan.cpu_plan(plan.CPU_BATCHES, [], 3, ())
    for block in found.blocks:
        names = {each.name for each in block.contestants}
        if block.batch_size == plan.CPU_BATCHES[block.model]:
            assert names == set(plan.MAIN_CONTESTANTS)
            assert "gradient" in block.measures or not block.keep_freed_memory
    assert {each.library for block in found.blocks for each in block.contestants} == LIBRARIES.keys()
    assert {block.model for block in found.blocks} == plan.CPU_BATCHES.keys()
    assert {block.keep_freed_memory for block in found.blocks if block.model == "vit_s16"} == {True, False}
    in_bfloat16 = {each.library for block in found.blocks for each in block.contestants if each.dtype == "bfloat16"}
    assert in_bfloat16 >= {"vit_jax", "vit_torch", "timm", "big_vision"}


@pytest.mark.parametrize("size", [2, 5, 100])
def test_the_default_plan_compares_the_compiled_pytorch_twin_with_the_jax_twin(size: int) -> None:
    (block,) = (each for each in plan.cpu_plan({"vit_s16": 32}, [], 3, ()).blocks if each.batch_size == 8)
    pair = {Contestant("vit_jax"), Contestant("vit_torch", compiled=True)}
    assert any(pair <= set(group) for group in plan.groups(block, size))
    assert Contestant("vit_torch", compiled=True).reference == Contestant("vit_jax")


def test_names_of_contestants_are_unique_and_every_plan_knows_them() -> None:
    names = [each.name for each in contestants()]
    assert len(set(names)) == len(names) and set(plan.GPU_CONTESTANTS) <= set(names)
    assert set(plan.QUICK_LIBRARIES) <= LIBRARIES.keys()


def test_all_contestants_are_given_the_same_batch() -> None:
    first, second = (make_inputs(TINY, size) for size in (2, 4))
    assert (first.pixels == second.pixels[:2]).all() and first.images.std() == pytest.approx(1, abs=0.5)


def spread(*values: float) -> dict[str, Any]:
    return turns.spread(list(values))


def test_a_twin_that_several_blocks_of_a_model_need_is_in_the_table_once() -> None:
    twin = {"model": "vit_s16", "batch_size": 2, "allocator": "default", "contestant": "vit_jax"}
    others = [{**twin, "contestant": "equimo"}, {**twin, "allocator": "freed memory kept"}]
    assert turns.unknown([twin], [dict(twin), *others]) == others


def test_tables_have_medians_with_their_spread() -> None:
    assert spread(3.0, 1.0, 2.0) == {"median": 2.0, "least": 1.0, "most": 3.0, "turns": [3.0, 1.0, 2.0]}
    assert report._spread(spread(0.0123, 0.0125, 0.0131), 1e3) == "12.5 (12.3 to 13.1)"
    assert report._spread(spread(0.00023)) == "0.000230 (0.000230 to 0.000230)" and report._spread(None) == ""


def test_a_row_of_steps_on_a_gpu_has_their_rate_and_share_of_the_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vit_spec, "get", lambda name, **changes: TINY)
    monkeypatch.setattr("benchmarks.peers.jax_model.device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_steps, "peak_flops", lambda device: {"a GPU": 1e9}[device])
    monkeypatch.setattr(gpu_steps, "SECONDS", 0.0)
    cells = [cell.strip() for cell in gpu_steps.measure("train.jax", "vit_s16", 2, tmp_path).strip("|").split("|")]
    rate = float(cells[3].partition(" ")[0].replace(",", ""))
    assert cells[:3] == ["train.jax", "vit_s16", "2"] and rate > 0
    assert float(cells[4].removesuffix("%")) == pytest.approx(100 * 3 * vit_spec.flops(TINY) * rate / 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("argument", "message"),
    [("vit_s61=2", "did you mean 'vit_s16'?"), ("vit_s16", "give MODEL=IMAGES"), ("vit_s16=0", "a positive number")],
)
def test_invalid_models_of_steps_on_a_gpu_are_refused(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_steps", argument])
    with pytest.raises(SystemExit):
        gpu_steps.main()
    assert message in capsys.readouterr().err


def test_kernels_of_a_gpu_belong_to_the_parts_of_their_operations() -> None:
    program = """
  %loop_convert_fusion.3 = bf16[2,8]{1,0} fusion(%x), kind=kLoop, metadata={op_name="jit(_train)/jvp(ViT)/blocks/mlp/mul"}
  %input-reduce.1 = f32[2]{0} fusion(%y), kind=kInput, metadata={op_name="jit(_train)/transpose(jvp(ViT))/blocks/norm1/neg"}
"""
    parts = profile_step.parts_of(program)
    assert profile_step.part_of_event("loop_convert_fusion_3", parts) == "MLP, except products, forward"
    assert profile_step.part_of_event("input_reduce_1", parts) == "norms, except products, backward"
    assert profile_step.part_of_event("nvjet_sm90_tst_128x128_64x6_1x2_h_bz_TNT", parts) == "products"
    assert profile_step.part_of_event("void cudnn::fusion::compute_dot_do_o", parts) == "attention, fused kernels"
    assert profile_step.part_of_event("Memset 0", parts) is None
