"""The inputs of a golden file: weights, which are given or drawn from the seed, and images and targets from the seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from parity.checkpoints.conversion import checksum
from parity.checkpoints.formats import Fields
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath, load, resolve_path
from parity.checkpoints.weights import Checkpoint, validate
from parity.comparison import reproducible_init
from parity.comparison.disk_cache import available_memory
from parity.comparison.forward_backward import PassInputs
from parity.comparison.golden.file import Golden
from vit_spec import InputError, ViTConfig, bounded_json, nearest
from vit_spec.config import FIELDS
from vit_spec.parts import Head, Pixels, Positions, Regularisation, Resampling, Tokens


def read_model(
    text: str,
    *,
    format: str | None = None,
    given: Fields | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> ViTConfig | Checkpoint:
    """Return the config of a named model or of a JSON file, or else a checkpoint.

    `record` draws the weights of a config from the seed.

    Args:
        text: the name of a model, or the path of a JSON config or of a checkpoint.
        format, given, strip, ignore: as in `parity.load`.

    Raises:
        InputError: `text` is neither a name nor a file, the file is neither a config nor a checkpoint, or the other
            arguments, which are for a checkpoint, are given with a config.
    """
    is_file_of_config = text.endswith(".json")
    if (text in vit_spec.names() or is_file_of_config) and (format or given or strip or ignore):
        raise InputError(
            f"--from, --set, --strip and --ignore are for a checkpoint, and {text} is a config without weights: "
            "leave them out"
        )
    if text in vit_spec.names():
        return vit_spec.get(text)
    path = Path(text)
    if is_file_of_config:
        try:
            return ViTConfig.from_json(bounded_json.read_bytes(resolve_path(path)))
        except InputError as error:
            raise InputError(str(error) if text in str(error) else f"{text}: {error}") from None
    if not path.exists() and path.name == text and not path.suffix:
        raise InputError(
            f"{text!r} is neither a named model nor a file{nearest(text, vit_spec.names()) or ': `models` lists the names'}"
        )
    return load(text, format=format, given=given, strip=strip, ignore=ignore)


@dataclass(frozen=True)
class _ReproducibleInputs(PassInputs):
    """Inputs of a pass whose targets of the loss are the same with every version of NumPy."""

    def target(self, shape: tuple[int, ...]) -> Array:
        return reproducible_init.noise(self.seed, "target", shape).astype(np.float64)


def make_inputs(checkpoint: Checkpoint, seed: int) -> PassInputs:
    """Return a checkpoint with the images and the target of a seed.

    Raises:
        InputError: the seed is negative, or the weights do not fit their config.
    """
    if seed < 0:
        raise InputError(f"seed is {seed}: give a number from 0")
    validate(checkpoint)
    return _ReproducibleInputs(checkpoint, reproducible_init.images(checkpoint.config, seed), seed)


def recorded_inputs(golden: Golden, weights: Checkpoint | None, path: str) -> PassInputs:
    """Return the inputs that a golden file was recorded with.

    Args:
        weights: the recorded weights, in any format; None if they are drawn from the seed.
        path: path of the golden file, for messages.

    Raises:
        InputError: the weights are missing or have other values, weights are given although they are drawn from the seed,
            the memory is too little, or the seed no longer gives the recorded images or weights.
    """
    if golden.has_seeded_weights and weights is not None:
        raise InputError(f"{path} has weights drawn from its seed, and takes no others: leave --weights out")
    if not golden.has_seeded_weights:
        weights = _check_config(golden, weights, path)
    check_memory(golden.config, path)
    changed = InputError(
        f"{path}: its seed no longer gives the recorded images or weights, which is no fault of a framework: "
        "record it again"
    )
    if _checksum_of_images(reproducible_init.images(golden.config, golden.seed)) != golden.checksums["images"]:
        raise changed  # before the weights, which may be many, are drawn
    inputs = make_inputs(weights or reproducible_init.weights(golden.config, golden.seed), golden.seed)
    sums = checksums(inputs)
    if sums != golden.checksums and golden.has_seeded_weights:
        raise changed
    if sums != golden.checksums:
        raise InputError(
            f"{path} was recorded with other weights (SHA-256 {golden.checksums['weights'][:12]}, and these have "
            f"{sums['weights'][:12]}): give those weights, or record a golden file with these"
        )
    return inputs


def check_memory(config: ViTConfig, path: StrPath) -> None:
    """Raise InputError if a pass in float64 needs more memory than is available.

    A pass has the weights, their gradients, and the activations of two images, in memory; and more than that for a while.

    path: path of the golden file, for the message.
    """
    needed = 16 * vit_spec.count(config) + 2 * vit_spec.memory(config, dtype="float64").activations
    if needed > (available := available_memory()):
        raise InputError(
            f"{path}: a pass of its model in float64 takes at least {needed / 1e9:,.1f} GB of memory, and "
            f"{available / 1e9:,.1f} GB are available: use a machine with more memory"
        )


def _check_config(golden: Golden, weights: Checkpoint | None, path: str) -> Checkpoint:
    """Return the weights; raise InputError if they are missing, or have the config of another function."""
    if weights is None:
        raise InputError(f"{path} was recorded with the weights of a file: give that file with --weights FILE")
    recorded, given = _evaluated_function(golden.config), _evaluated_function(weights.config)
    if changed := [name for name in FIELDS if recorded.at(name) != given.at(name)]:
        changes = [f"{name} was {golden.config.at(name)!r} and is {weights.config.at(name)!r}" for name in changed]
        raise InputError(
            f"{path} was recorded with another config than these weights have ({'; '.join(changes)}): "
            "give the weights that it was recorded with, and the same --set"
        )
    return weights


def _evaluated_function(config: ViTConfig) -> ViTConfig:
    """Return a config with the defaults of all fields that change no pass over normalized images of its own size.

    These are the normalization, the resampling of positions, dropout, initial values of parameters, and the padding or
    cropping of images whose size is a multiple of the patch size.  Sizes and scales of heads are those that are computed
    where the config has none.
    """
    tokens: dict[str, Any] = {"init": Tokens().init}
    if all(size % patch == 0 for size, patch in zip(config.image_size, config.patch_size, strict=True)):
        tokens |= {"pad": Tokens().pad, "crop": Tokens().crop}
    initial: dict[str, Any] = {"tokens": tokens, "head": {"init": Head().init}, "attention": {"head_dim": config.head_dim}}
    if config.head.pool != "attention" or config.pool_scale == config.scale:
        initial["attention"]["scale"] = config.scale
    if config.positions.kind != "fixed":
        initial["positions"] = {"table": Positions().table}
    if config.norms.layer_scale is not None:
        initial["norms"] = {"layer_scale": 1.0}
    return config.replace(pixels=Pixels(), resampling=Resampling(), regularisation=Regularisation(), **initial)


def checksums(inputs: PassInputs) -> dict[str, str]:
    """Return the SHA-256 of "weights" and of "images"."""
    return {"weights": checksum(inputs.checkpoint), "images": _checksum_of_images(inputs.images)}


def _checksum_of_images(images: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(images, "<f4").data).hexdigest()
