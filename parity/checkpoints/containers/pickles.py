"""Reading pickles without running anything: what a pickle names is looked up in a table of inert stand-ins, or refused.

A pickle is a program, so no filter on its result can help.  Here its instructions are a short list, the only things it
can call are functions of this file, and what it builds are dictionaries, lists, text, numbers, `Record`s and tensors.

The base is the Python version of the standard library's unpickler: the one in C lets an instruction of five bytes
choose how much memory its memo takes, the Python one keeps the memo in a dictionary.  Every instruction is counted
against a `Budget`, and a call besides by the size of its arguments, because the memo lets a short pickle repeat long ones.
"""

import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Stored, Words
from vit_spec import InputError

LIMIT = 1 << 24  # bytes of pickle; those of the largest published ViTs, with optimizer, are a twentieth of it
_NODES, _DEPTH = 1 << 18, 64  # of a tree: memo references make a small pickle as large, or as endless, as it likes
_MARKS = 1 << 10  # open at a time; each takes ten times the memory of another instruction
_CALL = 8  # instructions that a call counts as
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, eq=False)
class Global:
    """What stands for a class or function that a pickle names.

    name: the full name.
    call: what calling it gives; None where it is never called.
    record: whether objects of it are made, as `Record`s.
    """

    name: str
    call: Callable[..., Any] | None = None
    record: bool = False


class Record:
    """An object of some class: its name and the state it was given."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None


Table = Mapping[str, Global]


def table(calls: Mapping[str, Callable[..., Any]], records: Iterable[str] = (), values: Iterable[str] = ()) -> Table:
    """Return the stand-ins for functions, classes and constants by full name."""
    return {
        **{name: Global(name, call) for name, call in calls.items()},
        **{name: Global(name, record=True) for name in records},
        **{name: Global(name) for name in values},
    }


Storage = Callable[[Any], Any]  # what a persistent id, such as torch's storages, stands for


def load(data: bytes, where: str, known: Table, budget: Budget, storage: Storage | None = None, **options: Any) -> Any:
    """Return what a pickle holds.

    where: the file, for messages.
    known: the stand-ins for all that it may name, besides `COMMON`.
    options: as of `load_first`.

    Raises:
        InputError: a pickle that is damaged or too long, or that asks for anything else.
    """
    return load_first(data, where, known, budget, storage, **options)[0]


def load_first(
    data: bytes,
    where: str,
    known: Table,
    budget: Budget,
    storage: Storage | None = None,
    *,
    longest: int = LIMIT,
    encoding: str = "utf-8",
) -> tuple[Any, int]:
    """Return what the first of several pickles holds, and the number of its bytes; the rest as `load`.

    longest: bytes that it may have.
    encoding: of the text of Python 2.
    """
    if len(data) > longest:
        raise InputError(
            f"{where} describes its arrays in {len(data)} bytes, more than {longest}: keep the weights alone in it"
        )
    file = io.BytesIO(data)
    try:
        return _Unpickler(file, where, {**COMMON, **known}, budget, storage, encoding).load(), file.tell()
    except InputError as error:
        raise InputError(_named(where, error)) from None
    except Exception as error:  # a damaged pickle fails in as many ways as Python has exceptions
        raise InputError(f"{where} is damaged ({type(error).__name__} in its pickle): fetch or write it again") from None


def _named(where: str, error: InputError) -> str:
    return str(error) if str(error).startswith(str(InputError(where))) else f"{where}: {error}"


def flatten(tree: Any, where: str, budget: Budget) -> tuple[dict[Words, Stored], dict[str, Any]]:
    """Return the arrays of a tree by path, and its text, numbers and flags by path joined with "/".

    Raises:
        InputError: a tree that is endless or too large, or has two entries under one path.
    """
    try:
        return _flattened(tree, where, budget)
    except InputError as error:
        raise InputError(_named(where, error)) from None


def _flattened(tree: Any, where: str, budget: Budget) -> tuple[dict[Words, Stored], dict[str, Any]]:
    arrays: dict[Words, Stored] = {}
    notes: dict[str, Any] = {}
    todo: list[tuple[Words, Any]] = [((), tree)]
    for _ in range(_NODES):
        if not todo:
            return arrays, notes
        path, node = todo.pop()
        node = node.state if isinstance(node, Record) else node.name if isinstance(node, Global) else node
        if isinstance(node, (list, tuple, dict)) and len(todo) + len(node) > _NODES:
            break
        if isinstance(node, (list, tuple)):
            node = dict(enumerate(node))
        if isinstance(node, dict):
            if len(path) == _DEPTH:
                break
            budget.make(len(node), 8 * len(node) * (len(path) + 1))
            todo += [((*path, _word(key, where)), value) for key, value in reversed(node.items())]
        elif isinstance(node, Stored):
            if path in arrays:
                raise InputError(f"{where} holds {'/'.join(path)!r} twice: keep one of them")
            budget.make(1, sum(map(len, path)))
            arrays[path] = node
        elif isinstance(node, (str, float, bool)) or (isinstance(node, int) and node in _INT64):
            budget.make(1, sum(map(len, path)))
            notes["/".join(path)] = node
    raise InputError(f"{where} holds more than {_NODES} entries, or is nested endlessly: keep the weights alone in it")


def _word(key: Any, where: str) -> str:
    if isinstance(key, (str, float)) or (isinstance(key, int) and key in _INT64):
        return str(key)
    raise InputError(f"{where} has an entry whose key is no text and no number: keep the weights alone in it")


_Machine: Any = pickle._Unpickler  # whose instructions, stack and memo have no declared types


class _Dispatch:
    """The instructions of a machine, each counted when it is fetched."""

    def __init__(self, budget: Budget, table: Mapping[int, Callable[[Any], None]]) -> None:
        self._budget, self._table = budget, table

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self._budget.nodes -= 1
        if self._budget.nodes < 0:
            self._budget.make(0)  # which raises
        return self._table[code]


class _Unpickler(_Machine):  # type: ignore[misc]
    """The pickle machine with a short list of instructions, none of which calls anything but a `Global`."""

    def __init__(
        self, file: io.BytesIO, where: str, known: Table, budget: Budget, storage: Storage | None, encoding: str
    ) -> None:
        super().__init__(file, encoding=encoding)
        self.where, self.known, self.budget, self.storage = where, known, budget, storage
        self.dispatch = _Dispatch(budget, _INSTRUCTIONS)

    def refuse(self, what: str) -> InputError:
        what = what if what.isprintable() and len(what) < 200 else ascii(what[:200])
        return InputError(
            f"{self.where} asks {what}: weights never need code, so ask for a file of tensors alone, or for safetensors"
        )

    def find_class(self, module: str, name: str) -> Global:
        self.budget.make(_CALL, len(module) + len(name))
        full = f"{module}.{name}"
        if full in self.known:
            return self.known[full]
        if module.startswith("__torch__"):  # a module of a TorchScript archive: its code stays where it is
            return Global(full, record=True)
        raise self.refuse(f"to call {full}")

    def persistent_load(self, pid: Any) -> Any:
        if self.storage is None:
            raise self.refuse("for an object outside it")
        self.count(pid)
        return self.storage(pid)

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or function.call is None or not isinstance(arguments, tuple):
            raise self.refuse(f"to call {getattr(function, 'name', 'what is no function')}")
        self.count(arguments)
        self.append(function.call(*arguments))

    def count(self, arguments: Any) -> None:
        """Count a call: every function of this layer makes at most a few times as much as its arguments hold."""
        if not isinstance(arguments, tuple):
            raise self.refuse("to call something with what is no list of arguments")
        self.budget.make(_CALL + len(arguments))
        text = sum(len(each) for each in arguments if isinstance(each, (str, bytes)))
        items = sum(len(each) for each in arguments if isinstance(each, (tuple, list, dict)))
        self.budget.make(0, text + 8 * items)

    def new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Global) or not kind.record or arguments != ():
            raise self.refuse(f"to make a {getattr(kind, 'name', 'thing of no class')}")
        self.append(Record(kind.name))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Record):
            made.state = state
        elif isinstance(made, _Dtype):
            made.check(state)
        elif not isinstance(made, (dict, Stored)):  # the attributes of a dict or a parameter hold no weights
            raise self.refuse("to change an object")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put([key, value])

    def set_items(self) -> None:
        self.put(self.pop_mark())

    def put(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(items) % 2:
            raise self.refuse("to fill what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a nested tuple would walk it, however deep and however often it refers to itself.
            # Integers beyond 64 bits can be chosen so that all of them have the same hash.
            if not isinstance(key, (str, bytes, int, float, Record, Global, type(None))):
                raise self.refuse(f"for a dictionary with a {type(key).__name__} as a key")
            if isinstance(key, int) and key not in _INT64:
                raise self.refuse("for a dictionary with an integer of more than 64 bits as a key")
            self.stack[-1][key] = value

    def add(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def add_all(self) -> None:
        self.extend(self.pop_mark())

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise self.refuse("to extend what is no list")
        self.stack[-1].extend(items)

    def mark(self) -> None:
        if len(self.metastack) == _MARKS:
            raise self.refuse(f"for more than {_MARKS} lists in one another")
        self.load_mark()

    def put_far(self) -> None:
        place = self.readline()[:-1]
        if not place.isdigit() or len(place) > 10:  # as of keys
            raise self.refuse("for a place in its memo that is no number of 32 bits")
        self.memo[int(place)] = self.stack[-1]

    def unknown(self) -> None:
        raise self.refuse("for an instruction that files of weights do without")


# What is left only moves text, numbers and containers about, and takes no more memory than the pickle is long.
_PLAIN = (
    "PROTO FRAME STOP POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES "
    "BINBYTES8 EMPTY_LIST LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GET BINGET LONG_BINGET BINPUT "
    "LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
_base = _Machine.dispatch
_INSTRUCTIONS: dict[int, Callable[[Any], None]] = {
    **dict.fromkeys(_base, _Unpickler.unknown),
    **{code: _base[code] for code in (getattr(pickle, name)[0] for name in _PLAIN.split())},
    pickle.MARK[0]: _Unpickler.mark,
    pickle.PUT[0]: _Unpickler.put_far,
    pickle.REDUCE[0]: _Unpickler.reduce,
    pickle.NEWOBJ[0]: _Unpickler.new,
    pickle.BUILD[0]: _Unpickler.build,
    pickle.SETITEM[0]: _Unpickler.set_item,
    pickle.SETITEMS[0]: _Unpickler.set_items,
    pickle.APPEND[0]: _Unpickler.add,
    pickle.APPENDS[0]: _Unpickler.add_all,
    pickle.EMPTY_SET[0]: _base[pickle.EMPTY_LIST[0]],  # a set is read as a list: nothing is hashed
    pickle.ADDITEMS[0]: _Unpickler.add_all,
}


class _Dtype:
    """A dtype of numpy's that is plain: a letter and a size, little-endian."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[biuf][1248]", code):
            raise ValueError(code)
        self.dtype = np.dtype(code)

    def check(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise ValueError("big-endian")


def _scalar(kind: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype, 1)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(encoding)
    return text.encode("latin1")


def _path(*parts: str) -> str:
    return "/".join(parts).replace("//", "/")


def _size(lengths: Any = ()) -> tuple[Any, ...]:
    if not isinstance(lengths, (list, tuple)):
        raise TypeError("no lengths")
    return tuple(lengths)


def _device(kind: str, index: int | None = None) -> str:
    if not isinstance(kind, str) or not (index is None or (type(index) is int and index in _INT64)):
        raise TypeError("no device")
    return kind if index is None else f"{kind}:{index}"


COMMON = table(
    {
        "collections.OrderedDict": lambda: {},
        "collections.defaultdict": lambda *_: {},
        "__builtin__.set": lambda items: items,
        "builtins.set": lambda items: items,
        "_codecs.encode": _encode,
        "numpy.dtype": _Dtype,
        "numpy.core.multiarray.scalar": _scalar,
        "numpy._core.multiarray.scalar": _scalar,
        **{f"pathlib.{name}": _path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
        **{f"pathlib._local.{name}": _path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
        "torch.Size": _size,
        "torch.device": _device,
    },
    records=["argparse.Namespace"],
    values=["__builtin__.dict", "builtins.dict", "__builtin__.list", "builtins.list", "__builtin__.int", "builtins.int"],
)
