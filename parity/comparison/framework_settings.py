"""Settings of JAX and PyTorch that change numerical results: audit them, set strict values for a comparison, record them.

The same model gives different results if TF32 is allowed, if sums are computed in half precision, or if XLA keeps more
digits than a type has.  `strict_settings` changes the settings that can be set at run time, and `compiler_options` returns
the options that XLA takes for each compilation.  `exact_jax` runs JAX on CPU in a given dtype.  `audit` returns the current
settings, and `environment` the versions, hardware and settings that a result or a golden file records.  All functions work
if PyTorch is not installed, and all but `exact_jax` if JAX is not.
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

_UNCHANGED = "unchanged"

_STRICT = {  # name of a setting -> its value during a comparison, and its description
    "matmul TF32": ("off", "float32 matrix products with operands rounded to TF32 (10 bits) or bfloat16 (7 bits)"),
    "convolution TF32": ("off", "the same in convolutions, where PyTorch allows it on GPUs by default"),
    "matmul precision": ("highest", "the settings of that name, from which the two above follow"),
    "x64": ("on in float64", "without it JAX converts float64 to float32"),
    "excess precision": ("off", "intermediate results keep more digits than their type has; matters below float32"),
    "fast-math": ("off", "reordered sums and approximated functions"),
    "fast min and max": ("off", "a minimum or maximum that need not propagate NaN"),
    "fusion": (_UNCHANGED, "XLA kernels on CPU that fuse a product or a sum with its neighbours (jax#39103)"),
    "autotuning": ("off", "kernels chosen by timing, which may differ between runs"),
    "deterministic": ("on", "kernels that add in the same order in every run"),
    "reduced-precision reductions": ("off", "sums of half-precision products in half precision"),
    "autocast": ("off", "operations cast to half precision"),
    "flush denormals": ("off in torch", "float32 numbers below 1.2e-38 become zero, always so in XLA on CPU"),
    "threads": (_UNCHANGED, "sums are split among them, so their number changes the last digit"),
}
# Differences in these are expected and far below every tolerance, or repeat those in the settings of TF32.
_HARMLESS = ("matmul precision", "fusion", "flush denormals", "threads")

_BOTH, _JAX, _TORCH = (True, True), (True, False), (False, True)
_ENVIRONMENT_VARIABLES = {  # environment variable -> whether JAX and PyTorch read it
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

_FULL_PRECISION = (
    "highest",
    "float32",
    "F32_F32_F32",
    "F64_F64_F64",
)  # values of jax_default_matmul_precision that do not round
_XLA_DEFAULTS = {  # defaults of the compiler, as XLA_FLAGS=--help prints them
    "xla_allow_excess_precision": "true",
    "xla_cpu_enable_fast_math": "false",
    "xla_cpu_enable_fast_min_max": "true",
    "xla_gpu_enable_fast_min_max": "false",
    "xla_gpu_deterministic_ops": "false",
    "xla_gpu_autotune_level": "4",
    "xla_gpu_ftz": "false",
}
_XLA_STRICT: dict[str, dict[str, Any]] = {  # for each backend only its own flags, because XLA refuses unknown flags
    "cpu": {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": False,  # if it is off, XLA ignores the more specific flags of fast-math
        "xla_cpu_enable_fast_min_max": False,
    },
    "gpu": {
        "xla_allow_excess_precision": False,
        "xla_gpu_enable_fast_min_max": False,
        "xla_gpu_ftz": False,
        "xla_gpu_deterministic_ops": True,  # disables autotuning too
        "xla_gpu_enable_triton_gemm": False,  # autotuning would choose its kernels
    },
}
# A float64 run is executed a few times, so compiling it quickly matters more than its speed.  A float32 run whose rounding
# errors are measured keeps XLA's default options.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_FUSION = "xla_cpu_experimental_ynn_fusion_type"


@dataclass(frozen=True)
class Setting:
    """A setting that may change numerical results.

    name: name of the setting.
    jax, torch: its value in each framework; None if the framework lacks it or is not installed.
    strict: its value during a comparison.
    note: description.
    """

    name: str
    jax: str | None
    torch: str | None
    strict: str
    note: str

    @property
    def differs(self) -> bool:
        """Whether the two frameworks differ in a way that matters."""
        return None not in (self.jax, self.torch) and self.jax != self.torch and self.name not in _HARMLESS


def audit(options: Mapping[str, Any] | None = None) -> tuple[Setting, ...]:
    """Return the current settings of both frameworks, and the relevant environment variables that are set.

    options: options of XLA's compiler, such as those of `compiler_options`, that override the current settings of JAX.
    """
    jax, torch = _import_or_none("jax"), _import_or_none("torch")
    in_jax = _jax_settings(jax, options or {}) if jax else {}
    in_torch = torch_settings.read_settings(torch) if torch else {}
    settings = [Setting(name, in_jax.get(name), in_torch.get(name), *strict) for name, strict in _STRICT.items()]
    for name, readers in _ENVIRONMENT_VARIABLES.items():
        if (value := os.environ.get(name)) is not None:
            value = _read_xla_flags(value) if name == "XLA_FLAGS" else value
            jax_value, torch_value = (value if reads else None for reads in readers)
            settings.append(Setting(name, jax_value, torch_value, _UNCHANGED, "an environment variable"))
    return tuple(settings)


def compiler_options(strict: bool = True) -> dict[str, Any]:
    """Return strict options for `jax.jit(compiler_options=...)` on the backend of JAX's default device; {} if not strict.

    Other options may be added: {**compiler_options(), "xla_cpu_experimental_ynn_fusion_type": ""}.
    """
    jax = _import_or_none("jax")
    return dict(_XLA_STRICT.get(_jax_backend(jax), {})) if strict and jax else {}


@contextmanager
def strict_settings() -> Iterator[None]:
    """Set every run-time setting of both frameworks to its strict value, and restore it at the end.

    For an algorithm without a deterministic form, PyTorch issues a warning.  On a GPU it raises an error instead, if
    CUBLAS_WORKSPACE_CONFIG is set or nothing has run on the GPU yet.  In the second case this function sets the variable,
    which stays set, because cuBLAS reads it only once.
    """
    jax, torch = _import_or_none("jax"), _import_or_none("torch")
    with ExitStack() as stack:
        if jax:
            stack.enter_context(jax.default_matmul_precision("highest"))
        if torch:
            stack.enter_context(torch_settings.strict_settings(torch))
        yield


@contextmanager
def exact_jax(dtype: str) -> Iterator[None]:
    """Run JAX on CPU in a dtype, "float64" or "float32", with matrix products computed in that dtype."""
    import jax

    cpu = jax.default_device(jax.devices("cpu")[0])
    jit = jax.disable_jit(False)  # which the caller may have disabled, and traces and compiled runs need
    with jax.enable_x64(dtype == "float64"), cpu, jit, jax.default_matmul_precision("highest"):
        yield


def environment(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return versions, hardware and settings, for JSON.

    The result has no time, host name or path, so it is the same in every process with the same settings.

    options: options of XLA's compiler, as for `audit`.
    """
    jax, torch = _import_or_none("jax"), _import_or_none("torch")
    model, features = _describe_cpu()
    found: dict[str, Any] = {"python": platform.python_version(), **_versions()}
    blas, threads = {"numpy": _describe_numpy_blas()}, {}
    if jax:
        found |= {"backend": jax.default_backend(), "jax device": jax.devices()[0].device_kind}
        threads["jax"] = _xla_threads()
    if torch:
        found["torch device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        blas["torch"], threads["torch"] = torch_settings.describe_blas(torch), torch.get_num_threads()
    found |= {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cpu features": features}
    found |= {"cores": os.cpu_count(), "threads": threads, "blas": blas}
    return found | {"settings": {s.name: {"jax": s.jax, "torch": s.torch} for s in audit(options)}}


# JAX -------------------------------------------------------------------------------------------------------------


def _jax_settings(jax: Any, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Return every setting of JAX on the backend of its default device."""
    backend, precision = _jax_backend(jax), jax.config.jax_default_matmul_precision
    given = dict(re.findall(r"--(xla_\w+)=?(\S*)", _read_xla_flags(os.environ.get("XLA_FLAGS", ""))))
    flags = {**_XLA_DEFAULTS, **given, **{name: str(value) for name, value in options.items()}}

    def flag(name: str) -> str:
        return "off" if flags[name].lower() in ("false", "0") else "on"

    rounding = {"gpu": "TF32", "tpu": "bfloat16"}.get(backend, "off")  # kernels on CPU do not round operands
    settings: dict[str, str | None] = {
        "matmul TF32": "off" if precision in _FULL_PRECISION else rounding,
        "matmul precision": precision or "default",
        "x64": "on" if jax.config.jax_enable_x64 else "off",
        "excess precision": flag("xla_allow_excess_precision"),
    }
    settings["convolution TF32"] = settings["matmul TF32"]
    if backend == "cpu":
        settings["fast-math"] = flag("xla_cpu_enable_fast_math")
        settings["fast min and max"] = flag("xla_cpu_enable_fast_min_max")
        settings["fusion"] = _fusion_kinds(options.get(_FUSION))
        settings["flush denormals"] = "on"
        settings["threads"] = str(_xla_threads())
    if backend == "gpu":
        settings["fast min and max"] = flag("xla_gpu_enable_fast_min_max")
        settings["flush denormals"] = flag("xla_gpu_ftz")
        settings["deterministic"] = flag("xla_gpu_deterministic_ops")
        settings["autotuning"] = "off" if settings["deterministic"] == "on" else flag("xla_gpu_autotune_level")
    return settings


def _jax_backend(jax: Any) -> str:
    """Return the backend of JAX's default device: "cpu", "gpu", "tpu", ..."""
    device = jax.config.jax_default_device
    return str(getattr(device, "platform", device) or jax.default_backend())


def _read_xla_flags(text: str) -> str:
    """Return the value of XLA_FLAGS, read from a file if it names one, without flags that have paths or write dumps."""
    if text and not text.lstrip().startswith("-") and Path(text).is_file():
        text = Path(text).read_text()
    return " ".join(word for word in text.split() if "/" not in word and "dump" not in word)


@cache
def _fusion_kinds(option: str | None) -> str:
    """Return the kinds of operations that XLA fuses on CPU, read from a compiled program because no setting states them."""
    import jax

    options = None if option is None else {_FUSION: option}
    probes: dict[str, Callable[[Any], Any]] = {"dot": lambda x: x @ x, "reduce": lambda x: x.sum(-1)}
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.numpy.zeros((64, 64), np.float32)  # XLA does not fuse smaller sums
        compiled = {name: jax.jit(f, compiler_options=options).lower(x).compile() for name, f in probes.items()}
    return ", ".join(name for name, program in compiled.items() if "__ynn_fusion" in (program.as_text() or "")) or "off"


def _xla_threads() -> int:
    """Return the number of XLA's threads on CPU: NPROC, or the number of cores that the process may use."""
    if (value := os.environ.get("NPROC", "")).isdecimal():
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The machine -----------------------------------------------------------------------------------------------------


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are installed."""
    versions = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "torch", "twin-vision-transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _describe_cpu() -> tuple[str, list[str]]:
    """Return the name of the processor, and its features that decide which kernels a BLAS uses."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    fields: dict[str, str] = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))
    words = fields.get("flags", fields.get("Features", "")).split()
    relevant = re.compile(r"avx\w*|amx\w*|fma|f16c|sse4_[12]|asimd\w*|sve\w*|bf16|i8mm")
    return fields.get("model name", platform.processor()), sorted(filter(relevant.fullmatch, words))


def _describe_numpy_blas() -> str:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"
