"""A package that is installed and cannot be imported is reported in one line, with the exit code of invalid input."""

from importlib import import_module

import pytest

from parity.__main__ import COMMANDS, main
from parity.commands.run_command import run_command
from parity.failed_imports import one_line_import_errors
from vit_spec import InputError

LINE = "the package no_cuda is installed and cannot be imported ({}: libcublas.so not found): install it again"


@pytest.fixture(params=["ImportError", "OSError", "ValueError"])
def error(request, tmp_path, monkeypatch):
    """Install the package `no_cuda`, whose import raises an error, and return the name of the error."""
    (tmp_path / "no_cuda").mkdir()
    (tmp_path / "no_cuda/__init__.py").write_text("import no_cuda.libraries")
    (tmp_path / "no_cuda/libraries.py").write_text(f"raise {request.param}('libcublas.so not found\\nin these folders')")
    monkeypatch.syspath_prepend(tmp_path)
    return request.param


def test_a_command_reports_it_in_a_line_and_exits_with_2(error, monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "check", lambda args: import_module("no_cuda"))
    assert main(["check", "weights.npz"]) == 2
    assert run_command(lambda: import_module("no_cuda")) == 2
    assert capsys.readouterr().err == f"error: {LINE.format(error)}\n" * 2


def test_other_errors_are_not_changed():
    for error in (ValueError("of no import"), ModuleNotFoundError(name="torch"), InputError("wrong"), MemoryError()):
        with pytest.raises(type(error)) as raised, one_line_import_errors():
            raise error
        assert raised.value is error
