"""What a compiled step does with memory and between devices, read off the program that XLA made of it.

Collectives are those of HLO (openxla.org/xla/operation_semantics).  Groups of devices come in three spellings: listed;
`[4,2]<=[2,2,2]T(2,1,0)`, numbers that are counted, transposed and cut (xla/hlo/ir/tile_assignment.h); and
`mesh['a'=2,'b'=4] {'a'}`, axes of a mesh of the compiler's own.
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
    """A compiled step, as one device sees it.

    arguments, outputs, aliased, temporary: bytes; what is aliased is argument and output in one place.
    transfers: bytes a step by kind of collective and the mesh axes that it goes along, such as ("all-reduce",
        "data+fsdp"): what is gathered, summed or sent, as it is when whole.
    scalars: bytes a step of sums of single numbers, such as the loss, in all; they are not among the transfers.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    transfers: Transfers
    scalars: int


class Collective(NamedTuple):
    """One instruction: how often a step runs it, and the shapes that it gathers, sums or sends, with their bytes."""

    kind: str
    axes: str
    times: int
    arrays: tuple[tuple[tuple[int, ...], int], ...]


def program(compiled: Any, sizes: Mapping[str, int]) -> Program:
    """Read a compiled step.

    compiled: what `jax.jit(...).lower(...).compile()` gives.
    sizes: the mesh's axes in the order of its devices.

    Raises:
        ValueError: a loop of unknown length moves data, or a group of devices fits no axes.
    """
    memory = compiled.memory_analysis()
    found = list(collectives(compiled.as_text(), sizes))
    transfers: Counter[tuple[str, str]] = Counter()
    for each in found:
        transfers[each.kind, each.axes] += each.times * sum(size for shape, size in each.arrays if shape)
    return Program(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        {key: size for key, size in transfers.items() if size},
        sum(each.times * size for each in found for shape, size in each.arrays if not shape),
    )


def collectives(text: str, sizes: Mapping[str, int]) -> Iterator[Collective]:
    """Yield every collective of an optimized HLO module; what a loop holds counts as often as the loop turns."""
    bodies = _computations(text)
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    assert entry is not None, "no HLO module"
    return _walk(entry[1], 1, bodies, sizes)


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            lines = found.setdefault(head[1], [])
        elif " = " in line:
            lines.append(line)
    return found


def _walk(name: str, times: int, bodies: Mapping[str, list[str]], sizes: Mapping[str, int]) -> Iterator[Collective]:
    for line in bodies[name]:
        if found := re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
            yield _collective(found[2], found[1], found[3] is not None, line, times, sizes)
        elif re.search(r" while\(", line):
            body = re.search(r"body=%?([\w.-]+)", line)
            count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            assert body is not None
            inside = list(_walk(body[1], int(count[1]) if count else 0, bodies, sizes))
            if inside and count is None:
                raise ValueError(f"the loop {body[1]} moves data between devices and says not how often")
            yield from (each._replace(times=each.times * times) for each in inside)
        else:
            for called in re.findall(r"(?:calls|to_apply|computation)=%?([\w.-]+)", line):
                yield from _walk(called, times, bodies, sizes)


def _collective(kind: str, result: str, starts: bool, line: str, times: int, sizes: Mapping[str, int]) -> Collective:
    if "source_target_pairs" in line:
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
        assert pairs is not None
        groups = np.asarray([[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
        groups = groups[groups[:, 0] != groups[:, 1]]
    else:
        groups = _groups(line, math.prod(sizes.values()))
    if starts and (kind != "all-reduce" or result.startswith("((")):  # operands come ahead of results
        result = _halves(result)[1]
    arrays = tuple(_arrays(result))
    if kind == "reduce-scatter":
        arrays = tuple((shape, size * groups.shape[1]) for shape, size in arrays)
    return Collective(kind, _axes(groups, sizes, kind == "collective-permute"), times, arrays)


def _arrays(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shape and bytes of each array of a type, such as "(f32[8,5]{1,0}, u8[])"."""
    for word, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text):
        shape = tuple(int(n) for n in dims.split(",") if n)
        yield shape, math.prod(shape) * _bytes(word)


def _bytes(word: str) -> int:
    """Bytes of an element: "bf16", "f32", "pred"."""
    digits = re.search(r"\d+", word)
    return max(1, int(digits[0]) // 8) if digits else 1


def _halves(text: str) -> list[str]:
    """The elements of a tuple's type."""
    found, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _groups(line: str, devices: int) -> np.ndarray:
    """The groups of devices among which a collective works, (groups, devices of each)."""
    text = line[line.index("replica_groups=") + len("replica_groups=") :]
    if text.startswith("{"):
        listed = re.match(r"\{(.*?)\}(?=[,\s]|$)(?!,\{)", text)
        inner = re.findall(r"\{([\d,]+)\}", listed[1] + "}") if listed else []
        return np.asarray([_numbers(group) for group in inner] or [tuple(range(devices))])
    if text.startswith("mesh["):
        return _mesh_groups(text)
    counted = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    assert counted is not None, text
    return _counted(counted[2]).reshape(_numbers(counted[1]))


def _mesh_groups(text: str) -> np.ndarray:
    found = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?\))\))? \{(.*?)\}", text)
    assert found is not None, text
    names, lengths = zip(*re.findall(r"'([^']*)'=(\d+)", found[1]), strict=True)
    shape, taken = tuple(map(int, lengths)), [names.index(name) for name in re.findall(r"'([^']*)'", found[3])]
    ids = _counted(found[2]) if found[2] else np.arange(math.prod(shape))
    ids = np.moveaxis(ids.reshape(shape), taken, range(-len(taken), 0))
    return ids.reshape(-1, math.prod(shape[axis] for axis in taken))


def _counted(text: str) -> np.ndarray:
    """What "[2,4]T(1,0)" spells: numbers from 0 on in that shape, transposed so."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text)
    assert found is not None, text
    shape = _numbers(found[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(found[2])) if found[2] else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _axes(groups: np.ndarray, sizes: Mapping[str, int], pairs: bool) -> str:
    """The mesh axes that groups go along: "data+fsdp"."""
    places = np.stack(np.unravel_index(groups, tuple(sizes.values())), -1)  # (groups, devices, axes)
    moves = (places != places[:, :1]).any((0, 1))
    if not pairs and math.prod(size for size, moved in zip(sizes.values(), moves, strict=True) if moved) != groups.shape[1]:
        raise ValueError(f"groups of devices that are no axes of the mesh: {groups.tolist()}")
    return "+".join(name for name, moved in zip(sizes, moves, strict=True) if moved)
