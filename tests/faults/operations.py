"""Draw random faults from the operations of a forward pass, and judge what a diagnosis says of them.

No catalogue of mistakes is read here.  A pass of the PyTorch twin is recorded, function call by function call; one call, or
the same call in every block, is then replaced by a drawn mutation of it: another factor, eps, activation or axis, a
transposed or rolled array, a bias or a residual left out, tokens in another order, a lower precision.
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
from parity.checkpoints.surgery.edit import float64
from parity.checkpoints.weights import parameter
from parity.comparison.diagnosis import Diagnosis, diagnose, expected
from parity.comparison.diagnosis.search import Found, Search
from parity.comparison.diagnosis.trial import Runner, Trial
from tests.twins import perturbed
from vit_spec import ViTConfig, rows

Call = tuple[str, str, int]  # the module, the function, and which call of it in this module
Mutation = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

VISIBLE = 1e-4  # relRMS of the logits: smaller effects are drawn again
EXPLAINED = 1e-2  # of the difference on images that were not seen may be left by a right answer
PRECISIONS = ("float64", "float64, weights rounded afterwards", "float32", "float32 in float64", "5 decimals")


@dataclass(frozen=True)
class Drawn:
    """A fault: a mutation of a call, in one block or in all."""

    call: Call
    everywhere: bool
    what: str
    mutation: Mutation

    @property
    def layer(self) -> str:
        """The module in which the first call is mutated."""
        return _module(self.call[0], 0) if self.everywhere else self.call[0]

    def __str__(self) -> str:
        where = f"{self.call[0] or 'the model'}, call {self.call[2]} of {self.call[1]}"
        return f"{where}{', in all blocks' if self.everywhere else ''}: {self.what}"


# Recording and mutating -----------------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Calls of torch functions, counted by module; those that `change` answers for are replaced."""

    def __init__(self, stack: list[str], change: Callable[[Call, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.stack, self.change, self.counts = stack, change, Counter[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.counts[self.stack[-1], name] += 1
        return self.change((self.stack[-1], name, self.counts[self.stack[-1], name]), func, args, kwargs or {})


@contextmanager
def _watched(model: Any, change: Callable[[Call, Any, Any, Any], Any]) -> Iterator[None]:
    stack: list[str] = [""]

    def enter(name: str, module: Any, inputs: Any) -> None:
        stack.append(name)

    def leave(module: Any, inputs: Any, output: Any) -> None:
        stack.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(partial(enter, name)), module.register_forward_hook(leave)]
    try:
        with _Mode(stack, change):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def calls(model: Any, images: Any) -> dict[Call, tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Return every call of a pass whose result is an array of floating-point numbers, with its arguments and result."""
    found = {}

    def note(call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        plain = isinstance(result, torch.Tensor) and result.is_floating_point() and result.ndim >= 2
        if plain and not call[1].startswith("__get") and call[1] not in PASSED:
            found[call] = (func, args, kwargs, result)
        return result

    with torch.no_grad(), _watched(model, note):
        model(images)
    return found


PASSED = (
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
def mutated(model: Any, fault: Drawn) -> Iterator[None]:
    """Make a model compute the fault, as long as the block lasts."""

    def change(call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        same = (_module(call[0], None), *call[1:]) == (_module(fault.call[0], None), *fault.call[1:])
        if call == fault.call or (fault.everywhere and same):
            return fault.mutation(func, args, kwargs)
        return func(*args, **kwargs)

    with _watched(model, change):
        yield


def _module(name: str, number: int | None) -> str:
    """Return a module's name with another number of its block, or with none."""
    words = name.split(".")
    if words[0] == "blocks" and len(words) > 1:
        words[1] = "*" if number is None else str(number)
    return ".".join(words)


# Drawing --------------------------------------------------------------------------------------------------------------


def drawn(model: Any, images: Any, rng: np.random.Generator) -> Drawn:
    """Return a random fault of a random call."""
    found = calls(model, images)
    kinds = sorted({(_module(call[0], None), *call[1:]) for call in found})
    kind = kinds[rng.integers(len(kinds))]
    same = [call for call in found if (_module(call[0], None), *call[1:]) == kind]
    call = same[rng.integers(len(same))]
    func, args, kwargs, result = found[call]
    mutations = dict(_mutations(func, args, kwargs, result, rng))
    what = list(mutations)[rng.integers(len(mutations))]
    return Drawn(call, len(same) > 1 and bool(rng.integers(2)), what, mutations[what])


def _after(change: Callable[[Any], Any]) -> Mutation:
    return lambda func, args, kwargs: change(func(*args, **kwargs))


def _with(place: int, value: Callable[[Any], Any]) -> Mutation:
    """The call with another positional argument."""

    def mutation(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args[:place], value(args[place]), *args[place + 1 :], **kwargs)

    return mutation


def _instead(function: Callable[..., Any]) -> Mutation:
    return lambda func, args, kwargs: function(*args)


def _mutations(func: Any, args: Any, kwargs: Any, result: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    """Yield what may go wrong with a call: what fits any array, and what fits this function."""
    factor = float(np.round(rng.uniform(0.5, 1.5), 3))
    yield f"times {factor}", _after(lambda x: factor * x)
    yield "negated", _after(lambda x: -x)
    for kind in (torch.bfloat16, torch.float16):
        yield f"rounded to {kind}", _after(partial(_rounded, kind))
    axes = [axis for axis in range(1, result.ndim) if result.shape[axis] > 1]
    axis = int(axes[rng.integers(len(axes))]) if axes else 1
    steps = int(rng.integers(1, 4))
    yield f"rolled by {steps} along axis {axis}", _after(lambda x: x.roll(steps, axis))
    yield f"reversed along axis {axis}", _after(lambda x: x.flip(axis))
    if result.ndim > 2 and result.shape[-1] == result.shape[-2]:
        yield "last axes swapped", _after(lambda x: x.transpose(-1, -2))
    if result.ndim >= 3:
        yield "axes 1 and 2 mixed by a reshape", _after(lambda x: x.transpose(1, 2).reshape(x.shape))
    name = getattr(func, "__name__", "")
    yield from _OWN[name](args, rng) if name in _OWN else ()


def _rounded(kind: torch.dtype, x: Any) -> Any:
    return x.to(kind).to(x.dtype)


def _linear(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    weight = args[1]
    if args[2] is not None:
        yield "no bias", _with(2, lambda b: None)
        yield "bias twice", _with(2, lambda b: 2 * b)
    if weight.shape[0] == weight.shape[1]:
        yield "weight transposed", _with(1, lambda w: w.T)
    yield "rows of the weight rolled", _with(1, lambda w: w.roll(weight.shape[0] // 3, 0))
    yield "columns of the weight rolled by one", _with(1, lambda w: w.roll(1, 1))
    yield "weight rounded to bfloat16", _with(1, lambda w: w.bfloat16().to(w.dtype))


def _norm(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    eps = float(10.0 ** rng.integers(-5, -1))
    yield f"eps {eps:g}", lambda func, args, kwargs: func(*args[:4], eps, **kwargs)
    yield "no weight", _with(2, torch.ones_like)
    yield "no bias", _with(3, torch.zeros_like)
    yield "RMS", _instead(lambda x, s, w, b, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w + b)
    yield "RMS without bias", _instead(lambda x, s, w, b, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w)
    yield (
        "n - 1",
        _instead(lambda x, s, w, b, eps: (x - x.mean(-1, True)) * (x.var(-1, keepdim=True) + eps).rsqrt() * w + b),
    )
    yield "left out", _instead(lambda x, *rest: x)


def _activation(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    for function in (F.silu, F.mish, F.relu, F.elu, F.softplus, F.hardswish, torch.tanh, F.celu, F.relu6, F.tanhshrink):
        yield f"{function.__name__} instead", _instead(lambda x, f=function: f(x))
    slope = float(np.round(rng.uniform(1.2, 2.2), 2))
    yield f"x sigmoid({slope} x)", _instead(lambda x: x * torch.sigmoid(slope * x))


def _softmax(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    yield "over queries", _instead(lambda x, axis: x.softmax(-2))
    yield "over heads", _instead(lambda x, axis: x.softmax(1))
    yield "scores in bfloat16", _instead(lambda x, axis: x.bfloat16().to(x.dtype).softmax(-1))
    yield "not at all", _instead(lambda x, axis: x)
    bias = torch.tensor(rng.normal(0, 0.5, args[0].shape[1:]))
    yield "with a bias of positions", _instead(lambda x, axis: (x + bias.to(x.dtype)).softmax(-1))


def _sum(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    if all(isinstance(each, torch.Tensor) for each in args[:2]):
        yield "the first left out", _instead(lambda a, b: b + torch.zeros_like(a))
        yield "the second left out", _instead(lambda a, b: a + torch.zeros_like(b))
        yield "the second twice", _instead(lambda a, b: a + 2 * b)
        yield "subtracted", _instead(lambda a, b: a - b)


def _joined(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    if len(args[0]) > 1:
        yield "the other way round", lambda func, args, kwargs: func(args[0][::-1], *args[1:], **kwargs)


def _mean(args: Any, rng: np.random.Generator) -> Iterator[tuple[str, Mutation]]:
    yield "maximum", _instead(lambda x, axis: x.amax(axis))
    yield "sum", _instead(lambda x, axis: x.sum(axis))
    yield "median", _instead(lambda x, axis: x.median(axis).values)


_OWN: dict[str, Callable[..., Iterator[tuple[str, Mutation]]]] = {
    "linear": _linear,
    "layer_norm": _norm,
    "gelu": _activation,
    "relu": _activation,
    "silu": _activation,
    "softmax": _softmax,
    "add": _sum,
    "__add__": _sum,
    "cat": _joined,
    "mean": _mean,
}


# Judging --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What came of one fault.

    outcome: "right", "unknown, right layer", "unknown, layer not told", or what begins with "wrong".
    """

    fault: str
    precision: str
    intermediates: bool
    outcome: str
    said: str

    @property
    def wrong(self) -> bool:
        """Whether the diagnosis says something that is not so."""
        return self.outcome.startswith("wrong")


def judged(config: ViTConfig, seed: int, *, count: int = 8, pairs: int | None = None) -> Judged:
    """Draw a fault, ask why right weights do not give its outputs, and judge the answer on images that it has not seen."""
    rng = np.random.default_rng(seed)
    precision, inner = PRECISIONS[rng.integers(len(PRECISIONS))], bool(rng.integers(2))
    state, stored = _weights(config, seed, afterwards="afterwards" in precision)
    kind = torch.float32 if precision.startswith("float32") or precision == "5 decimals" else torch.float64
    model = _model(config, state, kind)
    seen, unseen = (_images(config, rng, count, kind) for _ in range(2))
    fault = _visible(model, seen, rng)
    with torch.no_grad(), mutated(model, fault):
        logits, parts = vit_torch.intermediates(model, seen)
    with torch.no_grad(), mutated(model, fault):
        truth = model(unseen).double().numpy()
    answers = _told(logits.numpy(), precision)
    names = [name for name in parts if name.startswith(("patch_embed", "tokens", "embed", "norm", "pool", "blocks"))]
    given = {name: parts[name].numpy() for name in names if name.count(".") < 2 or name.endswith(("attn", "mlp"))}
    checkpoint = Checkpoint(config, "torch", stored)
    arrays = expected(seen.numpy(), answers, config, given if inner else {})
    with _searches() as kept:
        found = diagnose(checkpoint, arrays, pairs=pairs)
    # Of the weights that the outputs were made of: at a rounding, those of the file may fall on the other side.
    made_of = Checkpoint(config, "torch", state)
    right = {name: float64(parameter(made_of, name)) for name in rows(config)}
    outcome = _outcome(found, kept[-1], fault, {"images": unseen.double().numpy(), "weights": right}, truth)
    return Judged(str(fault), precision, inner, outcome, f"{found.verdict} {found.suspect}")


def _weights(config: ViTConfig, seed: int, *, afterwards: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights that the expected outputs are made of, and those of the file."""
    state = parity.to_torch(perturbed(config, seed), config)
    if not afterwards:
        return state, state
    generator = torch.Generator().manual_seed(seed)
    finer = {
        name: tensor.double() * (1 + 2.0**-25 * (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5))
        for name, tensor in state.items()
    }
    return finer, {name: tensor.float() for name, tensor in finer.items()}


def _model(config: ViTConfig, state: dict[str, Any], kind: torch.dtype) -> Any:
    model = vit_torch.ViT(config, vit_torch.Execution(attention="explicit")).eval().to(kind)
    model.load_state_dict({name: tensor.to(kind) for name, tensor in state.items()})
    return model


def _images(config: ViTConfig, rng: np.random.Generator, count: int, kind: torch.dtype) -> Any:
    slope = np.linspace(-1, 1, config.image_size[0])[:, None] + np.linspace(0, 0.7, config.image_size[1])
    noise = rng.standard_normal((count, config.in_channels, *config.image_size))
    return torch.tensor((noise + slope).astype(np.float32)).to(kind)


def _visible(model: Any, images: Any, rng: np.random.Generator) -> Drawn:
    """Return the first fault drawn that runs, stays finite, and shows in the logits."""
    with torch.no_grad():
        right = model(images)
        while True:
            fault = drawn(model, images[:2], rng)
            try:
                with mutated(model, fault):
                    wrong = model(images)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # a mutation that does not fit the shapes behind it
            if wrong.shape == right.shape and wrong.isfinite().all() and wrong.abs().max() < 1e6:
                if (wrong - right).norm() > VISIBLE * wrong.norm():
                    return fault


def _told(logits: np.ndarray, precision: str) -> np.ndarray:
    if precision == "5 decimals":
        return np.round(logits.astype(np.float64), 5)
    return logits.astype(np.float64) if precision == "float32 in float64" else logits


@contextmanager
def _searches() -> Iterator[list[tuple[Search, Found]]]:
    """Keep the searches of diagnoses, for the causes that their answers name."""
    kept: list[tuple[Search, Found]] = []

    run = Search.run

    def kept_run(search: Search) -> Found:
        found = run(search)
        kept.append((search, found))
        return found

    Search.run = kept_run  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        Search.run = run  # type: ignore[method-assign]


def _outcome(found: Diagnosis, kept: tuple[Search, Found], fault: Drawn, unseen: dict[str, Any], truth: np.ndarray) -> str:
    if found.discarded:
        return f"wrong: a cause could not be run, {found.discarded[0]}"
    search, result = kept
    if found.passed:  # where outputs are rounded as the last thing, the answer is that they are in that type
        return "right" if fault.what == f"rounded to torch.{found.dtype}" else "wrong: nothing is wrong"
    if result.matches:
        best = min(_left(replace(search.whole, **unseen), match.causes, truth) for match in result.matches)
        return "right" if best <= EXPLAINED else f"wrong: {best:.1e} of the difference is left on other images"
    if "do not tell the layer" in found.suspect or "logits" == found.suspect.partition(",")[0]:
        return "unknown, layer not told"
    return "unknown, right layer" if _names(found.suspect, fault) else "wrong: another layer"


def _left(trial: Trial, causes: Any, truth: np.ndarray) -> float:
    """The share of the difference that causes leave, on other images."""
    runner, again = Runner(), trial
    before = np.linalg.norm(runner.run(trial) - truth)
    for cause in causes:
        after = cause.apply(again)
        if after is None:
            return 1.0
        again = after
    return float(np.linalg.norm(runner.run(again) - truth) / before)


def _names(suspect: str, fault: Drawn) -> bool:
    """Whether a suspect names the block of a fault, or outside of the blocks what comes right after it."""
    said = suspect.removeprefix("the first layer that differs is ").split(",")[0].split(":")[0].split(" ")[0]
    if fault.call[:2] == ("", "tensor"):  # a table of rotary positions, which attention reads, in the first block first
        return said in ("blocks.0", "blocks.0.attn")
    if fault.layer.startswith("blocks."):
        return said.split(".")[:2] == fault.layer.split(".")[:2]
    return not said.startswith("blocks.") or (fault.layer in ("", "patch_embed", "patch_embed.proj") and said == "blocks.0")
