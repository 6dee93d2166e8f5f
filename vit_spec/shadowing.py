"""Detect user packages that hide a package of this project because they have the same name."""

from importlib.util import find_spec
from pathlib import Path

from vit_spec.errors import InputError

ROOT = Path(__file__).parents[1]  # the folder that contains all packages of this project


def check_not_shadowed(package: str) -> None:
    """Raise InputError if `import package` would import another package or module of the same name."""
    spec = find_spec(package)
    places = [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if places and Path(places[0]).parent != ROOT / package:
        raise InputError(
            f"{places[0]} is imported as {package!r} instead of the package of twin-vision-transformers: rename it, start "
            "Python in another folder, or use the commands vit-parity, vit-train-jax, vit-train-torch, vit-predict and "
            "vit-evaluate"
        )
