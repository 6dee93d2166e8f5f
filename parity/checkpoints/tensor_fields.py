"""Read fields of the config from the presence and the shapes of the tensors of a checkpoint."""

from typing import Any

from parity.checkpoints.formats import Evidence
from vit_spec import InputError


def fields_from_tensors(evidence: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that the presence and shapes of tensors prove, and those that they make likely."""
    axes, sizes = evidence.axes, evidence.sizes
    qkv = "qkv" if "blocks.attn.qkv.bias" in axes else "qv" if "blocks.attn.q_bias" in axes else "none"
    likely: dict[str, Any] = {}
    shown: dict[str, Any] = {
        "width": sizes["width"],
        "depth": sizes["block"],
        "mlp_dim": sizes["ff"],
        "num_classes": sizes.get("label", 0),
        "tokens.class_token": "cls_token" in axes,
        "tokens.registers": sizes.get("register", 0),
        "tokens.distillation": "dist_token" in axes,
        "tokens.patch_bias": "patch_embed.proj.bias" in axes,
        "attention.qkv_bias": qkv,
        "attention.proj": "blocks.attn.proj.weight" in axes,
        "attention.qk_norm": "blocks.attn.q_norm.weight" in axes,
        "attention.out_norm": "blocks.attn.norm.weight" in axes,
        "mlp.bias": "blocks.mlp.fc1.bias" in axes,
        "mlp.norm": "blocks.mlp.norm.weight" in axes,
        "norms.bias": "blocks.norm1.bias" in axes,
        "norms.after_patches": "patch_embed.norm.weight" in axes,
        "norms.before_blocks": "norm_pre.weight" in axes,
        "norms.after_blocks": "norm.weight" in axes,
        "norms.after_pool": "fc_norm.weight" in axes,
    }
    if sizes.keys() >= {"rgb", "ph", "pw"}:  # else some of them are merged
        shown |= {"in_channels": sizes["rgb"], "patch_size": (sizes["ph"], sizes["pw"])}
    if shown["attention.proj"]:
        shown["attention.proj_bias"] = "blocks.attn.proj.bias" in axes
    if "pos_embed" in axes or "pos_embed_y" in axes:
        shown |= {"positions.kind": "learned", "positions.factorized": "pos_embed_y" in axes}
    if "blocks.attn.freqs" in axes:
        shown["positions.rotary"] = "mixed"
    shown |= _relative_fields(evidence)
    if "blocks.ls1.gamma" not in axes:
        shown["norms.layer_scale"] = None
    if "blocks.norm2.weight" in axes:
        shown["norms.shared_norm"] = False
        shown["norms.mlp_layer_scale"] = "blocks.ls1.gamma" not in axes or "blocks.ls2.gamma" in axes
    else:  # or attention and MLP are parallel
        likely["norms.shared_norm"] = True
    if not shown["norms.bias"]:
        likely["norms.kind"] = "rms"
    if "glu" in axes["blocks.mlp.fc1.weight"]:
        likely["mlp.activation"] = "swiglu"
    if "attn_pool.latent" in axes:
        shown["head.pool"] = "attention"
    elif not shown["tokens.class_token"] or "fc_norm.weight" in axes:  # models with a norm after the pool take the mean
        likely["head.pool"] = "mean"
    if "pre_logits.weight" in axes:
        shown["head.hidden"] = sizes["feature"]
    elif sizes.get("feature") == 2 * sizes["width"]:
        likely["head.pool"] = "token_mean"
    if "head.weight" in axes:
        shown["head.bias"] = "head.bias" in axes
    if "head" in sizes and not (shown["attention.qk_norm"] and sizes["head"] == 1):
        shown["num_heads"] = sizes["head"]
    return shown, likely


def _relative_fields(evidence: Evidence) -> dict[str, Any]:
    """Return the fields of relative positions, all of which the tensors show."""
    shared = "rel_pos.table" in evidence.axes or "rel_pos.fc1.weight" in evidence.axes
    name = "rel_pos" if shared else "blocks.attn.rel_pos"
    kinds = {f"{name}.table": "table", f"{name}.fc1.weight": "mlp"}
    kind = next((kind for tensor, kind in kinds.items() if tensor in evidence.axes), "none")
    return {
        "positions.relative": kind,
        "positions.relative_dim": evidence.sizes["offset_ff"] if kind == "mlp" else None,
        "positions.relative_shared": shared,
    }


def check_channels_first(evidence: Evidence) -> None:
    """Raise InputError if the channels seem to be another axis of the patch projection.

    MLX stores (width, 16, 16, 3) instead of (width, 3, 16, 16).  In PyTorch's order that shape means 16 channels and
    patches of 16 x 3, and all other shapes of the file agree with it.  A table of a user may have the mistake too.
    """
    channels, ph, pw = (evidence.sizes.get(axis, 0) for axis in ("rgb", "ph", "pw"))
    if 1 < channels == pw != ph and ph in (1, 3):
        raise InputError(
            f"its patch projection has {channels} channels of {ph}x{pw} pixels, or {ph} channels of {channels}x{pw} if the "
            f"channels are the axis that is called rows: correct the table, or give --set in_channels={channels}"
        )
    if 1 < channels == ph != pw and pw in (1, 3):
        raise InputError(
            f"its patch projection has {channels} channels of {ph}x{pw} pixels, or {pw} channels of {channels}x{ph} if the "
            f"channels are last: transpose it to (width, channels, rows, columns), or give --set in_channels={channels}"
        )
