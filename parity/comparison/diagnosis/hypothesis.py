"""Hypotheses about how the expected outputs were computed, and the patched PyTorch twin that tests them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, round_to
from parity.checkpoints.formats import Fields, get
from parity.checkpoints.layout import Array, Layout
from parity.comparison.diagnosis.patches import Patch, confine_to_block
from vit_spec import InputError, Pixels, ViTConfig, rows

if TYPE_CHECKING:
    import torch

FIX_REFERENCE_CODE = "correct the code that made the expected outputs, then make them again"
CACHE_BYTES = 256 << 20  # for the outputs of the blocks that several trials share

Weights = Mapping[str, Array]  # parameter -> array with the axes of its row


@dataclass(frozen=True)
class Edit:
    """A new value for one parameter, computed from the parameters of the checkpoint.

    code: a Python expression.  {w} is the parameter itself, p("pos_embed") is another parameter, np is numpy, and round_to
        and FLOAT_DTYPES come from `parity.checkpoints.arrays`.
    """

    parameter: str
    code: str

    def evaluate(self, weights: Weights) -> Array:
        """Return the new value of the parameter.

        Raises:
            KeyError: the code reads a parameter that `weights` lacks.
        """
        names: dict[str, Any] = {"np": np, "p": weights.__getitem__, "round_to": round_to, "FLOAT_DTYPES": FLOAT_DTYPES}
        if "{w}" in self.code:
            names["w"] = weights[self.parameter]
        new: Array = np.asarray(eval(self.code.format(w="w"), {}, names))
        return new

    def in_block(self, number: int) -> "Edit":
        """Return the same edit restricted to one block of a parameter whose first axis is the blocks."""
        whole = f"({self.code}).reshape({{w}}.shape)"
        first, last = f"{{w}}[:{number}]", f"{{w}}[{number + 1}:]"
        return Edit(self.parameter, f"np.concatenate([{first}, {whole}[{number}:{number + 1}], {last}])")


@dataclass(frozen=True)
class Rounding:
    """A lower precision of the whole model.

    dtype: "float32", "bfloat16" or "float16".
    weights: whether the weights are rounded to the dtype.
    activations: whether the model computes in the dtype.
    """

    dtype: str
    weights: bool = True
    activations: bool = True


@dataclass(frozen=True)
class Trial:
    """A model and its input images.

    weights: float64, or float32 for large models.
    images: (B, C, H, W), in [0, 1] or normalized.
    normalized_by: the statistics that the images were normalized by; None if the images are pixels in [0, 1].
    patches: changes of the PyTorch twin, in the order in which they are applied.
    rounding: the lower precision of the model, if any.
    blocks_key: names of all changes before the final norm; trials with equal keys share the cached output of the blocks.
    unchanged_parts: how many of the first parts compute what those of the unchanged model do, if `blocks_key` is not empty:
        the embedding is the first part, and each block is one.
    """

    config: ViTConfig
    weights: Weights = field(repr=False)
    images: Array = field(repr=False)
    normalized_by: Pixels | None
    patches: tuple[Patch, ...] = ()
    rounding: Rounding | None = None
    blocks_key: tuple[str, ...] = ()
    unchanged_parts: int = 0


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause of the difference: what the reference model does differently.

    name: a statement about the reference model, e.g. "LayerNorm eps is 1e-05".
    family: the kind of cause; two causes of one family exclude each other.
    fields: fields of the config that differ, by their dotted names.
    edits: new values of parameters.
    images: a function that changes the images, (B, C, H, W) -> (B, C, H, W).
    patch: a change of the computation that no field of the config describes.
    rounding: a lower precision of the whole model, as in `Trial`.
    lowers_precision_of: "model" or "operation", if the cause is a lower precision of either and no formula is wrong.
    moves_blocks: whether the edits move blocks or leave them out, so that they do not apply to one block only.
    blocks_unchanged: whether everything before the final norm stays the same.
    manual_fix: what the user should do, for causes that no converted checkpoint fixes.
    per_block: whether the patch changes each block separately, so that it can be applied to one block only.
    rare: whether the cause is unlikely to be one of two simultaneous causes; pairs with it are tried last.
    layer: the layer that changes, or "" if several do.
    solved_numbers: how many of its numbers were fitted to the expected outputs.
    solved_digits: how many significant digits these numbers have: the fewest that fit as well.
    interval: the other numbers that fit as well, in words, or "" if they are nearly equal.
    """

    name: str
    family: str
    fields: Fields = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    images: Callable[[Array], Array] | None = None
    patch: Patch | None = None
    rounding: Rounding | None = None
    lowers_precision_of: Literal["model", "operation"] | None = None
    moves_blocks: bool = False
    blocks_unchanged: bool = False
    manual_fix: str = ""
    per_block: bool = False
    rare: bool = False
    layer: str = ""
    solved_numbers: int = 0
    solved_digits: int = 0
    interval: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether the cause is a lower precision, of the whole model or of one operation, and no formula is wrong."""
        return self.lowers_precision_of is not None

    @property
    def unchanged_parts(self) -> int:
        """How many of the first parts of the model surely stay the same, as in `Trial`."""
        if self.fields or self.images or self.rounding:
            return 0
        if block := re.match(r"blocks\.(\d+)", self.layer):
            return 1 + int(block[1])
        is_edit_of_blocks = self.patch is None and all(edit.parameter.startswith("blocks.") for edit in self.edits)
        return 1 if is_edit_of_blocks else 0

    def in_block(self, number: int) -> "Hypothesis | None":
        """Return the same cause in one block only, or None if it does not apply to single blocks."""
        name = f"in block {number} alone, {self.name}"
        if self.patch is not None:
            patch = confine_to_block(self.patch, number)
            return replace(self, name=name, patch=patch, layer=f"blocks.{number}") if self.per_block else None
        is_global = self.fields or self.images or self.rounding or self.moves_blocks
        if is_global or not all(edit.parameter.startswith("blocks.") for edit in self.edits):
            return None
        modules = {edit.parameter.removeprefix("blocks.").rpartition(".")[0] for edit in self.edits}
        layer = f"blocks.{number}.{modules.pop()}" if len(modules) == 1 else f"blocks.{number}"
        return replace(self, name=name, edits=tuple(edit.in_block(number) for edit in self.edits), layer=layer)

    def apply(self, trial: Trial) -> Trial | None:
        """Return the trial with this cause applied, or None if it changes nothing or does not fit this model."""
        try:
            config = trial.config.with_fields(self.fields) if self.fields else trial.config
            new = {edit.parameter: edit.evaluate(trial.weights) for edit in self.edits}
        except (InputError, ValueError, IndexError, KeyError):  # another cause has removed the part or changed the shape
            return None
        weights = _fit_to_config({**trial.weights, **new}, config)
        if weights is None or (self.rounding and trial.rounding):
            return None
        is_edited = any(not np.array_equal(weights[name], trial.weights.get(name, ())) for name in new if name in weights)
        if config == trial.config and not (is_edited or self.images or self.patch or self.rounding):
            return None
        before = trial.unchanged_parts if trial.blocks_key else self.unchanged_parts
        return replace(
            trial,
            config=config,
            weights=weights,
            images=self.images(trial.images) if self.images else trial.images,
            patches=(*trial.patches, self.patch) if self.patch else trial.patches,
            rounding=self.rounding or trial.rounding,
            blocks_key=trial.blocks_key if self.blocks_unchanged else (*trial.blocks_key, self.name),
            unchanged_parts=before if self.blocks_unchanged else min(before, self.unchanged_parts),
        )


def _fit_to_config(weights: Weights, config: ViTConfig) -> Weights | None:
    """Return the parameters of this config in the shapes of its rows, or None if names or sizes do not match."""
    declared = rows(config)
    if any(name not in weights or weights[name].size != row.size for name, row in declared.items()):
        return None
    return {name: weights[name].reshape(row.shape) for name, row in declared.items()}


class Runner:
    """A runner of trials: it runs the PyTorch twin on the CPU, without kernels of lower precision.

    threads: number of PyTorch threads; by default PyTorch's own setting.
    run_count: how many models were run.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.run_count = 0
        self.threads = threads
        self._cache: dict[tuple[Any, ...], Any] = {}
        self._images, self._digest = np.empty(0), b""
        self._cache_bytes_left = CACHE_BYTES

    def run(self, trial: Trial) -> Array:
        """Run the model of a trial and return its outputs, float64, in the shape that the config's head gives."""
        import torch

        self.run_count += 1
        model, threads = build_model(trial), torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        try:
            with torch.inference_mode():
                return _to_float64(self._run_head(model, self._run_blocks(model, trial)))
        finally:
            torch.set_num_threads(threads)

    def _run_blocks(self, model: Any, trial: Trial) -> "torch.Tensor":
        """Return the output of the last block, (B, T, width), from the cache if another trial shares it.

        Parts that compute what those of the unchanged model do are not run again either.
        """
        key, images, last = trial.blocks_key, self._digest_of(trial.images), len(model.blocks)
        if len(key) <= 1 and (key, images, last) in self._cache:  # two causes change the blocks: such a pair is run once
            return self._cache[key, images, last][0]  # type: ignore[no-any-return]
        first = min(trial.unchanged_parts, 1 + last) if key else 0
        start = self._cache.get(((), images, first - 1))
        x, tables = start or model.embed(model_inputs(trial, model))
        for number in range(first if start else 0, 1 + last):
            if number:
                x = model.blocks[number - 1](x, 0.0, tables)
            # Outputs of the last block save more time, so half of the cache is for these alone.
            reserved = 0 if number == last else CACHE_BYTES // 2
            if (not key or (len(key) == 1 and number == last)) and x.nbytes < self._cache_bytes_left - reserved:
                self._cache_bytes_left -= x.nbytes
                self._cache[key, images, number] = x, tables
        return x  # type: ignore[no-any-return]

    def _digest_of(self, images: Array) -> bytes:
        """Return a digest of the images; most trials share one array, which is read once."""
        if images is not self._images:
            self._images, self._digest = images, repr(images.shape).encode() + sha256(images.tobytes()).digest()
        return self._digest

    def _run_head(self, model: Any, x: "torch.Tensor") -> "torch.Tensor":
        outputs: torch.Tensor = model.classify(model.norm(x) if model.norm is not None else x)
        return outputs


def build_model(trial: Trial) -> Any:
    """Return the PyTorch twin with the weights and patches of a trial.

    Without patches the module is shared: the next call with the same config replaces its weights.
    """
    rounding = trial.rounding
    # A model computes in the dtype of its weights, unless it is told another one.
    dtype = rounding.dtype if rounding and rounding.activations and not rounding.weights else None
    # Patches need the named intermediates of explicit attention.  Fused kernels round as those of other libraries do.
    explicit = bool(trial.patches) or not rounding
    model = _weightless_model(trial.config, dtype, "explicit" if explicit else "fused")
    model = _clone(model) if trial.patches else model  # patches modify the module
    _load_weights(model, _state_dict(trial))
    for patch in trial.patches:
        patch(model)
    return model


def _clone(module: Any) -> Any:
    """Return a copy of a module whose attributes, forward hooks and submodules can be changed, faster than `deepcopy`."""
    new = object.__new__(type(module))
    new.__dict__ = dict(vars(module))
    for name in ("_parameters", "_forward_hooks", "_forward_pre_hooks"):
        new.__dict__[name] = new.__dict__[name].copy()
    new.__dict__["_modules"] = {name: part if part is None else _clone(part) for name, part in module._modules.items()}
    return new


def _load_weights(module: Any, state: "dict[str, torch.Tensor]", prefix: str = "") -> None:
    """Assign a state dict to a model without the checks of `load_state_dict`, which take longer.

    The weights are plain tensors, because nothing here needs them to be of the class Parameter.
    """
    parameters = module._parameters
    for name, parameter in parameters.items():
        if parameter is not None:
            parameters[name] = state[prefix + name]
    for name, part in module._modules.items():
        if part is not None:
            _load_weights(part, state, f"{prefix}{name}.")


@lru_cache(maxsize=512)
def _weightless_model(config: ViTConfig, dtype: str | None, attention: Any) -> Any:
    """Return the twin on the meta device; cached, because building a small model takes longer than running it."""
    import torch

    import vit_torch

    execution = vit_torch.Execution(dtype=None if dtype is None else getattr(torch, dtype), attention=attention)
    with torch.device("meta"):
        return vit_torch.ViT(config, execution).eval()


def model_inputs(trial: Trial, model: Any) -> "torch.Tensor":
    """Return the images of a trial, (B, C, H, W), normalized as its config requires, in the dtype of the model."""
    import torch

    images, wanted = trial.images, trial.config.pixels
    if trial.normalized_by is not None and trial.normalized_by != wanted:
        images = images * per_channel(trial.normalized_by.std) + per_channel(trial.normalized_by.mean)
    if trial.normalized_by != wanted:
        images = (images - per_channel(wanted.mean)) / per_channel(wanted.std)
    return torch.from_numpy(np.ascontiguousarray(images)).to(model.patch_embed.proj.weight.dtype)


def per_channel(values: tuple[float, ...]) -> Array:
    """Return values of the channels, such as a mean, in a shape that broadcasts with images, (C, H, W)."""
    return np.array(values)[:, None, None]


def _to_float64(x: "torch.Tensor") -> Array:
    import torch

    array: Array = x.to(torch.float64).numpy()
    return array


def _state_dict(trial: Trial) -> "dict[str, torch.Tensor]":
    """Return the PyTorch state dict of a trial; tensors are views of the weights where possible."""
    import torch

    rounding = trial.rounding
    rounded_dtype = getattr(torch, rounding.dtype) if rounding and rounding.weights else None
    state = {}
    for name, key, block, shape in _state_dict_entries(trial.config):
        array = trial.weights[name]
        array = array if block is None else array[block]
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(shape))
        rounded = tensor if rounded_dtype is None else tensor.to(rounded_dtype)
        state[key] = rounded if rounding is None or rounding.activations else rounded.to(tensor.dtype)
    return state


@lru_cache(maxsize=64)
def _state_dict_entries(config: ViTConfig) -> list[tuple[str, str, int | None, tuple[int, ...]]]:
    """Return (parameter, key, block, shape) for each key of the PyTorch state dict."""
    layouts: Mapping[str, Layout] = get("torch").layouts(config)
    return [
        (name, key, indices.get("block"), layout.shape(config.sizes))
        for name, layout in layouts.items()
        for key, indices in layout.indexed_keys(config.sizes, {})
    ]
