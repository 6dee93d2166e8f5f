"""Are the two twins the same function?  Every intermediate, the outputs, the loss and every gradient, through two gates.

G0, the same function: in float64 on CPU the twins part by no more than rounding, relRMS <= 1e-12.  Two right ones part by
about 2e-15; a LayerNorm eps of 1e-5 for 1e-6 is seven orders of magnitude above the bar.

G1, the same quality: in float32 each twin is as near to the float64 result as the other, within a factor of 2 (4 for the
largest entry), and both are nearer than 5e-6.  A function that amplifies rounding, as attention with large scores does,
shows it in float64 too, where G0 has vouched for its formulas: it may be as far in float32 as its worst difference in
float64 times 2^29, the ratio of the two roundings.

G1 judges what the forward pass names and the gradient as a whole: one parameter's gradient is a sum that cancels, whose
error is large or small by luck.  Luck shrinks with numbers: the logarithm of the ratio of two root-mean-squares over n
entries scatters by 1 / sqrt(n), so the factor is widened by five of these, exp(5 / sqrt(n)): by 1.05 for ten thousand
entries, by 5 for ten, which makes 10 (as in PyTorch's own comparison of compiled with eager models,
torch/_dynamo/utils.py `same`).  All of the gradient passes through the rounding of the outputs, so its entries are no
more independent than those: n is the number of outputs.

relRMS is ||a - b|| / ||reference||, tensor by tensor: entry-by-entry measures mean nothing where an entry crosses zero.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from vit_spec import ViTConfig

Array = NDArray[Any]

FUNCTION = 1e-12  # G0: what float64 rounding explains, with room for 500
PRECISION = 5e-6  # G1: a float32 result of a deep ViT is 20 to 30 roundings (6e-8 each) away
COARSER = 2**29  # G1: float32's rounding over float64's
RATIO, RATIO_MAX = 2.0, 4.0  # G1: how much worse one twin's rounding may be than the other's
SLACK = PRECISION / 10  # G1: a difference of a few roundings is no verdict on either twin
GRADIENT = "gradient of "


@dataclass(frozen=True)
class Measure:
    """How far the twins part at one named tensor.

    difference: relRMS between the twins in float64.
    jax, torch: relRMS of each twin in float32 from float64; jax_max, torch_max the same for the largest entry.
    entries: how many the tensor has; of the whole gradient, how many outputs there are.
    ceiling: what relRMS from float64 is allowed in float32.
    """

    name: str
    difference: float
    jax: float
    torch: float
    jax_max: float
    torch_max: float
    entries: int
    ceiling: float = PRECISION

    @property
    def same_function(self) -> bool:
        """Gate G0."""
        return self.difference <= FUNCTION

    @property
    def same_precision(self) -> bool:
        """Gate G1; one parameter's gradient is not judged."""
        luck = math.exp(5 / math.sqrt(self.entries))
        rms, largest = sorted((self.jax, self.torch)), sorted((self.jax_max, self.torch_max))
        return self.name.startswith(GRADIENT) or (
            rms[1] <= self.ceiling
            and rms[1] <= RATIO * luck * rms[0] + SLACK
            and largest[1] <= RATIO_MAX * luck * largest[0] + SLACK
        )

    @property
    def passed(self) -> bool:
        """Both gates."""
        return self.same_function and self.same_precision


@dataclass(frozen=True)
class Report:
    """What `compare` found: measures in the order of computation, forward and then gradients; print it for a table."""

    config: ViTConfig
    measures: tuple[Measure, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        """The table, and the verdict below it."""
        console = Console(width=None if sys.stdout.isatty() else 100)
        with console.capture() as capture:
            console.print(self._table())
        return f"{capture.get()}{self.verdict}"

    def _table(self) -> Table:
        """A row a named tensor; those of the blocks share one, which shows the worst of them."""
        where = ", ".join(f"{name} {version}" for name, version in self.environment.items())
        caption = f"relRMS: between the twins in float64, and of each in float32 from float64\n{where}"
        table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("tensor", overflow="fold")
        for column in ("float64", "jax float32", "torch float32", ""):
            table.add_column(column, justify="right")
        rows: dict[str, list[Measure]] = {}
        for measure in self.measures:
            rows.setdefault(re.sub(r"blocks\.\d+", "blocks.*", measure.name), []).append(measure)
        for name, measures in rows.items():
            worst = (max(getattr(m, column) for m in measures) for column in ("difference", "jax", "torch"))
            verdict = "ok" if all(m.passed for m in measures) else "FAIL"
            table.add_row(name, *(f"{value:.1e}" for value in worst), verdict)
        return table

    @property
    def passed(self) -> bool:
        """Whether every measure is through both gates."""
        return all(measure.passed for measure in self.measures)

    @property
    def first(self) -> Measure | None:
        """The first part that differs; a difference in function counts before one in precision."""
        wrong = [m for m in self.measures if not m.same_function] or [m for m in self.measures if not m.passed]
        return wrong[0] if wrong else None

    @property
    def verdict(self) -> str:
        """One line: PASS, or the first part that differs."""
        worst = max(self.measures, key=lambda m: m.difference)
        if self.first is None:
            coarsest = max(max(m.jax, m.torch) for m in self.measures if not m.name.startswith(GRADIENT))
            return (
                f"PASS: {len(self.measures)} tensors agree to {worst.difference:.1e} in float64 ({worst.name}), "
                f"and both twins are within {coarsest:.1e} of it in float32"
            )
        m = self.first
        if not m.same_function:
            return f"FAIL: the first part that differs is {m.name}, by {m.difference:.1e} in float64 (bar {FUNCTION:.0e})"
        return (
            f"FAIL: the first part that differs is {m.name}: in float32 jax is {m.jax:.1e} (largest {m.jax_max:.1e}) and "
            f"torch {m.torch:.1e} (largest {m.torch_max:.1e}) from float64; the bars are {m.ceiling:.0e}, and a factor of "
            f"{RATIO:.0f} ({RATIO_MAX:.0f} for the largest entry, both wider below 10,000 entries) between them"
        )


def compare(
    config: ViTConfig,
    params: Any,
    *,
    images: Array | None = None,
    seed: int = 0,
    xla_options: dict[str, Any] | None = None,
) -> Report:
    """Run both twins on the same weights and images, and measure where they part.

    Args:
        params: the functional twin's parameters, nested, in any floating-point type.
        images: (B, H, W, C), normalised; by default two images of normal noise of the config's size.
        seed: of the default images and of the target that the loss measures the distance to.
        xla_options: options of XLA's compiler, e.g. {"xla_cpu_experimental_ynn_fusion_type": ""}.

    Raises:
        vit_spec.InputError: parameters that are not this config's.
    """
    import jax
    import torch

    from parity.weights import to_jax, to_torch

    rng = np.random.default_rng(seed)
    if images is None:
        images = rng.standard_normal((2, *config.image_size, config.in_channels))
    images = np.asarray(images, np.float32)  # so that no run starts from a rounding of its own
    state_dict = to_torch(params, config)  # refuses what is not this config's
    params = to_jax(state_dict, config)

    run_jax = _jax_runner(config, params, images, seed, xla_options)
    run_torch = _torch_runner(config, state_dict, images, seed)
    measures = tuple(_measures(run_torch("float64"), run_jax("float64"), run_torch("float32"), run_jax("float32")))
    environment = {"jax": jax.__version__, "torch": torch.__version__, "backend": jax.default_backend()}
    return Report(config, measures, environment)


Tensors = dict[str, Array]


def _measures(torch64: Tensors, jax64: Tensors, torch32: Tensors, jax32: Tensors) -> Iterator[Measure]:
    """Each tensor against the float64 result of PyTorch, and then all parameters' gradients as one."""
    scale, whole = _scales(torch64), [_Error(), _Error(), _Error()]
    forward: list[Measure] = []
    gradients: list[Measure] = []
    for name, reference in torch64.items():
        errors = [_Error.of(tensors[name], reference) for tensors in (jax64, jax32, torch32)]
        (gradients if name.startswith(GRADIENT) else forward).append(_measure(name, errors, scale[name]))
        if name.startswith(GRADIENT) and name != f"{GRADIENT}images":
            whole = [total.joined(error) for total, error in zip(whole, errors, strict=True)]
    gradients.append(replace(_measure("gradient", whole, 0.0), entries=torch64["logits"].size))
    for measures in (forward, gradients):
        ceiling = max(PRECISION, COARSER * min(FUNCTION, max(measure.difference for measure in measures)))
        yield from (replace(measure, ceiling=ceiling) for measure in measures)


def _measure(name: str, errors: list["_Error"], scale: float) -> Measure:
    difference, jax, torch = errors
    return Measure(
        name=name,
        difference=difference.relative_rms(scale),
        jax=jax.relative_rms(scale),
        torch=torch.relative_rms(scale),
        jax_max=jax.relative_max(scale),
        torch_max=torch.relative_max(scale),
        entries=difference.entries,
    )


@dataclass(frozen=True)
class _Error:
    """Sums over the entries of a tensor, or of several: squares and largest, of the error and of the reference."""

    entries: int = 0
    squares: float = 0.0
    largest: float = 0.0
    reference_squares: float = 0.0
    reference_largest: float = 0.0

    @classmethod
    def of(cls, a: Array, reference: Array) -> Self:
        """Compare two arrays; the error is infinite where shapes, NaN or infinities part."""
        a, reference = np.asarray(a, np.float64), np.asarray(reference, np.float64)
        finite = np.isfinite(reference)
        if a.shape != reference.shape or not np.array_equal(a[~finite], reference[~finite], equal_nan=True):
            return cls(reference.size, math.inf, math.inf)
        error, size = np.abs(a[finite] - reference[finite]), np.abs(reference[finite])
        if np.isnan(error).any():
            return cls(reference.size, math.inf, math.inf)
        largest, reference_largest = error.max(initial=0), size.max(initial=0)
        return cls(reference.size, *map(float, (np.sum(error**2), largest, np.sum(size**2), reference_largest)))

    def joined(self, other: "_Error") -> "_Error":
        """The error of both tensors as one."""
        return _Error(
            self.entries + other.entries,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.reference_squares + other.reference_squares,
            max(self.reference_largest, other.reference_largest),
        )

    def relative_rms(self, scale: float) -> float:
        """relRMS, against a root-mean-square of at least `scale`."""
        reference = max(math.sqrt(self.reference_squares), scale * math.sqrt(self.entries))
        return _ratio(math.sqrt(self.squares), reference)

    def relative_max(self, scale: float) -> float:
        """The largest error over the largest entry, which counts as at least `scale`."""
        return _ratio(self.largest, max(self.reference_largest, scale))


def _ratio(error: float, reference: float) -> float:
    if not error:
        return 0.0
    return error / reference if reference else math.inf


def _scales(tensors: Tensors) -> dict[str, float]:
    """What a gradient is measured against at least: the root-mean-square over the module that it belongs to.

    Some gradients are zero but for rounding (a key's bias cannot change a softmax), and noise over noise is no measure.
    """
    modules: dict[str, list[Array]] = {}
    for name, tensor in tensors.items():
        if name.startswith(GRADIENT):
            modules.setdefault(_module(name), []).append(tensor.ravel())
    rms = {module: float(np.sqrt(np.mean(np.concatenate(parts) ** 2))) for module, parts in modules.items()}
    return {name: rms.get(_module(name), 0.0) if name.startswith(GRADIENT) else 0.0 for name in tensors}


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _target(shape: tuple[int, ...], seed: int) -> Array:
    """What the loss measures the squared distance to."""
    return np.random.default_rng(seed + 1).standard_normal(shape)


def _jax_runner(
    config: ViTConfig, params: Any, images: Array, seed: int, options: dict[str, Any] | None
) -> Callable[[str], Tensors]:
    import jax
    import jax.numpy as jnp

    import vit_jax
    from parity.weights import to_torch

    model = vit_jax.ViT(config, vit_jax.Execution(precision="highest"))

    def loss(params: Any, x: Any) -> Any:
        logits, found = vit_jax.intermediates(model, params, x)
        return jnp.mean((logits - _target(logits.shape, seed).astype(logits.dtype)) ** 2), found

    def run(dtype: str) -> Tensors:
        wide = dtype == "float64"
        with jax.enable_x64(wide), jax.default_device(jax.devices("cpu")[0] if wide else None):
            weights = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, dtype)), params)
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=options)
            (value, found), (gradients, x_gradient) = step(weights, jnp.asarray(images, dtype))
            return _named(found, value, to_torch(gradients, config), x_gradient)

    return run


def _torch_runner(config: ViTConfig, state_dict: dict[str, Any], images: Array, seed: int) -> Callable[[str], Tensors]:
    import jax
    import torch

    import vit_torch

    accelerated = torch.cuda.is_available() and jax.default_backend() == "gpu"

    def run(dtype: str) -> Tensors:
        wide, device = getattr(torch, dtype), "cuda" if accelerated and dtype == "float32" else "cpu"
        model = vit_torch.ViT(config).to(device, wide).eval()
        model.load_state_dict(state_dict)
        x = torch.tensor(images, dtype=wide, device=device).permute(0, 3, 1, 2).requires_grad_()
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            logits, found = vit_torch.intermediates(model, x)
            target = torch.tensor(_target(tuple(logits.shape), seed), dtype=wide, device=device)
            value = (logits - target).square().mean()
            names, parameters = zip(*model.named_parameters(), strict=True)
            *gradients, x_gradient = torch.autograd.grad(value, [*parameters, x])
        finally:
            torch.set_float32_matmul_precision(precision)
        return _named(found, value, dict(zip(names, gradients, strict=True)), x_gradient.permute(0, 2, 3, 1))

    return run


def _named(found: Any, value: Any, gradients: Any, x_gradient: Any) -> Tensors:
    """All tensors of a run by name, as arrays on the host: forward, the loss, and gradients from the head backwards."""
    tensors = {**found, "loss": value}
    tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in reversed(gradients.items())}
    tensors[f"{GRADIENT}images"] = x_gradient
    return {name: np.asarray(t.detach().cpu() if hasattr(t, "detach") else t) for name, t in tensors.items()}
