"""PyTorch's half of `parity.comparison.framework_settings`: read its settings, and set strict ones while a check runs.

Every function takes the module `torch`.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any


def values(torch: Any) -> dict[str, str | None]:
    """Return every setting that PyTorch has, of the GPU where there is one."""
    backend = "cuda" if torch.cuda.is_available() else "mkldnn"
    words = {"tf32": "TF32", "bf16": "bfloat16"}
    rounding = {op: words.get(torch._C._get_fp32_precision_getter(backend, op), "off") for op in ("matmul", "conv")}
    on = [name for name, (read, _, full) in _reductions(torch) if read() != full]
    found = {
        "matmul TF32": rounding["matmul"],
        "convolution TF32": rounding["conv"],
        "matmul precision": _matmul_precision(torch),
        "excess precision": "off",  # every operation rounds
        "fast-math": "off",
        "autotuning": torch._C._get_cudnn_benchmark(),
        "deterministic": torch._C._get_deterministic_algorithms(),
        "reduced-precision reductions": ", ".join(on) or "off",
        "autocast": any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
        "flush denormals": _flushes(torch),
        "threads": str(torch.get_num_threads()),
    }
    return {name: {True: "on", False: "off"}.get(value, value) for name, value in found.items()}


@contextmanager
def strict(torch: Any) -> Iterator[None]:
    """Set all of PyTorch's to their strict values, and restore them at the end."""
    with ExitStack() as stack:
        stack.enter_context(_full_float32(torch))
        for switch in _switches(torch):
            stack.enter_context(_switched(*switch))
        yield


def blas(torch: Any) -> str:
    """Return the BLAS, oneDNN and the instructions that PyTorch was built with and takes."""
    text = torch.__config__.show()
    patterns = {"": r"BLAS_INFO=(\w+)", "MKL ": r"Math Kernel Library Version (\S+?)-", "oneDNN ": r"MKL-DNN v(\S+)"}
    found = [f"{name}{match[1]}" for name, pattern in patterns.items() if (match := re.search(pattern, text))]
    return ", ".join([*found, torch.backends.cpu.get_cpu_capability()])


Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]


def _switches(torch: Any) -> Iterator[Switch]:
    """Every switch of PyTorch beside the precision of float32: how to read it, to set it, and its strict value."""
    c = torch._C
    yield c._get_cudnn_benchmark, c._set_cudnn_benchmark, False
    yield c._get_cudnn_deterministic, c._set_cudnn_deterministic, True
    yield c._get_mkldnn_deterministic, c._set_mkldnn_deterministic, True
    if not c._get_deterministic_algorithms():
        # PyTorch's own function imports its compiler first, which takes a second. Told to warn alone, it does not take the
        # deterministic gradients that its fused attention has on GPUs.
        warns = not _repeats_products(torch)
        yield lambda: False, lambda on: c._set_deterministic_algorithms(on, warn_only=on and warns), True
    yield from (switch for _, switch in _reductions(torch))
    for device in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device), False
    yield partial(_flushes, torch), torch.set_flush_denormal, False


def _reductions(torch: Any) -> Iterator[tuple[str, Switch]]:
    """The switches of sums in reduced precision, each with a name."""
    c = torch._C
    for kind in ("fp16", "bf16"):
        read = getattr(c, f"_get_cublas_allow_{kind}_reduced_precision_reduction")
        write = getattr(c, f"_set_cublas_allow_{kind}_reduced_precision_reduction")
        if isinstance(read(), tuple):  # from PyTorch 2.10 on, with whether a product may be split into several sums
            yield f"cuBLAS {kind}", (read, _spread(write), (False, True))
        else:
            yield f"cuBLAS {kind}", (read, write, False)
    yield "cuBLAS fp16 sums", (c._get_cublas_allow_fp16_accumulation, c._set_cublas_allow_fp16_accumulation, False)
    yield "attention", (c._get_math_sdp_allow_fp16_bf16_reduction, c._set_math_sdp_allow_fp16_bf16_reduction, False)
    fp16 = "cpu_allow_fp16_reduced_precision_reduction"
    yield "CPU fp16", (getattr(c, f"_get_{fp16}"), getattr(c, f"_set_{fp16}"), False)


def _spread(write: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda values: write(*values)


@contextmanager
def _switched(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


_PARENTS = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
_NODES = _PARENTS + [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]


@contextmanager
def _full_float32(torch: Any) -> Iterator[None]:
    """Switch TF32 and bfloat16 off for float32, in the older spelling of these settings and in the newer one.

    PyTorch keeps both (aten/src/ATen/Context.cpp) and refuses to read the older where the newer says otherwise, so both are
    set alike.  The newer is a tree, and what can be read of a node is what it inherits: its parents are cleared first.
    Written to directly, for `torch.backends.mkldnn.fp32_precision` sets the root of the tree.
    """
    c, before = torch._C, {}
    for node in _NODES:
        before[node] = c._get_fp32_precision_getter(*node)
        c._set_fp32_precision_setter(*node, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 deprecates the older spelling when it is read
        products, convolutions = _matmul_precision(torch), _reads_true(c._get_cudnn_allow_tf32)
        torch.set_float32_matmul_precision("highest")
        c._set_cudnn_allow_tf32(False)
    try:
        for node in _NODES:
            c._set_fp32_precision_setter(*node, "ieee")
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision(products)
            c._set_cudnn_allow_tf32(convolutions)
        for node, precision in before.items():
            c._set_fp32_precision_setter(*node, precision)


def _matmul_precision(torch: Any) -> str:
    """The older spelling, or that it cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(torch.get_float32_matmul_precision())
        except RuntimeError:
            return "older and newer spelling at odds"


def _reads_true(read: Callable[[], bool]) -> bool:
    """Read a switch that is refused while it is on and all newer ones are off."""
    try:
        return read()
    except RuntimeError:
        return True


def _flushes(torch: Any) -> bool:
    """Whether PyTorch's CPU makes denormal numbers zero, which has no getter."""
    return not (torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1).item()


def _repeats_products(torch: Any) -> bool:
    """Whether cuBLAS is told to add in the same order every time: it reads that once, at the first product on a GPU."""
    if not torch.cuda.is_available():
        return False
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return "CUBLAS_WORKSPACE_CONFIG" in os.environ
