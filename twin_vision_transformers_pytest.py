"""The pytest plugin: the fixture `assert_parity`, and the options that record golden files and verdicts.

pytest loads this module for every project in the environment.  It therefore has a unique name, and imports `parity` only
when a test uses the fixture: the project may have a package `parity` of its own.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Generator
from glob import escape
from pathlib import Path
from typing import Any

import pytest

FOLDER = "parity_goldens"  # a folder next to the test file
_MAX_NAME = 240  # bytes of a name without the number of the call and ".npz": file systems allow 255 bytes

_RECORDED = pytest.StashKey[dict[Path, str]]()  # the test that has recorded each golden file of the session
_USED = pytest.StashKey[set[Path]]()  # the golden files of all calls of the session
_HAS_PASSED = pytest.StashKey[dict[pytest.Item, bool]]()  # each collected test, also those that are deselected


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --parity-record, --parity-require-golden and --parity-json."""
    group = parser.getgroup("parity", "JAX and PyTorch parity")
    text = f"record golden files of assert_parity in {FOLDER}/ next to each test file; by default they are verified"
    group.addoption("--parity-record", action="store_true", help=text)
    text = "fail calls of the fixture assert_parity that have no golden file; by default they compare the models alone"
    group.addoption("--parity-require-golden", action="store_true", help=text)
    text = "write the verdict of each call of the fixture assert_parity to this file, one JSON object per line"
    group.addoption("--parity-json", metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Create the file of --parity-json, empty."""
    config.stash[_RECORDED], config.stash[_USED], config.stash[_HAS_PASSED] = {}, set(), {}
    path = _json_path(config)
    if path is None or hasattr(config, "workerinput"):  # a worker of pytest-xdist: its controller has created the file
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise pytest.UsageError(f"--parity-json {path} cannot be written ({error.strerror}): give another path") from None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a test that may have golden files."""
    item.config.stash[_HAS_PASSED][item] = False


@pytest.hookimpl(hookwrapper=True)  # pluggy before 1.2, with pytest before 7.4, has no other wrappers
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Note whether a test has passed, and so has used all of its golden files."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if report.when == "call":
        item.config.stash[_HAS_PASSED][item] = report.passed


def pytest_terminal_summary(terminalreporter: Any, exitstatus: pytest.ExitCode, config: pytest.Config) -> None:
    """Name the golden files of the collected test files that no test has used, as those of tests that were renamed.

    Golden files of a test that was skipped or deselected, or that failed, are not named.  Nothing is named if only a part
    of a test file was collected, or if pytest-xdist distributes the tests: this process then runs none.
    """
    is_partial = any("::" in each for each in config.args) or config.getoption("lf", default=False)
    if is_partial or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    has_passed = config.stash[_HAS_PASSED]
    files = [file for file in sorted({item.path for item in has_passed}) if (file.parent / FOLDER).is_dir()]
    excused = {
        _golden_path(item.path, _test_name(item), 0)
        for item, passed in has_passed.items()
        if not passed and item.path in files
    }
    unused = [
        os.path.relpath(path, config.invocation_params.dir)
        for file in files
        for path in sorted((file.parent / FOLDER).glob(f"{escape(file.stem)}.*.npz"))
        if path not in config.stash[_USED] and path.with_name(re.sub(r"\.\d+\.npz$", ".npz", path.name)) not in excused
    ]
    if unused:
        what = f"golden files of assert_parity that no test has used: {', '.join(unused)}"
        terminalreporter.write_line(f"{what}: delete them if their tests were renamed or removed")


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function like `parity.assert_parity` that also verifies the golden file of the test, if there is one.

    With --parity-record it writes the golden file instead, and replaces an existing one.  With --parity-require-golden it
    fails if there is none.
    """
    from vit_spec import InputError, nearest
    from vit_spec.shadowing import check_not_shadowed

    try:
        check_not_shadowed("parity")
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
    from parity.comparison.any_model import golden_outputs, provenance, verdict
    from parity.comparison.any_model.assertion import assert_parity, compare_models
    from parity.comparison.any_model.report import UnequalWeightsError

    calls, test, signature = 0, _test_name(request.node), inspect.signature(assert_parity)

    def write(facts: dict[str, Any], changes: list[str]) -> None:
        if (path := _json_path(request.config)) is not None:
            line = json.dumps(
                {"schema": verdict.SCHEMA, **facts, "test": request.node.nodeid, "golden": changes}, allow_nan=False
            )
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def check_arguments(arguments: Any, options: Any) -> None:
        """Raise a TypeError that names `assert_parity`; Python's would name `compare_models`."""
        __tracebackhide__ = True
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            unknown = next((name for name in options if name not in signature.parameters), None)
            hint = nearest(unknown, signature.parameters) if unknown else ""
            raise TypeError(f"assert_parity(): {error}{hint}") from None

    def compare(arguments: Any, options: Any) -> Any:
        __tracebackhide__ = True
        try:
            check_arguments(arguments, options)
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
        request.config.stash[_USED].add(path)
        report, lines = compare(arguments, options), []
        try:
            if not request.config.getoption("parity_record"):
                if path.exists():
                    lines = golden_outputs.verify(path, report, test)
                elif request.config.getoption("parity_require_golden"):
                    lines = [f"{path} does not exist: record it with --parity-record, or omit --parity-require-golden"]
            elif report.passed:
                if (other := request.config.stash[_RECORDED].setdefault(path, test)) != test:
                    what = f"{path} has just been recorded by {other}, and is also the file of {test}"
                    raise InputError(f"{what}: rename a test")
                golden_outputs.record(path, report, test)
        except (InputError, OSError) as error:
            write(report.facts(), [str(error)])
            raise error.with_traceback(None) from error.__cause__
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
