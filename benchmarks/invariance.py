"""Batch invariance and determinism of both twins at full size, in float32 and float64.

Run `python -m benchmarks.invariance [MODEL ...]`.  It prints the table "Batch invariance" of docs/measurements/parity.md.
Weights are those of an initialized model with noise on every entry; the eight images are noise.
"""

import argparse
import platform
from importlib.metadata import version

import vit_spec
from parity.checkpoints.weights import as_checkpoint
from parity.comparison.invariance.report import InvarianceReport
from parity.comparison.invariance.twins import twins_invariance
from tests.twins import perturbed_params


def table_rows(name: str, report: InvarianceReport) -> list[str]:
    """Return a row for each condition, with its change in both types."""
    rows: dict[str, dict[str, str]] = {}
    for change in report.changes:
        told = "bit-equal" if change.bit_equal else f"{change.difference:.1e} ({change.largest:.1e})"
        rows.setdefault(change.condition, {})[change.dtype] = told
    return [
        f"| {name} | {report.framework} | {condition} | {told['float32']} | {told.get('float64', 'not run')} |"
        for condition, told in rows.items()
    ]


def main() -> None:
    """Print the table, each model as soon as it is computed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["vit_s16"], metavar="MODEL")
    models = parser.parse_args().models
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "numpy"))
    print(f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, {versions}\n")
    print("| model | twin | condition | float32 | float64 |\n|---|---|---|---|---|")
    for name in models:
        config = vit_spec.get(name)
        report = twins_invariance(as_checkpoint(perturbed_params(config), config, "jax"))
        print("\n".join([*table_rows(name, report.jax), *table_rows(name, report.torch)]), flush=True)


if __name__ == "__main__":
    main()
