"""Memory, FLOPs and communication of a training step per device, computed from the config, the recipe and the mesh.

The estimate models the JAX twin's step as XLA compiles it for a mesh (`train.jax.sharding`); the tests compare it with the
compiled program.  Nothing is allocated and no framework is imported.
"""

from collections import Counter
from typing import Literal

from train.jax.optimizer_state import update_transfers
from train.mesh import BATCH_AXES, AxisSizes, Parameter, is_shared_by_heads
from train.optimizer_state import distribution, is_orthogonalized, matrix_size
from train.recipes import Recipe
from train.step_cost import MemoryEstimate, Step, state_memory
from vit_spec import ViTConfig

Compiler = Literal["gpu", "cpu"]


def estimate_memory(
    config: ViTConfig, recipe: Recipe, sizes: AxisSizes, *, compiler: Compiler = "gpu", param_bytes: int = 4
) -> MemoryEstimate:
    """Return the memory, FLOPs and communication of a training step.

    sizes: the lengths of the mesh axes.
    compiler: the kind of device that XLA compiles for.  On CPU it all-reduces the gradients of matrices and slices them,
        where on GPU it reduce-scatters them; and along `tensor` it sums both outputs of a parallel block, not their sum.
    param_bytes: bytes of an entry of a parameter; 8 if JAX computes in float64.

    Raises:
        InputError: the batch is not divisible by the mesh.
    """
    s = Step.of(config, recipe, sizes, param_bytes)
    return s.estimate(_memory(s), _transfers(s, compiler), _recomputed_outputs(s))


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory(s: Step) -> dict[str, int]:
    state = state_memory(s)
    matrices = {p: p.row.size // s.shards(p) for p in s.parameters if p.row.decays}
    gradients = state["parameters"] + (s.compute_bytes - s.param_bytes) * sum(matrices.values())
    targets = 4 if s.recipe.task in (None, "classes") else 4 * s.config.num_classes
    backward = {
        "half-precision matrices": s.compute_bytes * sum(matrices.values()) if s.compute_bytes < s.param_bytes else 0,
        "gathered matrices": _gathered_bytes(s, [parameter for parameter in matrices if s.shards(parameter, "fsdp") > 1]),
        "activations": s.images * _activation_bytes(s, s.recipe.remat),
        "attention weights": s.images * s.config.depth * _attention_bytes(s) if s.recipe.remat == "none" else 0,
        "peak activations of one block": s.images * _block_peak_bytes(s),
    }
    return {
        **state,
        "batch": s.recipe.accumulate * s.images * (s.image_bytes + targets),
        **backward,
        "gradients": gradients + (state["parameters"] if s.recipe.accumulate > 1 else 0),
        # The backward pass has freed its arrays before the update.
        "update, beyond the backward pass": max(0, _update_bytes(s) - sum(backward.values())),
    }


def _update_bytes(s: Step) -> int:
    """Return the bytes of the temporary arrays of an update.

    XLA fuses other updates into a pass over each parameter.  Muon has the matrices as they are distributed over the
    devices, before and after the orthogonalization, and then the update of each parameter that they are gathered for.
    """
    if s.recipe.optimizer.name != "muon":
        return 0
    chosen = [parameter for parameter in s.parameters if is_orthogonalized(parameter.row)]
    distributed = sum(distribution(p.row, s.config, s.sizes)[1] * matrix_size(p.row, s.config) for p in chosen)
    return s.param_bytes * (2 * distributed + sum(p.row.size // s.shards(p) for p in chosen))


def _gathered_bytes(s: Step, matrices: list[Parameter]) -> int:
    """Return the bytes of the matrices of one block and of those outside of the blocks, gathered along `fsdp`."""
    each = (
        parameter.row.size // (s.config.depth if parameter.is_stacked else 1) // s.shards(parameter, "tensor")
        for parameter in matrices
    )
    return s.compute_bytes * sum(each)


def _activation_bytes(s: Step, remat: str) -> int:
    """Return the bytes that the forward pass of an image keeps for the backward pass, except attention weights."""
    c, (ph, pw) = s.config, s.config.patch_size
    patches = s.patches * ph * pw * c.in_channels * s.compute_bytes
    norm = s.tokens * c.width * s.compute_bytes if c.norms.after_blocks else 0
    return patches + c.depth * _block_bytes(s, remat) + norm


def _block_bytes(s: Step, remat: str) -> int:
    """Return the bytes that a block keeps for the backward pass of an image, except attention weights.

    These are the residuals of JAX's linearization: norms and activation functions keep their inputs, matrix products
    their operands, and a softmax that divides last keeps its numerator.  With remat "dots" the outputs of matrix products
    are kept, with "full" the input of the block.
    """
    c, t, tensor = s.config, s.tokens, s.sizes["tensor"]
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    names, gates = {parameter.row.name for parameter in s.parameters}, 2 if c.mlp.is_gated else 1
    scales = sum(name in names for name in ("blocks.ls1.gamma", "blocks.ls2.gamma"))
    if remat == "full":
        return t * c.width * s.compute_bytes
    if remat == "dots":
        return t * ((2 + bool(scales)) * c.width + 3 * inner + gates * ff) * s.compute_bytes
    drop, norms = c.regularisation, 2 if c.norms.order == "parallel" else 4
    heads = (6 if c.attention.qk_norm else 4) + c.attention.out_norm
    compute = (norms + scales) * c.width + heads * inner + (gates + 1 + c.mlp.norm) * ff
    masks = (2 * c.width if drop.drop_path else 0) + (ff + c.width if drop.mlp_drop else 0)
    return t * (inner * s.wide_bytes + compute * s.compute_bytes + masks)


def _block_peak_bytes(s: Step) -> int:
    """Return the peak bytes of the backward pass of one block for an image: its residuals and its gradients.

    The residuals are recomputed, or sliced from an array of all blocks.  Norms and activation functions count with all
    their intermediates, since a compiler may keep them instead of computing them again.
    """
    c, tensor = s.config, s.sizes["tensor"]
    gates = 2 if c.mlp.is_gated else 1
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    norm_width = 2 * (c.width + (inner if c.attention.qk_norm else 0))
    intermediates = s.tokens * (3 * norm_width * s.wide_bytes + (gates + 1) * ff * s.compute_bytes)
    gradients = s.tokens * (4 * c.width + 2 * gates * ff) * s.compute_bytes
    scores = c.num_heads // tensor * s.tokens**2 * s.wide_bytes
    return _block_bytes(s, "none") + intermediates + _attention_bytes(s) + gradients + scores


def _attention_bytes(s: Step) -> int:
    """Return the bytes of the attention weights of an image in a block."""
    dropped = bool(s.config.regularisation.attn_drop)  # then the weights before and after dropout are kept, and its mask
    return s.config.num_heads // s.sizes["tensor"] * s.tokens**2 * (s.wide_bytes * (1 + dropped) + dropped)


# Communication --------------------------------------------------------------------------------------------------------


def _transfers(s: Step, compiler: Compiler) -> dict[tuple[str, str], int]:
    transfers: Counter[tuple[str, str]] = Counter()
    for parameter in s.parameters:
        transfers.update(_parameter_transfers(s, parameter, compiler))
        update = update_transfers(s.recipe.optimizer.name, parameter, s.config, s.sizes)
        transfers.update({key: s.param_bytes * size for key, size in update.items()})
    if s.sizes["tensor"] > 1:
        each = s.recipe.accumulate * s.images * s.compute_bytes
        transfers["all-reduce", "tensor"] += each * _tensor_all_reduce_size(s, compiler)
        transfers["all-gather", "tensor"] += each * _tensor_all_gather_size(s)
    if s.recipe.augment.mixes and s.joined(BATCH_AXES):
        image = s.image_bytes + s.param_bytes * s.config.num_classes
        transfers["collective-permute", s.joined(BATCH_AXES)] += s.recipe.augment.repeats * image
    return transfers


def _parameter_transfers(s: Step, parameter: Parameter, compiler: Compiler) -> Counter[tuple[str, str]]:
    """Return the transfers of a parameter: its all-gather along `fsdp` and the sum of its gradient over the batch axes.

    A matrix of a block is gathered for the forward and for the backward pass of each part of a batch, and its gradient is
    reduce-scattered.  A matrix outside of the blocks is gathered once per step, and its gradient is reduce-scattered on GPU
    and all-reduced on CPU.  On a mesh with `data` too, the GPU compiler all-reduces that of the patch embedding, and
    sometimes that of the head; this is about a thousandth of the bytes, and not in the estimate.
    """
    transfers: Counter[tuple[str, str]] = Counter()
    kind, leaf = parameter.row.name.split(".")[-2:-1], parameter.row.name.split(".")[-1]
    is_norm = bool(kind) and "norm" in kind[0]
    is_wide = is_norm or leaf in ("bias", "gamma")  # their gradients are sums in float32
    size = parameter.row.size // s.shards(parameter, "tensor") * (s.wide_bytes if is_wide else s.compute_bytes)
    shards, repeats = s.shards(parameter, "fsdp"), s.recipe.accumulate
    if shards > 1:
        transfers["all-gather", "fsdp"] += 2 * repeats * size if parameter.is_stacked else size
    size *= repeats * _gradient_sums(s.config, parameter)
    if shards > 1 and (parameter.is_stacked or compiler == "gpu"):
        transfers["reduce-scatter" if compiler == "gpu" else "all-reduce", "fsdp"] += size
        transfers["all-reduce", s.joined(["data"])] += size // shards
    else:
        transfers["all-reduce", s.joined(BATCH_AXES)] += size
        if is_shared_by_heads(parameter.row):
            transfers["all-reduce", s.joined(["tensor"])] += size
    return transfers


def _gradient_sums(config: ViTConfig, parameter: Parameter) -> int:
    """Return how often a gradient is summed: twice for a shared norm, and for a bias of v stacked with zeros for k."""
    shared = config.norms.shared_norm and parameter.row.name.startswith("blocks.norm1.")
    return 2 if shared or parameter.row.name == "blocks.attn.v_bias" else 1


def _tensor_all_reduce_size(s: Step, compiler: Compiler) -> int:
    """Return the number of entries per image that are all-reduced along `tensor`.

    They are the outputs of the attention projection and of the MLP in the forward pass, and the gradients of the inputs of
    attention and MLP in the backward pass.  With remat "full", outputs that the backward pass reads are summed again.
    """
    c = s.config
    attention, mlp = _recomputed_outputs(s)
    has_one_output = compiler == "gpu" and c.norms.order == "parallel"  # the sum of both
    attention_outputs = (1 + (attention and s.recipe.remat == "full")) * (c.attention.proj and not has_one_output)
    mlp_outputs = 1 + (mlp and s.recipe.remat == "full")
    pool = (s.tokens - c.num_prefix) + 4 if c.head.pool == "attention" else 0
    return (c.depth * (2 + attention_outputs + mlp_outputs) * s.tokens + pool) * c.width


def _tensor_all_gather_size(s: Step) -> int:
    """Return the number of entries per image that are gathered along `tensor`.

    They are the outputs of the heads if no projection follows, or the values if they are added to the output of attention.
    """
    c = s.config
    apart = not c.attention.proj or c.attention.value_skip
    again = s.recipe.remat != "none" and _recomputed_outputs(s)[0]
    return apart * c.depth * (1 + again) * s.tokens * c.width


def _recomputed_outputs(s: Step) -> tuple[bool, bool]:
    """Return whether the backward pass of a block reads the output of attention, and that of the MLP.

    Layer scale reads the output that it scales, for the gradient of its gamma, and a norm what it normalizes.  A parallel
    block scales the sum of both outputs.  A sum needs neither of its terms.
    """
    names, order = {parameter.row.name for parameter in s.parameters}, s.config.norms.order
    scaled = "blocks.ls1.gamma" in names
    if order == "parallel":
        return scaled, scaled
    return True, "blocks.ls2.gamma" in names or order in ("post", "res_post")
