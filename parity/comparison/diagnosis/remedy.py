"""What to do about a cause: a command line that writes the weights anew, or what to correct elsewhere."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parity.checkpoints.config_inference import nested
from parity.checkpoints.formats import Fields, get
from parity.checkpoints.weights import Checkpoint
from parity.comparison.diagnosis.mend import cause_named, mendable
from parity.comparison.diagnosis.trial import Hypothesis
from vit_spec import InputError, rows

FIXED = "FIXED.safetensors"


@dataclass(frozen=True)
class Source:
    """How the weights were named on the command line.

    name: a path, or hf://owner/name.
    format: what they were said to be, if they were.
    given: fields that were set.
    """

    name: str = "FILE"
    format: str | None = None
    given: Fields | None = None


def remedy(causes: Iterable[Hypothesis], checkpoint: Checkpoint, source: Source) -> str:
    """Return the command that mends the weights, and in words what no command can mend."""
    causes = tuple(causes)
    cures = list(dict.fromkeys(cause.cure for cause in causes if cause.cure))
    mended = [cause for cause in causes if (cause.fields or cause.edits) and not cause.cure]
    if not mended:
        return "; ".join(cures)
    fields = {name: value for cause in mended for name, value in cause.fields.items()}
    if not any(cause.edits for cause in mended) and _may_be_told(fields, checkpoint):
        return "; ".join([_convert(fields, (), source), *cures])
    known = mendable(checkpoint.config)
    named = [cause for cause in mended if cause_named(cause.name, known, checkpoint.config) is not None]
    told = {name: value for cause in mended if cause not in named for name, value in cause.fields.items()}
    return "; ".join([_convert(told, [cause.name for cause in named], source), *cures])


def _may_be_told(fields: Fields, checkpoint: Checkpoint) -> bool:
    """Whether the weights are another config's too, in the format that they are in."""
    config = checkpoint.config.replace(**nested(fields))
    try:
        layouts = get(checkpoint.format).layouts(config)
    except InputError:
        return False
    return layouts.keys() == rows(checkpoint.config).keys()


def _convert(fields: Fields, causes: Iterable[str], source: Source) -> str:
    """The command that writes the weights with another config, and with causes taken into account."""
    words = ["python", "-m", "parity", "convert", source.name, FIXED, "--to", "torch"]
    words += ["--from", source.format] if source.format else []
    for name, value in {**(source.given or {}), **fields}.items():
        words += ["--set", f"{name}={_spelled(name, value)}"]
    for name in causes:
        words += ["--mend", name]
    return shlex.join(words)


def _spelled(name: str, value: Any) -> str:
    if name in ("image_size", "patch_size"):
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"({', '.join(map(repr, value))},)" if isinstance(value, tuple) else str(value)
