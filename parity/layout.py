"""Where a parameter lives in a format, in one line, and the one function that moves arrays between two such lines.

A parameter is an array with named axes.  A format decides where each axis goes: into the key or into the array,
and merged with which neighbours.  A layout says so as `key | axes`:

    blocks/attn/qkv/kernel            | block width qkv head dim      a bare word is an axis of the array
    blocks.{block}.attn.qkv.weight    | (qkv head dim) width          a {braced} word is spelled out in the key,
    layer.{block}.attn.{qkv}.weight   | (head dim) width              (several) words are merged into one dimension,
    cls_token                         | 1 1 width                     and 1 is a dimension of length one

Two layouts that hold the same words are two addresses of the same numbers.  So a conversion is a strided copy from
one to the other: it computes nothing, it is lossless in every dtype, and its inverse is the two layouts swapped.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vit_spec import InputError

Array = NDArray[Any]
Sizes = Mapping[str, int]  # axis word -> its length
Place = Mapping[str, int]  # axis word -> where on it
Spellings = Mapping[str, tuple[str, ...]]  # axis word -> how its places are spelled in keys; others count from zero

_WORD = r"[a-z]\w*"


@dataclass(frozen=True)
class Layout:
    """One parameter's place in a format.

    key: the key, or the pattern of the keys, with {braced} axis words.
    dims: for each dimension of the array, the axis words merged into it; none for a dimension of length one.
    spellings: how axis words are spelled in the key.
    """

    key: str
    dims: tuple[tuple[str, ...], ...]
    spellings: Spellings = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str, spellings: Spellings | None = None) -> Self:
        """Read a line such as "blocks.{block}.attn.qkv.weight | (qkv head dim) width".

        Raises:
            InputError: quoting the line and what is wrong in it.
        """

        def wrong(what: str) -> InputError:
            return InputError(f"layout {line.strip()!r}: {what}")

        key, bar, axes = (part.strip() for part in line.partition("|"))
        if not bar or not key or not axes or "|" in axes:
            raise wrong("write it as `key | axes`, with one bar")
        if re.search(r"\s", key) or re.search(r"[{}]", re.sub(rf"{{{_WORD}}}", "", key)):
            raise wrong("a key has no blanks, and braces only around one axis word, as in blocks.{block}.norm1.weight")
        dims = []
        for dim in re.findall(r"\([^()]*\)|\S+", axes):
            words = dim[1:-1].split() if dim[0] == "(" and dim[-1] == ")" else [dim]
            words = [] if dim == "1" else words or [dim]
            if not all(re.fullmatch(_WORD, word) for word in words):
                raise wrong(f"{dim!r} is not an axis: write a word, (words to merge) or 1")
            dims.append(tuple(words))
        layout = cls(key, tuple(dims), spellings or {})
        if repeated := sorted({word for word in layout.words if layout.words.count(word) > 1}):
            raise wrong(f"{', '.join(repeated)} appears more than once")
        return layout

    @property
    def spelled(self) -> list[str]:
        """The axis words in the key, in order."""
        return re.findall(rf"{{({_WORD})}}", self.key)

    @property
    def words(self) -> list[str]:
        """Every axis word, of the key and of the array."""
        return self.spelled + [word for dim in self.dims for word in dim]

    @property
    def axes(self) -> str:
        """The array's side of the line, e.g. "(qkv head dim) width"."""
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else "".join(dim) or "1" for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.key} | {self.axes}"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of each array."""
        return tuple(prod(sizes[word] for word in dim) for dim in self.dims)

    def keys(self, sizes: Sizes) -> list[str]:
        """Every key, in order."""
        return [key for key, _ in self.places(sizes, {})]

    def places(self, sizes: Sizes, at: Place) -> Iterator[tuple[str, Place]]:
        """Yield the keys that lie at `at`, each with its place on every axis that the key spells out."""
        spelled = self.spelled
        for numbers in product(*([at[word]] if word in at else range(sizes[word]) for word in spelled)):
            place = dict(zip(spelled, numbers, strict=True))
            spelling = {word: self.spellings[word][n] if word in self.spellings else n for word, n in place.items()}
            yield self.key.format_map(spelling), place

    def view(self, array: Array, sizes: Sizes, at: Place, order: list[str] | None = None) -> tuple[Array, list[str]]:
        """Return a view of the part of an array that lies at `at`, one dimension a word, and its words.

        array: `shape(sizes)`; splitting a dimension never needs a copy.
        order: the words that are left, in the order wanted of the view; by default their own.

        Raises:
            ValueError: an array of another shape.
        """
        if array.shape != self.shape(sizes):
            raise ValueError(f"{self.key} has shape {array.shape}, expected {self.axes} = {self.shape(sizes)}")
        words = [word for dim in self.dims for word in dim]
        split = array.reshape([sizes[word] for word in words])
        part = split[(*(at.get(word, slice(None)) for word in words), ...)]  # `...`: a view even if one entry is left
        left = [word for word in words if word not in at]
        order = left if order is None else order
        return part.transpose([left.index(word) for word in order]), order


Column = Mapping[str, Layout]  # parameter -> its layout in one format


def move(source: Layout, target: Layout, sizes: Sizes, read: Callable[[str], Array], out: Mapping[str, Array]) -> None:
    """Fill the target's arrays of one parameter from the source's, bit by bit.

    read: gives the source's array of a key; asked once for each key, and no array is kept.
    out: the target's arrays, allocated (or mapped) by the caller, of `target.shape(sizes)` and the source's dtype.

    Raises:
        ValueError: layouts that do not hold the same words, or an array of another shape or dtype.
    """
    if sorted(source.words) != sorted(target.words):
        raise ValueError(f"{source} and {target} do not hold the same axes")
    for key, here in source.places(sizes, {}):
        array = read(key)
        for target_key, there in target.places(sizes, here):
            if out[target_key].dtype != array.dtype:
                raise ValueError(f"{key} is {array.dtype}, to be copied into {target_key} of {out[target_key].dtype}")
            to, words = target.view(_bits(out[target_key]), sizes, here)
            to[...] = source.view(_bits(array), sizes, there, words)[0]


def convert(
    source: Column, target: Column, sizes: Sizes, dtypes: Mapping[str, np.dtype[Any]], read: Callable[[str], Array]
) -> Iterator[tuple[str, Array]]:
    """Yield every key of the target column with its new array, parameter by parameter in the order of the column.

    One parameter is held at a time, so that a model streams.  Swapping the columns is the inverse.

    dtypes: of each parameter.
    read: gives the source's array of a key; see `move`.
    """
    for name, layout in target.items():
        out = {key: np.empty(layout.shape(sizes), dtypes[name]) for key in layout.keys(sizes)}
        move(source[name], layout, sizes, read, out)
        yield from out.items()


def _bits(array: Array) -> Array:
    """The same memory as unsigned integers: numpy then copies bits, and never a number."""
    return array.view(f"u{array.itemsize}")
