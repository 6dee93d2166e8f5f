"""Rates that bound the speed of a model, measured by each framework in a process of its own."""

from collections.abc import Callable
from typing import Any

from benchmarks.machine import product_flops, product_shapes
from benchmarks.plan import Block
from benchmarks.worker_process import Json, WorkerProcess
from vit_spec import InputError, ViTConfig

Processes = dict[str, WorkerProcess]  # a process for each framework
Say = Callable[[str], None]


def measure_bandwidth(device: str, processes: Processes, say: Say) -> Json:
    """Return the device's name, its bytes of memory (None for CPUs), and its bandwidth in bytes/s by each framework.

    Raises:
        InputError: no framework can be used; or none finds a GPU, and `device` is "gpu".
    """
    answers = _ask(processes, say, "bandwidth")
    if all("error" in answer for answer in answers.values()):
        reasons = "; ".join(f"{framework}: {answer['error']}" for framework, answer in answers.items())
        raise InputError(f"no framework can copy an array: {reasons}")
    names = {answer["device"] for answer in answers.values() if "device" in answer}
    if device == "gpu" and names <= {"cpu"}:
        raise InputError("no framework finds a GPU: leave --gpu out to measure the CPU, or install '.[cuda]' and a driver")
    rates = {framework: answer.get("bytes_per_second") for framework, answer in answers.items()}
    sizes = [answer["device_bytes"] for answer in answers.values() if answer.get("device_bytes")]
    return {
        "device": min(names, key=lambda name: name == "cpu"),
        "device_bytes": min(sizes, default=None),
        "bandwidth": _with_best(rates),
    }


def measure_products(processes: Processes, block: Block, config: ViTConfig, dtype: str, say: Say) -> Json:
    """Return the FLOP/s of the matrix products of a forward pass by each framework, and the best of them."""
    shapes = product_shapes(config, block.batch_size)
    answers = _ask(processes, say, "products", shapes=shapes, dtype=dtype)
    rates = {framework: answer.get("flops") for framework, answer in answers.items()}
    facts = {"model": block.model, "batch_size": block.batch_size, "dtype": dtype}
    return {**facts, "flops_of_products": product_flops(shapes), "flops_per_second": _with_best(rates)}


def fastest(one: Json, other: Json) -> dict[str, float | None]:
    """Return the larger rate of each framework, of two measurements: other work on the machine only slows them."""
    rates = one["flops_per_second"], other["flops_per_second"]
    return {name: max(filter(None, (each[name] for each in rates)), default=None) for name in rates[0]}


def _ask(processes: Processes, say: Say, do: str, **request: Any) -> dict[str, Json]:
    """Return the answers of all frameworks to a request, and say why one has none."""
    answers = {name: process.ask(do, framework=name, **request) for name, process in processes.items()}
    for name, answer in answers.items():
        if "error" in answer:
            say(f"  {name}: {do} not measured: {answer['error']}")
    return answers


def _with_best(rates: dict[str, float | None]) -> dict[str, float | None]:
    return {**rates, "best": max(filter(None, rates.values()), default=None)}
