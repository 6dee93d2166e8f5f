"""What is measured of a JAX model: the same functions for every library, and a training step like big_vision's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, Inputs

Apply = Callable[[Any, Array], Array]  # (parameters, normalized images (B, H, W, C)) -> logits (B, num_classes)
Scalars = tuple[Array, Array]  # the loss, and the norm of its gradient

_COMPILED: list[str] = []


def _count(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


def versions() -> list[str]:
    """Return the packages whose versions decide the results."""
    return ["jax", "jaxlib", "flax", "optax"]


def device_name() -> str:
    """Return the name of the device, "cpu" for CPUs."""
    return jax.devices()[0].device_kind


def synchronize(result: Any) -> None:
    """Wait until a result is computed."""
    jax.block_until_ready(result)


def device_memory() -> int | None:
    """Return the peak of the bytes that JAX allocated on the device; None on CPUs."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def compilations() -> int:
    """Return how many programs XLA has compiled in this process."""
    return len(_COMPILED)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Return the mean cross entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


class JaxModel:
    """A function with its parameters and its batch.  Each measured function returns an array that may not be computed yet.

    The training step is that of big_vision's train.py: one compiled function that is given its state to reuse the memory of
    (donation), with normalization inside, the gradient, clipping of its norm, and optax's AdamW.
    """

    def __init__(self, apply: Apply, params: Any) -> None:
        """Take the library's function and its parameters, a pytree of float32 arrays."""
        self._apply = apply
        self._params = jax.tree.map(jnp.asarray, params)

    def prepare(self, inputs: Inputs, compiled: bool, bfloat16: bool) -> None:
        """Make everything that a step needs.  JAX always compiles, and `load` has chosen the dtype."""
        self._place(inputs)

        def decays(params: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

        adamw = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, mask=decays)
        optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adamw)
        mean, std = jnp.float32(inputs.mean), jnp.float32(inputs.std)

        def train(params: Any, moments: Any, pixels: Array, targets: Array) -> tuple[Any, Any, Scalars]:
            images = (pixels.astype(jnp.float32) / 255 - mean) / std
            loss, gradient = jax.value_and_grad(self._loss)(params, images, targets)
            updates, moments = optimizer.update(gradient, moments, params)
            return optax.apply_updates(params, updates), moments, (loss, optax.tree.norm(gradient))

        self._moments = jax.jit(optimizer.init)(self._params)
        self._train = jax.jit(train, donate_argnums=(0, 1))

    def _place(self, inputs: Inputs) -> None:
        """Place the batch on the device, and make the functions that do not train."""
        self._images, self._pixels, self._targets = map(jnp.asarray, (inputs.images, inputs.pixels, inputs.targets))
        self._image = self._images[:1]
        options = self.compiler_options(len(self._images))
        self._forward = jax.jit(self._apply, compiler_options=options)
        self._latency = jax.jit(self._apply, compiler_options=self.compiler_options(1))
        self._gradient = jax.jit(jax.value_and_grad(self._loss), compiler_options=options)

    def compiler_options(self, batch_size: int) -> dict[str, Any] | None:
        """Return the XLA options that the library has for a program of a batch, except of a training step."""
        return None

    def _loss(self, params: Any, images: Array, targets: Array) -> Array:
        return cross_entropy(self._apply(params, images), targets)

    @property
    def params(self) -> Any:
        """The parameters, which a step replaces."""
        return self._params

    def compared(self, what: str, result: Any) -> np.ndarray:
        """Return the logits that a measured function returned, or its loss and the norm of its gradient."""
        if what == "gradient":
            result = result[0], optax.tree.norm(result[1])
        return np.asarray(jnp.asarray(result, jnp.float32))

    def forward(self) -> Array:
        """Return the logits of the normalized batch, (B, num_classes)."""
        return self._forward(self.params, self._images)

    def latency(self) -> Array:
        """Return the logits of one normalized image, (1, num_classes)."""
        return self._latency(self.params, self._image)

    def gradient(self) -> Any:
        """Return the loss of the normalized batch, and its gradient."""
        return self._gradient(self.params, self._images, self._targets)

    def step(self) -> Scalars:
        """Do a training step on the batch of uint8 images; return the loss, and the norm of its gradient."""
        self._params, self._moments, scalars = self._train(self._params, self._moments, self._pixels, self._targets)
        return scalars
