"""Read checkpoints from disk: any container and any format, validated against their config."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from parity.checkpoints import containers, hub, metadata
from parity.checkpoints.arrays import FLOAT_DTYPES
from parity.checkpoints.assumptions import Assumption, find_overridden
from parity.checkpoints.columns import count_parameters, shared_arrays
from parity.checkpoints.companions import COMPANION_FILES, read_companions
from parity.checkpoints.config_inference import infer_config, override_fields
from parity.checkpoints.containers import Contents, folders
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.containers.shards import INDEX
from parity.checkpoints.derived_fields import FormatMismatch
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.format_matching import Match, join_keys
from parity.checkpoints.formats import Fields, Format, add_version, hf_processor, open_clip_config
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.formats.definition import Definition, digest
from parity.checkpoints.recognition import recognise
from parity.checkpoints.sidecar import read_own_notes
from parity.checkpoints.timm_tower import TimmTower, find_tower, is_trunk
from parity.checkpoints.unreadable import describe_unreadable
from parity.checkpoints.weights import Checkpoint, check_ignored_values, validate
from vit_spec import InputError, ViTConfig, bounded_json, nearest
from vit_spec.config import FIELDS
from vit_spec.errors import require, require_type

_FOLDER_FILES = ("model.safetensors", folders.FLAX_FILE)  # names of the weights in a folder that we write for a library

TABLE_NOTE = "format_table"  # our metadata entry for the table of a format that a user defines

StrPath = str | PathLike[str]

_COMPARED_ENTRIES = 1 << 20  # of two arrays at a time

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_PAGE = re.compile(rf"https?://(?:www\.)?huggingface\.co/({_HUB_NAME.pattern})", re.ASCII)

_CONFIG_FIELDS = frozenset(("image_size", "patch_size", "width", "depth", "num_heads"))  # of every config of ours


def load(
    path: StrPath,
    *,
    format: str | None = None,
    given: Fields | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> Checkpoint:
    """Open a checkpoint: a file or folder in any container and format, a run folder, or "hf://owner/name".

    Of a run folder, the best weights are read, or the newest if there are no best ones; `Checkpoint.path` says which.

    Arrays are read when they are used.  A config that is not stored with the weights is inferred; `Checkpoint.assumed`
    lists the assumptions.

    Args:
        path: the path, or the name on the Hugging Face hub.
        format: the name of the format; by default it is recognised.
        given: config overrides by dotted field name, such as {"norms.eps": 1e-5}.  `Checkpoint.overridden` lists those
            that replace another value, which the file states.
        strip: a wrapper that is not known: the beginning of the keys of the model, such as "net.vit.".  It may be after or
            before known wrappers, and selects one of several models in a file.
        ignore: regular expressions for whole keys, with or without wrappers, that are not parameters of the model, such as
            "criterion[.].*".  `Checkpoint.left` lists these keys.

    Raises:
        InputError: the file does not exist or is damaged, the format is unknown, the weights do not match their config, no
            key begins with `strip`, or an expression of `ignore` is invalid, or matches no key or a parameter.
    """
    path = resolve_path(path)
    try:
        weights = containers.find(path)
        contents = _open(weights)
        own, remarks = read_own_notes(weights, contents.container)
        # Drop metadata entries with the name of a companion file, which would be mistaken for that file.
        entries = {name: note for name, note in {**contents.metadata, **own}.items() if name not in COMPANION_FILES}
        notes = {**entries, **read_companions(weights)}
        checkpoint = build_checkpoint(contents, notes, format, given or {}, strip, ignore)
        assumed = (*checkpoint.assumed, *_check_config_of_folder(weights, checkpoint.format, notes))
        return replace(checkpoint, path=str(weights), assumed=assumed, left=(*checkpoint.left, *remarks))
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _open(weights: Path) -> Contents:
    """Read the headers of a file or folder; an error about the best weights of a run says how to do without the file."""
    try:
        return containers.open(weights)
    except InputError as error:
        newest = weights.with_name(folders.NEWEST_FILE)
        if weights.name != folders.BEST_FILE or not newest.is_file():
            raise
        raise InputError(f"{error}; resuming the run writes it, and {newest} has the newest weights") from None


def build_checkpoint(
    contents: Contents,
    notes: Mapping[str, Any],
    format: str | None,
    given: Fields,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> Checkpoint:
    """Return the checkpoint in a container, validated against the config in `notes` or an inferred one.

    Args:
        contents: the arrays and the metadata of the container.
        notes: the metadata of the container, and the parsed JSON files beside it, by their names.
        format, given, strip, ignore: see `load`.

    Raises:
        InputError: for the reasons given in `load`.
    """
    if isinstance(ignore, str):
        raise InputError(f"ignore is the text {ignore!r}, but a list of expressions was expected: give [{ignore!r}]")
    require(isinstance(given, Mapping), f"given is {given!r}: give values by field name, such as {{'norms.eps': 1e-5}}")
    _add_stored_table(notes, _stated_format(notes))
    if own := _is_own(notes):
        _refuse_reading_options(_stated_format(notes), format, strip, ignore)
        found = _read_own(contents, notes, given)
    else:
        tower = find_tower(contents, notes)
        read = partial(_read_timm_tower, tower) if tower else partial(_read_recognised, contents)
        found = read(notes, format, given, strip, ignore)
    if any(array.dtype.name not in FLOAT_DTYPES for array in found.arrays.values()) and (
        what := describe_unreadable(contents.arrays)
    ):
        raise InputError(what)
    validate(found)
    _check_unused_entries(found)
    found = replace(found, assumed=(*found.assumed, *_assumed_zeros(found.arrays)))
    return metadata.attach_metadata(found, notes, given, own)


def _refuse_reading_options(name: str, format: str | None, strip: str | None, ignore: Sequence[str]) -> None:
    """Raise InputError for options that a checkpoint of this project does not need.

    Args:
        name: the format that it states.
        format, strip, ignore: see `build_checkpoint`.
    """
    if format not in (None, name, get_format(name).name):
        get_format(format)  # raises the error about an unknown name, which says more
        raise InputError(f"it says that it is in format {name!r}, not {format!r}: leave --from (format=) out")
    if strip is not None or ignore:
        raise InputError(
            f"it has only the keys of its config, in format {name!r}: leave --strip (strip=) and --ignore (ignore=) out"
        )


def _read_own(contents: Contents, notes: Mapping[str, Any], given: Fields) -> Checkpoint:
    """Return a checkpoint of this project, with the config in `notes`; the arguments are those of `build_checkpoint`."""
    name = _stated_format(notes)
    config = ViTConfig.from_json(notes["config"])
    _check_companion_config(config, name, contents, notes)
    arrays = join_keys(contents.arrays, get_format(name).separator)
    assumed = metadata.read_assumptions(notes, config)
    was_assumed = {each.field for each in assumed}
    stated = {field: config.at(field) for field in FIELDS if field not in was_assumed}
    config, assumed = override_fields(config, assumed, given)
    overridden = find_overridden(stated, given)
    _check_duplicates(get_format(name), config, arrays)
    return Checkpoint(config, name, arrays, contents.container, assumed, overridden=overridden)


def _read_recognised(
    contents: Contents,
    notes: Mapping[str, Any],
    format: str | None,
    given: Fields,
    strip: str | None,
    ignore: Sequence[str],
) -> Checkpoint:
    """Return another program's checkpoint, with an inferred config; the arguments are those of `build_checkpoint`."""
    _check_extra_state(notes)
    matches = recognise(contents.arrays, notes, format, strip, ignore)
    match, config, assumed = first_valid_match(matches, given)
    name = match.format.full_name(config)
    check_ignored_values(match.format, config, match.evidence.ignored_arrays)
    _check_duplicates(match.format, config, {**match.evidence.ignored_arrays, **match.arrays})
    left = [*match.unread, *_empty_arrays(contents)]
    if match.format.definition:
        _check_constants(match, match.format.definition, contents)
        left += [f"{file}: format {match.format.name} has no such file" for file in COMPANION_FILES if notes.get(file)]
    if match.alternatives:
        why = f"not {', '.join(match.alternatives)}, of the same file: save that alone to read it"
        assumed = (*assumed, Assumption("weights", match.wrapper or "those without a wrapper", why))
    others = {each.format.name: None for each in matches if each.format.definition} if match.format.definition else {}
    if also := [each for each in others if each != match.format.name]:
        why = f"not {', '.join(also)}, which fits too: choose with --from"
        assumed = (*assumed, Assumption("format", match.format.name, why))
    texts = match.ignored_texts
    assumed = (*assumed, *(Assumption("ignored keys", texts[each], f"--ignore '{each}'") for each in texts))
    overridden = find_overridden(match.format.stated_fields(match.evidence), given)
    return Checkpoint(config, name, match.arrays, contents.container, assumed, tuple(left), overridden=overridden)


def _read_timm_tower(
    tower: TimmTower,
    notes: Mapping[str, Any],
    format: str | None,
    given: Fields,
    strip: str | None,
    ignore: Sequence[str],
) -> Checkpoint:
    """Return an image tower of timm in OpenCLIP's weights; the other arguments are those of `build_checkpoint`."""
    others = {name: note for name, note in notes.items() if name != open_clip_config.FILE}
    strip = None if is_trunk(strip) else strip  # `tower` has the keys without it
    try:
        found = _read_recognised(tower.contents, {**others, "config.json": tower.config}, format, given, strip, ignore)
    except InputError as error:
        what = f"its image tower is timm's {tower.name}, whose config.json is made from its {open_clip_config.FILE}"
        raise InputError(f"{what}: {error}") from None
    return replace(found, left=(*found.left, *tower.left))


def _assumed_zeros(arrays: Mapping[str, StoredArray]) -> list[Assumption]:
    """Return the assumption that the arrays without data in the file are zero, or [] if it has the data of all."""
    keys = [key for key, array in arrays.items() if array.is_assumed_zero]
    why = "as older versions of Orbax leave out the data of arrays of zeros"
    return [Assumption("arrays of zeros", ", ".join(keys), why)] if keys else []


def _stated_format(notes: Mapping[str, Any]) -> Any:
    """Return the format that our metadata names; transformers requires the entry format="pt", so "layout" is preferred."""
    return notes.get("layout", notes.get("format", "pt"))


def _is_own(notes: Mapping[str, Any]) -> bool:
    """Return whether this project wrote the metadata entries config and format: other programs use these names too."""
    config, format = notes.get("config"), _stated_format(notes)
    if not isinstance(config, str) or not isinstance(format, str) or format == "pt" or config.lstrip()[:1] != "{":
        return False
    try:
        get_format(format)
    except InputError:  # a misspelt name of ours, or another program's
        try:
            return _CONFIG_FIELDS <= bounded_json.parse_object(config, max_bytes=folders.MAX_JSON_BYTES).keys()
        except InputError:
            return False
    return True


def check_companions(path: Path, contents: Contents) -> None:
    """Raise InputError if `load` would refuse a file of this project because of the JSON files in its folder.

    Args:
        path: the file, which need not exist.
        contents: its arrays and its metadata.
    """
    try:
        if companions := read_companions(path):
            notes = {**companions, **contents.metadata}
            config, name = ViTConfig.from_json(notes["config"]), _stated_format(notes)
            arrays = join_keys(contents.arrays, get_format(name).separator)
            _check_companion_config(config, name, contents, notes)
            metadata.attach_metadata(Checkpoint(config, name, arrays, contents.container), notes, {}, own=True)
            _check_library_file(path, name, notes)
    except InputError as error:
        raise InputError(f"{path} could not be read beside the files in its folder: {error}; or write elsewhere") from None


def _check_config_of_folder(weights: Path, name: str, notes: Mapping[str, Any]) -> list[Assumption]:
    """Return the assumption that config.json describes a file that its library does not open, or [] if it opens the file.

    Raises:
        InputError: this project wrote the file that a library opens, but the config.json beside it is of another model.
    """
    format, folder, config = get_format(name), weights.parent, notes.get("config.json") or {}
    if not config or not weights.is_file():
        return []
    if _is_own(notes):
        _check_library_file(weights, name, notes)
        return []
    opened = folders.library_file([entry.name for entry in folder.iterdir() if entry.is_file()], config)
    if opened in (None, weights.name) or not format.library.describes_model(notes):
        return []
    return [Assumption("use of config.json", f"for {weights.name}", f"although its library opens {opened}")]


def _check_library_file(weights: Path, name: str, notes: Mapping[str, Any]) -> None:
    """Raise InputError if a library opens a file of this project, but the config.json beside it is of another format."""
    format = get_format(name)
    is_opened = weights.name in (*_FOLDER_FILES, f"{_FOLDER_FILES[0]}{INDEX}")
    has_config = bool(notes.get("config.json")) and format.library.has_files
    if is_opened and has_config and not format.library.describes_model(notes):
        raise InputError(
            f"its config.json is not one of format {name!r}, the format of {weights.name}: give the config.json of "
            f"these weights, or remove it"
        )


def _check_companion_config(config: ViTConfig, name: str, contents: Contents, notes: Mapping[str, Any]) -> None:
    """Raise InputError if the library's config.json contradicts the config in the metadata of the weights."""
    format = get_format(name)
    if not format.library.describes_model(notes):
        return
    for match in recognise(contents.arrays, notes, name)[:1]:
        # A library's file cannot express every config: compare with what would be written beside these weights.
        files = {file: note for file, note in notes.items() if file not in COMPANION_FILES}
        try:
            files |= format.library.contents(config)
        except InputError:
            files = {}
        has_file = format.library.describes_model(files)
        written = match.format.stated_fields(replace(match.evidence, notes=files)) if has_file else {}
        for field, value in match.format.stated_fields(match.evidence).items():
            expected = written.get(field, config.at(field))
            if field != "norms.layer_scale" and value != expected:  # an initial value, without effect on these weights
                of_processor = field.startswith("pixels.") and bool(format.library.model_types)
                file = hf_processor.processor_file(notes)[0] if of_processor else format.library.config_file
                raise InputError(
                    f"its {file} says {field}={value!r}, but the config stored with its weights says {expected!r}: correct "
                    f"{file}, or remove it"
                )


def first_valid_match(matches: list[Match], given: Fields) -> tuple[Match, ViTConfig, tuple[Assumption, ...]]:
    """Return the first match from which a config can be inferred, the config, and its assumptions.

    After a mismatch, the next match is tried.  If the format recognises the file, or its library's config.json is beside
    the file, only its other variants are tried.

    Raises:
        InputError: no match has a config (the error is that of the likeliest), or a required field is not given.
    """
    errors: list[InputError] = []
    final = ""  # the format that recognises the file
    for match in matches:
        if final not in ("", match.format.name):
            continue
        try:
            return match, *infer_config(match.format, match.evidence, given)
        except FormatMismatch as error:
            errors.append(error)
            recognised = match.format.recognises(match.evidence) and not _fits_without(match, given)
            if recognised or match.format.library.describes_model(match.evidence.notes):
                final = match.format.name
    raise errors[0]


def _fits_without(match: Match, given: Fields) -> bool:
    """Return whether a match would have a config if the user gave no fields: then these fields show another format."""
    try:
        infer_config(match.format, match.evidence, {})
    except InputError:
        return False
    return bool(given)


def _check_extra_state(notes: Mapping[str, Any]) -> None:
    """Raise InputError if a module stored values other than arrays by PyTorch's `get_extra_state`."""
    for path in notes:
        words = path.split("/")
        if found := [word for word in words if word.rpartition(".")[2] == "_extra_state"]:
            raise InputError(
                f"unexpected {found[0]}: the model may need what its module stored there, so it cannot be read"
            )


def _check_duplicates(format: Format, config: ViTConfig, arrays: Mapping[str, StoredArray]) -> None:
    """Raise InputError if the second copy of a parameter has other bits than the first, so that it is not ignored.

    The copies are one array in the module that wrote the file.  If they differ, the file does not say which is right.
    """
    first_keys = format.layouts(config)
    for name, layout in format.duplicate_layouts(config).items():
        for key, second_key in zip(first_keys[name].keys(config.sizes), layout.keys(config.sizes), strict=True):
            first, second = arrays.get(key), arrays.get(second_key)
            if first is not None and second is not None and not _is_equal(first, second):
                raise InputError(f"{second_key} differs from {key}, of which it is a copy: remove the wrong one")


def _add_stored_table(notes: Mapping[str, Any], name: Any) -> None:
    """Make the version of a user's format known whose table is in the metadata of a file.

    name: the name and version of the format in the metadata.

    Raises:
        InputError: the table has a mistake, or has another name or version.
    """
    if TABLE_NOTE not in notes or not isinstance(name, str) or "@" not in name:
        return
    found = add_version(parse_format(str(notes[TABLE_NOTE]), f"its metadata entry {TABLE_NOTE}"))
    if found != name:
        raise InputError(
            f"its metadata names the format {name!r}, but has the table of {found!r}: convert its source again"
        )


def _check_unused_entries(checkpoint: Checkpoint) -> None:
    """Raise InputError if an array of a user's format has entries that belong to no parameter and are not zero."""
    format, sizes = get_format(checkpoint.format), checkpoint.config.sizes
    column = format.layouts(checkpoint.config) if format.definition else {}
    for layouts in shared_arrays(column).values():
        unused = count_parameters(layouts, sizes).reshape(-1) == 0
        for key in layouts[0].keys(sizes) if unused.any() else ():
            array = checkpoint.arrays[key]
            bits = array.read(0, array.size).reshape(-1)
            if bits.view(f"u{bits.itemsize}")[unused].any():
                raise InputError(f"{key} has entries other than zero that no line of the table reads: add a line for them")


def _check_constants(match: Match, definition: Definition, contents: Contents) -> None:
    """Raise InputError if an array that the file of a format calls a constant has other values than it had there."""
    stored = join_keys(contents.arrays, match.format.separator)
    for pattern, expected in definition.constants.items():
        for key in match.ignored_by_table.get(pattern, ()):
            array = stored[key]
            if digest(array.read(0, array.size).reshape(array.shape)) != expected:
                raise InputError(
                    f"{key} is a constant for {definition.source}, but has other values or another dtype than when it was "
                    f"written, and the model may need them: write the table again from this checkpoint"
                )


def _empty_arrays(contents: Contents) -> list[str]:
    """Return a line for the arrays without entries, which are not read."""
    empty = ["/".join(words) for words, array in contents.arrays.items() if not array.size]
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    return [f"{empty[0]}{more}: without entries"] if empty else []


def _is_equal(first: StoredArray, second: StoredArray) -> bool:
    """Return whether two arrays have the same shape, dtype and bits.  They are read in chunks."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    limits = [(start, min(start + _COMPARED_ENTRIES, first.size)) for start in range(0, first.size, _COMPARED_ENTRIES)]
    return all(first.read(*each).tobytes() == second.read(*each).tobytes() for each in limits)


def resolve_path(source: StrPath) -> Path:
    """Return the path of weights: in the cache for a name on the hub, in the folder for a run, else `source` itself.

    A folder with the weights of a run and those of another library is that of the library that its config.json names.
    A leading ~ is the home folder.

    Raises:
        InputError: the argument is no path; or the path does not exist: the message suggests the nearest name in the same
            folder, or says that the path is a link to a missing file.
    """
    require_type("path is", source, str, PathLike)
    if str(source).startswith("hf://"):
        return hub.resolve(str(source))
    path = Path(os.path.expanduser(source))
    if any((path / name).is_file() for name in folders.RUN_FILES):
        return containers.find(path)
    if path.exists():
        return path
    if path.is_symlink():
        raise InputError(f"{path} is a link to {path.readlink()}, which does not exist: correct the link")
    if str(source).startswith("timm:"):
        raise InputError(f"no file {path}: only --init and --teacher of the trainers read timm:NAME, give hf://timm/NAME")
    if page := _HUB_PAGE.match(str(source)):
        raise InputError(f"{source} is a page of the hub: give hf://{page[1]}")
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.name[0] != "."] if folder.is_dir() else []
    hint = nearest(path.name, names) or (": check the path" if folder.is_dir() else f": there is no folder {folder}")
    on_hub = f"; on the hub, it is hf://{path}" if not folder.is_dir() and _HUB_NAME.fullmatch(str(path)) else ""
    raise InputError(f"no file {path}{hint}{on_hub}")
