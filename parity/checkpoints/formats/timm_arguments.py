"""Read timm's config.json, or what its train.py keeps: which architecture, with which arguments.

timm builds a model from an architecture, a function that fixes arguments of a class, and from `model_args`, which go before
those.  `timm_architectures.json` holds class and arguments of every architecture of timm 1.0.31, as
`python -m benchmarks.timm_architectures` records them.  What the arguments make is in `timm_constructors`.  A field or an
architecture that is not known here is refused, because it may change the function.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/_builder.py (_update_default_model_kwargs), _hub.py
(_parse_model_cfg) and train.py.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from parity.checkpoints.formats import timm_constructors, timm_data
from parity.checkpoints.formats.format import Fields
from vit_spec import InputError, nearest
from vit_spec.models import IMAGENET

_RESAMPLING = ("bilinear", False), ("bicubic", True)  # of flexivit and RADIO, and of all others: kernel, antialias

# Arguments that train.py has a value for, whatever is asked of it.
_TRAIN_PY = ("model", "eval_metric", "checkpoint_hist", "recovery_interval", "train_interpolation")

# Keys of config.json: what is read, and what does not change the function.
_ROOT = frozenset("architecture num_classes num_features global_pool label_names label_descriptions labels model_args "
                  "pretrained_cfg license tags library_name".split())  # fmt: skip
_DATA = frozenset(
    "url file hf_hub_id hf_hub_filename source architecture tag custom_load input_size test_input_size min_input_size "
    "fixed_input_size interpolation crop_pct test_crop_pct crop_mode mean std num_classes label_offset label_names "
    "label_descriptions pool_size test_pool_size first_conv classifier license description origin_url paper_name paper_ids "
    "notes global_pool".split()
)


@cache
def architectures() -> dict[str, tuple[str, Fields]]:
    """Return the class and the arguments of each architecture, by name."""
    text = (files(__package__) / "timm_architectures.json").read_text()
    return {name: (cls, arguments) for name, (cls, arguments) in json.loads(text).items()}


def describes(notes: Mapping[str, Any]) -> bool:
    """Whether notes name an architecture and its arguments: config.json does, and so do checkpoints of timm's train.py.

    Those of other scripts may have `arch` and `args` as well, and do not tell what else went into the model.
    """
    if config := notes.get("config.json"):
        return "architecture" in config
    name = notes.get("arch")
    train_py = notes.get("version") == 2 and all(f"args/{argument}" in notes for argument in _TRAIN_PY)
    return isinstance(name, str) and name in architectures() and train_py and notes.get("args/model") == name


def told(notes: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields that config.json fixes, or what train.py keeps; none where neither is there.

    train.py keeps the architecture as `arch` and its own arguments, of which model_kwargs and gp (global_pool) reach the
    model (timm train.py, create_model).  It does not keep the size of images that an architecture's weights have.

    Raises:
        InputError: as `fields`.
    """
    if not describes(notes):
        return {}
    if config := notes.get("config.json"):
        return fields(config, channels)
    start = "args/model_kwargs/"
    given: dict[str, Any] = {}
    for name, value in notes.items():
        if name.startswith(start):
            argument, _, place = name.removeprefix(start).partition("/")  # a list is kept by its places: img_size/0
            given[argument] = [*given.get(argument, []), value] if place else value
    data = {"global_pool": notes["args/gp"]} if notes.get("args/gp") else {}
    found = fields({"architecture": notes["arch"], "pretrained_cfg": data, "model_args": given}, channels)
    unknown = {"num_classes", "in_channels", "pixels.mean", "pixels.std", *([] if "img_size" in given else ["image_size"])}
    return {name: value for name, value in found.items() if name not in unknown}


def fields(whole: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields of `ViTConfig` that a config.json of timm's fixes.

    Args:
        whole: the content of config.json.
        channels: how many the weights take.

    Raises:
        InputError: an architecture, a field, an argument or a value that is not known here; says which.
    """
    name, data = whole["architecture"], whole.get("pretrained_cfg", whole)
    given = whole.get("model_args") or {} if "pretrained_cfg" in whole else {}
    for what, value in (("architecture", name), ("pretrained_cfg", data), ("model_args", given)):
        expected = str if what == "architecture" else dict
        if not isinstance(value, expected):
            raise InputError(f"its config.json says {what} {value!r}: a JSON {expected.__name__} was expected")
    _hold_to_known("field", whole, _ROOT | _DATA if data is whole else _ROOT)
    if data is not whole:
        _hold_to_known("pretrained_cfg field", data, _DATA)
    if name not in architectures():
        hint = nearest(name, architectures()) or ""
        raise InputError(f"its config.json names timm's {name!r}, which is no ViT of timm 1.0.31{hint}: it cannot be read")
    cls, fixed = architectures()[name]
    data = {**data, "num_classes": whole.get("num_classes", data.get("num_classes"))}
    classes = given.get("num_classes") or data["num_classes"]
    if data["num_classes"] is not None and classes != data["num_classes"]:  # timm then draws another classifier
        raise InputError(
            f"its config.json says num_classes {data['num_classes']!r}, its model_args {classes!r}: correct one of the two"
        )
    taken = {**timm_data.card(whole), "num_classes": data["num_classes"]}
    found = timm_constructors.fields(cls, name, {**_from_data(taken), **fixed, **given})
    kernel, antialias = _RESAMPLING[not re.search(r"flexivit|radio", name)]
    resampling = {"resampling.kernel": kernel, "resampling.antialias": antialias, "resampling.align_corners": False}
    return {**found, **resampling, "resampling.offset": 0.0, **_pixels(data, channels)}


def _hold_to_known(what: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := [key for key in found if key not in known]:
        more = timm_constructors.others(unknown)
        raise InputError(
            f"its config.json has the {what} {unknown[0]!r}{more}, which is not known here and may change the function: "
            f"take it out if it does not"
        )


def _from_data(data: Mapping[str, Any]) -> Fields:
    """Return the arguments that timm takes from pretrained_cfg where neither architecture nor model_args has them."""
    found: dict[str, Any] = {}
    if data.get("input_size"):
        size = _numbers(data["input_size"], "input_size", 3)
        found["in_chans"] = size[0]
        if data.get("fixed_input_size"):
            found["img_size"] = size[1:]
    for name in ("num_classes", "global_pool"):
        if data.get(name) is not None:
            found[name] = data[name]
    return found


def _pixels(data: Mapping[str, Any], channels: int) -> Fields:
    """Return what images are normalised by; timm's own default where it is left out, whatever the architecture's is."""
    found: dict[str, Any] = {}
    for name in ("mean", "std"):
        if data.get(name) is None:
            found |= {f"pixels.{name}": getattr(IMAGENET, name)} if channels == 3 else {}
        else:
            values = data[name] if isinstance(data[name], list) else [data[name]]
            if len(values) not in (1, channels) or not all(type(value) in (int, float) for value in values):
                raise InputError(f"its config.json says {name} {data[name]!r}: 1 or {channels} numbers were expected")
            found[f"pixels.{name}"] = tuple(values[:1] if len(set(values)) == 1 else values)
    return found


def _numbers(value: Any, name: str, count: int) -> list[int]:
    if not isinstance(value, list | tuple) or [type(each) for each in value] != [int] * count:
        raise InputError(f"its config.json says {name} {value!r}: {count} whole numbers were expected")
    return list(value)
