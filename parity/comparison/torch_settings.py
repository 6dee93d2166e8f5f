"""The PyTorch part of `parity.comparison.framework_settings`: read the settings, and make them strict in a comparison.

Every function takes the module `torch` as an argument, so that this module can be imported without PyTorch.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any


def read_settings(torch: Any) -> dict[str, str | None]:
    """Return every setting of PyTorch by name, for the GPU backend if there is a GPU, else for the CPU backend."""
    backend = "cuda" if torch.cuda.is_available() else "mkldnn"
    names = {"tf32": "TF32", "bf16": "bfloat16"}
    rounding = {op: names.get(torch._C._get_fp32_precision_getter(backend, op), "off") for op in ("matmul", "conv")}
    reduced = [name for name, (read, _, full) in _reduced_precision_switches(torch) if read() != full]
    settings = {
        "matmul TF32": rounding["matmul"],
        "convolution TF32": rounding["conv"],
        "matmul precision": _matmul_precision(torch),
        "excess precision": "off",  # every operation rounds its result
        "fast-math": "off",
        "autotuning": torch._C._get_cudnn_benchmark(),
        "deterministic": torch._C._get_deterministic_algorithms(),
        "reduced-precision reductions": ", ".join(reduced) or "off",
        "autocast": any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
        "flush denormals": _flushes_denormals(torch),
        "threads": str(torch.get_num_threads()),
    }
    return {name: {True: "on", False: "off"}.get(value, value) for name, value in settings.items()}


@contextmanager
def strict_settings(torch: Any) -> Iterator[None]:
    """Set every setting of PyTorch to its strict value, and restore the settings at the end."""
    with ExitStack() as stack:
        stack.enter_context(full_float32(torch))
        for switch in _switches(torch):
            stack.enter_context(_temporarily_set(*switch))
        yield


def describe_blas(torch: Any) -> str:
    """Return the BLAS and oneDNN that PyTorch was built with, and the CPU instructions that it uses."""
    text = torch.__config__.show()
    patterns = {"": r"BLAS_INFO=(\w+)", "MKL ": r"Math Kernel Library Version (\S+?)-", "oneDNN ": r"MKL-DNN v(\S+)"}
    found = [f"{name}{match[1]}" for name, pattern in patterns.items() if (match := re.search(pattern, text))]
    return ", ".join([*found, torch.backends.cpu.get_cpu_capability()])


Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]  # getter, setter, strict value


def _switches(torch: Any) -> Iterator[Switch]:
    """Yield every switch of PyTorch except for the precision of float32."""
    c = torch._C
    yield c._get_cudnn_benchmark, c._set_cudnn_benchmark, False
    yield c._get_cudnn_deterministic, c._set_cudnn_deterministic, True
    yield c._get_mkldnn_deterministic, c._set_mkldnn_deterministic, True
    if not c._get_deterministic_algorithms():
        # torch.use_deterministic_algorithms imports PyTorch's compiler first, which takes a second.  With warn_only PyTorch
        # does not use the deterministic gradients that its fused attention has on GPUs.
        warn_only = not _cublas_is_deterministic(torch)
        yield lambda: False, lambda on: c._set_deterministic_algorithms(on, warn_only=on and warn_only), True
    yield from (switch for _, switch in _reduced_precision_switches(torch))
    for device in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device), False
    yield partial(_flushes_denormals, torch), torch.set_flush_denormal, False


def _reduced_precision_switches(torch: Any) -> Iterator[tuple[str, Switch]]:
    """Yield name and switch of every kind of reduction in reduced precision."""
    c = torch._C
    for kind in ("fp16", "bf16"):
        read = getattr(c, f"_get_cublas_allow_{kind}_reduced_precision_reduction")
        write = getattr(c, f"_set_cublas_allow_{kind}_reduced_precision_reduction")
        if isinstance(read(), tuple):  # from PyTorch 2.10 on; the second value: whether a product may be split into sums
            yield f"cuBLAS {kind}", (read, _unpack_argument(write), (False, True))
        else:
            yield f"cuBLAS {kind}", (read, write, False)
    yield "cuBLAS fp16 sums", (c._get_cublas_allow_fp16_accumulation, c._set_cublas_allow_fp16_accumulation, False)
    yield "attention", (c._get_math_sdp_allow_fp16_bf16_reduction, c._set_math_sdp_allow_fp16_bf16_reduction, False)
    fp16 = "cpu_allow_fp16_reduced_precision_reduction"
    yield "CPU fp16", (getattr(c, f"_get_{fp16}"), getattr(c, f"_set_{fp16}"), False)


def _unpack_argument(write: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda values: write(*values)


@contextmanager
def _temporarily_set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


_PARENTS = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
_NODES = _PARENTS + [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]


@contextmanager
def full_float32(torch: Any) -> Iterator[None]:
    """Disable TF32 and bfloat16 in float32 operations, in both the older and the newer API of these settings.

    PyTorch keeps both (aten/src/ATen/Context.cpp) and refuses to read the older one if the newer one disagrees, so both are
    set to the same.  The newer one is a tree, and reading a node returns the value that it inherits, so the parents are
    cleared first.  The nodes are written directly, because `torch.backends.mkldnn.fp32_precision` sets the root of the
    tree.
    """
    c, before = torch._C, {}
    for node in _NODES:
        before[node] = c._get_fp32_precision_getter(*node)
        c._set_fp32_precision_setter(*node, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 warns that the older API is deprecated when it is read
        matmul, convolution = _matmul_precision(torch), _is_on(c._get_cudnn_allow_tf32)
        torch.set_float32_matmul_precision("highest")
        c._set_cudnn_allow_tf32(False)
    try:
        for node in _NODES:
            c._set_fp32_precision_setter(*node, "ieee")
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision(matmul)
            c._set_cudnn_allow_tf32(convolution)
        for node, precision in before.items():
            c._set_fp32_precision_setter(*node, precision)


def _matmul_precision(torch: Any) -> str:
    """Return the setting of the older API, or that it cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(torch.get_float32_matmul_precision())
        except RuntimeError:
            return "older and newer setting disagree"


def _is_on(read: Callable[[], bool]) -> bool:
    """Return the value of a switch of the older API.

    PyTorch refuses to read a switch that is on while all switches of the newer API are off.
    """
    try:
        return read()
    except RuntimeError:
        return True


def _flushes_denormals(torch: Any) -> bool:
    """Return whether PyTorch on CPU makes denormal numbers zero; this computes with one, because there is no getter."""
    return not (torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1).item()


def _cublas_is_deterministic(torch: Any) -> bool:
    """Return whether cuBLAS adds in the same order in every run; set the variable for it if cuBLAS has not read it yet.

    cuBLAS reads CUBLAS_WORKSPACE_CONFIG only once, at the first product on a GPU.
    """
    if not torch.cuda.is_available():
        return False
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return "CUBLAS_WORKSPACE_CONFIG" in os.environ
