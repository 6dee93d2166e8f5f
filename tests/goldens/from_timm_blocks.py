"""Golden files of timm's models whose blocks, rotary positions or pooling differ from those of the plain ViT."""

import re
from functools import partial
from typing import Any

import timm
from timm.layers import LayerNorm, RmsNorm, SwiGLU
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos

from tests.goldens.from_timm import common, run, vit
from tests.goldens.golden import Golden
from tests.goldens.peers import State, case, float64, golden, merge_projections, rename_keys, tiny_config
from vit_spec import ViTConfig

WIDE_HEADS: dict[str, Any] = {"width": 16, "num_heads": 2}  # heads of 8: two frequencies for rows and two for columns


def eva(name: str, config: ViTConfig, tokens: str, **options: Any) -> Golden:
    """Return the golden file of an `Eva`.

    tokens: the twins' name of the output of `forward_features`.
    options: timm's arguments.
    """

    def rename(state: State) -> State:
        if config.norms.layer_scale is not None:
            state = rename_keys(state, {r"gamma_(\d)$": r"ls\1.gamma"})
        if not options.get("qkv_fused", True):
            state = rename_keys(state, {r"(q|v)_proj\.bias": r"\1_bias"} if config.attention.qkv_bias == "qv" else {})
            state = merge_projections(state, ("q_proj", "k_proj", "v_proj"), "qkv")
        if any("fc1_g" in key for key in state):
            state = merge_projections(state, ("fc1_g", "fc1_x"), "fc1")
        if "rope.freqs" in state:
            frequencies = state.pop("rope.freqs")
            state |= {f"blocks.{n}.attn.freqs": frequencies[:, n] for n in range(config.depth)}
        return state

    with float64():
        settings = {**common(config), "mlp_ratio": config.mlp_dim / config.width, "use_rot_pos_emb": True}
        model = Eva(**settings, **options)
        return golden(name, model, config, rename, partial(run, tokens), peer=f"timm {timm.__version__}")


@case
def timm_eva02() -> Golden:
    """EVA-02: norms inside attention and MLP, a gate, and rotary positions scaled to a reference grid."""
    config = tiny_config(
        **WIDE_HEADS,
        positions={"rotary": "eva", "rotary_grid": (2, 7)},
        attention={"qkv_bias": "qv", "out_norm": True},
        mlp={"activation": "swiglu", "norm": True},
        norms={"after_blocks": False, "after_pool": True},
        head={"pool": "mean"},
    )
    options = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True}
    return eva("timm_eva02", config, "blocks.1", ref_feat_shape=(2, 7), **options)


@case
def timm_eva02_packed() -> Golden:
    """EVA-02's small models: gate and value in one array, no norms inside of attention and MLP."""
    config = tiny_config(
        **WIDE_HEADS, positions={"rotary": "eva"}, attention={"qkv_bias": "qv"}, mlp={"activation": "swiglu"}
    )
    return eva("timm_eva02_packed", config, "norm", swiglu_mlp=True, global_pool="token", use_fc_norm=False)


@case
def timm_pe_core() -> Golden:
    """The Perception Encoder: coordinates from one, columns first, and attention pooling over all tokens by more heads."""
    config = tiny_config(
        **WIDE_HEADS,
        tokens={"patch_bias": False},
        positions={"rotary": "rope_vit", "rotary_start": 1.0, "rotary_grid": (4, 4)},
        norms={"eps": 1e-5, "before_blocks": True},
        head={"pool": "attention", "pool_prefix": True, "pool_heads": 4},
    )
    options = {"attn_type": "rope", "use_pre_transformer_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5)}
    rotary = {"rope_grid_offset": 1.0, "rope_grid_indexing": "xy", "ref_feat_shape": (4, 4)}
    pool = {"global_pool": "map", "attn_pool_num_heads": 4}
    return eva("timm_pe_core", config, "norm", **options, **rotary, **pool)


@case
def timm_rope_axial() -> Golden:
    """RoPE-ViT with fixed frequencies: columns first, base 100, no other positions."""
    config = tiny_config(
        **WIDE_HEADS,
        positions={"kind": "none", "rotary": "rope_vit", "rotary_base": 100.0},
        norms={"layer_scale": 1e-5},
    )
    options = {"attn_type": "rope", "rope_grid_indexing": "xy", "rope_temperature": 100.0, "init_values": 1e-5}
    return eva("timm_rope_axial", config, "norm", use_abs_pos_emb=False, global_pool="token", **options)


@case
def timm_rope_mixed() -> Golden:
    """RoPE-ViT with learned frequencies of each head, and learned positions of the patches."""
    config = tiny_config(
        **WIDE_HEADS,
        positions={"rotary": "mixed", "rotary_base": 10.0, "covers": "none"},
        norms={"layer_scale": 1e-5},
    )
    options = {"attn_type": "rope", "rope_grid_indexing": "xy", "rope_type": "mixed", "rope_temperature": 10.0}
    return eva("timm_rope_mixed", config, "norm", init_values=1e-5, no_embed_class=True, global_pool="token", **options)


@case
def timm_sapiens2() -> Golden:
    """Sapiens2: RMS norms, also of queries and keys, and layer scale of attention alone."""
    config = tiny_config(
        **WIDE_HEADS,
        tokens={"registers": 2},
        positions={"kind": "none", "rotary": "dinov3", "rotary_base": 100.0},
        attention={"qk_norm": True},
        mlp={"activation": "swiglu"},
        norms={"kind": "rms", "bias": False, "layer_scale": 1.0, "mlp_layer_scale": False},
    )
    options = {"attn_type": "rope", "qkv_fused": False, "qk_norm": True, "swiglu_mlp": True, "norm_layer": RmsNorm}
    rotary = {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True, "use_abs_pos_emb": False}
    scale = {"init_values": 1.0, "attn_only_layer_scale": True}
    return eva("timm_sapiens2", config, "norm", num_reg_tokens=2, global_pool="token", **options, **rotary, **scale)


@case
def timm_eva_post_norm() -> Golden:
    """EVA-02-CLIP's enormous model: each norm after its attention or MLP, before the sum."""
    config = tiny_config(attention={"qkv_bias": "qv"}, norms={"order": "res_post"})
    with float64():
        model = Eva(**common(config), use_post_norm=True, global_pool="token")
        peer = f"timm {timm.__version__}"
        return golden("timm_eva_post_norm", model, config, dict, partial(run, "norm"), peer=peer)


@case
def timm_sub_norms() -> Golden:
    """BEiT-3: norms inside attention and MLP, without a gate."""
    config = tiny_config(attention={"out_norm": True}, mlp={"norm": True})
    return vit("timm_sub_norms", config, scale_attn_norm=True, scale_mlp_norm=True)


@case
def timm_res_post_norm() -> Golden:
    """Norms after attention and MLP, before the sums, as in Swin V2."""
    return vit("timm_res_post_norm", tiny_config(norms={"order": "res_post"}), block_fn=ResPostBlock)


@case
def timm_aimv2() -> Golden:
    """AIMv2: RMS norms, one of them of the patch embeddings, a gate in two layers, and biases nowhere in the blocks."""
    config = tiny_config(
        tokens={"class_token": False},
        attention={"qkv_bias": "none", "proj_bias": False},
        mlp={"activation": "swiglu", "bias": False},
        norms={"kind": "rms", "bias": False, "eps": 1e-5, "after_patches": True},
        head={"pool": "mean"},
    )
    norm = partial(RmsNorm, eps=1e-5)
    options = {"class_token": False, "global_pool": "avg", "fc_norm": False, "qkv_bias": False, "proj_bias": False}
    layers = {"norm_layer": norm, "embed_norm_layer": norm, "mlp_layer": SwiGLU, "act_layer": "silu"}

    def rename(state: State) -> State:
        return merge_projections(state, ("fc1_g", "fc1_x"), "fc1")

    with float64():
        settings = {**common(config), "mlp_ratio": config.mlp_dim / config.width, **options, **layers}
        model, peer = VisionTransformer(**settings), f"timm {timm.__version__}"
        return golden("timm_aimv2", model, config, rename, partial(run, "norm"), peer=peer)


def parallel(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a `VisionTransformer` of parallel blocks, whose input projections are one array."""

    def rename(state: State) -> State:
        rules = {"in_norm": "norm1", r"\.(q|k)_norm": r".attn.\1_norm", "attn_out_proj": "attn.proj"}
        if not config.attention.qk_norm:
            del rules[r"\.(q|k)_norm"]
        if config.norms.layer_scale is not None:
            rules[r"\.ls\."] = ".ls1."
        state = rename_keys(state, {**rules, "mlp_out_proj": "mlp.fc2"})
        result: State = {}
        for key, value in state.items():
            if "in_proj" in key:
                result[key.replace("in_proj", "mlp.fc1")], result[key.replace("in_proj", "attn.qkv")] = value.split(
                    [config.mlp_dim, len(value) - config.mlp_dim]
                )
            else:
                result[key.replace("mlp_bias", "mlp.fc1.bias")] = value
        return result

    with float64():
        model = VisionTransformer(**common(config), block_fn=ParallelScalingBlock, **options)
        return golden(name, model, config, rename, partial(run, "norm"), peer=f"timm {timm.__version__}")


@case
def timm_parallel() -> Golden:
    """Attention and MLP in parallel, after one norm, with one layer scale of their sum."""
    return parallel("timm_parallel", tiny_config(norms={"order": "parallel", "layer_scale": 0.1}), init_values=0.1)


@case
def timm_parallel_rms() -> Golden:
    """ViT-22B: RMS norms, also of queries and keys, whose projection has no bias."""
    config = tiny_config(
        attention={"qkv_bias": "none", "qk_norm": True}, norms={"kind": "rms", "bias": False, "order": "parallel"}
    )
    return parallel("timm_parallel_rms", config, qkv_bias=False, qk_norm=True, norm_layer=RmsNorm)


@case
def timm_pooled_prefix() -> Golden:
    """The mean of all tokens, registers included; mish; an image whose last rows and columns are left out."""
    config = tiny_config(
        image_size=(14, 23),
        tokens={"class_token": False, "registers": 2, "crop": True},
        mlp={"activation": "mish"},
        head={"pool": "mean", "pool_prefix": True},
    )
    options = {"class_token": False, "reg_tokens": 2, "global_pool": "avg", "pool_include_prefix": True, "fc_norm": False}
    return vit("timm_pooled_prefix", config, size=(14, 23), act_layer="mish", **options)


def relative(name: str, cls: Any, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a `Beit` or a `VisionTransformerRelPos`."""

    def rename(state: State) -> State:
        rules = {
            "relative_position_bias_table": "table" if cls is VisionTransformerRelPos else "rel_pos.table",
            r"^rel_pos_bias\.": "",
            "shared_rel_pos": "rel_pos",
            r"rel_pos\.mlp": "rel_pos",
            r"gamma_(\d)$": r"ls\1.gamma",
        }
        return rename_keys(state, {old: new for old, new in rules.items() if any(re.search(old, key) for key in state)})

    tokens = "norm" if config.norms.after_blocks else "blocks.1"
    with float64():
        model = cls(**common(config), **options)
        return golden(name, model, config, rename, partial(run, tokens), peer=f"timm {timm.__version__}")


@case
def timm_beit() -> Golden:
    """BEiT: in each block, a table of biases of the attention scores for offsets between patches."""
    config = tiny_config(
        positions={"kind": "none", "relative": "table"},
        attention={"qkv_bias": "qv"},
        norms={"layer_scale": 0.1, "after_blocks": False, "after_pool": True},
        head={"pool": "mean"},
    )
    options = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1}
    return relative("timm_beit", Beit, config, **options)


@case
def timm_beit_shared() -> Golden:
    """BEiT in pre-training: one table of biases for all blocks, and learned positions besides."""
    config = tiny_config(positions={"relative": "table", "relative_shared": True}, attention={"qkv_bias": "qv"})
    return relative("timm_beit_shared", Beit, config, use_shared_rel_pos_bias=True, global_pool="token")


@case
def timm_relative_mlp() -> Golden:
    """Biases of the scores from logarithms of offsets by an MLP; none for pairs with the class token."""
    positions = {"kind": "none", "relative": "mlp", "relative_dim": 5}
    config = tiny_config(positions=positions, norms={"layer_scale": 0.1}, head={"pool": "mean"})
    options = {"class_token": True, "rel_pos_dim": 5, "init_values": 0.1}
    return relative("timm_relative_mlp", VisionTransformerRelPos, config, **options)


@case
def timm_relative_shared() -> Golden:
    """Such biases from one MLP for all blocks, whose norms come after attention and MLP; no class token."""
    config = tiny_config(
        tokens={"class_token": False},
        positions={"kind": "none", "relative": "mlp", "relative_dim": 5, "relative_shared": True},
        norms={"order": "res_post"},
        head={"pool": "mean"},
    )
    options = {"rel_pos_dim": 5, "shared_rel_pos": True, "block_fn": ResPostRelPosBlock}
    return relative("timm_relative_shared", VisionTransformerRelPos, config, **options)


def naflex(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a `NaFlexVit`, whose patches have their channels last."""

    def rename(state: State) -> State:
        state = rename_keys(state, {r"^embeds\.(proj)": r"patch_embed.\1", r"^embeds\.": ""})
        weight = state["patch_embed.proj.weight"].unflatten(1, (*config.patch_size, config.in_channels))
        state["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)
        if "pos_embed" in state:
            state["pos_embed"] = state["pos_embed"].flatten(1, 2)
        return state

    with float64():
        settings = {key: value for key, value in common(config).items() if key != "img_size"}
        grid = {"pos_embed_grid_size": config.grid, "global_pool": "avg", "reg_tokens": config.tokens.registers}
        model = NaFlexVit(**settings, **grid, **options)
        return golden(name, model, config, rename, partial(run, "blocks.0"), peer=f"timm {timm.__version__}")


@case
def timm_naflex() -> Golden:
    """NaFlexVit: a grid of positions for patches alone, registers, and SiLU."""
    config = tiny_config(
        depth=1,
        image_size=(8, 12),
        mlp_dim=4,
        tokens={"class_token": False, "registers": 2},
        positions={"covers": "none"},
        mlp={"activation": "silu"},
        norms={"after_blocks": False, "after_pool": True},
        head={"pool": "mean"},
    )
    return naflex("timm_naflex", config, act_layer="silu")


@case
def timm_naflex_factorized() -> Golden:
    """NaFlexVit with the sum of a table for rows and one for columns, and a class token."""
    config = tiny_config(
        depth=1,
        image_size=(8, 12),
        mlp_dim=4,
        tokens={"class_token": True},
        positions={"covers": "none", "factorized": True},
        norms={"after_blocks": False, "after_pool": True},
        head={"pool": "mean"},
    )
    return naflex("timm_naflex_factorized", config, pos_embed="factorized", class_token=True)


@case
def timm_pe_spatial() -> Golden:
    """The Perception Encoder for language and space: layer scale, no final norm, and the mean of the patches."""
    config = tiny_config(
        depth=1,
        image_size=(8, 12),
        mlp_dim=4,
        **WIDE_HEADS,
        tokens={"patch_bias": False},
        positions={"rotary": "rope_vit", "rotary_start": 1.0, "rotary_grid": (4, 4)},
        norms={"eps": 1e-5, "before_blocks": True, "after_blocks": False, "layer_scale": 0.1},
        head={"pool": "mean"},
    )
    options = {"attn_type": "rope", "use_pre_transformer_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5)}
    rotary = {"rope_grid_offset": 1.0, "rope_grid_indexing": "xy", "ref_feat_shape": (4, 4)}
    norms = {"use_post_transformer_norm": False, "use_fc_norm": False, "init_values": 0.1}
    return eva("timm_pe_spatial", config, "blocks.0", **options, **rotary, **norms)
