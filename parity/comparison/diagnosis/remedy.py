"""The fix for a cause: a command that converts the checkpoint, or an instruction."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parity.checkpoints.config_inference import override_fields
from parity.checkpoints.formats import Fields, get
from parity.checkpoints.weights import Checkpoint
from parity.comparison.diagnosis.hypothesis import Hypothesis
from parity.comparison.diagnosis.repair import find_cause, repairable_causes
from vit_spec import InputError, ViTConfig, rows
from vit_spec.config import FIELDS

FIXED_FILE = "FIXED.safetensors"


@dataclass(frozen=True)
class CommandLineSource:
    """The checkpoint as it was given on the command line.

    name: a path, or hf://owner/name.
    format: the value of --from, if it was given.
    given: the fields that --set gave.
    strip: the value of --strip, if it was given.
    ignore: the values of --ignore.
    format_files: the values of --format-file.
    """

    name: str = "FILE"
    format: str | None = None
    given: Fields | None = None
    strip: str | None = None
    ignore: tuple[str, ...] = ()
    format_files: tuple[str, ...] = ()

    def options(self, fields: Fields) -> list[str]:
        """Return the words of the command line that read the checkpoint, with further fields of the config."""
        words = [word for path in self.format_files for word in ("--format-file", path)]
        words += ["--from", self.format] if self.format else []
        words += ["--strip", self.strip] if self.strip else []
        words += [word for pattern in self.ignore for word in ("--ignore", pattern)]
        for name, value in {**(self.given or {}), **fields}.items():
            words += ["--set", f"{name}={_flag_value(name, value)}"]
        return words


def remedy(causes: Iterable[Hypothesis], checkpoint: Checkpoint, source: CommandLineSource) -> str:
    """Return the command that fixes these causes, and instructions for the causes that no command fixes, a line each."""
    causes = tuple(causes)
    manual_fixes = list(dict.fromkeys(cause.manual_fix for cause in causes if cause.manual_fix))
    by_command = [cause for cause in causes if (cause.fields or cause.edits) and not cause.manual_fix]
    if not by_command:
        return "\n".join(manual_fixes)
    fields = {name: value for cause in by_command for name, value in cause.fields.items()}
    if not any(cause.edits for cause in by_command) and _config_suffices(fields, checkpoint):
        return "\n".join([_convert_command(_with_dependents(fields, checkpoint.config), (), source), *manual_fixes])
    repairable = repairable_causes(checkpoint.config)
    by_mend = [cause for cause in by_command if find_cause(cause.name, repairable, checkpoint.config) is not None]
    other_fields = {name: value for cause in by_command if cause not in by_mend for name, value in cause.fields.items()}
    return "\n".join([_convert_command(other_fields, [cause.name for cause in by_mend], source), *manual_fixes])


def _with_dependents(fields: Fields, config: ViTConfig) -> Fields:
    """Return the fields, and the values of those in `config` that --set would replace by what is published with them."""
    expected, found = config.with_fields(fields), override_fields(config, (), fields)[0]
    return {**fields, **{name: expected.at(name) for name in FIELDS if expected.at(name) != found.at(name)}}


def _config_suffices(fields: Fields, checkpoint: Checkpoint) -> bool:
    """Return whether the format holds the same parameters with these fields of the config, so that --set is enough."""
    config = checkpoint.config.with_fields(fields)
    try:
        layouts = get(checkpoint.format).layouts(config)
    except InputError:
        return False
    return layouts.keys() == rows(checkpoint.config).keys()


def _convert_command(fields: Fields, causes: Iterable[str], source: CommandLineSource) -> str:
    """Return the command that writes the checkpoint with other fields of the config and with causes repaired."""
    words = ["python", "-m", "parity", "convert", source.name, FIXED_FILE, "--to", "torch", *source.options(fields)]
    for name in causes:
        words += ["--mend", name]
    return shlex.join(words)


def _flag_value(name: str, value: Any) -> str:
    if name in ("image_size", "patch_size"):
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"({', '.join(map(repr, value))},)" if isinstance(value, tuple) else str(value)
