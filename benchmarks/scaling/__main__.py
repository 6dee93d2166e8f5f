"""Memory, communication and expected efficiency of ViT-L/16, g/14 and 22B on 8 to 256 devices, computed and checked.

    python -m benchmarks.scaling                       # the tables of docs/measurements/scaling.md, from the estimate alone
    python -m benchmarks.scaling --picture FILE.svg    # the picture of that page
    python -m benchmarks.scaling --check               # the estimate beside programs for up to 256 simulated CPU devices
    python -m benchmarks.scaling --check h100.txtpb    # the same for 256 GPUs of the kind that the file describes

Nothing is trained and no time is measured: times follow from the rates in `benchmarks.scaling.times`.  The module
`benchmarks.cross_compile` says where descriptions of GPUs are found, and what else they need.
"""

import argparse
import os
import platform
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vit_spec
from benchmarks.scaling import programs
from benchmarks.scaling.plans import (
    BATCH_SIZE,
    COUNTS,
    MESHES,
    MODELS,
    THRESHOLD,
    Plan,
    config_of,
    fitting_plan,
    smallest_batch,
)
from benchmarks.scaling.times import GIB, H100, TPU_V5P, Machine
from train.plan import bytes_sent

UTILIZATION = 0.4  # the default of --plan
SMALLEST = f"smallest batch that fits with an efficiency of {THRESHOLD}, with and without overlap"
AXES = ("data", "fsdp", "data+fsdp", "tensor")


def print_model(name: str, utilization: float) -> None:
    """Print memory, times and efficiency of a model on H100 by mesh and number of devices, and the bytes that it sends."""
    plans = {label: [fitting_plan(name, mesh, count, H100) for count in COUNTS] for label, mesh in MESHES.items()}
    tables: dict[str, Any] = {
        "Memory per device, GiB": lambda plan: _with_options(f"{plan.memory / GIB:.1f}", plan),
        "Compute + communication along data and fsdp + along tensor, ms": lambda plan: " + ".join(
            f"{1e3 * seconds:.1f}" for seconds in plan.times(H100, utilization)
        ),
        "Efficiency, without and with overlap": lambda plan: "{:.2f} to {:.2f}".format(*_efficiencies(plan, utilization)),
    }
    print(f"\n## {name}: {vit_spec.count(config_of(name)) / 1e9:.2f} billion parameters\n")
    for title, cell in tables.items():
        print(f"{title}:\n")
        _print_rows(COUNTS, {label: [cell(p) if p else "-" for p in row] for label, row in plans.items()})
    print(f"Sent per device and step with {COUNTS[-1]} devices, by axis, GiB:\n")
    _print_rows(AXES, {label: _sent_cells(row[-1]) for label, row in plans.items() if row[-1]})
    print(f"{SMALLEST.capitalize()}:\n")
    _print_smallest_batches(H100, {count: (name, count) for count in COUNTS}, utilization)


def _print_rows(columns: Iterable[Any], rows: dict[str, list[str]]) -> None:
    header = ["mesh", *map(str, columns)]
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    for label, row in rows.items():
        print(f"| {label} | {' | '.join(row)} |")
    print(flush=True)


def _with_options(value: str, plan: Plan) -> str:
    """Return a value with what `--remat` recomputes and the parts of `--accumulate`, if the plan would not fit without."""
    options = [plan.recipe.remat] if plan.recipe.remat != "none" else []
    options += [f"/ {plan.recipe.accumulate}"] if plan.recipe.accumulate > 1 else []
    return " ".join([value, *options])


def _efficiencies(plan: Plan, utilization: float) -> tuple[float, float]:
    times = plan.times(H100, utilization)
    return times.efficiency, times.best_efficiency


def _sent_cells(plan: Plan) -> list[str]:
    sent: Counter[str] = Counter()
    for (kind, axes), size in plan.estimate.transfers.items():
        sent[axes] += bytes_sent(kind, axes, size, plan.sizes)  # type: ignore[assignment]
    return [f"{sent[axes] / GIB:.3f}" if axes in sent else "" for axes in AXES]


def _print_smallest_batches(machine: Machine, columns: dict[Any, tuple[str, int]], utilization: float) -> None:
    """Print the smallest batches that fit and with which each mesh pays.  columns: model and number of devices."""

    def cell(mesh: str, name: str, count: int) -> str:
        if not fitting_plan(name, mesh, count, machine, images=1):
            return "does not fit"
        plans = (smallest_batch(name, mesh, count, machine, utilization, overlaps) for overlaps in (True, False))
        best, worst = (_with_options(f"{plan.recipe.batch_size:,}", plan) if plan else "none" for plan in plans)
        return "none" if best == "none" else f"{best} to {worst}"

    _print_rows(columns, {label: [cell(mesh, *column) for column in columns.values()] for label, mesh in MESHES.items()})


def draw(path: Path, utilization: float) -> None:
    """Draw the efficiency without overlap by the number of devices, with a panel for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scaling", "svg.fonttype": "none"}  # reproducible bytes, and text as text
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, name in zip(panels, MODELS, strict=True):
        for label, mesh in MESHES.items():
            plans = {count: plan for count in COUNTS if (plan := fitting_plan(name, mesh, count, H100))}
            panel.plot(list(plans), [_efficiencies(p, utilization)[0] for p in plans.values()], ".-", label=label)
        panel.axhline(THRESHOLD, color="0.5", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(COUNTS, map(str, COUNTS))
        panel.set(title=name, xlabel="devices", ylim=(0, 1.02))
    panels[0].set_ylabel("efficiency without overlap")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MESHES), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the tables, compare the estimate with compiled programs, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--utilization", type=float, default=UTILIZATION, help="share of its peak that a device reaches")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the efficiency instead")
    parser.add_argument("--check", nargs="?", const="", metavar="FILE", help="compile, by default for simulated devices")
    args = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax", "numpy"))
    print(f"Python {platform.python_version()}, {packages}")
    if args.check is not None:
        # Before jax is imported.  The programs do not run, so they need not be fast.
        flags = f"--xla_force_host_platform_device_count={COUNTS[-1]} --xla_backend_optimization_level=0"
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
        programs.print_described(args.check) if args.check else programs.print_simulated()
    elif args.picture:
        draw(args.picture, args.utilization)
    else:
        print(f"{BATCH_SIZE:,} images per step, {args.utilization:.0%} of the peak")
        for name in MODELS:
            print_model(name, args.utilization)
        print(f"\n## {TPU_V5P.name}: {SMALLEST}\n")
        columns = {f"{name}, {COUNTS[-1]}": (name, COUNTS[-1]) for name in MODELS}
        _print_smallest_batches(TPU_V5P, columns, args.utilization)


if __name__ == "__main__":
    main()
