"""What a run needs of its devices, computed from the config, the recipe and the mesh: memory, operations, transfers.

It is what the functional twin's step comes to when XLA compiles it for a mesh (`train.jax.sharding`); the tests compare
it with the compiled program.  Nothing is allocated and no framework is loaded.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from train.jax.optimizer_state import kept, sent
from train.jax.parameter_tree import mesh_axes, tree
from train.mesh import IMAGES, Parameter, Sizes, share_batch
from train.recipes import Recipe
from vit_spec import ViTConfig, flops

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Needs:
    """What each device of a mesh holds and sends, and what all of them compute.

    memory: bytes a device by kind, in the order in which a step comes by them.
    transfers: bytes a step by kind of collective and mesh axes: what is gathered, summed or sent, as it is when whole; of
        what changes hands (all-to-all), a device's part.
    flops: floating point operations of a step, of all devices together: three forward passes' worth.
    recomputed: those that `remat` adds.
    """

    memory: dict[str, int]
    transfers: dict[tuple[str, str], int]
    flops: int
    recomputed: int

    @property
    def total(self) -> int:
        """Bytes a device."""
        return sum(self.memory.values())

    @property
    def state(self) -> int:
        """Bytes a device of what lasts from step to step, and of the batch: the arguments of a step."""
        return sum(self.memory.get(name, 0) for name in ("parameters", "optimizer", "running mean", "batch"))


class _Setting(NamedTuple):
    """narrow, wide: bytes of an entry in the computing type, and of a parameter; images: of one part, on a device."""

    config: ViTConfig
    recipe: Recipe
    sizes: Sizes
    narrow: int
    wide: int
    images: int

    @property
    def leaves(self) -> list[Parameter]:
        found: list[Parameter] = []
        tree(self.config, found.append)
        return found

    def parts(self, parameter: Parameter, *axes: str) -> int:
        """How many parts these axes, or all, split a parameter into."""
        taken = mesh_axes(parameter, self.config, self.sizes)
        return math.prod(self.sizes[name] for name in taken if name is not None and (not axes or name in axes))

    @property
    def patches(self) -> int:
        rows, columns = self.config.grid
        return rows * columns

    @property
    def tokens(self) -> int:
        """Those that enter the blocks in training."""
        kept = max(1, int(self.patches * (1 - self.config.regularisation.patch_drop)))
        return self.config.num_prefix + kept


def needs(config: ViTConfig, recipe: Recipe, sizes: Sizes, *, scatters: bool = True, wide: int = 4) -> Needs:
    """Return what a run needs.

    sizes: the lengths of the mesh's axes.
    scatters: whether the compiler sums matrices' gradients straight into parts (reduce-scatter), as on GPU and TPU; on CPU
        it sums them whole and cuts them.
    wide: bytes of an entry of a parameter; 8 where jax computes in float64.

    Raises:
        InputError: a batch that the mesh does not divide.
    """
    narrow = BYTES[recipe.dtype] if wide == 4 else wide
    s = _Setting(config, recipe, sizes, narrow, wide, share_batch(recipe.batch_size, recipe.accumulate, sizes))
    forward = flops(config)
    return Needs(_memory(s), _transfers(s, scatters), 3 * forward * recipe.batch_size, _recomputed(s, forward))


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory(s: _Setting) -> dict[str, int]:
    held = {parameter: parameter.row.size // s.parts(parameter) for parameter in s.leaves}
    matrices = {parameter: size for parameter, size in held.items() if parameter.row.decays}
    weights = s.wide * sum(held.values())
    gradients = weights + (s.narrow - s.wide) * sum(matrices.values())
    found = {
        "parameters": weights,
        "optimizer": s.wide
        * sum(kept(s.recipe.optimizer.name, parameter, size, s.config) for parameter, size in held.items()),
        "running mean": weights if s.recipe.ema else 0,
        "batch": s.recipe.accumulate * s.images * _pixels(s),
        "rounded matrices": s.narrow * sum(matrices.values()) if s.narrow < s.wide else 0,
        "fetched matrices": _fetched(s, [parameter for parameter in matrices if s.parts(parameter, "fsdp") > 1]),
        "activations": s.images * _kept(s, s.recipe.remat),
        "attention weights": s.images * s.config.depth * _weights(s) if s.recipe.remat == "none" else 0,
        "a block at work": s.images * _at_work(s),
        "gradients": gradients + (weights if s.recipe.accumulate > 1 else 0),
    }
    return {name: size for name, size in found.items() if size}


def _pixels(s: _Setting) -> int:
    """Bytes of an image and of what is to be answered."""
    height, width = s.config.image_size
    targets = 4 if s.recipe.task in (None, "classes") else 4 * s.config.num_classes
    return height * width * s.config.in_channels + targets


def _fetched(s: _Setting, matrices: list[Parameter]) -> int:
    """The matrices of a block, and those outside of the blocks: with all their parts along `fsdp`."""
    each = (
        parameter.row.size // (s.config.depth if parameter.stacked else 1) // s.parts(parameter, "tensor")
        for parameter in matrices
    )
    return s.narrow * sum(each)


def _kept(s: _Setting, remat: str) -> int:
    """Bytes of an image that the forward pass leaves for the backward pass, but for attention's weights."""
    c, (ph, pw) = s.config, s.config.patch_size
    patches = s.patches * ph * pw * c.in_channels * s.narrow
    norm = s.tokens * c.width * s.narrow if c.norms.after_blocks else 0
    return patches + c.depth * _block(s, remat) + norm


def _block(s: _Setting, remat: str) -> int:
    """Bytes of an image that a block keeps, but for attention's weights: what jax's linearisation of it holds on to.

    Norms and activations keep what enters them, and matrices what they multiply; a softmax that divides last keeps what it
    divides.  "dots" keeps what matrices give, "full" what enters.
    """
    c, t, tensor = s.config, s.tokens, s.sizes["tensor"]
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    scales, gates = 2 * (c.norms.layer_scale is not None), 2 if c.mlp.activation == "swiglu" else 1
    if remat == "full":
        return t * c.width * s.narrow
    if remat == "dots":
        return t * ((2 + scales // 2) * c.width + 3 * inner + gates * ff) * s.narrow
    noise = c.regularisation
    narrow = (4 + scales) * c.width + (6 if c.attention.qk_norm else 4) * inner + (gates + 1) * ff
    flags = (2 * c.width if noise.drop_path else 0) + (ff + c.width if noise.mlp_drop else 0)
    return t * (inner * _summed(s) + narrow * s.narrow + flags)


def _at_work(s: _Setting) -> int:
    """Bytes of an image while one block goes back: what it keeps, made anew or cut out, and the gradients on their way.

    Of norms and activations it is all that they go through: a compiler may hold that instead of computing it again.
    """
    c, tensor = s.config, s.sizes["tensor"]
    gates = 2 if c.mlp.activation == "swiglu" else 1
    inner, ff = c.num_heads * c.head_dim // tensor, c.mlp_dim // tensor
    normed = 2 * (c.width + (inner if c.attention.qk_norm else 0))
    gone_through = s.tokens * (3 * normed * _summed(s) + (gates + 1) * ff * s.narrow)
    gradients = s.tokens * (4 * c.width + 2 * gates * ff) * s.narrow
    scores = c.num_heads // tensor * s.tokens**2 * _summed(s)
    return _block(s, "none") + gone_through + _weights(s) + gradients + scores


def _weights(s: _Setting) -> int:
    """Bytes of an image's attention weights in a block."""
    dropped = bool(s.config.regularisation.attn_drop)  # kept with and without, and which are
    return s.config.num_heads // s.sizes["tensor"] * s.tokens**2 * (_summed(s) * (1 + dropped) + dropped)


def _summed(s: _Setting) -> int:
    """Bytes of an entry where norms and softmax compute: in float32 at least."""
    return max(4, s.narrow)


# Operations -----------------------------------------------------------------------------------------------------------


def _recomputed(s: _Setting, forward: int) -> int:
    """The blocks' forward pass once more, or of that the products of attention, which are no matrices' ("dots")."""
    c = s.config
    attention = c.depth * 4 * s.tokens**2 * c.num_heads * c.head_dim
    outside = sum(
        2 * parameter.row.size * s.patches for parameter in s.leaves if parameter.row.name == "patch_embed.proj.weight"
    )
    return s.recipe.batch_size * {"none": 0, "dots": attention, "full": forward - outside}[s.recipe.remat]


# Transfers ------------------------------------------------------------------------------------------------------------


def _transfers(s: _Setting, scatters: bool) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for parameter in s.leaves:
        found.update(_of_parameter(s, parameter, scatters))
        found.update(
            {key: s.wide * size for key, size in sent(s.recipe.optimizer.name, parameter, s.config, s.sizes).items()}
        )
    if s.sizes["tensor"] > 1:
        each = s.recipe.accumulate * s.images * s.narrow
        found["all-reduce", "tensor"] += each * _sums(s)
        found["all-gather", "tensor"] += each * _joined(s)
    if s.recipe.augment.mixes and _along(s, *IMAGES):
        height, width = s.config.image_size
        image = height * width * s.config.in_channels + s.wide * s.config.num_classes
        found["collective-permute", _along(s, *IMAGES)] += s.recipe.augment.repeats * image
    return {key: size for key, size in found.items() if size and key[1]}


def _along(s: _Setting, *axes: str) -> str:
    """The axes among these that split something."""
    return "+".join(name for name in axes if s.sizes[name] > 1)


def _of_parameter(s: _Setting, parameter: Parameter, scatters: bool) -> Counter[tuple[str, str]]:
    """What a parameter costs: its parts along `fsdp` are fetched, and its gradient is summed over the images' holders.

    A block's matrix is fetched forward and back, for each part of a batch, and its gradient summed into parts; one outside
    of the blocks is fetched once a step, and its gradient summed whole.
    """
    found: Counter[tuple[str, str]] = Counter()
    kind = parameter.row.name.split(".")[-2:-1]
    is_norm = bool(kind) and "norm" in kind[0]
    size = parameter.row.size // s.parts(parameter, "tensor") * (_summed(s) if is_norm else s.narrow)
    parts, turns = s.parts(parameter, "fsdp"), s.recipe.accumulate
    if parts > 1:
        found["all-gather", "fsdp"] += 2 * turns * size if parameter.stacked else size
    size *= turns * _times_summed(s.config, parameter)
    if parts > 1 and parameter.stacked:
        found["reduce-scatter" if scatters else "all-reduce", "fsdp"] += size
        found["all-reduce", _along(s, "data")] += size // parts
    else:
        found["all-reduce", _along(s, *IMAGES)] += size
        if is_norm and kind[0] in ("q_norm", "k_norm"):  # shared by heads
            found["all-reduce", _along(s, "tensor")] += size
    return found


def _times_summed(config: ViTConfig, parameter: Parameter) -> int:
    """How often a gradient is summed: of a norm, for both halves that share it; with v's bias, a zero one for k."""
    shared = config.norms.shared_norm and parameter.row.name.startswith("blocks.norm1.")
    return 2 if shared or parameter.row.name == "blocks.attn.v_bias" else 1


def _sums(s: _Setting) -> int:
    """Entries of an image that are summed along `tensor`: where heads and hidden units end, and, going back, begin."""
    c = s.config
    ends = (2 if s.recipe.remat == "full" else 1) if c.attention.proj else 0
    pool = (s.tokens - c.num_prefix) + 4 if c.head.pool == "attention" else 0
    return (c.depth * (3 + ends) * s.tokens + pool) * c.width


def _joined(s: _Setting) -> int:
    """Entries of an image that are fetched along `tensor`: heads, or values, that no projection mixes."""
    c = s.config
    apart = not c.attention.proj or c.attention.value_skip
    return apart * c.depth * (1 if s.recipe.remat == "none" else 2) * s.tokens * c.width
