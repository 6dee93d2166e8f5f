"""A tiny model trained for a few steps on every mesh asked for, as a process of its own: its findings as JSON.

    python -m tests.meshes data=8 data=2,fsdp=2,tensor=2 ...      in float64
    python -m tests.meshes --bfloat16 data=2,fsdp=2,tensor=2      a step in bfloat16, for what XLA writes about it
    python -m tests.meshes --parts data=2,fsdp=2,tensor=2         single updates of OPTIMIZERS, and a step of MODEL

The first two with drop path, mixup, accumulation and a running mean.  XLA_FLAGS says how many devices there are.
"""

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
from jax.sharding import NamedSharding

import vit_spec
from benchmarks.jax_program import program
from parity.checkpoints.weights import held
from tests.twins import perturbed
from train.data.augment import Mix
from train.data.batches import Batch
from train.jax import sharding
from train.jax.engine import JaxEngine
from train.jax.memory_estimate import needs
from train.jax.optimizers import optimizer
from train.jax.parameter_tree import tree
from train.recipes import Augment, Optimizer, Recipe

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

OPTIMIZERS = ("muon", "adafactor", "lamb")  # those that look at more than one number at a time
PLAIN = Recipe(batch_size=8)
MODEL = CONFIG.replace(norms={"shared_norm": True}, attention={"qkv_bias": "qv", "proj": False})


def engine(mesh: str, **changes: Any) -> JaxEngine:
    """The trainer of the tiny model, from weights as wide as jax computes."""
    params = jax.tree.map(lambda x: np.asarray(x, jnp.zeros(()).dtype), perturbed(CONFIG))
    start = held(params, CONFIG, "jax")
    recipe = replace(RECIPE, mesh=mesh, **changes)
    return JaxEngine(CONFIG, recipe, task="classes", rate=lambda step: 1e-2, start=start, folder=Path("nowhere"))


def batch(step: int, rows: np.ndarray) -> Batch:
    """These rows of a batch that is the same for all processes."""
    random = np.random.default_rng(step)
    size = RECIPE.batch_size
    images = random.integers(0, 256, (size, *CONFIG.image_size, CONFIG.in_channels), np.uint8)
    labels = random.integers(0, CONFIG.num_classes, size).astype(np.int32)
    share = np.float32(0.7)
    mix = Mix(share, np.zeros(4, np.int32), share)
    return Batch(images[rows], labels[rows], rows, np.ones(len(rows), bool), mix)


def findings(mesh: str) -> dict[str, Any]:
    """What a mesh's run shows: losses, what a device holds, and what the compiled step says of itself."""
    e = engine(mesh)
    losses = [float(e.step(batch(step, e.batch_rows))["loss"]) for step in range(STEPS)]
    sizes = dict(e.mesh.shape)
    made = program(e._update, sizes)
    wanted = needs(CONFIG, replace(RECIPE, mesh=mesh), sizes, scatters=False, wide=8)
    state = {"parameters": e._state.params, "optimizer": e._state.moments, "running mean": e._state.ema}
    return {
        "losses": losses,
        "arguments": [made.arguments, wanted.state],
        "transfers": [_named(made.transfers), _named(wanted.transfers)],
        "held": {name: [_here(part), wanted.memory[name]] for name, part in state.items()},
        "rows": e.batch_rows.tolist(),
        "shares": [_rows_of(pair, e.mesh).tolist() for pair in np.arange(e.mesh.size - e.mesh.size % 2).reshape(-1, 2)],
    }


def updated(name: Any, mesh: jax.sharding.Mesh | None) -> tuple[Any, Any]:
    """An optimizer's first update of random weights, on a mesh or on one device, and the compiled program."""
    random = np.random.default_rng(0)
    params, grads = (
        tree(CONFIG, lambda parameter: random.normal(size=[CONFIG.sizes.get(word, 1) for word in parameter.axes]))
        for _ in range(2)
    )
    rule = optimizer(Optimizer(name=name), CONFIG, mesh)
    given = grads, jax.jit(rule.init)(params), params
    places: dict[str, Any] = {}
    if mesh is not None:
        ours = sharding.parameters(mesh, CONFIG)
        beside = sharding.like_parameters(given[1], jax.tree.map(lambda p, place: (p.shape, place), params, ours))
        places = {"in_shardings": (ours, beside, ours), "out_shardings": (ours, beside)}
        given = jax.device_put(given, places["in_shardings"])
    compiled = jax.jit(partial(rule.update, rate=1.0), **places).lower(*given).compile()
    return compiled(*given)[0], compiled


def parts(mesh: str) -> dict[str, Any]:
    """What the optimizers and the model's options send, and how far Muon's update is from that of one device."""
    zeros = tree(MODEL, lambda parameter: np.zeros([MODEL.sizes.get(word, 1) for word in parameter.axes], np.float32))
    start, recipe = held(zeros, MODEL, "jax"), replace(PLAIN, mesh=mesh)  # zeros need not be compiled, as draws do
    e = JaxEngine(MODEL, recipe, task="classes", rate=lambda step: 1e-2, start=start, folder=Path("nowhere"))
    sizes = dict(e.mesh.shape)
    sent = {
        "model": [_named(program(e._update, sizes).transfers), _named(needs(MODEL, PLAIN, sizes, scatters=False).transfers)]
    }
    rest = needs(CONFIG, PLAIN, sizes, wide=8).transfers
    apart: list[float] = []
    for name in OPTIMIZERS:
        with jax.enable_x64(True):
            found, compiled = updated(name, e.mesh)
            if name == "muon":
                alone, _ = updated(name, None)
                apart = [
                    float(abs(np.asarray(a) - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, alone)), strict=True)
                ]
        wanted = needs(CONFIG, replace(PLAIN, optimizer=Optimizer(name=name)), sizes, wide=8).transfers
        more = {key: size - rest.get(key, 0) for key, size in wanted.items()}
        sent[name] = [_named(program(compiled, sizes).transfers), _named(more)]
    return {"sent": sent, "apart": max(apart)}


def _rows_of(pair: np.ndarray, mesh: jax.sharding.Mesh) -> np.ndarray:
    """What a process would feed whose devices were these two of the mesh."""
    theirs = [mesh.devices.flat[i] for i in pair]

    def of_process(self: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Any]:
        return {device: self.devices_indices_map(shape)[device] for device in theirs}

    with patch.object(NamedSharding, "addressable_devices_indices_map", of_process):
        return sharding.rows_here(mesh, RECIPE.batch_size)


def _named(transfers: dict[tuple[str, str], int]) -> dict[str, int]:
    return {" ".join(key): size for key, size in sorted(transfers.items()) if size}


def _here(tree: Any) -> int:
    """Bytes of a tree on this process's first device, but for single numbers."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim)


if __name__ == "__main__":
    flag, *meshes = sys.argv[1:]
    sharding.join_cluster()
    if flag == "--bfloat16":
        engine(*meshes, dtype="bfloat16").step(batch(0, np.arange(RECIPE.batch_size)))
    elif flag == "--parts":
        print(json.dumps(parts(*meshes)))
    else:
        jax.config.update("jax_enable_x64", True)
        print(json.dumps({mesh: findings(mesh) for mesh in sys.argv[1:]}))
