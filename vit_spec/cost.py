"""What a model costs, read off its rows: parameters, FLOPs and bytes, as exact integers and without an array.

Counts cover what grows with the width squared or the tokens squared.  Left out are the elementwise parts
(norms, softmax, activations, biases, positions, residuals), each a small multiple of tokens * width and about
1 % of the whole.
"""

from dataclasses import dataclass

from vit_spec.config import ViTConfig
from vit_spec.errors import InputError, nearest
from vit_spec.params import Row, rows

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

ImageSize = int | tuple[int, int]


@dataclass(frozen=True)
class Memory:
    """Bytes.

    weights: the parameters in their dtype: all that inference has to hold, but for one layer's activations.
    training_state: parameters, gradient and Adam's two moments in float32, whatever the model computes in.
    activations: what the backward pass of one image needs from its forward pass; an estimate.
    """

    weights: int
    training_state: int
    activations: int


def count(config: ViTConfig) -> int:
    """Return the number of parameters."""
    return sum(row.size for row in rows(config).values())


def flops(config: ViTConfig, image_size: ImageSize | None = None) -> int:
    """Return the floating point operations of one image's forward pass; a multiply-add is two.

    A matrix costs 2 * its entries * the tokens it meets; attention between m queries and n keys costs
    4 * m * n * heads * head_dim: two products, q k^T and what it weighs of v.  A training step costs three
    times as much: the backward pass has two products for each one of the forward pass.

    Kaplan et al., "Scaling Laws for Neural Language Models" (arXiv 2001.08361), table 1.  timm's tables give
    GMACs: half of this, in billions.

    Args:
        config: the model.
        image_size: (height, width) in pixels or the side of a square; None is the config's own.

    Raises:
        InputError: the image size is no multiple of the patch.
    """
    patches, tokens = _lengths(config, image_size)
    inner = config.num_heads * config.head_dim

    matrices = sum(2 * row.size * _meets(row, config, patches, tokens) for row in rows(config).values() if _is_matrix(row))
    attention = config.depth * 4 * tokens * tokens * inner
    if config.head.pool == "attention":
        attention += 4 * patches * inner  # a single query over the patches
    return matrices + attention


def memory(
    config: ViTConfig,
    image_size: ImageSize | None = None,
    dtype: str = "float32",
    fused_attention: bool = True,
) -> Memory:
    """Return the bytes of weights, of training state and of one image's activations.

    Of each token, a block keeps for its backward pass (entries; inner = heads * head_dim):

        4 width     what enters and what leaves each of the two norms
        4 inner     queries, keys, values, and the heads' results
        2 mlp_dim   what enters the activation and what leaves it (4 when it gates, 1 when there is none)
        2 width     what layer scale multiplies (0 without)

    which for mlp_dim = 4 width is the 32 bytes * width in 16 bits of "Reducing Activation Recomputation in
    Large Transformer Models" (arXiv 2205.05198, section 4.1) less its dropout masks.  Attention that is not
    fused keeps its weights too, heads * tokens^2.  Ahead of the blocks the patches' pixels are kept, behind
    them what enters and leaves the final norm.  What PyTorch saves of timm's S/16 and B/16, in float32 and not
    compiled, is this within 0.3 %.  Rematerialisation and compilers keep less; casts, dropout masks and the
    allocator's losses keep more.

    Args:
        config: the model.
        image_size: (height, width) in pixels or the side of a square; None is the config's own.
        dtype: what weights and activations are held in: float64, float32, bfloat16 or float16.
        fused_attention: whether the backward pass recomputes attention weights, as flash attention does.

    Raises:
        InputError: an unknown dtype, or an image size that is no multiple of the patch.
    """
    if dtype not in BYTES:
        raise InputError(f"dtype is {dtype!r}: give one of {', '.join(BYTES)}{nearest(dtype, BYTES)}")
    patches, tokens = _lengths(config, image_size)
    width, inner, mlp_dim = config.width, config.num_heads * config.head_dim, config.mlp_dim

    hidden = {"swiglu": 4, "none": 1}.get(config.mlp.activation, 2)
    block = tokens * (4 * width + 4 * inner + hidden * mlp_dim)
    if config.norms.layer_scale is not None:
        block += tokens * 2 * width
    if not fused_attention:
        block += config.num_heads * tokens * tokens

    ph, pw = config.patch_size
    kept = patches * config.in_channels * ph * pw + config.depth * block
    if config.norms.after_blocks:
        kept += tokens * 2 * width

    parameters = count(config)
    return Memory(
        weights=parameters * BYTES[dtype],
        training_state=4 * parameters * BYTES["float32"],
        activations=kept * BYTES[dtype],
    )


def _lengths(config: ViTConfig, image_size: ImageSize | None) -> tuple[int, int]:
    """Return the numbers of patches and of tokens."""
    if image_size is None:
        image_size = config.image_size
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    rows, columns = config.grid_of(height, width)
    return rows * columns, config.num_prefix + rows * columns


def _is_matrix(row: Row) -> bool:
    """Whether a row multiplies tokens: a weight of two axes or more beside `block`; a norm's has one."""
    return row.name.endswith(".weight") and len(set(row.axes) - {"block"}) > 1


def _meets(row: Row, config: ViTConfig, patches: int, tokens: int) -> int:
    """Return how many tokens a matrix multiplies."""
    if row.name.startswith("blocks."):
        return tokens
    if row.name in ("patch_embed.proj.weight", "attn_pool.kv.weight"):
        return patches
    return tokens if config.head.pool == "none" else 1  # what follows pooling meets one
