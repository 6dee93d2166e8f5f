"""Memory, FLOPs and communication of a training step per device, computed from the config, the recipe and the mesh.

The estimate models the PyTorch twin's step on GPUs: eager, with fused attention, by DDP, FSDP2 and tensor parallelism as
`train.torch.sharding` uses them.  The tests compare it with the tensors that a forward pass leaves in memory and with the
collectives that run.
Nothing is allocated and no framework is imported.
"""

import math
from collections import Counter
from collections.abc import Sequence

from train.mesh import BATCH_AXES, AxisSizes, Parameter, is_shared_by_heads, sharded_axes
from train.optimizer_state import axis_lengths, distribution, factored_axes, is_orthogonalized, matrix_size, muon_transfers
from train.recipes import Recipe
from train.step_cost import MemoryEstimate, Step, state_memory
from train.torch.tensor_groups import group_length, largest_group
from train.torch.tensor_support import check_tensor_support
from vit_spec import Row, ViTConfig
from vit_spec.cost import ACTIVATION_ARRAYS

Transfers = Counter[tuple[str, str]]


def estimate_memory(config: ViTConfig, recipe: Recipe, sizes: AxisSizes, *, param_bytes: int = 4) -> MemoryEstimate:
    """Return the memory, FLOPs and communication of a training step.

    sizes: the lengths of the mesh axes.
    param_bytes: bytes of an entry of a parameter; 8 if PyTorch computes in float64.

    Raises:
        InputError: the batch is not divisible by the mesh, or the mesh has `tensor` and the run cannot be divided.
    """
    if sizes["tensor"] > 1:
        check_tensor_support(config, recipe)
    s = Step.of(config, recipe, sizes, param_bytes)
    return s.estimate(_memory(s), _transfers(s), _recomputed_outputs(s))


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory(s: Step) -> dict[str, int]:
    state = state_memory(s)
    gathered = [parameter for parameter in s.parameters if s.shards(parameter, "fsdp") > 1]
    of_blocks, others = (
        sum(_gathered_size(s, p) for p in gathered if p.is_stacked is stacked) for stacked in (True, False)
    )
    matrices = sum(p.row.size // s.shards(p) for p in s.parameters if p.row.decays and p not in gathered)
    is_recomputed = s.recipe.remat != "none"
    backward = {
        "normalized images": s.images * s.image_bytes * s.param_bytes,
        # A copy of a matrix lives from the forward to the backward pass, unless that is recomputed block by block.
        "half-precision matrices": s.compute_bytes * matrices // (s.config.depth if is_recomputed else 1)
        if s.compute_bytes < s.param_bytes
        else 0,
        # Those outside of the blocks, the block that is computed and the next one, and the buffer of the all-gather.
        "gathered matrices": s.compute_bytes * (others + 3 * of_blocks // s.config.depth),
        "activations": s.images * _activation_bytes(s),
        "peak activations of one block": s.images * _block_peak_bytes(s),
        "gradients before they are sharded": s.param_bytes
        * (of_blocks + others if s.recipe.accumulate > 1 else 2 * (of_blocks // s.config.depth) + others),
    }
    return {
        **state,
        "batch": s.recipe.accumulate * s.images * (s.image_bytes + _target_bytes(s)) * (1 + _is_mixed(s)),
        "gradients": state["parameters"],
        **backward,
        # The backward pass has freed its tensors before the update.
        "update, beyond the backward pass": max(0, update_memory(s) - sum(backward.values())),
    }


def _gathered_size(s: Step, parameter: Parameter) -> int:
    """Return the entries of a parameter, of all blocks, on a device after the all-gather along `fsdp`."""
    return parameter.row.size // s.shards(parameter, "tensor")


def _is_mixed(s: Step) -> bool:
    return bool(s.recipe.augment.mixes)


def _target_bytes(s: Step) -> int:
    """Return the bytes of the targets of an image: a class number is int64, and probabilities are in float32."""
    is_class = s.recipe.task in (None, "classes") and not (_is_mixed(s) or s.recipe.label_smoothing)
    return 8 if is_class else s.param_bytes * s.config.num_classes


def _activation_bytes(s: Step) -> int:
    """Return the bytes that the forward pass of an image keeps for the backward pass."""
    c, (ph, pw) = s.config, s.config.patch_size
    patches = s.patches * ph * pw * c.in_channels * s.compute_bytes
    norm = s.tokens * c.width * s.wide_bytes if c.norms.after_blocks else 0
    return patches + c.depth * _block_bytes(s, s.recipe.remat) + norm


def _block_bytes(s: Step, remat: str) -> int:
    """Return the bytes that a block keeps for the backward pass of an image.

    These are the tensors that autograd saves: norms save their input in float32, linear layers theirs, attention its
    queries, keys, values and output.  With remat "dots" the outputs of linear layers are kept, with "full" the input of
    the block.
    """
    c, t, tensor = s.config, s.tokens, s.sizes["tensor"]
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    gates = 2 if c.mlp.is_gated else 1
    if remat == "full":
        return t * c.width * s.compute_bytes
    if remat == "dots":
        return t * ((2 + c.attention.proj) * c.width + 3 * inner + gates * ff) * s.compute_bytes
    narrow, wide = s.compute_bytes, s.wide_bytes
    widened = wide if narrow < wide else 0  # a copy in float32, which norms and rotary positions compute in
    statistics = 4 if c.norms.kind == "rms" else 8  # of a norm, for each of its vectors
    is_parallel, scales = c.norms.order == "parallel", c.norms.layer_scale is not None
    norms = 1 if is_parallel else 2
    kept = norms * (c.width * (narrow + (widened or narrow)) + statistics)  # input and output
    kept += scales * c.width * narrow * (2 if c.norms.has_second_scale else 1)
    kept += 4 * inner * narrow  # queries, keys, values and output
    if c.attention.qk_norm:
        kept += 2 * (inner * (narrow + widened) + c.num_heads // tensor * statistics)
    if c.positions.rotary != "none":
        kept += 2 * inner * (narrow + (widened + wide if c.positions.rotary == "mixed" else 0))
    if c.attention.out_norm:
        kept += inner * (narrow + widened) + statistics
    kept += ACTIVATION_ARRAYS[c.mlp.activation] * ff * narrow
    kept += (ff + c.width) * bool(c.regularisation.mlp_drop)  # masks
    if c.mlp.norm:
        kept += ff * wide + statistics
    return t * kept + _attention_bytes(s) + norms * bool(c.regularisation.drop_path)


def _attention_bytes(s: Step) -> int:
    """Return the bytes that attention keeps of an image in a block beside its inputs and output.

    Fused attention keeps the logarithms of the sums of the softmax, the other the softmax, what dropout leaves of it, and
    the mask.
    """
    c = s.config
    rows = c.num_heads // s.sizes["tensor"] * s.tokens
    is_fused = not (s.recipe.rng == "shared" and c.regularisation.attn_drop)
    return rows * 4 if is_fused else rows * s.tokens * (s.wide_bytes + s.compute_bytes + 1)


def _block_peak_bytes(s: Step) -> int:
    """Return the peak bytes of the backward pass of one block for an image: its residuals, if recomputed, and gradients."""
    c, tensor = s.config, s.sizes["tensor"]
    gates = 2 if c.mlp.is_gated else 1
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    of_mlp, of_attention = 2 * c.width + (gates + 1) * ff, 2 * c.width + 7 * inner
    recomputed = 0 if s.recipe.remat == "none" else _block_bytes(s, "none")
    return recomputed + s.tokens * max(of_mlp, of_attention) * s.compute_bytes


# Memory of the update --------------------------------------------------------------------------------------------------


def update_memory(s: Step) -> int:
    """Return the peak bytes of the temporary tensors of an update of the parameters, and of their EMA.

    They are those of one group of parameters (`train.torch.tensor_groups`), except for what an optimizer needs of all
    parameters, or of a row, at once.
    """
    return s.param_bytes * max(_optimizer_size(s), largest_group(_tensor_sizes(s, s.parameters)) if s.recipe.ema else 0)


def _tensor_sizes(s: Step, chosen: Sequence[Parameter]) -> list[int]:
    """Return the entries on a device of each tensor of some parameters: one for each block."""
    counts = [s.config.depth if parameter.is_stacked else 1 for parameter in chosen]
    sizes = [p.row.size // s.shards(p) // count for p, count in zip(chosen, counts, strict=True)]
    return [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]


def _optimizer_size(s: Step) -> int:
    """Return the peak entries of the temporary tensors of an optimizer.

    AdamW and SGD compute in the moments and gradients.  LAMB and Lion have a copy of the parameters of a group, and
    Adafactor has one or two copies of a parameter, and sums of squares for the rows and columns of all.
    """
    name, sizes = s.recipe.optimizer.name, _tensor_sizes(s, s.parameters)
    if name == "muon":
        others = [parameter for parameter in s.parameters if not is_orthogonalized(parameter.row)]
        matrices = [_muon_size(s, parameter.row) for parameter in s.parameters if is_orthogonalized(parameter.row)]
        return max(largest_group(_tensor_sizes(s, others)), *matrices)
    if name == "adafactor":
        sums = sum(_sums_of_squares(s, parameter) for parameter in s.parameters)
        return sums + max(sums, 2 * max(sizes))  # the all-reduce of the sums has a copy of them
    return {"adamw": 0, "sgd": 0, "lamb": largest_group(sizes), "lion": largest_group(sizes)}[name]


def _sums_of_squares(s: Step, parameter: Parameter) -> int:
    """Return the entries of the sums of squares that Adafactor computes of a parameter, of all blocks."""
    shape = axis_lengths(parameter, s.config)
    return sum(math.prod(shape) // shape[axis] for axis in factored_axes(parameter, s.config))


def _muon_size(s: Step, row: Row) -> int:
    """Return the peak entries of the temporary tensors of Muon for a row: its matrices, and a Newton-Schulz iteration.

    The iteration has for a matrix at most a copy of it and three squares of its shorter side, or two copies and one square.
    An all-to-all or an all-gather has at most four copies of the entries on this device.
    """
    (axes, count), size = distribution(row, s.config, s.sizes), matrix_size(row, s.config)
    used = sharded_axes(row, s.config, s.sizes).values()
    whole = count * size * math.prod(s.sizes[name] for name in axes if name not in used)
    square = min(s.config.width, size // s.config.width) ** 2
    iteration = min(count, group_length(size)) * max(size + 3 * square, 2 * size + square)
    return max(whole + iteration, 4 * whole if axes else 0)


# Communication --------------------------------------------------------------------------------------------------------


def _transfers(s: Step) -> dict[tuple[str, str], int]:
    transfers: Transfers = Counter()
    for parameter in s.parameters:
        transfers.update(_parameter_transfers(s, parameter))
        transfers.update(_update_transfers(s, parameter))
    if s.sizes["tensor"] > 1:
        transfers["all-reduce", "tensor"] += s.recipe.accumulate * _activation_transfers(s)
    for axis in BATCH_AXES:  # the means of loss and metric
        transfers["all-reduce", s.joined([axis])] += 2 * s.param_bytes
    if _is_mixed(s):
        rows = min(s.recipe.augment.repeats, s.recipe.accumulate * s.images)
        for axis in reversed(BATCH_AXES):
            rows *= s.sizes[axis]
            transfers["all-gather", s.joined([axis])] += rows * (s.image_bytes + _target_bytes(s))
    return transfers


def _parameter_transfers(s: Step, parameter: Parameter) -> Transfers:
    """Return the transfers of a parameter: its all-gather along `fsdp`, and the sum of its gradient over the processes.

    FSDP2 gathers a matrix of a block for the forward and for the backward pass of each part of a batch, and those outside
    of the blocks for both together.  Gradients are summed after the last part.
    """
    transfers: Transfers = Counter()
    size, shards = _gathered_size(s, parameter), s.shards(parameter, "fsdp")
    gradient = size * s.param_bytes
    if shards > 1:
        passes = s.recipe.accumulate * (2 if parameter.is_stacked else 1)
        transfers["all-gather", "fsdp"] += passes * size * s.compute_bytes
        transfers["reduce-scatter", "fsdp"] += gradient
        transfers["all-reduce", s.joined(["data"])] += gradient // shards
    else:
        for axis in BATCH_AXES:
            transfers["all-reduce", s.joined([axis])] += gradient
    if is_shared_by_heads(parameter.row):
        transfers["all-reduce", s.joined(["tensor"])] += gradient
    return transfers


def _update_transfers(s: Step, parameter: Parameter) -> Transfers:
    """Return the transfers of an update: norms of sharded parameters, Muon's matrices, and Adafactor's factored moments."""
    name, shape = s.recipe.optimizer.name, axis_lengths(parameter, s.config)
    transfers: Transfers = Counter()
    if name == "muon":
        transfers.update(
            {key: s.param_bytes * size for key, size in muon_transfers(parameter.row, s.config, s.sizes).items()}
        )
    norms = 3 if name == "lamb" else 1  # of gradients; of weights and updates
    sums = 8 * norms * (s.config.depth if parameter.is_stacked else 1)
    if name == "adafactor":
        sums += s.param_bytes * sum(math.prod(shape) // shape[axis] for axis in factored_axes(parameter, s.config))
    for axis in ("fsdp", "tensor"):
        if s.shards(parameter, axis) > 1:
            transfers["all-reduce", axis] += sums
    return transfers


def _activation_transfers(s: Step) -> int:
    """Return the bytes that are all-reduced along `tensor` for the images of a part of a batch.

    They are the outputs of the second linear layers of attention and MLP in the forward pass, and the gradients of the
    inputs of the first ones in the backward pass.
    """
    c, tensor = s.config, s.sizes["tensor"]
    outputs = 2 + (0 if s.recipe.remat == "none" else sum(_recomputed_outputs(s)))
    size = s.images * c.depth * (2 + outputs) * s.tokens * c.width * s.compute_bytes
    if c.head.pool == "attention":
        divided = c.pool_heads % tensor == 0
        pooled = s.tokens - (0 if c.head.pool_prefix else c.num_prefix)
        size += s.images * (2 + divided * (pooled + 2)) * c.width * s.compute_bytes
    if c.positions.relative_dim is not None:  # the hidden units of the MLP of offsets
        tables = 1 if c.positions.relative_shared else c.depth
        offsets = math.prod(2 * side - 1 for side in c.grid)
        size += tables * offsets * c.positions.relative_dim * s.wide_bytes
    return size


def _recomputed_outputs(s: Step) -> tuple[bool, bool]:
    """Return whether a recomputed block has the output of attention, and that of the MLP.

    A recomputed pass ends with the last tensor that the backward pass needs.  It has the output of the MLP only if an
    operation after it (norm, layer scale, dropout) stores a tensor.
    """
    norms, rates = s.config.norms, s.config.regularisation
    is_scaled = norms.layer_scale is not None if norms.order == "parallel" else norms.has_second_scale
    is_dropped = bool(rates.mlp_drop or rates.drop_path)
    return True, is_scaled or is_dropped or norms.order in ("post", "res_post")
