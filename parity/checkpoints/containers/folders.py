"""Folders with several weight files: the file that the library of the folder reads.

A folder often has more than one weight file, for example those of two libraries, or an exponential moving average.  The
names in this module are those that libraries look for, in the order in which they look:
transformers 5 `modeling_utils._get_resolved_checkpoint_files`, timm 1.0 `models._hub._PREFERRED_FILES`, and OpenCLIP.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from parity.checkpoints.containers.header_checks import quote, quote_names
from parity.checkpoints.containers.shards import INDEX
from vit_spec import InputError

CONFIG_FILE, OPEN_CLIP_CONFIG_FILE = "config.json", "open_clip_config.json"
MAX_JSON_BYTES = 1 << 24  # of a JSON file beside weights; the names of 21,843 classes take 3 MB in config.json
FLAX_FILE = "flax_model.msgpack"  # the weights of a Flax model in a folder of transformers
BEST_FILE, NEWEST_FILE = "best.safetensors", "weights.safetensors"
RUN_FILES = (BEST_FILE, NEWEST_FILE)  # the weights in a run folder of this project

_TRANSFORMERS = (
    *("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}"),
    *(FLAX_FILE, f"{FLAX_FILE}{INDEX}"),  # of version 4
)
_OPEN_CLIP = tuple(
    f"open_clip_{name}"
    for name in ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin", "pytorch_model.pth")
)
_TIMM = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth", *_OPEN_CLIP)

_MORE_SUFFIXES = (".pth.tar",)  # weight files whose last suffix is not that of a container; timm writes them


def library_file(names: Collection[str], config: Mapping[str, Any]) -> str | None:
    """Return the name that the library of a folder looks for first among those that exist; None if there is none.

    Args:
        names: the names of the files in the folder.
        config: the parsed config.json of the folder, which shows the library; {} if it is not known.

    Raises:
        InputError: config.json names a weight file that does not exist.
    """
    if "model_type" in config and (named := config.get("transformers_weights")) is not None:
        if named not in names:
            raise InputError(f"says transformers_weights={quote(str(named))} in {CONFIG_FILE}, which is missing: fetch it")
        return str(named)
    run_files = RUN_FILES if NEWEST_FILE in names else ()  # in other folders, best.safetensors may be another program's
    if {"recipe", "data"} <= config.keys():
        order: Sequence[str] = (*RUN_FILES, *_TRANSFORMERS, *_TIMM)
    elif "architecture" in config and "model_type" not in config:
        order = (*_TIMM, *_TRANSFORMERS, *run_files)
    elif OPEN_CLIP_CONFIG_FILE in names and "model_type" not in config and (config or CONFIG_FILE not in names):
        order = (*_OPEN_CLIP, *_TIMM, *_TRANSFORMERS, *run_files)
    else:
        order = (*_TRANSFORMERS, *_TIMM, *run_files)
    return next((name for name in order if name in names), None)


def only_file(
    names: Collection[str],
    suffixes: Collection[str],
    shards_of: Callable[[str], Collection[str]],
    others: Sequence[str] = (),
) -> str | None:
    """Return the only weight file, of whatever container; None if there is none.

    An index and its shards count as one file, which is the index.

    Args:
        names: the names of the files in the folder.
        suffixes: the suffixes of the files of all containers.
        shards_of: returns the names of the shards of an index.
        others: names of subfolders that are checkpoints as well.

    Raises:
        InputError: there are several; the message lists them.
    """
    indexes = [name for name in names if name.endswith(tuple(f"{suffix}{INDEX}" for suffix in suffixes))]
    shards = {shard for index in indexes for shard in shards_of(index)}
    files = [name for name in names if name.endswith((*suffixes, *_MORE_SUFFIXES)) and name not in shards]
    candidates = [*sorted((*indexes, *files)), *others]
    if len(candidates) > 1:
        raise InputError(f"holds {len(candidates)} candidates ({quote_names(candidates)}): give the path of one")
    return candidates[0] if candidates else None
