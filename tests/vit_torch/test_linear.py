"""Linear layers by oneDNN: the same function as `F.linear`, in every way in which PyTorch calls and derives it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from vit_torch import linear as module
from vit_torch.linear import MIN_ENTRIES, MIN_ROWS, linear

if not module.HAS_ONEDNN:
    pytest.skip("PyTorch has no oneDNN on this machine", allow_module_level=True)

LEADING = (4, MIN_ROWS // 4)
OUTPUTS, INPUTS = 512, MIN_ENTRIES // 512 + 1
Inputs = tuple[Tensor, Tensor, Tensor]
CPUS = {
    "an AMD with AVX-512": ("vendor_id\t: AuthenticAMD\nflags\t\t: fma avx2 avx512f avx512_bf16\n", True),
    "an AMD without": ("vendor_id\t: AuthenticAMD\nflags\t\t: fma avx2\n", False),
    "an Intel": ("vendor_id\t: GenuineIntel\nflags\t\t: fma avx2 avx512f\n", False),
    "another system": (None, False),
}


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on each CPU that has it, also where MKL is preferred."""
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)


@pytest.fixture
def inputs() -> Inputs:
    draw = torch.Generator().manual_seed(0)
    shapes = (*LEADING, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)
    return tuple((torch.randn(shape, generator=draw) / INPUTS**0.25).requires_grad_() for shape in shapes)  # type: ignore[return-value]


def loss(function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return function(x, weight, bias).square().mean()


def operations(function: Callable[[], Any]) -> set[str]:
    """Return the names of the operations that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_long_inputs_in_float32_are_computed_by_onednn(inputs: Inputs) -> None:
    x, weight, bias = (each.detach() for each in inputs)
    assert "mkldnn::_linear_pointwise" in operations(lambda: linear(x, weight, bias))
    others = {
        "few rows": lambda: linear(x[:, 1:], weight, bias),
        "a small matrix": lambda: linear(x[..., 1:], weight[:, 1:], bias),
        "double": lambda: linear(x.double(), weight.double(), bias.double()),
        "half": lambda: linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()),
    }
    for call in others.values():
        assert "aten::linear" in operations(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        assert "aten::linear" in operations(lambda: linear(x, weight, bias))


@pytest.mark.parametrize(("cpuinfo", "expected"), CPUS.values(), ids=CPUS)
def test_only_amd_cpus_with_avx512_prefer_onednn(
    cpuinfo: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read)
    assert module._is_amd_with_avx512() is expected


@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_equal_those_of_the_library(inputs: Inputs, has_bias: bool) -> None:
    x, weight, bias = inputs
    arguments = (x, weight, bias if has_bias else None)
    assert_equal(linear(*arguments), F.linear(*arguments))
    derived = arguments[: 2 + has_bias]
    ours, theirs = (torch.autograd.grad(loss(function, *arguments), derived) for function in (linear, F.linear))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("which", [0, 1], ids=["x", "weight"])
def test_x_and_weight_need_not_be_contiguous(inputs: Inputs, which: int) -> None:
    arrays = [each.detach() for each in inputs]
    arrays[which] = arrays[which].mT.contiguous().mT
    assert "mkldnn::_linear_pointwise" in operations(lambda: linear(*arrays))
    assert_equal(linear(*arrays), F.linear(*arrays))


@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_a_bias_that_is_not_contiguous_gives_the_bits_of_one_that_is(inputs: Inputs, kind: str) -> None:
    x, weight, bias = (each.detach() for each in inputs)
    bias = bias.repeat_interleave(2)[::2] if kind == "strided" else weight[0, :1].expand(OUTPUTS)
    assert not bias.is_contiguous() and "mkldnn::_linear_pointwise" in operations(lambda: linear(x, weight, bias))
    assert torch.equal(linear(x, weight, bias), linear(x, weight, bias.contiguous()))
    own, copied = (
        torch.autograd.grad(loss(linear, x, weight, each.requires_grad_()), each) for each in (bias, bias.contiguous())
    )
    assert torch.equal(own[0], copied[0])


def test_gradients_that_are_not_needed_are_not_computed(inputs: Inputs) -> None:
    x, weight, bias = inputs
    with FlopCounterMode(display=False) as with_all:
        linear(x, weight, bias).sum().backward()
    with FlopCounterMode(display=False) as frozen:
        linear(x, weight.detach(), bias.detach()).sum().backward()
    product = 2 * MIN_ROWS * INPUTS * OUTPUTS
    assert (with_all.get_total_flops(), frozen.get_total_flops()) == (3 * product, 2 * product)


def test_second_derivatives_equal_those_of_the_library(inputs: Inputs) -> None:
    def second(function: Any) -> Any:
        x, weight, bias = inputs
        (first,) = torch.autograd.grad(loss(function, x, weight, bias), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight, bias), allow_unused=True)

    assert_equal(second(linear), second(F.linear))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # by PyTorch itself; its category depends on the version
def test_transformations_of_functions_equal_those_of_the_library(inputs: Inputs) -> None:
    detached = tuple(each.detach() for each in inputs)

    def results(function: Any) -> list[Any]:
        tangents = tuple(torch.ones_like(each) for each in detached)
        many = torch.stack([detached[0], detached[0] + 1])
        with forward_ad.dual_level():
            dual = function(forward_ad.make_dual(detached[0], tangents[0]), *detached[1:])
            tangent = forward_ad.unpack_dual(dual).tangent.clone()
        return [
            tangent,
            torch.func.jvp(function, detached, tangents)[1],
            torch.func.grad(lambda *each: loss(function, *each), (0, 1, 2))(*detached),
            torch.func.vmap(function, (0, None, None))(many, *detached[1:]),
            torch.func.vmap(torch.func.grad(lambda *each: loss(function, *each), 1), (0, None, None))(many, *detached[1:]),
        ]

    for ours, theirs in zip(results(linear), results(F.linear), strict=True):
        assert_equal(ours, theirs)


class Halves(Tensor):
    """A weight or bias stored in half precision, as quantization libraries store theirs."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                args = [each.float() if isinstance(each, Halves) else each for each in args]
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_parameters_of_a_subclass_are_multiplied_by_their_own_operation(inputs: Inputs, which: str) -> None:
    x, weight, bias = (each.detach() for each in inputs)
    if which == "weight":
        weight = weight.half().as_subclass(Halves)
    else:
        bias = bias.half().as_subclass(Halves)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_exported_programs_have_the_operation_of_the_library(inputs: Inputs) -> None:
    x, weight, bias = (each.detach() for each in inputs)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return linear(x, weight, bias)

    program = torch.export.export(Model(), (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.linear.default" in targets and not any("mkldnn" in target for target in targets)
    with warnings.catch_warnings(action="ignore"):  # newer versions of PyTorch deprecate it
        traced = torch.jit.trace(Model(), x, check_trace=False)
    assert "mkldnn" not in str(traced.graph)
