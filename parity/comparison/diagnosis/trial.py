"""One way in which the expected outputs may have come about, and the PyTorch twin that computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.checkpoints.config_inference import nested
from parity.checkpoints.formats import Fields, get
from parity.checkpoints.layout import Layout
from parity.checkpoints.weights import FLOATS, rounded
from parity.comparison.diagnosis.patches import Patch, only
from parity.comparison.tolerances import Array
from vit_spec import InputError, Pixels, ViTConfig, rows

if TYPE_CHECKING:
    import torch

CURE = "correct the code that made the expected outputs, then make them again"
CACHED = 256 << 20  # bytes of tokens that are kept because several trials share the blocks

Weights = Mapping[str, Array]  # parameter -> array with the axes of its row


@dataclass(frozen=True)
class Edit:
    """One parameter made of what the file has.

    code: a numpy expression with {w} for the parameter; p("pos_embed") is another one of the file, np is numpy, and
        rounded and FLOATS are those of `parity.checkpoints.weights`.
    """

    parameter: str
    code: str

    def of(self, weights: Weights) -> Array:
        """Return the new parameter.

        Raises:
            KeyError: these weights lack a parameter that the code reads.
        """
        names: dict[str, Any] = {"np": np, "p": weights.__getitem__, "rounded": rounded, "FLOATS": FLOATS}
        if "{w}" in self.code:
            names["w"] = weights[self.parameter]
        made: Array = np.asarray(eval(self.code.format(w="w"), {}, names))
        return made

    def confined(self, number: int) -> "Edit":
        """Return the edit of one block's share of a parameter whose first axis is the blocks'."""
        whole = f"({self.code}).reshape({{w}}.shape)"
        first, last = f"{{w}}[:{number}]", f"{{w}}[{number + 1}:]"
        return Edit(self.parameter, f"np.concatenate([{first}, {whole}[{number}:{number + 1}], {last}])")


@dataclass(frozen=True)
class Trial:
    """A model, and what it is shown.

    weights: float64, or float32 where the model is large.
    images: (B, C, H, W), in [0, 1] or normalised.
    normalised: what the images were normalised by; None where the model is to do it.
    patches: how this model differs from the twin.
    rounding: what is computed in less than the type of the weights: see `Runner`.
    body: names of what was changed ahead of the final norm; trials with the same ones share their blocks.
    """

    config: ViTConfig
    weights: Weights = field(repr=False)
    images: Array = field(repr=False)
    normalised: Pixels | None
    patches: tuple[Patch, ...] = ()
    rounding: str = ""
    body: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hypothesis:
    """A cause: what would have to be changed for the outputs to match.

    name: what would be true.
    family: the cause; two of one family exclude each other.
    fields: of the config, dotted.
    edits: of the weights.
    images: what was done to the images.
    patch: what the other model computes that no config says.
    rounding: as in `Trial`.
    tail: whether nothing changes ahead of the final norm.
    cure: what to do where no other file would help.
    by_block: whether the patch changes each block by itself, so that one block alone may have it.
    where: the layer that is changed, where it is one.
    """

    name: str
    family: str
    fields: Fields = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    images: Callable[[Array], Array] | None = None
    patch: Patch | None = None
    rounding: str = ""
    tail: bool = False
    cure: str = ""
    by_block: bool = False
    where: str = ""

    def confined(self, number: int) -> "Hypothesis | None":
        """Return the same cause in one block alone; None where it cannot be of one."""
        name = f"in block {number} alone, {self.name}"
        if self.patch is not None:
            patch = only(self.patch, number)
            return replace(self, name=name, patch=patch, where=f"blocks.{number}") if self.by_block else None
        elsewhere = self.fields or self.images or self.rounding or self.family == "order of blocks"
        if elsewhere or not all(edit.parameter.startswith("blocks.") for edit in self.edits):
            return None
        places = {edit.parameter.removeprefix("blocks.").rpartition(".")[0] for edit in self.edits}
        where = f"blocks.{number}.{places.pop()}" if len(places) == 1 else f"blocks.{number}"
        return replace(self, name=name, edits=tuple(edit.confined(number) for edit in self.edits), where=where)

    def apply(self, trial: Trial) -> Trial | None:
        """Return the trial in which this is true; None where it is so already, or cannot be of this model."""
        try:
            config = trial.config.replace(**nested(self.fields)) if self.fields else trial.config
            made = {edit.parameter: edit.of(trial.weights) for edit in self.edits}
        except (InputError, ValueError, IndexError, KeyError):  # shapes and parts that another cause has changed
            return None
        weights = _held({**trial.weights, **made}, config)
        if weights is None or (self.rounding and trial.rounding):
            return None
        edited = any(not np.array_equal(weights[name], trial.weights.get(name, ())) for name in made if name in weights)
        if config == trial.config and not (edited or self.images or self.patch or self.rounding):
            return None
        return replace(
            trial,
            config=config,
            weights=weights,
            images=self.images(trial.images) if self.images else trial.images,
            patches=(*trial.patches, self.patch) if self.patch else trial.patches,
            rounding=self.rounding or trial.rounding,
            body=trial.body if self.tail else (*trial.body, self.name),
        )


def _held(weights: Weights, config: ViTConfig) -> Weights | None:
    """Return the weights of this config in the shapes of its rows; None where they cannot be its own."""
    declared = rows(config)
    if any(name not in weights or weights[name].size != row.size for name, row in declared.items()):
        return None
    return {name: weights[name].reshape(row.shape) for name, row in declared.items()}


class Runner:
    """Runs trials in the PyTorch twin on the CPU, with exact attention and no kernel of lower precision.

    Roundings: "bfloat16" and "float16" compute in this type, "all bfloat16" and "all float16" have weights in it too,
    "weights bfloat16" and "weights float16" round the weights alone, "float32" makes the twin a plain float32 model.

    threads: of PyTorch; by default as many as it has.  `count` is how often a model was run.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.count = 0
        self.threads = threads
        self._tokens: dict[tuple[Any, ...], Any] = {}
        self._room = CACHED

    def run(self, trial: Trial) -> Array:
        """Return the outputs of a trial, float64."""
        import torch

        self.count += 1
        model, threads = model_of(trial), torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        try:
            with torch.inference_mode():
                return _array(self._tail(model, self._body(model, trial)))
        finally:
            torch.set_num_threads(threads)

    def _body(self, model: Any, trial: Trial) -> "torch.Tensor":
        """The tokens that leave the blocks: (B, T, width)."""
        key = (trial.body, len(trial.images), trial.images.dtype, trial.images[:, 0, 0, 0].tobytes())
        if key in self._tokens:
            found: torch.Tensor = self._tokens[key]
            return found
        x, tables = model.embed(shown(trial, model))
        for block in model.blocks:
            x = block(x, 0.0, tables)
        if len(trial.body) < 2 and x.nbytes < self._room:
            self._room -= x.nbytes
            self._tokens[key] = x
        return x  # type: ignore[no-any-return]

    def _tail(self, model: Any, x: "torch.Tensor") -> "torch.Tensor":
        found: torch.Tensor = model.classify(model.norm(x) if model.norm is not None else x)
        return found


def model_of(trial: Trial) -> Any:
    """Return the twin of a trial, changed as the trial says; another call with the same config may take it over."""
    dtype = trial.rounding if trial.rounding in ("bfloat16", "float16") else None
    explicit = bool(trial.patches) or not trial.rounding  # patches reach in; fused kernels round as others' do
    model = _skeleton(trial.config, dtype, "explicit" if explicit else "fused")
    model = _cloned(model) if trial.patches else model  # they leave marks
    _load(model, _state_dict(trial))
    for patch in trial.patches:
        patch(model)
    return model


def _cloned(module: Any) -> Any:
    """Return a copy of a module whose attributes, hooks and parts may be changed; `deepcopy` takes ten times as long."""
    new = object.__new__(type(module))
    new.__dict__ = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    new._modules = {name: part if part is None else _cloned(part) for name, part in module._modules.items()}
    return new


def _load(model: Any, state: "dict[str, torch.Tensor]") -> None:
    """Give a model its weights, which have the names and shapes of its own, without the checks that take longer."""
    import torch

    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                tensor = state[f"{prefix}.{name}" if prefix else name]
                module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)


@lru_cache(maxsize=512)
def _skeleton(config: ViTConfig, dtype: str | None, attention: Any) -> Any:
    """The twin without weights: to build one takes longer than to run it where it is small."""
    import torch

    import vit_torch

    execution = vit_torch.Execution(dtype=None if dtype is None else getattr(torch, dtype), attention=attention)
    with torch.device("meta"):
        return vit_torch.ViT(config, execution).eval()


def shown(trial: Trial, model: Any) -> "torch.Tensor":
    """Return the images of a trial as its model is to see them."""
    import torch

    images, own = trial.images, trial.config.pixels
    if trial.normalised is not None and trial.normalised != own:
        images = images * _statistic(trial.normalised.std) + _statistic(trial.normalised.mean)
    if trial.normalised != own:
        images = (images - _statistic(own.mean)) / _statistic(own.std)
    return torch.from_numpy(np.ascontiguousarray(images)).to(model.patch_embed.proj.weight.dtype)


def _statistic(values: tuple[float, ...]) -> Array:
    return np.array(values)[:, None, None]


def _array(x: "torch.Tensor") -> Array:
    import torch

    found: Array = x.to(torch.float64).numpy()
    return found


def _state_dict(trial: Trial) -> "dict[str, torch.Tensor]":
    """Return the weights as the twin names them: views where they can be."""
    import torch

    kind, _, narrow = trial.rounding.rpartition(" ")
    types: Any = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    through = types.get(narrow) if kind in ("all", "weights") or narrow == "float32" else None
    found = {}
    for name, key, place, shape in _places(trial.config):
        array = trial.weights[name]
        array = array if place is None else array[place]
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(shape))
        tensor = tensor if through is None else tensor.to(through)
        found[key] = tensor.to(torch.from_numpy(np.empty(0, array.dtype)).dtype) if kind == "weights" else tensor
    return found


@lru_cache(maxsize=64)
def _places(config: ViTConfig) -> list[tuple[str, str, int | None, tuple[int, ...]]]:
    """Every key of the twin: its parameter, itself, its place on the axis of blocks, its shape."""
    column: Mapping[str, Layout] = get("torch").layouts(config)
    return [
        (name, key, at.get("block"), layout.shape(config.sizes))
        for name, layout in column.items()
        for key, at in layout.places(config.sizes, {})
    ]
