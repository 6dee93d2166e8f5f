"""What the pages name exists, and the figure at the top of README.md is the measured one."""

import pkgutil
import re

from tests import ROOT

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


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
