"""The cost of a training step on each device, as far as both trainers have it in common; without a framework.

`train.jax.memory_estimate` and `train.torch.memory_estimate` add what each trainer stores and sends in its own way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from train.mesh import AxisSizes, Parameter, images_per_device, parameters, shard_dims
from train.optimizer_state import state_size
from train.recipes import Recipe
from vit_spec import ViTConfig, flops
from vit_spec.cost import count_training_tokens, training_flops

BYTES = {"float32": 4, "bfloat16": 2}


def flops_per_image(config: ViTConfig, teacher: ViTConfig | None = None, *, teacher_copies: int = 1) -> int:
    """Return the floating point operations of a training step on one image: three forward passes, and the teacher's.

    Recomputation is not counted.

    teacher: the teacher of knowledge distillation; None without.
    teacher_copies: number of devices that compute the whole teacher, each for the same image.
    """
    return 3 * training_flops(config) + (teacher_copies * flops(teacher) if teacher else 0)


@dataclass(frozen=True)
class MemoryEstimate:
    """The cost of a training step.

    memory: bytes per device by kind, in the order in which a step allocates them.
    transfers: bytes per step by kind of collective and mesh axes, such as ("all-reduce", "data+fsdp"): the size of the
        whole array that is gathered, summed or sent; for an all-to-all, the part of one device.
    flops: floating point operations of a step on all devices together: three forward passes, and the teacher's.
    recomputed: further operations that `remat` adds.
    """

    memory: dict[str, int]
    transfers: dict[tuple[str, str], int]
    flops: int
    recomputed: int

    @property
    def total(self) -> int:
        """Bytes per device."""
        return sum(self.memory.values())

    @property
    def state(self) -> int:
        """Bytes per device of the arguments of a step: the training state and the batch."""
        return sum(self.memory.get(name, 0) for name in ("parameters", "optimizer state", "EMA", "batch"))


@dataclass(frozen=True, eq=False)
class Step:
    """The step that is estimated.

    sizes: the length of each mesh axis.
    compute_bytes, param_bytes: bytes per entry of activations, and of parameters.
    """

    config: ViTConfig
    recipe: Recipe
    sizes: AxisSizes
    compute_bytes: int
    param_bytes: int

    @classmethod
    def of(cls, config: ViTConfig, recipe: Recipe, sizes: AxisSizes, param_bytes: int) -> "Step":
        """Return the step of a recipe; with parameters in float64, activations are too."""
        return cls(config, recipe, sizes, BYTES[recipe.dtype] if param_bytes == 4 else param_bytes, param_bytes)

    @cached_property
    def images(self) -> int:
        """The number of images per device in each part of a batch.

        Raises:
            InputError: the batch is not divisible by the mesh.
        """
        return images_per_device(self.recipe.batch_size, self.recipe.accumulate, self.sizes)

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters as the JAX twin stores them: one array for all blocks, whose axes are not merged."""
        return list(parameters(self.config, "jax").values())

    def shards(self, parameter: Parameter, *axes: str) -> int:
        """Return the number of shards of a parameter along these mesh axes, by default along all."""
        used = [shard.axis for shard in shard_dims(parameter, self.config, self.sizes)]
        return math.prod(self.sizes[name] for name in used if name is not None and (not axes or name in axes))

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        rows, columns = self.config.grid
        return rows * columns

    @property
    def tokens(self) -> int:
        """Number of tokens in the blocks during training, after patch dropout."""
        return count_training_tokens(self.config)

    @property
    def image_bytes(self) -> int:
        """Bytes of a uint8 image."""
        height, width = self.config.image_size
        return height * width * self.config.in_channels

    @property
    def wide_bytes(self) -> int:
        """Bytes of an entry inside norms and softmax, which compute in float32 at least."""
        return max(4, self.compute_bytes)

    def joined(self, axes: Sequence[str]) -> str:
        """Return the names of those mesh axes that are longer than 1, joined by "+"."""
        return "+".join(name for name in axes if self.sizes[name] > 1)

    def estimate(
        self, memory: dict[str, int], transfers: dict[tuple[str, str], int], recomputed: tuple[bool, bool]
    ) -> MemoryEstimate:
        """Return the estimate with these parts, without those that are zero, and with the FLOPs of the step.

        recomputed: whether remat "full" recomputes the output of attention, and that of the MLP.
        """
        return MemoryEstimate(
            {name: size for name, size in memory.items() if size},
            {key: size for key, size in transfers.items() if size and key[1]},
            self.recipe.batch_size * flops_per_image(self.config),
            self._recomputed_flops(*recomputed),
        )

    def _recomputed_flops(self, attention_output: bool, mlp_output: bool) -> int:
        """Return the FLOPs of recomputation: with "dots" products inside attention, with "full" those with weights too."""
        c = self.config
        attention = c.depth * 4 * self.tokens**2 * c.num_heads * c.head_dim
        names = ["attn.qkv", *["attn.proj"] * attention_output, "mlp.fc1", *["mlp.fc2"] * mlp_output]
        weights = {f"blocks.{name}.weight" for name in names}
        entries = sum(parameter.row.size for parameter in self.parameters if parameter.row.name in weights)
        by_remat = {"none": 0, "dots": attention, "full": attention + 2 * self.tokens * entries}
        return self.recipe.batch_size * by_remat[self.recipe.remat]


def state_memory(s: Step) -> dict[str, int]:
    """Return the bytes per device of the training state."""
    local_sizes = {parameter: parameter.row.size // s.shards(parameter) for parameter in s.parameters}
    weights = s.param_bytes * sum(local_sizes.values())
    name = s.recipe.optimizer.name
    return {
        "parameters": weights,
        "optimizer state": s.param_bytes
        * sum(state_size(name, parameter, size, s.config) for parameter, size in local_sizes.items()),
        "EMA": weights if s.recipe.ema else 0,
    }
