"""Report packages that are not installed: all that are missing, and the command that installs them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from vit_spec.errors import InputError

# The extra of this distribution that installs a package.
EXTRAS = (
    dict.fromkeys(("jax", "jaxlib", "flax", "optax", "chex", "orbax"), "jax")
    | {"torch": "torch", "huggingface_hub": "hub", "pyarrow": "parquet"}
    | dict.fromkeys(("grain", "matplotlib", "PIL", "safetensors", "sklearn", "tensorboardX", "threadpoolctl"), "train")
)
TWIN_PACKAGES = {"jax": ("jax", "flax"), "torch": ("torch",)}  # what each twin imports to run a model


def missing_packages(*packages: str) -> list[str]:
    """Return those of the packages that are not installed; none is imported."""
    return [package for package in packages if find_spec(package) is None]


def not_installed(packages: Sequence[str]) -> str:
    """Return the message that packages are not installed, and the command that installs them.

        the packages jax and torch are not installed: pip install '.[jax,torch]' in the checkout

    Packages that no extra of this distribution installs have no command: their distributions may have other names.
    """
    *others, last = packages
    are = f"packages {', '.join(others)} and {last} are" if others else f"package {last} is"
    if any(package not in EXTRAS for package in packages):
        return f"the {are} not installed: install {'them' if others else 'it'}"
    extras = ",".join(dict.fromkeys(EXTRAS[package] for package in packages))
    return f"the {are} not installed: pip install '.[{extras}]' in the checkout"


def require_packages(purpose: str, *packages: str) -> None:
    """Raise InputError if any of the packages is not installed; the message names all that are missing.

    Args:
        purpose: what needs the packages, a clause that begins the message: "check runs both twins".
        packages: names of packages, as they are imported.
    """
    if missing := missing_packages(*packages):
        raise InputError(f"{purpose}, and {not_installed(missing)}")


@contextmanager
def installation_named() -> Iterator[None]:
    """Add the command that installs a package to the ModuleNotFoundError of its import; its type and name stay."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise ModuleNotFoundError(not_installed([error.name]), name=error.name) from None
