"""A model of the user as a function of its weights and of images, in float64 on CPU, whatever its framework is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parity.checkpoints.layout import Array
from vit_spec import InputError

Weights = Mapping[str, Array]

FIXED_DTYPE = (
    "a part with a fixed dtype cannot be compared in float64: in a copy of the class, let it compute in the dtype of its "
    "inputs (in torch without .float() or dtype=torch.float32; in Flax with dtype=None, perhaps as an argument in --like, "
    "and jax.nn.softmax in place of jax.nn.dot_product_attention or nnx's, whose softmax is always in float32)"
)


class ImageShape(NamedTuple):
    """The images of a model: their size in pixels, their channels, and whether the channels are the last axis."""

    height: int
    width: int
    channels: int
    channels_last: bool


@dataclass
class Trace:
    """The operations of one forward pass.

    Attributes:
        order: the keys of the weights, in the order in which operations first use them.
        numbers: the floating-point constants of the operations, in order.
        narrowed: the shape and the dtype of the first array that was computed from float64 in another precision; else "".
    """

    order: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    narrowed: str = ""

    def use(self, key: str) -> None:
        """Record the use of a weight."""
        if key not in self.order:
            self.order.append(key)

    def number(self, value: Any) -> None:
        """Record a constant."""
        if isinstance(value, float) and value == value and value not in self.numbers:
            self.numbers.append(value)

    def convert(self, before: Iterable[Any], after: Iterable[Any]) -> None:
        """Record an operation by the arrays that it reads and those that it returns, if it reduces their precision."""
        if self.narrowed or not any(str(each.dtype).endswith("float64") for each in before):
            return
        for each in after:
            if str(each.dtype).endswith(("float32", "float16")):
                self.narrowed = f"{tuple(each.shape)} in {str(each.dtype).removeprefix('torch.')}"


class OwnModel(ABC):
    """A model of the user.

    Attributes:
        name: the text that names its class.
        twin: the name of the twin in its framework, "torch" or "jax", which is also the name of the twin's format.
        separator: the separator of its keys.
        weights: its parameters by key, as they were initialized, in float64.
        constants: its other arrays by key: buffers in PyTorch, other collections in Flax.
        unsaved: arrays by key that checkpoints do not have: buffers of PyTorch with persistent=False.
        generators: keys of states of random number generators, which a checkpoint may have and which are not read.
        settings: names and values of attributes of its modules and of arguments of its constructor.
    """

    twin: str
    separator: str

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self.unsaved: dict[str, Array] = {}
        self.generators: frozenset[str] = frozenset()
        self.settings: list[tuple[str, Any]] = []

    @abstractmethod
    def fit(self, images: ImageShape) -> str:
        """Prepare for images of this shape; return "", or the reason why the model does not take them."""

    def check_loading(self, arrays: Weights) -> None:  # noqa: B027  # Flax modules have no code that loads arrays
        """Raise InputError if the class changes the arrays of a checkpoint when it loads them.

        arrays: all arrays of the checkpoint by key.
        """

    @abstractmethod
    def run(self, weights: Weights, images: Array, inference: bool = False) -> Array:
        """Return the output for images (B, H, W, C).

        Args:
            weights: values that replace `weights`, `constants` and `unsaved`.
            images: the images.
            inference: run without gradients, for which PyTorch has other kernels and a class may have other code.
        """

    @abstractmethod
    def gradients(self, weights: Weights, images: Array, target: Array) -> tuple[Array, dict[str, Array]]:
        """Return the output, and the gradients of its mean squared error from a target with respect to `weights`.

        A weight that the output does not depend on has no gradient.
        """

    @abstractmethod
    def perturbed_gradients(
        self, weights: Weights, images: Array, target: Array, seed: int
    ) -> tuple[Array, dict[str, Array]]:
        """Return what `gradients` does, with random perturbations of the operands of operations.

        See `parity.comparison.monte_carlo_arithmetic`.

        seed: seed of the perturbations.
        """

    @abstractmethod
    def trace(self, weights: Weights, images: Array) -> Trace:
        """Return the operations of a forward pass."""


def select_output(returned: Any) -> Any:
    """Return the logits in the return value of a model: the array, its entry or attribute `logits`, or its only array.

    Raises:
        InputError: there is no such array, or there are several.
    """
    if _is_array(returned):
        return returned
    is_mapping = isinstance(returned, Mapping)
    value = returned.get("logits") if is_mapping else getattr(returned, "logits", None)
    if _is_array(value):
        return value
    parts: Sequence[Any] = ()
    if is_mapping:
        parts = list(returned.values())
    elif isinstance(returned, (tuple, list)):
        parts = returned
    arrays = [part for part in parts if _is_array(part)]
    if len(arrays) == 1 and all(_is_array(part) or _is_nothing(part) for part in parts):
        return arrays[0]
    what = f"a {type(returned).__name__} of {len(arrays)} arrays" if parts else f"a {type(returned).__name__}"
    raise InputError(
        f"its forward pass returns {what}: let a subclass return the logits alone, or as the entry or attribute `logits`"
    )


def _is_nothing(value: Any) -> bool:
    """Return whether a part of a return value stands for one that is left out: None, or an empty list."""
    return value is None or (isinstance(value, (Mapping, tuple, list)) and not value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def simple_settings(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes of an object that are numbers, texts or tuples of numbers.

    Attributes that are configs are searched too.
    """
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (bool, int, float, str)):
            yield name, value
        elif isinstance(value, (tuple, list)) and value and all(isinstance(each, int) for each in value):
            yield name, tuple(value)
        elif "config" in name.lower() or name in ("cfg", "args"):
            yield from simple_settings(value) if not isinstance(value, dict) else value.items()


def as_float64(array: Any) -> Array:
    """Return an array in float64; half precision of any kind is converted exactly."""
    return np.asarray(np.asarray(array), np.float64)
