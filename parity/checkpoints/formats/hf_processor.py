"""Preprocessing and class names in transformers' JSON files, read and written: preprocessor_config.json, id2label.

A model with text input has its image processor in processor_config.json instead; transformers reads this file first if both
exist.  Fields that are left out have the defaults of the processor's class.  The files do not choose the library that
resizes.  transformers 5 uses torchvision if it is installed.  Its kernels differ from Pillow's by one level of 255 in some
pixels, or by two in enlarged images.  With `backend="pil"`, transformers uses Pillow.

Sources: huggingface/transformers 5.23 image_processing_backends.py, image_processing_utils.py,
models/auto/image_processing_auto.py, models/*/image_processing_*.py, pipelines/image_classification.py.
"""

from collections.abc import Mapping
from typing import Any

from parity.checkpoints.preprocessing import Filter, Preprocessing, Resize
from vit_spec import InputError, ViTConfig
from vit_spec.models import CLIP, IMAGENET

FILE, NESTED = "preprocessor_config.json", "processor_config.json"
FILES = (FILE, NESTED)
RESAMPLE: dict[int, Filter] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # as PIL
PROBLEMS = {"single_label_classification": "classes", "multi_label_classification": "labels", "regression": "values"}

_HALF = {"image_mean": [0.5], "image_std": [0.5]}
_IMAGENET = {"image_mean": list(IMAGENET.mean), "image_std": list(IMAGENET.std)}
_CLIP = {"image_mean": list(CLIP.mean), "image_std": list(CLIP.std)}
_DEFAULTS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "do_center_crop": False,
}
_CENTER_CROPPED = {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": 224,
    "resample": 3,
}
_SQUASHED = {"size": 224, "resample": 2}
CLASSES: dict[str, dict[str, Any]] = {
    "ViT": {**_DEFAULTS, **_HALF, **_SQUASHED},
    "DeiT": {**_DEFAULTS, **_HALF, "size": 256, "do_center_crop": True, "crop_size": 224, "resample": 3},
    "Beit": {**_DEFAULTS, **_HALF, "size": 224, "resample": 3},
    "Bit": {**_DEFAULTS, **_CLIP, **_CENTER_CROPPED},
    "CLIP": {**_DEFAULTS, **_CLIP, **_CENTER_CROPPED},
    "Siglip": {**_DEFAULTS, **_HALF, "size": {"height": 224, "width": 224}, "default_to_square": False, "resample": 3},
    "DINOv3ViT": {**_DEFAULTS, **_IMAGENET, **_SQUASHED},
}
CLASS_BY_MODEL_TYPE = {  # for files that name no class
    **dict.fromkeys(("vit", "vit_mae"), "ViT"),
    **dict.fromkeys(("beit", "data2vec-vision"), "Beit"),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), "Bit"),
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIP"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "Siglip"),
    "deit": "DeiT",
    "dinov3_vit": "DINOv3ViT",
}
# Fields that do not change the input of the model.
_NEUTRAL_FIELDS = frozenset(
    "image_processor_type feature_extractor_type processor_class auto_map _valid_processor_keys data_format device "
    "input_data_format disable_grouping return_tensors do_convert_rgb backend use_fast image_seq_length".split()
)

_UNREAD_PIXELS = (
    "its mean and std are not read either, because they may give other pixels: state them with --set pixels.mean=M,M,M "
    "--set pixels.std=S,S,S"
)
_PADDING = (
    "where an image is padded by an odd number of pixels, transformers puts one more at the bottom and on the right, as is "
    'done here, and with backend="pil" at the top and on the left'
)


def processor_file(notes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the file that describes the image processor, and its content; {} if there is none.

    Raises:
        InputError: the image processor in processor_config.json is not an object.
    """
    nested = notes.get(NESTED) or {}
    if "image_processor" not in nested:
        return FILE, notes.get(FILE) or {}
    if not isinstance(found := nested["image_processor"], dict):
        raise InputError(f"its {NESTED} says image_processor {found!r}: an object was expected")
    return NESTED, found


def processor_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the image processor, with the defaults of its class; {} if no file describes one.

    Raises:
        InputError: an unknown class or none, or an unknown field that is not false.
    """
    file, found = processor_file(notes)
    if not found:
        return {}
    if not (name := _class_name(notes)):
        _supported_fields(notes)  # its error says that the pixel statistics are not read either
        raise InputError(f"{file} names no image_processor_type: supported are those of {', '.join(CLASSES)}")
    kind = name
    for ending in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        kind = kind.removesuffix(ending)
    if kind not in CLASSES:
        raise InputError(f"{file} is of a {name}, supported are those of {', '.join(CLASSES)}: {_UNREAD_PIXELS}")
    return {**CLASSES[kind], **_supported_fields(notes)}


def _class_name(notes: Mapping[str, Any]) -> str:
    """Return the class of the image processor, which the file or the type of the model names; "" if neither does."""
    (_, found), config = processor_file(notes), notes.get("config.json") or {}
    name = found.get("image_processor_type") or found.get("feature_extractor_type")
    kind = str(config.get("model_type") or "")
    return str(name) if name else CLASS_BY_MODEL_TYPE.get(kind) or (f"processor of {kind}" if kind else "")


def _supported_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the file that are not null.

    Raises:
        InputError: an unknown field that is not false.
    """
    file, found = processor_file(notes)
    given = _non_null_fields(found)
    known = {*CLASSES["Bit"], "default_to_square"} | _NEUTRAL_FIELDS
    unknown = [key for key, value in given.items() if key not in known and value is not False]
    unknown = [key for key in unknown if key != "pad_size"]  # it has no effect without `do_pad`
    if unknown:
        raise InputError(f"{file} says {unknown[0]}={given[unknown[0]]!r}, which is not supported: {_UNREAD_PIXELS}")
    return given


def _non_null_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, and all flags.  A flag that is null is off: transformers tests its truth."""
    flags = {key: bool(value) for key, value in found.items() if key.startswith("do_")}
    return {key: value for key, value in found.items() if value is not None} | flags


def pixel_fields(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in `ViTConfig.pixels` that the file of the image processor states; {} if there is none.

    An unknown class or an unknown field may compute other pixels from the same mean and std: EfficientNet's processor with
    `rescale_offset` subtracts 1, and with `include_top` it divides by std again.  Then the result is {}, so the pixel
    statistics are assumptions.  If the class is not named, it is one of `CLASSES`, whose `_DEFAULTS` are the same.

    A rescale_factor f other than 1/255 changes mean and std, because
    (f x - mean) / std = (x / 255 - mean / (255 f)) / (std / (255 f)).

    Raises:
        InputError: a value that is not a number.
    """
    file, found = processor_file(notes)
    if not found:
        return {}
    try:
        read = processor_fields(notes) if _class_name(notes) else {**_DEFAULTS, **_supported_fields(notes)}
    except InputError:  # `preprocessing` raises it again, and it is reported as not read
        return {}
    if not read["do_normalize"]:
        read |= {"image_mean": [0.0], "image_std": [1.0]}
    if "image_mean" not in read or "image_std" not in read:
        return {}
    factor = read["rescale_factor"] if read["do_rescale"] else 1
    if type(factor) not in (int, float) or not factor > 0:
        raise InputError(f"its {file} says rescale_factor {factor!r}: a positive number was expected")
    scale = 1.0 if factor == 1 / 255 else 255 * factor
    fields = {}
    for ours, theirs in (("pixels.mean", "image_mean"), ("pixels.std", "image_std")):
        values = read[theirs] if isinstance(read[theirs], list) else [read[theirs]]
        if not values or not all(type(value) in (int, float) for value in values):
            raise InputError(f"its {file} says {theirs} {read[theirs]!r}: numbers were expected")
        fields[ours] = tuple(value / scale for value in (values[:1] if len(set(values)) == 1 else values))
    return fields


def preprocessing(notes: Mapping[str, Any]) -> Preprocessing | None:
    """Return the preprocessing of the image processor; None if there is none.

    Raises:
        InputError: `Preprocessing` cannot express it.
    """
    file, _ = processor_file(notes)
    if not (read := processor_fields(notes)):
        return None
    if read["resample"] not in RESAMPLE:
        raise InputError(f"{file} says resample {read['resample']!r}: a number from 0 to 5 was expected")
    filter, crop = RESAMPLE[read["resample"]], None
    if read["do_center_crop"]:
        crop = _parse_size(read["crop_size"], True, f"{file} says crop_size")
    if not read["do_resize"]:
        if crop is None:
            raise InputError(f"{file} neither resizes nor crops: images must have their size already")
        return Preprocessing(size=crop, resize="none", resized=crop, filter=filter, rounding="down")
    size = read["size"]
    if isinstance(size, dict) and size.keys() == {"shortest_edge"}:
        size, square = size["shortest_edge"], False
    else:
        square = not isinstance(size, int) or read.get("default_to_square", True)
    resized = _parse_size(size, True, f"{file} says size")
    if not square and crop is None:
        raise InputError(f"{file} resizes the shorter side to {size} and does not crop: its outputs have many sizes")
    how: Resize = "squash" if square else "shortest"
    return Preprocessing(size=crop or resized, resize=how, resized=resized, filter=filter, rounding="down")


def _parse_size(value: Any, square: bool, message_start: str) -> tuple[int, int]:
    """Return a size in JSON as (height, width).

    Args:
        value: the JSON value.
        square: whether a single number is accepted, for a square.
        message_start: the beginning of the error message.

    Raises:
        InputError: the value is not a size.
    """
    if isinstance(value, dict) and value.keys() == {"height", "width"}:
        value = [value["height"], value["width"]]
    sides = [value, value] if isinstance(value, int) and square else value
    if not isinstance(sides, list) or [type(side) for side in sides] != [int, int]:
        raise InputError(f"{message_start} {value!r}: one side, or height and width were expected")
    return sides[0], sides[1]


def rounding_difference(notes: Mapping[str, Any]) -> str:
    """Return a remark about the rounding in which the processor differs from this project; "" if it does not."""
    file, found = processor_file(notes)
    if "DINOv3ViT" not in str(found.get("image_processor_type")):
        return ""
    return f"{file}: its processor resizes in float32, whereas here pixels are rounded to 8 bits after resizing"


def padding_difference(notes: Mapping[str, Any]) -> str:
    """Return a remark that the two backends of the processor pad differently; "" if it does not pad or cannot be read."""
    try:
        how = preprocessing(notes)
    except InputError:
        return ""
    return f"{processor_file(notes)[0]}: {_PADDING}" if how and how.has_odd_padding else ""


def labels(config: Mapping[str, Any]) -> Any:
    """Return id2label of config.json; None if there is none, or if it has only transformers' placeholders LABEL_0, ..."""
    names = config.get("id2label")
    if isinstance(names, dict) and all(name == f"LABEL_{number}" for number, name in names.items()):
        return None
    return names


def task(config: Mapping[str, Any], outputs: int) -> str:
    """Return the task that transformers' pipeline assumes for the outputs of a model, a value of `PROBLEMS`.

    Args:
        config: the content of config.json.
        outputs: the number of outputs.

    Raises:
        InputError: an unknown `problem_type`.
    """
    problem = config.get("problem_type")
    if problem is not None and problem not in PROBLEMS:
        raise InputError(f"problem_type of config.json is {problem!r}: one of {', '.join(PROBLEMS)} was expected")
    return "labels" if outputs == 1 and problem != "regression" else PROBLEMS.get(problem or "", "classes")


# Writing --------------------------------------------------------------------------------------------------------------


def with_metadata(
    files: Mapping[str, Any],
    config: ViTConfig,
    *,
    labels: tuple[str, ...] | None,
    task: str,
    preprocessing: Preprocessing | None,
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the JSON files with preprocessing and class names added, and a line for each thing they cannot express."""
    content, lost = dict(files["config.json"]), []
    outputs, classifies = config.num_classes, "id2label" in content
    if labels and classifies:
        content["id2label"] = {str(number): name for number, name in enumerate(labels)}
        content["label2id"] = {name: number for number, name in reversed([*enumerate(labels)])}
        if twice := outputs - len(content["label2id"]):
            lost.append(f"{twice} classes have the name of an earlier class: label2id of config.json has the first of each")
    elif labels:
        lost.append("names of classes are not written, because this model of transformers has no classifier")
    if classifies and task != "classes":
        content["problem_type"] = {ours: theirs for theirs, ours in PROBLEMS.items()}[task]
    if classifies and outputs == 1 and task == "classes":
        lost.append("transformers' pipeline puts a single output through a sigmoid, and not through a softmax")
    if config.in_channels != 3:
        lost.append("transformers' pipeline opens images in RGB: give the processor arrays with the model's channels")
    fields, fields_lost = _processor_json(preprocessing, config.in_channels)
    return {**files, "config.json": content, FILE: {**files[FILE], **fields}}, lost + fields_lost


def _processor_json(how: Preprocessing | None, in_channels: int) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of preprocessor_config.json for resize and crop, and a line for each thing it cannot express."""
    if how is None:
        return {}, [f"the preprocessing of images is unknown: {FILE} resizes the whole image to the model's size"]
    lost = []
    if how.resize in ("cover", "border"):
        lost.append(
            f"no processor of transformers can express this preprocessing: {how}; {FILE} resizes the whole image instead"
        )
        how = Preprocessing(size=how.size, resize="squash", resized=how.size, filter=how.filter, rounding="down")
    filters = {ours: theirs for theirs, ours in RESAMPLE.items()}
    if how.filter not in filters:
        lost.append(f"transformers has no filter {how.filter}: {FILE} has bilinear, with antialiasing")
    elif how.filter in ("box", "hamming") and how.resize != "none":
        lost.append(f'torchvision has no filter {how.filter}: open the folder with AutoImageProcessor(..., backend="pil")')
    if how.rounding != "down" and how.affected_by_rounding != "no":
        moved = f"{how.affected_by_rounding} images move by a pixel"
        lost.append(f"transformers rounds the corner of a crop down, here it is rounded half to even: {moved}")
    if how.has_odd_padding:
        lost.append(_PADDING)
    resized = dict(zip(("height", "width"), how.resized, strict=True))
    size = {"shortest_edge": min(how.resized)} if how.resize == "shortest" else resized
    kind = "Bit" if how.resize != "squash" else "DeiT" if how.crops_or_pads else "ViT"
    fields: dict[str, Any] = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": how.resize != "none",
        "size": size,
    }
    fields |= {"resample": filters.get(how.filter, 2)}
    if how.crops_or_pads:
        fields |= {"do_center_crop": True, "crop_size": dict(zip(("height", "width"), how.size, strict=True))}
    if kind == "Bit" and in_channels != 3:
        fields["do_convert_rgb"] = False
    return fields, lost
