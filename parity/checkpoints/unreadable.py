"""Weights that cannot be read as they are, named with what to do: adapters, quantized and reparametrized weights.

The keys and dtypes are those that these libraries write:

- PEFT 0.21: base_model.model.*.lora_A.weight in adapter_model.safetensors, *.lora_A.default.weight in a state dict;
  loralib: *.lora_A.
- bitsandbytes 0.50: Linear8bitLt (int8 weight, SCB), Linear4bit (uint8 weight, weight.absmax, weight.quant_map,
  weight.quant_state.bitsandbytes__nf4).
- GPTQ and AWQ: qweight, qzeros and scales, as in huggingface/transformers, integrations/awq.py and gptq.
- HQQ 0.2.8: HQQLinear (W_q); torchao 0.18: flatten_tensor_state_dict (_weight_qdata); optimum-quanto 0.2.7: weight._data.
- compressed-tensors 0.20, and float8 of vLLM, DeepSeek-V3 and ComfyUI: weight_scale, weight_scale_inv, input_scale,
  scale_weight.
- PyTorch 2.13: torch.nn.utils.parametrize, and weight_norm, spectral_norm and prune of torch.nn.utils.
"""

import re
from collections.abc import Collection, Mapping

from parity.checkpoints.containers.container import KeyPath, StoredArray

_ADAPTER = re.compile(r"(.*\.)?(lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\..*)?|base_model\.model\..*)")
# The end of a key -> the library that writes it beside or instead of a weight of integers or float8.
_QUANTIZED = {
    "SCB": "bitsandbytes (int8)",
    "weight.absmax": "bitsandbytes (4 bits)",
    "weight.quant_map": "bitsandbytes (4 bits)",
    "qweight": "GPTQ or AWQ",
    "W_q": "HQQ",
    "_weight_qdata": "torchao",
    "weight._data": "quanto",
    "weight_packed": "compressed-tensors",
}
_SCALES = ("weight_scale", "weight_scale_inv", "scale_inv", "input_scale", "scale_weight")
_DEQUANTIZE = "save the dequantized weights with the library that wrote them, or fetch those from before the quantization"
# A key of PyTorch from which a parameter is computed -> the end of the key beside it, what it shows, and the function that
# replaces both by the parameter.
_REPARAMETRIZED = (
    (r"(.*\.)?parametrizations\.\w+\.original\d*", "", "parametrizations", "parametrize.remove_parametrizations"),
    (r"(.*\.)?\w+_orig", "_mask", "pruning", "prune.remove"),
    (r"(.*\.)?\w+_orig", "_u", "spectral_norm", "remove_spectral_norm"),
    (r"(.*\.)?\w+_g", "_v", "weight_norm", "remove_weight_norm"),
)


def describe_reparametrized(keys: Collection[str]) -> str:
    """Return what PyTorch computes the parameters of a model from and what to do, in one line, or "" if it does not.

    keys: the keys that no table has.
    """
    for pattern, end, what, function in _REPARAMETRIZED:
        for key in sorted(keys):
            if re.fullmatch(pattern, key) and (not end or f"{key.rpartition('_')[0]}{end}" in keys):
                return (
                    f"{key} shows {what} of PyTorch, which computes a parameter from several arrays: call "
                    f"torch.nn.utils.{function} on each such module, and save the weights again"
                )
    return ""


def describe_unreadable(arrays: Mapping[KeyPath, StoredArray]) -> str:
    """Return what the weights are and what to do, in one line, or "" if they are neither an adapter nor quantized."""
    by_key = {".".join(path).replace("/", "."): array for path, array in arrays.items()}
    if key := next((key for key in by_key if _ADAPTER.fullmatch(key)), ""):
        return (
            f"{key} belongs to an adapter (LoRA, PEFT), not to a whole model: merge the adapter into its base model, in "
            f"PEFT by merge_and_unload(), and save that model"
        )
    narrow = {key for key, array in by_key.items() if array.dtype.kind in "iu" or array.dtype.name.startswith("float8")}
    for key in by_key:
        for end, library in _QUANTIZED.items():
            layer = key.removesuffix(end)
            if layer != key and layer[-1:] in ("", ".") and not narrow.isdisjoint((key, f"{layer}weight")):
                return f"{key} shows weights that are quantized by {library}: {_DEQUANTIZE}"
    for key, array in by_key.items():
        if array.dtype.name.startswith("float8") or (array.dtype.kind == "i" and array.dtype.itemsize == 1):
            layer = key.removesuffix("weight")
            if scale := next((f"{layer}{end}" for end in _SCALES if f"{layer}{end}" in by_key), ""):
                return f"{key} is quantized to {array.dtype.name}, with the scale {scale}: {_DEQUANTIZE}"
            if array.dtype.kind != "i" and any("scale" in other for other in by_key):
                return f"{key} is {array.dtype.name}, and the file has scales: {_DEQUANTIZE}"
            if array.dtype.kind != "i":
                return f"{key} is {array.dtype.name}, without a scale: save it as float32, which loses nothing of it"
    return ""
