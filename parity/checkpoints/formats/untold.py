"""What no tensor of a Vision Transformer shows and `ViTConfig` has no word for, with what is assumed of it.

Libraries share names of parameters and compute different functions with them.  Each line is what some of them do otherwise:

- "order of a block": norms behind each half (block_fn of timm), or a constant that each half is divided by
  (skip_lam of zihangJiang/TokenLabeling, tlt/models/lvvit.py).
- "norms without weights": of what is pooled, on Qwen3's vision tower in timm, or by its length (norm_pre_logits of
  google-research/l2p, models/vit.py).
- "reach of attention": windows (ViT of facebookresearch/detectron2, modeling/backbone/vit.py), tokens that are left out
  (youweiliang/evit, evit.py), another kernel than the softmax (TopViT of google-research/google-research,
  topological_transformer/images/topvit.py), or biases of scores that follow from the distance.
- "cut of patches": a stride that is less than their size (facebookresearch/AudioMAE, util/patch_embed.py), or columns
  that go before rows.
- "use of blocks": blocks that run several times, or weights that are rounded or normalised before they are used.
- "use of positions": a table that is kept and not used (ScaleMAE of torchgeo, models/scale_mae.py), or a class token that
  is the last.
- "activation of pre_logits": none, in early versions of google-research/big_vision (a note in models/vit.py).
- "outputs": logits that are divided by a temperature (temperature of google-research/l2p, models/vit.py), or one of two
  classifiers alone.
- "attention pooling": timm's attn_pool_num_heads and pool_include_prefix.
- "a pool that is a mean": the latter too, or a mean ahead of the last norm (USE_MEAN_POOLING of facebookresearch/SlowFast,
  models/video_model_builder.py; final_ln_after_pool of mlfoundations/open_clip, src/open_clip/transformer.py).
"""

from collections.abc import Mapping

from parity.checkpoints.formats.format import Evidence


def in_words(evidence: Evidence) -> Mapping[str, str]:
    """Return what is assumed of a model of which only tensors are known, by what it is assumed of."""
    axes = evidence.axes
    found = {
        "order of a block": "each norm ahead of its half, whose output is added as it is",
        "norms without weights": "none",
        "reach of attention": "every token, in every block, by a softmax of scores without a bias",
        "cut of patches": "side by side, row by row, without a border",
        "use of blocks": "each once, with its weights as they are",
    }
    if "pos_embed" in axes:
        found["use of positions"] = "those of the file, the class token's first, added once ahead of the blocks"
    if "pre_logits.weight" in axes:
        found["activation of pre_logits"] = "tanh"
    if "head.weight" in axes:
        both = "head_dist.weight" in axes
        found["outputs"] = "the mean of both classifiers, as it is" if both else "those of the classifier, as they are"
    if "attn_pool.latent" in axes:
        found["attention pooling"] = "as many heads as the blocks, over the patch tokens alone"
    else:
        last = ", after the last norm" if "norm.weight" in axes else ""
        found["a pool that is a mean"] = f"of the patch tokens alone{last}"
    return found
