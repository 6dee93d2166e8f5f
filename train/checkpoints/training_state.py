"""The training state of a run without a framework: what a checkpoint of either trainer holds.

Both trainers store the same numbers.  Weights, their EMA, and moments with the shape of a parameter are laid out as the
weights of the twin are, so the formats "jax" and "torch" of `parity` convert them.  Adafactor's factored moments are means
over one axis of a parameter, and have its other axes: `train.jax` stores them in the order in which the twin stores the
parameter, with all blocks in one array, and `train.torch` in the order of its row in `vit_spec.rows`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.conversion import ArrayConversion, plan_conversion
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint
from train.mesh import Parameter, parameters
from train.optimizer_state import factored_axes
from vit_spec import InputError, ViTConfig

WEIGHTS, EMA, MEAN, SQUARE, ROW, COLUMN = PARTS = ("params", "ema", "mean", "square", "row", "column")

Arrays = Mapping[str, Any]


class _Owner(NamedTuple):
    """The parameter that an array belongs to: its row, and its block; None for all blocks, or if it is in none."""

    row: str
    block: int | None


@dataclass(frozen=True, eq=False)
class TrainingState:
    """A training state, as a checkpoint has it.

    Attributes:
        config: the model.
        format: "jax" or "torch": the keys of the arrays are those of the twin's weights.
        parts: the arrays by part and key; those of a file are read when they are used.  "params" are the weights, "ema"
            their moving average.  "mean" and "square" are the optimizer's moments with the shape of a parameter; every
            optimizer has a moment of each parameter that is trained.  "row" and "column" are Adafactor's moments, without
            the longest and without the second longest axis.
        step: number of steps done.
        updates: number of updates of the optimizer, which are fewer if steps were skipped.
        sound: False after a step that was not finite has stopped the run.
    """

    config: ViTConfig
    format: str
    parts: Mapping[str, Arrays]
    step: int
    updates: int
    sound: bool
    _plans: dict[tuple[str, str], dict[str, ArrayConversion]] = field(default_factory=dict, init=False, repr=False)

    def array(self, part: str, key: str, format: str, dtype: Any) -> Array:
        """Return an array as a format stores it, bit for bit; zeros for moments of parameters that have none.

        Args:
            part: one of `PARTS`.
            key: a key of the format.
            format: "jax" or "torch".
            dtype: the dtype that it has in the run, of either framework.

        Raises:
            ValueError: the state lacks an array that it is computed from, or has another dtype.
        """
        expected = str(dtype).removeprefix("torch.")
        owner = _owners(self.config, format)[key]
        for own_key in self._keys_of(owner):
            if own_key not in self.parts.get(part, {}) and (part == EMA or self._has_moments(own_key)):
                raise ValueError(f"it lacks the {part} of {own_key}")
        found = self._factored(part, owner, format) if part in (ROW, COLUMN) else self._plan(part, format)[key].to_array()
        if found.dtype != expected:
            raise ValueError(f"the {part} of {key} is {found.dtype}, expected {expected}")
        return found

    def check_moments(self, multipliers: Mapping[str, NDArray[np.float64]]) -> None:
        """Raise ValueError unless each parameter that is trained has a moment.

        multipliers: what `train.recipes.param_groups.lr_multipliers` returns.
        """
        for key, (row, block) in _owners(self.config, self.format).items():
            is_trained = np.any(multipliers[row] if block is None else multipliers[row][block])
            if is_trained and not self._has_moments(key):
                raise ValueError(f"it lacks the moments of {key}")

    def check_shapes(self) -> None:
        """Raise ValueError unless the model has an array of the same shape for each one in the state."""
        layouts, sizes = get(self.format).layouts(self.config), self.config.sizes
        of_weights = {key: layout.shape(sizes) for layout in layouts.values() for key in layout.keys(sizes)}
        of_jax = parameters(self.config, "jax")
        for part, arrays in self.parts.items():
            for key, array in arrays.items():
                if (expected := of_weights.get(key)) is None:
                    raise ValueError(f"it has another array, the {part} of {key}")
                if part in (ROW, COLUMN):
                    row = _owners(self.config, self.format)[key].row
                    expected = _factored_shape(part, of_jax[row], self.config, self.format)
                if tuple(array.shape) != expected:
                    raise ValueError(f"the {part} of {key} is {list(array.shape)}, expected {list(expected)}")

    def _has_moments(self, key: str) -> bool:
        return any(key in self.parts.get(part, {}) for part in (MEAN, SQUARE, ROW, COLUMN))

    def _keys_of(self, owner: _Owner) -> list[str]:
        """Return the keys of this state that have entries of a parameter."""
        of_row = {key: block for key, (row, block) in _owners(self.config, self.format).items() if row == owner.row}
        return [key for key, block in of_row.items() if block == owner.block or None in (block, owner.block)]

    def _plan(self, part: str, format: str) -> dict[str, ArrayConversion]:
        """Return the conversions of the arrays of a part, by the keys of a format."""
        if (part, format) not in self._plans:
            found, weights = self.parts.get(part, {}), self.parts[WEIGHTS]
            zeros = {key: np.broadcast_to(np.zeros((), each.dtype), each.shape) for key, each in weights.items()}
            arrays = {key: found.get(key, zeros[key]) for key in weights}
            try:
                planned = plan_conversion(Checkpoint(self.config, self.format, arrays), format)
            except InputError as error:
                what, _, remedy = str(error).rpartition(". ")  # the remedy is one for files of weights
                raise ValueError(what or remedy) from None
            self._plans[part, format] = {each.key: each for each in planned}
        return self._plans[part, format]

    def _factored(self, part: str, owner: _Owner, format: str) -> Array:
        """Return a factored moment as a format stores it."""
        parameter = parameters(self.config, "jax")[owner.row]
        stored, by_row = _factored_orders(part, parameter, self.config)
        sizes, arrays = self.config.sizes, self.parts[part]
        if self.format == format:
            [key] = self._keys_of(owner)
            return np.asarray(arrays[key])
        if format == "torch":
            [key] = self._keys_of(owner)
            array = np.asarray(arrays[key])
            array = array if owner.block is None else array[owner.block]
            array = array.reshape([sizes[axis] for axis in stored])
            return np.ascontiguousarray(array.transpose([stored.index(axis) for axis in by_row]))
        order = [by_row.index(axis) for axis in stored]
        shape = _factored_shape(part, parameter, self.config, "torch")
        missing = np.zeros(shape, next(iter(self.parts[WEIGHTS].values())).dtype)
        blocks = [np.asarray(arrays.get(key, missing)).transpose(order) for key in self._keys_of(owner)]
        whole = np.stack(blocks) if parameter.is_stacked else blocks[0]
        return whole.reshape(_factored_shape(part, parameter, self.config, "jax"))


def without_placeholders(parts: Mapping[str, Arrays], config: ViTConfig, format: str) -> dict[str, Arrays]:
    """Return the parts without the arrays that a trainer stores in place of moments that a parameter does not have."""
    weights, owners, of_jax = parts[WEIGHTS], _owners(config, format), parameters(config, "jax")

    def is_moment(part: str, key: str, array: Any) -> bool:
        if part in (ROW, COLUMN):
            return bool(factored_axes(of_jax[owners[key].row], config))
        # A placeholder has one entry, or one for each block.
        return part != SQUARE or array.shape == weights[key].shape or math.prod(array.shape) > config.depth

    return {
        part: {key: each for key, each in arrays.items() if is_moment(part, key, each)} for part, arrays in parts.items()
    }


def _without_factored_axis(part: str, parameter: Parameter, config: ViTConfig) -> list[str]:
    """Return the axes of a factored moment as `train.jax` stores it, "1" for length one."""
    second, longest = factored_axes(parameter, config)
    axes = list(parameter.axes)
    del axes[longest if part == ROW else second]
    return axes


def _factored_shape(part: str, parameter: Parameter, config: ViTConfig, format: str) -> tuple[int, ...]:
    """Return the shape of a factored moment as a trainer stores it: `train.torch` has one of each block."""
    is_jax = format == "jax"
    axes = _without_factored_axis(part, parameter, config) if is_jax else _factored_orders(part, parameter, config)[1]
    return tuple(config.sizes.get(axis, 1) for axis in axes)


def _factored_orders(part: str, parameter: Parameter, config: ViTConfig) -> tuple[list[str], list[str]]:
    """Return the axes of a factored moment of one block, as `train.jax` stores it and in the order of the row."""
    stored = [axis for axis in _without_factored_axis(part, parameter, config) if axis not in ("block", "1")]
    return stored, [axis for axis in parameter.row.axes if axis in stored]


@lru_cache(maxsize=16)
def _owners(config: ViTConfig, format: str) -> Mapping[str, _Owner]:
    """Return the parameter that each array of a format belongs to, by key."""
    found: dict[str, _Owner] = {}
    for row, layout in get(format).layouts(config).items():
        blocks: Any = range(config.depth) if "{block}" in layout.key else (None,)
        found |= {layout.key.format(block=block): _Owner(row, block) for block in blocks}
    return found
