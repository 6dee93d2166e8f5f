"""One pass of either twin over the same weights and images: every named intermediate, the loss and every gradient.

A pass can be *fed*: each intermediate is computed and named, but what goes on in its place is what it is fed, so that
every part is seen on its own.  Its loss is the loss plus, for each intermediate, its product with the gradient that
should arrive there: so every part is sent back on its own too, and what arrives at its inputs is one part's work alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from parity.checkpoints.weights import FLOATS, Checkpoint, held, rounded, translate
from parity.comparison.disk_cache import give_back, spooled
from parity.comparison.framework_settings import compiler_options, strict
from parity.comparison.monte_carlo_arithmetic import disturbing
from parity.comparison.tolerances import Array
from vit_spec import InputError, ViTConfig

SHOWN = ("weights",)  # named, but nothing goes on from it: see `show` in the layers of the twins
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Run:
    """What one pass computed.

    values: every named intermediate, the logits and the loss, of the PyTorch twin in the order of computation.
    gradients: of the loss by every parameter, named as in a state dict, from the head backwards, and then by the images.
    arriving: of the loss by every intermediate that a gradient reaches.
    """

    values: Tensors
    gradients: Tensors = field(default_factory=dict)
    arriving: Tensors = field(default_factory=dict)

    def spooled(self) -> "Run":
        """Return the same, on disk where it is large."""
        return Run(spooled(self.values), spooled(self.gradients), spooled(self.arriving))


def noise(config: ViTConfig, seed: int, count: int = 2) -> Array:
    """Return images of normal noise of the config's own size, (count, H, W, C), float32.

    Raises:
        InputError: a negative seed.
    """
    if seed < 0:
        raise InputError(f"seed is {seed}: give a number from 0")
    drawn = np.random.default_rng(seed).standard_normal((count, *config.image_size, config.in_channels))
    return drawn.astype(np.float32)


@dataclass(frozen=True)
class Subject:
    """What is run: weights of a model, and what they are shown.

    checkpoint: the weights, in any format; read anew for each pass, so that no second copy stays in memory.
    images: (B, H, W, C), float32.
    seed: of the target that the loss measures the mean squared distance to, and of masks.
    drop_path: the rate of stochastic depth, in training, under masks that are the same for both twins; 0 is inference.
    """

    checkpoint: Checkpoint
    images: Array
    seed: int = 0
    drop_path: float = 0.0

    @cached_property
    def config(self) -> ViTConfig:
        """The model; in training with no noise but stochastic depth, at inference with its own, none of which may show."""
        if not self.drop_path:
            return self.checkpoint.config
        silent = dict.fromkeys(("pos_drop", "patch_drop", "attn_drop", "mlp_drop"), 0.0)
        return self.checkpoint.config.replace(regularisation={**silent, "drop_path": self.drop_path})

    @property
    def masks(self) -> Tensors:
        """For both halves of each block, which images go through it: (B, 1, 1) of 0 and 1 by name; none at inference."""
        if not self.drop_path:
            return {}
        rng, rates = np.random.default_rng(self.seed + 2), np.linspace(0, self.drop_path, self.config.depth)
        shape = (len(self.images), 1, 1)
        names = [(f"blocks.{i}.drop_path{turn}", rate) for i, rate in enumerate(rates) for turn in ("", " (2)")]
        return {name: (rng.random(shape) >= rate).astype(np.float64) for name, rate in names}

    def target(self, shape: tuple[int, ...]) -> Array:
        """What the outputs are to become, standard normal, float64."""
        return np.random.default_rng(self.seed + 1).standard_normal(shape)

    def weights(self, format: str, through: str, dtype: str | None) -> Iterator[tuple[str, Array]]:
        """Yield the weights by key, rounded to `through`, and then in `dtype`, or where it is None in their own.

        Subnormal numbers are widened all the same: XLA makes them zero on CPU before it widens them itself.
        """
        nbytes = 0
        for key, array in translate(self.checkpoint, format):
            own = dtype is None and array.itemsize <= FLOATS[through].itemsize and not _subnormal(array)
            narrow = array if own else rounded(array, FLOATS[through])
            yield key, narrow if dtype is None else rounded(narrow, FLOATS[dtype])
            nbytes += narrow.nbytes
        give_back(nbytes)


@dataclass(frozen=True)
class TorchTwin:
    """The PyTorch twin.

    attention: "explicit" shows scores and weights; "fused" is how the model runs.
    strict: whether to set the framework to strict values while it runs; see `parity.comparison.framework_settings`.
    through: round weights and images to this type before they are widened to the type of the pass.
    disturbed: a type and a seed: disturb all operands by a few roundings of that type; see
        `parity.comparison.monte_carlo_arithmetic`.
    """

    subject: Subject
    attention: Any = "fused"
    through: str | None = None
    strict: bool = True
    disturbed: tuple[str, int] | None = None

    def run(self, dtype: str = "float64", *, backward: bool = True, arriving: bool = False, fed: Run | None = None) -> Run:
        """Run it once.

        Args:
            dtype: of weights and images, which are rounded to it, and so of all that is computed.
            backward: whether to compute gradients too.
            arriving: whether to compute those by intermediates as well; a pass that is fed always does.
            fed: what to put in the place of every intermediate, and the gradients that are to arrive there.
        """
        import torch

        import vit_torch

        wide, device = getattr(torch, dtype), "cuda" if dtype != "float64" and _both_on_gpu() else "cpu"
        with torch.device("meta"):
            model = vit_torch.ViT(self.subject.config, vit_torch.Execution(attention=self.attention, dtype=wide))
        model.train(bool(self.subject.drop_path))
        # Without gradients weights stay as narrow as they are, and are widened as they are used.
        weights = self.subject.weights("torch", self.through or dtype, dtype if backward else None)
        model.load_state_dict({key: _tensor(array).to(device) for key, array in weights}, assign=True)
        images = rounded(rounded(self.subject.images, FLOATS[self.through or dtype]), FLOATS[dtype])
        x = _tensor(images).to(device).permute(0, 3, 1, 2)
        with ExitStack() as stack:
            stack.enter_context(strict() if self.strict else nullcontext())
            stack.enter_context(torch.set_grad_enabled(backward))
            stack.enter_context(torch.random.fork_rng(devices=[]))  # should anything be drawn, it is the same in each pass
            torch.manual_seed(self.subject.seed)
            x.requires_grad_(backward)
            into = {name: _tensor(value).to(device, wide).requires_grad_(backward) for name, value in _fed(fed).items()}
            masks = {name: _tensor(mask).to(device, wide) for name, mask in self.subject.masks.items()}
            if self.disturbed:
                stack.enter_context(disturbing(*self.disturbed))
            logits, found = vit_torch.intermediates(model, x, {**into, **masks})
            found = {name: tensor for name, tensor in found.items() if "drop_path" not in name}
            answer = into.get("logits", logits)
            target = torch.tensor(self.subject.target(tuple(logits.shape)), dtype=wide, device=device)
            loss = (answer - target).square().mean()
            found["loss"] = loss
            if not backward:
                return Run(_on_host(found))
            total = loss
            for name, gradient in _due(fed).items():
                if name in found:
                    total = total + (found[name] * _tensor(gradient).to(device, wide)).sum()
            names, parameters = zip(*model.named_parameters(), strict=True)
            inner = {name: into.get(name, tensor) for name, tensor in found.items() if _goes_on(name)}
            inner = {name: tensor for name, tensor in inner.items() if tensor.requires_grad and (arriving or fed)}
            wrt = [*parameters, x, *inner.values()]
            gradients = torch.autograd.grad(total, wrt, allow_unused=True, materialize_grads=True)
        by_name = dict(zip(names, gradients, strict=False))
        by_inner = dict(zip(inner, gradients[len(names) + 1 :], strict=True))
        by_name = {**dict(reversed(by_name.items())), "images": gradients[len(names)].permute(0, 2, 3, 1)}
        return Run(_on_host(found), _on_host(by_name), _on_host(by_inner))


@dataclass(frozen=True)
class JaxTwin:
    """The JAX twin.

    options: of XLA's compiler, beside those that make it strict.
    strict: whether to set the framework to strict values while it runs; see `parity.comparison.framework_settings`.
    """

    subject: Subject
    options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True

    def run(self, dtype: str = "float64", *, backward: bool = True, fed: Run | None = None) -> Run:
        """Run it once, as `TorchTwin.run`; gradients by intermediates come of a pass that is fed alone."""
        import jax
        import jax.numpy as jnp

        import vit_jax

        wide, config = dtype == "float64", self.subject.config
        model = vit_jax.ViT(config, vit_jax.Execution(dtype=dtype, precision="highest" if self.strict else None))

        def loss(weights: Any, x: Any, into: Any, due: Any) -> Any:
            masks = {name: jnp.asarray(mask, dtype) for name, mask in self.subject.masks.items()}
            noise = {"train": True, "rngs": {"dropout": jax.random.key(0)}} if masks else {}
            logits, found = vit_jax.intermediates(model, weights, x, {**into, **masks}, stacked=not fed, **noise)
            found = {name: tensor for name, tensor in found.items() if "drop_path" not in name}
            target = jnp.asarray(self.subject.target(logits.shape), logits.dtype)
            found["loss"] = jnp.square(into.get("logits", logits) - target).mean()
            return found["loss"] + sum(jnp.vdot(g, found[name]) for name, g in due.items() if name in found), found

        with (
            strict() if self.strict else nullcontext(),
            jax.enable_x64(wide),
            jax.default_device(jax.devices("cpu")[0] if wide else None),
        ):
            weights: dict[str, Any] = {}
            for key, array in self.subject.weights("jax", dtype, dtype if backward else None):
                *parents, leaf = key.split("/")
                node = weights
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[leaf] = jnp.asarray(array)
            x = jnp.asarray(rounded(self.subject.images, FLOATS[dtype]))
            into, due = ({n: jnp.asarray(t.astype(dtype)) for n, t in given.items()} for given in (_fed(fed), _due(fed)))
            options = {**compiler_options(strict=self.strict), **self.options}
            if not backward:
                _, found = jax.jit(loss, compiler_options=options)(weights, x, into, due)
                return Run(_on_host(found) if fed else vit_jax.unstacked(_on_host(found)))
            step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=options)
            (by_weight, by_image, by_fed), found = step(weights, x, into, due)
        by_name = dict(reversed(list(translate(held(by_weight, config, "jax"), "torch"))))
        values = _on_host(found) if fed else vit_jax.unstacked(_on_host(found))
        return Run(values, _on_host({**by_name, "images": by_image}), _on_host(by_fed))


def _subnormal(array: Array) -> bool:
    """Whether a float32 array has numbers below the least normal one; bfloat16 and float16 are widened to be seen."""
    size = np.abs(array if array.itemsize >= 4 else rounded(array, FLOATS["float32"]))
    return bool(((size > 0) & (size < 2.0**-126)).any())


def _goes_on(name: str) -> bool:
    return name != "loss" and name.rpartition(".")[2] not in SHOWN


def _fed(run: Run | None) -> Tensors:
    """What is put in the place of intermediates."""
    return {name: value for name, value in run.values.items() if _goes_on(name)} if run else {}


def _due(run: Run | None) -> Tensors:
    """The gradients that are to arrive at intermediates."""
    return run.arriving if run else {}


def _both_on_gpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        import jax
    except ImportError:
        return True
    return jax.default_backend() == "gpu"


def _tensor(array: Array) -> Any:
    """A tensor on the memory of an array, whatever its type."""
    import torch

    array = np.require(array, requirements=["C", "W"])  # arrays of jax are read-only, and copied
    if array.dtype == FLOATS["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _on_host(tensors: Mapping[str, Any]) -> Tensors:
    """Arrays of numpy; half precision, which numpy may not have, as float32, which holds every number of it."""
    return {name: _array(tensor) for name, tensor in tensors.items()}


def _array(tensor: Any) -> Array:
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if tensor.dtype.itemsize == 2 else tensor
    array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
