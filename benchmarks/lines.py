"""Short versions of other measurements, which `python -m benchmarks` prints as one line each.

A measurement returns its line, and the figures that the line sums up.  Each runs in a process of its own:
`python -m benchmarks.lines NAME FOLDER`, where it may write to FOLDER.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import vit_spec
from benchmarks import check, conversion, input, input_pipeline
from benchmarks.conversion import format_spread
from train.data.batches import Batch
from train.loop.loop_state import LoopState
from train.recipes import Recipe

MODEL = "vit_b16"
CHECKPOINTED_MODEL = "vit_s16"
SMALL_MODEL = "vit_ti16"
RUNS = 3
LOOP_STATE = LoopState()

Line = tuple[str, dict[str, list[float]]]  # the text, and the figures of each run by name


def convert(folder: Path) -> Line:
    """Convert between the twins, beside `cp`; see `benchmarks.conversion`."""
    path = folder / "torch.safetensors"
    conversion.write_source(path, vit_spec.get(MODEL))
    result = conversion.compare_with_cp(path, folder / "jax.safetensors", "jax", RUNS)
    return f"{MODEL}, {path.stat().st_size / 1e6:.0f} MB, torch to jax: {result}", result._asdict()


def load(folder: Path) -> Line:
    """Load a checkpoint into each twin, beside the file alone.  Every weight is read, so that mapped pages count."""
    import jax
    import torch
    from safetensors.torch import load_file

    import vit_jax
    import vit_torch

    path = folder / "torch.safetensors"
    conversion.write_source(path, vit_spec.get(MODEL))

    def torch_twin() -> None:
        sum(parameter.detach().view(torch.int32).sum() for parameter in vit_torch.load(path).parameters())

    def jax_twin() -> None:
        sum(leaf.view(np.int32).sum() for leaf in jax.tree.leaves(vit_jax.load(path)[1]))

    def file_alone() -> None:
        sum(tensor.view(torch.int32).sum() for tensor in load_file(path).values())

    loaders: dict[str, Callable[[], None]] = {"vit_torch": torch_twin, "vit_jax": jax_twin, "safetensors": file_alone}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for run in range(RUNS + 1):  # the first warms up
        for name, loader in loaders.items():
            start = time.perf_counter()
            loader()
            if run:
                times[name].append(time.perf_counter() - start)
    texts = [f"{name} {format_spread(seconds)} s" for name, seconds in times.items()]
    line = f"{MODEL}, {path.stat().st_size / 1e6:.0f} MB, every weight read: {', '.join(texts)}"
    return line, {f"seconds_{name}": seconds for name, seconds in times.items()}


def feed(folder: Path) -> Line:
    """Train on loaded images, beside one batch in memory; see `benchmarks.input_pipeline`."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        input.write_photographs(folder / name, 32)
    augment = ["--augment.crop", "inception"]
    rates, _, _ = input_pipeline.measure(folder, "train.jax", SMALL_MODEL, 16, 3, RUNS, augment)
    ratios = [loaded / fixed for loaded, fixed in zip(rates.loaded, rates.fixed, strict=True)]
    line = (
        f"train.jax, {SMALL_MODEL}: loading alone {max(rates.loading):,.0f} images/s, training on loaded images "
        f"{format_spread(ratios)} times as fast as on one batch"
    )
    return line, {f"images_per_second_{name}": values for name, values in rates._asdict().items()}


def checkpoint(folder: Path) -> Line:
    """Save and restore the training state in each trainer."""
    texts, figures, config = [], {}, vit_spec.get(CHECKPOINTED_MODEL)
    images = np.zeros((1, *config.image_size, config.in_channels), np.uint8)
    batch = Batch(images, np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, bool))
    for trainer in input_pipeline.TRAINERS:
        engine: Any = input_pipeline.engine_class(trainer)(
            config,
            Recipe(batch_size=1),
            task="classes",
            learning_rate=lambda step: 1e-4,
            initial_weights=None,
            folder=folder / trainer,
        )
        (folder / trainer).mkdir()
        blocked, total = [], []
        for step in range(1, RUNS + 1):
            float(engine.step(batch)["loss"])
            start = time.perf_counter()
            engine.save_checkpoint(step, LOOP_STATE)
            blocked.append(time.perf_counter() - start)
            engine.close()
            engine._checkpoints = None  # so that the next one is opened again, as in a run that resumes
            total.append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.restore_checkpoint()
        restored = time.perf_counter() - start
        engine.close()
        figures |= {f"{trainer}_wait_seconds": blocked, f"{trainer}_save_seconds": total}
        figures[f"{trainer}_restore_seconds"] = [restored]
        texts.append(
            f"{trainer} waits {format_spread(blocked)} s for a save, which is complete after "
            f"{format_spread(total)} s, and restores it in {restored:.2f} s"
        )
    size = 12 * vit_spec.count(config)  # weights and two moments, float32
    return f"{CHECKPOINTED_MODEL}, {size / 1e6:,.0f} MB: {'; '.join(texts)}", figures


def check_twins(folder: Path) -> Line:
    """Run `python -m parity check`, without gradients; see `benchmarks.check`."""
    import parity
    from parity.comparison import reproducible_init

    path, config = folder / "model.safetensors", vit_spec.get(SMALL_MODEL)
    parity.save(path, reproducible_init.weights(config, 0).arrays, config, "jax")
    runs = [check.measure_check(path, ["--no-gradients"]) for _ in range(RUNS - 1)]
    seconds, _, memory, verdicts = zip(*runs, strict=True)
    verdict = verdicts[0].partition(":")[0]
    line = f"{SMALL_MODEL}, outputs: {verdict} in {format_spread(list(seconds))} s, with {max(memory) >> 20} MiB"
    return line, {"seconds": list(seconds), "peak_memory_bytes": list(memory)}


LINES: dict[str, Callable[[Path], Line]] = {
    "conversion": convert,
    "loading": load,
    "feeding": feed,
    "checkpointing": checkpoint,
    "check": check_twins,
}


def measure(name: str, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the "text" of a line and its "figures", measured in a process of its own; the reason, if that fails.

    Args:
        name: a key of `LINES`.
        folder: an empty folder, in which files are left.
        say: called with the name.
    """
    say(name)
    own = folder / name
    own.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lines", name, str(own)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = (process.stdout if process.returncode == 0 else process.stderr).strip().splitlines()
    if process.returncode:
        return {"text": f"failed: {lines[-1] if lines else process.returncode}", "figures": {}}
    text, figures = json.loads(lines[-1])
    return {"text": text, "figures": figures}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(LINES[sys.argv[1]](Path(sys.argv[2]))))
