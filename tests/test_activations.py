"""Each activation of the config is in every place that a new one must be added to; see "An activation" of the guide."""

import pkgutil
from collections.abc import Callable, Collection
from typing import get_args

import pytest

import vit_spec
from parity.checkpoints.formats import get, hugging_face, timm_constructors
from parity.comparison.diagnosis.implementation_hypotheses import CONFIG_ACTIVATIONS
from tests import ROOT
from vit_spec import InputError, Mlp
from vit_spec.cost import ACTIVATION_ARRAYS
from vit_spec.parts import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS, Activation

CONFIG = vit_spec.get("vit_ti16", width=24, depth=1, num_heads=3)


def _cases(path: str) -> Callable[[str], bool]:
    text = (ROOT / path).read_text()
    return lambda kind: f'        case "{kind}":\n' in text


def _entries(names: Collection[str]) -> Callable[[str], bool]:
    return lambda kind: kind in names


# Place -> a function that returns whether an activation is there
PLACES: dict[str, Callable[[str], bool]] = {
    "vit_jax/layers.py: activation": _cases("vit_jax/layers.py"),
    "vit_torch/layers.py: activation": _cases("vit_torch/layers.py"),
    "vit_spec/cost.py: ACTIVATION_ARRAYS": _entries(ACTIVATION_ARRAYS),
    "vit_spec/parts.py: docstring of Mlp": lambda kind: f'"{kind}"' in (Mlp.__doc__ or ""),
    "parity/checkpoints/formats/timm_constructors.py: ACTIVATIONS": _entries(timm_constructors.ACTIVATIONS.values()),
    "parity/checkpoints/formats/hugging_face.py: ACTIVATIONS": _entries(hugging_face.ACTIVATIONS.values()),
    "parity/comparison/diagnosis/implementation_hypotheses.py: CONFIG_ACTIVATIONS": _entries(CONFIG_ACTIVATIONS),
}
# Place -> activations that do not belong there, because the library has no name for them
NAMELESS: dict[str, tuple[str, ...]] = {}


def places_without(kind: str) -> list[str]:
    """Return the places that lack an activation and need it."""
    return [place for place, has in PLACES.items() if not has(kind) and kind not in NAMELESS.get(place, ())]


@pytest.mark.parametrize("kind", UNGATED_ACTIVATIONS)
def test_every_place_has_the_activation(kind: str) -> None:
    missing = places_without(kind)
    assert not missing, "\n".join([f"{kind} is not in", *missing])


def test_an_activation_that_is_new_lacks_every_place() -> None:
    assert {*GATED_ACTIVATIONS, *UNGATED_ACTIVATIONS} == set(get_args(Activation))  # a gate is in places of its own
    assert places_without("a new one") == list(PLACES)


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("timm", "timm_config._ACTIVATION_NAMES"),
        ("timm-naflex", "timm_config._ACTIVATION_NAMES"),
        ("hf-vit", "hugging_face.ACTIVATIONS"),
    ],
)
def test_an_activation_that_has_no_name_in_a_library_is_not_stored_in_its_config(
    format: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.replace(mlp={"activation": "mish"})
    get(format).library.contents(config)
    monkeypatch.delitem(pkgutil.resolve_name(f"parity.checkpoints.formats.{names}"), "mish")
    with pytest.raises(InputError, match=r"'s? config.json cannot store mlp.activation='mish': write a file"):
        get(format).library.contents(config)
