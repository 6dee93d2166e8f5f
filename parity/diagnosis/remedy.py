"""What to do about a cause: a command line that writes the weights anew, or what to correct elsewhere."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parity.diagnosis.trial import Hypothesis
from parity.formats import Fields, get
from parity.inference import nested
from parity.weights import Checkpoint
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
    fields = {name: value for cause in causes for name, value in cause.fields.items()}
    edits = [edit for cause in causes for edit in cause.edits]
    cures = list(dict.fromkeys(cause.cure for cause in causes if cause.cure))
    if fields and not edits and _may_be_told(fields, checkpoint):
        return "; ".join([_convert(fields, source), *cures])
    if fields or edits:
        return "; ".join([_python(fields, edits, source), *cures])
    return "; ".join(cures)


def _may_be_told(fields: Fields, checkpoint: Checkpoint) -> bool:
    """Whether the weights are another config's too, in the format that they are in."""
    config = checkpoint.config.replace(**nested(fields))
    try:
        layouts = get(checkpoint.format).layouts(config)
    except InputError:
        return False
    return layouts.keys() == rows(checkpoint.config).keys()


def _convert(fields: Fields, source: Source) -> str:
    """The weights as they are, with another config."""
    words = ["python", "-m", "parity", "convert", source.name, FIXED, "--to", "torch"]
    words += ["--from", source.format] if source.format else []
    for name, value in {**(source.given or {}), **fields}.items():
        words += ["--set", f"{name}={_spelled(value)}"]
    return shlex.join(words)


def _spelled(value: Any) -> str:
    return f"({', '.join(map(repr, value))},)" if isinstance(value, tuple) else str(value)


def _python(fields: Fields, edits: list[Any], source: Source) -> str:
    """A line of Python, on the command line."""
    made: dict[str, str] = {}
    for edit in edits:
        before = made.get(edit.parameter, f"p({edit.parameter!r})")
        made[edit.parameter] = edit.code.format(w=before if edit.parameter not in made else f"({before})")
    options = f", format={source.format!r}" if source.format else ""
    options += f", given={dict(source.given)!r}" if source.given else ""
    changes = ", ".join(f"{part}={value!r}" for part, value in nested(fields).items())
    config = f"c.config.replace({changes})" if changes else "c.config"
    arrays = ", ".join(f"{name!r}: ({code}).astype(kind)" for name, code in made.items())
    lines = (
        "import numpy as np, parity",
        "from parity.surgery.edit import changed",
        "from parity.weights import parameter",
        f"c = parity.load({source.name!r}{options})",
        "p = lambda name: parameter(c, name)",
        "kind = p('patch_embed.proj.weight').dtype",
        f"c = changed(c, {config}, {{{arrays}}}, ())",
        f"parity.write(c, {FIXED!r}, 'torch')",
    )
    return shlex.join(["python", "-c", "; ".join(lines)])
