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
from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.formats.timm_signatures import and_more
from vit_spec import InputError, nearest
from vit_spec.models import IMAGENET

_RESAMPLING = ("bilinear", False), ("bicubic", True)  # (kernel, antialias) of FlexiViT and RADIO, then of all others
_ALIGNED_CORNERS = r"(base|huge)_patch16_radio_v3"  # of _RADIO_ALIGN_CORNERS in vision_transformer.py

# Until timm 1.0.14 the MLPs of these architectures had the exact GELU, and no file tells which version trained it.
_ACTIVATION_CHANGED = ("vit_so400m_patch16_siglip_256", "vit_so400m_patch16_siglip_gap_256")

# Arguments that have a value in every checkpoint of train.py.
_TRAIN_PY_ARGUMENTS = ("model", "eval_metric", "checkpoint_hist", "recovery_interval", "train_interpolation")
# All arguments of train.py, in every version of timm until 1.0.31.  Those that act on the model are read.
_KNOWN_ARGUMENTS = frozenset(
    "aa alpha_kd amp amp_dtype amp_impl aot_autograd apex_amp aug_repeat aug_repeats aug_splits base_scale batch_size "
    "bce_loss bce_pos_weight bce_sum bce_target_thresh bn_eps bn_momentum bn_tf channels_last checkpoint_hist class_map "
    "clip_grad clip_mode color_jitter color_jitter_prob config cooldown_epochs crop_pct cutmix cutmix_minmax data "
    "data_dir dataset dataset_download dataset_trust_remote_code decay_epochs decay_milestones decay_rate device "
    "device_modules dist_bn distill_loss_weight distributed drop drop_block drop_connect drop_path dynamo "
    "dynamo_backend epoch_repeats epochs eval_metric experiment fast_norm fuser gaussian_blur_prob gp grad_accum_steps "
    "grad_checkpointing grayscale_prob head_init_bias head_init_scale hflip img_size in_chans initial_batch_size "
    "initial_checkpoint input_img_mode input_key input_size interpolation iters_to_accum jsd jsd_loss kd_distill_type "
    "kd_loss_type kd_model_name kd_student_feature_dim kd_teacher_feature_dim kd_temperature kd_token_distill_type "
    "layer_decay layer_decay_min_scale layer_decay_no_opt_scale local_rank log_interval log_wandb lr lr_base "
    "lr_base_scale lr_base_size lr_cycle_decay lr_cycle_limit lr_cycle_mul lr_k_decay lr_noise lr_noise_pct "
    "lr_noise_std mean milestones min_lr mixup mixup_elem mixup_mode mixup_off_epoch mixup_prob mixup_switch_prob model "
    "model_dtype model_ema model_ema_decay model_ema_force_cpu model_ema_warmup model_kwargs momentum naflex_loader "
    "naflex_loss_scale naflex_max_seq_len naflex_patch_size_probs naflex_patch_sizes naflex_patchify_channels_first "
    "naflex_train_seq_lens native_amp no_aug no_ddp_bb no_prefetcher no_resume_opt num_classes num_gpu opt opt_betas "
    "opt_eps opt_kwargs output patience_epochs pin_mem prefetcher pretrained pretrained_path rank ratio recount "
    "recovery_interval reduce_bn remode repp reprob resplit resume save_images scale sched sched_on_updates seed "
    "smoothing split_bn start_epoch std sync_bn synchronize_step target_key task_loss_weight torchcompile "
    "torchcompile_mode torchscript train_batch_sizes train_batches_per_epoch train_crop_mode train_img_sizes "
    "train_interpolation train_num_samples train_size_probs train_size_random_mix train_size_schedule "
    "train_size_schedule_spread train_split tta use_kd_only_loss use_multi_epochs_loader use_wandb val_interval "
    "val_num_samples val_split validation_batch_size validation_batch_size_multiplier variable_batch_loss_scale vflip "
    "wandb_project wandb_project_name wandb_resume_id wandb_tags warmup_epochs warmup_lr warmup_prefix weight_decay "
    "worker_seeding workers world_size".split()
)

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
    return _is_of_train_py(notes) and _architecture_of_train_py(notes) in architectures() and not foreign_arguments(notes)


def foreign_arguments(notes: Mapping[str, Any]) -> list[str]:
    """Return the arguments in the checkpoint of a train.py that timm's does not have: a fork may build another model."""
    if not _is_of_train_py(notes):
        return []
    names = {name.split("/")[1] for name in notes if name.startswith("args/")}
    return sorted(names - _KNOWN_ARGUMENTS)


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


def likely_fields(notes: Mapping[str, Any], channels: int) -> Fields:
    """Return the fields that the checkpoint of a fork of train.py states, if timm's train.py reads its arguments so.

    Args:
        notes: see `fields_of_notes`.
        channels: see `fields_of_notes`.

    Raises:
        InputError: as `fields_of_notes`.
    """
    if "config.json" in notes or not foreign_arguments(notes) or _architecture_of_train_py(notes) not in architectures():
        return {}
    return _train_py_fields(notes, channels)


def class_of(notes: Mapping[str, Any]) -> str:
    """Return the class of the architecture that the notes name; "" if they name none, or an unknown one."""
    config = notes.get("config.json", {})
    name = config.get("architecture") if config else notes.get("arch")
    return architectures()[name][0] if isinstance(name, str) and (name := without_tag(name)) in architectures() else ""


def changed_fields(notes: Mapping[str, Any]) -> Fields:
    """Return the fields that follow from the architecture, but had another value in earlier versions of timm."""
    if not names_architecture(notes):
        return {}
    config = notes.get("config.json")
    name = without_tag(config["architecture"]) if config else _architecture_of_train_py(notes)
    return {"mlp.activation": "gelu_tanh"} if name in _ACTIVATION_CHANGED else {}


def _architecture_of_train_py(notes: Mapping[str, Any]) -> str:
    """Return the architecture without the tag of the weights that training began with."""
    return without_tag(str(notes["arch"]))


def without_tag(name: str) -> str:
    """Return the name of an architecture without the tag of its weights: timm accepts "vit_base_patch16_224.augreg"."""
    return name.partition(".")[0]


def check_spelling(notes: Mapping[str, Any], width: int, depth: int) -> None:
    """Raise InputError if config.json names an unknown architecture and one of this width and depth has a similar name."""
    name = notes.get("config.json", {}).get("architecture")
    if isinstance(name, str) and (name := without_tag(name)) not in architectures():
        similar = [
            each for each, (_, fixed) in architectures().items() if (fixed["embed_dim"], fixed["depth"]) == (width, depth)
        ]
        if hint := nearest(name, similar):
            raise InputError(f"its config.json names timm's {name!r}, which is no ViT of timm 1.0.31{hint}")


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
        channels: the input channels of the weights; 0 if the tensors do not show them.

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
    if (name := without_tag(name)) not in architectures():
        raise InputError(f"its config.json names timm's {name!r}, which is no ViT of timm 1.0.31: it cannot be read")
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
    aligned = re.search(_ALIGNED_CORNERS, name) is not None
    resampling = {"resampling.kernel": kernel, "resampling.antialias": antialias, "resampling.align_corners": aligned}
    channels = channels or found["in_channels"]
    if name in _ACTIVATION_CHANGED and "act_layer" not in given:  # see `changed_fields`
        found = {field: value for field, value in found.items() if field != "mlp.activation"}
    return {**resampling, **found, "resampling.offset": 0.0, **_pixels(data, channels)}


def _refuse_unknown(what: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := [key for key in found if key not in known]:
        more = and_more(unknown)
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
