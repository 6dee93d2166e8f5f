"""The JSON files that libraries put beside weights."""

from pathlib import Path
from typing import Any

from parity.checkpoints import metadata
from parity.checkpoints.containers import folders
from parity.checkpoints.containers.container import LFS_START, refuse_lfs_pointer
from parity.checkpoints.formats import hf_processor, open_clip_config
from vit_spec import InputError, bounded_json

COMPANION_FILES = ("config.json", *hf_processor.FILES, open_clip_config.FILE)
_ADAPTER_WEIGHTS = "adapter_model."  # begins the name of the file of an adapter
ADAPTER_FILE = "adapter_config.json"  # PEFT writes it with an adapter, which transformers adds to the weights

# A config.json that describes a model has at least one of these keys.
_MODEL_KEYS = frozenset(
    "model_type architecture architectures hidden_size embed_dim num_heads num_attention_heads n_heads num_hidden_layers "
    "layer_norm_eps hidden_act patch_size image_size img_size qkv_bias mlp_ratio global_pool model_args "
    "registered_name".split()  # of Keras
)


def read_companions(path: Path) -> dict[str, Any]:
    """Return the parsed JSON files beside weights, by name.

    Raises:
        InputError: a file cannot be read, or an adapter is beside the weights.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / ADAPTER_FILE).is_file():
        if path.name.startswith(_ADAPTER_WEIGHTS):
            raise InputError(
                f"{path.name} is an adapter (LoRA, PEFT), not a whole model: merge it into its base model, in PEFT by "
                f"merge_and_unload(), and save that model"
            )
        raise InputError(
            f"{folder / ADAPTER_FILE} says that these weights have an adapter, without which they compute another "
            f"function: merge it into them, in PEFT by merge_and_unload(), or remove the file"
        )
    notes: dict[str, Any] = {}
    for name in COMPANION_FILES:
        found = read_json_file(folder / name)
        if found and (name != "config.json" or _MODEL_KEYS & found.keys()):  # other programs have a config.json too
            notes[name] = found
        if {"recipe", "data"} <= found.keys():
            notes[metadata.RUN_NOTE] = found
    return notes


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; {} if there is no such file.

    Raises:
        InputError: the file is not JSON, is too large, or is not an object.
    """
    if not path.is_file():
        return {}
    try:
        return bounded_json.read_object(path, max_bytes=folders.MAX_JSON_BYTES)
    except InputError as error:
        with path.open("rb") as file:
            refuse_lfs_pointer(path, file.read(len(LFS_START)))
        raise InputError(f"{path} cannot be read as JSON ({error}): correct it or remove it") from None
