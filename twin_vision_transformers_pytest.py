"""The pytest plugin: a fixture `assert_parity` that keeps golden files, and the option that records them.

pytest loads it in every project of an environment, so it has a name of its own and imports `parity`, which a project may
have itself, when a test asks for the fixture.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = "parity_goldens"  # beside the test's file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --parity-record."""
    group = parser.getgroup("parity", "JAX and PyTorch parity")
    what = f"write what assert_parity computes to {FOLDER}/, beside each test's file; without it, files there are verified"
    group.addoption("--parity-record", action="store_true", help=what)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`parity.assert_parity`, which also verifies the test's golden file where there is one, or records it."""
    from vit_spec import InputError
    from vit_spec.shadowing import require_own

    try:
        require_own("parity")
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
    from parity.comparison.any_model import recorded
    from parity.comparison.any_model.assertion import compare_models

    calls = 0

    def checked(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        nonlocal calls
        path, calls = _golden(request.path, request.node.name, calls), calls + 1
        report = compare_models(*arguments, **options)
        verify = path.exists() and not request.config.getoption("parity_record")
        lines = recorded.moved(path, report) if verify else []
        if lines or not report.passed:
            raise AssertionError("\n".join([*lines, str(report)]))
        if not verify and request.config.getoption("parity_record"):
            recorded.record(path, report)
        return report

    return checked


def _golden(file: Path, test: str, call: int) -> Path:
    """Where the golden of a test's call is."""
    name = re.sub(r"[^\w.=,\[\]-]", "_", f"{file.stem}.{test}")
    return file.parent / FOLDER / f"{name}{f'.{call}' if call else ''}.npz"
