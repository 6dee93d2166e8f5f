"""Random faults in the operations of a forward pass, and an assessment of the diagnosis of each.

This module does not use the catalogue of causes.  It records the function calls in a forward pass of the PyTorch twin.  One
call, or the same call in every block, is then replaced by a random mutation: another factor, eps, activation or axis, a
transposed or rolled array, a missing bias or residual connection, tokens in another order, or a lower precision.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import parity
import vit_torch
from parity import Checkpoint
from parity.checkpoints.conversion import parameter
from parity.checkpoints.surgery.edit import to_float64
from parity.comparison.diagnosis import Diagnosis, diagnose, expected_outputs
from parity.comparison.diagnosis.hypothesis import Runner, Trial
from parity.comparison.diagnosis.search import CauseSearch, SearchResult
from tests.twins import perturbed_params
from vit_spec import ViTConfig, rows

Call = tuple[str, str, int]  # (module, function, number of the call in this module)
Mutation = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]  # (function, args, kwargs) -> wrong result

MIN_EFFECT = 1e-4  # relRMS of the logits; faults with a smaller effect are drawn again
MAX_REMAINING_SHARE = 1e-2  # of the difference on new images that may remain after a right answer
PRECISIONS = ("float64", "float64, weights rounded afterwards", "float32", "float32 in float64", "5 decimals")


@dataclass(frozen=True)
class RandomFault:
    """A mutation of one call, in one block or in all blocks.

    call: the call, of any one block if the fault is in all blocks.
    in_all_blocks: whether the same call is mutated in every block.
    what: a description of the mutation.
    mutation: a function that replaces the call.
    """

    call: Call
    in_all_blocks: bool
    what: str
    mutation: Mutation

    @property
    def layer(self) -> str:
        """The first module with the fault."""
        return _with_block_number(self.call[0], 0) if self.in_all_blocks else self.call[0]

    def __str__(self) -> str:
        where = f"{self.call[0] or 'the model'}, call {self.call[2]} of {self.call[1]}"
        return f"{where}{', in all blocks' if self.in_all_blocks else ''}: {self.what}"


# Recording and mutating -----------------------------------------------------------------------------------------------


class _CallInterceptor(TorchFunctionMode):
    """A PyTorch function mode that counts calls by module, and calls `change` instead of each function.

    stack: names of the modules that are being run, the innermost last.
    change: (call, function, args, kwargs) -> the result to use.
    """

    def __init__(self, stack: list[str], change: Callable[[Call, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.stack, self.change, self.counts = stack, change, Counter[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.counts[self.stack[-1], name] += 1
        return self.change((self.stack[-1], name, self.counts[self.stack[-1], name]), func, args, kwargs or {})


@contextmanager
def _intercept_calls(model: Any, change: Callable[[Call, Any, Any, Any], Any]) -> Iterator[None]:
    """Replace every function call of a model by change(call, function, args, kwargs) during the `with` block."""
    stack: list[str] = [""]

    def enter(name: str, module: Any, inputs: Any) -> None:
        stack.append(name)

    def leave(module: Any, inputs: Any, output: Any) -> None:
        stack.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(partial(enter, name)), module.register_forward_hook(leave)]
    try:
        with _CallInterceptor(stack, change):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def record_calls(model: Any, images: Any) -> dict[Call, tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Return (function, args, kwargs, result) of every call in a forward pass that returns a floating-point matrix."""
    calls = {}

    def record(call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        is_float_matrix = isinstance(result, torch.Tensor) and result.is_floating_point() and result.ndim >= 2
        if is_float_matrix and not call[1].startswith("__get") and call[1] not in SKIPPED_CALLS:
            calls[call] = (func, args, kwargs, result)
        return result

    with torch.no_grad(), _intercept_calls(model, record):
        model(images)
    return calls


SKIPPED_CALLS = (
    "to",
    "view",
    "expand",
    "pad",
    "flatten",
    "unflatten",
    "reshape",
    "type",
    "double",
    "permute",
    "dropout",
    "__getitem__",
)


@contextmanager
def apply_fault(model: Any, fault: RandomFault) -> Iterator[None]:
    """Apply a fault to a model for the duration of the `with` block."""

    def change(call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        same = (_with_block_number(call[0], None), *call[1:]) == (_with_block_number(fault.call[0], None), *fault.call[1:])
        if call == fault.call or (fault.in_all_blocks and same):
            return fault.mutation(func, args, kwargs)
        return func(*args, **kwargs)

    with _intercept_calls(model, change):
        yield


def _with_block_number(name: str, number: int | None) -> str:
    """Return the name of a module with another block number, or with "*" for None."""
    words = name.split(".")
    if words[0] == "blocks" and len(words) > 1:
        words[1] = "*" if number is None else str(number)
    return ".".join(words)


# Drawing --------------------------------------------------------------------------------------------------------------


def draw_fault(model: Any, images: Any, rng: np.random.Generator) -> RandomFault:
    """Return a random mutation of a random call."""
    calls = record_calls(model, images)
    kinds = sorted({(_with_block_number(call[0], None), *call[1:]) for call in calls})
    kind = kinds[rng.integers(len(kinds))]
    matching = [call for call in calls if (_with_block_number(call[0], None), *call[1:]) == kind]
    call = matching[rng.integers(len(matching))]
    func, args, kwargs, result = calls[call]
    mutations = dict(_mutations(func, args, kwargs, result, rng))
    what = list(mutations)[rng.integers(len(mutations))]
    return RandomFault(call, len(matching) > 1 and bool(rng.integers(2)), what, mutations[what])


def _on_result(change: Callable[[Any], Any]) -> Mutation:
    """Return the mutation that replaces the result by change(result)."""
    return lambda func, args, kwargs: change(func(*args, **kwargs))


def _on_argument(place: int, value: Callable[[Any], Any]) -> Mutation:
    """Return the mutation that replaces the positional argument at `place` by value(argument)."""

    def mutation(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args[:place], value(args[place]), *args[place + 1 :], **kwargs)

    return mutation


def _replace_function(function: Callable[..., Any]) -> Mutation:
    """Return the mutation that calls another function with the same positional arguments."""
    return lambda func, args, kwargs: function(*args)


def _mutations(func: Any, args: Any, kwargs: Any, result: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    """Yield (description, mutation): first the mutations of any array, then the mutations of this function."""
    factor = float(np.round(rng.uniform(0.5, 1.5), 3))
    yield f"times {factor}", _on_result(lambda x: factor * x)
    yield "negated", _on_result(lambda x: -x)
    for dtype in (torch.bfloat16, torch.float16):
        yield f"rounded to {dtype}", _on_result(partial(_round_to, dtype))
    axes = [axis for axis in range(1, result.ndim) if result.shape[axis] > 1]
    axis = int(axes[rng.integers(len(axes))]) if axes else 1
    steps = int(rng.integers(1, 4))
    yield f"rolled by {steps} along axis {axis}", _on_result(lambda x: x.roll(steps, axis))
    yield f"reversed along axis {axis}", _on_result(lambda x: x.flip(axis))
    if result.ndim > 2 and result.shape[-1] == result.shape[-2]:
        yield "last axes swapped", _on_result(lambda x: x.transpose(-1, -2))
    if result.ndim >= 3:
        yield "axes 1 and 2 mixed by a reshape", _on_result(lambda x: x.transpose(1, 2).reshape(x.shape))
    name = getattr(func, "__name__", "")
    yield from _FUNCTION_MUTATIONS[name](args, rng) if name in _FUNCTION_MUTATIONS else ()


def _round_to(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype).to(x.dtype)


def _linear(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    weight = args[1]
    if args[2] is not None:
        yield "no bias", _on_argument(2, lambda b: None)
        yield "bias twice", _on_argument(2, lambda b: 2 * b)
    if weight.shape[0] == weight.shape[1]:
        yield "weight transposed", _on_argument(1, lambda w: w.T)
    yield "rows of the weight rolled", _on_argument(1, lambda w: w.roll(weight.shape[0] // 3, 0))
    yield "columns of the weight rolled by one", _on_argument(1, lambda w: w.roll(1, 1))
    yield "weight rounded to bfloat16", _on_argument(1, lambda w: w.bfloat16().to(w.dtype))


def _norm(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    eps = float(10.0 ** rng.integers(-5, -1))
    yield f"eps {eps:g}", lambda func, args, kwargs: func(*args[:4], eps, **kwargs)
    yield "no weight", _on_argument(2, torch.ones_like)
    yield "no bias", _on_argument(3, torch.zeros_like)
    yield "RMS", _replace_function(lambda x, s, w, b, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w + b)
    yield (
        "RMS without bias",
        _replace_function(lambda x, s, w, b, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w),
    )
    yield (
        "n - 1",
        _replace_function(lambda x, s, w, b, eps: (x - x.mean(-1, True)) * (x.var(-1, keepdim=True) + eps).rsqrt() * w + b),
    )
    yield "left out", _replace_function(lambda x, *rest: x)


def _activation(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    for function in (F.silu, F.mish, F.relu, F.elu, F.softplus, F.hardswish, torch.tanh, F.celu, F.relu6, F.tanhshrink):
        yield f"{function.__name__} instead", _replace_function(lambda x, f=function: f(x))
    slope = float(np.round(rng.uniform(1.2, 2.2), 2))
    yield f"x sigmoid({slope} x)", _replace_function(lambda x: x * torch.sigmoid(slope * x))


def _softmax(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    yield "over queries", _replace_function(lambda x, axis: x.softmax(-2))
    yield "over heads", _replace_function(lambda x, axis: x.softmax(1))
    yield "scores in bfloat16", _replace_function(lambda x, axis: x.bfloat16().to(x.dtype).softmax(-1))
    yield "not at all", _replace_function(lambda x, axis: x)
    bias = torch.tensor(rng.normal(0, 0.5, args[0].shape[1:]))
    yield "with a bias of positions", _replace_function(lambda x, axis: (x + bias.to(x.dtype)).softmax(-1))


def _sum(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    if all(isinstance(each, torch.Tensor) for each in args[:2]):
        yield "the first left out", _replace_function(lambda a, b: b + torch.zeros_like(a))
        yield "the second left out", _replace_function(lambda a, b: a + torch.zeros_like(b))
        yield "the second twice", _replace_function(lambda a, b: a + 2 * b)
        yield "subtracted", _replace_function(lambda a, b: a - b)


def _concatenation(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    if len(args[0]) > 1:
        yield "the other way round", lambda func, args, kwargs: func(args[0][::-1], *args[1:], **kwargs)


def _mean(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    yield "maximum", _replace_function(lambda x, axis: x.amax(axis))
    yield "sum", _replace_function(lambda x, axis: x.sum(axis))
    yield "median", _replace_function(lambda x, axis: x.median(axis).values)


_FUNCTION_MUTATIONS: dict[str, Callable[..., Iterator[tuple[str, Mutation]]]] = {
    "linear": _linear,
    "layer_norm": _norm,
    "gelu": _activation,
    "relu": _activation,
    "silu": _activation,
    "softmax": _softmax,
    "add": _sum,
    "__add__": _sum,
    "cat": _concatenation,
    "mean": _mean,
}


# Assessment -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assessment:
    """The answer of a diagnosis to one fault.

    fault: a description of the fault.
    precision: the precision of the expected outputs, one of `PRECISIONS`.
    with_intermediates: whether intermediates were expected too.
    outcome: "right", "unknown, right layer", "unknown, layer not named", or text that begins with "wrong".
    answer: the verdict and the suspect layer of the diagnosis.
    """

    fault: str
    precision: str
    with_intermediates: bool
    outcome: str
    answer: str

    @property
    def is_wrong(self) -> bool:
        """Whether the diagnosis gives a wrong answer."""
        return self.outcome.startswith("wrong")


def assess_random_fault(config: ViTConfig, seed: int, *, count: int = 8, pairs: int | None = None) -> Assessment:
    """Draw a fault, diagnose the correct checkpoint given the faulty outputs, and assess the answer on new images.

    seed: the seed of the weights, the images and the fault.
    count: number of images.
    pairs: how many pairs of causes the diagnosis tries.
    """
    rng = np.random.default_rng(seed)
    precision, with_intermediates = PRECISIONS[rng.integers(len(PRECISIONS))], bool(rng.integers(2))
    state, stored = _weights(config, seed, afterwards="afterwards" in precision)
    dtype = torch.float32 if precision.startswith("float32") or precision == "5 decimals" else torch.float64
    model = _model(config, state, dtype)
    images, new_images = (_images(config, rng, count, dtype) for _ in range(2))
    fault = _draw_visible_fault(model, images, rng)
    with torch.no_grad(), apply_fault(model, fault):
        logits, parts = vit_torch.intermediates(model, images)
    # In float32, values near a rounding boundary may be rounded differently than in the float64 of the diagnosis.
    exact_model = _model(config, state, torch.float64)
    with torch.no_grad(), apply_fault(exact_model, fault):
        truth = exact_model(new_images.double()).numpy()
    rounded = _round_logits(logits.numpy(), precision)
    coarse_names = [name for name in parts if name.startswith(("patch_embed", "tokens", "embed", "norm", "pool", "blocks"))]
    intermediates = {
        name: parts[name].numpy() for name in coarse_names if name.count(".") < 2 or name.endswith(("attn", "mlp"))
    }
    checkpoint = Checkpoint(config, "torch", stored)
    arrays = expected_outputs(images.numpy(), rounded, config, intermediates if with_intermediates else {})
    with _record_searches() as searches:
        diagnosis = diagnose(checkpoint, arrays, pairs=pairs)
    # The answer is assessed with the exact weights: a value near a rounding boundary may be rounded differently with the
    # weights of the checkpoint.
    exact_checkpoint = Checkpoint(config, "torch", state)
    exact_weights = {name: to_float64(parameter(exact_checkpoint, name)) for name in rows(config)}
    outcome = _outcome(
        diagnosis, searches[-1], fault, {"images": new_images.double().numpy(), "weights": exact_weights}, truth
    )
    return Assessment(str(fault), precision, with_intermediates, outcome, f"{diagnosis.verdict} {diagnosis.suspect}")


def _weights(config: ViTConfig, seed: int, *, afterwards: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights that make the expected outputs, and the weights of the checkpoint.

    afterwards: whether the weights of the checkpoint were rounded to float32 after the outputs were made.
    """
    state = parity.to_torch(perturbed_params(config, seed), config)
    if not afterwards:
        return state, state
    generator = torch.Generator().manual_seed(seed)
    unrounded = {
        name: tensor.double() * (1 + 2.0**-25 * (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5))
        for name, tensor in state.items()
    }
    return unrounded, {name: tensor.float() for name, tensor in unrounded.items()}


def _model(config: ViTConfig, state: dict[str, Any], dtype: torch.dtype) -> Any:
    model = vit_torch.ViT(config, vit_torch.Execution(attention="explicit")).eval().to(dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})
    return model


def _images(config: ViTConfig, rng: np.random.Generator, count: int, dtype: torch.dtype) -> Any:
    slope = np.linspace(-1, 1, config.image_size[0])[:, None] + np.linspace(0, 0.7, config.image_size[1])
    noise = rng.standard_normal((count, config.in_channels, *config.image_size))
    return torch.tensor((noise + slope).astype(np.float32)).to(dtype)


def _draw_visible_fault(model: Any, images: Any, rng: np.random.Generator) -> RandomFault:
    """Draw faults until one runs, gives finite outputs and changes the logits by at least `MIN_EFFECT`."""
    with torch.no_grad():
        correct = model(images)
        while True:
            fault = draw_fault(model, images[:2], rng)
            try:
                with apply_fault(model, fault):
                    faulty = model(images)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # the mutation does not fit the shapes of later operations
            if faulty.shape == correct.shape and faulty.isfinite().all() and faulty.abs().max() < 1e6:
                if (faulty - correct).norm() > MIN_EFFECT * faulty.norm():
                    return fault


def _round_logits(logits: np.ndarray, precision: str) -> np.ndarray:
    if precision == "5 decimals":
        return np.round(logits.astype(np.float64), 5)
    return logits.astype(np.float64) if precision == "float32 in float64" else logits


@contextmanager
def _record_searches() -> Iterator[list[tuple[CauseSearch, SearchResult]]]:
    """Record every search and its result, because a `Diagnosis` does not contain the hypotheses."""
    records: list[tuple[CauseSearch, SearchResult]] = []

    run = CauseSearch.run

    def recording_run(self: CauseSearch) -> SearchResult:
        result = run(self)
        records.append((self, result))
        return result

    CauseSearch.run = recording_run  # type: ignore[method-assign]
    try:
        yield records
    finally:
        CauseSearch.run = run  # type: ignore[method-assign]


def _outcome(
    diagnosis: Diagnosis,
    record: tuple[CauseSearch, SearchResult],
    fault: RandomFault,
    replacements: dict[str, Any],
    truth: np.ndarray,
) -> str:
    """Return the outcome of a diagnosis; see `Assessment`.

    record: the search of the diagnosis, and its result.
    replacements: new images and the exact weights, as fields of `Trial`.
    truth: the outputs of the faulty model for the new images.
    """
    if diagnosis.discarded:
        return f"wrong: a cause could not be run, {diagnosis.discarded[0]}"
    search, result = record
    if diagnosis.passed:  # if the fault rounds the logits, the right answer is a match in that dtype
        return "right" if fault.what == f"rounded to torch.{diagnosis.dtype}" else "wrong: nothing is wrong"
    if result.matches:
        remaining = min(
            _remaining_share(replace(search.full_trial, **replacements), match.causes, truth) for match in result.matches
        )
        return (
            "right"
            if remaining <= MAX_REMAINING_SHARE
            else f"wrong: {remaining:.1e} of the difference remains on other images"
        )
    if "do not identify the layer" in diagnosis.suspect or "logits" == diagnosis.suspect.partition(",")[0]:
        return "unknown, layer not named"
    return "unknown, right layer" if _names_block_of(diagnosis.suspect, fault) else "wrong: another layer"


def _remaining_share(trial: Trial, causes: Any, truth: np.ndarray) -> float:
    """Return the share of the difference on other images that remains once the causes are applied."""
    runner, changed = Runner(), trial
    before = np.linalg.norm(runner.run(trial) - truth)
    for cause in causes:
        after = cause.apply(changed)
        if after is None:
            return 1.0
        changed = after
    return float(np.linalg.norm(runner.run(changed) - truth) / before)


def _names_block_of(suspect: str, fault: RandomFault) -> bool:
    """Return whether a suspect names the block of a fault, or a layer near a fault outside of the blocks."""
    named = suspect.removeprefix("the first layer that differs is ").split(",")[0].split(":")[0].split(" ")[0]
    if fault.call[:2] == ("", "tensor"):  # a rotary table: the first layer that uses it is attention of block 0
        return named in ("blocks.0", "blocks.0.attn")
    if fault.layer.startswith("blocks."):
        return named.split(".")[:2] == fault.layer.split(".")[:2]
    return not named.startswith("blocks.") or (
        fault.layer in ("", "patch_embed", "patch_embed.proj") and named == "blocks.0"
    )
