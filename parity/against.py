"""Are two files the same function?  Both, whatever their formats, through both twins in float64 on the same images."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from parity.comparison import FUNCTION, Array
from parity.weights import Checkpoint, to_jax, to_torch
from vit_spec import InputError
from vit_spec.config import FIELDS


@dataclass(frozen=True)
class Report:
    """What `compare_files` found.

    differences: name of an intermediate -> relRMS of the second file from the first, in the PyTorch and the JAX twin.
    config: fields in which the two configs differ.
    """

    differences: dict[str, tuple[float, float]]
    config: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the outputs agree to what float64 rounding explains."""
        return max(self.differences["logits"]) <= FUNCTION

    @property
    def verdict(self) -> str:
        """One line: PASS, or the first part that differs."""
        worst = max(self.differences["logits"])
        if self.passed:
            return f"PASS: the same function, outputs agree to {worst:.1e} in float64"
        first = next(name for name, values in self.differences.items() if not max(values) <= FUNCTION)
        return (
            f"FAIL: another function, outputs differ by {worst:.1e} in float64 (bar {FUNCTION:.0e}); "
            f"the first part that differs is {first}, by {max(self.differences[first]):.1e}"
        )

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("tensor", overflow="fold")
        for twin in ("torch", "jax"):
            table.add_column(twin, justify="right")
        for name, values in self.differences.items():
            table.add_row(name, *(f"{value:.1e}" for value in values))
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        fields = [f"config: {line}\n" for line in self.config]
        return f"{capture.get()}relRMS of the second file from the first, in float64\n{''.join(fields)}{self.verdict}"


def compare_files(first: Checkpoint, second: Checkpoint, *, seed: int = 0) -> Report:
    """Run both files through both twins in float64, and measure where they part.

    Args:
        seed: of the two images, normal noise of the first file's size.

    Raises:
        InputError: models that take other images, or give other outputs.
    """
    a, b = first.config, second.config
    if a.in_channels != b.in_channels:
        raise InputError(f"one takes images of {a.in_channels} channels, the other of {b.in_channels}: nothing to compare")
    images = np.random.default_rng(seed).standard_normal((2, *a.image_size, a.in_channels))
    runs = [(_torch(checkpoint, images), _jax(checkpoint, images)) for checkpoint in (first, second)]
    shapes = [run[0]["logits"].shape for run in runs]
    if shapes[0] != shapes[1]:
        raise InputError(f"one gives outputs of shape {shapes[0]}, the other {shapes[1]}: nothing to compare")
    differences = {
        name: (_relrms(runs[1][0][name], tensor), _relrms(runs[1][1][name], runs[0][1][name]))
        for name, tensor in runs[0][0].items()
        if name in runs[1][0] and runs[1][0][name].shape == tensor.shape
    }
    return Report(differences, _fields(first, second))


def _fields(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    a, b = first.config, second.config
    return tuple(f"{name} is {a.at(name)!r} and {b.at(name)!r}" for name in FIELDS if a.at(name) != b.at(name))


def _relrms(found: Array, expected: Array) -> float:
    size = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(found - expected))
    return error / size if size else error


def _torch(checkpoint: Checkpoint, images: Array) -> dict[str, Array]:
    import torch

    import vit_torch

    model = vit_torch.ViT(checkpoint.config).double().eval()
    model.load_state_dict(to_torch(checkpoint))
    with torch.no_grad():
        logits, found = vit_torch.intermediates(model, torch.tensor(images).permute(0, 3, 1, 2))
    return {name: tensor.numpy() for name, tensor in {**found, "logits": logits}.items()}


def _jax(checkpoint: Checkpoint, images: Array) -> dict[str, Array]:
    import jax

    import vit_jax

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        params: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), to_jax(checkpoint))
        model = vit_jax.ViT(checkpoint.config)
        logits, found = jax.jit(lambda p, x: vit_jax.intermediates(model, p, x))(params, images)
        return {name: np.asarray(tensor) for name, tensor in {**found, "logits": logits}.items()}
