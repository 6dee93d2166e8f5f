"""Weights on disk, to read: any container, any format, held to their config."""

import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from parity import containers, hub
from parity.containers import Contents
from parity.formats import Fields
from parity.formats import get as get_format
from parity.inference import Assumption, Untold, infer, nested
from parity.recognition import Match, joined, recognise
from parity.weights import Checkpoint, check
from vit_spec import InputError, ViTConfig, bounded_json, nearest

WEIGHTS = "weights.safetensors"  # what a run folder calls them
BESIDE = "parity.json"  # the config where there is no room for it: in a folder, or after a file's own name beside it
FLAX = "flax_model.msgpack"  # what transformers calls the weights of its Flax models
COMPANIONS = ("config.json", "preprocessor_config.json")  # what Hugging Face and timm keep beside weights

Source = str | PathLike[str]

_END = 1 << 20  # bytes


def load(path: Source, *, format: str | None = None, given: Fields | None = None) -> Checkpoint:
    """Open weights: a file or folder in any container and format, a run folder, or "hf://owner/name".

    Their arrays are read when they are used.  A config that the file does not bring is inferred; what was assumed in
    doing so is in `Checkpoint.assumed`.

    Args:
        path: where they are.
        format: the name of their format; by default it is recognised.
        given: fields of the config to set against what the file says, dotted as in {"norms.eps": 1e-5}.

    Raises:
        InputError: nothing there, a damaged file, weights in no known format, or not of the config that came with them.
    """
    path = existing(path)
    try:
        contents = containers.open(path)
        notes = {name: note for name, note in contents.notes.items() if name not in COMPANIONS}  # which are files' names
        return checkpoint(contents, {**notes, **_beside(path)}, format, given or {})
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def checkpoint(contents: Contents, notes: Mapping[str, Any], format: str | None, given: Fields) -> Checkpoint:
    """Return the weights in a container, held to the config that `notes` bring or that is inferred.

    Raises:
        InputError: as `load`.
    """
    name = notes.get("layout", notes.get("format", "pt"))  # where "format" has to be "pt", as it is in files of others
    if isinstance(notes.get("config"), str) and isinstance(name, str) and name != "pt" and format is None:
        config = ViTConfig.from_json(notes["config"])
        arrays = joined(contents.arrays, get_format(name).separator)
        found = Checkpoint(config.replace(**nested(given)), name, arrays, contents.container)
    else:
        match, config, assumed = _sensible(recognise(contents.arrays, notes, format), given)
        name = match.format.full_name(config)
        found = Checkpoint(config, name, match.arrays, contents.container, assumed, match.left)
    check(found)
    return found


def _sensible(matches: list[Match], given: Fields) -> tuple[Match, ViTConfig, tuple[Assumption, ...]]:
    """Return the first reading of a file that makes a model, and that model's config.

    Raises:
        InputError: none does, or the likeliest lacks what has to be given.
    """
    refusals = []
    for match in matches:
        try:
            return match, *infer(match.format, match.evidence, given)
        except InputError as error:
            refusals.append(error)
            if isinstance(error, Untold):
                break
    raise refusals[0]


def existing(source: Source) -> Path:
    """Return the file or folder of a name: in the cache of a hub, in a run folder, or as it is.

    Raises:
        InputError: there is none; says the nearest name in the same folder.
    """
    if str(source).startswith("hf://"):
        return hub.resolve(str(source))
    path = Path(source)
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    if path.exists():
        return path
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.name[0] != "."] if folder.is_dir() else []
    hint = nearest(path.name, names) or (": check the path" if folder.is_dir() else f": there is no folder {folder}")
    raise InputError(f"no file {path}{hint}")


def _beside(path: Path) -> dict[str, Any]:
    """Return what the files beside weights say: by the name of the file, and of our own what it holds."""
    folder = path if path.is_dir() else path.parent
    notes: dict[str, Any] = {}
    for name in COMPANIONS:
        found = _json(folder / name)
        of_a_model = name != "config.json" or "model_type" in found or "architecture" in found  # not of some other program
        if found and of_a_model:
            notes[name] = found
    inside = [described(path / FLAX), _json(path / BESIDE)] if path.is_dir() else [described(path)]
    return notes | next(filter(None, inside), {})


def described(path: Path) -> dict[str, Any]:
    """Return what the file beside a file without room for its config says of it, by its fingerprint."""
    found = _json(path.with_name(f"{path.name}.{BESIDE}")) if path.is_file() else {}
    return dict(found.get(fingerprint(path), {})) if found else {}


def fingerprint(path: Path) -> str:
    """Return what tells a file from the one that was or will be in its place: its size and a checksum of its ends."""
    with path.open("rb") as file:
        head = file.read(_END)
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        return f"{size}-{zlib.crc32(file.read(), zlib.crc32(head)):08x}"


def _json(path: Path) -> dict[str, Any]:
    """Return the object that a small JSON file holds; nothing where there is no such file.

    Raises:
        InputError: another content.
    """
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            return bounded_json.parse_object(file.read(bounded_json.BYTES + 1))
    except InputError as error:
        raise InputError(f"{path} is not JSON that can be read ({error}): correct it or take it away") from None
