"""Files that are no readable weights are named, with what to do: Git LFS pointers, adapters, quantized weights.

The keys, shapes and dtypes are those that these libraries write, printed from peft 0.21.2, bitsandbytes 0.50.2, torchao
0.18.0 and hqq 0.2.8; those of GPTQ and AWQ are from huggingface/transformers, integrations/awq.py and
tests/quantization/gptq.  A library that quantizes does so for every linear layer of the blocks.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import parity
import vit_spec
from parity.__main__ import main
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.weights import Checkpoint
from tests.twins import perturbed_params, small_config
from vit_spec import InputError

torch = pytest.importorskip("torch")

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import vit_torch

CONFIG = small_config(vit_spec.get("vit_b16")).replace(image_size=32, width=64, num_heads=1)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def state() -> State:
    """Return a state dict with timm's names."""
    return parity.to_torch(perturbed_params(CONFIG), CONFIG)


def refusal(path: Path) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises(InputError) as caught:
        parity.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


# Git LFS --------------------------------------------------------------------------------------------------------------

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(b'').hexdigest()}\nsize 346284714\n"
NAMES = ["a.safetensors", "a.pth", "a.pt", "a.bin", "a.ckpt", "a.npz", "a.msgpack", "a.h5", "a", "a.safetensors.index.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    assert "is a pointer of Git LFS, without the weights: fetch them with `git lfs pull`" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "flax_model.msgpack", "vit.pth"])
@pytest.mark.parametrize("config", [{}, {"architecture": "vit_tiny_patch16_224"}])
def test_a_pointer_of_git_lfs_in_a_folder_is_named(tmp_path: Path, name: str, config: dict[str, str]) -> None:
    (tmp_path / name).write_text(POINTER)
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{name} is a pointer of Git LFS" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_shard_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path, state: State, suffix: str) -> None:
    names = [f"model-0000{n}-of-00002{suffix}" for n in (1, 2)]
    keys = list(state)
    first = {key: state[key].contiguous() for key in keys[:9]}
    save_file(first, tmp_path / names[0]) if suffix == ".safetensors" else torch.save(first, tmp_path / names[0])
    (tmp_path / names[1]).write_text(POINTER)
    index = {"weight_map": {key: names[n >= 9] for n, key in enumerate(keys)}}
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    assert f"{names[1]} is a pointer of Git LFS" in refusal(tmp_path)


def test_a_config_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(POINTER)
    assert "config.json is a pointer of Git LFS" in refusal(tmp_path)


def test_a_pointer_of_git_lfs_is_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pth").write_text(POINTER)
    assert main(["convert", str(tmp_path / "a.pth"), str(tmp_path / "b.npz"), "--to", "jax"]) == 2
    assert "is a pointer of Git LFS" in capsys.readouterr().err and not (tmp_path / "b.npz").exists()


# Adapters -------------------------------------------------------------------------------------------------------------

ADAPTER_CONFIG = {"peft_type": "LORA", "base_model_name_or_path": None, "r": 8, "target_modules": ["qkv"]}


def lora(state: State, name: str = "") -> State:
    """Return the matrices of an adapter of the attention layers."""
    layers = [key.removesuffix(".weight") for key in state if key.endswith("attn.qkv.weight")]
    a = {f"{layer}.lora_A{name}.weight": torch.zeros(8, CONFIG.width) for layer in layers}
    return a | {f"{layer}.lora_B{name}.weight": torch.zeros(3 * CONFIG.width, 8) for layer in layers}


def adapter_alone(state: State) -> State:
    return {f"base_model.model.{key}": tensor for key, tensor in lora(state).items()}


def model_of_peft(state: State) -> State:
    whole = {key.replace("qkv.", "qkv.base_layer."): tensor for key, tensor in state.items()} | lora(state, ".default")
    return {f"base_model.model.{key}": tensor for key, tensor in whole.items()}


ADAPTED: dict[str, Callable[[State], State]] = {
    "an adapter alone": adapter_alone,
    "a model of PEFT": model_of_peft,
    "a model of PEFT in a wrapper": lambda s: {f"model.{key}": tensor for key, tensor in model_of_peft(s).items()},
    "only saved modules": lambda s: {"base_model.model.head.weight": torch.ones(7, 64)},
    "loralib": lambda s: {**s, **{key.removesuffix(".weight"): tensor for key, tensor in lora(s).items()}},
    "another library": lambda s: {**s, **lora(s)},
}


@pytest.mark.parametrize("case", ADAPTED)
def test_weights_of_an_adapter_are_named(tmp_path: Path, state: State, case: str) -> None:
    torch.save(ADAPTED[case](state), tmp_path / "a.pth")
    assert "belongs to an adapter (LoRA, PEFT)" in (line := refusal(tmp_path / "a.pth"))
    assert "merge the adapter into its base model, in PEFT by merge_and_unload()" in line


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_folder_of_peft_is_named(tmp_path: Path, state: State, name: str) -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save(adapter_alone(state), tmp_path / name)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    for path in (tmp_path, tmp_path / name):
        assert f"{name} is an adapter (LoRA, PEFT), not a whole model: merge it" in refusal(path)


def test_a_base_model_beside_its_adapter_is_named(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "model.safetensors")
    save_file(adapter_alone(state), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    assert "merge it into them, in PEFT by merge_and_unload(), or remove the file" in refusal(tmp_path)


# Quantized weights ----------------------------------------------------------------------------------------------------

Quantize = Callable[[str, Tensor], State]


def quantized(state: State, quantize: Quantize) -> State:
    """Return a state dict with the weights of the linear layers of the blocks replaced."""
    found: State = {}
    for key, tensor in state.items():
        is_linear = key.startswith("blocks.") and key.endswith(".weight") and tensor.ndim == 2
        found |= quantize(key.removesuffix(".weight"), tensor) if is_linear else {key: tensor}
    return found


def ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape).to(dtype)


def bnb_int8(layer: str, w: Tensor) -> State:
    rows = ones(torch.float32, len(w))
    return {f"{layer}.weight": w.to(torch.int8), f"{layer}.SCB": rows, f"{layer}.weight_format": ones(torch.uint8)}


def bnb_4bit(layer: str, w: Tensor) -> State:
    return {
        f"{layer}.weight": ones(torch.uint8, w.numel() // 2, 1),
        f"{layer}.weight.absmax": ones(torch.uint8, w.numel() // 64),
        f"{layer}.weight.quant_map": ones(torch.float32, 16),
        f"{layer}.weight.nested_absmax": ones(torch.float32, 1),
        f"{layer}.weight.nested_quant_map": ones(torch.float32, 256),
        f"{layer}.weight.quant_state.bitsandbytes__nf4": ones(torch.uint8, 167),
    }


def gptq(layer: str, w: Tensor) -> State:
    found = {"qweight": (torch.int32, w.shape[1] // 8, w.shape[0]), "qzeros": (torch.int32, 1, w.shape[0] // 8)}
    found |= {"scales": (torch.float16, 1, w.shape[0]), "g_idx": (torch.int32, w.shape[1])}
    return {f"{layer}.{name}": ones(dtype, *shape) for name, (dtype, *shape) in found.items()}


def hqq(layer: str, w: Tensor) -> State:
    names = ("nbits", "group_size", "axis")
    found = {f"{layer}.{name}": ones(torch.int32) for name in names} | {f"{layer}.shape": ones(torch.int64, 2)}
    found |= {f"{layer}.{name}": ones(torch.float32, w.numel() // 64, 1) for name in ("scale", "zero")}
    return {f"{layer}.W_q": ones(torch.uint8, w.shape[0] // 2, w.shape[1])} | found


def torchao(layer: str, w: Tensor) -> State:
    scale, zero = ones(torch.float32, len(w), 1), ones(torch.int8, len(w), 1)
    return {
        f"{layer}._weight_qdata": w.to(torch.int8),
        f"{layer}._weight_scale": scale,
        f"{layer}._weight_zero_point": zero,
    }


def int8(layer: str, w: Tensor) -> State:
    return {f"{layer}.weight": w.to(torch.int8), f"{layer}.weight_scale": ones(torch.float32, len(w), 1)}


def torchao_float8(layer: str, w: Tensor) -> State:
    scale = ones(torch.float32, len(w), 1)
    return {f"{layer}._weight_qdata": w.to(torch.float8_e4m3fn), f"{layer}._weight_scale": scale}


def float8(scale: str) -> Quantize:
    return lambda layer, w: {f"{layer}.weight": w.to(torch.float8_e4m3fn), f"{layer}.{scale}": ones(torch.float32)}


QUANTIZED: dict[str, tuple[Quantize, str]] = {
    "bitsandbytes int8": (bnb_int8, "quantized by bitsandbytes (int8)"),
    "bitsandbytes nf4": (bnb_4bit, "quantized by bitsandbytes (4 bits)"),
    "GPTQ": (gptq, "quantized by GPTQ or AWQ"),
    "AWQ": (lambda layer, w: {k: v for k, v in gptq(layer, w).items() if "g_idx" not in k}, "quantized by GPTQ or AWQ"),
    "HQQ": (hqq, "quantized by HQQ"),
    "torchao int8": (torchao, "quantized by torchao"),
    "torchao float8": (torchao_float8, "quantized by torchao"),
    "float8 with another scale": (float8("my_scale"), "is float8_e4m3fn, and the file has scales"),
    "compressed-tensors": (int8, "quantized to int8, with the scale"),
    **{
        f"float8 with {scale}": (float8(scale), f"quantized to float8_e4m3fn, with the scale blocks.0.attn.qkv.{scale}")
        for scale in ("weight_scale", "weight_scale_inv", "input_scale", "scale_weight")
    },
}


@pytest.mark.parametrize("prefix", ["", "model.", "image_tower."])
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_weights_are_named(tmp_path: Path, state: State, case: str, prefix: str) -> None:
    quantize, what = QUANTIZED[case]
    content = {f"{prefix}{key}": tensor for key, tensor in quantized(state, quantize).items()}
    torch.save(content, tmp_path / "a.pth")
    line = refusal(tmp_path / "a.pth")
    assert what.replace("blocks", f"{prefix}blocks") in line and "save the dequantized weights" in line


def test_a_model_of_real_size_in_four_bits_is_named(tmp_path: Path) -> None:
    import vit_torch

    with torch.device("meta"):
        sizes = vit_torch.ViT(vit_spec.get("vit_s16")).state_dict()
    state = {key: torch.zeros(tensor.shape) for key, tensor in sizes.items()}
    save_file(quantized(state, bnb_4bit), tmp_path / "model.safetensors")
    assert "quantized by bitsandbytes (4 bits)" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_without_a_scale_is_named_with_the_dtype_that_keeps_it(
    tmp_path: Path, state: State, dtype: torch.dtype
) -> None:
    save_file({key: tensor.to(dtype) for key, tensor in state.items()}, tmp_path / "a.safetensors")
    assert "without a scale: save it as float32, which loses nothing" in refusal(tmp_path / "a.safetensors")
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert torch.equal(every.to(torch.float32).to(dtype).view(torch.uint8)[:120], every.view(torch.uint8)[:120])


def test_float8_whose_scales_are_ignored_is_still_refused(tmp_path: Path, state: State) -> None:
    torch.save(quantized(state, float8("weight_scale")), tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"quantized to float8_e4m3fn, with the scale .*weight_scale"):
        parity.load(tmp_path / "a.pth", ignore=[r".*\.weight_scale"])


def test_int8_whose_scales_are_ignored_is_still_refused(tmp_path: Path, state: State) -> None:
    torch.save(quantized(state, bnb_int8), tmp_path / "a.pth")
    with pytest.raises(InputError, match="int8"):
        parity.load(tmp_path / "a.pth", ignore=[r".*\.SCB", r".*\.weight_format"])


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_dynamically_quantized_layers_of_pytorch_are_named(tmp_path: Path) -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert "for weights that torch.ao quantized" in refusal(tmp_path / "a.pth")


class Quantized(Tensor):
    """A subclass of Tensor, as torchao's quantized weights are."""


def test_a_subclass_of_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(3).as_subclass(Quantized)}, tmp_path / "a.pth")
    assert "for a subclass of Tensor, such as weights that torchao quantized" in refusal(tmp_path / "a.pth")


FLOATS: dict[str, State] = {  # layers of a model that have such names, but weights of floating-point numbers
    "W_q": {"blocks.0.attn.W_q": torch.ones(64, 64)},
    "qweight": {"blocks.0.attn.qweight": torch.ones(64, 64), "blocks.0.attn.scales": torch.ones(64)},
    "weight_scale": {"blocks.0.attn.qkv.weight_scale": torch.ones(())},
    "SCB": {"SCB": torch.ones(3)},
    "base_model": {"base_model.weight": torch.ones(3)},
}


@pytest.mark.parametrize("case", FLOATS)
def test_layers_with_such_names_are_not_called_quantized(tmp_path: Path, state: State, case: str) -> None:
    torch.save({**state, **FLOATS[case]}, tmp_path / "a.pth")
    line = refusal(tmp_path / "a.pth")
    assert f"unexpected {next(iter(FLOATS[case]))}" in line and "quantized" not in line and "adapter" not in line


# Reparametrized weights, and replaced classifiers ---------------------------------------------------------------------


def changed_model(state: State, change: Callable[[nn.Module], object]) -> State:
    """Return the state dict of a model after a change."""
    model = vit_torch.ViT(CONFIG)
    model.load_state_dict(state)
    change(model)
    return model.state_dict()


def prune_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            prune.l1_unstructured(module, "weight", 0.3)


REPARAMETRIZED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "weight_norm": (lambda model: nn.utils.weight_norm(model.head), "torch.nn.utils.remove_weight_norm"),
    "weight_norm of a block": (
        lambda model: nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1),
        "torch.nn.utils.parametrize.remove_parametrizations",
    ),
    "spectral_norm": (lambda model: nn.utils.spectral_norm(model.head), "torch.nn.utils.remove_spectral_norm"),
    "orthogonal": (
        lambda model: nn.utils.parametrizations.orthogonal(model.head),
        "torch.nn.utils.parametrize.remove_parametrizations",
    ),
    "pruned layer": (
        lambda model: prune.l1_unstructured(model.blocks[1].mlp.fc1, "weight", 0.3),
        "torch.nn.utils.prune.remove",
    ),
    "pruned bias": (lambda model: prune.l1_unstructured(model.head, "bias", 0.3), "torch.nn.utils.prune.remove"),
    "all pruned": (prune_all, "torch.nn.utils.prune.remove"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # weight_norm and spectral_norm are deprecated, and still used
@pytest.mark.parametrize("case", REPARAMETRIZED)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_reparametrized_layer_is_named_with_what_removes_it(tmp_path: Path, state: State, case: str, prefix: str) -> None:
    change, function = REPARAMETRIZED[case]
    changed = changed_model(state, change)
    torch.save({f"{prefix}{key}": tensor for key, tensor in changed.items()}, tmp_path / "a.pth")
    message = refusal(tmp_path / "a.pth")
    assert f"call {function} on each such module, and save the weights again" in message
    assert "--ignore" not in message


def replace_head(*layers: nn.Module) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model, "head", nn.Sequential(*layers))


def test_a_linear_layer_in_a_sequence_is_refused_with_its_new_name(tmp_path: Path, state: State) -> None:
    changed = changed_model(state, replace_head(nn.Dropout(0.1), nn.Linear(64, 5)))
    torch.save(changed, tmp_path / "a.pth")
    message = refusal(tmp_path / "a.pth")
    assert "rename head.1.weight to head.weight and head.1.bias to head.bias, and save" in message
    assert "--ignore" not in message
    renamed = {key.replace("head.1.", "head."): tensor for key, tensor in changed.items()}
    torch.save(renamed, tmp_path / "b.pth")
    assert parity.load(tmp_path / "b.pth").config.num_classes == 5


def test_a_sequence_beside_a_backbone_is_refused_with_its_new_name(tmp_path: Path, state: State) -> None:
    backbone = {f"backbone.{key}": tensor for key, tensor in state.items() if not key.startswith("head.")}
    beside = {"classifier.1.weight": torch.ones(5, 64), "classifier.1.bias": torch.ones(5)}
    torch.save({**backbone, **beside}, tmp_path / "a.pth")
    assert "rename classifier.1.weight to classifier.weight and classifier.1.bias to" in refusal(tmp_path / "a.pth")


@pytest.mark.parametrize(
    "layers", [(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5)), (nn.BatchNorm1d(64), nn.Linear(64, 5))], ids=["MLP", "norm"]
)
def test_a_classifier_of_several_layers_is_refused(tmp_path: Path, state: State, layers: tuple[nn.Module, ...]) -> None:
    torch.save(changed_model(state, replace_head(*layers)), tmp_path / "a.pth")
    assert "but ViTConfig has one linear layer: only weights without head.* can be read" in refusal(tmp_path / "a.pth")


def torchvision_state(state: State) -> State:
    """Return the weights with torchvision's names and without a classifier."""
    arrays = converted_arrays(Checkpoint(CONFIG, "torch", dict(state)), "torchvision")
    return {key: torch.from_numpy(array) for key, array in arrays if not key.startswith("heads.")}


def test_a_linear_layer_in_the_place_of_torchvisions_heads_is_read(tmp_path: Path, state: State) -> None:
    weight, bias = torch.rand(5, 64), torch.rand(5)
    torch.save({**torchvision_state(state), "heads.weight": weight, "heads.bias": bias}, tmp_path / "a.pth")
    found = parity.to_torch(parity.load(tmp_path / "a.pth"))
    assert torch.equal(found["head.weight"], weight) and torch.equal(found["head.bias"], bias)


@pytest.mark.parametrize("path", ["heads.0", "heads.head.1"])
def test_a_sequence_in_the_place_of_torchvisions_heads_is_refused_with_its_new_name(
    tmp_path: Path, state: State, path: str
) -> None:
    head = {f"{path}.weight": torch.ones(5, 64), f"{path}.bias": torch.ones(5)}
    torch.save({**torchvision_state(state), **head}, tmp_path / "a.pth")
    words = f"its classifier {path[:-2]} is a sequence of layers: if the others do nothing at inference, as dropout, "
    words += f"rename {path}.weight to heads.head.weight and {path}.bias to heads.head.bias"
    assert words in refusal(tmp_path / "a.pth")
