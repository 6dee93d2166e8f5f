"""The examples of Flax (google/flax, examples), `--source flax_examples=CLONE/examples`, and torchvision and timm.

Each example has modules with plain names, such as models.py.  The ones of imagenet are imported under a name of their own,
and those of gemma from their folder.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_linen, of_nnx, tokens

PAIRS = Pairs("flax_examples", ("flax_imagenet",), ("torchvision", "timm", "transformers"), needs=("flax_examples",))
AXES = {"input_axes": "b y x c <-> b c y x"}


def folder(name: str) -> Path:
    """Return the folder of an example, in a folder on sys.path."""
    for root in map(Path, sys.path):
        if (root / "linen_design_test").is_dir() and (root / name).is_dir():
            return root / name
    raise ModuleNotFoundError(f"examples/{name}")


def imagenet() -> Any:
    """Return the module of imagenet/models.py."""
    spec = importlib.util.spec_from_file_location("flax_imagenet", folder("imagenet") / "models.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _resnet(block: str, depths: list[int], other: Any, dtype: str = "float64", size: int = 65) -> Built:
    """Return the pair of Flax' ResNet and `other`.

    Where a convolution has strides, Flax pads by SAME, which is 1 on both sides, as in torchvision, only for odd sizes:
    65 gives 33, 17, 9, 5 and 3.
    """
    import jax.numpy as jnp

    models = imagenet()
    model = models.ResNet(depths, getattr(models, block), 5, dtype=getattr(jnp, dtype))
    return of_linen(model, other, floats(1, size, size, 3), call_options={"train": False}, **AXES)


def torchvision_resnet(block: str, depths: list[int]) -> Any:
    """Return a ResNet of torchvision."""
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), depths, 5)


def timm_resnet(block: str, depths: list[int]) -> Any:
    """Return a ResNet of timm."""
    from timm.models import resnet

    return resnet.ResNet(getattr(resnet, block), depths, 5)


BASIC, BOTTLENECK = ("ResNetBlock", "BasicBlock"), ("BottleneckResNetBlock", "Bottleneck")
for name, (own, others), depths in (("resnet18", BASIC, [2, 2, 2, 2]), ("resnet_bottleneck", BOTTLENECK, [1, 2, 1, 1])):
    for library, other in (("torchvision", torchvision_resnet), ("timm", timm_resnet)):
        PAIRS.add(
            f"{name}_x_{library}",
            f"flax examples/imagenet ResNet, {own}, image of 65 pixels",
            f"{library} ResNet, {others}",
            lambda own=own, others=others, depths=depths, other=other: _resnet(own, depths, other(others, depths)),
        )
PAIRS.add(
    "resnet18_default_dtype",
    "flax examples/imagenet ResNet, ResNetBlock, dtype float32, image of 65 pixels",
    "torchvision ResNet, BasicBlock",
    lambda: _resnet("ResNetBlock", [2, 2, 2, 2], torchvision_resnet("BasicBlock", [2, 2, 2, 2]), "float32"),
)
PAIRS.add(
    "resnet18_even",
    "flax examples/imagenet ResNet, ResNetBlock, image of 64 pixels",
    "torchvision ResNet, BasicBlock",
    lambda: _resnet("ResNetBlock", [2, 2, 2, 2], torchvision_resnet("BasicBlock", [2, 2, 2, 2]), size=64),
    disagreement="for even sizes, Flax pads the pooling and the strided convolutions by SAME, which is 0 before and 1 "
    "after (examples/imagenet/models.py:122, and nn.Conv's default), and torchvision by 1 on both sides",
)


def _gemma(kv_heads: int, soft_cap: bool, width: int = 64) -> Built:
    """Return the pair of Gemma, or of Gemma 2 if `soft_cap`."""
    import jax.numpy as jnp
    import transformers
    from flax import nnx

    sys.path.insert(0, str(folder("gemma")))
    transformer, config = importlib.import_module("transformer"), importlib.import_module("transformer_cfg")
    size = {"num_layers": 2, "num_embed": 60, "embed_dim": width, "hidden_dim": 48, "num_heads": 4, "head_dim": 8}
    types, norms = (config.AttentionType.GLOBAL,) * 2, {"use_post_attn_norm": soft_cap, "use_post_ffw_norm": soft_cap}
    caps = {"final_logit_softcap": 30.0 if soft_cap else None, "attn_logits_soft_cap": 50.0 if soft_cap else None}
    settings = config.TransformerConfig(
        **size, num_kv_heads=kv_heads, attention_types=types, **norms, **caps, dtype=jnp.float64, dropout_rate=0.0
    )
    model = transformer.Transformer(settings, rngs=nnx.Rngs(0))
    options = {
        "vocab_size": 60,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if soft_cap:
        theirs = transformers.Gemma2Config(**options, query_pre_attn_scalar=8, layer_types=["full_attention"] * 2)
        theirs._attn_implementation = "eager"
        other: Any = transformers.Gemma2ForCausalLM(theirs)
    else:
        theirs = transformers.GemmaConfig(**options)
        theirs._attn_implementation = "eager"
        other = transformers.GemmaForCausalLM(theirs)

    def call(model: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((len(x), x.shape[1], x.shape[1]), bool))
        return model(x, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape), None, mask)[0]

    return of_nnx(model, TorchCall(other, lambda module, x: module(x).logits), tokens(2, 9, high=60), call=call)


# Each kernel of an Einsum has the axes (heads, in, dim), and those of several matrices a first one.
LAYER = "model.model.layers.{n}"
QKV = tuple(
    f"layers/{{n}}/attn/qkv_einsum/kernel | qkv={part} head in dim <-> {LAYER}.self_attn.{name}_proj.weight | (head dim) in"
    for part, name in enumerate("qkv")
)
GROUPED = (
    f"layers/{{n}}/attn/q_einsum/kernel | head in dim <-> {LAYER}.self_attn.q_proj.weight | (head dim) in",
    f"layers/{{n}}/attn/kv_einsum/kernel | kv=0 head in dim <-> {LAYER}.self_attn.k_proj.weight | (head dim) in",
    f"layers/{{n}}/attn/kv_einsum/kernel | kv=1 head in dim <-> {LAYER}.self_attn.v_proj.weight | (head dim) in",
)
OUT = (f"layers/{{n}}/attn/attn_vec_einsum/kernel | head dim out <-> {LAYER}.self_attn.o_proj.weight | out (head dim)",)
NORMS = (
    f"layers/{{n}}/pre_attention_norm/scale | width <-> {LAYER}.input_layernorm.weight | width",
    f"layers/{{n}}/pre_ffw_norm/scale | width <-> {LAYER}.post_attention_layernorm.weight | width",
)
NORMS2 = (
    f"layers/{{n}}/pre_attention_norm/scale | width <-> {LAYER}.input_layernorm.weight | width",
    f"layers/{{n}}/post_attention_norm/scale | width <-> {LAYER}.post_attention_layernorm.weight | width",
    f"layers/{{n}}/pre_ffw_norm/scale | width <-> {LAYER}.pre_feedforward_layernorm.weight | width",
    f"layers/{{n}}/post_ffw_norm/scale | width <-> {LAYER}.post_feedforward_layernorm.weight | width",
)
OF_GEMMA = {"jax_code": ("modules", "layers", "positional_embeddings", "transformer")}
OURS = "flax examples/gemma Transformer"
PAIRS.add("gemma", OURS, "transformers GemmaForCausalLM", lambda: _gemma(4, False), layouts=QKV + OUT + NORMS, **OF_GEMMA)
PAIRS.add(
    "gemma_grouped",
    f"{OURS}, 2 heads of keys",
    "transformers GemmaForCausalLM",
    lambda: _gemma(2, False),
    layouts=GROUPED + OUT + NORMS,
    **OF_GEMMA,
)
PAIRS.add(
    "gemma_width_32",
    f"{OURS}, width 32",
    "transformers GemmaForCausalLM",
    lambda: _gemma(4, False, 32),
    layouts=QKV + OUT + NORMS,
    **OF_GEMMA,
)
PAIRS.add(
    "gemma2",
    f"{OURS}, as Gemma 2 without windows",
    "transformers Gemma2ForCausalLM",
    lambda: _gemma(2, True),
    layouts=GROUPED + OUT + NORMS2,
    **OF_GEMMA,
)
