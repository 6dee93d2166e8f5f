"""The memory estimates and --plan: against sums by hand, against what jax and torch allocate, and as a command."""

import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

pytest.importorskip("grain")

import vit_spec
from tests import ROOT
from train.cli import main
from train.data import sources
from train.jax.memory_estimate import estimate_memory
from train.loop.request import Request
from train.plan import Devices, estimate_step_time, open_or_assume_imagenet, parse_devices
from train.recipes import OPTIMIZERS, Augment, Optimizer, Recipe
from train.step_cost import MemoryEstimate
from train.torch.memory_estimate import estimate_memory as estimate_torch
from vit_spec import InputError, ViTConfig

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
CONFIG = ViTConfig(image_size=(32, 48), width=24, depth=2, num_heads=2, mlp_dim=40, num_classes=5)

# Parameter counts by hand, for 6 patches of 768 values, 7 tokens, heads of 12
BLOCK = 24 * 72 + 24 * 24 + 24 * 40 + 40 * 24  # matrices of a block
OUTSIDE = 768 * 24 + 24 * 5  # matrices outside of the blocks
BIASES = 72 + 40  # biases of qkv and of hidden units in a block, which are sharded along tensor
VECTORS = 2 * (4 * 24 + 24 + 24) + 24 + 24 + 7 * 24 + 2 * 24 + 5  # other biases, norms, class token, position table


def estimate(sizes: dict[str, int] = ONE, config: ViTConfig = CONFIG, **changes: Any) -> MemoryEstimate:
    return estimate_memory(config, Recipe(batch_size=8, **changes), sizes)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_one_device_has_all_parameters() -> None:
    assert estimate().memory["parameters"] == 4 * vit_spec.count(CONFIG) == 4 * (2 * BLOCK + OUTSIDE + 2 * BIASES + VECTORS)


def test_matrices_are_sharded_along_both_axes_and_vectors_along_tensor() -> None:
    assert estimate(EIGHT).memory["parameters"] == 4 * (2 * BLOCK // 4 + OUTSIDE // 2 + 2 * BIASES // 2 + VECTORS)


@pytest.mark.parametrize(("name", "multiple"), [("adamw", 2), ("lamb", 2), ("lion", 1), ("sgd", 1)])
def test_optimizer_state_is_a_multiple_of_the_parameters(name: Any, multiple: int) -> None:
    assert (
        estimate(EIGHT, optimizer=Optimizer(name=name)).memory["optimizer state"]
        == multiple * estimate(EIGHT).memory["parameters"]
    )


def test_muon_has_one_moment_for_matrices_of_blocks_and_two_for_all_else() -> None:
    memory = estimate(optimizer=Optimizer(name="muon")).memory
    assert memory["optimizer state"] == 4 * (2 * vit_spec.count(CONFIG) - 2 * BLOCK)


def test_an_update_of_muon_has_its_matrices_three_times_beside_the_gradients() -> None:
    """Before and after the orthogonalization, on devices that share the matrices, and gathered on each."""
    config = CONFIG.replace(width=240, mlp_dim=400)

    def arrays_of_update(sizes: dict[str, int]) -> int:
        recipe = Recipe(batch_size=2, remat="full", optimizer=Optimizer(name="muon"))
        memory = estimate_memory(config, recipe, sizes).memory
        freed = ("half-precision matrices", "gathered matrices", "activations", "peak activations of one block")
        return memory["update, beyond the backward pass"] + sum(memory.get(name, 0) for name in freed)

    matrices = 100 * BLOCK * 2  # in two blocks
    assert arrays_of_update(ONE) == 4 * 3 * matrices
    assert arrays_of_update(ONE | {"data": 2}) == 4 * (2 * matrices // 2 + matrices)
    assert arrays_of_update(ONE | {"fsdp": 2}) == 4 * 3 * matrices // 2
    assert "update, beyond the backward pass" not in estimate().memory


def test_a_compiled_step_of_muon_needs_the_memory_that_was_planned() -> None:
    """With a batch so small that the update needs more memory than the backward pass; without it, 0.6 would be planned."""
    pytest.importorskip("optax")
    from train.jax.engine import JaxEngine

    config = CONFIG.replace(image_size=(32, 32), width=192, mlp_dim=768, depth=4)
    recipe = Recipe(batch_size=1, remat="full", optimizer=Optimizer(name="muon"))
    engine = JaxEngine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-3, initial_weights=None, folder=Path("unused")
    )
    memory = engine.compiled_step.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes  # the new state is in the arrays of the old one
    assert used <= estimate_memory(config, recipe, ONE, compiler="cpu").total <= 1.2 * used


@pytest.mark.parametrize("name", get_args(get_type_hints(Optimizer)["name"]))
def test_the_optimizer_state_is_what_jax_allocates(name: Any) -> None:
    pytest.importorskip("optax")
    import jax

    import vit_jax
    from train.jax.optimizers import make_optimizer

    config = CONFIG.replace(width=128, mlp_dim=256)  # large enough for Adafactor to factor the second moment
    chosen = Optimizer(name=name)
    made = make_optimizer(chosen, config)
    state = jax.eval_shape(lambda: made.init(vit_jax.init(config)))
    # Step counts are left out; every array of parameters is larger.
    size = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size >= 5)
    assert estimate(config=config, optimizer=chosen).memory["optimizer state"] == 4 * size


def test_the_ema_is_as_large_as_the_parameters() -> None:
    assert estimate(EIGHT, ema=0.9).memory["EMA"] == estimate(EIGHT).memory["parameters"]


def test_a_batch_is_uint8_and_sharded_along_data_and_fsdp() -> None:
    assert estimate(EIGHT).memory["batch"] == 2 * (32 * 48 * 3 + 4)


def test_accumulation_divides_the_activations() -> None:
    assert estimate(accumulate=4).memory["activations"] * 4 == estimate().memory["activations"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh": {"mlp": {"activation": "gelu_tanh"}},
    "gated": {"mlp": {"activation": "swiglu"}},
    "relu": {"mlp": {"activation": "relu"}},
    "scaled": {"norms": {"layer_scale": 0.1}},
    "normalized queries": {"attention": {"qk_norm": True}},
    "noise": {"regularisation": {"drop_path": 0.1, "mlp_drop": 0.1, "attn_drop": 0.1}},
}


@cache
def jax_shapes(config: ViTConfig) -> Any:
    """Return the shapes and dtypes of the parameters of the JAX twin, float32."""
    import jax

    import vit_jax

    return jax.eval_shape(lambda: vit_jax.init(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("option", OPTIONS)
def test_activations_are_those_that_jax_saves_for_the_backward_pass(option: str, remat: Any, dtype: Any) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import vit_jax

    config = CONFIG.replace(**OPTIONS[option])
    narrow = jnp.dtype(dtype)
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=narrow, remat=remat))
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, narrow if p.ndim > 2 else p.dtype),
        jax_shapes(config),
    )

    def apply(params: Any, images: Any) -> Any:
        return model.apply({"params": params}, images, train=True, rngs={"dropout": jax.random.key(0)})

    images = jax.ShapeDtypeStruct((8, 32, 48, 3), np.float32)
    leaves = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(apply, p, x)[1], params, images))
    saved = [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]  # 64 bytes a block
    blocks = sum(x.size * x.dtype.itemsize for x in saved if x.shape[:2] == (2, 8) and x.shape[-1] > 1)

    def estimated(depth: int) -> int:
        memory = estimate(config=config.replace(depth=depth), remat=remat, dtype=dtype).memory
        return memory["activations"] + memory.get("attention weights", 0)

    assert blocks == 2 * (estimated(2) - estimated(1))


# Operations and transfers ---------------------------------------------------------------------------------------------


def test_a_step_has_three_forward_passes_of_flops_without_recomputation() -> None:
    assert {estimate(remat=remat).flops for remat in ("none", "dots", "full")} == {3 * 8 * vit_spec.flops(CONFIG)}


def test_remat_recomputes_attention_or_blocks_without_their_last_product() -> None:
    attention = 2 * 4 * 7 * 7 * 24
    assert estimate(remat="dots").recomputed == 8 * attention
    assert estimate(remat="full").recomputed == 8 * (attention + 2 * 7 * 2 * (BLOCK - 40 * 24))


RECOMPUTED: dict[str, dict[str, Any]] = {
    "sequential": {},
    "gated": {"mlp": {"activation": "swiglu"}},
    "scaled": {"norms": {"layer_scale": 0.1}},
    "attention scaled": {"norms": {"layer_scale": 0.1, "mlp_layer_scale": False}},
    "post": {"norms": {"order": "post"}},
    "res_post": {"norms": {"order": "res_post"}},
    "parallel": {"norms": {"order": "parallel"}},
    "parallel, gated": {"norms": {"order": "parallel"}, "mlp": {"activation": "swiglu"}},
    "parallel, scaled": {"norms": {"order": "parallel", "layer_scale": 0.1}},
    "no projection": {"attention": {"proj": False}},
    "stochastic depth": {"regularisation": {"drop_path": 0.1}},
    "dropout": {"regularisation": {"mlp_drop": 0.1}},
}


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("option", RECOMPUTED)
def test_the_gradient_of_jax_recomputes_the_products_that_are_estimated(option: str, remat: Any) -> None:
    jax = pytest.importorskip("jax")

    import vit_jax

    config, images = CONFIG.replace(**RECOMPUTED[option]), jax.ShapeDtypeStruct((8, 32, 48, 3), np.float32)

    def gradient_flops(remat: Any) -> int:
        model = vit_jax.ViT(config, vit_jax.Execution(remat=remat))

        def loss(params: Any, images: Any) -> Any:
            return model.apply({"params": params}, images, train=True, key=jax.random.key(0)).sum()

        return products_of(jax.make_jaxpr(jax.grad(loss))(jax_shapes(config), images).jaxpr)

    assert gradient_flops(remat) - gradient_flops("none") == estimate(config=config, remat=remat).recomputed


def products_of(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products of a jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        total += equation.params.get("length", 1) * sum(products_of(each) for each in inner if hasattr(each, "eqns"))
    return total


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("option", RECOMPUTED)
def test_a_backward_pass_of_torch_recomputes_the_products_that_are_estimated(option: str, remat: Any) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    import vit_torch

    config = CONFIG.replace(**RECOMPUTED[option])

    def step_flops(remat: Any) -> int:
        execution = vit_torch.Execution(remat=remat, attention="explicit")  # the counter leaves fused kernels out
        model = vit_torch.ViT(config, execution).train()
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(8, 3, 32, 48)).sum().backward()
        return counter.get_total_flops()

    recomputed = estimate_torch(config, Recipe(batch_size=8, remat=remat), ONE).recomputed
    assert step_flops(remat) - step_flops("none") == recomputed


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_patch_dropout_saves_the_flops_of_the_blocks_on_the_patches_that_it_leaves_out(remat: Any) -> None:
    config = CONFIG.replace(regularisation={"patch_drop": 0.3})
    expected = estimate(config=CONFIG.replace(image_size=(32, 32)), remat=remat)  # with the 4 patches that are kept
    found = estimate(config=config, remat=remat)
    assert found.flops == expected.flops + 3 * 8 * 2 * 2 * 768 * 24  # the embedding of the other 2
    assert found.recomputed == expected.recomputed


def test_one_device_sends_nothing() -> None:
    assert not estimate(augment=Augment(mixup=0.2)).transfers


def test_data_parallelism_all_reduces_the_gradients() -> None:
    assert estimate(ONE | {"data": 8}).transfers == {("all-reduce", "data"): 4 * vit_spec.count(CONFIG)}


def test_fsdp_gathers_blocks_twice_and_reduce_scatters_their_gradients() -> None:
    assert estimate(ONE | {"fsdp": 2}, dtype="bfloat16").transfers == {
        ("all-gather", "fsdp"): 2 * (2 * 2 * BLOCK + OUTSIDE),
        ("reduce-scatter", "fsdp"): 2 * (2 * BLOCK + OUTSIDE),
        ("all-reduce", "fsdp"): 4 * (2 * BIASES + VECTORS) - 2 * (24 + 7 * 24),  # class token and positions: bfloat16
    }


def test_the_cpu_compiler_all_reduces_the_gradients_of_matrices() -> None:
    recipe = Recipe(batch_size=8, dtype="bfloat16")
    on_gpu, on_cpu = (
        estimate_memory(CONFIG, recipe, ONE | {"fsdp": 2}, compiler=name).transfers for name in ("gpu", "cpu")
    )
    assert ("reduce-scatter", "fsdp") not in on_cpu
    assert sum(on_cpu.values()) == sum(on_gpu.values())


def test_tensor_parallelism_all_reduces_four_activations_per_block() -> None:
    assert estimate(ONE | {"tensor": 2}).transfers == {("all-reduce", "tensor"): 4 * 8 * 2 * 4 * 7 * 24}


# The MLP reads the output of attention.  Layer scale and norms read the output that they scale or normalize.
BLOCK_ORDERS: list[tuple[dict[str, Any], int]] = [
    ({"order": "pre"}, 1),
    ({"order": "pre", "layer_scale": 0.1}, 2),
    ({"order": "pre", "layer_scale": 0.1, "mlp_layer_scale": False}, 1),
    ({"order": "post"}, 2),
    ({"order": "res_post"}, 2),
]


@pytest.mark.parametrize(("norms", "repeated"), BLOCK_ORDERS)
def test_full_remat_sums_again_what_the_backward_pass_reads(norms: dict[str, Any], repeated: int) -> None:
    config, key = CONFIG.replace(norms=norms), ("all-reduce", "tensor")
    found = {remat: estimate(ONE | {"tensor": 2}, config, remat=remat).transfers[key] for remat in ("none", "dots", "full")}
    assert found["none"] == found["dots"] == 4 * 8 * 2 * 4 * 7 * 24
    assert found["full"] == 4 * 8 * 2 * (4 + repeated) * 7 * 24


@pytest.mark.parametrize(("layer_scale", "repeated"), [(None, 0), (0.1, 1)])
def test_a_parallel_block_sums_its_two_outputs_together_on_gpus(layer_scale: float | None, repeated: int) -> None:
    config = CONFIG.replace(norms={"order": "parallel", "layer_scale": layer_scale})
    recipe, sizes = Recipe(batch_size=8, remat="full"), ONE | {"tensor": 2}
    on_gpu, on_cpu = (estimate_memory(config, recipe, sizes, compiler=name).transfers for name in ("gpu", "cpu"))
    assert on_gpu == {("all-reduce", "tensor"): 4 * 8 * 2 * (3 + repeated) * 7 * 24}
    assert on_cpu == {("all-reduce", "tensor"): 4 * 8 * 2 * (4 + 2 * repeated) * 7 * 24}


def test_the_step_time_is_between_full_overlap_and_none() -> None:
    found = estimate(EIGHT)
    compute = found.flops / 8 / (1e12 * 0.5)
    devices = Devices(8, 1 << 30, peak_flops=1e12, utilization=0.5, bandwidth={"": 1e9, "data": 1e6})
    step_time = estimate_step_time(found, devices, EIGHT)
    assert step_time is not None and step_time.compute == compute
    assert step_time.overlapped == max(step_time.communication.values())
    summed = found.transfers["all-reduce", "data+fsdp"]
    assert step_time.communication["data+fsdp"] == pytest.approx(2 * summed * 3 / 4 / 1e6)  # the lower of two bandwidths
    assert step_time.sequential == compute + sum(step_time.communication.values())
    gathered, summed = found.transfers["all-gather", "fsdp"], found.transfers["reduce-scatter", "fsdp"]
    assert step_time.communication["fsdp"] == pytest.approx((gathered + summed) / 2 / 1e9)


MESH = "data=2,fsdp=2,tensor=2"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what programs compiled for eight simulated devices send, and what was planned; see `tests.meshes`."""
    from tests.train.test_mesh import measure_once  # imported here because it needs jax

    return measure_once(tmp_path_factory, 8, "--parts", MESH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_optimizers_of_matrices_rows_or_layers_send_what_was_planned(name: str, compiled: dict[str, Any]) -> None:
    measured, estimated = compiled["transfers"][name]
    assert measured == estimated != {}


@pytest.mark.slow
def test_unusual_model_options_send_what_was_planned(
    compiled: dict[str, Any],
) -> None:
    measured, estimated = compiled["transfers"]["model"]
    assert measured == estimated


@pytest.mark.slow
def test_muon_updates_sharded_matrices_as_on_one_device(compiled: dict[str, Any]) -> None:
    # Updates near 1 in float64.  Sums in another order differ by 1e-15; each of Muon's five Newton-Schulz steps makes a
    # small singular value, and its error, up to 3.4 times as large: 500 times in all.
    assert compiled["muon_difference"] < 1e-12


def muon_transfers(sizes: dict[str, int]) -> dict[tuple[str, str], int]:
    """Return what Muon sends in addition to AdamW."""
    adamw = estimate(sizes).transfers
    found = estimate(sizes, optimizer=Optimizer(name="muon")).transfers
    return {key: size - adamw.get(key, 0) for key, size in found.items() if size != adamw.get(key)}


def test_muon_redistributes_sharded_matrices_by_all_to_all_and_back() -> None:
    # Four devices share a matrix.  The q, k and v of two blocks are six matrices, padded to two per device; of the other
    # kinds there are two, padded to one per device.  Both halves of `data` compute the same.
    filled = 8 * 24 * 24 + 4 * (24 * 24 + 2 * 24 * 40)
    part = 4 * filled // 4
    assert muon_transfers(EIGHT) == {("all-to-all", "fsdp"): 2 * part, ("all-to-all", "tensor"): 2 * part}


def test_muon_distributes_replicated_matrices_and_gathers_the_results() -> None:
    assert muon_transfers(ONE | {"data": 2}) == {("all-gather", "data"): 4 * 2 * BLOCK}


def test_muon_computes_fewer_matrices_than_devices_on_each_device() -> None:
    # Six q, k and v matrices for eight devices, and two of each other kind
    assert muon_transfers(ONE | {"data": 8}) == {}


# The PyTorch trainer --------------------------------------------------------------------------------------------------

# Without RMSNorm, which a CPU composes of other operations, and relative positions, whose attention it does not fuse.
MORE_OPTIONS: dict[str, dict[str, Any]] = OPTIONS | {
    "sigmoid": {"mlp": {"activation": "quick_gelu"}},
    "no activation": {"mlp": {"activation": "none"}},
    "gated, with a norm": {"mlp": {"activation": "swiglu", "norm": True}},
    "norm of the heads": {"attention": {"out_norm": True, "qkv_bias": "qv"}},
    "no projection": {"attention": {"proj": False, "value_skip": True}},
    "parallel": {"norms": {"order": "parallel", "layer_scale": 0.1}},
    "norms after": {"norms": {"order": "res_post"}},
    "rotations": {"positions": {"rotary": "dinov3"}},
    "learned rotations": {"positions": {"rotary": "mixed"}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("option", MORE_OPTIONS)
def test_activations_are_those_that_torch_keeps_for_the_backward_pass(option: str, remat: Any, dtype: Any) -> None:
    pytest.importorskip("torch")
    from tests.torch_costs import kept_bytes_of_a_block

    config = CONFIG.replace(**MORE_OPTIONS[option])
    recipe = Recipe(batch_size=1, remat=remat, dtype=dtype, rng="shared")
    two, one = (estimate_torch(config.replace(depth=depth), recipe, ONE).memory["activations"] for depth in (2, 1))
    assert kept_bytes_of_a_block(config, dtype, remat) == two - one


@pytest.fixture(scope="module")
def fake_processes() -> dict[str, Any]:
    """Return what one of eight fake processes sends and stores, and what was planned; see `tests.torch_costs`."""
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch_costs"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_step_of_torch_sends_and_stores_exactly_what_was_planned(fake_processes: dict[str, Any]) -> None:
    """For every kind of mesh, optimizer, remat and dtype, and for models with every kind of parameter."""
    for case, parts in fake_processes.items():
        for part, (measured, planned) in parts.items():
            if not part.startswith("update"):
                assert measured == planned and measured, (case, part)


def test_an_update_of_torch_needs_the_temporary_memory_that_was_planned(fake_processes: dict[str, Any]) -> None:
    """For the same cases.  Scalars, such as the norm of each gradient, are not planned.  Adafactor's copies are a bound."""
    found = {(case, part): sizes for case, parts in fake_processes.items() for part, sizes in parts.items()}
    for key, (measured, planned) in found.items():
        if key[1].startswith("update"):
            assert measured - 1024 <= planned <= 1.5 * measured, key


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_torch_needs_no_more_memory_than_planned(name: Any, ema: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a batch so small that the update of most optimizers needs more memory than the backward pass."""
    pytest.importorskip("torch")
    from benchmarks.torch_memory import measured_peak

    monkeypatch.setattr("train.torch.tensor_groups.GROUP_SIZE", 1 << 17)  # a quarter of the parameters
    sizes: dict[str, Any] = {"width": 128, "num_heads": 2, "mlp_dim": 512, "depth": 2, "image_size": (32, 32)}
    config = vit_spec.get("vit_ti16", num_classes=10, **sizes)
    recipe = Recipe(batch_size=1, remat="full", optimizer=Optimizer(name=name), ema=ema)
    found = estimate_torch(config, recipe, ONE)
    state = sum(found.memory.get(part, 0) for part in ("parameters", "optimizer state", "EMA"))
    measured = state + measured_peak(config, recipe)
    assert measured - 4096 <= found.total <= 1.1 * measured  # scalars are not planned


def test_a_plan_for_torch_has_no_attention_weights_and_suggests_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = plan_of("train.torch", capsys, *LARGE, "--plan", "8x20GiB")
    assert status == 1 and "attention weights" not in printed and "reduce-scatter, fsdp" in printed
    option, value = re.findall(r"(--remat|--accumulate) (\w+) \(", printed)[0]
    assert plan_of("train.torch", capsys, *LARGE, option, value, "--plan=8x20GiB")[0] == 0


def test_a_plan_for_torch_refuses_a_model_that_the_trainer_cannot_divide(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model.changes", "attention.out_norm=True", "--mesh", "tensor=2", "--plan", "2x80GiB")
    status, line = plan_of("train.torch", capsys, *arguments)
    assert status == 2 and line.count("\n") == 1 and "cannot divide models with attention.out_norm" in line
    assert run_plan(capsys, *arguments)[0] == 0  # train.jax can


# Devices --------------------------------------------------------------------------------------------------------------


def test_devices_and_rates_are_parsed() -> None:
    wanted = Devices(64, 80 << 30, peak_flops=989e12, utilization=0.45, bandwidth={"": 450e9, "data": 50e9})
    assert parse_devices("64x80GiB@989TFLOPs,45%,450GB/s,data=50GB/s") == wanted


@pytest.mark.parametrize("text", ["", "64", "0x80GiB", "64x0GiB", "64x80GB", "64x80GiB@", "64x80GiB@fast", "8x8GiB@0%"])
def test_devices_that_cannot_be_parsed_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="write such as 64x80GiB"):
        parse_devices(text)


def test_bandwidth_along_an_unknown_axis_is_refused_and_the_nearest_is_named() -> None:
    with pytest.raises(InputError, match="did you mean 'fsdp'"):
        parse_devices("8x80GiB@1PFLOPs,fspd=450GB/s")


# The command ----------------------------------------------------------------------------------------------------------


def must_not_train(asked: Request) -> int:
    raise AssertionError("a plan must not train")


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return plan_of("train.jax", capsys, *arguments)


def plan_of(module: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(module, must_not_train, arguments)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


LARGE = ("--config", "vit_l16", "--data", "parquet:imagenet-1k/data", "--mesh", "data=-1,fsdp=8")


def test_a_run_that_fits_is_reported_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run_plan(capsys, *LARGE, "--plan", "64x80GiB@989TFLOPs,450GB/s")
    assert status == 0
    assert re.search(r"112,603 steps +\S+ to \S+ hours", printed)
    assert "\nfits: " in printed


def test_a_run_that_does_not_fit_is_reported_with_a_change_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run_plan(capsys, *LARGE, "--plan=8x24GiB")
    assert status == 1
    assert "does not fit" in printed and "the largest part is activations" in printed
    option, value = re.findall(r"(--remat|--accumulate) (\w+) \(", printed)[0]
    assert run_plan(capsys, *LARGE, option, value, "--plan=8x24GiB")[0] == 0


def test_if_no_single_change_fits_all_together_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = run_plan(capsys, *LARGE[:-1], "data=-1", "--plan", "8x6GiB")
    words = re.search(r"try (--remat full --accumulate \d+ --mesh \S+) \(", printed)
    assert words is not None
    assert run_plan(capsys, *LARGE[:-2], *words[1].split(), "--plan", "8x6GiB")[0] == 0


def test_if_no_change_fits_more_devices_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "try more devices, or a smaller --batch-size" in run_plan(capsys, *LARGE, "--plan", "8x0.5GiB")[1]
    assert "try more devices along fsdp" in run_plan(capsys, *LARGE, "--plan", "8x0.01GiB")[1]


def test_a_plan_names_parameters_that_stay_replicated(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = run_plan(capsys, "--mesh", "fsdp=5", "--batch-size", "5", "--plan", "5x80GiB")
    assert "100.0% of the weights are not sharded by fsdp=5" in printed and "gathered matrices" not in printed


def test_missing_data_are_assumed_to_have_the_size_of_imagenet() -> None:
    source = open_or_assume_imagenet("parquet:nowhere/data")
    assert (len(source.train), len(source.classes)) == (1_281_167, 1000)
    assert source.notes == ("parquet:nowhere/data does not exist here: its size is assumed to be that of ImageNet-1k",)


def test_missing_data_of_a_new_source_are_assumed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_splits(place: str) -> Any:
        raise InputError(f"{place} does not exist")

    monkeypatch.setitem(sources._SOURCES, "lmdb", sources._SourceKind("lmdb:PATH", open_splits))
    assert len(open_or_assume_imagenet("lmdb:nowhere").train) == 1_281_167


@pytest.mark.parametrize("data", ["imagenet", "parqet:imagenet", "digits:here"])
def test_data_of_an_unknown_kind_are_refused(data: str) -> None:
    with pytest.raises(InputError, match="unknown data"):
        open_or_assume_imagenet(data)


@pytest.mark.parametrize(
    "place", ["~/data", "~/data?label=x", "~/data/train-?.parquet", "~/data/train-{0..3}.tar"], ids=lambda place: place
)
def test_data_in_the_home_folder_or_of_a_pattern_are_not_taken_for_missing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kind = "tar" if place.endswith(".tar") else "parquet"
    assert open_or_assume_imagenet(f"{kind}:{place}").notes[0].startswith(f"{kind}:{place} does not exist here")
    (tmp_path / "data").mkdir()
    for name in ("train-0.parquet", "train-1.tar"):
        (tmp_path / "data" / name).write_bytes(b"damaged")
    with pytest.raises(InputError):
        open_or_assume_imagenet(f"{kind}:{place}")


def test_data_that_exist_and_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        open_or_assume_imagenet(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "data=3", "--plan", "8x80GiB"), "has a product of 3 for 8 devices"),
        (("--mesh", "tensor=8", "--plan", "8x80GiB"), "does not divide the 6 heads"),
        (("--batch-size", "100", "--plan", "8x80GiB"), "give 104"),
        (("--plan",), "--plan needs a value"),
        (("--plan", "8"), "write such as"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = run_plan(capsys, *arguments)
    assert status == 2 and line.startswith("error: ") and message in line and line.count("\n") == 1


def test_a_plan_imports_neither_a_twin_nor_a_trainer() -> None:
    code = (
        "import sys, train.plan; print(*({'vit_jax', 'vit_torch', 'flax', 'torch', 'train.jax.engine'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not run.stdout.strip()
