"""Proofs of formats: both twins read a file of the format's own library and compute the outputs of that library."""

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
from parity.comparison.tolerances import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE

# An environment variable: the folder to which differences are written, for docs/reference/formats.md.
RECORD_VARIABLE = "PARITY_PROOFS"


def relrms(found: np.ndarray, expected: np.ndarray) -> float:
    """Return ||found - expected|| / ||expected||."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def torch_logits(checkpoint: Checkpoint, images: np.ndarray, dtype: str = "float64") -> np.ndarray:
    """Return the logits of the PyTorch twin in float64 or float32; images are (B, C, H, W)."""
    torch = pytest.importorskip("torch")
    import vit_torch

    kind = getattr(torch, dtype)
    model = vit_torch.ViT(checkpoint.config).to(kind).eval()
    model.load_state_dict({key: value.to(kind) for key, value in parity.to_torch(checkpoint).items()})
    with torch.no_grad():
        return model(torch.tensor(images, dtype=kind)).numpy()


def jax_logits(checkpoint: Checkpoint, images: np.ndarray) -> np.ndarray:
    """Return the logits of the JAX twin in float64 on the CPU; images are (B, C, H, W)."""
    jax = pytest.importorskip("jax")
    import vit_jax

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parity.to_jax(checkpoint))
        model, nhwc = vit_jax.ViT(checkpoint.config), images.transpose(0, 2, 3, 1)
        lowered = jax.jit(lambda params, images: model.apply({"params": params}, images)).lower(params, nhwc)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # runs once
        return np.asarray(lowered.compile(compiler_options=quick)(params, nhwc))


def prove_gradients(checkpoint: Checkpoint, images: np.ndarray, model: Any) -> np.ndarray:
    """Assert that both twins have the gradients of a PyTorch library's model, for a random weighted sum of the outputs.

    Return the outputs of the JAX twin in float64, which it computes on the way.

    A gradient has the shape of its weight, so the format converts it as it converts the weight.

    checkpoint: the model, read from its files.
    images: (B, C, H, W) in float64.
    model: the library's model, in float64.
    """
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    import vit_jax
    import vit_torch
    from tests.goldens.peers import float64

    pixels = torch.tensor(images)
    with float64(), torch.enable_grad():
        outputs = model(pixels)
        direction = np.random.default_rng(7).standard_normal(outputs.shape)
        (outputs * torch.tensor(direction)).sum().backward()
    arrays = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    arrays |= {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    theirs = Checkpoint(checkpoint.config, checkpoint.format, {name: each.numpy() for name, each in arrays.items()})

    twin = vit_torch.ViT(checkpoint.config).double().eval()
    twin.load_state_dict({key: value.double() for key, value in parity.to_torch(checkpoint).items()})
    (twin(pixels) * torch.tensor(direction)).sum().backward()
    expected = {key: value.numpy() for key, value in parity.to_torch(theirs).items()}
    found = {"torch": {key: each.grad.numpy() for key, each in twin.named_parameters()}}

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parity.to_jax(checkpoint))
        jax_model, nhwc = vit_jax.ViT(checkpoint.config), images.transpose(0, 2, 3, 1)

        def weighted_sum(params: Any) -> tuple[Any, Any]:
            logits = jax_model.apply({"params": params}, nhwc)
            return (logits * direction).sum(), logits

        lowered = jax.jit(jax.grad(weighted_sum, has_aux=True)).lower(params)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # runs once
        gradients, logits = jax.tree.map(np.asarray, lowered.compile(compiler_options=quick)(params))
    found["jax"] = {key: value.numpy() for key, value in parity.to_torch(gradients, checkpoint.config).items()}

    # The softmax cancels biases of keys: their gradients are rounding noise, so no gradient is compared with less than a
    # thousandth of the mean.
    least = 1e-3 * float(np.mean([np.linalg.norm(each) for each in expected.values()]))
    for twin_name, ours in found.items():
        assert ours.keys() == expected.keys()
        errors = {
            key: float(np.linalg.norm(ours[key] - each) / max(np.linalg.norm(each), least))
            for key, each in expected.items()
        }
        assert max(errors.values()) <= FLOAT64_TOLERANCE, (twin_name, max(errors, key=errors.__getitem__), errors)
    return logits


def hidden_states(checkpoint: Checkpoint, images: np.ndarray) -> list[np.ndarray]:
    """Return the output of each block of the PyTorch twin, (B, N, D) in float64."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.ViT(checkpoint.config).double().eval()
    model.load_state_dict({key: value.double() for key, value in parity.to_torch(checkpoint).items()})
    with torch.no_grad():
        _, found = vit_torch.intermediates(model, torch.tensor(images))
    return [found[f"blocks.{n}"].numpy() for n in range(checkpoint.config.depth)]


@contextmanager
def record_block_outputs(model: Any, depth: int) -> Iterator[list[np.ndarray]]:
    """Collect the output of each block while a peer runs, in the list that is returned.

    The blocks are the first `ModuleList` or `Sequential` of length `depth`.
    """
    from torch import nn

    outputs: list[np.ndarray] = []

    def record(module: Any, arguments: Any, output: Any) -> None:
        tokens = output[0] if isinstance(output, tuple) else output
        outputs.append(tokens.detach().numpy().copy())

    lists = (part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) == depth)
    hooks = [block.register_forward_hook(record) for block in next(lists)]
    try:
        yield outputs
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
    model: Any = None,
) -> Checkpoint:
    """Assert that both twins compute a library's outputs from its file, and return the checkpoint.

    With `model`, also assert that they have its gradients.

    The outputs are compared in float64 and, for the PyTorch twin, in float32.

    path: a file or folder that the library wrote, in float32 or float64.
    images: (B, C, H, W) in float64.
    logits: the outputs of the library for the images with these weights, in float64.
    format: the format as which the file must be recognised.
    peer: the library and its version, for the table of formats.
    given: fields of the config that neither the file nor the format determines.
    hidden: the output of each block of the library's model, (B, N, D).
    model: the library's model, in PyTorch and in float64.
    """
    checkpoint = parity.load(path, given=given)
    assert checkpoint.format == format
    by_jax = jax_logits(checkpoint, images) if model is None else prove_gradients(checkpoint, images, model)
    errors = {
        "torch": relrms(torch_logits(checkpoint, images), logits),
        "jax": relrms(by_jax, logits),
    }
    assert max(errors.values()) <= FLOAT64_TOLERANCE, errors
    if hidden is not None:
        ours = hidden_states(checkpoint, images)
        assert max(relrms(a, b) for a, b in zip(ours, hidden, strict=True)) <= FLOAT64_TOLERANCE
    assert relrms(torch_logits(checkpoint, images, "float32"), logits) <= FLOAT32_TOLERANCE
    if folder := os.environ.get(RECORD_VARIABLE):
        line = {"format": format.partition(":")[0], "peer": peer, **errors}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return checkpoint
