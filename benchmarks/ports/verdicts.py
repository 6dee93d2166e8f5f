"""Judge one pair: `assert_parity` must accept it, and must reject every mutant and name where the fault is."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.ports.declaration import HITS, Apply, Built, Pair
from benchmarks.ports.mutator import (
    Executed,
    Fault,
    attribute_mutations,
    changed_attribute,
    code_folders,
    draw,
    planted,
    trace,
)
from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.both_models import BothModels
from parity.comparison.any_model.comparison import Comparison
from parity.comparison.any_model.report import GRADIENT_OF
from parity.comparison.any_model.weights import flatten, in_evaluation
from vit_spec import InputError

DISTINCT = 1e-9  # a mutant whose tensors differ less (relRMS, float64) is equivalent
MAX_REDRAWS = 12
ATTRIBUTE_SHARE = 0.25  # of the faults, where modules have attributes to mutate
SIDES = ("flax", "torch")

Result = dict[str, Any]


def judge(pair: Pair, count: int, seed: int) -> Iterator[Result]:
    """Build a pair, and yield the result of the right pair, then one for each of `count` faults.

    A pair that is known to differ has one result, with the event "difference".
    """
    start = time.perf_counter()
    built = pair.build()
    build_seconds = time.perf_counter() - start
    right = judge_right(pair, built)
    event = "difference" if pair.disagreement else "right"
    yield {"event": event, "pair": pair.name, "build_seconds": build_seconds, **right}
    if right["passed"] and not pair.disagreement:
        rng = random.Random(f"{seed} {pair.name}")
        layouts = () if right["automatic"] else pair.layouts
        yield from (
            {"event": "fault", "pair": pair.name, **each} for each in Mutants(pair, built, layouts, rng).judge(count)
        )


def judge_right(pair: Pair, built: Built) -> Result:
    """Return whether the pair passes, whether without the lines of `layouts`, and else why not."""
    result = _attempt(built, ())
    automatic = result["passed"]
    if not automatic and pair.layouts:
        result = _attempt(built, pair.layouts)
    result.pop("report")
    return {**result, "automatic": automatic, "matched": automatic or _is_matched(built)}


def _is_matched(built: Built) -> bool:
    """Return whether `assert_parity` finds a mapping of the parameters."""
    try:
        _comparison(built, ()).match()
    except Exception:
        return False
    return True


def _comparison(built: Built, layouts: tuple[str, ...]) -> Comparison:
    """Return the comparison that `assert_parity` makes, before its first step."""
    options = {"weights": "flax", "outputs": (), "loss": None, "train": False, "seed": 0, **built.options}
    axes = (options.pop("input_axes", ()), options.pop("output_axes", ()))
    return Comparison(BothModels(*built[:4], axes=axes, **options), built[2], layouts)


def _attempt(built: Built, layouts: tuple[str, ...], **options: Any) -> Result:
    """Run `assert_parity`'s comparison; an exception is a rejection with its text as the reason."""
    start = time.perf_counter()
    result: Result = {"passed": False, "report": None}
    try:
        report = compare_models(*built[:4], **{**built.options, "layouts": layouts, **options})
        result.update(passed=report.passed, reason=str(report).split("\nparameters (flax")[0], report=report)
    except InputError as error:
        result.update(reason=f"InputError: {error}"[:1500])
    except Exception as error:  # any model can raise anything
        result.update(reason=f"{type(error).__name__}: {error}"[:1500])
    result["seconds"] = time.perf_counter() - start
    return result


class Mutants:
    """Draws faults of one pair, and judges them."""

    def __init__(self, pair: Pair, built: Built, layouts: tuple[str, ...], rng: random.Random) -> None:
        self.pair, self.built, self.layouts, self.rng = pair, built, layouts, rng
        self.right = _comparison(built, layouts)
        self.right.match()
        self.right.models.name_outputs()
        self.reference = {side: self._run(side) for side in SIDES}
        traced = {"flax": self._trace_flax(), "torch": self._trace_torch()}
        self.executed = {side: traced[side] for side in SIDES}
        _leave_out_shared(traced["flax"], traced["torch"])
        self.pools = {side: draw(traced[side], rng) for side in SIDES}
        self.attributes = {side: self._attributes(side) for side in SIDES}

    def judge(self, count: int) -> Iterator[Result]:
        """Yield the results of `count` faults, alternately on each side; fewer if there are not so many."""
        exhausted: set[str] = set()
        made = 0
        for n in range(10 * count):
            side = SIDES[n % 2]
            if made == count or len(exhausted) == len(SIDES):
                return
            if side in exhausted:
                continue
            result = self._next(side)
            if result is None:
                exhausted.add(side)
                continue
            made += 1
            yield {"side": side, **result}

    def _next(self, side: str) -> Result | None:
        """Draw faults until one changes the function; return its result, or None if there is none."""
        counts = {"failed": 0, "equivalent": 0}
        of_attribute = self.rng.random() < ATTRIBUTE_SHARE  # once for all redraws, because these faults rarely need any
        for _ in range(MAX_REDRAWS):
            use_attribute = self.attributes[side] and of_attribute
            fault_context: AbstractContextManager[Fault] | None
            if use_attribute:
                fault_context = self._changed(
                    side, self.attributes[side].pop(self.rng.randrange(len(self.attributes[side])))
                )
            else:
                candidate = next(self.pools[side], None)
                if candidate is None and self.attributes[side]:
                    fault_context = self._changed(side, self.attributes[side].pop())
                else:
                    fault_context = candidate and planted(candidate, self.executed[side])
            if fault_context is None:
                return None
            try:
                with fault_context as fault:
                    change = self._change(side)
                    if change > DISTINCT:
                        return {**asdict(fault), "change": change, **counts, **self._judge(side, fault)}
                counts["equivalent"] += 1
            except (Exception, SystemExit):  # most mutants of shapes and indices do not run
                counts["failed"] += 1
            finally:
                _forget_traces(side)
        return {"kind": "none", **counts, "event_note": "no fault that runs was found"}

    def _run(self, side: str) -> dict[str, Any]:
        """Return outputs, loss and gradients of one side by name, in float64."""
        models, right = _comparison(self.built, self.layouts).models, self.right.models
        models.use(right.correspondence)
        if side == "torch":
            return models.torch.run("float64", right.names)
        outputs, gradients, of_inputs = models.flax.run("float64", list(right.names))
        return {**outputs, **gradients, **of_inputs}

    def _change(self, side: str) -> float:
        """Return the largest relRMS between a tensor of the mutant and the same tensor of the right model.

        Raises:
            ValueError: a shape differs or a value is not finite.
        """
        if side == "flax":
            _forget_traces(side)
        tensors, reference = self._run(side), self.reference[side]
        groups: dict[str, list[tuple[Any, Any]]] = {}
        for name, right in reference.items():
            if tensors[name].shape != right.shape or not np.isfinite(np.asarray(tensors[name], np.float64)).all():
                raise ValueError(name)
            # The gradients are one vector, because single ones can be zero up to rounding errors.
            group = name if name.startswith(("output", "loss", GRADIENT_OF + "input")) else "gradients"
            groups.setdefault(group, []).append((tensors[name], right))
        return max(_relative_difference(arrays) for arrays in groups.values())

    def _judge(self, side: str, fault: Fault) -> Result:
        """Compare the mutant with the other side."""
        result = _attempt(self.built, self.layouts, level="function")
        if result["passed"]:
            result = _attempt(self.built, self.layouts)
        report = result.pop("report")
        origin = getattr(report, "origin", None)
        return {**result, "named": str(origin or ""), **_hits(getattr(origin, side, None), fault)}

    def _trace_flax(self) -> Executed:
        import jax

        apply, cache = self.built.flax_apply, {}

        def path_of(frame: FrameType) -> str | None:
            return flax_module_path(frame.f_locals.get("self"), apply, cache)

        _forget_traces("flax")
        inputs = [jax.numpy.asarray(x) for x in self.right.models.inputs]
        folders = code_folders(self.pair.jax_code)
        leaves, unflatten = flatten(in_evaluation(self.built.params))

        def call(floats: list[Any]) -> Any:
            given = iter(floats)
            return apply(unflatten([leaf if key is None else next(given) for key, leaf in leaves]), *inputs)

        floats = [leaf for key, leaf in leaves if key is not None]
        executed = trace(lambda: jax.eval_shape(call, floats), folders, path_of)
        _forget_traces("flax")
        return executed

    def _trace_torch(self) -> Executed:
        import torch

        module = self.built.torch_module.eval()
        paths = {id(each): path for path, each in module.named_modules()}
        tensors = self.right.models.torch._permuted([torch.tensor(x) for x in self.right.models.inputs])
        folders = code_folders(self.pair.torch_code)
        with torch.no_grad():
            return trace(lambda: module(*tensors), folders, lambda frame: paths.get(id(frame.f_locals.get("self"))))

    def _attributes(self, side: str) -> list[Any]:
        """Return (module, path, mutation) for every attribute that can be mutated."""
        if side == "torch":
            modules = [(each, path) for path, each in self.built.torch_module.named_modules()]
        elif isinstance(self.built.flax_apply, Apply):
            modules = [(each, path) for path, each in module_tree(self.built.params)]
        else:
            modules = []
        return [(each, path, mutation) for each, path in modules for mutation in attribute_mutations(each)]

    def _changed(self, side: str, attribute: Any) -> AbstractContextManager[Fault]:
        module, path, mutation = attribute
        return changed_attribute(module, path, mutation)


def module_tree(model: Any) -> list[tuple[str, Any]]:
    """Return the path and the object of every module inside an NNX or Equinox module; the path of the model is ""."""
    out, seen, stack = [], set(), [("", model)]
    while stack:
        path, each = stack.pop(0)
        if isinstance(each, (list, tuple)) or (type(each).__name__ in ("List", "Sequential", "Dict") and path):
            pass
        elif isinstance(each, dict):
            stack += [(f"{path}.{key}", value) for key, value in each.items()]
            continue
        elif not hasattr(each, "__dict__") or type(each).__module__.split(".")[0] in ("jax", "jaxlib", "numpy"):
            continue
        if isinstance(each, (list, tuple)):
            stack += [(f"{path}.{n}" if path else str(n), value) for n, value in enumerate(each)]
            continue
        if id(each) in seen or isinstance(each, type) or type(each).__name__ in ("function", "Param", "GraphDef"):
            continue
        seen.add(id(each))
        out.append((path, each))
        try:
            fields = vars(each)
        except TypeError:
            continue
        stack += [(f"{path}.{name}" if path else name, value) for name, value in fields.items() if name != "_pytree__state"]
        if type(each).__name__ == "List":
            stack += [(f"{path}.{n}", value) for n, value in enumerate(each)]
    return out


def flax_module_path(owner: Any, apply: Any, cache: dict[str, Any]) -> str | None:
    """Return the path of the linen, NNX or Equinox module `owner`; None if it is no module of the model."""
    from flax import linen

    if isinstance(owner, linen.Module):
        try:
            return "/".join(owner.path)
        except ValueError:  # a module that is not bound
            return None
    current = getattr(apply, "current", None)
    if owner is None or current is None:
        return None
    if cache.get("model") is not current:
        tree = module_tree(current)
        classes = Counter(type(each) for _, each in tree)
        of_class = {type(each): path for path, each in tree if path and classes[type(each)] == 1}
        cache.update(model=current, paths={id(each): path for path, each in tree}, of_class=of_class)
    # nnx.scan calls copies of modules, which are told by their class if no other module has it.
    return cache["paths"].get(id(owner), cache["of_class"].get(type(owner)))


def _hits(place: Any, fault: Fault) -> Result:
    """Return whether a place is the statement of a fault, and whether its region, its caller or its module is."""
    if place is None:
        return {**dict.fromkeys((f"{hit}_hit" for hit in HITS), False), "origin": ""}
    caller = [place.caller[:2]] if place.caller else []
    lines = [(place.file, place.line), *caller, *place.lines]
    inside = [
        bool(file) and Path(file).name == Path(fault.file).name and fault.line <= (line or 0) <= fault.end_line
        for file, line in lines
    ]
    modules = {_normal(each) for each in (place.module, *place.passed, *_modules_left(place))}
    return {
        "line_hit": inside[0],
        "region_hit": inside[0] or any(inside[1 + len(caller) :]),
        "caller_hit": bool(caller) and inside[1],
        "module_hit": bool(modules & {_normal(path) for path in fault.modules}),
        "origin": f"{place.module} {getattr(place, 'operation', '')} {place.file}:{place.line}",
    }


def _modules_left(place: Any) -> Iterator[str]:
    """Yield the module after which the place comes, and those around it that do not contain the place."""
    here, names = _normal(place.module), _normal(place.after).split(".") if place.after else []
    for n in range(len(names), 0, -1):
        path = ".".join(names[:n])
        if here == path or here.startswith(f"{path}."):
            return
        yield path


def _normal(path: str) -> str:
    return path.replace("/", ".").strip(".")


def _relative_difference(arrays: list[tuple[Any, Any]]) -> float:
    """Return the norm of the difference of several pairs of arrays, divided by the norm of the second ones."""
    squares = [
        (float(np.sum(np.square(a.astype(np.float64) - b))), float(np.sum(np.square(b.astype(np.float64)))))
        for a, b in arrays
    ]
    difference, norm = (sum(each) ** 0.5 for each in zip(*squares, strict=True))
    return difference / max(norm, 1e-300)


def _forget_traces(side: str) -> None:
    """Let JAX trace functions again, because it keeps traces by the identity of functions."""
    if side == "flax":
        import jax

        jax.clear_caches()


def _leave_out_shared(first: Executed, second: Executed) -> None:
    """Remove the lines that both sides execute: a fault in them would be planted in both models."""
    for file in set(first.lines) & set(second.lines):
        for line in set(first.lines[file]) & set(second.lines[file]):
            del first.lines[file][line], second.lines[file][line]
