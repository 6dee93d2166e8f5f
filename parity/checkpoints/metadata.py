"""Metadata of a checkpoint besides its config: labels, task, preprocessing and assumptions.

They are read from this project's own metadata in a file, from the config.json of a run, or from the JSON files of timm,
transformers and OpenCLIP.  They are written to our own metadata and to the JSON files of timm and transformers.  Metadata
that cannot be read or written is reported in one line, and does not prevent weights from being read.  The exception is a
file that this project wrote: if the library's files beside it contradict our metadata, or cannot be read, it is refused.

In this module `notes` are the metadata of a file together with the parsed JSON files beside it, by their names.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.formats import Fields, get, hf_processor, open_clip_config, timm_data
from parity.checkpoints.preprocessing import Preprocessing, center_crop
from parity.checkpoints.weights import TASKS, Checkpoint
from vit_spec import InputError, ViTConfig, bounded_json, nearest
from vit_spec.config import FIELDS
from vit_spec.printable import is_utf8, printable

LOST_PREFIX = "lost: "  # begins a line about metadata that the JSON files of a library cannot express
RUN_NOTE = "run"  # the key in `notes` of the config.json of a run of `train`
MAX_NAMES_BYTES = 1 << 22  # limit for the JSON of all label names; those of ImageNet-21k take a fifth
MAX_NAMES_SHOWN = 3  # label names to print
MAX_NAME_LENGTH = 40  # characters of a label name to print

# (field of Checkpoint, function that reads its value)
FieldReaders = Iterator[tuple[str, Callable[[], Any]]]
FieldSource = Callable[[Mapping[str, Any], ViTConfig], FieldReaders]

# Values in JSON files can have any type, so a reader can raise any of these.
_READ_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def to_notes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata entries of a checkpoint other than its config, as text."""
    found = {}
    if checkpoint.labels is not None:
        found["labels"] = json.dumps(checkpoint.labels)
    if checkpoint.preprocessing is not None:
        found["preprocessing"] = checkpoint.preprocessing.to_json()
    if checkpoint.task != "classes":
        found["task"] = checkpoint.task
    if checkpoint.assumed:
        found["assumed"] = json.dumps([_assumption_note(each) for each in checkpoint.assumed])
    return found


def _assumption_note(one: Assumption) -> dict[str, str]:
    """Return the JSON object of an assumption; the value is omitted if it is in the config."""
    return {"field": one.field, "why": one.why} | ({} if one.field in FIELDS else {"value": str(one.value)})


def attach_metadata(checkpoint: Checkpoint, notes: Mapping[str, Any], given: Fields, own: bool) -> Checkpoint:
    """Return the checkpoint with the labels, task and preprocessing that its file or the files beside it state.

    Args:
        checkpoint: the checkpoint without metadata.
        notes: the metadata of the file, and the parsed JSON files beside it.
        given: the config overrides of the user.
        own: whether this project wrote the file.

    Raises:
        InputError: this project wrote the file, and the library's files beside it contradict its metadata, or cannot be
            read.
    """
    of_open_clip = not own and _is_of_open_clip(checkpoint.format, notes)
    from_library = (_from_open_clip,) if of_open_clip else _FROM_LIBRARIES
    sources = (_from_notes, _from_run) if own else (_from_run, *from_library)
    fields, failed = _read_fields(sources, notes, checkpoint.config)
    remarks = [] if own or of_open_clip else list(_library_remarks(notes))
    if own:
        for name, value in _edited_fields(replace(checkpoint, **fields), notes).items():
            if name in fields:
                raise InputError(
                    f"its {name} in the library's files beside the weights ({shorten(str(value))}) and the {name} stored "
                    f"with the weights ({shorten(str(fields[name]))}) differ: correct the library's files, or remove them"
                )
            fields[name] = value
    if preprocessing := fields.get("preprocessing"):
        size = checkpoint.config.image_size
        fields["preprocessing"] = preprocessing.for_size(size) if "image_size" in given else preprocessing
    return replace(checkpoint, **fields, left=(*checkpoint.left, *failed, *remarks))


def _is_of_open_clip(format: str, notes: Mapping[str, Any]) -> bool:
    """Return whether open_clip_config.json describes weights in a format: OpenCLIP's, or timm's for its image towers."""
    if open_clip_config.FILE not in notes:
        return False
    library = get(format).library
    if library.config_file == open_clip_config.FILE:
        return True
    is_timm = library.config_key == "architecture"
    return is_timm and not library.describes_model(notes) and bool(open_clip_config.timm_config(notes))


def _edited_fields(checkpoint: Checkpoint, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose values in the library's files beside a checkpoint of ours are not those that we wrote there.

    A value that we wrote is not read: if the preprocessing was unknown, it is an assumption.

    Raises:
        InputError: a field in these files cannot be read.
    """
    format = get(checkpoint.format)
    if not format.library.describes_model(notes):
        return {}
    config = ViTConfig.from_json(notes["config"])  # without the overrides of the user
    try:
        written, _ = fill_library_files(format.library.contents(config), replace(checkpoint, config=config))
    except InputError:  # the library cannot express this config
        written = {}
    expected, _ = _read_fields(_FROM_LIBRARIES, written, config)
    found, failed = _read_fields(_FROM_LIBRARIES, notes, config)
    if failed:
        raise InputError(f"its library's files are not those that were written with the weights: {failed[0]}")
    return {name: value for name, value in found.items() if value != expected.get(name)}


def _read_fields(
    sources: Iterable[FieldSource], notes: Mapping[str, Any], config: ViTConfig
) -> tuple[dict[str, Any], list[str]]:
    """Return field -> value from the first source that has it, and a line for each value that cannot be read."""
    fields: dict[str, Any] = {}
    failed: list[str] = []
    for source in sources:
        for name, read in source(notes, config):
            if name in fields:
                continue
            try:
                value = read()
            except InputError as error:
                failed.append(str(error))
                continue
            except _READ_ERRORS as error:
                failed.append(f"{name}: the entry in the files beside the weights cannot be read ({error})")
                continue
            if value is not None:
                fields[name] = value
    return fields, failed


def read_assumptions(notes: Mapping[str, Any], config: ViTConfig) -> tuple[Assumption, ...]:
    """Return the assumptions in the metadata of a file, whose config is `config`.

    Raises:
        InputError: the entry does not have the form that this project writes.
    """
    found = _parse_json(notes.get("assumed", "[]"))
    for each in found if isinstance(found, list) else [None]:
        entry = each if isinstance(each, dict) else {}
        keys = {"field", "why"} if entry.get("field") in FIELDS else {"field", "why", "value"}
        if entry.keys() != keys or not all(isinstance(word, str) for word in entry.values()):
            raise InputError("the metadata entry assumed does not have the expected form: convert the source again")
    return tuple(
        Assumption(each["field"], each["value"] if "value" in each else config.at(each["field"]), each["why"])
        for each in found
    )


def _from_notes(notes: Mapping[str, Any], config: ViTConfig) -> FieldReaders:
    """Yield the fields in the metadata that this project wrote."""
    if "labels" in notes:
        yield "labels", lambda: parse_labels(_parse_json(notes["labels"]), config, "the metadata entry labels")
    if "preprocessing" in notes:
        yield "preprocessing", lambda: Preprocessing.from_json(str(notes["preprocessing"]))
    if "task" in notes:
        yield "task", lambda: parse_task(notes["task"], "the metadata entry task")


def _from_run(notes: Mapping[str, Any], config: ViTConfig) -> FieldReaders:
    """Yield the fields in the config.json of a run.  Weights of older runs have them only there."""
    run = notes.get(RUN_NOTE)
    if not run:
        return
    outputs = config.num_classes

    def entry(*path: str) -> Any:
        node = run
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    classes = entry("data", "classes")
    if isinstance(classes, list) and len(classes) == outputs:
        yield "labels", lambda: parse_labels(classes, config, "the run's config.json")
    if entry("data", "task") is not None:
        yield "task", lambda: parse_task(entry("data", "task"), "the run's config.json")
    share, filter = entry("recipe", "augment", "share"), entry("recipe", "augment", "held_out_filter")
    if isinstance(share, (int, float)) and 0 < share <= 1:
        yield "preprocessing", lambda: center_crop(config.image_size, share, filter)


def _from_timm(notes: Mapping[str, Any], config: ViTConfig) -> FieldReaders:
    """Yield the fields in timm's config.json."""
    found = notes.get("config.json") or {}
    if "architecture" not in found:
        return
    yield "labels", lambda: parse_labels(timm_data.labels(found), config, "label_names of config.json")
    yield "preprocessing", lambda: timm_data.preprocessing(found)


def _from_hugging_face(notes: Mapping[str, Any], config: ViTConfig) -> FieldReaders:
    """Yield the fields in transformers' config.json and in the file of its image processor."""
    found = notes.get("config.json") or {}
    if "model_type" in found:
        yield "labels", lambda: parse_labels(hf_processor.labels(found), config, "id2label of config.json")
        if config.num_classes:
            yield "task", lambda: hf_processor.task(found, config.num_classes)
    yield "preprocessing", lambda: hf_processor.preprocessing(notes)


def _from_open_clip(notes: Mapping[str, Any], config: ViTConfig) -> FieldReaders:
    """Yield the fields in open_clip_config.json."""
    yield "preprocessing", lambda: open_clip_config.preprocessing(notes)


_FROM_LIBRARIES: tuple[FieldSource, ...] = (_from_timm, _from_hugging_face)


def _library_remarks(notes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each part of the files of timm and transformers that is not read, or that they apply otherwise."""
    config = notes.get("config.json") or {}
    readers = [partial(timm_data.unread_labels, config)] if "architecture" in config else []
    readers += [partial(hf_processor.rounding_difference, notes), partial(hf_processor.padding_difference, notes)]
    for read in readers:
        with suppress(*_READ_ERRORS):  # the readers of the fields of the same file report that it cannot be read
            if remark := read():
                yield remark


def parse_labels(names: Any, config: ViTConfig, where: str) -> tuple[str, ...] | None:
    """Return the names of the outputs, in order; None if there are none.

    Args:
        names: a list, or a dictionary with the numbers of the outputs as keys, which are strings in JSON.  Numbers among
            the names become text.
        config: the model.
        where: the origin of the names, for the message.

    Raises:
        InputError: the number of names is not that of the outputs, a name is neither text nor a number, or not valid
            Unicode, which no file stores, or the names take more than `MAX_NAMES_BYTES`.
    """
    if names is None:
        return None
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        by_number = {str(number): name for number, name in names.items()}
        if by_number.keys() != set(numbers):
            raise InputError(f"{where}: its keys are not the numbers from 0 to {len(names) - 1:,}")
        names = [by_number[number] for number in numbers]
    if not isinstance(names, (list, tuple)):
        raise InputError(f"{where}: a {type(names).__name__}, but a list was expected")
    if len(names) != config.num_classes:
        raise InputError(f"{where}: {len(names):,} names, but the model has {config.num_classes:,} outputs")
    odd = next((name for name in names if isinstance(name, bool) or not isinstance(name, (str, int, float))), None)
    if odd is not None or None in names:
        raise InputError(f"{where}: one of the names is a {type(odd).__name__}, but text was expected")
    found = tuple(map(str, names))
    if (invalid := next((name for name in found if not is_utf8(name)), None)) is not None:
        raise InputError(f"{where}: {shorten(ascii(invalid), 80)} is not valid Unicode: correct the name")
    if len(json.dumps(found)) > MAX_NAMES_BYTES:
        raise InputError(f"{where}: the names take more than {MAX_NAMES_BYTES >> 20} MiB")
    return found


def parse_task(found: Any, where: str) -> str:
    """Return the name of a task; raise InputError if there is none of this name.

    where: the origin of the name, for the message.
    """
    if found not in TASKS:
        expected = f"one of {', '.join(TASKS)} was expected{nearest(found, TASKS)}"
        raise InputError(f"{where}: {shorten(str(found))!r}, but {expected}")
    return str(found)


def _parse_json(text: Any) -> Any:
    if not isinstance(text, str):
        raise InputError(f"a metadata entry is a {type(text).__name__}, but JSON was expected")
    try:
        return bounded_json.parse(text, max_bytes=MAX_NAMES_BYTES)
    except InputError as error:
        raise InputError(f"a metadata entry cannot be read ({error}): remove the entry") from None


# Output for other libraries and for the user --------------------------------------------------------------------------


def fill_library_files(files: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[Mapping[str, Any], list[str]]:
    """Return the JSON files of a library with a checkpoint's metadata, and a line for each entry they cannot express."""
    content = files.get("config.json", {})
    known = {name: getattr(checkpoint, name) for name in ("labels", "task", "preprocessing")}
    if "pretrained_cfg" in content:
        files, lost = timm_data.with_metadata(files, checkpoint.config, **known)
    elif "model_type" in content:
        files, lost = hf_processor.with_metadata(files, checkpoint.config, **known)
    else:
        return files, []
    return files, [f"{LOST_PREFIX}{line}" for line in lost]


def notes_only_remarks(checkpoint: Checkpoint) -> list[str]:
    """Return a line that names the metadata which only this project's own entries store, or an empty list."""
    known = {"labels": checkpoint.labels, "preprocessing": checkpoint.preprocessing}
    found = " and ".join(what for what, value in known.items() if value)
    return [f"{found}: only in our own metadata, which other libraries do not read"] if found else []


def summary_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line about the labels and a line about the preprocessing, if they are known."""
    if names := checkpoint.labels:
        more = ", ..." if len(names) > MAX_NAMES_SHOWN else ""
        yield f"{checkpoint.task}: {len(names):,}, {', '.join(map(shorten, names[:MAX_NAMES_SHOWN]))}{more}"
    if checkpoint.preprocessing:
        yield f"images: {checkpoint.preprocessing}"


def to_json_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the task, labels and preprocessing of a checkpoint as JSON fields."""
    preprocessing = None if checkpoint.preprocessing is None else asdict(checkpoint.preprocessing)
    return {"task": checkpoint.task, "labels": checkpoint.labels, "preprocessing": preprocessing}


def shorten(text: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return text for one printed line: cut to `max_length` characters, with control characters escaped."""
    return printable(text if len(text) <= max_length else f"{text[: max_length - 1]}…")
