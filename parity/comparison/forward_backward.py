"""One pass of either twin over the same weights and images: every named intermediate, the loss and every gradient.

A pass can take the inputs of every part from another pass (`inputs_from`).  Each intermediate is then computed and
recorded, but the operations after it read the intermediate of the other pass instead, so that an error in one part does not
reach the next.  The backward pass is isolated in the same way.  For each intermediate, its inner product with its gradient
in the other pass is added to the loss.  Each part thus receives that gradient, and the gradient at its inputs depends on
this part alone.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, as_tensor, round_to
from parity.checkpoints.conversion import converted_arrays, nest
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from parity.comparison.disk_cache import cache_on_disk, release_memory
from parity.comparison.framework_settings import compiler_options, strict_settings
from parity.comparison.monte_carlo_arithmetic import perturb_operands
from vit_spec import InputError, ViTConfig
from vit_spec.noise import drop_path_rates

UNCONSUMED = ("weights",)  # recorded, but later operations do not read the recorded tensor: see `attention` in both twins
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class PassResult:
    """Tensors of one pass, as numpy arrays by name.

    values: every named intermediate, the logits and the loss; for the PyTorch twin in the order of computation.
    gradients: gradients of the loss with respect to every parameter, named as in a state dict, from the head to the
        embedding; and then with respect to the images, (B, H, W, C).
    intermediate_gradients: gradients of the loss with respect to every intermediate that a gradient reaches.
    """

    values: Tensors
    gradients: Tensors = field(default_factory=dict)
    intermediate_gradients: Tensors = field(default_factory=dict)

    def cached_on_disk(self) -> "PassResult":
        """Return the same tensors; each of the three mappings is on disk if it is large."""
        return PassResult(*map(cache_on_disk, (self.values, self.gradients, self.intermediate_gradients)))


def check_finite(run: PassResult, model: str = "the model", source: str = "SRC") -> None:
    """Raise an InputError if a pass computed NaN or infinities.

    Args:
        run: the pass.
        model: the model, as the message names it.
        source: the checkpoint, as the message names it in a command.
    """
    for name, value in run.values.items():
        if not np.isfinite(value).all():
            raise InputError(
                f"{model} computes NaN or infinities, first at {name}: look at its weights with "
                f"`python -m parity inspect {source} --values`, and give normalized images"
            )


def noise_images(config: ViTConfig, seed: int, count: int = 2) -> Array:
    """Return images of standard normal noise of the config's image size, (count, H, W, C), float32.

    Raises:
        InputError: the seed is negative.
        MemoryError: the images are too large.
    """
    if seed < 0:
        raise InputError(f"seed is {seed}: give a number from 0")
    shape = (count, *config.image_size, config.in_channels)
    if prod(shape) > sys.maxsize // 8:  # numpy raises ValueError
        raise MemoryError
    images = np.random.default_rng(seed).standard_normal(shape)
    return images.astype(np.float32)


@dataclass(frozen=True)
class PassInputs:
    """Weights, images and random numbers that both twins run on.

    checkpoint: the weights, in any format; each pass reads them again, so that no second copy stays in memory.
    images: (B, H, W, C), normalized, float32.
    seed: seed of the target of the loss, which is the mean squared error of the logits, and of the masks.
    drop_path: rate of stochastic depth in training mode, with the same masks in both twins; 0 means inference mode.
    """

    checkpoint: Checkpoint
    images: Array
    seed: int = 0
    drop_path: float = 0.0

    @cached_property
    def config(self) -> ViTConfig:
        """The config of the model; in training mode stochastic depth is its only source of randomness."""
        if not self.drop_path:
            return self.checkpoint.config
        no_dropout = dict.fromkeys(("pos_drop", "patch_drop", "attn_drop", "mlp_drop"), 0.0)
        return self.checkpoint.config.replace(regularisation={**no_dropout, "drop_path": self.drop_path})

    @property
    def masks(self) -> Tensors:
        """Masks of stochastic depth by name, (B, 1, 1), float64: 1 for the images that keep a residual branch, else 0.

        In training mode there are two for each block, or one if its branches are parallel, and in inference mode none.
        """
        if not self.drop_path:
            return {}
        rng, shape = np.random.default_rng(self.seed + 2), (len(self.images), 1, 1)
        rates = enumerate(drop_path_rates(self.config))
        turns = ("",) if self.config.norms.order == "parallel" else ("", " (2)")
        names = [(f"blocks.{i}.drop_path{turn}", rate) for i, rate in rates for turn in turns]
        return {name: (rng.random(shape) >= rate).astype(np.float64) for name, rate in names}

    def target(self, shape: tuple[int, ...]) -> Array:
        """Return the target of the outputs in the loss: standard normal, float64."""
        return np.random.default_rng(self.seed + 1).standard_normal(shape)

    def weights(self, format: str, input_dtype: str, dtype: str | None) -> Iterator[tuple[str, Array]]:
        """Yield the weights by key, rounded to `input_dtype` and then converted to `dtype`.

        If `dtype` is None, weights keep their own type if it is no wider than `input_dtype`.  Weights with numbers that are
        subnormal in float32 are an exception and are converted to `input_dtype`, because XLA on CPU would make such numbers
        zero before it converts them itself.
        """
        nbytes = 0
        for key, array in converted_arrays(self.checkpoint, format):
            keeps_dtype = (
                dtype is None and array.itemsize <= FLOAT_DTYPES[input_dtype].itemsize and not _has_subnormals(array)
            )
            rounded = array if keeps_dtype else round_to(array, FLOAT_DTYPES[input_dtype])
            yield key, rounded if dtype is None else round_to(rounded, FLOAT_DTYPES[dtype])
            nbytes += rounded.nbytes
        release_memory(nbytes)


@dataclass(frozen=True)
class TorchTwin:
    """The PyTorch twin on given inputs; `run` runs one pass.

    inputs: weights, images and random numbers.
    attention: "explicit" computes and records scores and weights; "fused" runs PyTorch's kernel, as the model does by
        default.
    input_dtype: the type that weights and images are rounded to before they are converted to the type of the pass; None
        means the type of the pass.
    strict: whether to run under strict framework settings; see `parity.comparison.framework_settings`.
    perturbation: a type and a seed: all operands are perturbed by a few unit roundoffs of that type; None means no
        perturbation.  See `parity.comparison.monte_carlo_arithmetic`.
    """

    inputs: PassInputs
    attention: Any = "fused"
    input_dtype: str | None = None
    strict: bool = True
    perturbation: tuple[str, int] | None = None

    def run(
        self,
        dtype: str = "float64",
        *,
        backward: bool = True,
        intermediate_gradients: bool = False,
        inputs_from: PassResult | None = None,
    ) -> PassResult:
        """Run one pass and return its tensors.

        Args:
            dtype: the type of all operations, to which weights and images are rounded.
            backward: whether to compute gradients.
            intermediate_gradients: whether to compute gradients with respect to intermediates too; with `inputs_from` they
                are always computed.
            inputs_from: the pass from which every part takes its inputs and the gradient of its output.
        """
        import torch

        import vit_torch

        torch_dtype, device = getattr(torch, dtype), "cuda" if dtype != "float64" and _both_on_gpu() else "cpu"
        with torch.device("meta"):
            model = vit_torch.ViT(self.inputs.config, vit_torch.Execution(attention=self.attention, dtype=torch_dtype))
        model.train(bool(self.inputs.drop_path))
        # Without a backward pass, weights keep their own, narrower type in memory; each layer converts them when it runs.
        weights = self.inputs.weights("torch", self.input_dtype or dtype, dtype if backward else None)
        model.load_state_dict({key: _to_torch(array).to(device) for key, array in weights}, assign=True)
        images = round_to(round_to(self.inputs.images, FLOAT_DTYPES[self.input_dtype or dtype]), FLOAT_DTYPES[dtype])
        x = _to_torch(images).to(device).permute(0, 3, 1, 2)
        with ExitStack() as stack:
            stack.enter_context(strict_settings() if self.strict else nullcontext())
            stack.enter_context(torch.set_grad_enabled(backward))
            # If the model drew random numbers, they would be the same in each pass.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(self.inputs.seed)
            x.requires_grad_(backward)
            substitutes = {
                name: _to_torch(value).to(device, torch_dtype).requires_grad_(backward)
                for name, value in _substituted_values(inputs_from).items()
                if self.attention == "explicit" or name.rpartition(".")[2] != "scores"  # the fused kernel has none
            }
            masks = {name: _to_torch(mask).to(device, torch_dtype) for name, mask in self.inputs.masks.items()}
            if self.perturbation:
                stack.enter_context(perturb_operands(*self.perturbation))
            logits, found = vit_torch.intermediates(model, x, {**substitutes, **masks})
            found = {name: tensor for name, tensor in found.items() if "drop_path" not in name}
            outputs = substitutes.get("logits", logits)
            target = torch.tensor(self.inputs.target(tuple(logits.shape)), dtype=torch_dtype, device=device)
            loss = (outputs - target).square().mean()
            found["loss"] = loss
            if not backward:
                return PassResult(_to_numpy(found))
            total = loss
            for name, gradient in _substituted_gradients(inputs_from).items():
                if name in found:
                    total = total + (found[name] * _to_torch(gradient).to(device, torch_dtype)).sum()
            names, parameters = zip(*model.named_parameters(), strict=True)
            intermediates = {name: substitutes.get(name, tensor) for name, tensor in found.items() if _is_consumed(name)}
            intermediates = {
                name: tensor
                for name, tensor in intermediates.items()
                if tensor.requires_grad and (intermediate_gradients or inputs_from)
            }
            wrt = [*parameters, x, *intermediates.values()]
            gradients = torch.autograd.grad(total, wrt, allow_unused=True, materialize_grads=True)
        by_name = dict(zip(names, gradients, strict=False))
        by_intermediate = dict(zip(intermediates, gradients[len(names) + 1 :], strict=True))
        by_name = {**dict(reversed(by_name.items())), "images": gradients[len(names)].permute(0, 2, 3, 1)}
        return PassResult(_to_numpy(found), _to_numpy(by_name), _to_numpy(by_intermediate))


@dataclass(frozen=True)
class JaxTwin:
    """The JAX twin on given inputs; `run` runs one pass.

    inputs: weights, images and random numbers.
    options: options of XLA's compiler, in addition to the strict options.
    strict: whether to run under strict framework settings; see `parity.comparison.framework_settings`.
    """

    inputs: PassInputs
    options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True

    def run(self, dtype: str = "float64", *, backward: bool = True, inputs_from: PassResult | None = None) -> PassResult:
        """Run one pass as `TorchTwin.run` does; gradients with respect to intermediates need `inputs_from`."""
        import jax
        import jax.numpy as jnp

        import vit_jax

        is_float64, config = dtype == "float64", self.inputs.config
        execution = vit_jax.Execution(dtype=dtype)
        if self.strict:  # on GPUs, jaxlib 0.11.2 fails to run its fused attention with the strict options of the compiler
            execution = replace(execution, precision="highest", attention="explicit")
        model = vit_jax.ViT(config, execution)

        def loss(weights: Any, x: Any, substitutes: Any, upstream: Any) -> Any:
            masks = {name: jnp.asarray(mask, dtype) for name, mask in self.inputs.masks.items()}
            training = {"train": True, "rngs": {"dropout": jax.random.key(0)}} if masks else {}
            logits, found = vit_jax.intermediates(
                model, weights, x, {**substitutes, **masks}, stacked=not inputs_from, **training
            )
            found = {name: tensor for name, tensor in found.items() if "drop_path" not in name}
            target = jnp.asarray(self.inputs.target(logits.shape), logits.dtype)
            found["loss"] = jnp.square(substitutes.get("logits", logits) - target).mean()
            return found["loss"] + sum(jnp.vdot(g, found[name]) for name, g in upstream.items() if name in found), found

        with (
            strict_settings() if self.strict else nullcontext(),
            jax.enable_x64(is_float64),
            jax.default_device(jax.devices("cpu")[0] if is_float64 else None),
        ):
            arrays = self.inputs.weights("jax", dtype, dtype if backward else None)
            weights = nest((key, jnp.asarray(array)) for key, array in arrays)
            x = jnp.asarray(round_to(self.inputs.images, FLOAT_DTYPES[dtype]))
            values, upstream = (
                {n: jnp.asarray(t.astype(dtype)) for n, t in given.items()}
                for given in (_substituted_values(inputs_from), _substituted_gradients(inputs_from))
            )
            options = {**compiler_options(strict=self.strict), **self.options}
            if not backward:
                _, found = jax.jit(loss, compiler_options=options)(weights, x, values, upstream)
                return PassResult(_to_numpy(found) if inputs_from else vit_jax.unstacked(_to_numpy(found)))
            step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=options)
            (by_weight, by_image, by_intermediate), found = step(weights, x, values, upstream)
        by_name = dict(reversed(list(converted_arrays(as_checkpoint(by_weight, config, "jax"), "torch"))))
        intermediates = _to_numpy(found) if inputs_from else vit_jax.unstacked(_to_numpy(found))
        return PassResult(intermediates, _to_numpy({**by_name, "images": by_image}), _to_numpy(by_intermediate))


def _has_subnormals(array: Array) -> bool:
    """Return whether an array of any float type has numbers that are subnormal in float32."""
    size = np.abs(array if array.itemsize >= 4 else round_to(array, FLOAT_DTYPES["float32"]))
    return bool(((size > 0) & (size < 2.0**-126)).any())


def _is_consumed(name: str) -> bool:
    """Return whether a later operation reads the recorded intermediate."""
    return name != "loss" and name.rpartition(".")[2] not in UNCONSUMED


def _substituted_values(run: PassResult | None) -> Tensors:
    """Return the tensors that replace intermediates: all tensors of a pass that later operations read."""
    return {name: value for name, value in run.values.items() if _is_consumed(name)} if run else {}


def _substituted_gradients(run: PassResult | None) -> Tensors:
    """Return the gradients that are added at intermediates."""
    return run.intermediate_gradients if run else {}


def _both_on_gpu() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        import jax
    except ImportError:
        return True
    return jax.default_backend() == "gpu"


def _to_torch(array: Array) -> Any:
    """Return a tensor that shares the memory of an array of any float type where possible."""
    return as_tensor(np.require(array, requirements=["C", "W"]))  # arrays of jax are read-only, so they are copied


def _to_numpy(tensors: Mapping[str, Any]) -> Tensors:
    """Return tensors as numpy arrays; half precision becomes float32, because numpy has no bfloat16 of its own."""
    return {name: _to_array(tensor) for name, tensor in tensors.items()}


def _to_array(tensor: Any) -> Array:
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if tensor.dtype.itemsize == 2 else tensor
    array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
