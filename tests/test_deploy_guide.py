"""The code of docs/guides/deploy.md runs, with the differences that the page states."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.func import jvp
from torch.nn.utils.parametrize import remove_parametrizations

import parity
import vit_spec
import vit_torch
from tests import ROOT
from tests.twins import random_images, small_config
from vit_spec import InputError, ViTConfig

GUIDE = (ROOT / "docs" / "guides" / "deploy.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
BOUNDS = {
    program: float(bound)
    for programs, bound in re.findall(r"^\| (.*) \| (\d[\d.e-]*) \|$", GUIDE, re.MULTILINE)
    for program in programs.replace("`", "").split(", ")
}
CONFIG = small_config(vit_spec.get("vit_s16"))
SAME_BITS = ("torch.export", "torch.jit.trace")  # for layers as small as those of CONFIG
ONE_BLOCK = CONFIG.replace(depth=1)  # Inductor compiles each kernel by g++, and all blocks alike
# Inductor is not to compile headers that are included once
QUICK = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
# `vit_torch.linear` uses oneDNN for the layers of this model, and not in a program
WIDE = vit_spec.get("vit_s16", depth=1, image_size=(80, 80))

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit",  # torch 2.13 and 2.14, in 2026-11, also where they compile or derive
    "ignore:.*treespec, LeafSpec:FutureWarning",  # the inductor of torch 2.13, in 2026-11
    "ignore::torch.jit.TracerWarning",  # checks of the images are not part of a traced program
)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Return the model whose checkpoint the page reads, with logits that are not small."""
    torch.manual_seed(0)
    config = getattr(request, "param", CONFIG)
    model = vit_torch.ViT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    monkeypatch.chdir(tmp_path)
    parity.save("model.safetensors", model.state_dict(), config, "torch")
    return vit_torch.load("model.safetensors")


def draw_images(config: ViTConfig = CONFIG) -> np.ndarray:
    """Return images of another batch size than the page's example has."""
    return np.tile(random_images(config), (3, 1, 1, 1))


def torch_images(config: ViTConfig = CONFIG) -> Any:
    return torch.tensor(draw_images(config)).permute(0, 3, 1, 2).contiguous()


def run(*words: str, **names: Any) -> dict[str, Any]:
    """Run the snippets that contain these words, in this order, with these names, and return what they define."""
    for word in words:
        [code] = [each for each in SNIPPETS if word in each]
        exec(code, names)
    return names


def difference(forward: Callable[..., Any], model: Any) -> float:
    """Return the largest difference of logits from those of the model, relative to the largest logit."""
    with torch.no_grad():
        images = torch_images(model.config)
        logits, expected = forward(images), model(images)
    return float((logits.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("torch.export", ["torch.export.save"]),
        ("torch.jit.trace", ["torch.jit.load"]),
        ("bfloat16", [".bfloat16()"]),
    ],
)
def test_programs_of_pytorch_compute_the_logits_of_the_model(program: str, words: list[str], model: Any) -> None:
    names = run("images = torch.randn", *words)
    for forward in (names[name] for name in ("half", "forward") if name in names):
        assert difference(forward, model) <= (0 if program in SAME_BITS else BOUNDS[program])


@pytest.mark.slow
@pytest.mark.parametrize("model", [ONE_BLOCK], ids=["one block"], indirect=True)
@pytest.mark.parametrize(
    ("program", "words"),
    [("AOTInductor", ["torch.export.save", "aoti_load_package"]), ("torch.compile", ["torch.compile"])],
)
def test_programs_of_inductor_compute_the_logits_of_the_model(
    program: str, words: list[str], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    torch._dynamo.reset()
    with torch._inductor.config.patch(QUICK):
        forward = run("images = torch.randn", *words)["forward"]
        assert difference(forward, model) <= BOUNDS[program]
    if program == "AOTInductor":
        images = torch_images(model.config)
        for wrong, what in ((images[:, :, ::2], "unmatched dim value at 2"), (images.double(), "unmatched dtype")):
            with pytest.raises(RuntimeError, match=what):
                forward(wrong)


@pytest.mark.parametrize("model", [WIDE], ids=["wide"], indirect=True)
@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param("torch.export", ["torch.export.save"], marks=pytest.mark.slow),
        ("torch.jit.trace", ["torch.jit.load"]),
    ],
)
def test_programs_of_a_wide_model_compute_its_logits_up_to_rounding(program: str, words: list[str], model: Any) -> None:
    assert difference(run("images = torch.randn", *words)["forward"], model) <= BOUNDS[program]


def test_programs_of_jax_compute_the_logits_of_the_model() -> None:
    pytest.importorskip("jax")
    names = run("export.symbolic_shape")
    variables = {"params": names["params"]}
    images = draw_images()
    expected = names["model"].apply(variables, images)
    for logits in (names["forward"](images), names["outside"].call(variables, images)):
        assert np.abs(logits - expected).max() <= BOUNDS["jax.export"] * np.abs(expected).max()
    names |= run("auto_axes", mesh=names["jax"].make_mesh((1,), ("data",)), **names)
    sharded = names["jax"].device_put(images, names["NamedSharding"](names["mesh"], names["PartitionSpec"]("data")))
    np.testing.assert_allclose(names["apply"](variables, sharded), expected, rtol=1e-5, atol=1e-6)


def test_low_rank_updates_start_at_zero_are_trained_alone_and_can_be_merged(model: Any) -> None:
    adapted = run("class LowRank")["model"]
    assert difference(adapted, model) == 0
    adapted(torch_images()).sum().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert len(trained) == 4 * CONFIG.depth and all(name.endswith((".a", ".b")) for name in trained)
    with torch.no_grad():
        adapted.blocks[0].attn.qkv.parametrizations.weight[0].b.fill_(1)
    assert difference(adapted, model) > 0.01
    updated = adapted(torch_images())
    for block in adapted.blocks:
        for layer in (block.attn.qkv, block.attn.proj):
            remove_parametrizations(layer, "weight")
    assert adapted.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(adapted(torch_images()), updated, rtol=1e-5, atol=1e-5)


def test_forward_mode_differentiation_needs_explicit_attention(model: Any) -> None:
    images = torch_images()
    explicit = vit_torch.load("model.safetensors", vit_torch.Execution(attention="explicit"))
    logits, derivative = jvp(explicit, (images,), (images,))
    assert logits.shape == derivative.shape and derivative.abs().max() > 0
    with pytest.raises(NotImplementedError):
        jvp(model, (images,), (images,))


def test_a_second_backward_pass_needs_explicit_attention(model: Any) -> None:
    def penalty(model: Any) -> Any:
        images = torch_images().requires_grad_()
        (gradient,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
        return gradient.square().sum()

    explicit = vit_torch.load("model.safetensors", vit_torch.Execution(attention="explicit"))
    penalty(explicit).backward()
    assert explicit.blocks[0].attn.qkv.weight.grad.any()
    with pytest.raises(RuntimeError, match="_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"):
        penalty(model).backward()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_what_the_page_says_does_not_work_does_not(model: Any) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert [type(each) for each in quantized.modules()] == [type(each) for each in model.modules()]
    for convert in (torch.jit.script, torch.fx.symbolic_trace):
        with pytest.raises((RuntimeError, InputError)):
            convert(model)
