"""Command that trains a tiny model for a few steps on each given mesh and prints measurements as JSON.

    python -m tests.meshes data=8 data=2,fsdp=2,tensor=2 ...      # in float64
    python -m tests.meshes --bfloat16 data=2,fsdp=2,tensor=2      # one step in bfloat16, for the program that XLA dumps
    python -m tests.meshes --parts data=2,fsdp=2,tensor=2         # an update of each of NOT_ELEMENTWISE, a step of MODEL

The first two use drop path, mixup, gradient accumulation and an EMA.  On the meshes of TAUGHT, the first also trains a
student with a teacher, class weights and remat.  XLA_FLAGS sets the number of devices, so tests run this module in a
separate process.
"""

import gc
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

import vit_spec
from benchmarks.jax_program import analyze_program
from parity.checkpoints.weights import as_checkpoint
from train.data.augment import Mix
from train.data.batches import Batch
from train.jax import sharding
from train.jax.cluster import join_cluster
from train.jax.engine import JaxEngine
from train.jax.memory_estimate import estimate_memory
from train.jax.optimizers import make_optimizer
from train.jax.parameter_tree import tree
from train.loop.teacher import Teacher
from train.mesh import Parameter
from train.recipes import Augment, Optimizer, Recipe
from vit_spec import ViTConfig

CONFIG = vit_spec.get(
    "vit_ti16",
    **{"image_size": (8, 12), "patch_size": 4, "width": 32, "depth": 3, "num_heads": 8, "mlp_dim": 64, "num_classes": 6},
    regularisation={"drop_path": 0.2},
)
RECIPE = Recipe(
    batch_size=32,
    accumulate=2,
    optimizer=Optimizer(lr=1e-2),
    augment=Augment(mixup=0.2),
    label_smoothing=0.1,
    ema=0.9,
)
STEPS = 3
TAUGHT = ("data=1", "data=2,fsdp=2,tensor=2")

NOT_ELEMENTWISE = ("muon", "adafactor", "lamb")  # optimizers whose updates are not elementwise
PLAIN_RECIPE = Recipe(batch_size=8)
MODEL = CONFIG.replace(norms={"shared_norm": True}, attention={"qkv_bias": "qv", "proj": False})


def random_params(config: ViTConfig, seed: int = 0) -> Any:
    """Return random parameters of the JAX twin, of jax's default floating-point dtype."""
    random, dtype = np.random.default_rng(seed), jnp.zeros(()).dtype

    def draw(parameter: Parameter) -> np.ndarray:
        return (0.3 * random.normal(size=[config.sizes.get(word, 1) for word in parameter.axes])).astype(dtype)

    return tree(config, draw)


def make_engine(mesh: str, **changes: Any) -> JaxEngine:
    """Return the engine of the tiny model."""
    start = as_checkpoint(random_params(CONFIG), CONFIG, "jax")
    recipe = replace(RECIPE, mesh=mesh, **changes)
    return JaxEngine(
        CONFIG, recipe, task="classes", learning_rate=lambda step: 1e-2, initial_weights=start, folder=Path("nowhere")
    )


def measure_taught(mesh: str) -> list[float]:
    """Return the losses of a student with two heads, taught by a model for larger images."""
    student, other = CONFIG.replace(tokens={"distillation": True}), CONFIG.replace(depth=1, image_size=(12, 12))
    start, weights = (as_checkpoint(random_params(config), config, "jax") for config in (student, other))
    engine = JaxEngine(
        student,
        replace(RECIPE, mesh=mesh, distillation="soft", remat="full"),
        task="classes",
        learning_rate=lambda step: 1e-2,
        initial_weights=start,
        folder=Path("nowhere"),
        class_weights=np.linspace(0.5, 1.5, CONFIG.num_classes),
        teacher=Teacher("teacher", weights, np.arange(CONFIG.num_classes), []),
    )
    return [float(engine.step(make_batch(step, engine.batch_rows))["loss"]) for step in range(STEPS)]


def make_batch(step: int, rows: np.ndarray) -> Batch:
    """Return some rows of the batch of a step; the whole batch is the same in all processes."""
    random = np.random.default_rng(step)
    size = RECIPE.batch_size
    images = random.integers(0, 256, (size, *CONFIG.image_size, CONFIG.in_channels), np.uint8)
    labels = random.integers(0, CONFIG.num_classes, size).astype(np.int32)
    weight = np.float32(0.7)
    mix = Mix(weight, np.zeros(4, np.int32), weight)
    return Batch(images[rows], labels[rows], rows, np.ones(len(rows), bool), mix)


def measure_mesh(mesh: str) -> dict[str, Any]:
    """Return losses, bytes per device and transfers of the compiled step on a mesh, each with its estimate."""
    gathered: list[int] = []  # bytes of each array that a process gets from all others

    def gather(values: Any, **options: Any) -> Any:
        found = process_allgather(values, **options)
        gathered.append(np.asarray(found).nbytes)
        return found

    with patch.object(multihost_utils, "process_allgather", gather):
        engine = make_engine(mesh)
        losses = [float(engine.step(make_batch(step, engine.batch_rows))["loss"]) for step in range(STEPS)]
    sizes = dict(engine.mesh.shape)
    compiled = analyze_program(engine.compiled_step, sizes)
    estimate = estimate_memory(CONFIG, replace(RECIPE, mesh=mesh), sizes, compiler="cpu", param_bytes=8)
    state = {"parameters": engine.state.params, "optimizer state": engine.state.moments, "EMA": engine.state.ema}
    return {
        "losses": losses,
        "gathered": gathered,
        "taught": measure_taught(mesh) if mesh in TAUGHT else [],
        "arguments": [compiled.arguments, estimate.state],
        "transfers": [_join_keys(compiled.transfers), _join_keys(estimate.transfers)],
        "state": {name: [_bytes_on_first_device(part), estimate.memory[name]] for name, part in state.items()},
        "rows": engine.batch_rows.tolist(),
        "rows_of_device_pairs": [
            _rows_of_devices(pair, engine.mesh).tolist() for pair in np.arange(engine.mesh.size // 2 * 2).reshape(-1, 2)
        ],
    }


def first_update(name: Any, mesh: jax.sharding.Mesh | None) -> tuple[Any, Any]:
    """Return an optimizer's first update of random weights, on a mesh or on one device, and the compiled program."""
    params, grads = (random_params(CONFIG, seed) for seed in range(2))
    rule = make_optimizer(Optimizer(name=name), CONFIG, mesh)
    arguments = grads, jax.jit(rule.init)(params), params
    shardings: dict[str, Any] = {}
    if mesh is not None:
        param_shardings = sharding.parameter_shardings(mesh, CONFIG)
        shapes_and_shardings = jax.tree.map(lambda p, placed: (p.shape, placed), params, param_shardings)
        state_shardings = sharding.shardings_like_parameters(arguments[1], shapes_and_shardings)
        shardings = {
            "in_shardings": (param_shardings, state_shardings, param_shardings),
            "out_shardings": (param_shardings, state_shardings),
        }
        arguments = jax.device_put(arguments, shardings["in_shardings"])
    compiled = jax.jit(partial(rule.update, rate=1.0), **shardings).lower(*arguments).compile()
    return compiled(*arguments)[0], compiled


def measure_optimizers(mesh: str) -> dict[str, Any]:
    """Return transfers of optimizers and of model options, and the largest difference of Muon's update from one device."""
    zeros = tree(MODEL, lambda parameter: np.zeros([MODEL.sizes.get(word, 1) for word in parameter.axes], np.float32))
    start, recipe = as_checkpoint(zeros, MODEL, "jax"), replace(PLAIN_RECIPE, mesh=mesh)  # zeros need no compilation
    engine = JaxEngine(
        MODEL, recipe, task="classes", learning_rate=lambda step: 1e-2, initial_weights=start, folder=Path("nowhere")
    )
    sizes = dict(engine.mesh.shape)
    transfers = {
        "model": [
            _join_keys(analyze_program(engine.compiled_step, sizes).transfers),
            _join_keys(estimate_memory(MODEL, PLAIN_RECIPE, sizes, compiler="cpu").transfers),
        ]
    }
    adamw_transfers = estimate_memory(CONFIG, PLAIN_RECIPE, sizes, param_bytes=8).transfers
    differences: list[float] = []
    for name in NOT_ELEMENTWISE:
        with jax.enable_x64(True):
            update, compiled = first_update(name, engine.mesh)
            if name == "muon":
                single_device_update, _ = first_update(name, None)
                pairs = zip(*map(jax.tree.leaves, (update, single_device_update)), strict=True)
                differences = [float(abs(np.asarray(a) - b).max()) for a, b in pairs]
        recipe = replace(PLAIN_RECIPE, optimizer=Optimizer(name=name))
        estimate = estimate_memory(CONFIG, recipe, sizes, param_bytes=8).transfers
        difference = {key: size - adamw_transfers.get(key, 0) for key, size in estimate.items()}
        transfers[name] = [_join_keys(analyze_program(compiled, sizes).transfers), _join_keys(difference)]
    return {"transfers": transfers, "muon_difference": max(differences)}


def _rows_of_devices(pair: np.ndarray, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Return the batch rows that a process with these two devices of the mesh would load."""
    devices = [mesh.devices.flat[i] for i in pair]

    def of_process(self: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Any]:
        return {device: self.devices_indices_map(shape)[device] for device in devices}

    with patch.object(NamedSharding, "addressable_devices_indices_map", of_process):
        return sharding.process_rows(mesh, RECIPE.batch_size)


def _join_keys(transfers: dict[tuple[str, str], int]) -> dict[str, int]:
    """Return transfers with keys that JSON can store, such as "all-reduce data+fsdp"."""
    return {" ".join(key): size for key, size in sorted(transfers.items()) if size}


def _bytes_on_first_device(tree: Any) -> int:
    """Return the bytes of a pytree on this process's first device, without scalars."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim)


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)  # as in tests/conftest.py
    flag, *meshes = sys.argv[1:]
    join_cluster()
    if flag == "--bfloat16":
        make_engine(*meshes, dtype="bfloat16").step(make_batch(0, np.arange(RECIPE.batch_size)))
    elif flag == "--parts":
        print(json.dumps(measure_optimizers(*meshes)))
    else:
        jax.config.update("jax_enable_x64", True)
        print(json.dumps({mesh: measure_mesh(mesh) for mesh in sys.argv[1:]}))
