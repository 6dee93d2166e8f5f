"""Read a checkpoint of another library and compare the result with the library's output in float64.

Three outcomes are allowed:

- "right": the outputs are equal.
- "refused": an `InputError` with a message of one line.
- "assumed", only for a state dict without a config: the outputs differ, `AssumptionWarning` named every assumption, and the
  named assumptions explain the whole difference.

Everything else is "WRONG".

Whether the assumptions explain the difference is tested.  The true values of the named fields, taken from the library's
model, are given to `load`.  Where `ViTConfig` cannot express the true value, the library's model is changed to compute what
was assumed.  Then the outputs must be equal.  An assumption that was not reported would leave a difference.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parity
import vit_torch
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.goldens.golden import Array
from tests.goldens.peers import float64
from tests.peers.proof import relrms
from vit_spec import InputError
from vit_spec.config import FIELDS

AS_ASSUMED = "as in most models"  # the true value of a property that is not a config field, if the assumption is true
RIGHT, REFUSED, ASSUMED, WRONG = "right", "refused", "assumed", "WRONG"

# Fields that do not change the outputs for images of the model's own size.
_WITHOUT_EFFECT = ("pixels.", "resampling.", "norms.layer_scale")


@dataclass(frozen=True)
class NotInConfig:
    """A value that `ViTConfig` cannot express, with its description."""

    description: str


@dataclass(frozen=True)
class Property:
    """A property of a model that no tensor shows.

    truth: model -> its value, as in `ViTConfig`, or a `NotInConfig`.  For a property that is not a field of `ViTConfig`,
        `AS_ASSUMED` or a `NotInConfig`.
    assume: changes a model so that it computes with an assumed value.  None if every true value can be given to `load`.
    """

    truth: Callable[[nn.Module], Any]
    assume: Callable[[nn.Module, Any], None] | None = None


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    name: the library's name of the model, with the options that it was built with.
    model: in float64, with random weights.
    images: (B, C, H, W) in float64.
    run: (model, images) -> the output.  None if `ViTConfig` cannot describe such a model.
    properties: name under which `parity` may report an assumption -> property.
    """

    name: str
    model: nn.Module
    images: Array
    run: Callable[[nn.Module, Tensor], Tensor] | None
    properties: Mapping[str, Property]

    def outputs(self, model: nn.Module | None = None) -> Array:
        """Return the outputs of the model, or of a changed copy, for the images."""
        assert self.run is not None
        with float64():
            return self.run(model or self.model, torch.from_numpy(self.images)).numpy()

    @cached_property
    def own_outputs(self) -> Array:
        """The outputs of the model, which is the same for all its checkpoints."""
        return self.outputs()


@dataclass(frozen=True)
class Outcome:
    """The outcome of reading a checkpoint.

    verdict: "right", "refused", "assumed" or "WRONG".
    format: the format as which the checkpoint was read.
    distance: the relRMS of the outputs, when nothing is given to `load`.
    details: the error message, the false assumptions, or what is wrong.
    """

    verdict: str
    format: str = ""
    distance: float = 0.0
    details: str = ""


@dataclass(frozen=True)
class _Reading:
    """The result of reading a checkpoint: format, assumptions, those without a warning, and the twin's outputs."""

    format: str
    assumed: Mapping[str, Any]
    unreported: tuple[str, ...]
    outputs: Array


def check_reading(peer: Peer, path: Path, *, bare: bool) -> Outcome:
    """Read a checkpoint of a peer and return the outcome.

    bare: whether the checkpoint is a state dict without a config.
    """
    try:
        reading = _read(path, peer.images)
    except InputError as error:
        return Outcome(WRONG if "\n" in str(error) else REFUSED, details=str(error).replace(str(path), "FILE"))
    except Exception as error:  # a bug in `parity`, to be reported as an outcome
        return Outcome(WRONG, details=f"{type(error).__name__}: {error}")
    if peer.run is None:
        return Outcome(WRONG, reading.format, float("inf"), "another model was read as a ViT")
    distance = _relative_error(reading.outputs, peer.own_outputs)
    if reading.unreported:
        return Outcome(WRONG, reading.format, distance, f"no warning names {', '.join(reading.unreported)}")
    if distance <= FLOAT64_TOLERANCE:
        return Outcome(RIGHT, reading.format, distance, ", ".join(reading.assumed))
    if not bare:
        return Outcome(WRONG, reading.format, distance, "another function")
    verdict, details = _explain(peer, path, reading)
    return Outcome(verdict, reading.format, distance, details)


def _explain(peer: Peer, path: Path, reading: _Reading) -> tuple[str, str]:
    """Return "assumed" if the assumptions explain the whole difference, otherwise "WRONG"; and the false assumptions.

    The true values are given to `load`.  If this leads to further assumptions, their true values are given too, until there
    are no more.
    """
    given: dict[str, Any] = {}
    corrections: dict[str, str] = {}
    found = reading
    while True:
        effective = {name: value for name, value in found.assumed.items() if not name.startswith(_WITHOUT_EFFECT)}
        if unknown := [name for name in effective if name not in peer.properties]:
            return WRONG, f"the test has no property for the assumption {', '.join(unknown)}"
        truths = {name: peer.properties[name].truth(peer.model) for name in effective}
        false = {name: value for name, value in effective.items() if truths[name] not in (value, AS_ASSUMED)}
        corrections |= {name: f"{name}={value!r} for {_in_words(truths[name])}" for name, value in false.items()}
        known = {name: truth for name, truth in truths.items() if name in FIELDS and not isinstance(truth, NotInConfig)}
        if known.keys() <= given.keys():
            break
        given |= known
        try:
            found = _read(path, peer.images, given)
        except InputError as error:  # the true values are refused: compare the first reading with a changed model
            if any(peer.properties[name].assume is None for name in false):
                return WRONG, f"the true values {given} are refused: {error}"
            found = reading
            break
    changes_model = any(peer.properties[name].assume is not None for name in false)
    expected = peer.outputs(_model_as_assumed(peer, false)) if changes_model else peer.own_outputs
    distance = _relative_error(found.outputs, expected)
    if distance <= FLOAT64_TOLERANCE:
        return ASSUMED, ", ".join(corrections.values())
    return (
        WRONG,
        f"a difference of {distance:.1e} remains after correcting {', '.join(corrections.values()) or 'nothing'}",
    )


def _in_words(truth: Any) -> str:
    return truth.description if isinstance(truth, NotInConfig) else repr(truth)


def _model_as_assumed(peer: Peer, values: Mapping[str, Any]) -> nn.Module:
    """Return a copy of the model that computes with the assumed values."""
    model = copy.deepcopy(peer.model)
    with float64():
        for name, value in values.items():
            if (assume := peer.properties[name].assume) is not None:
                assume(model, value)
    return model


def _read(path: Path, images: Array, given: Mapping[str, Any] | None = None) -> _Reading:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = vit_torch.load(path, given=given)
        checkpoint = parity.load(path, given=given)
    said = " ".join(str(each.message) for each in caught if issubclass(each.category, parity.AssumptionWarning))
    assumed = {each.field: each.value for each in checkpoint.assumed}
    with torch.no_grad():
        outputs = model(torch.from_numpy(images)).numpy()
    return _Reading(checkpoint.format, assumed, tuple(name for name in assumed if name not in said), outputs)


def _relative_error(found: Array, expected: Array) -> float:
    return relrms(found, expected) if found.shape == expected.shape else float("inf")
