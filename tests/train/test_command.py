"""How the process of a trainer's command ends."""

import os
import sys
from importlib import import_module

import pytest

from parity.commands.run_command import BAD_INPUT
from train import cli
from vit_spec import InputError
from vit_spec.missing_packages import EXTRAS


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_an_unexpected_error_in_one_of_several_processes_is_printed_and_ends_it_without_cleanup(
    trainer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The framework's cleanup would wait for the other processes, JAX's for two minutes."""
    framework = pytest.importorskip(trainer)
    pytest.importorskip("sklearn")  # has the digits, the default data
    module = import_module(f"train.{trainer}.__main__")

    def fail(*arguments: object) -> int:
        raise RuntimeError("the model is broken")

    def exit_at_once(status: int) -> None:
        raise SystemExit(f"at once with {status}")

    monkeypatch.setattr(module, "fit", fail)
    monkeypatch.setattr(module.interruption, "exit_on_ctrl_c", lambda: None)
    monkeypatch.setattr(framework.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", exit_at_once)
    monkeypatch.setattr(sys, "argv", ["train", "--config", "tiny"])
    with pytest.raises(SystemExit, match=r"at once with 1$"):
        module.command()
    errors = capsys.readouterr().err
    assert "Traceback" in errors and "RuntimeError: the model is broken" in errors


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_help_needs_none_of_the_packages_that_training_needs(
    trainer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*EXTRAS, *(name for name in sys.modules if name.startswith("train.data.sources"))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as caught:
        cli.main(f"train.{trainer}", pytest.fail, ["--config", "tiny", "--help"])
    assert caught.value.code == 0 and "--batch-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--config", "tiny"], "packages jax and PIL are not installed: pip install '.[jax,train]'"),
        (["--config", "tiny", "--check-data=a.csv"], "package PIL is not installed: pip install '.[train]'"),
    ],
)
def test_an_error_about_a_missing_package_names_the_framework_that_is_missing_too(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_dataset(data: str, held_out: object) -> None:
        raise ModuleNotFoundError("No module named 'PIL'", name="PIL")

    monkeypatch.setattr("train.data.sources.open_dataset", open_dataset)
    monkeypatch.setitem(sys.modules, "jax", None)
    assert cli.main("train.jax", pytest.fail, arguments) == BAD_INPUT
    assert capsys.readouterr().err == f"error: the {what} in the checkout\n"


def test_a_leading_tilde_of_run_is_the_home_folder(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("HOME", str(tmp_path))
    for arguments in (["--run", "~/new"], ["--run=~/new"]):
        assert cli.parse_request("train.torch", arguments).recipe.run == f"{tmp_path}/new"
    with pytest.raises(InputError, match=f"{tmp_path}/none"):
        cli.parse_request("train.torch", ["--resume", "~/none"])
