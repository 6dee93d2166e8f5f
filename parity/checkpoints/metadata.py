"""What travels with weights beside their config: names of classes, preparation of images, and what is only assumed.

It is read from this project's own notes, from a run's config.json, or from the JSON files of timm and transformers, and is
written to all of them.  What cannot be read or written is told in a line; it never stops weights from being read.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from parity.checkpoints.config_inference import Assumption
from parity.checkpoints.formats import Fields, get, hf_processor, open_clip_config, timm_data
from parity.checkpoints.preprocessing import Preprocessing, central
from parity.checkpoints.weights import TASKS, Checkpoint
from vit_spec import InputError, ViTConfig, bounded_json
from vit_spec.config import FIELDS
from vit_spec.printable import printable

LOST = "lost: "  # what a line begins with that says what a library cannot express
RUN = "run"  # the note that is the config.json of a run of `train`
LONGEST = 1 << 22  # bytes of JSON that all names together may take: those of ImageNet-21k take a fifth
SHOWN = 3  # names that are printed of many
LETTERS = 40  # of a name that are printed

Said = Mapping[str, Any]  # fields of Checkpoint


def notes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a file keeps of a checkpoint beside its config, as text."""
    found = {}
    if checkpoint.labels is not None:
        found["labels"] = json.dumps(checkpoint.labels)
    if checkpoint.preprocessing is not None:
        found["preprocessing"] = checkpoint.preprocessing.to_json()
    if checkpoint.task != "classes":
        found["task"] = checkpoint.task
    if checkpoint.assumed:
        found["assumed"] = json.dumps([_note(each) for each in checkpoint.assumed])
    return found


def _note(one: Assumption) -> dict[str, str]:
    """Return an assumption without its value, which is in the config, unless it is on what has no field there."""
    return {"field": one.field, "why": one.why} | ({} if one.field in FIELDS else {"value": str(one.value)})


def attached(checkpoint: Checkpoint, notes: Mapping[str, Any], given: Fields, own: bool) -> Checkpoint:
    """Return the checkpoint with what its file, or the files beside it, say of its images and classes.

    notes: of the file, and of those beside it.
    given: fields of the config that the user set.
    own: whether this project wrote the notes of the file.
    """
    of_open_clip = open_clip_config.FILE in notes and get(checkpoint.format).described_in == open_clip_config.FILE
    theirs = (_open_clip,) if of_open_clip else (_timm, _hugging_face)
    sources = (_ours, _run, _names_beside) if own else (_run, *theirs)
    said: dict[str, Any] = {}
    left: list[str] = []
    for source in sources:
        for name, read in source(notes, checkpoint.config):
            if name in said:
                continue
            try:
                value = read()
            except InputError as error:
                left.append(str(error))
                continue
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # as JSON has types
                left.append(f"{name}: what the files beside the weights say cannot be read ({error})")
                continue
            if name == "left":
                left += [value] if value else []
            elif value is not None:
                said[name] = value
    if how := said.get("preprocessing"):
        said["preprocessing"] = how.at(checkpoint.config.image_size) if "image_size" in given else how
    return replace(checkpoint, **said, left=(*checkpoint.left, *left))


def assumed(notes: Mapping[str, Any], config: ViTConfig, given: Fields) -> tuple[Assumption, ...]:
    """Return what of the config was assumed when the file was written, but for what the user has set.

    Raises:
        InputError: a list that this project did not write.
    """
    found = _parsed(notes.get("assumed", "[]"))
    for each in found if isinstance(found, list) else [None]:
        told = each if isinstance(each, dict) else {}
        keys = {"field", "why"} if told.get("field") in FIELDS else {"field", "why", "value"}
        if told.keys() != keys or not all(isinstance(word, str) for word in told.values()):
            raise InputError("its note on what was assumed is not as it was written: convert the source again")
    return tuple(
        Assumption(each["field"], each["value"] if "value" in each else config.at(each["field"]), each["why"])
        for each in found
        if each["field"] not in given
    )


Source = Iterator[
    tuple[str, Callable[[], Any]]
]  # a field of Checkpoint, and what reads it; "left": a line for the user or ""


def _ours(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """What this project wrote."""
    if "labels" in notes:
        yield "labels", lambda: names(_parsed(notes["labels"]), config, "the note labels")
    if "preprocessing" in notes:
        yield "preprocessing", lambda: Preprocessing.from_json(str(notes["preprocessing"]))
    if "task" in notes:
        yield "task", lambda: _task(notes["task"])


def _run(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """What the config.json of a run says: weights of older runs have it there alone."""
    run = notes.get(RUN)
    if not run:
        return
    outputs = config.num_classes

    def told(*path: str) -> Any:
        node = run
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    classes = told("data", "classes")
    if isinstance(classes, list) and len(classes) == outputs:
        yield "labels", lambda: names(classes, config, "the run's config.json")
    if told("data", "task") is not None:
        yield "task", lambda: _task(told("data", "task"))
    share, filter = told("recipe", "augment", "share"), told("recipe", "augment", "held_out_filter")
    if isinstance(share, (int, float)) and 0 < share <= 1:
        yield "preprocessing", lambda: central(config.image_size, share, filter)


def _timm(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """What timm's config.json says."""
    found = notes.get("config.json") or {}
    if "architecture" not in found:
        return
    yield "labels", lambda: names(timm_data.labels(found), config, "label_names of config.json")
    yield "preprocessing", lambda: timm_data.preprocessing(found)
    yield "left", lambda: timm_data.unread(found)


def _hugging_face(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """What transformers' config.json and the file of its image processor say."""
    found = notes.get("config.json") or {}
    if "model_type" in found:
        yield "labels", lambda: names(hf_processor.labels(found), config, "id2label of config.json")
        if config.num_classes:
            yield "task", lambda: hf_processor.task(found, config.num_classes)
    yield "preprocessing", lambda: hf_processor.preprocessing(notes)
    yield "left", lambda: hf_processor.unlike(notes)
    yield "left", lambda: hf_processor.padded(notes)


def _open_clip(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """What open_clip_config.json says."""
    yield "preprocessing", lambda: open_clip_config.preprocessing(notes)


def _names_beside(notes: Mapping[str, Any], config: ViTConfig) -> Source:
    """Names that the user may have put into a folder which this project wrote.

    Nothing else: where the preparation of images was not known, that in its JSON files is an assumption.
    """
    for source in (_timm, _hugging_face):
        yield from ((name, read) for name, read in source(notes, config) if name == "labels")


def names(names: Any, config: ViTConfig, where: str) -> tuple[str, ...] | None:
    """Return the names of the classes, in order; None where there are none.

    names: a list, or by number, which JSON makes a string.  Numbers among the names become text.

    Raises:
        InputError: not one name for each output, something that is no name, or too much of it.
    """
    if names is None:
        return None
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        by_number = {str(number): name for number, name in names.items()}
        if by_number.keys() != set(numbers):
            raise InputError(f"{where}: its numbers are not those from 0 to {len(names) - 1:,}")
        names = [by_number[number] for number in numbers]
    if not isinstance(names, (list, tuple)):
        raise InputError(f"{where}: a {type(names).__name__}, and a list was expected")
    if len(names) != config.num_classes:
        raise InputError(f"{where}: {len(names):,} names, and the model has {config.num_classes:,} outputs")
    odd = next((name for name in names if isinstance(name, bool) or not isinstance(name, (str, int, float))), None)
    if odd is not None or None in names:
        raise InputError(f"{where}: one of the names is a {type(odd).__name__}, and text was expected")
    found = tuple(map(str, names))
    if len(json.dumps(found)) > LONGEST:
        raise InputError(f"{where}: the names take more than {LONGEST >> 20} MiB")
    return found


def _task(found: Any) -> str:
    if found not in TASKS:
        raise InputError(f"the note task: {shortened(str(found))!r}, one of {', '.join(TASKS)} was expected")
    return str(found)


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        raise InputError(f"a note is a {type(text).__name__}, JSON was expected")
    try:
        return bounded_json.parse(text, longest=LONGEST)
    except InputError as error:
        raise InputError(f"a note cannot be read ({error}): take the note out") from None


# For other libraries, and for people ----------------------------------------------------------------------------------


def described(files: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[Mapping[str, Any], list[str]]:
    """Return the JSON files of a library with what the checkpoint knows, and in lines what they cannot say."""
    content = files.get("config.json", {})
    known = {name: getattr(checkpoint, name) for name in ("labels", "task", "preprocessing")}
    if "pretrained_cfg" in content:
        files, lost = timm_data.described(files, checkpoint.config, **known)
    elif "model_type" in content:
        files, lost = hf_processor.described(files, checkpoint.config, **known)
    else:
        return files, []
    return files, [f"{LOST}{line}" for line in lost]


def alone(checkpoint: Checkpoint) -> list[str]:
    """Say what readers of a file of weights find nowhere but in this project's notes."""
    known = {"names of classes": checkpoint.labels, "preparation of images": checkpoint.preprocessing}
    there = " and ".join(what for what, value in known.items() if value)
    return [f"{there}: in our metadata alone, which other readers of a file of weights do not look for"] if there else []


def told(checkpoint: Checkpoint) -> Iterator[str]:
    """Say what is known of classes and images, a line each."""
    if names := checkpoint.labels:
        more = ", ..." if len(names) > SHOWN else ""
        yield f"{checkpoint.task}: {len(names):,}, {', '.join(map(shortened, names[:SHOWN]))}{more}"
    if checkpoint.preprocessing:
        yield f"images: {checkpoint.preprocessing}"


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the same for JSON."""
    how = checkpoint.preprocessing
    return {"task": checkpoint.task, "labels": checkpoint.labels, "preprocessing": None if how is None else asdict(how)}


def shortened(text: str, letters: int = LETTERS) -> str:
    """Return text as a line shows it: control characters escaped, and cut after so many letters."""
    return printable(text if len(text) <= letters else f"{text[: letters - 1]}…")
