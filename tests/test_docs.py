"""What the pages name exists and what exists is registered and named; figures of README.md are the measured ones."""

import pkgutil
import re
from dataclasses import fields
from typing import Any

import pytest

import vit_spec
from parity.checkpoints import containers, formats
from tests import ROOT
from train.recipes import Augment

PACKAGES = ("vit_spec", "vit_jax", "vit_torch", "parity", "train", "tests")


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {
        path
        for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
        for path in re.findall(r"`(.+?)`", cell)
    }
    existing = [f"/{path.relative_to(ROOT)}" for package in PACKAGES for path in (ROOT / package).rglob("*")]
    # A row names its first file by the whole path, and further files by the end of theirs.
    missing = [name for name in named if not any(path.endswith(f"/{name.rstrip('/')}") for path in existing)]
    assert len(named) > 50 and not missing


def test_the_section_on_augmentation_names_exactly_its_flags() -> None:
    section = (ROOT / "docs" / "reference" / "recipes.md").read_text().partition("\n## Augmentation")[2]
    flags = {f"--augment.{field.name.replace('_', '-')}" for field in fields(Augment)}
    assert set(re.findall(r"--augment\.[a-z-]+", section)) == flags


def test_the_changelog_names_modules_that_exist() -> None:
    page = (ROOT / "CHANGELOG.md").read_text()
    new = {
        name for cell in re.findall(r"^\| `[^|]+` \| (.+) \|$", page, re.MULTILINE) for name in re.findall(r"`(.+?)`", cell)
    }
    assert len(new) > 100
    assert not [name for name in sorted(new) if not resolves(name)]


def test_the_agreement_at_the_top_of_the_readme_is_the_largest_difference_measured_for_that_model() -> None:
    table = (ROOT / "docs" / "measurements" / "parity.md").read_text()
    rows = re.findall(r"^\| vit_b16 \| \w+ \| (\S+) \| (\S+) \|", table, re.MULTILINE)
    (stated,) = re.findall(r"ViT-B/16 agree to (\S+) in float64", (ROOT / "README.md").read_text())
    assert float(stated) == max(float(value) for row in rows for value in row)
    assert f">{stated}<" in (ROOT / "docs" / "overview.svg").read_text()


@pytest.mark.parametrize(
    ("page", "pattern", "count"),
    [
        ("README.md", r"(\d+) formats", len(formats.formats())),
        ("docs/index.md", r"(\d+) formats", len(formats.formats())),
        ("README.md", r"(\d+) (?:models|named)\b", len(vit_spec.names())),
        ("docs/measurements/parity.md", r"all (\d+) named models", len(vit_spec.names())),
    ],
)
def test_pages_state_the_number_of_formats_and_of_models(page: str, pattern: str, count: int) -> None:
    stated = re.findall(pattern, (ROOT / page).read_text())
    is_true = bool(stated) and {int(number) for number in stated} == {count}
    assert is_true, f"{page} states {' and '.join(stated)}, but the registry has {count}"


@pytest.mark.parametrize(
    ("package", "name", "registered"),
    [
        (formats, "FORMAT", [formats.get(name) for name in formats.formats()]),
        (containers, "CONTAINER", [containers.get(name) for name in containers.names()]),
    ],
)
def test_every_format_and_container_is_registered(package: Any, name: str, registered: list[Any]) -> None:
    modules = [pkgutil.resolve_name(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)]
    found = {module.__name__: getattr(module, name) for module in modules if hasattr(module, name)}
    missing = [module for module, each in found.items() if each not in registered]
    assert not missing, f"the registry in {package.__file__} lacks {', '.join(missing)}"
    assert len(found) == len(registered)


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
