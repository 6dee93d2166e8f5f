"""Read timm's config.json, or the checkpoint of its train.py: the architecture and its arguments.

timm builds a model from an architecture, which is a function that fixes arguments of a class, and from `model_args`, which
override those.  `timm_architectures.json` has the class and the arguments of every architecture of timm 1.0.31;
`python -m benchmarks.timm_architectures` writes it.  `timm_constructors` turns arguments into fields of `ViTConfig`.  An
unknown field or architecture is refused, because it may change the function.

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

_RESAMPLING = ("bilinear", False), ("bicubic", True)  # (kernel, antialias) of FlexiViT and RADIO, then of all others

# Arguments that have a value in every checkpoint of train.py.
_TRAIN_PY_ARGUMENTS = ("model", "eval_metric", "checkpoint_hist", "recovery_interval", "train_interpolation")

# Keys of config.json that are read, or that do not change the function.
_ROOT_KEYS = frozenset("architecture num_classes num_features global_pool label_names label_descriptions labels model_args "
                  "pretrained_cfg license tags library_name".split())  # fmt: skip
_DATA_KEYS = frozenset(
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


def names_architecture(notes: Mapping[str, Any]) -> bool:
    """Return whether the notes name an architecture and its arguments, as config.json and checkpoints of train.py do.

    Checkpoints of other scripts may have `arch` and `args` too, but not all arguments of the model.
    """
    if config := notes.get("config.json"):
        return "architecture" in config
    return _is_of_train_py(notes) and _architecture_of_train_py(notes) in architectures()


def _is_of_train_py(notes: Mapping[str, Any]) -> bool:
    """Return whether the notes are those of a checkpoint of train.py."""
    train_py = notes.get("version") == 2 and all(f"args/{argument}" in notes for argument in _TRAIN_PY_ARGUMENTS)
    return train_py and isinstance(notes.get("arch"), str) and notes.get("args/model") == notes["arch"]


def fields_of_notes(notes: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields that config.json or the checkpoint of train.py states; none if there is neither.

    Args:
        notes: the metadata of the file, and the parsed JSON files beside it.
        channels: the input channels of the weights.

    Raises:
        InputError: as `config_fields`, gp contradicts model_kwargs, or the checkpoint contradicts its config.json.
    """
    if not names_architecture(notes):
        return {}
    if not (config := notes.get("config.json")):
        return _train_py_fields(notes, channels)
    found = config_fields(config, channels)
    if _is_of_train_py(notes):
        if _architecture_of_train_py(notes) not in architectures():
            raise InputError(
                f"its arch {notes['arch']!r} is no ViT of timm 1.0.31, so it may be another model than that of the "
                f"config.json beside it: move the weights to another folder"
            )
        for name, value in _train_py_fields(notes, channels).items():
            if found.get(name, value) != value:
                raise InputError(
                    f"its arch and args say {name}={value!r}, but the config.json beside it says {found[name]!r}: correct "
                    f"config.json, or move the weights to another folder"
                )
    return found


def _architecture_of_train_py(notes: Mapping[str, Any]) -> str:
    """Return the architecture without the tag of the weights that training began with."""
    return str(notes["arch"]).partition(".")[0]


def _train_py_fields(notes: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields that a checkpoint of train.py states.

    train.py stores the architecture as `arch`, and its own arguments.  It calls create_model(model, global_pool=gp, ...,
    **model_kwargs), which drops arguments that are None; the others override those of the architecture.  An empty gp is a
    value: no pooling.  The classes of ViTs do not accept drop_block, bn_momentum and bn_eps, so these are None.  drop,
    drop_path and the arguments that begin with head_init act in training only.  train.py does not store pretrained_cfg, so
    the pixel statistics are not read, and the image size only if model_kwargs has img_size.  The tensors show the number of
    classes and the input channels.

    Raises:
        InputError: as `config_fields`, or gp contradicts model_kwargs.
    """
    prefix = "args/model_kwargs/"
    given: dict[str, Any] = {}
    for name, value in notes.items():
        if name.startswith(prefix):
            argument, _, index = name.removeprefix(prefix).partition("/")  # each entry of a list has a note: img_size/0
            given[argument] = [*given.get(argument, []), value] if index else value
    if (pool := notes.get("args/gp")) is not None:
        if given.setdefault("global_pool", pool) != pool:  # train.py passes both, which Python refuses
            raise InputError(
                f"its args say gp={pool!r}, but its model_kwargs say global_pool={given['global_pool']!r}: remove one of "
                f"the two"
            )
    found = config_fields(
        {"architecture": _architecture_of_train_py(notes), "pretrained_cfg": {}, "model_args": given}, channels
    )
    unknown = {"num_classes", "in_channels", "pixels.mean", "pixels.std", *([] if "img_size" in given else ["image_size"])}
    return {name: value for name, value in found.items() if name not in unknown}


def config_fields(whole: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields of `ViTConfig` that timm's config.json states.

    Args:
        whole: the content of config.json.
        channels: the input channels of the weights.

    Raises:
        InputError: an unknown architecture, field, argument or value; names it.
    """
    name, data = whole["architecture"], whole.get("pretrained_cfg", whole)
    given = whole.get("model_args") or {} if "pretrained_cfg" in whole else {}
    for what, value in (("architecture", name), ("pretrained_cfg", data), ("model_args", given)):
        expected = str if what == "architecture" else dict
        if not isinstance(value, expected):
            raise InputError(f"its config.json says {what} {value!r}: a JSON {expected.__name__} was expected")
    _refuse_unknown("field", whole, _ROOT_KEYS | _DATA_KEYS if data is whole else _ROOT_KEYS)
    if data is not whole:
        _refuse_unknown("pretrained_cfg field", data, _DATA_KEYS)
    if name not in architectures():
        hint = nearest(name, architectures()) or ""
        raise InputError(f"its config.json names timm's {name!r}, which is no ViT of timm 1.0.31{hint}: it cannot be read")
    cls, fixed = architectures()[name]
    data = {**data, "num_classes": whole.get("num_classes", data.get("num_classes"))}
    classes = given.get("num_classes") or data["num_classes"]
    if data["num_classes"] is not None and classes != data["num_classes"]:  # timm then makes a new random classifier
        raise InputError(
            f"its config.json says num_classes {data['num_classes']!r}, its model_args {classes!r}: correct one of the two"
        )
    effective_data = {**timm_data.data_config(whole), "num_classes": data["num_classes"]}
    found = timm_constructors.config_fields(cls, name, {**_arguments_of_data(effective_data), **fixed, **given})
    pool = whole.get("global_pool") if data is not whole else None  # timm writes it and does not read it
    if pool and timm_constructors.POOLS.get(pool) != found["head.pool"]:
        raise InputError(
            f"its config.json says global_pool {pool!r}, but its model_args and architecture give another pool: add "
            f"global_pool to model_args"
        )
    kernel, antialias = _RESAMPLING[not re.search(r"flexivit|radio", name)]
    resampling = {"resampling.kernel": kernel, "resampling.antialias": antialias, "resampling.align_corners": False}
    return {**found, **resampling, "resampling.offset": 0.0, **_pixels(data, channels)}


def _refuse_unknown(what: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := [key for key in found if key not in known]:
        more = timm_constructors.and_more(unknown)
        raise InputError(
            f"its config.json has the {what} {unknown[0]!r}{more}, which is not supported and may change the function: "
            f"remove it if it does not"
        )


def _arguments_of_data(data: Mapping[str, Any]) -> Fields:
    """Return the arguments that timm takes from pretrained_cfg if neither the architecture nor model_args has them."""
    found: dict[str, Any] = {}
    if data.get("input_size"):
        size = _parse_integers(data["input_size"], "input_size", 3)
        found["in_chans"] = size[0]
        if data.get("fixed_input_size"):
            found["img_size"] = size[1:]
    for name in ("num_classes", "global_pool"):
        if data.get(name) is not None:
            found[name] = data[name]
    return found


def _pixels(data: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields in `pixels`.  Values that are left out are timm's defaults, and not those of the architecture."""
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


def _parse_integers(value: Any, name: str, count: int) -> list[int]:
    if not isinstance(value, list | tuple) or [type(each) for each in value] != [int] * count:
        raise InputError(f"its config.json says {name} {value!r}: {count} whole numbers were expected")
    return list(value)
