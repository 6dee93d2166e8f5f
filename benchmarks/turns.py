"""Measure the contestants of a plan: each in a process of its own, taking turns.

The contestants of a group are built first.  The outputs of the first call of each function are compared with those of our
twin in float64; a contestant that differs is left out.  Then, in each turn, each function is called in one process after
the other, in an order that changes with the turn.  So other work on the machine slows all alike, and ratios are those
within a turn.  A contestant that fails is left out with the reason, and the others are measured.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import parity
import vit_spec
from benchmarks.machine import usable_cores
from benchmarks.machine.rates import Processes, Say, fastest, measure_bandwidth, measure_products
from benchmarks.peers import Contestant
from benchmarks.plan import MEASURES, Block, Plan, group_size, groups, lanes
from benchmarks.worker_process import Json, WorkerProcess, frameworks, worker
from parity.comparison import reproducible_init
from parity.comparison.disk_cache import available_memory
from vit_spec import InputError, ViTConfig

WRONG = "differs from our twin"
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}  # of the errors of logits, losses and norms of gradients
# Of the norm that clipping computes in a step: PyTorch's in float32 has an error of 3e-5 for random numbers in the shapes
# of ViT-B's matrices, and of 1.4e-4 in those of ViT-H's.
TOLERANCE_OF_CLIPPING = 1e-3
SECONDS_OF_CALLS = {"cpu": 0.3, "gpu": 1.0}  # a timing calls a function as often as fits into this time
MAX_CALLS = 30
Prepare = Callable[[Contestant, WorkerProcess], Json | None]


class References(NamedTuple):
    """Files with the weights of a function in our format, and with the outputs of our twin in float64."""

    weights: Path
    outputs: Path


def write_references(
    processes: Processes, block: Block, config: ViTConfig, folder: Path, found: dict[str, References]
) -> None:
    """Write weights and outputs for each function that the contestants of a block compute, unless `found` has them.

    found: the files by `Contestant.function_key`, to which they are added.

    Raises:
        InputError: the outputs cannot be computed.
    """
    framework, process = next(iter(processes.items()))
    for contestant in block.contestants:
        if contestant.function_key in found:
            continue
        own = contestant.config(config)
        stem = f"{block.model}-{block.batch_size}-{contestant.function_key}"
        files = References(folder / f"{stem}.safetensors", folder / f"{stem}.npz")
        parity.save(files.weights, reproducible_init.weights(own, 0).arrays, own, "jax", force=True)
        answer = process.ask(
            "expected",
            framework=framework,
            config=json.loads(own.to_json()),
            weights=str(files.weights),
            batch_size=block.batch_size,
            expected=str(files.outputs),
        )
        if "error" in answer:
            raise InputError(f"the outputs of {block.model} cannot be computed: {answer['error']}")
        found[contestant.function_key] = files


class Measurement:
    """The measurement of one block of a plan.  `results` and `skipped` are filled in the course of it."""

    def __init__(
        self,
        plan: Plan,
        block: Block,
        config: ViTConfig,
        references: dict[str, References],
        sources: dict[str, str],
        folder: Path,
        say: Say,
        device_bytes: int | None,
    ) -> None:
        self._plan, self._block, self._config, self._references = plan, block, config, references
        self._sources, self._folder, self._say, self._device_bytes = sources, folder, say, device_bytes
        self.results: list[Json] = []
        self.skipped: list[Json] = []
        self._unavailable: set[Contestant] = set()

    def run(self) -> None:
        """Measure all groups."""
        for contestant in self._block.contestants:
            if lacks_source(contestant, self._sources):
                self._skip(contestant, contestant.of.install)
        block = replace(self._block, contestants=tuple(self._available(self._block.contestants)))
        available = self._device_bytes or available_memory()
        size = group_size(self._config, block.batch_size, self._plan.device, available)
        for group in groups(block, size):
            self._measure_group(tuple(self._available(group)))

    def _available(self, contestants: Iterable[Contestant]) -> Iterator[Contestant]:
        return (each for each in contestants if each not in self._unavailable)

    def _skip(self, contestant: Contestant, reason: str) -> None:
        if contestant not in self._unavailable:
            self._unavailable.add(contestant)
            entry = {"model": self._block.model, "contestant": contestant.name, "reason": reason}
            self.skipped.append(entry)
            self._say(f"  {contestant.name}: skipped: {reason}")

    def _measure_group(self, group: tuple[Contestant, ...]) -> None:
        with ExitStack() as stack:
            workers = {each: stack.enter_context(worker(self._plan.device, self._folder)) for each in group}
            facts: dict[Contestant, Json] = {each: {} for each in group}
            threads = stack.enter_context(ThreadPoolExecutor(usable_cores()))
            for prepare, timed in ((self._load, False), (self._first_step, True), (self._first_calls, False)):
                together = lanes(tuple(workers), self._plan.device, timed=timed)
                answers = list(threads.map(partial(prepare_lane, prepare, workers), together))
                for lane, found in zip(together, answers, strict=True):
                    for contestant, fact in zip(lane, found, strict=True):
                        if fact is None:
                            workers.pop(contestant).close()
                        else:
                            facts[contestant] |= fact
                for twin in self._unneeded(workers):
                    workers.pop(twin).close()
            if not workers:
                return
            times = self._take_turns(workers, max(facts[each].pop("second_step_seconds") for each in workers))
            for contestant in list(times):
                if answers := self._ask(contestant, workers[contestant], [("compilations", {})]):
                    before = facts[contestant].pop("compilations")
                    facts[contestant]["compilations_in_turns"] = answers[0]["count"] - before
                else:
                    del times[contestant]
        for twin in self._unneeded(times):
            del times[twin]
        for contestant in times:
            self._add(contestant, facts[contestant], times)

    def _unneeded(self, group: Iterable[Contestant]) -> list[Contestant]:
        """Return the twins that were added to a group for other contestants, all of which are skipped now."""
        needed = {*self._block.contestants, *(each.reference for each in group if not each.is_twin)}
        return [each for each in group if each not in needed]

    def _load(self, contestant: Contestant, process: WorkerProcess) -> Json | None:
        """Import the library of a contestant and convert the weights; None if it is skipped."""
        request = {
            "contestant": asdict(contestant),
            "config": json.loads(contestant.config(self._config).to_json()),
            "weights": str(self._references[contestant.function_key].weights),
            "batch_size": self._block.batch_size,
            "keep_freed_memory": self._block.keep_freed_memory,
            "device": self._plan.device,
            "paths": [self._sources[contestant.library]] if contestant.library in self._sources else [],
        }
        answers = self._ask(contestant, process, [("prepare", request)])
        return answers and {"versions": answers[0]["versions"], "device": answers[0]["device"]}

    def _first_step(self, contestant: Contestant, process: WorkerProcess) -> Json | None:
        """Build a contestant and do two training steps; None if it is skipped."""
        requests = [
            ("build", {}),
            self._first_call("step", contestant),
            ("run", {"what": "step", "times": 1}),
            ("memory", {}),
        ]
        if (answers := self._ask(contestant, process, requests)) is None:
            return None
        _, first, second, memory = answers
        self._say(f"  {contestant.name}: first step after {first['seconds_with_building']:.1f} s")
        return {
            "first_step_seconds": first["seconds_with_building"],
            "peak_memory_bytes": memory["bytes"],
            "second_step_seconds": second["seconds"],
            "errors_of_step": first["errors"],
        }

    def _first_calls(self, contestant: Contestant, process: WorkerProcess) -> Json | None:
        """Call the other functions of a contestant for the first time; None if it is skipped."""
        functions = [what for what in MEASURES if what == "forward" or (what in self._block.measures and what != "step")]
        requests = [*(self._first_call(what, contestant) for what in functions), ("compilations", {})]
        if (answers := self._ask(contestant, process, requests)) is None:
            return None
        errors = {f"errors_of_{what}": answer["errors"] for what, answer in zip(functions, answers, strict=False)}
        self._say(f"  {contestant.name}: logits within {errors['errors_of_forward']['logits']:.1e}")
        return {**errors, "compilations": answers[-1]["count"]}

    def _first_call(self, what: str, contestant: Contestant) -> tuple[str, Json]:
        return "first", {"what": what, "expected": str(self._references[contestant.function_key].outputs)}

    def _ask(self, contestant: Contestant, process: WorkerProcess, requests: list[tuple[str, Json]]) -> list[Json] | None:
        """Return the answers to requests.

        None if a request fails, or if its outputs differ from those of our twin; the contestant is skipped then.
        """
        answers = []
        for do, request in requests:
            answer = process.ask(do, **request)
            reason = answer.get("error") or answer.get("skipped")
            for name, error in answer.get("errors", {}).items():
                limit = TOLERANCE[contestant.dtype]
                if (request["what"], name) == ("step", "norm of the gradient"):
                    limit = max(limit, TOLERANCE_OF_CLIPPING)
                if not (reason or error < limit):
                    reason = f"{WRONG}: {request['what']}: {name}: relative error {error:.1e}, allowed {limit:.0e}"
            if reason:
                self._skip(contestant, reason)
                return None
            answers.append(answer)
        return answers

    def _take_turns(
        self, workers: dict[Contestant, WorkerProcess], step: float
    ) -> dict[Contestant, dict[str, list[float]]]:
        """Return the seconds of a call, of each function in each turn, of the contestants that did not fail.

        step: seconds of a step of the slowest contestant.  They decide how often a timing calls a function: equally
            often in all contestants.
        """
        times: dict[Contestant, dict[str, list[float]]] = {each: {} for each in workers}

        def run(contestant: Contestant, what: str, count: int) -> float | None:
            if answers := self._ask(contestant, workers[contestant], [("run", {"what": what, "times": count})]):
                return float(answers[0]["seconds"])
            del times[contestant]
            workers[contestant].close()
            return None

        expected = {"step": step, "gradient": step, "forward": step / 3}
        if "latency" in self._block.measures:
            expected["latency"] = max(filter(None, [run(each, "latency", 1) for each in workers]), default=step)
        limit = SECONDS_OF_CALLS[self._plan.device]
        calls = {what: min(max(round(limit / seconds), 1), MAX_CALLS) for what, seconds in expected.items()}
        for turn in range(self._plan.turns):
            for what in self._block.measures:
                order = list(times)
                start = turn % len(order) if order else 0
                for each in order[start:] + order[:start]:
                    if (seconds := run(each, what, calls[what])) is not None:
                        times[each].setdefault(what, []).append(seconds)
        return times

    def _add(self, contestant: Contestant, facts: Json, times: dict[Contestant, Any]) -> None:
        """Add the result of a contestant."""
        reference = contestant.reference
        others = times.get(reference) if reference != contestant else None
        if any(each["contestant"] == contestant.name for each in self.results):
            return  # a twin that a later group repeats for its ratios
        ratios = {
            what: spread([own / other for own, other in zip(seconds, others[what], strict=True)])
            for what, seconds in times[contestant].items()
            if others
        }
        self.results.append(
            {
                "model": self._block.model,
                "batch_size": self._block.batch_size,
                "allocator": allocator(self._plan, self._block),
                "contestant": contestant.name,
                **asdict(contestant),
                "framework": contestant.of.framework,
                "beside": [each.name for each in times],
                "reference": reference.name if others else None,
                **facts,
                "flops_of_forward": vit_spec.flops(contestant.config(self._config)),
                "seconds": {what: spread(seconds) for what, seconds in times[contestant].items()},
                "ratio_to_reference": ratios,
            }
        )


def prepare_lane(
    prepare: Prepare, workers: dict[Contestant, WorkerProcess], lane: tuple[Contestant, ...]
) -> list[Json | None]:
    """Return what a preparation of contestants in turn returns for each of them."""
    return [prepare(each, workers[each]) for each in lane]


def spread(values: list[float]) -> Json:
    """Return the median, the least and the most of the turns, and the turns."""
    return {"median": median(values), "least": min(values), "most": max(values), "turns": values}


def lacks_source(contestant: Contestant, sources: dict[str, str]) -> bool:
    """Return whether a contestant is imported from a path that was not given."""
    return contestant.of.by_source and contestant.library not in sources


def measure(plan: Plan, configs: dict[str, ViTConfig], sources: dict[str, str], say: Say) -> Iterator[Json]:
    """Measure everything of a plan except its lines, and yield all that is measured after each block.

    Args:
        plan: what to measure.
        configs: the config of each model of the plan.
        sources: path by library, for libraries that are imported from a path.
        say: called with a line for each thing that is done.

    Yields:
        "device", "device_bytes" and "bandwidth" (see `measure_bandwidth`), "products", "results" and "skipped", lists.

    Raises:
        InputError: there is no framework that can be used, or no GPU for a plan that needs one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ExitStack() as stack:
            processes = {each: stack.enter_context(worker(plan.device, folder)) for each in frameworks()}
            found = {**measure_bandwidth(plan.device, processes, say), "products": [], "results": [], "skipped": []}
            references: dict[tuple[str, int], dict[str, References]] = {}
            measured = set()
            for block in plan.blocks:
                key, config = (block.model, block.batch_size), configs[block.model]
                say(f"{block.model}, batch size {block.batch_size}: weights, and rates of products")
                used = replace(block, contestants=tuple(c for c in block.contestants if not lacks_source(c, sources)))
                write_references(processes, used, config, folder, references.setdefault(key, {}))
                for dtype in dict.fromkeys(contestant.dtype for contestant in block.contestants):
                    if (*key, dtype) not in measured:
                        measured.add((*key, dtype))
                        found["products"].append(measure_products(processes, block, config, dtype, say))
        for block in plan.blocks:
            say(f"{block.model}, batch size {block.batch_size}, allocator: {allocator(plan, block)}")
            files = references[block.model, block.batch_size]
            limit = found["device_bytes"]
            measurement = Measurement(plan, block, configs[block.model], files, sources, folder, say, limit)
            measurement.run()
            if plan.device == "cpu":  # whose speed changes with the other work on the machine
                _measure_products_again(plan, block, configs[block.model], folder, found["products"], say)
            found["results"] += unknown(found["results"], measurement.results)
            found["skipped"] += unknown(found["skipped"], measurement.skipped)
            yield found


def _measure_products_again(
    plan: Plan, block: Block, config: ViTConfig, folder: Path, products: list[Json], say: Say
) -> None:
    """Measure the products of a block after it as well, and keep the faster rates in `products`."""
    with ExitStack() as stack:
        processes = {each: stack.enter_context(worker(plan.device, folder)) for each in frameworks()}
        for rate in products:
            if (rate["model"], rate["batch_size"]) == (block.model, block.batch_size):
                again = measure_products(processes, block, config, rate["dtype"], say)
                rate["flops_per_second"] = fastest(rate, again)


def unknown(known: list[Json], entries: list[Json]) -> list[Json]:
    """Return the entries of contestants that are not known yet: several blocks of a model may need the same twin."""

    def identity(entry: Json) -> tuple[Any, ...]:
        return tuple(entry.get(name) for name in ("model", "batch_size", "allocator", "contestant"))

    identities = {identity(entry) for entry in known}
    return [entry for entry in entries if identity(entry) not in identities]


def allocator(plan: Plan, block: Block) -> str:
    """Return the setting of the allocator in words."""
    if plan.device == "gpu":
        return "the framework's"
    return "freed memory kept" if block.keep_freed_memory else "default"
