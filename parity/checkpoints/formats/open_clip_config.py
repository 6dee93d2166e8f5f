"""Read open_clip_config.json, which OpenCLIP stores beside its weights: the image tower and the preprocessing.

An unknown field, or a value that changes the function, is refused.  Text towers are not read.  `timm_config` describes an
image tower that is a model of timm.

Source: open_clip 3.3.0, src/open_clip/model.py (CLIPVisionCfg, _build_vision_tower), timm_model.py (TimmModel),
transform.py (PreprocessCfg, image_transform), factory.py and push_to_hf_hub.py.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.preprocessing import Filter, Preprocessing, center_crop
from vit_spec import InputError
from vit_spec.models import CLIP

FILE = "open_clip_config.json"

_MODEL_FIELDS = frozenset(
    "embed_dim vision_cfg text_cfg quick_gelu custom_text init_logit_scale init_logit_bias nonscalar_logit_scale "
    "cast_dtype output_dict".split()
)
_TOWER_DEFAULTS: Fields = {  # the fields of vision_cfg that are read, with OpenCLIP's defaults
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
    "ls_init_value": None,
    "act_kwargs": None,
    "norm_kwargs": None,
    "pool_type": "tok",
    "no_ln_pre": False,
    "final_ln_after_pool": False,
}
_POOLS = {"tok": "token", "avg": "mean", "none": "none"}
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {  # any other value changes the function
    "timm_model_name": (None, ""),
    "attentional_pool": (False,),
    "pos_embed_type": ("learnable", "sin_cos_2d"),  # either is a table in the weights
    "block_type": (None, "default"),
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
}
# Fields that act in training only, select outputs, or belong to a feature that `_REQUIRED_VALUES` excludes.
_NEUTRAL_FIELDS = frozenset(
    "patch_dropout output_tokens attn_pooler_queries attn_pooler_heads timm_model_pretrained timm_pool "
    "timm_proj timm_proj_bias timm_drop timm_drop_path".split()
)


def config_fields(notes: Mapping[str, Any]) -> Fields:
    """Return the fields of `ViTConfig` that open_clip_config.json states; none if there is no such file.

    Raises:
        InputError: an unknown field or value; names it.
    """
    if not (whole := notes.get(FILE)):
        return {}
    model, tower = _known_parts(whole)
    for name, values in _REQUIRED_VALUES.items():
        if name in tower and not any(type(tower[name]) is type(value) and tower[name] == value for value in values):
            _refuse(f"vision_cfg.{name}", tower[name])
    read = {**_TOWER_DEFAULTS, **tower}
    for name in ("layers", "width", "head_width"):
        if type(read[name]) is not int or read[name] < 1:  # a list of layers is a ResNet's
            _refuse(f"vision_cfg.{name}", read[name])
    if type(read["mlp_ratio"]) not in (int, float):
        _refuse("vision_cfg.mlp_ratio", read["mlp_ratio"])
    if (pool := read["pool_type"]) not in _POOLS:
        _refuse("vision_cfg.pool_type", pool)
    for name in ("no_ln_pre", "final_ln_after_pool"):
        if type(read[name]) is not bool:
            _refuse(f"vision_cfg.{name}", read[name])
    if pool == "avg" and read["final_ln_after_pool"]:  # the norm of a single token is the same before and after pooling
        _refuse("vision_cfg.final_ln_after_pool True with pool_type", pool)
    return {
        "image_size": _parse_size(read["image_size"], "image_size"),
        "patch_size": _parse_size(read["patch_size"], "patch_size"),
        "width": read["width"],
        "depth": read["layers"],
        "num_heads": read["width"] // read["head_width"],
        "mlp_dim": int(read["width"] * read["mlp_ratio"]),
        "head.pool": _POOLS[pool],
        "positions.rotary": "none",
        "mlp.activation": _activation(model.get("quick_gelu", False), read["act_kwargs"]),
        "norms.eps": _eps(read["norm_kwargs"]),
        "norms.layer_scale": read["ls_init_value"],
        "norms.before_blocks": not read["no_ln_pre"],
        "resampling.kernel": "bicubic",
        "resampling.antialias": True,
        "resampling.align_corners": False,
        "resampling.offset": 0.0,
        **_pixels(whole),
    }


def timm_config(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's config.json for an image tower that is a model of timm; {} if open_clip_config.json names none.

    TimmModel passes timm_pool to the model that it creates, unless a projection follows it and timm_pool is empty.

    Raises:
        InputError: an unknown field or value; names it.
    """
    if not (whole := notes.get(FILE)):
        return {}
    model, tower = _known_parts(whole)
    if not (name := tower.get("timm_model_name")):
        return {}
    pool, projection, embedding = tower.get("timm_pool", "avg"), tower.get("timm_proj", "linear"), model.get("embed_dim")
    if projection not in (None, "", "none", "linear"):  # "mlp" has two layers
        raise InputError(f"its {FILE} says vision_cfg.timm_proj {projection!r}: only 'none', 'linear' and null are read")
    if type(embedding) is not int:
        raise InputError(f"its {FILE} says embed_dim {embedding!r}: a whole number was expected")
    return {
        "architecture": name,
        "num_classes": 0 if projection == "none" else embedding,
        "model_args": {} if projection == "linear" and not pool else {"global_pool": pool},
        "pretrained_cfg": {
            "input_size": [3, *_parse_size(tower.get("image_size", _TOWER_DEFAULTS["image_size"]), "image_size")],
            "fixed_input_size": True,
            **{field.removeprefix("pixels."): list(values) for field, values in _pixels(whole).items()},
        },
    }


def preprocessing(notes: Mapping[str, Any]) -> Preprocessing:
    """Return OpenCLIP's preprocessing for this model.

    Raises:
        InputError: `Preprocessing` cannot express it.
    """
    tower, config = _object(_object(notes[FILE], "model_cfg"), "vision_cfg"), _preprocess_cfg(notes[FILE])
    size = _parse_size(tower.get("image_size", _TOWER_DEFAULTS["image_size"]), "image_size")
    mode, filters = config.get("resize_mode", "shortest"), ("bicubic", "bilinear", "random")
    if config.get("interpolation", "bicubic") not in filters:
        raise InputError(f"{FILE} says interpolation {config['interpolation']!r}: one of {', '.join(filters)} was expected")
    filter: Filter = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    if mode == "squash":
        return Preprocessing(size=size, resize="squash", resized=size, filter=filter)
    if mode != "shortest":  # "longest" pads with black, whereas `Preprocessing` pads with the mean colour
        raise InputError(f"{FILE} says resize_mode {mode!r}, which is not supported")
    if filter != "bicubic" and size[0] != size[1]:
        raise InputError(
            f"{FILE} says interpolation {filter!r} for {size}: OpenCLIP 3.3 uses bicubic for sizes that are not square"
        )
    return center_crop(size, filter=filter)


def _known_parts(whole: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return model_cfg and its vision_cfg, which have known fields only."""
    _refuse_unknown(FILE, whole, frozenset({"model_cfg", "preprocess_cfg"}))
    model = _object(whole, "model_cfg")
    _refuse_unknown("model_cfg", model, _MODEL_FIELDS)
    tower = _object(model, "vision_cfg")
    _refuse_unknown("vision_cfg", tower, frozenset({*_TOWER_DEFAULTS, *_REQUIRED_VALUES, *_NEUTRAL_FIELDS}))
    return model, tower


def _activation(quick: Any, options: Any) -> str:
    """Return the activation of the MLPs, to whose constructor OpenCLIP passes `options`."""
    if type(quick) is not bool:
        _refuse("quick_gelu", quick)
    if options in (None, {}):
        return "quick_gelu" if quick else "gelu"
    if quick or options not in ({"approximate": "tanh"}, {"approximate": "none"}):
        _refuse("vision_cfg.act_kwargs", options)
    return "gelu_tanh" if options["approximate"] == "tanh" else "gelu"


def _eps(options: Any) -> float:
    if options in (None, {}):
        return 1e-5
    if not isinstance(options, dict) or [*options] != ["eps"] or type(options["eps"]) is not float:
        _refuse("vision_cfg.norm_kwargs", options)
    return float(options["eps"])


def _pixels(whole: Mapping[str, Any]) -> Fields:
    """Return the fields in `pixels`: mean and standard deviation for the normalization."""
    config, found = _preprocess_cfg(whole), {}
    for name, default in (("mean", CLIP.mean), ("std", CLIP.std)):
        values = config.get(name) or list(default)
        values = values if isinstance(values, list) else [values]
        if len(values) not in (1, 3) or not all(type(value) in (int, float) for value in values):
            raise InputError(f"its {FILE} says {name} {config[name]!r}: 3 numbers were expected")
        found[f"pixels.{name}"] = tuple(values[:1] if len(set(values)) == 1 else values)
    return found


def _preprocess_cfg(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return preprocess_cfg without the fields that are null, which OpenCLIP ignores too."""
    config = _object({"preprocess_cfg": {}, **whole}, "preprocess_cfg")
    return {name: value for name, value in config.items() if value is not None}


def _object(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(found := whole.get(name), dict):
        raise InputError(f"its {FILE} says {name} {found!r}: an object was expected")
    return found


def _refuse_unknown(where: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := [name for name in found if name not in known]:
        raise InputError(
            f"its {FILE} has {', '.join(map(repr, unknown[:6]))} in {where}, which is not supported and may change the "
            f"function: remove it if it does not"
        )


def _parse_size(value: Any, name: str) -> tuple[int, int]:
    sides = value if isinstance(value, list) else [value, value]
    if [type(side) for side in sides] != [int, int]:
        raise InputError(f"its {FILE} says {name} {value!r}: one or two numbers were expected")
    return sides[0], sides[1]


def _refuse(name: str, value: Any) -> NoReturn:
    raise InputError(
        f"its {FILE} says {name} {value!r}, which this format does not read: if ViTConfig can express it, change what "
        f"`python -m parity formats --show openai-clip` prints, and give that file with --format-file and --from"
    )
