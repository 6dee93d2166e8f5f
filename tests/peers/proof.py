"""How a format is proven: a file that its own library wrote, run through both twins, against that library's outputs."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
from parity.checkpoints.weights import Checkpoint
from parity.comparison.tolerances import FUNCTION, PRECISION

RECORD = "PARITY_PROOFS"  # where set, a folder: the differences that were measured go there, for docs/formats.md


def relrms(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected||."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def through_torch(checkpoint: Checkpoint, images: np.ndarray, dtype: str = "float64") -> np.ndarray:
    """The PyTorch twin's logits in float64 or float32; images are (B, C, H, W)."""
    torch = pytest.importorskip("torch")
    import vit_torch

    kind = getattr(torch, dtype)
    model = vit_torch.ViT(checkpoint.config).to(kind).eval()
    model.load_state_dict({key: value.to(kind) for key, value in parity.to_torch(checkpoint).items()})
    with torch.no_grad():
        return model(torch.tensor(images, dtype=kind)).numpy()


def through_jax(checkpoint: Checkpoint, images: np.ndarray) -> np.ndarray:
    """The JAX twin's logits in float64 on the CPU; images are (B, C, H, W)."""
    jax = pytest.importorskip("jax")
    import vit_jax

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parity.to_jax(checkpoint))
        model, nhwc = vit_jax.ViT(checkpoint.config), images.transpose(0, 2, 3, 1)
        lowered = jax.jit(lambda params, images: model.apply({"params": params}, images)).lower(params, nhwc)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # runs once
        return np.asarray(lowered.compile(compiler_options=quick)(params, nhwc))


def hidden_states(checkpoint: Checkpoint, images: np.ndarray) -> list[np.ndarray]:
    """What each block of the PyTorch twin puts out, (B, N, D) in float64."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.ViT(checkpoint.config).double().eval()
    model.load_state_dict({key: value.double() for key, value in parity.to_torch(checkpoint).items()})
    with torch.no_grad():
        _, found = vit_torch.intermediates(model, torch.tensor(images))
    return [found[f"blocks.{n}"].numpy() for n in range(checkpoint.config.depth)]


@contextmanager
def overheard(model: Any, depth: int) -> Iterator[list[np.ndarray]]:
    """Collect what each block of a peer puts out while it runs: the first list of modules that is `depth` long."""
    from torch import nn

    heard: list[np.ndarray] = []

    def hear(module: Any, arguments: Any, output: Any) -> None:
        tokens = output[0] if isinstance(output, tuple) else output
        heard.append(tokens.detach().numpy().copy())

    lists = (part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) == depth)
    hooks = [block.register_forward_hook(hear) for block in next(lists)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def prove(
    path: Path,
    images: np.ndarray,
    logits: np.ndarray,
    *,
    format: str,
    peer: str,
    given: dict[str, Any] | None = None,
    hidden: list[np.ndarray] | None = None,
) -> Checkpoint:
    """Hold a file to what its own library makes of it, and return it as it was read.

    path: what the library wrote, float32 or float64.
    images, logits: (B, C, H, W) in float64, and the library's outputs for them in float64, with these weights.
    format: what the file must be recognised as.
    peer: the library and its version, for the table of formats.
    given: fields of the config that neither the file nor the format tells.
    hidden: what each block of the library's model put out, (B, N, D).
    """
    checkpoint = parity.load(path, given=given)
    assert checkpoint.format == format
    distances = {
        "torch": relrms(through_torch(checkpoint, images), logits),
        "jax": relrms(through_jax(checkpoint, images), logits),
    }
    assert max(distances.values()) <= FUNCTION, distances
    if hidden is not None:
        ours = hidden_states(checkpoint, images)
        assert max(relrms(a, b) for a, b in zip(ours, hidden, strict=True)) <= FUNCTION
    assert relrms(through_torch(checkpoint, images, "float32"), logits) <= PRECISION
    if folder := os.environ.get(RECORD):
        line = {"format": format.partition(":")[0], "peer": peer, **distances}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return checkpoint
