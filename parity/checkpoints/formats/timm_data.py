"""Preprocessing and class names in timm's config.json, read and written.

Fields that are left out have the defaults of timm's `PretrainedCfg`, not those of the architecture.

Sources: huggingface/pytorch-image-models 1.0.31 timm/models/_pretrained.py, _hub.py; timm/data/config.py,
transforms_factory.py (`transforms_imagenet_eval`).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.preprocessing import Preprocessing, center_crop, infer_share, size_before_crop
from vit_spec import InputError, ViTConfig

RESIZES_OF_CROP_MODE = {"center": ("shortest", "cover"), "squash": ("squash",), "border": ("border",)}
FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
DEFAULT_CROP_PCT = 0.875


def data_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data config in config.json, from any of the places where timm looks for it.

    If the model accepts one image size only, the size in the model's arguments overrides the size in the data config
    (_hub.py, _parse_model_cfg), because earlier versions of timm exported the size of the weights that training began with.
    """
    found = config.get("pretrained_cfg", config)
    found = dict(found) if isinstance(found, dict) else {}
    given = config.get("model_args") if "pretrained_cfg" in config else None
    given = given if isinstance(given, dict) else {}
    if given.get("dynamic_img_size") or given.get("use_naflex"):
        found["fixed_input_size"] = False
    if given.get("img_size") is not None and found.get("fixed_input_size"):
        size = given["img_size"]
        channels = (found.get("input_size") or [3])[0]
        found["input_size"] = [channels, *(size if isinstance(size, list) else [size, size])]
    return found


def labels(config: Mapping[str, Any]) -> Any:
    """Return the class names as config.json has them, a list or an object by number; None if it has none."""
    return next(
        (part[key] for part in (config, data_config(config)) for key in ("label_names", "labels") if part.get(key)), None
    )


def unread_labels(config: Mapping[str, Any]) -> str:
    """Return a remark that descriptions of the classes are not read; "" if there are none."""
    has_descriptions = any(part.get("label_descriptions") for part in (config, data_config(config)))
    return "label_descriptions of config.json: only the names of classes are read" if has_descriptions else ""


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing of `timm.data.create_transform` for this model.

    Raises:
        InputError: a value that timm does not accept, or a random interpolation.
    """
    data = data_config(config)
    size = data.get("input_size") or (3, 224, 224)
    part: Any = data.get("crop_pct") or DEFAULT_CROP_PCT
    filter: Any = data.get("interpolation") or "bicubic"
    if not isinstance(size, (list, tuple)) or len(size) != 3 or not all(type(side) is int for side in size):
        raise InputError(f"input_size of config.json is {size!r}: channels, height and width were expected")
    if type(part) not in (int, float) or not 0.01 <= part <= 100:
        raise InputError(f"crop_pct of config.json is {part!r}: a fraction was expected")
    if filter not in FILTERS:
        raise InputError(f"interpolation of config.json is {filter!r}: one of {', '.join(FILTERS)} was expected")
    found = center_crop((size[1], size[2]), part, filter)
    mode = data.get("crop_mode")
    if mode not in ("squash", "border"):  # timm treats any other value as its default
        return found
    return Preprocessing(size=found.size, resize=mode, resized=size_before_crop(found.size, part), filter=filter)


def with_metadata(
    files: Mapping[str, Any],
    config: ViTConfig,
    *,
    labels: tuple[str, ...] | None,
    task: str,
    preprocessing: Preprocessing | None,
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the JSON files with preprocessing and class names added, and a line for each thing timm cannot express."""
    content, lost = dict(files["config.json"]), []
    if labels:
        content["label_names"] = list(labels)
    if task != "classes":
        lost.append(f"timm's config.json cannot express that outputs are {task}: it takes them for classes")
    data, data_lost = _data_json(preprocessing, config.image_size)
    content["pretrained_cfg"] = {**content["pretrained_cfg"], **data}
    return {**files, "config.json": content}, lost + data_lost


def _data_json(how: Preprocessing | None, size: tuple[int, int]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `pretrained_cfg` for the preprocessing, and a line for each thing that it cannot express."""
    if how is None:
        default = f"timm's default, a center crop of {DEFAULT_CROP_PCT} and bicubic"
        return {"crop_pct": DEFAULT_CROP_PCT}, [f"the preprocessing of images is unknown: config.json has {default}"]
    lost = []
    if how.size != size:
        lost.append(
            f"images of {how.size[0]}x{how.size[1]} are fed to a model of {size[0]}x{size[1]}, which timm does not do: it "
            f"resizes them to the model's size; --image-size {how.size[0]}x{how.size[1]} makes it a model of that size"
        )
        how = how.for_size(size)
    mode = next((mode for mode, kinds in RESIZES_OF_CROP_MODE.items() if how.resize in kinds), None)
    part = infer_share(how.size, how.resized)
    if mode == "center" and part and how.resize != center_crop(how.size, part).resize:
        part = None
    if mode is None or part is None:
        return {"crop_pct": 1.0}, [
            *lost,
            f"timm cannot express this preprocessing: {how}; config.json has a center crop of the whole image",
        ]
    filter = how.filter
    if filter not in FILTERS:
        lost.append(f"timm has no filter {filter}: config.json has bilinear, with antialiasing")
        filter = "bilinear"
    if how.rounding != "even" and how.affected_by_rounding != "no":
        lost.append(
            "timm rounds the corner of a crop half to even, here it is rounded down: "
            f"{how.affected_by_rounding} images move by a pixel"
        )
    return {"interpolation": filter, "crop_pct": part, "crop_mode": mode}, lost
