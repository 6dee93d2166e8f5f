"""Google's names for the weights of a golden file, implemented independently of `parity.checkpoints.formats`."""

import numpy as np

from vit_spec import ViTConfig

Weights = dict[str, np.ndarray]


def google_names(weights: Weights, config: ViTConfig, positions: str, *, old: bool = False, scan: bool = False) -> Weights:
    """Return the parameters of one of Google's modules, with keys joined by "/".

    weights: the state dict of the PyTorch twin.
    positions: the key of the position table.
    old: whether one counter numbers all parts of a block ("_0" to "_3"), as in Flax before linen.
    scan: whether the arrays of all blocks are stacked.
    """
    heads, dim, width = config.num_heads, config.head_dim, config.width
    found: Weights = {"embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0)}

    def linear(theirs: str, ours: str) -> None:
        found[f"{theirs}/kernel"], found[f"{theirs}/bias"] = weights[f"{ours}.weight"].T, weights[f"{ours}.bias"]

    def norm(theirs: str, ours: str) -> None:
        found[f"{theirs}/scale"], found[f"{theirs}/bias"] = weights[f"{ours}.weight"], weights[f"{ours}.bias"]

    def split(theirs: str, ours: str, parts: list[str]) -> None:
        kernels, biases = np.split(weights[f"{ours}.weight"], len(parts)), np.split(weights[f"{ours}.bias"], len(parts))
        for part, kernel, bias in zip(parts, kernels, biases, strict=True):
            found[f"{theirs}/{part}/kernel"] = kernel.T.reshape(width, heads, dim)
            found[f"{theirs}/{part}/bias"] = bias.reshape(heads, dim)

    def out(theirs: str, ours: str) -> None:
        found[f"{theirs}/out/kernel"] = weights[f"{ours}.weight"].T.reshape(heads, dim, width)
        found[f"{theirs}/out/bias"] = weights[f"{ours}.bias"]

    found["embedding/bias"] = weights["patch_embed.proj.bias"]
    if "cls_token" in weights:
        found["cls"] = weights["cls_token"]
    if "pos_embed" in weights:
        found[positions] = weights["pos_embed"]
    attention, second, mlp = ("_1", "_2", "_3") if old else ("_0", "_1", "_0")
    for i in range(config.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        norm(f"{theirs}/LayerNorm_0", f"{ours}.norm1")
        split(f"{theirs}/MultiHeadDotProductAttention{attention}", f"{ours}.attn.qkv", ["query", "key", "value"])
        out(f"{theirs}/MultiHeadDotProductAttention{attention}", f"{ours}.attn.proj")
        norm(f"{theirs}/LayerNorm{second}", f"{ours}.norm2")
        linear(f"{theirs}/MlpBlock{mlp}/Dense_0", f"{ours}.mlp.fc1")
        linear(f"{theirs}/MlpBlock{mlp}/Dense_1", f"{ours}.mlp.fc2")
    norm("Transformer/encoder_norm", "norm")
    if "attn_pool.latent" in weights:
        found["MAPHead_0/probe"] = weights["attn_pool.latent"]
        split("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool.q", ["query"])
        split("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool.kv", ["key", "value"])
        out("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool.proj")
        norm("MAPHead_0/LayerNorm_0", "attn_pool.norm")
        linear("MAPHead_0/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1")
        linear("MAPHead_0/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2")
    for name in ("pre_logits", "head"):
        if f"{name}.weight" in weights:
            linear(name, name)
    return stack_blocks(found, config.depth) if scan else found


def stack_blocks(flat: Weights, depth: int) -> Weights:
    """Stack the arrays of all blocks, as nn.scan does."""
    first = "Transformer/encoderblock_0/"
    tails = [key.removeprefix(first) for key in flat if key.startswith(first)]
    found = {key: value for key, value in flat.items() if "encoderblock" not in key}
    for tail in tails:
        found[f"Transformer/encoderblock/{tail}"] = np.stack(
            [flat[f"Transformer/encoderblock_{i}/{tail}"] for i in range(depth)]
        )
    return found
