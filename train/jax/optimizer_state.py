"""What an optimizer keeps for a parameter, and what it sends for one that a mesh splits: rules, without a framework."""

import math
from collections import Counter

from train.jax.parameter_tree import mesh_axes
from train.mesh import AXES, Parameter, Sizes
from vit_spec import ViTConfig

FACTORED_FROM = 32  # entries of the shorter of an array's two longest axes: big_vision/optax.py, scale_by_adafactor

Sent = Counter[tuple[str, str]]  # entries, by kind of collective and axis of the mesh


def kept(name: str, parameter: Parameter, held: int, config: ViTConfig) -> int:
    """Return how many numbers an optimizer keeps for a parameter of which a device holds so many entries."""
    if name == "adafactor":
        return held + _factored(tuple(config.sizes.get(word, 1) for word in parameter.axes), held)
    if name == "muon":
        return held if is_turned(parameter) else 2 * held
    return {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}[name] * held


def sent(name: str, parameter: Parameter, config: ViTConfig, sizes: Sizes) -> Sent:
    """Return how many entries a step of an optimizer sends for a parameter, as `memory_estimate.Needs.transfers` has them.

    Along no axis ("") stands what a device does alone.
    """
    rules = {"muon": _of_muon, "lamb": _of_lamb, "adafactor": _of_adafactor}
    return rules[name](parameter, config, sizes) if name in rules else Counter()


def is_turned(parameter: Parameter) -> bool:
    """Whether Muon makes orthogonal matrices of a parameter: a block's weights."""
    return parameter.stacked and parameter.row.decays


def dealt(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which Muon deals out the matrices of an array, and how many each device gets.

    They are the axes that split a matrix, after those along which it is whole, while each device finds a matrix to turn.
    """
    count = parameter.row.size // _matrix(parameter, config)
    taken = mesh_axes(parameter, config, sizes)
    splitting = [name for name in AXES if sizes[name] > 1 and name in taken]
    hands, whole = math.prod(sizes[name] for name in splitting), []
    for name in AXES:
        if sizes[name] > 1 and name not in taken and hands * sizes[name] <= count:
            hands *= sizes[name]
            whole.append(name)
    return (*whole, *splitting), -(-count // hands)


def _matrix(parameter: Parameter, config: ViTConfig) -> int:
    """Entries of one of the matrices in a block's array: q, k and v have one each."""
    return math.prod(config.sizes[word] for word in parameter.axes if word in ("width", "head", "dim", "ff"))


def _factored(shape: tuple[int, ...], held: int) -> int:
    """Adafactor's second moments: a row and a column of the two longest axes, where they are long; every device has all.

    optax, transforms/_factorized.py (arXiv 1804.04235).
    """
    axes = _factored_axes(shape)
    return sum(math.prod(shape) // shape[i] for i in axes) if axes else held


def _factored_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The longest axis but one and the longest, where Adafactor factors an array; else none."""
    axes = tuple(sorted(range(len(shape)), key=shape.__getitem__)[-2:])
    return axes if len(axes) == 2 and shape[axes[0]] >= FACTORED_FROM else ()


def _of_muon(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> Sent:
    """Matrices that an axis splits change hands, there and back; where they are whole, the updates are fetched."""
    found: Sent = Counter()
    along, each = dealt(parameter, config, sizes) if is_turned(parameter) else ((), 0)
    size, taken = each * _matrix(parameter, config), mesh_axes(parameter, config, sizes)
    for name in reversed(along):
        if name in taken:
            found["all-to-all", name] += 2 * size
        else:
            size *= sizes[name]
            found["all-gather", name] += size
    return found


def _of_lamb(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> Sent:
    """Two norms of each block's weights and two of their update: optax takes each again, safe from a division by zero."""
    if not (parameter.stacked and parameter.row.decays):
        return Counter()
    taken = mesh_axes(parameter, config, sizes)
    return Counter({("all-reduce", name): 4 * config.depth for name in AXES if name in taken and sizes[name] > 1})


def _of_adafactor(parameter: Parameter, config: ViTConfig, sizes: Sizes) -> Sent:
    """Means over either of the two longest axes, and over both: summed where these are split, and fetched by all."""
    found: Sent = Counter()
    shape = tuple(config.sizes.get(word, 1) for word in parameter.axes)
    if not (axes := _factored_axes(shape)):
        return found
    names = [name if name is not None and sizes[name] > 1 else None for name in mesh_axes(parameter, config, sizes)]
    held = [length // (sizes[name] if name else 1) for length, name in zip(shape, names, strict=True)]
    for gone in axes:
        rest = [i for i in range(len(shape)) if i != gone]
        size = math.prod(held[i] for i in rest)
        found["all-reduce", names[gone] or ""] += size
        for i in reversed(rest):  # as the compiler does: the last axis first
            size *= shape[i] // held[i]
            found["all-gather", names[i] or ""] += size
    if len(shape) > 2:  # else it is a single number
        found["all-reduce", names[axes[0]] or ""] += math.prod(held) // math.prod(held[i] for i in axes)
    return found
