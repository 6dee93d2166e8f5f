"""Behaviour of a Vision Transformer that no tensor shows and no field of `ViTConfig` describes, with what is assumed.

Libraries use the same parameter names for models that compute different functions.  For each assumption, some code that
deviates from it:

- "residual connections": both sums divided by a constant (skip_lam in zihangJiang/TokenLabeling, tlt/models/lvvit.py).
- "norms without weights": a norm of the pooled token (Qwen3's vision tower in timm), or its division by its length
  (norm_pre_logits in google-research/l2p, models/vit.py).
- "attention pattern": windows (ViT in facebookresearch/detectron2, modeling/backbone/vit.py; RF-DETR's backbones, which
  have the keys of transformers' Dinov2), dropped tokens
  (youweiliang/evit, evit.py), another kernel than the softmax (TopViT in google-research/google-research,
  topological_transformer/images/topvit.py), or score biases that follow from the distance between tokens.
- "relative positions": logarithms of offsets scaled to a range (mode "swin" of RelPosMlp in timm, layers/pos_embed_rel.py).
- "patch extraction": overlapping patches (facebookresearch/AudioMAE, util/patch_embed.py), or column by column.
- "use of blocks": blocks that run several times, or weights that are rounded or normalized before they are used.
- "further operations": a GELU after the last layer of the MLP (keras.io's example of a ViT), an activation after the patch
  projection, normalized rows of the classifier, values added to the output of attention, or scaled embeddings.
- "MLP gate": the second half (the argument mlp_layer in timm).
- "use of positions": a stored table that is not used (ScaleMAE in torchgeo, models/scale_mae.py), or a class token at the
  end of the sequence.
- "activation of pre_logits": none, in early versions of google-research/big_vision (a note in models/vit.py).
- "code around the model": normalization of images or outputs, or a sigmoid, in a module that contains the library's model.
- "outputs": logits divided by a temperature (temperature in google-research/l2p, models/vit.py), those of one of two
  classifiers, or other tokens (CLIPForImageClassification in transformers without its classifier).
- "mean pooling": a mean before the last norm (USE_MEAN_POOLING in facebookresearch/SlowFast,
  models/video_model_builder.py; final_ln_after_pool in mlfoundations/open_clip, src/open_clip/transformer.py).
"""

from collections.abc import Mapping

from parity.checkpoints.formats.evidence import Evidence


def behaviour_of_module(evidence: Evidence, module: str) -> Mapping[str, str]:
    """Return the assumed behaviour, by property, of a model inside another module, which no config file describes.

    module: the path of the model in the other module, such as "backbone".
    """
    around = f"none: the module that contains {module!r} returns its output unchanged"
    if evidence.classifier:
        around = f"none but the classifier {evidence.classifier!r}, which the output of {module!r} goes into unchanged"
    return {**common_behaviour(evidence), "code around the model": around}


def common_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumed behaviour, by property, of a model of which only the tensors are known."""
    axes = evidence.axes
    relative = any("rel_pos." in name for name in axes)
    found = {
        "residual connections": "the outputs of attention and MLP are added unscaled",
        "norms without weights": "none",
        "attention pattern": "every token to every token, in every block, by a softmax of scores "
        f"{'with the bias of relative positions' if relative else 'without a bias'}; the entries of a head are adjacent",
        "patch extraction": "without overlap, row by row, without padding",
        "use of blocks": "each once, with its weights unchanged",
        "further operations": "none: no activation, norm, scale or sum besides those above",
    }
    if relative:
        found["relative positions"] = "rows before columns, offset of the query from the key, ascending"
    if "glu" in axes["blocks.mlp.fc1.weight"]:
        found["MLP gate"] = "SiLU of the first half"
    if "pos_embed" in axes:
        found["use of positions"] = "the table of the file, a class token's row first, added once before the blocks"
    if "pre_logits.weight" in axes:
        found["activation of pre_logits"] = "tanh"
    if "head.weight" in axes:
        both = "head_dist.weight" in axes
        found["outputs"] = "the mean of both classifiers, unscaled" if both else "those of the classifier, unscaled"
    if "attn_pool.latent" not in axes and "norm.weight" in axes:
        found["mean pooling"] = "if any, after the last norm"
    return found
