"""Packages of the user's own that Python finds in place of this project's."""

from importlib.util import find_spec
from pathlib import Path

from vit_spec.errors import InputError

ROOT = Path(__file__).parents[1]  # all packages of this project lie in one folder


def require_own(package: str) -> None:
    """Raise InputError if `import package` finds another package, or a module, of this name."""
    spec = find_spec(package)
    places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if places and Path(places[0]).parent != ROOT / package:
        raise InputError(
            f"{places[0]} is imported as {package!r}, in place of the package of twin-vision-transformers: rename it, or "
            "start Python in another folder"
        )
