"""Parameter count, FLOPs and memory estimate of a model, as exact integers computed from `vit_spec.rows`.

FLOPs cover matrix products, which grow with width^2 or tokens^2.  They leave out elementwise operations (norms, softmax,
activations, biases, positions, residuals): each is a small multiple of tokens * width, together about 1 % of the total.
"""

from dataclasses import dataclass

from vit_spec.config import ViTConfig, check_config, coerce_field
from vit_spec.errors import InputError, nearest
from vit_spec.params import Row, rows
from vit_spec.parts import Activation

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Arrays of hidden units that a training step in PyTorch stores for the backward pass of an activation function and of the
# linear layer after it, by `mlp.activation`.
ACTIVATION_ARRAYS: dict[Activation, int] = {
    "none": 1,
    "relu": 1,
    "gelu": 2,
    "gelu_tanh": 2,
    "silu": 2,
    "mish": 2,
    "quick_gelu": 3,
    "swiglu": 4,
}

ImageSize = int | tuple[int, int]


@dataclass(frozen=True)
class Memory:
    """A memory estimate, in bytes.

    Attributes:
        weights: the parameters in the given dtype.  Inference needs these and the activations of one layer.
        training_state: parameters, gradients and Adam's two moments in float32, whatever dtype the model computes in.
        activations: activations of one image that the forward pass stores for the backward pass.
    """

    weights: int
    training_state: int
    activations: int


def count(config: ViTConfig) -> int:
    """Return the number of parameters."""
    return sum(row.size for row in rows(config).values())


def flops(config: ViTConfig, image_size: ImageSize | None = None) -> int:
    """Return the floating-point operations of the forward pass of one image; a multiply-add counts as two.

    A matrix costs 2 * its number of entries * the number of tokens it multiplies.  Attention between m queries and n keys
    costs 4 * m * n * heads * head_dim, for the two products q k^T and weights v.  A training step costs three times as
    much: the backward pass has two products for each one of the forward pass.  The resampling of a learned position table
    to another grid is left out: it is computed once for a batch, not for each image.

    Kaplan et al., "Scaling Laws for Neural Language Models" (arXiv 2001.08361), table 1.  timm's tables give
    GMACs: half of this number, in billions.

    Args:
        config: the model.
        image_size: (height, width) in pixels, or the side of a square; None means the config's image size.

    Raises:
        InputError: the image size is no integer and no pair of integers, or one that `config.grid_of` refuses.
    """
    return _count_flops(config, *_count_patches_and_tokens(config, image_size))


def training_flops(config: ViTConfig) -> int:
    """Return the floating-point operations of the forward pass of one image in a training step; see `flops`.

    With `regularisation.patch_drop`, all layers after the patch embedding have fewer tokens.
    """
    patches, _ = _count_patches_and_tokens(config, None)
    return _count_flops(config, patches, count_training_tokens(config))


def count_training_tokens(config: ViTConfig) -> int:
    """Return the number of tokens of an image in the blocks in a training step, after patch dropout."""
    patches, _ = _count_patches_and_tokens(config, None)
    return config.num_prefix + max(1, int(patches * (1 - config.regularisation.patch_drop)))


def _count_flops(config: ViTConfig, patches: int, tokens: int) -> int:
    """Return the FLOPs of a forward pass that embeds `patches` patches and has `tokens` tokens in its blocks."""
    inner = config.num_heads * config.head_dim

    matrices = sum(
        2 * row.size * _count_multiplied_tokens(row, config, patches, tokens)
        for row in rows(config).values()
        if row.decays  # the matrices
    )
    attention = config.depth * 4 * tokens * tokens * inner
    if config.head.pool == "attention":
        attention += 4 * _count_pooled_tokens(config, tokens) * config.pool_heads * config.pool_head_dim
    return matrices + attention


def memory(
    config: ViTConfig,
    image_size: ImageSize | None = None,
    dtype: str = "float32",
    fused_attention: bool = True,
) -> Memory:
    """Return a memory estimate: bytes of weights, of training state and of the activations of one image.

    For each token, a block stores for the backward pass (entries; inner = heads * head_dim)::

        4 width     inputs and outputs of the two norms (2 width for one norm, in parallel blocks)
        4 inner     queries, keys, values and the outputs of the heads, and more with options: see `_attention_arrays`
        2 mlp_dim   input and output of the activation (another number for some, see `ACTIVATION_ARRAYS`; 1 more with
                    `mlp.norm`)
        2 width     inputs of layer scale (width for one layer scale, 0 without)

    For mlp_dim = 4 width in 16 bits, this is the 32 bytes * width of "Reducing Activation Recomputation in Large
    Transformer Models" (arXiv 2205.05198, section 4.1) without its dropout masks.  Attention that is not fused also stores
    its weights, heads * tokens^2.  Before the blocks, the pixels of the patches and the inputs of norms are stored; after
    them, the input of the final norm, its output unless a mean pools it, and the keys and values of attention pooling.

    In float32, not compiled, the PyTorch twin stores this within 2 %, and timm's S/16 and B/16 within 0.3 %.  In the JAX
    twin, any activation stores its input and its output, and attention that is not fused also the outputs of the heads
    before the softmax divides.  Rematerialization and compilers store less; casts, dropout masks and the fragmentation of
    the allocator take more, and on a CPU PyTorch stores one more array for each RMS norm.  Arrays that all images share,
    such as rotary tables, are left out.

    Args:
        config: the model.
        image_size: (height, width) in pixels, or the side of a square; None means the config's image size.
        dtype: dtype of weights and activations: float64, float32, bfloat16 or float16.
        fused_attention: whether the backward pass recomputes attention weights, as flash attention does.  With relative
            positions, both twins store them.

    Raises:
        InputError: the dtype is unknown; or the image size is no integer and no pair of integers, or one that
            `config.grid_of` refuses.
    """
    if dtype not in ITEMSIZE:
        raise InputError(f"dtype is {dtype!r}: give one of {', '.join(ITEMSIZE)}{nearest(dtype, ITEMSIZE)}")
    patches, tokens = _count_patches_and_tokens(config, image_size)
    width, inner, mlp_dim = config.width, config.num_heads * config.head_dim, config.mlp_dim
    is_fused = fused_attention and config.positions.relative == "none"

    hidden = ACTIVATION_ARRAYS[config.mlp.activation] + config.mlp.norm
    norms = 2 if config.norms.order == "parallel" else 4
    scales = sum(name in rows(config) for name in ("blocks.ls1.gamma", "blocks.ls2.gamma"))
    block = tokens * ((norms + scales) * width + _attention_arrays(config, is_fused) * inner + hidden * mlp_dim)
    if not is_fused:
        block += config.num_heads * tokens * tokens

    ph, pw = config.patch_size
    outside = patches * (config.in_channels * ph * pw + config.norms.after_patches * width)
    is_kept = config.head.pool in ("token", "attention", "none")  # no mean, of which the backward pass needs nothing
    outside += tokens * (config.norms.before_blocks + config.norms.after_blocks + is_kept) * width
    if config.head.pool == "attention":
        outside += _count_pooled_tokens(config, tokens) * 2 * config.pool_heads * config.pool_head_dim
    if config.head.pool == "none":
        outside += tokens * (config.norms.after_pool * width + (config.head.hidden or 0))
    activations = config.depth * block + outside

    parameters = count(config)
    return Memory(
        weights=parameters * ITEMSIZE[dtype],
        training_state=4 * parameters * ITEMSIZE["float32"],
        activations=activations * ITEMSIZE[dtype],
    )


def _attention_arrays(config: ViTConfig, is_fused: bool) -> int:
    """Return how many arrays of tokens * inner entries the attention of a block stores.

    Queries, keys and values are slices of one array, the output of a linear layer.  Fused attention stores them as they
    are: the whole array, and beside it the queries and keys that a norm or a rotation returns.  Other attention stores
    contiguous copies, and the array only if a norm or a learned rotation reads it.
    """
    options, rotary = config.attention, config.positions.rotary
    if is_fused:
        arrays = 5 if options.qk_norm or rotary != "none" else 3
    else:
        arrays = 6 if options.qk_norm or rotary == "mixed" else 3
    if rotary == "mixed":  # the gradient of the frequencies needs what they rotate: pairs, and what a norm returned
        arrays += 4 if options.qk_norm else 2
    # The outputs of the heads: fused attention stores its own, a norm and a projection what they read.
    return arrays + (is_fused or options.proj or options.out_norm) + (options.out_norm and options.proj)


def _count_patches_and_tokens(config: ViTConfig, image_size: ImageSize | None) -> tuple[int, int]:
    """Return the number of patches and the number of tokens of an image."""
    check_config(config)
    size = config.image_size if image_size is None else coerce_field("image_size", image_size)
    rows, columns = config.grid_of(*size)
    return rows * columns, config.num_prefix + rows * columns


def _count_pooled_tokens(config: ViTConfig, tokens: int) -> int:
    """Return the number of tokens over which the one query of attention pooling runs."""
    return tokens if config.head.pool_prefix else tokens - config.num_prefix


def _count_multiplied_tokens(row: Row, config: ViTConfig, patches: int, tokens: int) -> int:
    """Return the number of tokens that a matrix multiplies."""
    if "rel_pos." in row.name:  # once for each offset, whatever the number of images
        rows, columns = config.grid
        return (2 * rows - 1) * (2 * columns - 1)
    if row.name.startswith("blocks."):
        return tokens
    if row.name == "patch_embed.proj.weight":
        return patches
    if row.name == "attn_pool.kv.weight":
        return _count_pooled_tokens(config, tokens)
    if row.name == "pre_logits.weight" and config.tokens.distillation:  # for the class token and the distillation token
        return 2
    return tokens if config.head.pool == "none" else 1  # other layers after pooling multiply one token
