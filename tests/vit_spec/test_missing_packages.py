"""Packages that are not installed are named in one message, with the extra that installs them."""

import sys
import tomllib

import pytest

from tests import ROOT
from vit_spec import InputError
from vit_spec.missing_packages import EXTRAS, not_installed, require_packages


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


def test_every_extra_is_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
