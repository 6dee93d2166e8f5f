"""Fields that no tensor shows, their usual values, and the fields that do not change what a model computes."""

from parity.checkpoints.formats import Fields

# Fields that change what is computed and that no tensor shows, with the values that most models have.  A field that neither
# the file nor the format determines gets this value, and is reported as an assumption.
DEFAULTS: Fields = {
    "positions.kind": "none",
    "positions.rotary": "none",
    "attention.scale": None,
    "attention.value_skip": False,
    "norms.kind": "layer",
    "norms.order": "pre",
    "norms.eps": 1e-6,
    "mlp.activation": "gelu",
    "head.pool": "token",
    "pixels.mean": (0.5,),
    "pixels.std": (0.5,),
    "resampling.kernel": "bicubic",
    "resampling.antialias": True,
    "resampling.align_corners": False,
    "resampling.offset": 0.0,
}

# `DEFAULTS`, and fields of pooling, which only matter for some models; `infer_pooling` has their defaults.
HIDDEN_FIELDS = (*DEFAULTS, "head.pool_prefix", "head.pool_heads")

# Fields, and parts of the config, that do not change what a model with given weights computes from the normalized pixels of
# an image of its own size: initial values, dropout, normalization of pixels, and resampling to images of another size.
NEUTRAL = ("image_size", "pixels", "resampling", "regularisation", "tokens.init", "head.init")

# Kind of rotary positions -> what it rotates, in words, and the base that it was published with.
ROTARY_KINDS: dict[str, tuple[str, float]] = {
    "axial": ("of neighbouring pairs, over columns and rows of patches counted from one", 10000.0),
    "dinov3": ("of halves, over rows and columns of patches about the centre", 100.0),
    "eva": ("of neighbouring pairs, over rows and columns of patches", 10000.0),
    "rope_vit": ("of neighbouring pairs, over columns and rows of patches", 100.0),
    "mixed": ("of neighbouring pairs, by learned frequencies times columns and rows of patches counted from zero", 10.0),
}


def affects_function(name: str) -> bool:
    """Return whether a field may change what a model with given weights computes: all fields that are not in `NEUTRAL`."""
    return name not in NEUTRAL and name.partition(".")[0] not in NEUTRAL
