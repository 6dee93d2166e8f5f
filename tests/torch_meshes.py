"""One process of a run in PyTorch: it trains a tiny model on each given mesh, and the main process writes the results.

    WORLD_SIZE=4 RANK=... LOCAL_RANK=... MASTER_ADDR=... MASTER_PORT=... python -m tests.torch_meshes FOLDER MESH ...

In float64, with mixup, gradient accumulation, an EMA, label smoothing and, in some models, dropout.  FOLDER is for
checkpoints and for results.pickle.
"""

import gc
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vit_spec
import vit_torch
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from train.checkpoints import shard_files
from train.data.augment import Mix
from train.data.batches import Batch
from train.loop.loop_state import LoopState
from train.loop.teacher import Teacher
from train.recipes import Augment, Optimizer, Recipe
from train.torch.cluster import join_cluster
from train.torch.engine import TorchEngine
from train.torch.sharding import local
from vit_spec import ViTConfig

CONFIG = vit_spec.get(
    "vit_ti16",
    **{"image_size": (8, 12), "patch_size": 4, "width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 96, "num_classes": 6},
)
RECIPE = Recipe(
    batch_size=16,
    accumulate=2,
    optimizer=Optimizer(lr=1e-2, eps=1e-3),
    augment=Augment(mixup=0.2, repeats=3),
    label_smoothing=0.1,
    ema=0.9,
)
RATES = {"pos_drop": 0.1, "patch_drop": 0.2, "attn_drop": 0.2, "mlp_drop": 0.2, "drop_path": 0.3}
# Models with every kind of parameter that `tensor` divides, or that all heads share.
MODELS: dict[str, dict[str, Any]] = {
    "norms, gates and pooling": {
        "attention": {"qk_norm": True, "qkv_bias": "qv"},
        "mlp": {"activation": "swiglu"},
        "head": {"pool": "attention"},
        "regularisation": RATES,
    },
    "a table of offsets": {"positions": {"kind": "none", "relative": "table"}},
    "an MLP of offsets": {"positions": {"relative": "mlp", "relative_dim": 8, "relative_shared": True}},
    "learned rotations": {
        "positions": {"rotary": "mixed"},
        "norms": {"order": "parallel", "kind": "rms", "bias": False},
        "regularisation": RATES,
    },
}
STEPS = 3
LOOP_STATE = LoopState()
# With AdamW, blocks are computed again for the backward pass, while the parts of a batch are added up.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"ema": 0.0, "remat": "full"},
    "sgd": {"ema": 0.0, "accumulate": 1},
    "lamb": {"ema": 0.0, "accumulate": 1},
    "lion": {"ema": 0.0, "accumulate": 1},
    "adafactor": {"accumulate": 1},
    "muon": {"accumulate": 1},
}
# Optimizers whose update does not shrink with the gradient.  Where the gradient is zero, as that of key biases is, rounding
# errors determine the update.
SCALE_FREE = ("lion", "adafactor")
RESUMED = ("all parameters", "adafactor", "muon")  # the last two have moments of other shapes than the parameters


def make_weights(config: ViTConfig) -> Checkpoint:
    """Return random weights of a model, the same in all processes."""
    torch.manual_seed(0)
    weights = {name: p.detach() for name, p in vit_torch.ViT(config).named_parameters()}
    return as_checkpoint({name: p + 0.05 * torch.randn_like(p) for name, p in weights.items()}, config, "torch")


def make_engine(
    mesh: str, folder: Path = Path("nowhere"), config: ViTConfig = CONFIG, *, is_taught: bool = False, **changes: Any
) -> TorchEngine:
    """Return the engine of a tiny model in float64; is_taught: with a teacher and class weights."""
    others: dict[str, Any] = {}
    if is_taught:
        weights = make_weights(CONFIG.replace(depth=1, image_size=(12, 12)))
        others["teacher"] = Teacher("teacher", weights, np.arange(CONFIG.num_classes), [])
        others["class_weights"] = np.linspace(0.5, 1.5, CONFIG.num_classes)
    recipe = replace(RECIPE, mesh=mesh, **changes)
    start = make_weights(config)
    return TorchEngine(
        config, recipe, task="classes", learning_rate=lambda step: 1e-2, initial_weights=start, folder=folder, **others
    )


def make_batch(step: int, rows: np.ndarray) -> Batch:
    """Return some rows of the batch of a step; the whole batch is the same in all processes."""
    random = np.random.default_rng(step)
    images = random.integers(0, 256, (16, *CONFIG.image_size, CONFIG.in_channels), np.uint8)
    labels = random.integers(0, CONFIG.num_classes, 16).astype(np.int32)
    mix = Mix(np.float32(0.7), np.zeros(4, np.int32), np.float32(0.7))
    return Batch(images[rows], labels[rows], rows, np.arange(16)[rows] % 5 > 0, mix)


def train(engine: TorchEngine, first: int, end: int) -> list[float]:
    """Return the losses and gradient norms of some steps."""
    metrics = [engine.step(make_batch(step, engine.batch_rows)) for step in range(first, end)]
    return [float(each[name]) for each in metrics for name in ("loss", "accuracy", "grad_norm")]


def evaluate(engine: TorchEngine) -> list[Any]:
    """Return the outputs, losses and readable images of a batch, with the EMA and with the weights themselves."""
    batch = make_batch(0, engine.batch_rows)
    return [np.asarray(part).tolist() for raw in (False, True) for part in engine.evaluate(batch, raw=raw)]


def weights(engine: TorchEngine) -> dict[str, np.ndarray]:
    """Return all entries of all weights and of their EMA."""
    places = engine._optimizer.placements
    found = {name: place.full(place.entries) for name, place in places.items()}
    if engine.state.ema:
        found |= {f"ema.{name}": places[name].full(entries) for name, entries in engine.state.ema.items()}
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def make_run(name: str, mesh: str, folder: Path = Path("nowhere")) -> TorchEngine:
    """Return the engine of a run by its name: all parameters are trained with AdamW, or some of them with an optimizer."""
    if name == "all parameters":
        return make_engine(mesh, folder / name)
    settings: dict[str, Any] = {"name": name, "eps": 1e-3, "freeze": ("blocks.0.*",)}
    return make_engine(mesh, folder / name, optimizer=Optimizer(**settings), **OPTIMIZERS[name])


def measure(mesh: str, folder: Path) -> dict[str, Any]:
    """Return what a mesh gives: losses, weights, evaluations, updates of all optimizers, and runs that can be resumed."""
    out: dict[str, Any] = {}
    for name in ("all parameters", *OPTIMIZERS):
        engine = make_run(name, mesh, folder)
        out[name] = [train(engine, 0, STEPS - 1), weights(engine)]
        if name in RESUMED:
            engine.save_checkpoint(STEPS - 1, LOOP_STATE)
            engine.close()
            out[f"whole {name}"] = [train(engine, STEPS - 1, STEPS), weights(engine)]
        if name == "all parameters":
            out["evaluated"] = evaluate(engine)
            train(engine, STEPS, STEPS + 1)
            out["evaluated"] += evaluate(engine)
            out["entries"] = sum(local(p).numel() for p in engine._params.values())
    for name, changes in MODELS.items():
        optimizer = Optimizer(name="muon" if "mlp" in changes else "sgd", eps=1e-3)  # the two matrices of gates are apart
        engine = make_engine(mesh, config=CONFIG.replace(**changes), optimizer=optimizer, rng="shared")
        out[name] = [train(engine, 0, 2), weights(engine)]
    student = CONFIG.replace(tokens={"distillation": True})
    engine = make_engine(mesh, config=student, is_taught=True, distillation="soft")
    out["taught"] = [train(engine, 0, 2), weights(engine)]
    return out


def resume(mesh: str, folder: Path, name: str) -> list[Any]:
    """Return the losses and the weights of a run that resumes from a checkpoint."""
    engine = make_run(name, mesh, folder)
    restored = engine.restore_checkpoint()
    assert restored is not None and restored[0] == STEPS - 1
    check_adoption(engine, folder / name / str(STEPS - 1), folder / f"{name}, adopted")
    return [train(engine, STEPS - 1, STEPS), weights(engine)]


def check_adoption(engine: TorchEngine, checkpoint: Path, folder: Path) -> None:
    """Assert that an engine takes over the state that it has restored, as if the checkpoint were another trainer's."""
    tensors = {name: entries for name, (_, entries) in engine._tensors().items()}
    restored = {name: entries.clone() for name, entries in tensors.items()}
    for entries in tensors.values():
        entries.zero_()
    engine.adopt(shard_files.read_state(checkpoint, engine.config), LOOP_STATE, folder)
    assert all(torch.equal(entries, restored[name]) for name, entries in tensors.items())


def main(folder: str, *meshes: str) -> None:
    """Write what each mesh gives, and what a run that resumes on it from the checkpoint of the mesh before it."""
    torch.set_default_dtype(torch.float64)
    join_cluster()
    found = {mesh or "one": measure(mesh, Path(folder) / (mesh or "one")) for mesh in meshes}
    for number, mesh in enumerate(meshes):
        other = Path(folder) / (meshes[number - 1] or "one")
        found[mesh or "one"]["resumed"] = {name: resume(mesh, other, name) for name in RESUMED}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (Path(folder) / "results.pickle").write_bytes(pickle.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)  # as in tests/conftest.py
    main(*sys.argv[1:])
