"""Dropout masks that come from outside of two models, so that both drop the same entries in training.

The n-th call of dropout in either framework takes the n-th mask of one stream of random numbers.  In JAX the masks replace
`jax.random.bernoulli`, which every library's dropout calls; in PyTorch they replace dropout functions and
`Tensor.bernoulli_`.  Random numbers that cannot be given in this way are refused, because two models that draw their own
would seem to be different functions: those of other functions of PyTorch, and those of a loop of JAX.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_spec import InputError

_ELEMENTWISE = ("dropout", "dropout_")
_BY_CHANNEL = ("feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d")
_AXES_WITH_BATCH = {"dropout1d": 3, "dropout3d": 5}  # an input with fewer has no batch; `dropout2d` always has one
_SAME_RATE = 1e-7  # one of two equal rates may have been rounded to float32
_REMEDY = "set its rate to 0, or compare in evaluation, without train=True"


class MaskStream:
    """The masks of one seed.

    Attributes:
        calls: for each framework, the shape and the probability to keep of every call of its last run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.calls: dict[str, list[tuple[tuple[int, ...], float]]] = {"flax": [], "torch": []}
        self._keys: list[Any] = []  # of the calls in JAX; they are kept, so that no other key gets the id of one

    def draw(self, framework: str, shape: tuple[int, ...], keep: float) -> NDArray[np.bool_]:
        """Return the next mask of a framework: true for the entries to keep.

        PyTorch's masks are Flax's with the axes in the order of PyTorch, so Flax runs first.  Where all entries or none are
        kept, nothing is random: such a call takes no mask of the stream, as Flax's dropout does not call anything then.

        Raises:
            InputError: the shapes of this call do not correspond.
        """
        if keep in (0.0, 1.0):
            return np.full(shape, bool(keep))
        calls = self.calls[framework]
        n = len(calls)
        calls.append((shape, keep))
        if framework == "flax":
            return self._uniform(n, shape) < keep
        if n >= len(self.calls["flax"]):  # a dropout is missing in flax, see `differences`
            return self._uniform(n, shape) < keep
        of_flax = self.calls["flax"][n][0]
        if _coarser_side(of_flax, shape):  # the masks cannot be the same, see `differences`
            return self._uniform(n, shape) < keep
        numbers = self._uniform(n, of_flax)
        if shape != of_flax:
            if sorted(shape) != sorted(of_flax) or len(set(shape)) != len(shape):
                raise InputError(
                    f"dropout {n}: its mask has shape {of_flax} in flax and {shape} in torch, and no order of axes follows "
                    "from the lengths; use lengths that all differ, or drop the same array in both models"
                )
            numbers = numbers.transpose([of_flax.index(length) for length in shape])
        return numbers < keep

    def differences(self) -> dict[str, float]:
        """Return how much dropout differs between the last runs of both frameworks: its rates, the entries that it drops
        together, which count as 1, and the numbers of calls.

        The masks of a few entries may happen to be the same for two rates.
        """
        flax, torch = self.calls["flax"], self.calls["torch"]
        found = {f"rate of dropout {n}": abs(a - b) for n, ((_, a), (_, b)) in enumerate(zip(flax, torch, strict=False))}
        shapes = enumerate(zip(flax, torch, strict=False))
        return {
            **{name: difference for name, difference in found.items() if difference > _SAME_RATE},
            **{f"entries of dropout {n}": 1.0 for n, ((a, _), (b, _)) in shapes if _coarser_side(a, b)},
            **({"number of dropouts": float(abs(len(flax) - len(torch)))} if len(flax) != len(torch) else {}),
        }

    def hints(self) -> Iterator[str]:
        """Yield a line for each disagreement between the last runs of both frameworks."""
        flax, torch = self.calls["flax"], self.calls["torch"]
        if len(flax) != len(torch):
            yield f"flax calls dropout {len(flax)} times and torch {len(torch)} times"
        for n, ((of_flax, a), (of_torch, b)) in enumerate(zip(flax, torch, strict=False)):
            if side := _coarser_side(of_flax, of_torch):
                shapes = {"flax": of_flax, "torch": of_torch}
                other = "torch" if side == "flax" else "flax"
                axes = ", ".join(str(k) for k, length in enumerate(shapes[side]) if length == 1 < shapes[other][k])
                yield (
                    f"dropout {n}: {side} drops all entries along axis {axes} together, and {other} each entry by itself: "
                    f"their masks have shapes {shapes[side]} and {shapes[other]}"
                )
            if abs(a - b) > _SAME_RATE:
                yield f"dropout {n}: the rate is {1 - a:.3g} in flax and {1 - b:.3g} in torch"

    def notes(self) -> Iterator[str]:
        """Yield a line for each mask that Flax draws with a key of another one, which masks from outside cannot show."""
        for n, key in enumerate(self._keys):
            first = next(m for m, other in enumerate(self._keys) if other is key)
            if first < n:
                yield f"dropout {n} of flax has the key of dropout {first}: outside this test both drop the same entries"

    def _uniform(self, n: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return np.random.default_rng((self._seed, n)).random(shape)

    @contextmanager
    def in_flax(self) -> Iterator[None]:
        """Let `jax.random.bernoulli` return the masks, from the first one on.

        Raises:
            InputError: a mask is drawn in a loop of JAX.
        """
        import jax

        original, self.calls["flax"], self._keys = jax.random.bernoulli, [], []

        def bernoulli(key: Any, p: Any = 0.5, shape: Any = None, mode: str = "low", *, out_sharding: Any = None) -> Any:
            if _is_in_loop():
                raise InputError(
                    "a dropout of flax is in a scan or another loop of JAX, where only one mask for all steps can be given:"
                    f" with train=True loop in Python, {_REMEDY}"
                )
            if np.ndim(p):
                raise InputError(
                    f"flax calls jax.random.bernoulli with {np.size(p)} rates, and one mask has one rate: call it once for "
                    "each rate"
                )
            if 0 < float(p) < 1:
                self._keys.append(key)
            return jax.numpy.asarray(self.draw("flax", tuple(np.shape(p) if shape is None else shape), float(p)))

        jax.random.bernoulli = bernoulli
        try:
            yield
        finally:
            jax.random.bernoulli = original

    @contextmanager
    def in_torch(self) -> Iterator[None]:
        """Let PyTorch's dropout functions use the masks, from the first one on.

        Raises:
            InputError: another function draws random numbers.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        self.calls["torch"] = []
        draw = self.draw

        def mask(like: Any, shape: Any, keep: float) -> Any:
            return torch.from_numpy(draw("torch", tuple(shape), keep)).to(like.dtype)

        def drop(x: Any, shape: Any, p: float, training: bool) -> Any:
            return x * mask(x, shape, 1 - p) / ((1 - p) or 1) if training and p else x

        def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return drop(x, x.shape, p, training)

        def feature_dropout(name: str, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            kept = 1 if x.ndim < _AXES_WITH_BATCH.get(name, 0) else 2
            return drop(x, (*x.shape[:kept], *(1 for _ in x.shape[kept:])), p, training)

        def attention(
            q: Any,
            k: Any,
            v: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            if enable_gqa:
                k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
            scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
            if is_causal:
                attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            if attn_mask is not None:
                is_bool = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
            return dropout(scores.softmax(-1), dropout_p) @ v

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs, name = kwargs or {}, getattr(func, "__name__", "")
                if name in _ELEMENTWISE:
                    return dropout(*args, **_with_own_names(kwargs))
                if name in _BY_CHANNEL:
                    return feature_dropout(name, *args, **_with_own_names(kwargs))
                if name == "scaled_dot_product_attention" and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
                    return attention(*args, **kwargs)
                if name == "bernoulli_":
                    x, p = args[0], float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
                    return x.copy_(mask(x, x.shape, p))
                # Names would miss functions that draw only in some calls, as `lstm` does with dropout between its layers.
                before = torch.get_rng_state()
                returned = func(*args, **kwargs)
                if not torch.equal(before, torch.get_rng_state()):
                    raise InputError(
                        f"torch calls {name}, whose random numbers cannot be given to both models: with train=True use "
                        f"nn.Dropout or Tensor.bernoulli_ instead, {_REMEDY}"
                    )
                return returned

        with Mode():
            yield


def _coarser_side(flax: tuple[int, ...], torch: tuple[int, ...]) -> str:
    """Return the framework whose mask has length 1 along axes of the other's mask, in any order of axes; "" if none has."""
    lengths = [Counter(length for length in shape if length > 1) for shape in (flax, torch)]
    if len(flax) != len(torch) or lengths[0] == lengths[1]:
        return ""
    return "flax" if lengths[0] <= lengths[1] else "torch" if lengths[1] <= lengths[0] else ""


def _is_in_loop() -> bool:
    """Return whether the caller is in the body of a loop of JAX, which is traced once for all steps."""
    import jax

    loops = {inspect.unwrap(loop).__code__ for loop in (jax.lax.scan, jax.lax.while_loop)}  # which the other loops call
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code in loops:
            return True
    return False


def _with_own_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dropout function with the names that `torch.nn.functional.dropout` has."""
    return {{"input": "x", "train": "training"}.get(name, name): value for name, value in arguments.items()}
