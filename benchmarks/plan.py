"""Which contestants are measured on which model, batch and settings: the plans for CPUs and for GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from benchmarks.peers import Contestant, contestants
from vit_spec import ViTConfig, memory

MEASURES = ("step", "gradient", "forward", "latency")
CPU_BATCHES = {"vit_ti16": 32, "vit_s16": 32, "vit_b16": 8}
GPU_BATCHES = {"vit_s16": 256, "vit_b16": 128, "vit_l16": 64, "vit_h14": 32}
DETAILED_MODEL = "vit_s16"
DETAILED_BATCH = 8  # of the twins, and of the libraries that are not the main ones
SHORT_MEASURES = ("step", "forward", "latency")
MAIN_CONTESTANTS = ("vit_jax", "vit_torch", "timm", "transformers", "big_vision")
QUICK_BATCHES = {"vit_ti16": 8}
QUICK_LIBRARIES = ("vit_jax", "vit_torch", "timm", "equimo")
GPU_CONTESTANTS = ("vit_jax-bfloat16", "vit_torch-compiled-bfloat16", "timm-compiled-bfloat16", "big_vision-bfloat16")
DEFAULT_BATCH = 8
FIXED_BYTES = 700 << 20  # of a process with a framework, before a model is built


@dataclass(frozen=True)
class Block:
    """Contestants that are measured on one model.

    Attributes:
        model: its name.
        batch_size: images of a batch; latency has one.
        keep_freed_memory: the setting of the allocator on CPUs; see `train.loop.process.keep_freed_memory`.
        contestants: in the order of the table.
        measures: names of the methods of a model that are timed.
    """

    model: str
    batch_size: int
    keep_freed_memory: bool
    contestants: tuple[Contestant, ...]
    measures: tuple[str, ...] = MEASURES


@dataclass(frozen=True)
class Plan:
    """What one run of the command measures.

    Attributes:
        device: "cpu" or "gpu".
        blocks: in the order in which they are measured.
        turns: how often each function of each contestant is timed.
        lines: names of the other measurements; see `benchmarks.lines`.
    """

    device: Literal["cpu", "gpu"]
    blocks: tuple[Block, ...]
    turns: int
    lines: tuple[str, ...] = ()


def chosen(only: Sequence[str], everyone: Sequence[Contestant]) -> tuple[Contestant, ...]:
    """Return the contestants whose names match one of the patterns of `only`; all if there are none."""
    return tuple(each for each in everyone if not only or any(fnmatchcase(each.name, pattern) for pattern in only))


def cpu_plan(batches: dict[str, int], only: Sequence[str], turns: int, lines: tuple[str, ...]) -> Plan:
    """Return the plan for a CPU.  Freed memory is kept, as both trainers keep it.

    With names in `only`, these contestants are measured in full on each model.  Without, the time is limited: the main
    contestants are measured in full on each model, and on vit_s16 also with the default settings of the allocator.  There,
    all others are measured with fewer images, beside the twins.
    """
    blocks = []
    for model, batch_size in batches.items():
        if only:
            blocks.append(Block(model, batch_size, True, chosen(only, contestants())))
            continue
        main = chosen(MAIN_CONTESTANTS, contestants())
        blocks.append(Block(model, batch_size, True, main))
        if model == DETAILED_MODEL:
            others = (each for each in contestants() if each.is_twin or each not in main)
            rest = tuple(each for each in others if not (each.compiled and each.dtype == "bfloat16"))
            blocks.append(Block(model, batch_size, False, main, ("step", "forward")))
            blocks.append(Block(model, min(batch_size, DETAILED_BATCH), True, rest, SHORT_MEASURES))
    return Plan("cpu", tuple(blocks), turns, lines)


def quick_plan(batches: dict[str, int], only: Sequence[str], turns: int) -> Plan:
    """Return a plan of two minutes on two cores: a small model, few contestants, and no other measurements."""
    candidates = contestants() if only else [Contestant(name) for name in QUICK_LIBRARIES]
    return Plan("cpu", tuple(Block(model, size, True, chosen(only, candidates)) for model, size in batches.items()), turns)


def gpu_plan(batches: dict[str, int], only: Sequence[str], turns: int) -> Plan:
    """Return the plan for a GPU: training steps and latency in bfloat16."""
    everyone = [each for each in contestants() if each.name in GPU_CONTESTANTS or only]
    measures = ("step", "latency")
    blocks = (Block(model, size, False, chosen(only, everyone), measures) for model, size in batches.items())
    return Plan("gpu", tuple(blocks), turns)


def groups(block: Block, size: int) -> list[tuple[Contestant, ...]]:
    """Return the contestants in groups of at most `size` that are measured beside each other.

    The twin that a contestant is compared with is in each of its groups, so some twins are in several groups.  Twins are
    compared with one another where both are in the block.

    Args:
        block: the contestants.
        size: at least two.
    """
    found: list[list[Contestant]] = []
    for contestant in block.contestants:
        needs_reference = not contestant.is_twin or contestant.reference in block.contestants
        together = list(dict.fromkeys((contestant.reference, contestant) if needs_reference else (contestant,)))
        if not found or len({*found[-1], *together}) > size:
            found.append([])
        found[-1] += [each for each in together if each not in found[-1]]
    return [tuple(group) for group in found]


def lanes(group: Sequence[Contestant], device: str, *, timed: bool) -> list[tuple[Contestant, ...]]:
    """Return the contestants of a group in lanes: those of a lane are prepared in turn, all lanes at the same time.

    On CPUs, a contestant has the machine for itself while its first step is timed.  On GPUs, the contestants of JAX are in
    one lane, because their compiler times kernels on the GPU to choose among them.

    Args:
        group: the contestants.
        device: "cpu" or "gpu".
        timed: whether the preparation is timed.
    """
    if device == "cpu":
        return [tuple(group)] if timed else [(each,) for each in group]
    alone = [(each,) for each in group if each.of.framework == "torch"]
    together = tuple(each for each in group if each.of.framework != "torch")
    return [*alone, *([together] if together else [])]


def group_size(config: ViTConfig, batch_size: int, device: str, available: int) -> int:
    """Return how many contestants' training steps fit into memory at the same time, at least two.

    Args:
        config: the model.
        batch_size: images of a batch.
        device: "cpu" or "gpu".
        available: bytes of its memory that are free.
    """
    on_gpu = device == "gpu"
    estimate = memory(config, dtype="bfloat16" if on_gpu else "float32", fused_attention=on_gpu)
    step = estimate.training_state + batch_size * estimate.activations
    # Memory that is kept is fragmented, on CPUs more, and libraries store more than they need.
    each = FIXED_BYTES + (1.3 if on_gpu else 1.6) * step
    return max(2, int(0.9 * available / each))
