"""The twin that runs a model, and the packages that it needs.

The imports here are fast, and need no package of an extra.
"""

from train.inference.arguments import TWINS
from vit_spec import InputError
from vit_spec.missing_packages import TWIN_PACKAGES, missing_packages, not_installed


def choose_twin(twin: str | None) -> str:
    """Return the twin asked for; for None the first one whose packages are installed, or else the first one."""
    return twin or next((name for name in TWINS if not missing_packages(*TWIN_PACKAGES[name])), TWINS[0])


def check_packages(twin: str | None) -> None:
    """Raise InputError if a package is not installed that the twin needs, or that reads or loads images."""
    if missing := missing_packages(*TWIN_PACKAGES[choose_twin(twin)], "PIL", "grain"):
        raise InputError(not_installed(missing))
