"""The checkpoints of `train.jax`, which Orbax writes: their checks, and their training state, without jax."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.containers import ocdbt, orbax, zarr
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import KeyPath, StoredArray
from train.checkpoints.training_state import COLUMN, EMA, MEAN, ROW, SQUARE, WEIGHTS, TrainingState, without_placeholders
from vit_spec import InputError, ViTConfig, bounded_json

MAX_JSON_BYTES = 1 << 26  # of a metadata file of Orbax, for any number of devices
VERSION = 4  # of a checkpoint; increase it when the structure of the training state or the checksums change
WARMED_UP_EMA = 2  # the version from which the EMA is warmed up and contains no initial weights
MIXED_CHECKSUMS = 4  # the version from which checksums tell arrays with exchanged parts apart
OLDEST_READ = MIXED_CHECKSUMS  # the oldest version that `read_state` reads

# The parts of the training state by the names of fields in the states of `vit_jax.optimizer` and of optax.
_MOMENTS = {
    **{name: MEAN for name in ("mean", "mu", "trace", "ema")},
    **{name: SQUARE for name in ("square", "nu", "v")},
    "v_row": ROW,
    "v_col": COLUMN,
}
_COUNTS = ("updates", "count")
_CHUNK = 1 << 22  # words of which a checksum is computed at a time


def find_part(path: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the part of a training state and the key of the weights that an array of `train.jax` belongs to.

    path: the names of the array's place in the state.

    Returns:
        None for arrays that belong to no parameter, such as the number of updates.
    """
    if path[0] in (WEIGHTS, EMA):
        return path[0], "/".join(path[1:])
    at = next((n for n, name in enumerate(path) if name in _MOMENTS), None) if path[0] == "moments" else None
    return None if at is None or at + 1 == len(path) else (_MOMENTS[path[at]], "/".join(path[at + 1 :]))


def is_count(path: tuple[str, ...]) -> bool:
    """Return whether an array in the state of `train.jax` is the number of updates."""
    return path[0] == "moments" and path[-1] in _COUNTS and find_part(path) is None


def read_loop(path: Path) -> tuple[int, Any]:
    """Return the version of a checkpoint, and the state of the loop, as JSON.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    metadata = _read_metadata(path)
    return metadata["version"], metadata["note"]


def read_state(path: Path, config: ViTConfig) -> TrainingState:
    """Read a checkpoint; its arrays are verified now, and read again when they are used.

    Raises:
        OSError, ValueError: it is damaged, or cannot be read.
        InputError: tensorstore is not installed.
    """
    orbax.check_tensorstore(path)
    if damage := find_damage(path):
        raise ValueError(damage)
    check_tree(path)
    try:
        return _read_verified(path, config)
    except InputError as error:
        raise ValueError(_shorten(error, path)) from None


def _read_verified(path: Path, config: ViTConfig) -> TrainingState:
    """Read a checkpoint whose metadata can be opened, and verify its arrays."""
    metadata, arrays = _read_metadata(path), orbax.open_(path / "state").arrays
    expected = {_parse_keystr(name): checksum for name, checksum in metadata["digest"].items()}
    if lacking := expected.keys() ^ arrays.keys():
        raise ValueError(f"it has other arrays than its metadata say, such as {'/'.join(min(lacking))}")
    for key_path, array in arrays.items():
        if _checksum(array) != expected[key_path]:
            raise ValueError(f"the checksum of {'/'.join(key_path)} is wrong")
    parts: dict[str, dict[str, StoredArray]] = {}
    for key_path, array in arrays.items():
        if found := find_part(key_path):
            parts.setdefault(found[0], {})[found[1]] = array
    updates = {int(each) for key_path, array in arrays.items() if is_count(key_path) for each in np.ravel(array)}
    if len(updates) > 1:
        raise ValueError("its optimizer has several numbers of updates")
    step, sound = (np.asarray(arrays[(name,)]).item() for name in ("step", "sound"))
    moments = without_placeholders(parts, config, "jax")
    return TrainingState(config, "jax", moments, step, updates.pop() if updates else step, sound)


def find_damage(path: Path) -> str:
    """Return why a checkpoint must not be opened: damaged JSON files, pipes, devices or holes; "" if there is no reason."""
    state = path / "state"
    files = (path / "_CHECKPOINT_METADATA", path / "metrics" / "metrics", state / "_METADATA", state / "_sharding")
    for file in (*files, *(state / "array_metadatas").glob("process_*")):
        try:
            bounded_json.read_object(file, max_bytes=MAX_JSON_BYTES, allow_nan=True)
        except OSError:  # missing, or no permission: reported when the state is read
            continue
        except InputError:
            return "its metadata cannot be read"
    try:
        zarr.scan_files(path, Budget())
    except OSError:  # as above
        pass
    except InputError as error:
        return _shorten(error, path)
    return ""


def check_tree(path: Path) -> None:
    """Raise ValueError if the arrays of a checkpoint are damaged, or their description takes too much memory or time."""
    try:
        ocdbt.check_tree(path / "state")
    except InputError as error:
        raise ValueError(_shorten(error, path)) from None


def _shorten(error: InputError, path: Path) -> str:
    """Return the message of an error without its remedy and with paths below that of the checkpoint."""
    return str(error).rpartition(": ")[0].replace(f"{path}/", "")


def _read_metadata(path: Path) -> dict[str, Any]:
    """Return what `train.jax` has written into a checkpoint besides arrays."""
    try:
        found = bounded_json.read_object(path / "_CHECKPOINT_METADATA", max_bytes=MAX_JSON_BYTES, allow_nan=True)
    except InputError as error:
        raise ValueError(str(error)) from None
    metadata = found.get("custom_metadata")
    if not isinstance(metadata, dict) or not {"version", "note", "digest"} <= metadata.keys():
        raise ValueError("its metadata is not that of a run")
    return metadata


def _parse_keystr(text: str) -> KeyPath:
    """Return the names in a path as `jax.tree_util.keystr` writes it: ".params['head']['bias']", ".moments[0].mu"."""
    return tuple(next(filter(None, names)) for names in re.findall(r"\.(\w+)|\['([^']+)'\]|\[(\d+)\]", text))


def _checksum(array: StoredArray) -> int:
    """Return the sum modulo 2^32 of all words of an array, each mixed with its index: see `train.jax.checkpoints`."""
    words = np.dtype({1: "u1", 2: "u2"}.get(array.dtype.itemsize, "u4"))
    per_entry, total = array.dtype.itemsize // words.itemsize, 0
    for start in range(0, array.size, _CHUNK):
        found = array.read(start, min(start + _CHUNK, array.size)).view(words).astype(np.uint32)
        first = start * per_entry
        index = np.arange(first, first + len(found), dtype=np.uint64).astype(np.uint32)
        total += int(mix(found ^ mix(index)).sum(dtype=np.uint64))
    return total % 2**32


def mix(x: Any) -> Any:
    """Return a permutation of the integers below 2^32 in which each bit depends on all (lowbias32, by C. Wellons).

    x: an array of uint32, of numpy or jax.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
