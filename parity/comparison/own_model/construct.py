"""Import and construct a model of the user: `--like package.module:Class(arguments)`.

This runs the user's code.  The arguments are literals; they are parsed and never evaluated as code.
"""

import ast
import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_spec import InputError, nearest
from vit_spec.errors import first_line
from vit_spec.missing_packages import not_installed

_SMALL = 2_000_000  # parameters
_FORM = "write it as package.module:Class or package.module:Class(image_size=32, depth=6)"
_EXPRESSION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*(\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class Built:
    """A model of the user, as it was constructed.

    Attributes:
        name: the text that names the class, without arguments: "my_models.vit:ViT".
        model: a torch.nn.Module, a linen module or an NNX module.
        framework: "torch", "linen" or "nnx".
        arguments: the arguments of the call by name, with defaults.
    """

    name: str
    model: Any
    framework: str
    arguments: Mapping[str, Any]


def build(like: Any) -> Built:
    """Return the model that a text such as "my_models.vit:ViT(depth=6)" describes, or the given one, or that of a callable.

    Raises:
        InputError: the module or the class does not exist, or the call fails, or its result is not a module.
    """
    if not isinstance(like, str):
        model, arguments = like, dict[str, Any]()
        if callable(like) and not _framework_of(like):
            model, arguments = _call(like, getattr(like, "__qualname__", type(like).__name__), [], {})
        return Built(_class_name(model), model, _framework(model, f"like is a {type(like).__name__}"), arguments)
    module_name, colon, expression = like.partition(":")
    match = _EXPRESSION.fullmatch(expression.strip())
    if not colon or not module_name.strip() or not match:
        raise InputError(f"--like {like!r} does not name a class: {_FORM}")
    name = f"{module_name.strip()}:{match[1]}"
    found = import_attribute(module_name.strip(), match[1], f"--like {like}")
    positional, keywords = _literals(match[2] or "()", like)
    if not callable(found) or (match[2] is None and _framework_of(found)):  # a model, not a class
        return Built(name, found, _framework(found, f"--like {like}"), {})
    model, arguments = _call(found, name, positional, keywords)
    return Built(name, model, _framework(model, f"--like {like}"), arguments)


@contextmanager
def working_directory_on_path() -> Iterator[None]:
    """Let Python find modules in the working directory."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what the user's code prints to stdout to stderr, also what libraries in C and child processes print."""
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        stdout = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Let PyTorch create tensors without a dtype in float64, and silence the warnings of the user's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "torch" not in sys.modules:
            yield
            return
        import torch

        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def few_threads(entries: int) -> Iterator[None]:
    """Let PyTorch use one thread for a model with few parameters: more cost time, and much time on a busy machine."""
    torch = sys.modules.get("torch")
    if torch is None or entries > _SMALL:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def import_attribute(module_name: str, path: str, what: str) -> Any:
    """Import a module of the user, and return its attribute with this dotted path.

    Raises:
        InputError: the module or the attribute does not exist, or the import fails; `what` begins the message.
    """
    if module_name.endswith(".py"):
        raise InputError(f"{what}: {module_name} is a file: write its module, {module_name.removesuffix('.py')}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            files = [path.stem for path in Path.cwd().glob("*.py")] if "." not in module_name else []
            hint = nearest(module_name, files) or ": run the command in the folder that has it, or set PYTHONPATH"
            raise InputError(f"{what}: there is no module {error.name}{hint}") from None
        raise InputError(f"{what}: {module_name} cannot be imported: {not_installed([str(error.name)])}") from None
    except (Exception, SystemExit) as error:  # of the user's code
        raise InputError(f"{what}: importing {module_name} raised {first_line(error)}") from None
    for word in path.split("."):
        if not hasattr(found, word):
            # Static: the attributes of a module that imports lazily may not be importable.
            names = [name for name in dir(found) if callable(inspect.getattr_static(found, name, None)) and name[0] != "_"]
            raise InputError(f"{what}: {module_name} has no {word}{nearest(word, names) or ': check the name'}")
        found = getattr(found, word)
    return found


def _class_name(model: Any) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def _literals(call: str, like: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in the text of a call, which must be literals."""
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise InputError(f"--like {like!r}: its arguments are not Python: {_FORM}") from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise InputError(f"--like {like!r} is not one call: {_FORM}")

    def literal(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise InputError(
                f"--like {like!r}: the argument {ast.unparse(node)[:60]} is not a literal: give numbers, texts, lists, "
                "None, True or False, or name a function of your own that makes the model"
            ) from None

    if any(keyword.arg is None for keyword in tree.keywords):
        raise InputError(f"--like {like!r}: ** is not allowed in the arguments: {_FORM}")
    return [literal(node) for node in tree.args], {str(each.arg): literal(each.value) for each in tree.keywords}


def _call(
    found: Callable[..., Any], name: str, positional: list[Any], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the model, and the arguments of the call by name."""
    signature = _signature(found)
    if signature and "rngs" in signature.parameters and "rngs" not in keywords:
        from flax import nnx

        keywords = {**keywords, "rngs": nnx.Rngs(0)}
    if signature:
        try:
            bound = signature.bind(*positional, **keywords)
        except TypeError as error:
            shown = signature.replace(return_annotation=signature.empty)
            raise InputError(f"{name}{shown} cannot be called: {error}; give its arguments: {_FORM}") from None
        bound.apply_defaults()
        arguments = {
            key: value
            for each, argument in bound.arguments.items()
            for key, value in (argument.items() if _is_variadic(signature, each) else [(each, argument)])
        }
    else:
        arguments = dict(keywords)
    try:
        with float64_by_default(), _torch_seed():
            return found(*positional, **keywords), arguments
    except (Exception, SystemExit) as error:  # of the user's code
        raise InputError(f"{name} raised {first_line(error)}; give other arguments: {_FORM}") from None


def _signature(found: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function or a constructor; None if it has none.

    The metaclass of NNX modules hides that of the constructor.
    """
    try:
        if not isinstance(found, type):
            return inspect.signature(found)
        signature = inspect.signature(getattr(found, "__init__"))  # noqa: B009
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    except (TypeError, ValueError):
        return None


def _is_variadic(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD


@contextmanager
def _torch_seed() -> Iterator[None]:
    """Let the constructor of a PyTorch module draw the same random numbers in each run, and none of the user's."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _framework_of(model: Any) -> str:
    """Return the framework of a module; "" if it is not a module."""
    if (torch := sys.modules.get("torch")) and isinstance(model, torch.nn.Module):
        return "torch"
    for name in ("linen", "nnx"):
        if (library := sys.modules.get(f"flax.{name}")) and isinstance(model, library.Module):
            return name
    return ""


def _framework(model: Any, what: str) -> str:
    """Return the framework of a module.

    Raises:
        InputError: it is not a module; `what` begins the message.
    """
    if found := _framework_of(model):
        return found
    raise InputError(f"{what}: a {type(model).__name__} is no torch.nn.Module and no Flax module: give such a class")
