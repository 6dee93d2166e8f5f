"""The pytest plugin: the fixture `assert_parity`, which verifies golden files, and the option that records them.

pytest loads this module for every project in the environment.  It therefore has a unique name, and imports `parity` only
when a test uses the fixture: the project may have a package `parity` of its own.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "parity_goldens"  # a folder next to the test file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --parity-record."""
    group = parser.getgroup("parity", "JAX and PyTorch parity")
    text = f"record golden files of assert_parity in {FOLDER}/ next to each test file; by default they are verified"
    group.addoption("--parity-record", action="store_true", help=text)


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
    from parity.comparison.any_model import golden_outputs
    from parity.comparison.any_model.assertion import compare_models

    calls = 0

    def assert_and_record(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        nonlocal calls
        path, calls = _golden_path(request.path, request.node.name, calls), calls + 1
        report = compare_models(*arguments, **options)
        verify = path.exists() and not request.config.getoption("parity_record")
        lines = golden_outputs.verify(path, report) if verify else []
        if lines or not report.passed:
            raise AssertionError("\n".join([*lines, str(report)]))
        if not verify and request.config.getoption("parity_record"):
            golden_outputs.record(path, report)
        return report

    return assert_and_record


def _golden_path(file: Path, test: str, call: int) -> Path:
    """Return the path of the golden file for one call of the fixture in a test; calls are counted from 0."""
    name = re.sub(r"[^\w.=,\[\]-]", "_", f"{file.stem}.{test}")
    return file.parent / FOLDER / f"{name}{f'.{call}' if call else ''}.npz"
