"""What timm's config.json says of images and of classes, both ways.

Fields that are left out have timm's own defaults: those of `PretrainedCfg`, whatever the architecture's are.

Sources: huggingface/pytorch-image-models 1.0.31 timm/models/_pretrained.py, _hub.py; timm/data/config.py,
transforms_factory.py (`transforms_imagenet_eval`).
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.preprocessing import Preprocessing, central, floored, share
from vit_spec import InputError, ViTConfig

MODES = {"center": ("shortest", "cover"), "squash": ("squash",), "border": ("border",)}
FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
SHARE = 0.875


def card(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says of the data, wherever it stands in it, as timm takes it.

    The size of images that is an argument of the model goes before that of the data, of a model that takes no other
    (_hub.py, _parse_model_cfg): exports of earlier versions kept the size of the weights that training began with.
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
    """Return the names of the classes as config.json has them, a list or by number; None where it has none."""
    return next((part[key] for part in (config, card(config)) for key in ("label_names", "labels") if part.get(key)), None)


def unread(config: Mapping[str, Any]) -> str:
    """Say what of the classes is not read; "" where all is."""
    described = any(part.get("label_descriptions") for part in (config, card(config)))
    return "label_descriptions of config.json: the names of classes travel, and not their descriptions" if described else ""


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """Return how `timm.data.create_transform` prepares an image for this model.

    Raises:
        InputError: a value that timm could not use, or one that is drawn at random.
    """
    told = card(config)
    size = told.get("input_size") or (3, 224, 224)
    part: Any = told.get("crop_pct") or SHARE
    filter: Any = told.get("interpolation") or "bicubic"
    if not isinstance(size, (list, tuple)) or len(size) != 3 or not all(type(side) is int for side in size):
        raise InputError(f"input_size of config.json is {size!r}: channels, height and width were expected")
    if type(part) not in (int, float) or not 0.01 <= part <= 100:
        raise InputError(f"crop_pct of config.json is {part!r}: a share was expected")
    if filter not in FILTERS:
        raise InputError(f"interpolation of config.json is {filter!r}: one of {', '.join(FILTERS)} was expected")
    found = central((size[1], size[2]), part, filter)
    mode = told.get("crop_mode")
    if mode not in ("squash", "border"):  # timm takes any other word for its default
        return found
    return Preprocessing(size=found.size, resize=mode, resized=floored(found.size, part), filter=filter)


def described(
    files: Mapping[str, Any],
    config: ViTConfig,
    *,
    labels: tuple[str, ...] | None,
    task: str,
    preprocessing: Preprocessing | None,
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the files with the preprocessing and the classes, and a line for each thing that timm cannot say."""
    content, lost = dict(files["config.json"]), []
    if labels:
        content["label_names"] = list(labels)
    if task != "classes":
        lost.append(f"timm's config.json has no word for outputs that are {task}: it takes them for classes")
    said, unsaid = _data(preprocessing, config.image_size)
    content["pretrained_cfg"] = {**content["pretrained_cfg"], **said}
    return {**files, "config.json": content}, lost + unsaid


def _data(how: Preprocessing | None, size: tuple[int, int]) -> tuple[dict[str, Any], list[str]]:
    """Return what `pretrained_cfg` says of the preparation of images, and what it cannot."""
    if how is None:
        said = f"timm's own, {SHARE} of the image, bicubic"
        return {"crop_pct": SHARE}, [f"nothing says how images are prepared: config.json has what is {said}"]
    lost = []
    if how.size != size:
        lost.append(
            f"images of {how.size[0]}x{how.size[1]} are shown to a model of {size[0]}x{size[1]}, which timm does not: it "
            f"prepares them larger or smaller; --image-size {how.size[0]}x{how.size[1]} makes it a model of that size"
        )
        how = how.at(size)
    mode = next((mode for mode, kinds in MODES.items() if how.resize in kinds), None)
    part = share(how.size, how.resized)
    if mode == "center" and part and how.resize != central(how.size, part).resize:
        part = None
    if mode is None or part is None:
        return {"crop_pct": 1.0}, [*lost, f"timm has no word for a preparation that is {how}: it takes the middle whole"]
    filter = how.filter
    if filter not in FILTERS:
        lost.append(f"timm has no filter {filter}: config.json has bilinear, which smooths before it shrinks")
        filter = "bilinear"
    if how.rounding != "even" and how.shifted != "no":
        lost.append(
            f"timm rounds the corner of a crop half to even, here it goes down: {how.shifted} images move by a pixel"
        )
    return {"interpolation": filter, "crop_pct": part, "crop_mode": mode}, lost
