"""Memory and communication of a compiled JAX function, read from XLA's optimized program (HLO).

`benchmarks.mesh`, `benchmarks.cross_compile` and tests use these functions; the module is not a command.

Collectives are those of HLO (openxla.org/xla/operation_semantics).  HLO writes groups of devices in three ways: as lists;
as `[4,2]<=[2,2,2]T(2,1,0)`, which is an iota that is reshaped, transposed and reshaped (xla/hlo/ir/tile_assignment.h); and
as `mesh['a'=2,'b'=4] {'a'}`, axes of a mesh that the compiler defines.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "collective-broadcast")
Transfers = dict[tuple[str, str], int]


class Program(NamedTuple):
    """Memory and communication of a compiled step.

    arguments, outputs, aliased, temporary: bytes per device; aliased buffers are both argument and output.
    transfers: bytes per step by kind of collective and mesh axes, such as ("all-reduce", "data+fsdp"): the size of the
        whole array that is gathered, summed or sent.
    scalars: total bytes per step of collectives of scalars, such as the loss; they are not among the transfers.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    transfers: Transfers
    scalars: int


class Collective(NamedTuple):
    """A collective instruction.

    kind: one of `KINDS`.
    axes: the mesh axes along which it communicates, such as "data+fsdp".
    times: how often a step executes it.
    arrays: shape and bytes of each array that it gathers, sums or sends.
    """

    kind: str
    axes: str
    times: int
    arrays: tuple[tuple[tuple[int, ...], int], ...]


def analyze_program(compiled: Any, sizes: Mapping[str, int]) -> Program:
    """Return the memory and communication of a compiled step.

    compiled: the result of `jax.jit(...).lower(...).compile()`.
    sizes: the length of each mesh axis, in the order of the mesh.

    Raises:
        ValueError: a loop of unknown trip count contains a collective, or a group of devices is not along mesh axes.
    """
    memory = compiled.memory_analysis()
    instructions = list(collectives(compiled.as_text(), sizes))
    transfers: Counter[tuple[str, str]] = Counter()
    for each in instructions:
        transfers[each.kind, each.axes] += each.times * sum(size for shape, size in each.arrays if shape)
    return Program(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        {key: size for key, size in transfers.items() if size},
        sum(each.times * size for each in instructions for shape, size in each.arrays if not shape),
    )


def collectives(text: str, sizes: Mapping[str, int]) -> Iterator[Collective]:
    """Yield every collective of an optimized HLO module; one inside a loop counts once for each iteration."""
    computations = _computations(text)
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    assert entry is not None, "no HLO module"
    return _walk_computation(entry[1], 1, computations, sizes)


def _computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of each computation of an HLO module by its name."""
    computations: dict[str, list[str]] = {}
    instructions: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            instructions = computations.setdefault(head[1], [])
        elif " = " in line:
            instructions.append(line)
    return computations


def _walk_computation(
    name: str, times: int, computations: Mapping[str, list[str]], sizes: Mapping[str, int]
) -> Iterator[Collective]:
    for line in computations[name]:
        if match := re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
            yield _parse_collective(match[2], match[1], match[3] is not None, line, times, sizes)
        elif re.search(r" while\(", line):
            body = re.search(r"body=%?([\w.-]+)", line)
            trip_count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            assert body is not None
            inside = list(_walk_computation(body[1], int(trip_count[1]) if trip_count else 0, computations, sizes))
            if inside and trip_count is None:
                raise ValueError(f"the loop {body[1]} contains a collective, and its trip count is not known")
            yield from (each._replace(times=each.times * times) for each in inside)
        else:
            for called in re.findall(r"(?:calls|to_apply|computation)=%?([\w.-]+)", line):
                yield from _walk_computation(called, times, computations, sizes)


def _parse_collective(
    kind: str, result: str, is_start: bool, line: str, times: int, sizes: Mapping[str, int]
) -> Collective:
    if "source_target_pairs" in line:
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
        assert pairs is not None
        groups = np.asarray([[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
        groups = groups[groups[:, 0] != groups[:, 1]]
    else:
        groups = _device_groups(line, math.prod(sizes.values()))
    if is_start and (kind != "all-reduce" or result.startswith("((")):  # a tuple of operands and results
        result = _split_tuple(result)[1]
    arrays = tuple(_parse_arrays(result))
    if kind == "reduce-scatter":
        arrays = tuple((shape, size * groups.shape[1]) for shape, size in arrays)
    return Collective(kind, _mesh_axes_of(groups, sizes, kind == "collective-permute"), times, arrays)


def _parse_arrays(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the shape and bytes of each array in a type, such as "(f32[8,5]{1,0}, u8[])"."""
    for word, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text):
        shape = tuple(int(n) for n in dims.split(",") if n)
        yield shape, math.prod(shape) * _itemsize(word)


def _itemsize(word: str) -> int:
    """Return the bytes of an element of an HLO dtype: "bf16", "f32", "pred"."""
    digits = re.search(r"\d+", word)
    return max(1, int(digits[0]) // 8) if digits else 1


def _split_tuple(text: str) -> list[str]:
    """Return the types of the elements of a tuple type."""
    elements, depth = [""], 0
    for char in text[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            elements.append("")
        else:
            elements[-1] += char
    return elements


def _device_groups(line: str, devices: int) -> np.ndarray:
    """Return the groups of devices that communicate with one another, (groups, devices per group)."""
    text = line[line.index("replica_groups=") + len("replica_groups=") :]
    if text.startswith("{"):
        match = re.match(r"\{(.*?)\}(?=[,\s]|$)(?!,\{)", text)
        inner = re.findall(r"\{([\d,]+)\}", match[1] + "}") if match else []
        return np.asarray([_parse_integers(group) for group in inner] or [tuple(range(devices))])
    if text.startswith("mesh["):
        return _mesh_groups(text)
    match = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    assert match is not None, text
    return _parse_iota(match[2]).reshape(_parse_integers(match[1]))


def _mesh_groups(text: str) -> np.ndarray:
    match = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?\))\))? \{(.*?)\}", text)
    assert match is not None, text
    axis_names, lengths = zip(*re.findall(r"'([^']*)'=(\d+)", match[1]), strict=True)
    shape, used_axes = tuple(map(int, lengths)), [axis_names.index(name) for name in re.findall(r"'([^']*)'", match[3])]
    ids = _parse_iota(match[2]) if match[2] else np.arange(math.prod(shape))
    ids = np.moveaxis(ids.reshape(shape), used_axes, range(-len(used_axes), 0))
    return ids.reshape(-1, math.prod(shape[axis] for axis in used_axes))


def _parse_iota(text: str) -> np.ndarray:
    """Return the array that "[2,4]T(1,0)" denotes: an iota of that shape, transposed by that permutation."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text)
    assert match is not None, text
    shape = _parse_integers(match[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_parse_integers(match[2])) if match[2] else ids


def _parse_integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _mesh_axes_of(groups: np.ndarray, sizes: Mapping[str, int], is_permute: bool) -> str:
    """Return the mesh axes along which the devices of each group differ: "data+fsdp"."""
    coordinates = np.stack(np.unravel_index(groups, tuple(sizes.values())), -1)  # (groups, devices, axes)
    is_crossed = (coordinates != coordinates[:, :1]).any((0, 1))
    if (
        not is_permute
        and math.prod(size for size, crossed in zip(sizes.values(), is_crossed, strict=True) if crossed) != groups.shape[1]
    ):
        raise ValueError(f"the groups of devices are not along axes of the mesh: {groups.tolist()}")
    return "+".join(name for name, crossed in zip(sizes, is_crossed, strict=True) if crossed)
