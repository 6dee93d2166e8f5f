"""Stand-ins for the classes and functions that a pickle names: what the reader of pickles calls or creates instead."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.layout import Array
from vit_spec import InputError

INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, eq=False)
class Global:
    """The stand-in for a class or function that a pickle names.

    name: the full name.
    call: the function to call instead; None if it must not be called.
    is_class: whether instances may be created, as `PickledObject`s.
    """

    name: str
    call: Callable[..., Any] | None = None
    is_class: bool = False


class PickledObject:
    """An instance of a class in a pickle: the name of the class, and the state that the pickle gives it."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


Allowlist = Mapping[str, Global]


def allowlist(
    functions: Mapping[str, Callable[..., Any]], classes: Iterable[str] = (), constants: Iterable[str] = ()
) -> Allowlist:
    """Return the stand-ins by full name: functions to call, classes to instantiate, and constants."""
    return {
        **{name: Global(name, call) for name, call in functions.items()},
        **{name: Global(name, is_class=True) for name in classes},
        **{name: Global(name) for name in constants},
    }


class PickledDtype:
    """A little-endian numpy dtype of a kind and a size, such as "f4"."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[biuf][1248]", code):
            raise InputError(f"it has an entry of numpy's dtype {code[:20]!a}: keep the weights alone in it")
        self.dtype = np.dtype(code)

    def check_byte_order(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise InputError("it has entries of numpy in big-endian order: load it in torch and save tensors")


class PickledArray(StoredArray):
    """An array of numpy, whose entries are in the pickle."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        if not isinstance(kind, Global) or kind.name != "numpy.ndarray":
            raise TypeError("not an array")
        self._entries: Array = np.empty(0, np.uint8)
        self.shape, self.dtype = self._entries.shape, self._entries.dtype

    def set_state(self, version: Any, shape: Any, kind: PickledDtype, is_fortran: bool, data: bytes) -> None:
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError("not a shape")
        self._entries = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if is_fortran else "C")
        self.shape, self.dtype = self._entries.shape, self._entries.dtype

    @classmethod
    def from_buffer(cls, data: bytes, kind: PickledDtype, shape: Any, order: str, axis_order: Any = None) -> "PickledArray":
        """Return an array of pickle protocol 5; `order` is "C", "F", or "K" for axes that `axis_order` permutes."""
        if (order, axis_order is None) not in (("C", True), ("F", True), ("K", False)):
            raise ValueError("not an order")
        array = cls(Global("numpy.ndarray"), (0,), b"b")
        array.set_state(1, shape, kind, order == "F", data)
        if order == "K":
            array._entries = array._entries.transpose(axis_order)
            array.shape = array._entries.shape
        return array

    def read(self, start: int, stop: int) -> Array:
        return self._entries.reshape(-1)[start:stop].copy()


def describe_refused_key(key: Any) -> str:
    """Return what the key of a dictionary is if it is refused, else ""."""
    # Hashing a nested tuple would visit each part of it as often as the memo repeats the part.
    if not isinstance(key, (str, bytes, int, float, PickledObject, Global, type(None))):
        return f"a {type(key).__name__}"
    # A file can choose integers of more than 64 bits that all have the same hash.
    return "an integer of more than 64 bits" if isinstance(key, int) and key not in INT64 else ""


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    """Return a dictionary of pairs, or a copy of another dictionary."""
    result: dict[Any, Any] = {}
    for pair in _items(list(items.items()) if type(items) is dict else items):
        key, value = _items(pair)
        if what := describe_refused_key(key):
            raise InputError(f"it has a dictionary with {what} as a key: keep the weights alone in it")
        result[key] = value
    return result


def _default_dictionary(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _dictionary(items)


def _deque(items: Any = (), max_length: Any = None) -> list[Any]:
    return list(_items(items))


def _items(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError("not a list")
    return value


def _counter(counts: Any) -> dict[Any, Any]:
    if type(counts) is not dict:
        raise TypeError("not counts")
    return counts


def _numpy_scalar(kind: PickledDtype, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype, 1)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(encoding)
    return text.encode("latin1")


def _join_path(*parts: str) -> str:
    return "/".join(parts).replace("//", "/")


def _torch_size(lengths: Any = ()) -> tuple[Any, ...]:
    if not isinstance(lengths, (list, tuple)):
        raise TypeError("not lengths")
    return tuple(lengths)


def _torch_device(kind: str, index: int | None = None) -> str:
    if not isinstance(kind, str) or not (index is None or (type(index) is int and index in INT64)):
        raise TypeError("not a device")
    return kind if index is None else f"{kind}:{index}"


# Classes of the standard library whose instances are neither weights nor metadata: they are read past.
_SKIPPED_CLASSES = (
    *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("bytearray", "complex", "range", "slice")),
    "__builtin__.xrange",
    *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
    "decimal.Decimal",
)

# What makes the missing entries of a defaultdict, which are none of a file.
_FACTORIES = ("bool", "dict", "float", "int", "list", "long", "str", "unicode")

COMMON_GLOBALS = allowlist(
    {
        "collections.Counter": _counter,  # in the state of MultiStepLR
        "collections.OrderedDict": _dictionary,
        "collections.defaultdict": _default_dictionary,
        "__builtin__.set": lambda items: items,
        "builtins.set": lambda items: items,
        "__builtin__.frozenset": lambda items: items,
        "builtins.frozenset": lambda items: items,
        "collections.deque": _deque,
        **dict.fromkeys(_SKIPPED_CLASSES, lambda *_: None),
        "_codecs.encode": _encode,
        **{f"{module}.bytes": lambda: b"" for module in ("__builtin__", "builtins")},
        "numpy.dtype": PickledDtype,
        **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
        **{f"numpy.{core}.multiarray._reconstruct": PickledArray for core in ("core", "_core")},
        **{f"numpy.{core}.numeric._frombuffer": PickledArray.from_buffer for core in ("core", "_core")},
        **{f"pathlib.{name}": _join_path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
        **{f"pathlib._local.{name}": _join_path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
        "torch.Size": _torch_size,
        "torch.device": _torch_device,
    },
    classes=["argparse.Namespace"],
    constants=[*(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in _FACTORIES), "numpy.ndarray"],
)
