"""The workloads of AlgoPerf (mlcommons/algorithmic-efficiency), each in JAX and in PyTorch, `--source algoperf=CLONE`."""

import importlib
import sys
import types
from typing import Any

import numpy as np

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, gate_lines, of_linen, tokens

WORKLOADS = "algoperf.workloads"
PAIRS = Pairs("algoperf", (), (), needs=("algoperf",))
IMAGE_AXES = {"input_axes": "b y x c <-> b c y x"}
RATE = {"dropout_rate": 0.0}


def module(path: str) -> Any:
    """Return the module of a workload."""
    # A file that only an installation writes, and a package that is imported and not used by the models.
    sys.modules.setdefault("algoperf._version", types.SimpleNamespace(version="0"))  # type: ignore[arg-type]
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
    try:
        return importlib.import_module(f"{WORKLOADS}.{path}.models")
    finally:
        del sys.modules["tensorflow"]


def declare(name: str, workload: str, prefix: str, build: Any, **options: Any) -> None:
    """Declare a pair of a workload; `build` gets the modules of both sides."""
    jax_path, torch_path = f"{workload}.{prefix}_jax", f"{workload}.{prefix}_pytorch"
    code = {"jax_code": (f"{WORKLOADS}.{jax_path}.models",), "torch_code": (f"{WORKLOADS}.{torch_path}.models",)}
    PAIRS.add(
        name,
        f"AlgoPerf {workload}, JAX",
        f"AlgoPerf {workload}, PyTorch",
        lambda: build(module(jax_path), module(torch_path)),
        **code,
        **options,
    )


def _vit(jax: Any, torch: Any, **options: Any) -> Built:
    sizes = {"num_classes": 5, "patch_size": (4, 4), "width": 32, "depth": 2, "num_heads": 4, **options}
    model = torch.ViT(**sizes)
    model.train(False)
    return of_linen(jax.ViT(**sizes), model, floats(2, 16, 16, 3), call_options={"train": False, **RATE}, **IMAGE_AXES)


declare("vit", "imagenet_vit", "imagenet", _vit)
declare("vit_glu", "imagenet_vit", "imagenet", lambda jax, torch: _vit(jax, torch, use_glu=True, mlp_dim=48))
declare("vit_map", "imagenet_vit", "imagenet", lambda jax, torch: _vit(jax, torch, use_map=True))


def _resnet(jax: Any, torch: Any, block: tuple[str, str], **options: Any) -> Built:
    import jax.numpy as jnp

    model = jax.ResNet((1, 1, 1, 1), getattr(jax, block[0]), 5, 64, jnp.float64)
    other = torch.ResNet(getattr(torch, block[1]), [1, 1, 1, 1], 5)
    call = {"update_batch_norm": False, "use_running_average_bn": True}
    return of_linen(model, other, floats(2, 32, 32, 3), call_options=call, **IMAGE_AXES)


OF_STRIDES = (
    "the strided convolutions of the JAX workload are padded by SAME (imagenet_resnet/imagenet_jax/models.py:31), which "
    "adds nothing at the top and left, and those of the PyTorch workload by 1 (imagenet_pytorch/models.py)"
)
declare(
    "resnet_basic",
    "imagenet_resnet",
    "imagenet",
    lambda jax, torch: _resnet(jax, torch, ("ResNetBlock", "BasicBlock")),
    disagreement=OF_STRIDES,
)


def _cifar_resnet(jax: Any, torch: Any) -> Built:
    import jax.numpy as jnp

    block = importlib.import_module(f"{WORKLOADS}.imagenet_resnet.imagenet_jax.models").ResNetBlock
    other = importlib.import_module(f"{WORKLOADS}.imagenet_resnet.imagenet_pytorch.models").BasicBlock
    call = {"update_batch_norm": False, "use_running_average_bn": True}
    model = jax.ResNet((1, 1, 1, 1), block, 5, 64, jnp.float64)
    return of_linen(model, torch.ResNet(other, [1, 1, 1, 1], 5), floats(2, 32, 32, 3), call_options=call, **IMAGE_AXES)


declare("resnet_cifar", "cifar", "cifar", _cifar_resnet, disagreement=OF_STRIDES)


def _unet(jax: Any, torch: Any, **options: Any) -> Built:
    model = jax.UNet(num_channels=8, num_pool_layers=2, **options)
    other = torch.UNet(num_channels=8, num_pool_layers=2, **options)
    call = {"train": False, **RATE}
    return of_linen(model, TorchCall(other, lambda m, x: m(x[:, None])[:, 0]), floats(2, 16, 16), call_options=call)


declare("unet", "fastmri", "fastmri", _unet)
declare("unet_tanh", "fastmri", "fastmri", lambda jax, torch: _unet(jax, torch, use_tanh=True))
declare("unet_layer_norm", "fastmri", "fastmri", lambda jax, torch: _unet(jax, torch, use_layer_norm=True))


def _dlrm(jax: Any, torch: Any, name: str, **options: Any) -> Built:
    sizes = {"vocab_size": 64, "mlp_bottom_dims": (32, 16), "embed_dim": 16, **options}
    inputs = np.concatenate([floats(4, 13), tokens(4, 26, high=64).astype(np.float32)], axis=1)
    model, other = getattr(jax, name)(**sizes), getattr(torch, name)(**sizes)
    return of_linen(model, other, inputs, call_options={"train": False, **RATE})


TOP = (
    "embedding_table | (chunk=0 row) width <-> embedding_chunk_0 | row width",
    "embedding_table | (chunk=1 row) width <-> embedding_chunk_1 | row width",
    "embedding_table | (chunk=2 row) width <-> embedding_chunk_2 | row width",
    "embedding_table | (chunk=3 row) width <-> embedding_chunk_3 | row width",
)


def _dlrm_small(jax: Any, torch: Any, **options: Any) -> Built:
    return _dlrm(jax, torch, "DlrmSmall", mlp_bottom_dims=(64, 128), embed_dim=128, mlp_top_dims=(32, 16, 1), **options)


declare("dlrm", "criteo1tb", "criteo1tb", _dlrm_small, layouts=TOP)
declare("dlrm_layer_norm", "criteo1tb", "criteo1tb", lambda j, t: _dlrm_small(j, t, use_layer_norm=True), layouts=TOP)


def _dlrm_resnet(jax: Any, torch: Any) -> Built:
    return _dlrm(jax, torch, "DLRMResNet", mlp_bottom_dims=(128, 128, 128), embed_dim=128, mlp_top_dims=(32, 32, 32, 1))


declare("dlrm_resnet", "criteo1tb", "criteo1tb", _dlrm_resnet, layouts=TOP)


def _transformer(jax: Any, torch: Any, **options: Any) -> Built:
    import jax.numpy as jnp

    more = {"pre_ln": options.get("pre_ln", True), "glu": options.get("glu", False)}
    config = jax.TransformerConfig(
        vocab_size=60, emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=32, max_len=16, deterministic=True,
        dtype=jnp.float64, **more,
    )  # fmt: skip
    other = torch.Transformer(60, 32, 4, 32, 2, **more)
    inputs = (tokens(2, 9, high=60), tokens(2, 7, high=60, seed=2))
    return of_linen(jax.Transformer(config), TorchCall(other, lambda m, x, y: m(x, y, dropout_rate=0.0)), inputs)


declare("transformer", "wmt", "wmt", _transformer)
declare("transformer_post_ln", "wmt", "wmt", lambda jax, torch: _transformer(jax, torch, pre_ln=False))
declare("transformer_glu", "wmt", "wmt", lambda jax, torch: _transformer(jax, torch, glu=True))

PADDINGS = np.zeros((2, 3200), np.float32)
WAVES = floats(2, 3200)


def _of_speech(model: Any, other: Any) -> Built:
    """Return a pair of a model of waves and of their paddings, which are zero: JAX has no gradient with respect to them."""
    import jax.numpy as jnp
    import torch

    def call(module: Any, x: Any) -> Any:
        return module(x, torch.zeros_like(x), dropout_rate=0.0)[0]

    module = TorchCall(other, call).eval()
    module(torch.from_numpy(WAVES))  # the first call makes the parameters of some layers
    built = of_linen(model, module, (WAVES, PADDINGS), call_options={"train": False, **RATE})
    return built._replace(
        flax_apply=lambda variables, x: built.flax_apply(variables, x, jnp.zeros(x.shape, x.dtype))[0], inputs=WAVES
    )


def _conformer(jax: Any, torch: Any) -> Built:
    sizes = {"vocab_size": 24, "encoder_dim": 32, "num_attention_heads": 4, "num_encoder_layers": 2}
    return _of_speech(
        jax.Conformer(jax.ConformerConfig(**sizes)), torch.ConformerEncoderDecoder(torch.ConformerConfig(**sizes))
    )


def _deepspeech(jax: Any, torch: Any) -> Built:
    sizes = {"vocab_size": 24, "encoder_dim": 32, "num_lstm_layers": 1, "num_ffn_layers": 1}
    return _of_speech(
        jax.Deepspeech(jax.DeepspeechConfig(**sizes)), torch.DeepspeechEncoderDecoder(torch.DeepspeechConfig(**sizes))
    )


declare("conformer", "librispeech_conformer", "librispeech", _conformer)
CELL, LSTM, BIASES = "BatchRNN_0/LSTM_0/LSTM/LSTMSequenceEncoder_{}/cell/", "model.lstms.0.lstm.", "hi hf hg ho"
declare(
    "deepspeech",
    "librispeech_deepspeech",
    "librispeech",
    _deepspeech,
    layouts=(
        *gate_lines(CELL.format(0), LSTM, "ifgo", BIASES, dim=16),
        *gate_lines(CELL.format(1), LSTM, "ifgo", BIASES, dim=16, number_of="l0_reverse"),
    ),
)
