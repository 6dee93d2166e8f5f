"""What a golden is of: weights, drawn or given, and what they are shown; all a function of the seed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import vit_spec
from parity.checkpoints.formats import Fields
from parity.checkpoints.reading import existing, load
from parity.checkpoints.weights import Checkpoint, check, parameter
from parity.comparison import reproducible_init
from parity.comparison.forward_backward import Subject
from parity.comparison.golden.file import Array, Golden
from vit_spec import InputError, ViTConfig, bounded_json, nearest, rows
from vit_spec.config import FIELDS


def read_subject(text: str, *, format: str | None = None, given: Fields | None = None) -> ViTConfig | Checkpoint:
    """Return what a golden is to be of: a named model or the config in a JSON file, whose weights are drawn; or weights.

    Args:
        text: the name of a model, or a path.
        format, given: as of `parity.load`.

    Raises:
        InputError: neither a name nor a file, or a file that is neither.
    """
    if text in vit_spec.names():
        return vit_spec.get(text)
    path = Path(text)
    if text.endswith(".json"):
        try:
            return ViTConfig.from_json(bounded_json.read_bytes(existing(path)))
        except InputError as error:
            raise InputError(str(error) if text in str(error) else f"{text}: {error}") from None
    if not path.exists() and path.name == text and not path.suffix:
        raise InputError(
            f"{text!r} is neither a named model nor a file{nearest(text, vit_spec.names()) or ': `models` lists the names'}"
        )
    return load(text, format=format, given=given)


@dataclass(frozen=True)
class _Shown(Subject):
    """A subject whose target does not change with numpy's version."""

    def target(self, shape: tuple[int, ...]) -> Array:
        return reproducible_init.noise(self.seed, "target", shape).astype(np.float64)


def shown(checkpoint: Checkpoint, seed: int) -> Subject:
    """Return weights with images and a target of the seed.

    Raises:
        InputError: a negative seed, or weights that are not their config's.
    """
    if seed < 0:
        raise InputError(f"seed is {seed}: give a number from 0")
    check(checkpoint)
    return _Shown(checkpoint, reproducible_init.images(checkpoint.config, seed), seed)


def restored(golden: Golden, weights: Checkpoint | None, path: str) -> Subject:
    """Return what a golden was recorded of.

    Raises:
        InputError: weights that are missing, that are others, or that it does not take.
    """
    if golden.drawn and weights is not None:
        raise InputError(f"{path} is of weights drawn from its seed, and takes no others: leave --weights out")
    if not golden.drawn:
        weights = _same_config(golden, weights, path)
    found = shown(weights or reproducible_init.weights(golden.config, golden.seed), golden.seed)
    sums = checksums(found)
    if sums["images"] != golden.checksums["images"] or (golden.drawn and sums != golden.checksums):
        raise InputError(
            f"{path}: its seed gives other numbers than it did, which no framework is to blame for: record it again"
        )
    if sums != golden.checksums:
        raise InputError(
            f"{path} was recorded of other weights (sha256 {golden.checksums['weights'][:12]}, and of these "
            f"{sums['weights'][:12]}): give its own, or record a golden of these"
        )
    return found


def _same_config(golden: Golden, weights: Checkpoint | None, path: str) -> Checkpoint:
    if weights is None:
        raise InputError(f"{path} was recorded of a file of weights, which it does not hold: give it with --weights FILE")
    pairs = {name: (golden.config.at(name), weights.config.at(name)) for name in FIELDS}
    if told := [f"{name} was {then!r} and is {now!r}" for name, (then, now) in pairs.items() if then != now]:
        raise InputError(f"{path} is of another config than these weights ({'; '.join(told)}): give those that it is of")
    return weights


def checksums(subject: Subject) -> dict[str, str]:
    """Return the SHA-256 of the images, and of the weights, whatever their format: in the order of the rows, as float64."""
    weights = hashlib.sha256()
    for name in rows(subject.config):
        weights.update(name.encode())
        weights.update(np.ascontiguousarray(parameter(subject.checkpoint, name), "<f8").data)
    images = hashlib.sha256(np.ascontiguousarray(subject.images, "<f4").data)
    return {"weights": weights.hexdigest(), "images": images.hexdigest()}
