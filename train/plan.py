"""`--plan`: what a run would need on devices that are not here, and whether they have it.

    --plan 64x80GiB                                  memory, operations and transfers of a run on 64 devices of 80 GiB
    --plan 64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s    and how long it would take

After @ come what a device computes in a second at best, the share of it that a step reaches (40 % where none is given), and
what a device sends in a second: along every axis of the mesh, or along the one that is named.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from parity.terminal import Terminal
from train.data.sources import Examples, Source, open_source
from train.jax.memory_estimate import Needs, needs
from train.loop.loop import Plan
from train.loop.request import Request
from train.loop.session import network, tell, title
from train.mesh import AXES, Sizes, replicated, share_batch, sizes_for
from train.recipes import IMAGENET, Recipe
from train.recipes.param_groups import multipliers
from vit_spec import InputError, ViTConfig, nearest

GIB = 1 << 30
UNITS = {"T": 1e12, "P": 1e15}
USABLE = 0.9  # of a device's memory: what else is there are programs, the kernels' scratch space, and gaps
PLACES = ("folder", "parquet", "hf", "npz", "idx", "cifar", "csv", "tar")
FORM = "write such as 64x80GiB or 64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s"


@dataclass(frozen=True)
class Devices:
    """So many devices with `memory` bytes each.

    peak: operations a second at best, or None; reached: the share of it that a step reaches.
    links: bytes that a device sends in a second, by axis; "" is any other.
    """

    count: int
    memory: int
    peak: float | None = None
    reached: float = 0.4
    links: dict[str, float] = field(default_factory=dict)


class Times(NamedTuple):
    """Seconds of a step: of computing, and of sending along each group of axes."""

    computing: float
    sending: dict[str, float]

    @property
    def least(self) -> float:
        """Where all that is sent travels while something else is computed."""
        return max(self.computing, *self.sending.values(), 0.0)

    @property
    def most(self) -> float:
        """Where a device waits for all that is sent."""
        return self.computing + sum(self.sending.values())


def plan(request: Request, text: str) -> int:
    """Print what the run that is asked for needs of the devices in `text`; return 0 where they have it, else 1.

    Raises:
        InputError: devices, a mesh or a recipe that is not understood, or that do not fit each other.
    """
    devices, source, recipe = parse(text), request.source, request.recipe
    task = recipe.task or source.kind
    config, _, notes = network(recipe, source, task)
    course = Plan.of(recipe, len(source.train))
    multipliers(config, freeze=recipe.optimizer.freeze)  # which refuses what training would
    recipe = replace(recipe, task=task)
    sizes = sizes_for(recipe.mesh, devices.count, config)
    found = needs(config, recipe, sizes)
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    said = [*source.notes, *notes, *filter(None, [replicated(config, sizes)])]
    share = share_batch(recipe.batch_size, recipe.accumulate, sizes)
    parts = f" in each of {recipe.accumulate} parts" if recipe.accumulate > 1 else ""
    side = "x".join(map(str, config.image_size))
    rows = {
        "run": title(request.name, recipe, config),
        "images": f"{len(source.train):,} of {side}, {len(source.classes):,} {source.kind}",
        **{"assumed" if not i else " " * i: note for i, note in enumerate(said)},
        "devices": f"{devices.count} of {_size(devices.memory)}: {axes}",
        "a step": f"{recipe.batch_size:,} images, {share} on a device{parts}",
        **_memory(found),
        **_operations(found, devices, recipe),
        **_transfers(found, sizes),
        **_time(found, devices, sizes, recipe, course),
    }
    console = Terminal()
    tell(console, rows)
    fits = found.total <= USABLE * devices.memory
    console.print(_verdict(found, devices, config, recipe, sizes), soft_wrap=True, highlight=False)
    return 0 if fits else 1


def parse(text: str) -> Devices:
    """Return the devices that "64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s" speaks of.

    Raises:
        InputError: anything else.
    """
    machine, at, rates = text.replace(" ", "").partition("@")
    found = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)GiB", machine)
    if not found or bool(at) != bool(rates) or not float(found[2]):
        raise InputError(f"--plan {text!r} is not understood: {FORM}")
    devices = Devices(int(found[1]), int(float(found[2]) * GIB))
    for rate in filter(None, rates.split(",")):
        devices = _with_rate(devices, rate)
    return devices


def _with_rate(devices: Devices, text: str) -> Devices:
    """The devices with one rate more."""
    number = r"(\d+(?:\.\d+)?)"
    if found := re.fullmatch(rf"{number}([TP])FLOPs?(?:/s)?", text):
        return replace(devices, peak=float(found[1]) * UNITS[found[2]])
    if (found := re.fullmatch(rf"{number}%", text)) and 0 < float(found[1]) <= 100:
        return replace(devices, reached=float(found[1]) / 100)
    if (found := re.fullmatch(rf"(?:(\w+)=)?{number}GB/s", text)) and float(found[2]):
        axis = found[1] or ""
        if axis and axis not in AXES:
            raise InputError(f"--plan has an unknown axis {axis!r}: give {', '.join(AXES)}{nearest(axis, AXES)}")
        return replace(devices, links=devices.links | {axis: float(found[2]) * 1e9})
    raise InputError(f"--plan has {text!r}, which is no rate: {FORM}")


def opened(spec: str, held_out: float | str | None = None) -> Source:
    """Open a data set, or stand ImageNet-1k's numbers in for one whose place is not on this machine.

    Raises:
        InputError: data that are here and cannot be used, or of an unknown kind.
    """
    kind, _, place = spec.partition(":")
    try:
        return open_source(spec, held_out)
    except InputError:
        if kind not in PLACES or not place or Path(place.partition("?")[0]).exists():
            raise

    def read(row: int) -> Image.Image:
        raise InputError(f"{spec} is not here: a plan reads no images")

    known = Examples(read, np.zeros(IMAGENET.images, np.int64), ())
    note = f"{spec} is not here: the numbers are those of ImageNet-1k"
    return Source(known, known.take(()), "classes", tuple(map(str, range(1000))), IMAGENET.channels, IMAGENET.size, (note,))


# What is printed ------------------------------------------------------------------------------------------------------


def _memory(found: Needs) -> dict[str, str]:
    remarks = {"attention weights": "; none where attention is a fused kernel"}
    rows = {f"  {name}": _size(size) + remarks.get(name, "") for name, size in found.memory.items()}
    return {"memory of a device": _size(found.total), **rows}


def _operations(found: Needs, devices: Devices, recipe: Recipe) -> dict[str, str]:
    each, again = found.flops / devices.count, found.recomputed / devices.count
    more = f", and {_flops(again)} a second time (--remat {recipe.remat})" if again else ""
    return {"operations of a step": f"{_flops(found.flops)}, {_flops(each)} on a device{more}"}


def _transfers(found: Needs, sizes: Sizes) -> dict[str, str]:
    if not found.transfers:
        return {}
    moved = sum(sent(kind, axes, size, sizes) for (kind, axes), size in found.transfers.items())
    rows = {"sent by a device in a step": _size(moved)}
    for (kind, axes), size in sorted(found.transfers.items(), key=lambda item: -item[1]):
        name = f"  {kind}, {_words(axes)}"
        rows[name] = f"{_size(sent(kind, axes, size, sizes))}, of arrays of {_size(size)}"
    return rows


def sent(kind: str, axes: str, size: int, sizes: Sizes) -> float:
    """Return the bytes that a device sends, for one of `Needs.transfers`, where devices pass data on in a ring.

    Each part goes once round, or twice where it is summed too; of what changes hands, each part but one's own goes away.
    """
    count = math.prod(sizes[name] for name in axes.split("+"))
    if kind == "collective-permute":
        return size
    return size * (count - 1) / count * (2 if kind == "all-reduce" else 1)


def times(found: Needs, devices: Devices, sizes: Sizes) -> Times | None:
    """Return how long a step takes, or None where a rate that it depends on is not known.

    Along several axes the slowest link counts.
    """
    if devices.peak is None:
        return None
    sending: dict[str, float] = {}
    for (kind, axes), size in found.transfers.items():
        rates = [devices.links.get(name, devices.links.get("")) for name in axes.split("+")]
        if None in rates:
            return None
        slowest = min(rate for rate in rates if rate is not None)
        sending[axes] = sending.get(axes, 0.0) + sent(kind, axes, size, sizes) / slowest
    computing = (found.flops + found.recomputed) / devices.count / (devices.peak * devices.reached)
    return Times(computing, sending)


def _time(found: Needs, devices: Devices, sizes: Sizes, recipe: Recipe, course: Plan) -> dict[str, str]:
    took = times(found, devices, sizes)
    if took is None:
        rates = f"{devices.count}x{devices.memory / GIB:g}GiB@989TFLOPs{',450GB/s' if found.transfers else ''}"
        return {"time": f"not known without what a device computes and sends in a second: --plan {rates}"}
    bounds = [took.least, took.most] if took.sending else [took.computing]
    rows = {
        "time of a step": " if sending hides behind computing, ".join(map(_ms, bounds)) + " if not" * (len(bounds) > 1),
        "  computing": f"{_ms(took.computing)}, at {devices.reached:.0%} of {_flops(devices.peak or 0)}/s",
        "  sending": ", ".join(f"{_ms(seconds)} along {_words(axes)}" for axes, seconds in took.sending.items()),
        "images a second": " to ".join(f"{recipe.batch_size / seconds:,.0f}" for seconds in reversed(bounds)),
        f"{course.total:,} steps": " to ".join(f"{course.total * seconds / 3600:,.2f}" for seconds in bounds) + " hours",
    }
    return {name: text for name, text in rows.items() if text}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _words(axes: str) -> str:
    return axes.replace("+", " and ")


def _flops(operations: float) -> str:
    """Operations as a person says them."""
    for unit, length in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if operations >= length:
            return f"{operations / length:,.2f} {unit}"
    return f"{operations / 1e9:,.2f} GFLOP"


def _size(size: float) -> str:
    """Bytes as a person says them."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:,.2f} {unit}"
    return f"{size:,.0f} B"


# The verdict ----------------------------------------------------------------------------------------------------------


def _verdict(found: Needs, devices: Devices, config: ViTConfig, recipe: Recipe, sizes: Sizes) -> str:
    usable = f"the {_size(USABLE * devices.memory)} that are usable of {_size(devices.memory)}"
    if found.total <= USABLE * devices.memory:
        return f"fits: {_size(found.total)} of {usable}"
    largest = max(found.memory, key=found.memory.__getitem__)
    lasting = found.state > USABLE * devices.memory  # which fewer images do not make smaller
    others = ["more devices along fsdp"] if lasting else ["more devices", "a smaller --batch-size"]
    remedies = _remedies(devices, config, recipe, sizes) or others
    return (
        f"does not fit: {_size(found.total)}, more than {usable}; the largest is {largest} "
        f"({_size(found.memory[largest])}); try {', or '.join(remedies)}"
    )


def _remedies(devices: Devices, config: ViTConfig, recipe: Recipe, sizes: Sizes) -> list[str]:
    """The smallest change of each kind after which the run fits, or else the largest of every kind together."""
    share = share_batch(recipe.batch_size, recipe.accumulate, sizes)
    tensor = f",tensor={sizes['tensor']}" if sizes["tensor"] > 1 else ""
    holders = devices.count // sizes["tensor"]
    kinds: dict[str, list[str | int]] = {
        "remat": {"none": ["dots", "full"], "dots": ["full"], "full": []}[recipe.remat],  # type: ignore[dict-item]
        "accumulate": [recipe.accumulate * n for n in range(2, share + 1) if share % n == 0],
        "mesh": [f"data=-1,fsdp={n}{tensor}" for n in range(sizes["fsdp"] + 1, holders + 1) if holders % n == 0],
    }

    def fitting(change: dict[str, str | int]) -> list[str]:
        other = replace(recipe, **change)  # type: ignore[arg-type]
        total = needs(config, other, sizes_for(other.mesh, devices.count, config)).total
        words = " ".join(f"--{name} {value}" for name, value in change.items())
        return [f"{words} ({_size(total)})"] if total <= USABLE * devices.memory else []

    single = [[each for value in values for each in fitting({name: value})][:1] for name, values in kinds.items()]
    everything = {name: values[-1] for name, values in kinds.items() if values}
    return [each for found in single for each in found] or fitting(everything)
