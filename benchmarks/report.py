"""The results as tables in Markdown, and as a picture."""

import math
from pathlib import Path
from typing import Any

from benchmarks.peers import LIBRARIES
from train.loop.peak_flops import peak_flops

Json = dict[str, Any]

MEASURES = {"step": "training step", "gradient": "forward + backward", "forward": "forward", "latency": "latency, 1 image"}


def markdown(results: Json) -> str:
    """Return the tables, with the machine and the versions above and what was left out below."""
    sections = [machine_line(results)]
    for block in _blocks(results):
        sections += [f"### {_title(block[0])}", times_table(results, block)]
        if any(result["ratio_to_reference"] for result in block):
            sections.append(ratios_table(block))
    if skipped := results.get("skipped"):
        left_out = [f"- {each['contestant']}, {each['model']}: {each['reason']}" for each in skipped]
        sections += ["Left out:", "\n".join(left_out)]
    if results["lines"]:
        sections.append("\n".join(f"- {name}: {line['text']}" for name, line in results["lines"].items()))
    return "\n\n".join(sections)


def machine_line(results: Json) -> str:
    """Return the hardware, the measured rates and the versions, as sentences."""
    hardware = results["hardware"]
    cores, memory = hardware["usable_cores"], hardware["memory_bytes"] / 2**30
    devices = [results["device"]] if results.get("device", "cpu") != "cpu" else []
    if devices and hardware["gpu_driver"]:
        devices.append(f"driver {hardware['gpu_driver']}")
    text = [
        f"{', '.join([*devices, _processor(hardware)])}, {cores} cores, {memory:.0f} GiB, Python {hardware['python']}. "
        f"Revision {_short(results['revision'])}."
    ]
    if best := results.get("bandwidth", {}).get("best"):
        text.append(f"A copy moves {best / 1e9:.1f} GB/s.")
    for rate in results.get("products", []):
        each = [
            f"{name} {value / 1e9:,.0f}" for name, value in rate["flops_per_second"].items() if value and name != "best"
        ]
        shapes = f"{rate['model']}, {rate['batch_size']} images, in {rate['dtype']}"
        text.append(f"Matrix products of {shapes}: {', '.join(each)} GFLOP/s.")
    versions: dict[str, str] = dict(results["versions"])
    for result in results["results"]:
        library = LIBRARIES[result["library"]]
        frameworks = {name: version for name, version in result["versions"].items() if name != library.package}
        own = _short(results["sources"][library.name]) if library.is_clone else result["versions"][library.package]
        versions |= frameworks | {library.name if library.by_source else library.package: own}
    text.append(", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".")
    if results["results"]:
        text.append(f"Medians of {results['turns']} turns (least to most).")
    return " ".join(text)


def _short(revision: str) -> str:
    """Return an abbreviated commit, with the plus sign of one whose files were changed."""
    return revision[:9] + "+" * revision.endswith("+")


def _processor(hardware: Json) -> str:
    """Return the name of the processor, with its family, model and instructions where the system tells them."""
    facts = [f"family {hardware['family']} model {hardware['model']}"] if hardware["family"] else []
    facts += [" ".join(hardware["instructions"])] if hardware["instructions"] else []
    return hardware["processor"] + (f" ({', '.join(facts)})" if facts else "")


def _blocks(results: Json) -> list[list[Json]]:
    """Return the results that are in the same table."""
    found: dict[Any, list[Json]] = {}
    for result in results.get("results", []):
        found.setdefault((result["model"], result["batch_size"], result["allocator"]), []).append(result)
    return list(found.values())


def _title(result: Json) -> str:
    allocator = "" if result["allocator"] == "the framework's" else f", allocator: {result['allocator']}"
    return f"{result['model']}, {result['batch_size']} images{allocator}"


def times_table(results: Json, block: list[Json]) -> str:
    """Return the table of times, memory and shares of the peak."""
    measures = _measures(block)
    units = [f"{MEASURES[name]}, {'ms' if name == 'latency' else 's'}" for name in measures]
    share = "step, share of peak" if block[0]["device"] != "cpu" else "step, share of products"
    header = ["contestant", *units, "step, images/s", share, "peak memory, MiB", "first step after, s", "logits"]
    rows = [header, ["---"] * len(header)]
    for result in block:
        cells = [_spread(result["seconds"].get(name), 1e3 if name == "latency" else 1) for name in measures]
        rate = result["batch_size"] / result["seconds"]["step"]["median"]
        part = share_of_peak(results, result)
        cells += [f"{rate:,.1f}", f"{part:.0%}" if part else "not known", f"{result['peak_memory_bytes'] / 2**20:,.0f}"]
        rows.append(
            [
                result["contestant"],
                *cells,
                f"{result['first_step_seconds']:.1f}",
                f"{result['errors_of_forward']['logits']:.0e}",
            ]
        )
    return _table(rows)


def ratios_table(block: list[Json]) -> str:
    """Return the table of times divided by those of the twin, within each turn."""
    measures = _measures(block)
    rows = [["time / time of the twin", "twin", *(MEASURES[name] for name in measures)]]
    rows.append(["---"] * len(rows[0]))
    for result in block:
        if ratios := result["ratio_to_reference"]:
            rows.append([result["contestant"], result["reference"], *(_spread(ratios.get(name)) for name in measures)])
    return _table(rows)


def share_of_peak(results: Json, result: Json) -> float | None:
    """Return the FLOP/s of a training step divided by the device's peak; None if that is not known.

    The peak of a GPU is that of its data sheet.  That of a CPU is the best measured rate of the matrix products of the
    model's forward pass.
    """
    flops = 3 * result["flops_of_forward"] * result["batch_size"] / result["seconds"]["step"]["median"]
    peak = peak_flops(result["device"])
    if result["device"] == "cpu":
        wanted = (result["model"], result["batch_size"], result["dtype"])
        rates = [each for each in results["products"] if (each["model"], each["batch_size"], each["dtype"]) == wanted]
        peak = rates[0]["flops_per_second"]["best"] if rates else None
    return flops / peak if peak else None


def _measures(block: list[Json]) -> list[str]:
    """Return the functions that were timed for some result."""
    return [name for name in MEASURES if any(name in result["seconds"] for result in block)]


def _spread(values: Json | None, factor: float = 1.0) -> str:
    """Return the median, the least and the most, to three digits of the median; "" for a function that was not timed."""
    if values is None:
        return ""
    numbers = [factor * values[name] for name in ("median", "least", "most")]
    digits = max(0, 2 - math.floor(math.log10(numbers[0])))
    middle, least, most = (f"{number:.{digits}f}" for number in numbers)
    return f"{middle} ({least} to {most})"


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(results: Json, path: Path) -> None:
    """Draw the throughput of training steps and forward passes as bars, one row of panels for each model.

    Lines from the least to the most show the spread of the turns.  Twins with the function of another library, and the
    default settings of the allocator, are only in the tables.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    blocks = [
        [result for result in block if not result["function"]]
        for block in _blocks(results)
        if block[0]["allocator"] != "default"
    ]
    measures = [name for name in ("step", "forward") if all(name in _measures(block) for block in blocks)]
    heights = [len(block) for block in blocks]
    with pyplot.rc_context({"svg.hashsalt": "benchmarks", "font.size": 9}):
        figure, panels = pyplot.subplots(
            len(blocks), len(measures), squeeze=False, layout="constrained", height_ratios=heights,
            figsize=(5 * len(measures), 0.6 + sum(0.24 * height + 0.8 for height in heights)),
        )  # fmt: skip
        for row, block in zip(panels, blocks, strict=True):
            for axes, measure in zip(row, measures, strict=True):
                _draw_panel(axes, block, measure)
        device = results["device"]
        figure.suptitle(results["hardware"]["processor"] if device == "cpu" else device)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _draw_panel(axes: Any, block: list[Json], measure: str) -> None:
    """Draw the images/s of the contestants, the fastest at the top."""
    count = block[0]["batch_size"]
    rates = {
        result["contestant"]: [count / result["seconds"][measure][name] for name in ("median", "most", "least")]
        for result in block
        if measure in result["seconds"]
    }
    names = sorted(rates, key=lambda name: rates[name][0])
    middle = [rates[name][0] for name in names]
    spreads = [[rates[name][0] - rates[name][1] for name in names], [rates[name][2] - rates[name][0] for name in names]]
    colors = ["tab:blue" if name.startswith(("vit_jax", "vit_torch")) else "tab:gray" for name in names]
    axes.barh(names, middle, xerr=spreads, color=colors, error_kw={"linewidth": 1})
    axes.set_title(f"{block[0]['model']}: {MEASURES[measure]}, images/s (batch {count})", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
