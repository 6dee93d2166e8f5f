"""What a pair of models is: declared once, built in a process of its own.

A builder returns a `Built`.  Builders import their libraries themselves, so that all names can be listed without any of
them, and so that a source that is given by `--source` is imported only in the process that has its path.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

HITS = ("line", "region", "caller", "module")  # the ways in which an origin can name a fault, see `benchmarks.ports`


class Built(NamedTuple):
    """The arguments of `assert_parity`."""

    flax_apply: Callable[..., Any]
    params: Any
    torch_module: Any
    inputs: Any
    options: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Pair:
    """A JAX model and a PyTorch model of other authors that compute the same function.

    Attributes:
        name: "SOURCE/MODEL", unique.
        jax, torch: the libraries and classes of both sides.
        build: returns the two models, small, with random weights.
        jax_code, torch_code: names of the packages or modules whose code is the model's own on that side; faults are
            planted there.
        layouts: lines that `assert_parity` needs if it cannot match the parameters itself.
        disagreement: why the two models are not the same function, with file and line; such a pair must be rejected.
    """

    name: str
    jax: str
    torch: str
    build: Callable[[], Built]
    jax_code: tuple[str, ...]
    torch_code: tuple[str, ...]
    layouts: tuple[str, ...] = ()
    disagreement: str = ""

    @property
    def source(self) -> str:
        """The name of the source, which is the first part of the name."""
        return self.name.partition("/")[0]


@dataclass
class Pairs:
    """The pairs of one source, in the order of their declaration; iterable.

    Attributes:
        needs: names of sources that `--source NAME=PATH` must give.
        jax_code, torch_code: defaults of the pairs.
    """

    source: str
    jax_code: tuple[str, ...]
    torch_code: tuple[str, ...]
    needs: tuple[str, ...] = ()
    declared: list[Pair] = field(default_factory=list)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.declared)

    def add(self, name: str, jax: str, torch: str, build: Callable[[], Built], **options: Any) -> None:
        """Declare a pair; `options` are the other attributes of `Pair`."""
        code = {"jax_code": self.jax_code, "torch_code": self.torch_code}
        self.declared.append(Pair(f"{self.source}/{name}", jax, torch, build, **{**code, **options}))

    def pair(self, name: str, jax: str, torch: str, **options: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
        """Return a decorator that declares a pair with the decorated function as its builder."""

        def declare(build: Callable[[], Built]) -> Callable[[], Built]:
            self.add(name, jax, torch, build, **options)
            return build

        return declare


class Apply:
    """The function that `assert_parity` gets for an NNX or Equinox model: `call` with the model and the inputs.

    Attributes:
        current: the model of the latest call, which is a copy of the one that is declared.
    """

    def __init__(self, call: Callable[..., Any] | None, *, one_by_one: bool) -> None:
        """Prepare the function.

        call: gets the model and the inputs; None to call the model with the inputs.
        one_by_one: whether it gets single examples, without a batch, as Equinox modules do.
        """
        self._call, self._one_by_one = call or (lambda model, *inputs: model(*inputs)), one_by_one
        self.current: Any = None

    def __call__(self, model: Any, *inputs: Any) -> Any:
        import jax

        self.current = model
        if self._one_by_one:
            return jax.vmap(lambda *example: self._call(model, *example))(*inputs)
        return self._call(model, *inputs)


def perturbed(params: Any, seed: int = 0) -> Any:
    """Return a pytree with random floating-point leaves: none is zero, one, symmetric or equal to another.

    A leaf whose name contains "var" becomes positive.  Noise is added to the others, smaller for larger arrays.
    """
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)

    def redraw(path: Any, leaf: Any) -> Any:
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        if any("var" in str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path):
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        scale = min(0.1, max(1, leaf.size) ** -0.25) if leaf.ndim > 1 else 0.1
        return jnp.asarray(np.asarray(leaf, np.float64) + scale * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(redraw, params)


def floats(*shape: int, seed: int = 1) -> Any:
    """Return a standard normal array, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(*shape: int, high: int, seed: int = 1) -> Any:
    """Return random integers from 3 to `high` - 1, which no model reads as padding."""
    return np.random.default_rng(seed).integers(3, high, shape).astype(np.int32)


def gate_lines(
    cell: str, torch: str, gates: Sequence[str], with_bias: str, *, dim: int, number_of: str = "l0"
) -> tuple[str, ...]:
    """Return `layouts` for a recurrent cell of Flax and a recurrent layer of PyTorch.

    cell, torch: the keys of both before the names of the parameters.
    gates: a letter for each gate that is a layer of the cell, in PyTorch's order; ("",) if one layer has all gates.
    with_bias: names of the layers of the cell with a bias, such as "hi"; PyTorch's other biases are zero.
    dim: the number of features of a gate.
    number_of: the number of PyTorch's layer, and its direction.
    """
    lines = []
    for side, name in (("i", "ih"), ("h", "hh")):
        for n, gate in enumerate(gates):
            part = f"(gate={n} dim:{dim})" if len(gates) > 1 else "dim"
            bias = f"{torch}bias_{name}_{number_of} | {part}"
            layer = f"{cell}{side}{gate}"
            lines.append(f"{layer}/kernel | in dim <-> {torch}weight_{name}_{number_of} | {part} in")
            has_bias = side + gate in with_bias.split()
            lines.append(f"{layer}/bias | dim <-> {bias}" if has_bias else f"0 <-> {bias}")
    return tuple(lines)


def of_nnx(model: Any, torch_module: Any, inputs: Any, *, call: Any = None, **options: Any) -> Built:
    """Return a pair whose JAX side is an NNX module, with random weights; `call` is as for `Apply`."""
    from flax import nnx

    nnx.update(model, perturbed(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    return Built(Apply(call, one_by_one=False), model, torch_module, inputs, options)


def of_equinox(model: Any, torch_module: Any, inputs: Any, *, call: Any = None, **options: Any) -> Built:
    """Return a pair whose JAX side is an Equinox module, with random weights; `call` is as for `Apply`."""
    return Built(Apply(call, one_by_one=True), perturbed(model), torch_module, inputs, options)


def of_linen(
    model: Any, torch_module: Any, inputs: Any, *, init_options: Any = None, call_options: Any = None, **options: Any
) -> Built:
    """Return a pair whose JAX side is a linen module, with random weights.

    init_options, call_options: keyword arguments of the module in `init`, and in `apply`.
    """
    import jax

    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    call_options = call_options or {}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = perturbed(model.init(keys, *arguments, **(call_options if init_options is None else init_options)))

    def apply(variables: Any, *inputs: Any) -> Any:
        return model.apply(variables, *inputs, **call_options)

    return Built(apply, variables, torch_module, inputs, options)


class TorchCall:
    """Builds a torch.nn.Module that calls another one with other arguments, and selects a part of what it returns."""

    def __new__(cls, module: Any, call: Callable[..., Any]) -> Any:
        """Return a module whose forward is `call(module, *inputs)`; the state dict has the prefix "model."."""
        import torch

        class Call(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = module

            def forward(self, *inputs: Any) -> Any:
                return call(self.model, *inputs)

        return Call()
