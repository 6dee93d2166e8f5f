"""What the frameworks are set to, and what it is computed on: audited first, made strict for a check, recorded with it.

A model differs from itself when TF32 is allowed, when sums are kept in half precision, when XLA keeps more digits than a
type has.  `strict` sets what can be set at run time, `compiler_options` what XLA takes per compilation; `audit` says what
is in force, and `environment` is the card that a result or a golden file carries.  All work with a framework missing.
"""

import importlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from parity.comparison import torch_settings

_KEPT = "as it is"

_STRICT = {  # a setting: what a check sets it to, and what it is
    "matmul TF32": ("off", "products of float32 matrices of entries rounded to TF32 (10 bits) or bfloat16 (7 bits)"),
    "convolution TF32": ("off", "the same in convolutions, where PyTorch allows it on GPUs unless told otherwise"),
    "matmul precision": ("highest", "what the settings of that name say; the two above are what comes of it"),
    "x64": ("on in float64", "without it JAX makes float64 float32"),
    "excess precision": ("off", "more digits between two operations than their type has; matters below float32"),
    "fast-math": ("off", "sums reordered, functions approximated"),
    "fast min and max": ("off", "a minimum or maximum that need not pass NaN on"),
    "fusion": (_KEPT, "kernels of XLA on CPU that take a product or a sum together with its neighbours (jax#39103)"),
    "autotuning": ("off", "kernels chosen by timing them, which may choose another the next time"),
    "deterministic": ("on", "kernels that add in the same order every time"),
    "reduced-precision reductions": ("off", "sums of half-precision products kept in half precision"),
    "autocast": ("off", "operations cast to half precision on the way"),
    "flush denormals": ("off in torch", "numbers below 1.2e-38 made zero, which XLA on CPU always does"),
    "threads": (_KEPT, "sums are split among them, so the last digit depends on their number"),
}
# They differ by nature, far below any bar, or say again what the lines of TF32 say.
_NO_MATTER = ("matmul precision", "fusion", "flush denormals", "threads")

_BOTH, _JAX, _TORCH = (True, True), (True, False), (False, True)
_VARIABLES = {  # of the environment: which side reads them
    "XLA_FLAGS": _JAX,
    "JAX_PLATFORMS": _JAX,
    "JAX_ENABLE_X64": _JAX,
    "JAX_DEFAULT_MATMUL_PRECISION": _JAX,
    "JAX_DEFAULT_DTYPE_BITS": _JAX,
    "JAX_NUMPY_DTYPE_PROMOTION": _JAX,
    "JAX_DISABLE_JIT": _JAX,
    "NPROC": _JAX,
    "NVIDIA_TF32_OVERRIDE": _BOTH,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _TORCH,
    "CUBLAS_WORKSPACE_CONFIG": _TORCH,
    "OMP_NUM_THREADS": _TORCH,
    "MKL_NUM_THREADS": _TORCH,
    "MKL_CBWR": _TORCH,
    "ONEDNN_MAX_CPU_ISA": _TORCH,
    "ATEN_CPU_CAPABILITY": _TORCH,
}

_FULL = ("highest", "float32", "F32_F32_F32", "F64_F64_F64")  # values of jax_default_matmul_precision that round nothing
_XLA = {  # what the compiler does unless told otherwise, as XLA_FLAGS=--help prints it
    "xla_allow_excess_precision": "true",
    "xla_cpu_enable_fast_math": "false",
    "xla_cpu_enable_fast_min_max": "true",
    "xla_gpu_enable_fast_min_max": "false",
    "xla_gpu_deterministic_ops": "false",
    "xla_gpu_autotune_level": "4",
    "xla_gpu_ftz": "false",
}
_XLA_STRICT: dict[str, dict[str, Any]] = {  # a flag of another backend may be unknown to it, and is then refused
    "cpu": {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": False,  # without it, its finer flags are ignored
        "xla_cpu_enable_fast_min_max": False,
    },
    "gpu": {
        "xla_allow_excess_precision": False,
        "xla_gpu_enable_fast_min_max": False,
        "xla_gpu_ftz": False,
        "xla_gpu_deterministic_ops": True,  # switches autotuning off too
        "xla_gpu_enable_triton_gemm": False,  # whose kernels autotuning would choose
    },
}
_FUSION = "xla_cpu_experimental_ynn_fusion_type"


@dataclass(frozen=True)
class Setting:
    """One setting that may change the numbers of a result.

    jax, torch: what each side has; None where it has no such thing, or is not installed.
    strict: what a check sets it to.
    note: what it is.
    """

    name: str
    jax: str | None
    torch: str | None
    strict: str
    note: str

    @property
    def differs(self) -> bool:
        """Whether the two sides differ in a way that matters."""
        return None not in (self.jax, self.torch) and self.jax != self.torch and self.name not in _NO_MATTER


def audit(options: Mapping[str, Any] | None = None) -> tuple[Setting, ...]:
    """Return what both frameworks are set to now, and the variables of the environment that are set and matter.

    options: of XLA's compiler, where what a run was compiled with is asked for.
    """
    jax, torch = _imported("jax"), _imported("torch")
    ours = _of_jax(jax, options or {}) if jax else {}
    theirs = torch_settings.values(torch) if torch else {}
    settings = [Setting(name, ours.get(name), theirs.get(name), *strict) for name, strict in _STRICT.items()]
    for name, readers in _VARIABLES.items():
        if (value := os.environ.get(name)) is not None:
            value = _flags(value) if name == "XLA_FLAGS" else value
            mine, its = (value if reads else None for reads in readers)
            settings.append(Setting(name, mine, its, _KEPT, "a variable of the environment"))
    return tuple(settings)


def compiler_options(strict: bool = True) -> dict[str, Any]:
    """Return what `jax.jit(compiler_options=...)` takes, for the backend of JAX's default device; {} if not strict.

    What it leaves open may be added: {**compiler_options(), "xla_cpu_experimental_ynn_fusion_type": ""}.
    """
    jax = _imported("jax")
    return dict(_XLA_STRICT.get(_platform(jax), {})) if strict and jax else {}


@contextmanager
def strict() -> Iterator[None]:
    """Set all that can be set at run time to its strict value in both frameworks, and restore it at the end.

    Algorithms that have no deterministic form run all the same, with PyTorch's own warning; on a GPU PyTorch refuses them,
    where CUBLAS_WORKSPACE_CONFIG is set or nothing ran on it yet; it is set then, and stays, since cuBLAS reads it once.
    """
    jax, torch = _imported("jax"), _imported("torch")
    with ExitStack() as stack:
        if jax:
            stack.enter_context(jax.default_matmul_precision("highest"))
        if torch:
            stack.enter_context(torch_settings.strict(torch))
        yield


def environment(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return versions, machine and settings, for JSON: the same twice on one machine, without time, host name or path.

    options: of XLA's compiler, as for `audit`.
    """
    jax, torch = _imported("jax"), _imported("torch")
    model, features = _cpu()
    card: dict[str, Any] = {"python": platform.python_version(), **_versions()}
    blas, threads = {"numpy": _numpy_blas()}, {}
    if jax:
        card |= {"backend": jax.default_backend(), "jax device": jax.devices()[0].device_kind}
        threads["jax"] = _xla_threads()
    if torch:
        card["torch device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        blas["torch"], threads["torch"] = torch_settings.blas(torch), torch.get_num_threads()
    card |= {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cpu features": features}
    card |= {"cores": os.cpu_count(), "threads": threads, "blas": blas}
    return card | {"settings": {s.name: {"jax": s.jax, "torch": s.torch} for s in audit(options)}}


# JAX -------------------------------------------------------------------------------------------------------------


def _of_jax(jax: Any, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Every setting that JAX has on the backend of its default device."""
    backend, precision = _platform(jax), jax.config.jax_default_matmul_precision
    written = dict(re.findall(r"--(xla_\w+)=?(\S*)", _flags(os.environ.get("XLA_FLAGS", ""))))
    flags = {**_XLA, **written, **{name: str(value) for name, value in options.items()}}

    def flag(name: str) -> str:
        return "off" if flags[name].lower() in ("false", "0") else "on"

    coarse = {"gpu": "TF32", "tpu": "bfloat16"}.get(backend, "off")  # the CPU's kernels round nothing
    found: dict[str, str | None] = {
        "matmul TF32": "off" if precision in _FULL else coarse,
        "matmul precision": precision or "default",
        "x64": "on" if jax.config.jax_enable_x64 else "off",
        "excess precision": flag("xla_allow_excess_precision"),
    }
    found["convolution TF32"] = found["matmul TF32"]
    if backend == "cpu":
        found["fast-math"] = flag("xla_cpu_enable_fast_math")
        found["fast min and max"] = flag("xla_cpu_enable_fast_min_max")
        found["fusion"] = _fused(options.get(_FUSION))
        found["flush denormals"] = "on"
        found["threads"] = str(_xla_threads())
    if backend == "gpu":
        found["fast min and max"] = flag("xla_gpu_enable_fast_min_max")
        found["flush denormals"] = flag("xla_gpu_ftz")
        found["deterministic"] = flag("xla_gpu_deterministic_ops")
        found["autotuning"] = "off" if found["deterministic"] == "on" else flag("xla_gpu_autotune_level")
    return found


def _platform(jax: Any) -> str:
    """The backend that is computed on: "cpu", "gpu", "tpu", ..."""
    device = jax.config.jax_default_device
    return str(getattr(device, "platform", device) or jax.default_backend())


def _flags(text: str) -> str:
    """XLA's flags, from the file that holds them where one is named; without those of dumps and paths."""
    if text and not text.lstrip().startswith("-") and Path(text).is_file():
        text = Path(text).read_text()
    return " ".join(word for word in text.split() if "/" not in word and "dump" not in word)


@cache
def _fused(option: str | None) -> str:
    """What XLA's fusion on CPU takes, found by looking: it has no setting that can be read."""
    import jax

    options = None if option is None else {_FUSION: option}
    probes: dict[str, Callable[[Any], Any]] = {"dot": lambda x: x @ x, "reduce": lambda x: x.sum(-1)}
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.numpy.zeros((64, 64), np.float32)  # smaller sums are not taken
        compiled = {name: jax.jit(f, compiler_options=options).lower(x).compile() for name, f in probes.items()}
    return ", ".join(name for name, program in compiled.items() if "__ynn_fusion" in (program.as_text() or "")) or "off"


def _xla_threads() -> int:
    """How many threads XLA takes on CPU: as many as the process may use, or as NPROC says."""
    if (told := os.environ.get("NPROC", "")).isdecimal():
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The machine -----------------------------------------------------------------------------------------------------


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "torch", "twin-vision-transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> tuple[str, list[str]]:
    """The processor's name, and those of its features that decide which kernels a BLAS takes."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    fields: dict[str, str] = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))
    words = fields.get("flags", fields.get("Features", "")).split()
    matter = re.compile(r"avx\w*|amx\w*|fma|f16c|sse4_[12]|asimd\w*|sve\w*|bf16|i8mm")
    return fields.get("model name", platform.processor()), sorted(filter(matter.fullmatch, words))


def _numpy_blas() -> str:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"
