"""Named models, compared with published parameter counts and FLOPs."""

import pytest

import vit_spec
from vit_spec import InputError, count, flops, get, names, rows

GAP = {"tokens": {"class_token": False}, "head": {"pool": "mean"}}  # mean pooling, no class token
FEATURES = {"num_classes": 0}
CLASSES = {"num_classes": 1000}
HEAD_BIAS = {"head": {"bias": True}}  # timm adds a bias of zeros to CLIP's projection
NO_QKV_BIAS = {"attention": {"qkv_bias": "none"}}

# google-research/vision_transformer, vit_jax/models_test.py: parameters with 1000 classes at 224 pixels.
GOOGLE = [
    ("ViT-Ti_16", "vit_ti16", {}, 5717416),
    ("ViT-S_16", "vit_s16", {}, 22050664),
    ("ViT-S_16-gap-norep", "vit_s16", GAP, 22049896),
    ("ViT-S_32", "vit_s32", {}, 22878952),
    ("ViT-S_32-gap-norep", "vit_s32", GAP, 22878184),
    ("ViT-B_8", "vit_b8", {}, 86576872),
    ("ViT-B_16", "vit_b16", {}, 86567656),
    ("ViT-B_16-gap-norep", "vit_b16", GAP, 86566120),
    ("ViT-B_32", "vit_b32", {}, 88224232),
    ("ViT-B_32-gap-norep", "vit_b32", GAP, 88222696),
    ("ViT-L_16", "vit_l16", {}, 304326632),
    ("ViT-L_32", "vit_l32", {}, 306535400),
    ("ViT-H_14", "vit_h14", {}, 632045800),
    # The test model of vit_jax/configs/models.py: width 10, depth 1, 2 heads, mlp_dim 10.
    ("testing", "vit_s16", {"width": 10, "depth": 1, "num_heads": 2, "mlp_dim": 10}, 21390),
    (
        "testing-unpooled",
        "vit_s16",
        {"width": 10, "depth": 1, "num_heads": 2, "mlp_dim": 10}
        | {"tokens": {"class_token": False}, "head": {"pool": "none"}},
        21370,
    ),
]

# timm results/benchmark-*.csv: timm's name, millions of parameters, GMACs; then the name here, and changes of its config.
# For models that timm publishes without a classifier, the counts do not include one.
# fmt: off
TIMM = [
    ("vit_tiny_patch16_224", 5.72, 1.26, "vit_ti16", {}),
    ("vit_tiny_patch16_384", 5.79, 4.70, "vit_ti16", {"image_size": 384}),
    ("vit_small_patch32_224", 22.88, 1.15, "vit_s32", {}),
    ("vit_small_patch32_384", 22.92, 3.45, "vit_s32", {"image_size": 384}),
    ("vit_small_patch16_224", 22.05, 4.61, "vit_s16", {}),
    ("vit_small_patch16_384", 22.20, 15.52, "vit_s16", {"image_size": 384}),
    ("vit_medium_patch16_gap_256", 38.86, 10.59, "vit_m16",
     GAP | NO_QKV_BIAS | {"image_size": 256, "norms": {"layer_scale": 1e-6}}),
    ("vit_base_patch32_224", 88.22, 4.41, "vit_b32", {}),
    ("vit_base_patch32_384", 88.30, 13.06, "vit_b32", {"image_size": 384}),
    ("vit_base_patch16_224", 86.57, 17.58, "vit_b16", {}),
    ("vit_base_patch16_224", 86.57, 17.58, "article_multihead", {}),
    ("vit_base_patch16_384", 86.86, 55.54, "vit_b16", {"image_size": 384}),
    ("vit_base_patch16_gap_224", 86.57, 17.49, "vit_b16", GAP),
    ("vit_base_patch16_reg4_gap_256", 86.62, 23.50, "vit_b16",
     {"image_size": 256, "tokens": {"class_token": False, "registers": 4}, "positions": {"covers": "none"},
      "head": {"pool": "mean"}, "norms": {"after_blocks": False, "after_pool": True}}),
    ("flexivit_base", 86.59, 20.29, "vit_b16", {"image_size": 240, "positions": {"covers": "none"}}),
    ("vit_base_patch8_224", 86.58, 78.22, "vit_b8", {}),
    ("vit_large_patch32_224", 305.51, 15.39, "vit_l32", FEATURES),
    ("vit_large_patch32_384", 306.63, 45.31, "vit_l32", {"image_size": 384}),
    ("vit_large_patch16_224", 304.33, 61.60, "vit_l16", {}),
    ("vit_large_patch16_384", 304.72, 191.21, "vit_l16", {"image_size": 384}),
    ("vit_large_patch14_224", 304.20, 81.08, "vit_l14", {}),
    ("vit_so400m_patch16_siglip_gap_256", 412.65, 109.62, "vit_so400m16",
     GAP | FEATURES | {"image_size": 256}),
    ("vit_so400m_patch14_siglip_gap_224", 412.44, 109.57, "vit_so400m14", GAP | FEATURES),
    ("vit_huge_patch14_224", 630.76, 167.40, "vit_h14", FEATURES),
    ("vit_huge_patch14_gap_224", 630.76, 166.73, "vit_h14", GAP | FEATURES),
    ("vit_giant_patch14_224", 1012.61, 267.18, "vit_g14", {}),
    ("vit_giant_patch16_gap_224", 1011.37, 202.46, "vit_g14", GAP | FEATURES | {"patch_size": 16}),
    ("vit_gigantic_patch14_224", 1844.44, 483.95, "vit_G14", {}),
    ("deit_tiny_patch16_224", 5.72, 1.26, "deit_ti16", {}),
    ("deit_small_patch16_224", 22.05, 4.61, "deit_s16", {}),
    ("deit_base_patch16_224", 86.57, 17.58, "deit_b16", {}),
    ("deit_base_patch16_384", 86.86, 55.54, "deit_b16", {"image_size": 384}),
    ("deit_tiny_distilled_patch16_224", 5.91, 1.27, "deit_ti16_distilled", {}),
    ("deit_small_distilled_patch16_224", 22.44, 4.63, "deit_s16_distilled", {}),
    ("deit_base_distilled_patch16_224", 87.34, 17.68, "deit_b16_distilled", {}),
    ("deit_base_distilled_patch16_384", 87.63, 55.65, "deit_b16_distilled", {"image_size": 384}),
    ("deit3_small_patch16_224", 22.06, 4.61, "deit3_s16", {}),
    ("deit3_small_patch16_384", 22.21, 15.52, "deit3_s16", {"image_size": 384}),
    ("deit3_medium_patch16_224", 38.85, 8.00, "deit3_m16", {}),
    ("deit3_base_patch16_224", 86.59, 17.58, "deit3_b16", {}),
    ("deit3_base_patch16_384", 86.88, 55.54, "deit3_b16", {"image_size": 384}),
    ("deit3_large_patch16_224", 304.37, 61.60, "deit3_l16", {}),
    ("deit3_large_patch16_384", 304.76, 191.21, "deit3_l16", {"image_size": 384}),
    ("deit3_huge_patch14_224", 632.13, 167.40, "deit3_h14", {}),
    ("vit_small_patch16_224", 22.05, 4.61, "dino_s16", CLASSES),
    ("vit_small_patch16_224", 22.05, 4.61, "article_dino", CLASSES),
    ("vit_small_patch8_224", 21.67, 22.44, "dino_s8", {}),
    ("vit_base_patch16_224", 86.57, 17.58, "dino_b16", CLASSES),
    ("vit_base_patch8_224", 86.58, 78.22, "dino_b8", CLASSES),
    ("vit_small_patch14_dinov2", 22.06, 46.76, "dinov2_s14", {}),
    ("vit_base_patch14_dinov2", 86.58, 151.71, "dinov2_b14", {}),
    ("vit_large_patch14_dinov2", 304.37, 507.15, "dinov2_l14", {}),
    ("vit_giant_patch14_dinov2", 1136.48, 1784.20, "dinov2_g14", {}),
    ("vit_small_patch14_reg4_dinov2", 22.06, 46.95, "dinov2_s14_reg4", {}),
    ("vit_base_patch14_reg4_dinov2", 86.58, 152.25, "dinov2_b14_reg4", {}),
    ("vit_large_patch14_reg4_dinov2", 304.37, 508.90, "dinov2_l14_reg4", {}),
    ("vit_giant_patch14_reg4_dinov2", 1136.48, 1790.08, "dinov2_g14_reg4", {}),
    ("vit_small_patch16_dinov3", 21.59, 6.26, "dinov3_s16", NO_QKV_BIAS),
    ("vit_small_patch16_dinov3_qkvb", 21.60, 6.26, "dinov3_s16", {}),
    ("vit_small_plus_patch16_dinov3", 28.68, 8.11, "dinov3_s16plus", NO_QKV_BIAS),
    ("vit_small_plus_patch16_dinov3_qkvb", 28.69, 8.11, "dinov3_s16plus", {}),
    ("vit_base_patch16_dinov3", 85.64, 23.60, "dinov3_b16", NO_QKV_BIAS),
    ("vit_base_patch16_dinov3_qkvb", 85.66, 23.60, "dinov3_b16", {}),
    ("vit_large_patch16_dinov3", 303.08, 82.43, "dinov3_l16", NO_QKV_BIAS),
    ("vit_large_patch16_dinov3_qkvb", 303.13, 82.43, "dinov3_l16", {}),
    ("vit_huge_plus_patch16_dinov3", 840.51, 224.88, "dinov3_h16plus", NO_QKV_BIAS),
    ("vit_huge_plus_patch16_dinov3_qkvb", 840.59, 224.88, "dinov3_h16plus", {}),
    ("vit_base_patch16_224", 86.57, 17.58, "mae_b16", CLASSES),
    ("vit_large_patch16_224", 304.33, 61.60, "mae_l16", CLASSES),
    ("vit_huge_patch14_224", 630.76, 167.40, "mae_h14", {}),
    ("vit_base_patch32_clip_quickgelu_224", 87.85, 4.41, "clip_b32", HEAD_BIAS),
    ("vit_base_patch32_clip_448", 88.34, 17.93, "clip_b32", HEAD_BIAS | CLASSES | {"image_size": 448}),
    ("vit_base_patch16_clip_quickgelu_224", 86.19, 17.58, "clip_b16", HEAD_BIAS),
    ("vit_base_patch16_clip_224", 86.57, 17.58, "clip_b16", HEAD_BIAS | CLASSES),
    ("vit_large_patch14_clip_quickgelu_224", 303.97, 81.08, "clip_l14", HEAD_BIAS),
    ("vit_large_patch14_clip_quickgelu_336", 304.29, 191.11, "clip_l14_336", HEAD_BIAS),
    ("vit_huge_patch14_clip_quickgelu_224", 632.08, 167.40, "clip_h14", HEAD_BIAS),
    ("vit_giant_patch14_clip_224", 1012.65, 267.18, "clip_g14", HEAD_BIAS),
    ("vit_gigantic_patch14_clip_224", 1844.91, 483.96, "clip_G14", HEAD_BIAS),
    ("vit_base_patch32_siglip_256", 94.55, 5.75, "siglip_b32", {}),
    ("vit_base_patch16_siglip_224", 92.88, 17.73, "siglip_b16", {}),
    ("vit_base_patch16_siglip_512", 93.52, 108.22, "siglip_b16", {"image_size": 512}),
    ("vit_base_patch16_siglip_gap_224", 85.80, 17.49, "siglip_b16", {"head": {"pool": "mean"}}),
    ("vit_large_patch16_siglip_256", 315.96, 81.34, "siglip_l16", {}),
    ("vit_so400m_patch16_siglip_256", 427.89, 110.31, "siglip_so400m16", {}),
    ("vit_so400m_patch14_siglip_224", 427.68, 110.26, "siglip_so400m14", {}),
    ("vit_so400m_patch14_siglip_378", 428.23, 335.40, "siglip_so400m14", {"image_size": 378}),
    ("vit_giantopt_patch16_siglip_256", 1163.17, 299.66, "siglip_gopt16", {}),
    ("eva02_tiny_patch14_336", 5.76, 4.68, "eva02_ti14", {}),
    ("eva02_small_patch14_336", 22.13, 15.48, "eva02_s14", {}),
    ("eva02_base_patch14_448", 87.12, 107.11, "eva02_b14", {}),
    ("eva02_large_patch14_448", 305.08, 362.33, "eva02_l14", {}),
    ("beit3_base_patch16_224", 86.66, 17.63, "beit3_b16", {}),
    ("vit_pe_core_tiny_patch16_384", 6.14, 4.74, "pe_core_ti16", HEAD_BIAS),
    ("vit_pe_core_small_patch16_384", 23.78, 15.69, "pe_core_s16", HEAD_BIAS),
    ("vit_pe_core_base_patch16_224", 93.67, 17.82, "pe_core_b16", HEAD_BIAS),
    ("vit_pe_core_large_patch14_336", 317.15, 192.33, "pe_core_l14", HEAD_BIAS),
    ("vit_pe_lang_large_patch14_448", 291.42, 346.99, "pe_lang_l14", {}),
    ("vit_pe_spatial_tiny_patch16_512", 5.68, 10.46, "pe_spatial_ti16", {}),
    ("vit_pe_spatial_small_patch16_512", 21.98, 31.80, "pe_spatial_s16", {}),
    ("vit_pe_spatial_base_patch16_512", 86.43, 107.13, "pe_spatial_b16", {}),
    ("vit_pe_spatial_large_patch14_448", 303.96, 362.05, "pe_spatial_l14", {}),
    ("vit_small_patch16_rope_224", 21.98, 4.61, "rope_s16", {}),
    ("vit_base_patch16_rope_224", 86.43, 17.58, "rope_b16", {}),
    ("vit_large_patch16_rope_224", 304.17, 61.60, "rope_l16", {}),
    ("vit_small_patch16_rope_ape_224", 22.06, 4.61, "rope_s16_ape", {}),
    ("vit_base_patch16_rope_ape_224", 86.59, 17.58, "rope_b16_ape", {}),
    ("vit_large_patch16_rope_ape_224", 304.37, 61.60, "rope_l16_ape", {}),
    ("vit_small_patch16_rope_mixed_224", 21.99, 4.61, "rope_s16_mixed", {}),
    ("vit_base_patch16_rope_mixed_224", 86.44, 17.58, "rope_b16_mixed", {}),
    ("vit_large_patch16_rope_mixed_224", 304.20, 61.60, "rope_l16_mixed", {}),
    ("vit_small_patch16_rope_mixed_ape_224", 22.06, 4.61, "rope_s16_mixed_ape", {}),
    ("vit_base_patch16_rope_mixed_ape_224", 86.59, 17.58, "rope_b16_mixed_ape", {}),
    ("vit_base_patch16_rpn_224", 86.54, 17.49, "vit_b16_rpn", {}),
    ("vit_large_patch16_rope_mixed_ape_224", 304.40, 61.60, "rope_l16_mixed_ape", {}),
]
# fmt: on

# Exact counts from other sources.
OTHERS = {
    "vit_s16_plain": 22122472,  # big_vision models/vit.py, variant S/16, rep_size, sincos2d, gap
    # The parameters of the classes of timm 1.0.31: vit_7b_patch16_dinov3, aimv2_*_patch14_224, vit_base_patch16_sapiens2,
    # eva02_enormous_patch14_clip_224, beit_*_patch16_224, vit_relpos_*_patch16_224 and naflexvit_base_patch16_*gap.
    "dinov3_7b16": 6716030976,
    "beit3_l16": 304572392,  # timm publishes 61.72 GMACs; counted as for the base model, its layers have 61.73
    "aimv2_l14": 309197824,
    "aimv2_h14": 680851968,
    "sapiens2_b16": 113993472,
    "eva02_e14_clip": 4350556928,
    "beit_b16": 86530984,
    "beit_l16": 304430568,
    "relpos_s16": 21983920,
    "relpos_m16": 38747208,
    "relpos_b16": 86429560,
    "naflex_b16": 86633704,
    "naflex_b16_par": 86633704,
    "naflex_b16_parfac": 86461672,
}

# No published count exists.
UNCOUNTED = {"vit_mu16", "vit_22b14", "article_xray_rope", "article_sincos", "article_rectangular"}


def test_parameter_counts_are_exactly_those_of_google():
    computed = {peer: count(get(name, **changes)) for peer, name, changes, _ in GOOGLE}
    assert computed == {peer: published for peer, _, _, published in GOOGLE}


def test_parameter_counts_are_those_of_timm_to_the_published_digits():
    computed = [(peer, name, round(count(get(name, **changes)) / 1e6, 2)) for peer, _, _, name, changes in TIMM]
    assert computed == [(peer, name, millions) for peer, millions, _, name, _ in TIMM]


def test_flops_with_norms_are_those_of_timm_to_the_published_digits():
    """timm's counter, fvcore, counts five operations for each normalized entry, and no other elementwise operation."""
    computed = []
    for peer, _, _, name, changes in TIMM:
        config = get(name, **changes)
        computed.append((peer, name, round((flops(config) / 2 + 5 * normalized_entries(config)) / 1e9, 2)))
    assert computed == [(peer, name, gmacs) for peer, _, gmacs, name, _ in TIMM]


def test_flops_without_norms_are_within_one_percent_of_timm():
    errors = {(peer, name): flops(get(name, **changes)) / 2e9 / gmacs - 1 for peer, _, gmacs, name, changes in TIMM}
    assert {case: error for case, error in errors.items() if abs(error) > 0.01} == {}


def normalized_entries(config):
    """Return the number of entries that norms normalize, in all tokens and blocks together."""
    after_pooling = ("attn_pool.norm.weight", "fc_norm.weight")  # these norms have one token
    norms = [row for row in rows(config).values() if "norm" in row.name and row.name.endswith(".weight")]
    return sum(row.size * (1 if row.name in after_pooling else config.num_tokens) for row in norms)


def test_parameter_counts_are_exactly_those_of_other_sources():
    assert {name: count(get(name)) for name in OTHERS} == OTHERS


def test_every_model_has_a_published_count_or_is_listed_as_uncounted():
    counted = {row[1] for row in GOOGLE} | {row[3] for row in TIMM} | set(OTHERS)
    assert counted.isdisjoint(UNCOUNTED)
    assert counted | UNCOUNTED == set(names())


def test_the_matrices_of_22b_have_the_21743_million_parameters_of_its_paper():
    blocks = [row for row in rows(get("vit_22b14")).values() if row.name.startswith("blocks.") and row.decays]
    assert round(sum(row.size for row in blocks) / 1e6) == 21743


def test_the_plain_s16_without_its_hidden_layer_has_21974632_parameters():
    assert count(get("vit_s16_plain", head={"hidden": None})) == 21974632


# Published properties that do not change counts -----------------------------------------------------------------


def test_all_models_of_a_family_have_its_published_eps():
    published = {"vit": 1e-6, "deit": 1e-6, "deit3": 1e-6, "dino": 1e-6, "dinov2": 1e-6, "dinov3": 1e-5}
    published |= {"mae": 1e-6, "clip": 1e-5, "siglip": 1e-6, "article": 1e-5, "eva02": 1e-6, "beit3": 1e-5, "aimv2": 1e-5}
    published |= {"beit": 1e-6, "relpos": 1e-6, "naflex": 1e-6, "pe": 1e-5, "rope": 1e-6, "sapiens2": 1e-6}
    found = {}
    for name in names():
        if name != "article_dino":  # a model of DINO, with DINO's eps
            found.setdefault(name.split("_")[0], set()).add(get(name).norms.eps)
    assert found == {family: {eps} for family, eps in published.items()}


def test_activations_are_the_published_ones():
    published = {"vit_s16": "gelu", "dinov2_s14": "gelu", "dinov2_g14": "swiglu", "dinov3_s16": "gelu"}
    published |= {"dinov3_s16plus": "swiglu", "clip_b16": "quick_gelu", "clip_h14": "gelu", "siglip_b16": "gelu_tanh"}
    assert {name: get(name).mlp.activation for name in published} == published


def test_numbers_of_tokens_are_the_published_ones():
    published = {"vit_s16": 1 + 196, "deit_s16_distilled": 2 + 196, "dinov2_s14": 1 + 37 * 37}
    published |= {"dinov2_s14_reg4": 5 + 37 * 37, "dinov3_s16": 5 + 256, "siglip_b16": 196, "article_rectangular": 1 + 15}
    assert {name: get(name).num_tokens for name in published} == published


@pytest.mark.parametrize("name", ["dino_s16", "dinov2_s14", "article_dino"])
def test_dino_resamples_bicubically_with_an_offset_and_without_antialiasing(name):
    resampling = get(name).resampling
    assert (resampling.kernel, resampling.antialias, resampling.offset) == ("bicubic", False, 0.1)


def test_dinov2_with_registers_resamples_with_antialiasing_and_without_an_offset():
    resampling = get("dinov2_s14_reg4").resampling
    assert (resampling.kernel, resampling.antialias, resampling.offset) == ("bicubic", True, 0.0)


def test_clip_projects_to_its_embedding_without_a_bias():
    assert [get(f"clip_{size}").num_classes for size in ("b32", "b16", "l14", "h14", "g14", "G14")] == [
        512, 512, 768, 1024, 1024, 1280
    ]  # fmt: skip
    assert "head.bias" not in rows(get("clip_b16"))


def test_dinov2_with_registers_can_have_the_position_table_of_metas_checkpoints():
    assert rows(get("dinov2_s14_reg4", positions={"covers": "class"}))["pos_embed"].shape == (1370, 384)


# The five articles ------------------------------------------------------------------------------------------


def test_article_xray_rope_has_only_rotary_positions_and_no_final_norm():
    config = get("article_xray_rope")
    assert config.positions.rotary == "axial"
    assert not {"pos_embed", "norm.weight", "fc_norm.weight"} & set(rows(config))
    assert (config.in_channels, config.width, config.num_heads, config.depth, config.mlp_dim) == (1, 768, 8, 6, 1024)


def test_article_xray_rope_has_ten_labels():
    assert rows(get("article_xray_rope"))["head.weight"].shape == (10, 768)


def test_article_multihead_has_a_norm_in_its_classifier_and_no_final_norm():
    found = set(rows(get("article_multihead")))
    assert "fc_norm.weight" in found
    assert "norm.weight" not in found


@pytest.mark.parametrize(
    ("name", "parameter", "law"),
    [
        ("article_xray_rope", "cls_token", "normal(1)"),
        ("article_multihead", "cls_token", "normal(1)"),
        ("article_multihead", "pos_embed", "normal(1)"),
        ("article_sincos", "cls_token", "uniform(0, 1)"),
        ("article_rectangular", "cls_token", "trunc_normal(0.02)"),
    ],
)
def test_tokens_and_positions_of_articles_have_their_initial_distributions(name, parameter, law):
    assert rows(get(name))[parameter].law == vit_spec.Law.parse(law, "law")


def test_article_sincos_learns_positions_initialized_with_a_table():
    assert rows(get("article_sincos"))["pos_embed"].law is None
    assert get("article_sincos").positions.table == "sincos_1d"


def test_article_sincos_has_one_norm_per_block_and_no_output_projection():
    found = set(rows(get("article_sincos")))
    assert "blocks.norm1.weight" in found
    assert not {"blocks.norm2.weight", "blocks.attn.proj.weight", "norm.weight"} & found


def test_article_sincos_divides_scores_by_the_root_of_the_number_of_heads():
    assert get("article_sincos").scale == pytest.approx(1 / 6**0.5, rel=1e-15)


def test_article_rectangular_has_15_patches_of_400_pixels():
    config = get("article_rectangular")
    assert config.grid == (3, 5)
    assert rows(config)["patch_embed.proj.weight"].shape == (768, 1, 20, 20)


def test_the_fixed_table_of_article_rectangular_is_not_a_parameter():
    assert "pos_embed" not in rows(get("article_rectangular"))


def test_the_class_token_of_article_rectangular_has_no_weight_decay():
    assert not rows(get("article_rectangular"))["cls_token"].decays


def test_article_dino_is_dino_s16():
    assert get("article_dino") == get("dino_s16")


# Names ------------------------------------------------------------------------------------------------------


def test_get_with_changes_is_replace():
    assert get("vit_s16", num_classes=10, norms={"eps": 1e-5}) == get("vit_s16").replace(
        num_classes=10, norms={"eps": 1e-5}
    )


def test_giant_and_gigantic_differ_in_case():
    assert (get("vit_g14").width, get("vit_G14").width) == (1408, 1664)


@pytest.mark.parametrize(("wrong", "near"), [("vit_s61", "vit_s16"), ("dinov3_b14", "dinov3_b16"), ("deit_s", "deit_s16")])
def test_the_error_for_an_unknown_name_suggests_a_similar_one(wrong, near):
    with pytest.raises(InputError, match=f"unknown model '{wrong}'; did you mean '{near}'?.*python -m parity models"):
        get(wrong)


def test_the_error_for_an_unknown_name_says_how_to_list_all():
    with pytest.raises(InputError, match="unknown model 'xyzzy'; `python -m parity models` lists them all"):
        get("xyzzy")
