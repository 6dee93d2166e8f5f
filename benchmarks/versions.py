"""Verify the golden files of the tests with the versions of the libraries that are installed here.

Run `python -m benchmarks.versions`.  It prints a row of the table "Verified versions" in docs/guides/ci.md:

- "golden verify": the two files of tests/goldens/versions, which contain the twins' own results, in float64 and float32;
- "twins": the largest relRMS in float64 of either twin from the outputs of other implementations in tests/goldens;
- the other columns: how many of these files timm and transformers, in the versions installed here, compute again with
  the same weights, and their largest relRMS from the stored outputs.

Lines below the row name what could not be computed again, and what differs.
"""

import contextlib
import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version

from parity.comparison import golden
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from tests.goldens.golden import FOLDER, names, read
from tests.goldens.peers import CASES
from tests.test_goldens import TWINS, relative_errors

PACKAGES = ("jax", "flax", "torch", "timm", "transformers")
PEERS = ("timm", "transformers")


def main() -> None:
    """Print the header, and the row of this environment."""
    warnings.simplefilter("ignore")  # of the peers
    for module in ("timm", "timm_blocks", "transformers", "transformers_flax"):
        with contextlib.suppress(ImportError):  # transformers has Flax models before version 5 alone
            importlib.import_module(f"tests.goldens.from_{module}")  # registers its cases
    notes: list[str] = []
    cells = [_version(package) for package in PACKAGES]
    cells += [_verify(notes), _run_twins(notes), *(_run_peer(peer, notes) for peer in PEERS)]
    print(f"| {' | '.join(PACKAGES)} | golden verify | twins | {' | '.join(PEERS)} |")
    print("|" + "---|" * len(cells))
    print(f"| {' | '.join(cells)} |")
    print("\n".join(notes))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _verify(notes: list[str]) -> str:
    """Return the verdict on the golden files of the twins."""
    results = [golden.verify(path) for path in sorted((FOLDER / "versions").glob("*.npz"))]
    notes += [result.verdict for result in results]
    return f"{sum(result.passed for result in results)} of {len(results)} pass"


def _run_twins(notes: list[str]) -> str:
    """Return the largest difference of either twin from all stored outputs."""
    errors = {
        f"{name} in {twin}": max(relative_errors(stored, outputs(stored, stored.config)).values())
        for name, stored in ((name, read(name)) for name in names())
        for twin, outputs in TWINS.items()
    }
    notes += [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= FLOAT64_TOLERANCE]
    return f"{len(names())} files, {max(errors.values()):.1e}"


def _run_peer(peer: str, notes: list[str]) -> str:
    """Return how many golden files of a library it computes again, and its largest difference."""
    stored = {name: golden for name in names() if (golden := read(name)).provenance["peer"].startswith(f"{peer} ")}
    errors: dict[str, float] = {}
    if others := [name for name in stored if name not in CASES]:
        versions = sorted({stored[name].provenance["peer"] for name in others})
        notes.append(f"this version has no model of {', '.join(others)}, recorded with {', '.join(versions)}")
    for name, expected in stored.items():
        if name not in CASES:
            continue
        try:
            found = CASES[name]()
        except Exception as error:
            notes.append(f"{name} raises {type(error).__name__}: {str(error)[:80]}")
            continue
        weights = expected.weights
        if found.weights.keys() != weights.keys() or any((found.weights[key] != weights[key]).any() for key in weights):
            notes.append(f"{name} has other weights, so its outputs cannot be compared")
            continue
        errors[name] = max(  # some outputs are stored for the first image only
            ErrorNorms.of(found.outputs[key][: len(output)], output).relative_rms()
            for key, output in expected.outputs.items()
        )
    notes += [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= FLOAT64_TOLERANCE]
    same = sum(error <= FLOAT64_TOLERANCE for error in errors.values())
    return f"{same} of {len(stored) - len(others)}, {max(errors.values(), default=float('nan')):.1e}"


if __name__ == "__main__":
    main()
