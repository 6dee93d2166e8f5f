"""The machine: its hardware, the versions of packages, and rates that bound the speed of a model on it."""

import os
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vit_spec import ViTConfig

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # bfloat16 without the last two is computed in float32
PACKAGES = ("flax", "jax", "jaxlib", "numpy", "optax", "safetensors", "torch")
CALLS_ON_GPU = 20  # of a timing: starting a kernel takes as long as a small product

Shape = tuple[int, int, int, int]  # b products of (m, k) by (k, n)


def hardware() -> dict[str, Any]:
    """Return the processor, its cores, memory and system, and the version of the GPU's driver (None without one)."""
    return {
        **_processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu_driver": _gpu_driver(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "threads": {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
    }


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> dict[str, Any]:
    """Return the name, vendor, family and model of the processor, and those of its instructions that decide results."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))  # the first processor is read last
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "vendor": facts.get("vendor_id"),
        "family": facts.get("cpu family"),
        "model": facts.get("model"),
        "instructions": [name for name in INSTRUCTIONS if name in facts.get("flags", "").split()],
    }


def _gpu_driver() -> str | None:
    """Return the version of NVIDIA's driver; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    return {name: version(name) for name in PACKAGES if find_spec(name)}


def keep_freed_memory(framework: str) -> None:
    """Keep freed memory in this process, as the trainer does; call it before the framework, "torch" or "jax", is used."""
    if framework == "jax":
        from train.jax.runtime import keep_freed_memory as keep
    else:
        from train.loop.process import keep_freed_memory as keep
    keep()


def product_shapes(config: ViTConfig, batch_size: int) -> list[tuple[Shape, int]]:
    """Return the shapes of the matrix products of patch embedding and blocks, and how often each is computed.

    Products with weights are one matrix of all tokens of the batch; those of attention are one for each image and head.
    """
    (rows, columns), (ph, pw) = config.grid, config.patch_size
    tokens, width, heads, dim = config.num_tokens, config.width, config.num_heads, config.head_dim
    m = batch_size * tokens
    blocks = [
        (1, m, width, 3 * heads * dim),
        *[(1, m, heads * dim, width)] * config.attention.proj,
        (1, m, width, config.mlp_dim * (2 if config.mlp.is_gated else 1)),
        (1, m, config.mlp_dim, width),
        (batch_size * heads, tokens, dim, tokens),
        (batch_size * heads, tokens, tokens, dim),
    ]
    patches = (1, batch_size * rows * columns, ph * pw * config.in_channels, width)
    return [(patches, 1), *((shape, config.depth) for shape in blocks)]


def product_flops(shapes: list[tuple[Shape, int]]) -> int:
    """Return the floating-point operations of products, a multiply-add counted as two."""
    return sum(2 * b * m * k * n * times for (b, m, k, n), times in shapes)


def revision(path: str | Path) -> str:
    """Return the git commit of a folder, with a plus sign if files were changed; else the packages installed into it."""
    try:
        commit = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run(["git", "-C", path, "diff", "--stat", "HEAD"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        packages = sorted(each.name.removesuffix(".dist-info") for each in Path(path).glob("*.dist-info"))
        return ", ".join(packages) or "no git"
    return commit.strip() + ("+" if changes.strip() else "")
