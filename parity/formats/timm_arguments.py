"""Read timm's config.json: the function that an architecture and its arguments make.

timm builds a model from an architecture, a function that fixes arguments of a class, and from `model_args`, which go before
those.  `timm_architectures.json` holds class and arguments of every architecture of timm 1.0.31, as
`python -m benchmarks.timm_architectures` records them.  The functions below follow the constructors of the classes: from
all arguments together to the fields of `ViTConfig`.  An architecture, an argument or a value that is not known here is
refused, because it may change the function.

Sources: huggingface/pytorch-image-models 1.0.31, timm/models/vision_transformer.py (VisionTransformer), deit.py
(VisionTransformerDistilled), eva.py (Eva), _builder.py (_update_default_model_kwargs) and _hub.py (_parse_model_cfg).
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from parity.formats.format import Fields
from vit_spec import InputError, nearest
from vit_spec.models import IMAGENET

POOLS = {"token": "token", "avg": "mean", "map": "attention", "": "none"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "identity": "none"}
_RESAMPLING = ("bilinear", False), ("bicubic", True)  # of flexivit and RADIO, and of all others: kernel, antialias

# Keys of config.json: what is read, and what does not change the function.
_ROOT = frozenset("architecture num_classes num_features global_pool label_names label_descriptions labels model_args "
                  "pretrained_cfg license tags library_name".split())  # fmt: skip
_DATA = frozenset(
    "url file hf_hub_id hf_hub_filename source architecture tag custom_load input_size test_input_size min_input_size "
    "fixed_input_size interpolation crop_pct test_crop_pct crop_mode mean std num_classes label_offset label_names "
    "label_descriptions pool_size test_pool_size first_conv classifier license description origin_url paper_name paper_ids "
    "notes global_pool".split()
)

# Arguments that act in training alone, or that only allow other sizes of images.
_NEUTRAL = frozenset(
    "drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init fix_init "
    "dynamic_img_size head_init_scale rope_shift_coords rope_jitter_coords rope_rescale_coords".split()
)

# The arguments of each class that are read, with the class's own defaults.
_COMMON: Fields = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "dynamic_img_pad": False,
    "norm_layer": None,
}
_VIT: Fields = {
    **_COMMON,
    "global_pool": "token",
    "proj_bias": True,
    "pos_embed": "learn",
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "act_layer": None,
    "mlp_layer": None,
}
_EVA: Fields = {
    **_COMMON,
    "global_pool": "avg",
    "qkv_fused": True,
    "swiglu_mlp": False,
    "swiglu_align_to": 0,
    "attn_type": "eva",
    "num_reg_tokens": 0,
    "use_abs_pos_emb": True,
    "use_rot_pos_emb": False,
    "rope_type": "cat",
    "rope_temperature": 10000.0,
    "use_pre_transformer_norm": False,
    "use_post_transformer_norm": None,
    "use_fc_norm": None,
    "attn_pool_num_heads": None,
    "attn_pool_mlp_ratio": None,
}

# Arguments that a class takes at these values alone; at any other they are another function.
_VIT_ONLY: Mapping[str, tuple[Any, ...]] = {
    "block_fn": (None, "Block"),
    "attn_layer": (None, "", "Attention"),
    "embed_layer": (None, "PatchEmbed"),
    "embed_norm_layer": (None, ""),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "use_naflex": (None, False),
}
_EVA_ONLY: Mapping[str, tuple[Any, ...]] = {
    "scale_mlp": (False,),
    "scale_attn_inner": (False,),
    "use_post_norm": (False,),
    "attn_only_layer_scale": (False,),
    "use_naflex": (None, False),
}
_ROTARY: Mapping[str, tuple[Any, ...]] = {  # with DINOv3's positions, which are the ones that ViTConfig has
    "rope_grid_offset": (0, 0.0),
    "rope_grid_indexing": ("ij",),
    "rope_rotate_half": (True,),
}
_OF_ROTARY = frozenset({*_ROTARY, "rope_type", "rope_temperature", "ref_feat_shape", "rope_mrope_section"})


@cache
def architectures() -> dict[str, tuple[str, Fields]]:
    """Return the class and the arguments of each architecture, by name."""
    text = (files(__package__) / "timm_architectures.json").read_text()
    return {name: (cls, arguments) for name, (cls, arguments) in json.loads(text).items()}


def describes(notes: Mapping[str, Any]) -> bool:
    """Whether notes name an architecture and its arguments: config.json does, and so do checkpoints of timm's train.py."""
    if config := notes.get("config.json"):
        return "architecture" in config
    name = notes.get("arch")
    argued = any(note.startswith("args/") for note in notes) and notes.get("args/model", name) == name
    return isinstance(name, str) and name in architectures() and argued


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
    if cls not in _READ:
        raise InputError(
            f"its config.json names timm's {name}, a {cls}, for which ViTConfig has no word: it cannot be read"
        )
    data = {**data, "num_classes": whole.get("num_classes", data.get("num_classes"))}
    classes = given.get("num_classes") or data["num_classes"]
    if data["num_classes"] is not None and classes != data["num_classes"]:  # timm then draws another classifier
        raise InputError(
            f"its config.json says num_classes {data['num_classes']!r}, its model_args {classes!r}: correct one of the two"
        )
    try:
        found = _READ[cls](_Arguments(name, {**_from_data(data), **fixed, **given}))
    except InputError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(
            f"its config.json has arguments of the wrong type ({error}): correct it, or take it away"
        ) from None
    kernel, antialias = _RESAMPLING[not re.search(r"flexivit|radio", name)]
    resampling = {"resampling.kernel": kernel, "resampling.antialias": antialias, "resampling.align_corners": False}
    return {**found, **resampling, "resampling.offset": 0.0, **_pixels(data, channels)}


def _hold_to_known(what: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := [key for key in found if key not in known]:
        raise InputError(
            f"its config.json has the {what} {unknown[0]!r}{_others(unknown)}, which is not known here and may change the "
            f"function: take it out if it does not"
        )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more: {', '.join(map(repr, names[1:6]))})" if len(names) > 1 else ""


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


class _Arguments:
    """All arguments of a class, taken out one by one; whatever nobody has taken is unknown."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        self.architecture, self.values = architecture, values
        self._defaults: dict[str, Any] = {}

    def read(self, defaults: Fields) -> dict[str, Any]:
        """Return the arguments that have these names, those left out with their defaults."""
        self._defaults |= defaults
        return {name: self.values.get(name, default) for name, default in defaults.items()}

    def hold_to(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse arguments of these names that have another value than those allowed."""
        for name, values in allowed.items():
            if name in self.values and not any(_same(self.values[name], value) for value in values):
                self.refuse(name)

    def hold_to_names(self, *known: frozenset[str] | Mapping[str, Any]) -> None:
        """Refuse arguments of other names."""
        if unknown := [name for name in self.values if not any(name in names for names in (_NEUTRAL, *known))]:
            self.refuse(unknown[0], _others(unknown))

    def refuse(self, name: str, more: str = "") -> None:
        """Refuse an argument as it is."""
        raise InputError(
            f"it is timm's {self.architecture} with {name}={self.values.get(name, self._defaults.get(name))!r}{more}, for "
            f"which ViTConfig has no word: it cannot be read"
        )


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _vit(given: _Arguments) -> Fields:
    """Return the fields of `VisionTransformer`."""
    given.hold_to(_VIT_ONLY)
    given.hold_to_names(_VIT, _VIT_ONLY)
    a = given.read(_VIT)
    pool, prefix = a["global_pool"], a["class_token"] + a["reg_tokens"]
    if pool not in POOLS:
        given.refuse("global_pool")
    if a["pool_include_prefix"] and prefix and pool in ("avg", "map"):
        given.refuse("pool_include_prefix")
    if not a["proj_bias"]:
        given.refuse("proj_bias")
    if a["pos_embed"] not in ("", "none", "learn"):
        given.refuse("pos_embed")
    after_pool = pool == "avg" if a["fc_norm"] is None else bool(a["fc_norm"])
    found = _common(given, a)
    return {
        **found,
        "tokens.registers": a["reg_tokens"],
        "tokens.patch_bias": not a["pre_norm"],
        "positions.kind": "learned" if a["pos_embed"] == "learn" else "none",
        "positions.rotary": "none",
        **({"positions.covers": _covers(a)} if a["pos_embed"] == "learn" else {}),
        "attention.qkv_bias": "qkv" if a["qkv_bias"] else "none",
        "mlp.activation": _activation(given, a, pool),
        "mlp_dim": int(a["embed_dim"] * a["mlp_ratio"]) // (2 if _gated(a) else 1),
        "norms.before_blocks": bool(a["pre_norm"]),
        "norms.after_blocks": bool(a["final_norm"]) and not after_pool,
        "norms.after_pool": bool(a["final_norm"]) and after_pool,
        "norms.layer_scale": a["init_values"] or None,
    }


def _distilled(given: _Arguments) -> Fields:
    """Return the fields of `VisionTransformerDistilled`, which ends after `norm` and knows no registers."""
    found = _vit(given)
    a = given.read(_VIT)
    for name, allowed in (("global_pool", "token"), ("reg_tokens", 0), ("class_token", True), ("no_embed_class", False)):
        if a[name] != allowed:
            given.refuse(name)
    if a["fc_norm"] or a["pos_embed"] != "learn":
        given.refuse("fc_norm" if a["fc_norm"] else "pos_embed")
    return {**found, "tokens.distillation": True}


def _eva(given: _Arguments) -> Fields:
    """Return the fields of `Eva`."""
    given.hold_to(_EVA_ONLY)
    given.hold_to_names(_EVA, _EVA_ONLY, _OF_ROTARY, {"num_kv_heads": None})
    a = given.read(_EVA)
    pool, prefix = a["global_pool"], a["class_token"] + a["num_reg_tokens"]
    if pool not in POOLS or (pool == "map" and prefix):  # whose query reads the tokens ahead of the patches too
        given.refuse("global_pool")
    if a["attn_type"] not in ("eva", "rope"):
        given.refuse("attn_type")
    if not a["qkv_fused"]:
        given.refuse("qkv_fused")
    if given.values.get("num_kv_heads") not in (None, a["num_heads"]):
        given.refuse("num_kv_heads")
    if pool == "map":
        _hold_pool_to_blocks(given, a)
    if a["use_rot_pos_emb"]:
        if a["rope_type"] != "dinov3":
            given.refuse("rope_type")
        for name, values in _ROTARY.items():
            defaults = {"rope_grid_offset": 0.0, "rope_grid_indexing": "ij", "rope_rotate_half": False}
            if given.values.get(name, defaults[name]) not in values:
                given.refuse(name)
    after_pool = pool == "avg" if a["use_fc_norm"] is None else bool(a["use_fc_norm"])
    after_blocks = a["use_post_transformer_norm"]
    bias = ("qv" if a["attn_type"] == "eva" else "qkv") if a["qkv_bias"] else "none"
    hidden, align = int(a["embed_dim"] * a["mlp_ratio"]), a["swiglu_align_to"]
    return {
        **_common(given, a),
        "tokens.registers": a["num_reg_tokens"],
        "tokens.patch_bias": not a["use_pre_transformer_norm"],
        "positions.kind": "learned" if a["use_abs_pos_emb"] else "none",
        **({"positions.covers": _covers(a)} if a["use_abs_pos_emb"] else {}),
        "positions.rotary": "dinov3" if a["use_rot_pos_emb"] else "none",
        "positions.rotary_base": float(a["rope_temperature"]),
        "attention.qkv_bias": bias,
        "mlp.activation": "swiglu" if a["swiglu_mlp"] else "gelu",
        "mlp_dim": hidden + (-hidden % align if a["swiglu_mlp"] and align else 0),
        "norms.before_blocks": bool(a["use_pre_transformer_norm"]),
        "norms.after_blocks": not after_pool if after_blocks is None else bool(after_blocks),
        "norms.after_pool": after_pool,
        "norms.layer_scale": a["init_values"],
    }


_READ: dict[str, Callable[[_Arguments], Fields]] = {
    "VisionTransformer": _vit,
    "VisionTransformerDistilled": _distilled,
    "Eva": _eva,
}


def _common(given: _Arguments, a: Mapping[str, Any]) -> Fields:
    """Return the fields of what all classes have."""
    size, patch = a["img_size"], a["patch_size"]
    return {
        "image_size": tuple(size) if isinstance(size, list | tuple) else (size, size),
        "patch_size": tuple(patch) if isinstance(patch, list | tuple) else (patch, patch),
        "in_channels": a["in_chans"],
        "num_classes": a["num_classes"],
        "width": a["embed_dim"],
        "depth": a["depth"],
        "num_heads": a["num_heads"],
        "tokens.class_token": bool(a["class_token"]),
        "tokens.pad": bool(a["dynamic_img_pad"]),
        "attention.qk_norm": bool(a["qk_norm"]),
        "norms.eps": _eps(given),
        "head.pool": POOLS[a["global_pool"]],
    }


def _covers(a: Mapping[str, Any]) -> str:
    return "none" if a["no_embed_class"] else "all"


def _eps(given: _Arguments) -> float:
    """Return eps of the norms, which are layer normalisations or refused.  timm's LayerNorm has 1e-6 (layers/norm.py)."""
    name = given.values.get("norm_layer")
    found = re.fullmatch(r"(\w+)(?:\(eps=([\d.e-]+)\))?", str(name or "layernorm"))
    if not found or found[1].replace("_", "").lower() != "layernorm":
        given.refuse("norm_layer")
    return float(found[2] or 1e-6) if found else 0.0


def _gated(a: Mapping[str, Any]) -> bool:
    return str(a["mlp_layer"] or "").startswith(("GluMlp", "SwiGLUPacked"))


def _activation(given: _Arguments, a: Mapping[str, Any], pool: str) -> str:
    """Return the activation of the MLPs; blocks hand theirs over to whatever their MLP is."""
    name = str(a["act_layer"] or "gelu").lower()
    if _gated(a):
        if name != "silu" or a["mlp_layer"] != "GluMlp(act_layer=SiLU, gate_last=False)":
            given.refuse("act_layer" if name != "silu" else "mlp_layer")
        if pool == "map":
            given.refuse("mlp_layer")
        return "swiglu"
    if a["mlp_layer"] not in (None, "Mlp"):
        given.refuse("mlp_layer")
    if name not in ACTIVATIONS:
        given.refuse("act_layer")
    return ACTIVATIONS[name]


def _hold_pool_to_blocks(given: _Arguments, a: Mapping[str, Any]) -> None:
    """Refuse a pooling attention with heads or an MLP that are not those of the blocks."""
    if (a["attn_pool_num_heads"] or a["num_heads"]) != a["num_heads"]:
        given.refuse("attn_pool_num_heads")
    if (a["attn_pool_mlp_ratio"] or a["mlp_ratio"]) != a["mlp_ratio"] or a["swiglu_mlp"]:
        given.refuse("attn_pool_mlp_ratio" if not a["swiglu_mlp"] else "swiglu_mlp")
