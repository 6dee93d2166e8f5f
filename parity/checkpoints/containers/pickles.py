"""A reader of pickles that runs no code: each class or function in a pickle is replaced by a stand-in, or refused.

A pickle is a program, so checking its result would be too late.  This reader implements few instructions.  They can call
only functions of this package, and they build only dictionaries, lists, text, numbers, arrays, `PickledObject`s and
tensors.

The reader is based on the pure Python unpickler of the standard library.  In the C version, an instruction of five bytes
can choose how much memory the memo takes; in the Python version the memo is a dictionary.  Each instruction is charged to a
`Budget`.  A call is also charged for the size of its arguments, because a short pickle can use the memo to repeat long
arguments.
"""

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import KeyPath, StoredArray
from parity.checkpoints.containers.pickle_globals import (
    COMMON_GLOBALS,
    INT64,
    Allowlist,
    Global,
    PickledArray,
    PickledDtype,
    PickledObject,
    describe_refused_key,
)
from vit_spec import InputError

MAX_PICKLE_BYTES = 1 << 24  # the pickles of the largest published ViTs, with optimizer, are 20 times smaller
_QUANTIZED = {  # functions that make quantized weights
    "torch._tensor._rebuild_from_type_v2": " (for a subclass of Tensor, such as weights that torchao quantized)",
    "torch._utils._rebuild_qtensor": " (for weights that torch.ao quantized)",
    "torch.qint8": " (for weights that torch.ao quantized)",
    "torch.quint8": " (for weights that torch.ao quantized)",
}
_DTYPE = re.compile(r"torch\.(u?int|bits|complex|float)[0-9]\w*")
_MAX_ENTRIES, _MAX_DEPTH = 1 << 18, 64  # of a tree: through the memo, a small pickle can describe an endless tree
_MAX_OPEN_MARKS = 1 << 10  # at the same time: a mark takes ten times the memory of other instructions
_CALL_COST = 8  # objects charged to the budget

LoadStorage = Callable[[Any], Any]  # from a persistent id, by which torch refers to storages


def load(
    data: bytes, source: str, allowed: Allowlist, budget: Budget, load_storage: LoadStorage | None = None, **options: Any
) -> Any:
    """Return the contents of a pickle.

    Args:
        data: the pickle.
        source: its path, for messages.
        allowed: the stand-ins for all names that it may use in addition to `COMMON_GLOBALS`.
        budget: limits on memory and time.
        load_storage: returns the object that a persistent id refers to; None refuses persistent ids.
        options: see `load_first`.

    Raises:
        InputError: the pickle is damaged, too long, or asks for anything else.
    """
    return load_first(data, source, allowed, budget, load_storage, **options)[0]


def load_first(
    data: bytes,
    source: str,
    allowed: Allowlist,
    budget: Budget,
    load_storage: LoadStorage | None = None,
    *,
    max_bytes: int = MAX_PICKLE_BYTES,
    encoding: str = "utf-8",
) -> tuple[Any, int]:
    """Return the contents of the first of several pickles, and its length in bytes.

    Args:
        data: begins with the pickle.
        source, allowed, budget, load_storage: see `load`.
        max_bytes: maximum length of `data`.
        encoding: encoding of text that Python 2 pickled.

    Raises:
        InputError: see `load`.
    """
    if len(data) > max_bytes:
        raise InputError(
            f"{source} describes its arrays in {len(data)} bytes, more than {max_bytes}: keep the weights alone in it"
        )
    file = io.BytesIO(data)
    try:
        return _Unpickler(file, source, {**COMMON_GLOBALS, **allowed}, budget, load_storage, encoding).load(), file.tell()
    except InputError as error:
        raise InputError(_prefix_source(source, error)) from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise InputError(f"{source} is damaged ({type(error).__name__} in its pickle): fetch or write it again") from None


def _prefix_source(source: str, error: InputError) -> str:
    return str(error) if str(error).startswith(str(InputError(source))) else f"{source}: {error}"


def flatten(tree: Any, source: str, budget: Budget) -> tuple[dict[KeyPath, StoredArray], dict[str, Any]]:
    """Split a tree into arrays and metadata.

    Args:
        tree: what `load` returned: nested dictionaries, lists, tuples and objects.
        source: path of the pickle, for messages.
        budget: limits on memory and time.

    Returns:
        The arrays by key path; and the text, numbers and booleans by key path joined with "/".

    Raises:
        InputError: the tree is endless or too large, or has two entries with the same key path.
    """
    try:
        return _flatten(tree, source, budget)
    except InputError as error:
        raise InputError(_prefix_source(source, error)) from None


def _flatten(tree: Any, source: str, budget: Budget) -> tuple[dict[KeyPath, StoredArray], dict[str, Any]]:
    arrays: dict[KeyPath, StoredArray] = {}
    metadata: dict[str, Any] = {}
    stack: list[tuple[KeyPath, Any]] = [((), tree)]
    for _ in range(_MAX_ENTRIES):
        if not stack:
            return arrays, metadata
        path, node = stack.pop()
        node = node.state if isinstance(node, PickledObject) else node.name if isinstance(node, Global) else node
        if isinstance(node, (list, tuple, dict)) and len(stack) + len(node) > _MAX_ENTRIES:
            break
        if isinstance(node, (list, tuple)):
            node = dict(enumerate(node))
        if isinstance(node, dict):
            if len(path) == _MAX_DEPTH:
                break
            budget.spend(len(node), 8 * len(node) * (len(path) + 1))
            stack += [((*path, _key_text(key, source)), value) for key, value in reversed(node.items())]
        elif isinstance(node, StoredArray):
            if path in arrays:
                raise InputError(f"{source} has {'/'.join(path)!r} twice: keep one of them")
            budget.spend(1, sum(map(len, path)))
            arrays[path] = node
        elif isinstance(node, (str, float, bool)) or (isinstance(node, int) and node in INT64):
            budget.spend(1, sum(map(len, path)))
            metadata["/".join(path)] = node
    raise InputError(f"{source} has more than {_MAX_ENTRIES} entries, or is nested endlessly: keep the weights alone in it")


def _key_text(key: Any, source: str) -> str:
    if isinstance(key, (str, float)) or (isinstance(key, int) and key in INT64):
        return str(key)
    raise InputError(f"{source} has an entry whose key is neither text nor a number: keep the weights alone in it")


_PythonUnpickler: Any = pickle._Unpickler  # typeshed does not declare its instructions, stack and memo


class _CountingDispatch:
    """The table of instructions; each look-up charges the budget for one object."""

    def __init__(self, budget: Budget, instructions: Mapping[int, Callable[[Any], None]]) -> None:
        self._budget, self._instructions = budget, instructions

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self._budget.objects -= 1
        if self._budget.objects < 0:
            self._budget.spend(0)  # raises InputError
        return self._instructions[code]


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """The pickle machine, restricted to few instructions; only `Global`s can be called."""

    def __init__(
        self,
        file: io.BytesIO,
        source: str,
        allowed: Allowlist,
        budget: Budget,
        load_storage: LoadStorage | None,
        encoding: str,
    ) -> None:
        super().__init__(file, encoding=encoding)
        self.source, self.allowed, self.budget, self.load_storage = source, allowed, budget, load_storage
        self.dispatch = _CountingDispatch(budget, _INSTRUCTIONS)

    def refusal(self, what: str) -> InputError:
        what = what if what.isprintable() and len(what) < 200 else ascii(what[:200])
        return InputError(
            f"{self.source} asks {what}: weights never need code, so ask for a file of tensors alone, or for safetensors"
        )

    def find_class(self, module: str, name: str) -> Global:
        self.budget.spend(_CALL_COST, len(module) + len(name))
        full_name = f"{module}.{name}"
        if full_name in self.allowed:
            return self.allowed[full_name]
        if module.startswith("__torch__"):  # a module of a TorchScript archive: its code is not loaded
            return Global(full_name, is_class=True)
        if _DTYPE.fullmatch(full_name) and full_name not in _QUANTIZED:
            what = f"{self.source} names the dtype {full_name[:40]}, which is not read"
            raise InputError(f"{what}: leave it and its tensors out of the file, or save them in another dtype")
        raise self.refusal(f"to call {full_name}{_QUANTIZED.get(full_name, '')}")

    def persistent_load(self, pid: Any) -> Any:
        if self.load_storage is None:
            raise self.refusal("for an object outside it")
        self.charge_call(pid)
        return self.load_storage(pid)

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or function.call is None or not isinstance(arguments, tuple):
            raise self.refusal(f"to call {getattr(function, 'name', 'something that is not a function')}")
        self.charge_call(arguments)
        self.append(function.call(*arguments))

    def charge_call(self, arguments: Any) -> None:
        """Charge the budget for a call: no function here creates more than a few times the size of its arguments."""
        if not isinstance(arguments, tuple):
            raise self.refusal("to call something with arguments that are not a tuple")
        self.budget.spend(_CALL_COST + len(arguments))
        text = sum(len(each) for each in arguments if isinstance(each, (str, bytes)))
        items = sum(len(each) for each in arguments if isinstance(each, (tuple, list, dict)))
        self.budget.spend(items, text + 8 * items)

    def new_object(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Global) or not kind.is_class or arguments != ():
            raise self.refusal(f"to create an object of {getattr(kind, 'name', 'something that is not a class')}")
        self.append(PickledObject(kind.name))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif isinstance(target, PickledDtype):
            target.check_byte_order(state)
        elif isinstance(target, PickledArray):
            target.set_state(*state)
        elif not isinstance(target, (dict, StoredArray)):  # the attributes of a dict or a parameter are not weights
            raise self.refusal("to change an object")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill_dictionary([key, value])

    def set_items(self) -> None:
        self.fill_dictionary(self.pop_mark())

    def fill_dictionary(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(items) % 2:
            raise self.refusal("to add entries to something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if what := describe_refused_key(key):
                raise self.refusal(f"for a dictionary with {what} as a key")
            self.stack[-1][key] = value

    def append_one(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def append_many(self) -> None:
        self.extend(self.pop_mark())

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise self.refusal("to extend something that is not a list")
        self.stack[-1].extend(items)

    def open_mark(self) -> None:
        if len(self.metastack) == _MAX_OPEN_MARKS:
            raise self.refusal(f"for more than {_MAX_OPEN_MARKS} nested lists")
        self.load_mark()

    def make_frozenset(self) -> None:
        items = self.pop_mark()
        self.stack.append(items)  # a list, as for a set

    def put_text_index(self) -> None:
        index = self.readline()[:-1]
        if not index.isdigit() or len(index) > 10:  # a file can choose longer integers that all have the same hash
            raise self.refusal("for a memo index that is not a 32-bit number")
        self.memo[int(index)] = self.stack[-1]

    def refuse_instruction(self) -> None:
        raise self.refusal("for an instruction that files of weights do not use")


# These only move text, numbers and containers, and take no more memory than the pickle itself.
_DATA_INSTRUCTIONS = (
    "PROTO FRAME STOP POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES "
    "BINBYTES8 EMPTY_LIST LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GET BINGET LONG_BINGET BINPUT "
    "LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
_standard_instructions = _PythonUnpickler.dispatch
_INSTRUCTIONS: dict[int, Callable[[Any], None]] = {
    **dict.fromkeys(_standard_instructions, _Unpickler.refuse_instruction),
    **{code: _standard_instructions[code] for code in (getattr(pickle, name)[0] for name in _DATA_INSTRUCTIONS.split())},
    pickle.MARK[0]: _Unpickler.open_mark,
    pickle.PUT[0]: _Unpickler.put_text_index,
    pickle.REDUCE[0]: _Unpickler.reduce,
    pickle.NEWOBJ[0]: _Unpickler.new_object,
    pickle.BUILD[0]: _Unpickler.build,
    pickle.SETITEM[0]: _Unpickler.set_item,
    pickle.SETITEMS[0]: _Unpickler.set_items,
    pickle.APPEND[0]: _Unpickler.append_one,
    pickle.APPENDS[0]: _Unpickler.append_many,
    pickle.EMPTY_SET[0]: _standard_instructions[pickle.EMPTY_LIST[0]],  # a set is read as a list, so that nothing is hashed
    pickle.ADDITEMS[0]: _Unpickler.append_many,
    pickle.FROZENSET[0]: _Unpickler.make_frozenset,
    pickle.BYTEARRAY8[0]: _standard_instructions[pickle.BINBYTES8[0]],
}
