"""`--plan`: estimate the memory, FLOPs, communication and time of a run on devices that this machine need not have.

    --plan 64x80GiB                                      memory, FLOPs and communication on 64 devices of 80 GiB
    --plan 64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s    and the time

After @ come the peak FLOP/s of a device, the fraction of it that a step reaches (40 % by default), and the bandwidth with
which a device sends: along the mesh axis that is named, or along all others.
"""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from PIL import Image

from parity.terminal import Terminal
from train.data.sources import Dataset, Examples, open_dataset, place_exists, takes_place
from train.loop.request import Request
from train.loop.run_tables import print_table, rows_of, run_title
from train.loop.schedule import Schedule
from train.loop.session import choose_model
from train.loop.teacher_weights import load_teacher
from train.mesh import AXES, AxisSizes, axis_sizes, images_per_device, replication_note
from train.recipes import IMAGENET, Recipe
from train.recipes.param_groups import lr_multipliers
from train.step_cost import MemoryEstimate, Step, flops_per_image
from vit_spec import InputError, ViTConfig, count, nearest

GIB = 1 << 30
UNITS = {"T": 1e12, "P": 1e15}
USABLE_FRACTION = 0.9  # of a device's memory; programs, scratch space of kernels, and fragmentation need the rest
SYNTAX = "write such as 64x80GiB or 64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s"


@dataclass(frozen=True)
class Devices:
    """The devices of a planned run.

    count: how many.
    memory: bytes of each.
    peak_flops: peak FLOP/s of each; None if not given.
    utilization: fraction of it that a step reaches.
    bandwidth: bytes per second that a device sends, by mesh axis; "" stands for all other axes.
    """

    count: int
    memory: int
    peak_flops: float | None = None
    utilization: float = 0.4
    bandwidth: dict[str, float] = field(default_factory=dict)


class StepTime(NamedTuple):
    """The time of a step in seconds.

    compute: without communication.
    communication: by the mesh axes that it goes along, such as "data" or "data+fsdp".
    """

    compute: float
    communication: dict[str, float]

    @property
    def overlapped(self) -> float:
        """The time if all communication overlaps with compute."""
        return max(self.compute, *self.communication.values(), 0.0)

    @property
    def sequential(self) -> float:
        """The time if no communication overlaps with compute."""
        return self.compute + sum(self.communication.values())


Estimator = Callable[[ViTConfig, Recipe, AxisSizes], MemoryEstimate]


def print_plan(trainer: str, request: Request, text: str) -> int:
    """Print the estimates for the requested run on the devices of `text`; return 0 if it fits into their memory, else 1.

    trainer: the package whose `memory_estimate` is asked, "train.jax" or "train.torch".

    Raises:
        InputError: the devices, the mesh or the recipe cannot be parsed or do not match.
    """
    devices, source, recipe = parse_devices(text), request.source, request.recipe
    estimate_memory: Estimator = importlib.import_module(f"{trainer}.memory_estimate").estimate_memory
    task = recipe.task or source.task
    config, _, notes = choose_model(recipe, source, task, recipe.run)
    schedule = Schedule.from_recipe(recipe, len(source.train))
    lr_multipliers(config, freeze=recipe.optimizer.freeze)  # raises for patterns that training would refuse
    recipe = replace(recipe, task=task)
    if teacher := load_teacher(recipe, task, source.classes, config.in_channels):
        estimate_memory = with_teacher(estimate_memory, teacher.checkpoint.config)
        notes = [*notes, *teacher.notes]
    sizes = axis_sizes(recipe.mesh, devices.count, config)
    estimate = estimate_memory(config, recipe, sizes)
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    assumptions = [*source.notes, *notes, *filter(None, [replication_note(config, sizes)])]
    local_batch = images_per_device(recipe.batch_size, recipe.accumulate, sizes)
    parts = f" in each of {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
    image_size = "x".join(map(str, config.image_size))
    first_rows = {
        "run": run_title(request.name, recipe, config),
        "images": f"{len(source.train):,} of {image_size}, {len(source.classes):,} {source.task}",
    }
    rows = {
        "devices": f"{devices.count} of {_format_bytes(devices.memory)}: {axes}",
        "batch": f"{recipe.batch_size:,} images, {local_batch} per device{parts}",
        **_memory_rows(estimate),
        **_flop_rows(estimate, devices, recipe),
        **_transfer_rows(estimate, sizes),
        **_time_rows(estimate, devices, sizes, recipe, schedule),
    }
    console = Terminal()
    print_table(console, [*first_rows.items(), *rows_of("assumed", assumptions), *rows.items()])
    fits = estimate.total <= USABLE_FRACTION * devices.memory
    console.print(_fit_message(estimate, estimate_memory, devices, config, recipe, sizes), soft_wrap=True, highlight=False)
    return 0 if fits else 1


def with_teacher(estimate_memory: Estimator, teacher: ViTConfig) -> Estimator:
    """Return an estimator that adds a teacher: its parameters, what a forward pass holds at once, and its FLOPs.

    A forward pass holds most in the MLP of a block: its input, hidden units and output, beside the images and their patches
    in float32.  Attention weights are not counted: a fused kernel has none.  Every device of the axis `tensor` computes the
    whole teacher.
    """

    def estimate(config: ViTConfig, recipe: Recipe, sizes: AxisSizes) -> MemoryEstimate:
        found = estimate_memory(config, recipe, sizes)
        step = Step.of(teacher, recipe, sizes, 4)
        hidden = teacher.mlp_dim * (2 if teacher.mlp.is_gated else 1)
        held = (teacher.num_prefix + step.patches) * (5 * teacher.width + 2 * hidden)
        memory = 4 * count(teacher) + step.images * (step.compute_bytes * held + 2 * 4 * step.image_bytes)
        step_flops = recipe.batch_size * flops_per_image(config, teacher, teacher_copies=sizes["tensor"])
        return replace(found, memory=found.memory | {"teacher": memory}, flops=step_flops)

    return estimate


def parse_devices(text: str) -> Devices:
    """Parse devices such as "64x80GiB" or "64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s".

    Raises:
        InputError: it cannot be parsed.
    """
    count_and_memory, at, rates = text.replace(" ", "").partition("@")
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)GiB", count_and_memory)
    if not match or bool(at) != bool(rates) or not float(match[2]):
        raise InputError(f"--plan {text!r} cannot be parsed: {SYNTAX}")
    devices = Devices(int(match[1]), int(float(match[2]) * GIB))
    for rate in filter(None, rates.split(",")):
        devices = _with_rate(devices, rate)
    return devices


def _with_rate(devices: Devices, text: str) -> Devices:
    """Return the devices with one of the rates after @ added."""
    number = r"(\d+(?:\.\d+)?)"
    if match := re.fullmatch(rf"{number}([TP])FLOPs?(?:/s)?", text):
        return replace(devices, peak_flops=float(match[1]) * UNITS[match[2]])
    if (match := re.fullmatch(rf"{number}%", text)) and 0 < float(match[1]) <= 100:
        return replace(devices, utilization=float(match[1]) / 100)
    if (match := re.fullmatch(rf"(?:(\w+)=)?{number}GB/s", text)) and float(match[2]):
        axis = match[1] or ""
        if axis and axis not in AXES:
            raise InputError(f"--plan has an unknown axis {axis!r}: give {', '.join(AXES)}{nearest(axis, AXES)}")
        return replace(devices, bandwidth=devices.bandwidth | {axis: float(match[2]) * 1e9})
    raise InputError(f"--plan has an unknown rate {text!r}: {SYNTAX}")


def open_or_assume_imagenet(spec: str, held_out: float | str | None = None) -> Dataset:
    """Open a data set; if its path does not exist here, return one without images that has the sizes of ImageNet-1k.

    Raises:
        InputError: the data exist and cannot be used, or their kind is unknown.
    """
    kind, _, where = spec.partition(":")
    try:
        return open_dataset(spec, held_out)
    except InputError:
        if not takes_place(kind) or not where or place_exists(where):
            raise

    def read(row: int) -> Image.Image:
        raise InputError(f"{spec} does not exist here: a plan reads no images")

    known = Examples(read, np.zeros(IMAGENET.images, np.int64), ())
    note = f"{spec} does not exist here: its size is assumed to be that of ImageNet-1k"
    return Dataset(
        known, known.take(()), "classes", tuple(map(str, range(1000))), IMAGENET.channels, IMAGENET.size, (note,)
    )


# The printed rows -----------------------------------------------------------------------------------------------------


def _memory_rows(estimate: MemoryEstimate) -> dict[str, str]:
    remarks = {
        "attention weights": "; none with a fused attention kernel",
        "teacher": ", without attention weights",
    }
    rows = {f"  {name}": _format_bytes(size) + remarks.get(name, "") for name, size in estimate.memory.items()}
    return {"memory per device": _format_bytes(estimate.total), **rows}


def _flop_rows(estimate: MemoryEstimate, devices: Devices, recipe: Recipe) -> dict[str, str]:
    each, recomputed = estimate.flops / devices.count, estimate.recomputed / devices.count
    more = f", and {_format_flops(recomputed)} recomputed (--remat {recipe.remat})" if recomputed else ""
    return {"FLOPs per step": f"{_format_flops(estimate.flops)}, {_format_flops(each)} per device{more}"}


def _transfer_rows(estimate: MemoryEstimate, sizes: AxisSizes) -> dict[str, str]:
    if not estimate.transfers:
        return {}
    total = sum(bytes_sent(kind, axes, size, sizes) for (kind, axes), size in estimate.transfers.items())
    rows = {"sent per device and step": _format_bytes(total)}
    for (kind, axes), size in sorted(estimate.transfers.items(), key=lambda item: -item[1]):
        name = f"  {kind}, {_axis_names(axes)}"
        rows[name] = f"{_format_bytes(bytes_sent(kind, axes, size, sizes))}, of arrays of {_format_bytes(size)}"
    return rows


def bytes_sent(kind: str, axes: str, size: float, sizes: AxisSizes) -> float:
    """Return the bytes that a device sends for a collective, if devices pass data on in a ring.

    Each of the n parts of an array passes n - 1 devices, and twice as many if it is summed too (all-reduce).  In an
    all-to-all, a device sends all parts but its own.

    kind, axes, size: an item of `MemoryEstimate.transfers`: the collective, the mesh axes as "data+fsdp", and bytes.
    """
    count = math.prod(sizes[name] for name in axes.split("+"))
    if kind == "collective-permute":
        return size
    return size * (count - 1) / count * (2 if kind == "all-reduce" else 1)


def estimate_step_time(estimate: MemoryEstimate, devices: Devices, sizes: AxisSizes) -> StepTime | None:
    """Return the time of a step; None if the peak FLOP/s or a bandwidth that it depends on is not given.

    A collective along several mesh axes has the lowest of their bandwidths.
    """
    if devices.peak_flops is None:
        return None
    communication: dict[str, float] = {}
    for (kind, axes), size in estimate.transfers.items():
        rates = [devices.bandwidth.get(name, devices.bandwidth.get("")) for name in axes.split("+")]
        if None in rates:
            return None
        slowest = min(rate for rate in rates if rate is not None)
        communication[axes] = communication.get(axes, 0.0) + bytes_sent(kind, axes, size, sizes) / slowest
    compute = (estimate.flops + estimate.recomputed) / devices.count / (devices.peak_flops * devices.utilization)
    return StepTime(compute, communication)


def _time_rows(
    estimate: MemoryEstimate, devices: Devices, sizes: AxisSizes, recipe: Recipe, schedule: Schedule
) -> dict[str, str]:
    step_time = estimate_step_time(estimate, devices, sizes)
    if step_time is None:
        rates = f"{devices.count}x{devices.memory / GIB:g}GiB@989TFLOPs{',450GB/s' if estimate.transfers else ''}"
        return {"time": f"unknown; give the FLOP/s and the bandwidth of a device: --plan {rates}"}
    bounds = [step_time.overlapped, step_time.sequential] if step_time.communication else [step_time.compute]
    peak = _format_flops(devices.peak_flops or 0)
    rows = {
        "time per step": " if communication overlaps, ".join(map(_format_ms, bounds)) + " if not" * (len(bounds) > 1),
        "  compute": f"{_format_ms(step_time.compute)}, {devices.utilization:.0%} of {peak}/s",
        "  communication": ", ".join(
            f"{_format_ms(seconds)} along {_axis_names(axes)}" for axes, seconds in step_time.communication.items()
        ),
        "images/s": " to ".join(f"{recipe.batch_size / seconds:,.0f}" for seconds in reversed(bounds)),
        f"{schedule.total:,} steps": " to ".join(f"{schedule.total * seconds / 3600:,.2f}" for seconds in bounds)
        + " hours",
    }
    return {name: text for name, text in rows.items() if text}


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _axis_names(axes: str) -> str:
    return axes.replace("+", " and ")


def _format_flops(operations: float) -> str:
    """Return a number of operations as text, in GFLOP, TFLOP or PFLOP."""
    for unit, length in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if operations >= length:
            return f"{operations / length:,.2f} {unit}"
    return f"{operations / 1e9:,.2f} GFLOP"


def _format_bytes(size: float) -> str:
    """Return a number of bytes as text, in B to GiB."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:,.2f} {unit}"
    return f"{size:,.0f} B"


# Whether it fits ------------------------------------------------------------------------------------------------------


def _fit_message(
    estimate: MemoryEstimate,
    estimate_memory: Estimator,
    devices: Devices,
    config: ViTConfig,
    recipe: Recipe,
    sizes: AxisSizes,
) -> str:
    memory = devices.memory
    usable = f"the usable {_format_bytes(USABLE_FRACTION * memory)} ({USABLE_FRACTION:.0%} of {_format_bytes(memory)})"
    if estimate.total <= USABLE_FRACTION * devices.memory:
        return f"fits: {_format_bytes(estimate.total)} of {usable}"
    largest = max(estimate.memory, key=estimate.memory.__getitem__)
    state_fits = estimate.state <= USABLE_FRACTION * devices.memory  # a smaller batch does not make the state smaller
    others = ["more devices", "a smaller --batch-size"] if state_fits else ["more devices along fsdp"]
    remedies = _changes_that_fit(estimate_memory, devices, config, recipe, sizes) or others
    return (
        f"does not fit: {_format_bytes(estimate.total)}, more than {usable}; the largest part is {largest} "
        f"({_format_bytes(estimate.memory[largest])}); try {', or '.join(remedies)}"
    )


def _changes_that_fit(
    estimate_memory: Estimator, devices: Devices, config: ViTConfig, recipe: Recipe, sizes: AxisSizes
) -> list[str]:
    """Return the smallest change of --remat, of --accumulate and of --mesh with which the run fits, each as flags.

    If none of them is enough, return the largest of all three together, if that fits.
    """
    local_batch = images_per_device(recipe.batch_size, recipe.accumulate, sizes)
    tensor = f",tensor={sizes['tensor']}" if sizes["tensor"] > 1 else ""
    others = devices.count // sizes["tensor"]
    candidates: dict[str, list[str | int]] = {
        "remat": {"none": ["dots", "full"], "dots": ["full"], "full": []}[recipe.remat],  # type: ignore[dict-item]
        "accumulate": [recipe.accumulate * n for n in range(2, local_batch + 1) if local_batch % n == 0],
        "mesh": [f"data=-1,fsdp={n}{tensor}" for n in range(sizes["fsdp"] + 1, others + 1) if others % n == 0],
    }

    def flags_if_fits(change: dict[str, str | int]) -> list[str]:
        other = replace(recipe, **change)  # type: ignore[arg-type]
        total = estimate_memory(config, other, axis_sizes(other.mesh, devices.count, config)).total
        flags = " ".join(f"--{name} {value}" for name, value in change.items())
        return [f"{flags} ({_format_bytes(total)})"] if total <= USABLE_FRACTION * devices.memory else []

    single = [
        [flags for value in values for flags in flags_if_fits({name: value})][:1] for name, values in candidates.items()
    ]
    largest = {name: values[-1] for name, values in candidates.items() if values}
    return [flags for first in single for flags in first] or flags_if_fits(largest)
