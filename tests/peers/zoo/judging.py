"""Read a checkpoint of another library and judge the result against that library's output in float64.

Three outcomes are allowed.  "right": the outputs are equal.  "refused": an `InputError` of one line.  "assumed", for a
state dict without a config alone: the outputs differ, `AssumptionWarning` named every assumption, and the named
assumptions explain all of the difference.  Everything else is "WRONG".

Whether assumptions explain a difference is tried rather than believed.  The true values of the named fields, taken from
the library's live model, are given to `load`; where `ViTConfig` has no word for the true value, the library's model is
changed to compute what was assumed.  Then both must be equal: an assumption that was left unnamed would remain as a
difference.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parity
import vit_torch
from parity.comparison.tolerances import FUNCTION
from tests.goldens.golden import Array
from tests.goldens.peers import float64
from tests.peers.proof import relrms
from vit_spec import InputError
from vit_spec.config import FIELDS

USUAL = "as in most models"  # the true value of a property in words, where what is assumed of it always holds
RIGHT, REFUSED, ASSUMED, WRONG = "right", "refused", "assumed", "WRONG"

# Fields that leave outputs at the model's own image size alone.
_ELSEWHERE = ("pixels.", "resampling.", "norms.layer_scale")


@dataclass(frozen=True)
class Other:
    """A value for which `ViTConfig` has no word."""

    what: str


@dataclass(frozen=True)
class Property:
    """Something that tensors do not tell of a model.

    truth: the value that a live model has, as `ViTConfig` spells it, or an `Other`; of a property that `ViTConfig` lacks,
        which is assumed in words, `USUAL` or an `Other`.
    assume: changes a live model to compute as an assumed value says; None where that is not needed, because every true
        value can be given to `load`.
    """

    truth: Callable[[nn.Module], Any]
    assume: Callable[[nn.Module, Any], None] | None = None


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    name: the library's name of it, with the options that it was made with.
    model: in float64, with random weights.
    images: (B, C, H, W) in float64.
    run: the model's output for images; None where it is no model that `ViTConfig` could describe.
    properties: by the names under which `parity` may report assumptions.
    """

    name: str
    model: nn.Module
    images: Array
    run: Callable[[nn.Module, Tensor], Tensor] | None
    properties: Mapping[str, Property]

    def outputs(self, model: nn.Module | None = None) -> Array:
        """Return what the model, or a changed copy of it, computes for the images."""
        assert self.run is not None
        with float64():
            return self.run(model or self.model, torch.from_numpy(self.images)).numpy()


@dataclass(frozen=True)
class Outcome:
    """What came of reading a checkpoint.

    verdict: "right", "refused", "assumed" or "WRONG".
    format: that it was read as.
    distance: relRMS of the outputs, before anything was given.
    told: the refusal, the assumptions that do not hold, or what is wrong.
    """

    verdict: str
    format: str = ""
    distance: float = 0.0
    told: str = ""


@dataclass(frozen=True)
class _Reading:
    format: str
    assumed: Mapping[str, Any]
    unsaid: tuple[str, ...]
    outputs: Array


def judge(peer: Peer, path: Path, *, bare: bool) -> Outcome:
    """Read what a peer saved, and return what came of it.

    bare: whether it is a state dict without a config.
    """
    try:
        reading = _read(path, peer.images)
    except InputError as error:
        return Outcome(WRONG if "\n" in str(error) else REFUSED, told=str(error).replace(str(path), "FILE"))
    except Exception as error:  # any other is a finding, not a failure of this harness
        return Outcome(WRONG, told=f"{type(error).__name__}: {error}")
    if peer.run is None:
        return Outcome(WRONG, reading.format, float("inf"), "another model was read as a ViT")
    distance = _distance(reading.outputs, peer.outputs())
    if reading.unsaid:
        return Outcome(WRONG, reading.format, distance, f"no warning names {', '.join(reading.unsaid)}")
    if distance <= FUNCTION:
        return Outcome(RIGHT, reading.format, distance, ", ".join(reading.assumed))
    if not bare:
        return Outcome(WRONG, reading.format, distance, "another function")
    verdict, told = _explained(peer, path, reading)
    return Outcome(verdict, reading.format, distance, told)


def _explained(peer: Peer, path: Path, reading: _Reading) -> tuple[str, str]:
    """Return whether what was assumed accounts for the whole difference, and which assumptions do not hold.

    The true values are given; what a reading with these assumes in addition is given too, until nothing is added.
    """
    given: dict[str, Any] = {}
    told: dict[str, str] = {}
    found = reading
    while True:
        acting = {name: value for name, value in found.assumed.items() if not name.startswith(_ELSEWHERE)}
        if unknown := [name for name in acting if name not in peer.properties]:
            return WRONG, f"this harness cannot try the assumption {', '.join(unknown)}"
        truths = {name: peer.properties[name].truth(peer.model) for name in acting}
        false = {name: value for name, value in acting.items() if truths[name] not in (value, USUAL)}
        told |= {name: f"{name}={value!r} for {_word(truths[name])}" for name, value in false.items()}
        known = {name: truth for name, truth in truths.items() if name in FIELDS and not isinstance(truth, Other)}
        if known.keys() <= given.keys():
            break
        given |= known
        try:
            found = _read(path, peer.images, given)
        except InputError as error:  # the truth is refused: hold the first reading to a model of which all is as assumed
            if any(peer.properties[name].assume is None for name in false):
                return WRONG, f"refuses the truth, {given}: {error}"
            found = reading
            break
    distance = _distance(found.outputs, peer.outputs(_changed(peer, false)))
    if distance <= FUNCTION:
        return ASSUMED, ", ".join(told.values())
    return WRONG, f"{distance:.1e} remain when told of {', '.join(told.values()) or 'nothing'}"


def _word(truth: Any) -> str:
    return truth.what if isinstance(truth, Other) else repr(truth)


def _changed(peer: Peer, values: Mapping[str, Any]) -> nn.Module:
    """Return a copy of the model that computes as assumed."""
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


def _distance(found: Array, expected: Array) -> float:
    return relrms(found, expected) if found.shape == expected.shape else float("inf")
