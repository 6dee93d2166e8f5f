"""Weights on disk, to read: any container, any format, held to their config."""

import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from parity.checkpoints import containers, hub, metadata
from parity.checkpoints.config_inference import Assumption, Unfit, infer, nested
from parity.checkpoints.containers import Contents
from parity.checkpoints.formats import Fields, hf_processor, open_clip_config
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.recognition import Match, joined, recognise
from parity.checkpoints.weights import Checkpoint, check
from vit_spec import InputError, ViTConfig, bounded_json, nearest

WEIGHTS = "weights.safetensors"  # what a run folder calls them
BESIDE = "parity.json"  # the config where there is no room for it: in a folder, or after a file's own name beside it
FLAX = "flax_model.msgpack"  # what transformers calls the weights of its Flax models
COMPANIONS = ("config.json", *hf_processor.FILES, open_clip_config.FILE)  # what libraries keep beside weights
ADAPTER = "adapter_config.json"  # what PEFT keeps beside an adapter, which transformers adds to the weights it finds there

Source = str | PathLike[str]

_END = 1 << 20  # bytes
_TEXT = 1 << 24  # bytes of a JSON file: the names of 21,843 classes take 3 MB in Hugging Face's config.json

# Of these words a config.json has at least one if it describes a model.
_MODEL = frozenset(
    "model_type architecture architectures hidden_size embed_dim num_heads num_attention_heads n_heads num_hidden_layers "
    "layer_norm_eps hidden_act patch_size image_size img_size qkv_bias mlp_ratio global_pool model_args".split()
)


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
    if own := isinstance(notes.get("config"), str) and isinstance(name, str) and name != "pt":
        if format not in (None, name, get_format(name).name):
            raise InputError(f"it says that it is in format {name!r}, not {format!r}: leave --from out")
        config = ViTConfig.from_json(notes["config"])
        _hold_to_companion(config, name, contents, notes)
        arrays = joined(contents.arrays, get_format(name).separator)
        config = config.replace(**nested(given))
        found = Checkpoint(config, name, arrays, contents.container, metadata.assumed(notes, config, given))
    else:
        match, config, assumed = _sensible(recognise(contents.arrays, notes, format), given)
        name = match.format.full_name(config)
        if match.others:
            told = f"not {', '.join(match.others)}, of the same file: save that alone to read it"
            assumed = (*assumed, Assumption("weights", match.wrapper or "those without a wrapper", told))
        found = Checkpoint(config, name, match.arrays, contents.container, assumed, match.left)
    check(found)
    return metadata.attached(found, notes, given, own)


def _hold_to_companion(config: ViTConfig, name: str, contents: Contents, notes: Mapping[str, Any]) -> None:
    """Refuse a config.json of the format's library that contradicts the config that was written with the weights."""
    format = get_format(name)
    if not format.owns(notes):
        return
    for match in recognise(contents.arrays, notes, name)[:1]:
        for field, value in match.format.told(match.evidence).items():
            if field in format.says and field != "norms.layer_scale" and config.at(field) != value:
                raise InputError(
                    f"its config.json says {field}={value!r}, the config among its weights {config.at(field)!r}: "
                    f"correct config.json, or take it away"
                )


def _sensible(matches: list[Match], given: Fields) -> tuple[Match, ViTConfig, tuple[Assumption, ...]]:
    """Return the first reading of a file that makes a model, and that model's config.

    Another format with the same keys is tried only where nothing says what the file is: a refusal by the format that
    claims it, or whose library's config.json lies beside it, stands.

    Raises:
        InputError: none does, or the likeliest lacks what has to be given.
    """
    refusals: list[InputError] = []
    for match in matches:
        try:
            return match, *infer(match.format, match.evidence, given)
        except Unfit as error:
            refusals.append(error)
            if match.format.recognises(match.evidence) or match.format.owns(match.evidence.notes):
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
    if (folder / ADAPTER).is_file():
        raise InputError(
            f"{folder / ADAPTER} says that an adapter belongs to these weights, without which they are another function: "
            f"merge it into them, or take it away"
        )
    notes: dict[str, Any] = {}
    for name in COMPANIONS:
        found = _json(folder / name)
        if found and (name != "config.json" or _MODEL & found.keys()):  # not of some other program
            notes[name] = found
        if {"recipe", "data"} <= found.keys():
            notes[metadata.RUN] = found
    inside = [described(path / FLAX), _json(path / BESIDE)] if path.is_dir() else [described(path)]
    return notes | next(filter(None, inside), {})


def described(path: Path) -> dict[str, Any]:
    """Return what the file beside a file without room for its config says of it, by its fingerprint."""
    found = _json(path.with_name(f"{path.name}.{BESIDE}")) if path.is_file() else {}
    said = found.get(fingerprint(path), {}) if found else {}
    if not isinstance(said, dict):
        raise InputError(f"{path.name}.{BESIDE} says of {path} what is no JSON object: correct it or take it away")
    return said


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
        return bounded_json.read_object(path, longest=_TEXT)
    except InputError as error:
        raise InputError(f"{path} is not JSON that can be read ({error}): correct it or take it away") from None
