"""Checks G0 and G1 on models at full size, with XLA's CPU matrix-kernel fusion on and off.

G0 tests that the twins compute the same function in float64, G1 that they are equally accurate in float32.

Run `python -m benchmarks.full_size [MODEL ...]`.  It prints the table "Full size" of docs/measurements/parity.md.  Weights
are those of an initialized model with noise on every entry.  The two images are a brightness gradient with noise.  Every
tensor that `parity.compare` measures is tested.
"""

import argparse
import platform
from importlib.metadata import version
from typing import Any

import vit_spec
from parity.comparison.localisation import GRADIENT_OF
from parity.comparison.twins import Report, compare
from tests.twins import NO_KERNEL_FUSION, perturbed_params, random_images

FUSION: dict[str, dict[str, Any]] = {"fused": {}, "unfused": NO_KERNEL_FUSION}
MODELS = ["vit_s16", "vit_b16", "vit_l16", *(name for name in vit_spec.names() if name.startswith("article_"))]


def table_row(name: str, fusion: str, report: Report) -> str:
    """Return one row of the table."""
    forward = [m for m in report.measures if not m.name.startswith(GRADIENT_OF) and m.name != "gradient"]
    gradients = [m for m in report.measures if m.name.startswith(GRADIENT_OF)]
    logits = next(m for m in report.measures if m.name == "logits")
    whole_gradient = report.measures[-1]
    worst = [f"{max(m.difference for m in measures):.1e}" for measures in (forward, gradients)]
    sides = [[getattr(m, side).relative_rms(m.scale) for side in ("jax", "torch")] for m in (logits, whole_gradient)]
    pairs = [f"{jax:.1e} / {torch:.1e}" for jax, torch in sides]
    verdict = "PASS" if report.passed else report.verdict
    return f"| {name} | {fusion} | {' | '.join(worst)} | {' | '.join(pairs)} | {len(report.measures)} | {verdict} |"


def main() -> None:
    """Print the table, each row as soon as it is computed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    models = parser.parse_args().models
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "flax", "torch", "numpy"))
    print(f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, {versions}\n")
    print("| model | fusion | forward | gradients | logits, float32 | gradient, float32 | tensors | |")
    print("|---|---|---|---|---|---|---|---|")
    for name in models:
        config = vit_spec.get(name)
        params = perturbed_params(config)
        for fusion, options in FUSION.items():
            print(
                table_row(name, fusion, compare(config, params, images=random_images(config), xla_options=options)),
                flush=True,
            )


if __name__ == "__main__":
    main()
