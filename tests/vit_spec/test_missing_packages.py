"""Packages that are not installed are named in one message, with the extra that installs them."""

import sys
import tomllib
from importlib import import_module

import pytest

from tests import ROOT
from vit_spec import InputError
from vit_spec.missing_packages import EXTRAS, installation_named, not_installed, require_packages


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (["jax"], "the package jax is not installed: pip install '.[jax]' in the checkout"),
        (["jax", "torch"], "the packages jax and torch are not installed: pip install '.[jax,torch]' in the checkout"),
        (
            ["jax", "flax", "PIL"],
            "the packages jax, flax and PIL are not installed: pip install '.[jax,train]' in the checkout",
        ),
        (["einops"], "the package einops is not installed: install it"),
        (["einops", "torch"], "the packages einops and torch are not installed: install them"),
    ],
)
def test_the_message_names_all_packages_and_their_extras(packages: list[str], message: str) -> None:
    assert not_installed(packages) == message


def test_only_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages("this reads JSON", "json")
    for name in ("flax", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"^this runs, and the packages flax and torch are not installed: pip install "):
        require_packages("this runs", "flax", "json", "torch")


@pytest.mark.parametrize(("twin", "missing", "extra"), [("jax", "jax", "jax"), ("jax", "flax", "jax"), ("torch",) * 3])
def test_importing_a_twin_without_its_framework_names_the_extra(
    twin: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == f"vit_{twin}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module(f"vit_{twin}")
    assert caught.value.name == missing
    assert str(caught.value) == f"the package {missing} is not installed: pip install '.[{extra}]' in the checkout"


def test_another_missing_package_is_reported_as_python_does() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"), installation_named():
        import_module("no_such_package")


def test_every_extra_is_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
