"""The pytest plugin: the fixture `assert_parity`, and the options that record golden files and verdicts.

pytest loads this module for every project in the environment.  It therefore has a unique name, and imports `parity` only
when a test uses the fixture: the project may have a package `parity` of its own.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "parity_goldens"  # a folder next to the test file
_MAX_NAME = 240  # bytes of a name without the number of the call and ".npz": file systems allow 255 bytes

_RECORDED = pytest.StashKey[dict[Path, str]]()  # the test that has recorded each golden file of the session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --parity-record and --parity-json."""
    group = parser.getgroup("parity", "JAX and PyTorch parity")
    text = f"record golden files of assert_parity in {FOLDER}/ next to each test file; by default they are verified"
    group.addoption("--parity-record", action="store_true", help=text)
    text = "write the verdict of each call of the fixture assert_parity to this file, one JSON object per line"
    group.addoption("--parity-json", metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Create the file of --parity-json, empty."""
    config.stash[_RECORDED] = {}
    path = _json_path(config)
    if path is None or hasattr(config, "workerinput"):  # a worker of pytest-xdist: its controller has created the file
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise pytest.UsageError(f"--parity-json {path} cannot be written ({error.strerror}): give another path") from None


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function like `parity.assert_parity` that also verifies the golden file of the test, if there is one.

    With --parity-record it writes the golden file instead, and replaces an existing one.
    """
    from vit_spec import InputError
    from vit_spec.shadowing import check_not_shadowed

    try:
        check_not_shadowed("parity")
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
    from parity.comparison.any_model import golden_outputs, provenance, verdict
    from parity.comparison.any_model.assertion import compare_models
    from parity.comparison.any_model.report import UnequalWeightsError

    calls, test = 0, _test_name(request.node)

    def write(facts: dict[str, Any], changes: list[str]) -> None:
        if (path := _json_path(request.config)) is not None:
            line = json.dumps({**facts, "test": request.node.nodeid, "golden": changes}, allow_nan=False)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def compare(arguments: Any, options: Any) -> Any:
        __tracebackhide__ = True
        try:
            return compare_models(*arguments, **options)
        except InputError as error:
            write(verdict.error_facts(error), [])
            raise error.with_traceback(None) from error.__cause__  # without the source of this package
        except UnequalWeightsError as error:
            level = options.get("level", "precision")
            write(verdict.unequal_weights_facts(error, level, provenance.framework_versions()), [])
            raise error.with_traceback(None) from error.__cause__
        except Exception as error:  # a model can raise anything
            write(verdict.error_facts(InputError(f"{type(error).__name__}: {error}".partition("\n")[0])), [])
            raise

    def assert_and_record(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        nonlocal calls
        path, calls = _golden_path(request.path, test, calls), calls + 1
        report, lines = compare(arguments, options), []
        try:
            if not request.config.getoption("parity_record"):
                lines = golden_outputs.verify(path, report, test) if path.exists() else []
            elif report.passed:
                if (other := request.config.stash[_RECORDED].setdefault(path, test)) != test:
                    what = f"{path} has just been recorded by {other}, and is also the file of {test}"
                    raise InputError(f"{what}: rename a test")
                golden_outputs.record(path, report, test)
        except (InputError, OSError) as error:
            write(report.facts(), [str(error)])
            raise
        write(report.facts(), lines)
        if lines or not report.passed:
            raise AssertionError("\n".join([*lines, str(report)]))
        return report

    return assert_and_record


def _test_name(item: pytest.Item) -> str:
    """Return the name of a test in its file, with its classes and parameters, as in "TestPort.test_it[small]"."""
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return ".".join([*classes, item.name])


def _golden_path(file: Path, test: str, call: int) -> Path:
    """Return the path of the golden file for one call of the fixture in a test; calls are counted from 0."""
    exact = f"{file.stem}.{test}"
    name = re.sub(r"[^\w.=,\[\]-]", "_", exact)
    if name != exact or len(name.encode()) > _MAX_NAME:  # "a/b" and "a b" become the same, and so do cut names
        suffix = f"-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
        name = name.encode()[: _MAX_NAME - len(suffix)].decode(errors="ignore") + suffix
    return file.parent / FOLDER / f"{name}{f'.{call}' if call else ''}.npz"


def _json_path(config: pytest.Config) -> Path | None:
    """Return the path of the option --parity-json; a relative one is in the folder in which pytest was started."""
    given = config.getoption("parity_json")
    return config.invocation_params.dir / given if given else None
