"""Compare the pair of models that a function of the user returns: `python -m parity assert package.module:function`.

This runs the user's code.
"""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity.comparison.any_model.assertion import compare_models
from parity.comparison.any_model.report import PairReport, UnequalWeightsError
from parity.comparison.own_model.construct import (
    import_attribute,
    prints_to_stderr,
    working_directory_on_path,
)
from vit_spec import InputError, nearest
from vit_spec.errors import first_line

_NAME = re.compile(r"(\w+(?:\.\w+)*)\s*:\s*(\w+(?:\.\w+)*)")
_PARAMETERS = inspect.signature(compare_models).parameters
_REQUIRED = tuple(name for name, each in _PARAMETERS.items() if each.default is each.empty)
_OURS = [Path(__file__).parents[3] / name for name in ("parity", "vit_spec")]
_PYTHON = Path(sysconfig.get_path("stdlib"))


def compare_named_pair(name: str, level: str | None = None) -> PairReport:
    """Compare the models that a function without arguments returns.

    What the user's code prints to stdout goes to stderr.

    Args:
        name: "package.module:function"; modules of the working directory are found.  The function returns a dict with the
            arguments of `parity.assert_parity` by name: "flax_apply", "params", "torch_module", "inputs", and options.
        level: "function" or "precision"; replaces the level in the dict.

    Raises:
        UnequalWeightsError: weights="equal", and the weights differ.
        InputError: the function does not exist, raises, or returns something else, or its models cannot be compared.
    """
    match = _NAME.fullmatch(name.strip())
    if not match:
        raise InputError(f"{name!r} does not name a function: write it as package.module:function")
    with working_directory_on_path(), prints_to_stderr():
        function = import_attribute(match[1], match[2], name)
        if not callable(function):
            raise InputError(f"{name} is a {type(function).__name__}: name a function that returns the models")
        arguments = _check_arguments(name, _run(name, function))
        if level:
            arguments["level"] = level
        return _run(f"{name}: the comparison", compare_models, **arguments)  # type: ignore[no-any-return]


def _check_arguments(name: str, returned: Any) -> dict[str, Any]:
    """Return a copy of the dict that the function returned, if it has the arguments of `compare_models`."""
    if not isinstance(returned, dict):
        raise InputError(f"{name} returned a {type(returned).__name__}: return a dict with {', '.join(_REQUIRED)}")
    for key in returned:
        if key not in _PARAMETERS:
            known = nearest(key, _PARAMETERS) or f": the arguments are {', '.join(_PARAMETERS)}"
            raise InputError(f"{name}: {key!r} is no argument of parity.assert_parity{known}")
    if missing := [key for key in _REQUIRED if key not in returned]:
        raise InputError(f"{name}: the dict has no {', '.join(missing)}: return a dict with {', '.join(_REQUIRED)}")
    return dict(returned)


def _run(what: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function that runs code of the user; an exception of that code becomes an InputError with its place."""
    try:
        return function(**arguments)
    except InputError as error:
        if error.__cause__ is None:
            raise
        raise InputError(f"{error}{_place(error.__cause__)}") from None
    except (UnequalWeightsError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} raised {first_line(error)}{_place(error)}") from None


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code in which an exception was raised; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if "site-packages" not in frame.filename and _is_user_file(Path(frame.filename))]
    return f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""


def _is_user_file(path: Path) -> bool:
    return path.is_file() and not any(path.is_relative_to(folder) for folder in (*_OURS, _PYTHON))
