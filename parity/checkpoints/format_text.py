"""Print a format as a file that `format_file` reads: `python -m parity formats --show FORMAT`."""

import re
from collections.abc import Iterator
from typing import Any

from parity.checkpoints.columns import Piece, parameter_of, pieces_of
from parity.checkpoints.field_defaults import HIDDEN_FIELDS
from parity.checkpoints.format_file import REQUIRED, word_lines
from parity.checkpoints.formats import Format
from parity.checkpoints.formats.format import no_fields
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.layout import FIXED_SIZES

# Fields that are left out: two belong to a single model, the third is only an initial value.
_NOT_OF_FORMAT = ("image_size", "num_heads", "norms.layer_scale")
_OF_FIXED_POSITIONS = ("positions.table", "positions.covers")


def format_text(format: Format) -> str:
    """Return a format in the form of a file: the variant that it has, or else its first one.

    For a built-in format it is a start for a format of one's own: a file cannot say all that a module can.
    """
    variant = format.variant or next(iter(format.tables))
    entries, definition = list(format.table_layouts(variant).items()), format.definition
    used = {axis for _, layouts in entries for layout in layouts for axis in layout.key_axes}
    spellings = {**format.spellings, **format.variant_spellings.get(variant, {})}
    spellings = {axis: words for axis, words in spellings.items() if axis in used}
    fields = dict(definition.fields) if definition else _hidden_fields(format, variant)
    lines = [f"name: {format.name}" if definition else f"name: my_{re.sub(r'[^A-Za-z0-9_]', '_', format.name)}"]
    lines += [f"description: {format.description}", *word_lines(spellings, fields)]
    lines += [f"proven: {definition.proven}"] if definition and definition.proven else []
    lines += [f"strip: {prefix}" for prefix in (definition.wrappers if definition else ())]
    ignored = definition.ignored if definition else _ignored_keys(format, variant)
    constants = definition.constants if definition else {}
    lines += [f"ignore: {pattern} {reason}" for pattern, reason in ignored.items() if pattern not in constants]
    lines += [f"constant: {pattern} {value} {ignored[pattern]}" for pattern, value in constants.items()]
    rows = [(name, layout) for name, layouts in entries for layout in layouts]
    optional = definition.optional if definition else {name for name, _ in entries if parameter_of(name) not in REQUIRED}
    names = [f"{name}?" if name in optional else name for name, _ in rows]
    widths = max(map(len, names)), max(len(layout.key) for _, layout in rows)
    table = [
        f"{name:{widths[0]}} | {layout.key:{widths[1]}} | {layout.axes_text}"
        for name, (_, layout) in zip(names, rows, strict=True)
    ]
    return "\n".join([*_remarks(format, variant), *lines, "", *table]) + "\n"


def _hidden_fields(format: Format, variant: str) -> dict[str, Any]:
    """Return the fields that no tensor shows and that a built-in format takes as known, or assumes."""
    constant = {
        name: value for name, value in format.constraints.items() if not isinstance(value, tuple) and not callable(value)
    }
    hidden = HIDDEN_FIELDS + (_OF_FIXED_POSITIONS if constant.get("positions.kind") == "fixed" else ())
    known = {**{name: value for name, value in constant.items() if name in hidden}, **format.assumed}
    table = format.table_layouts(variant)
    first = pieces_of(table, "blocks.mlp.fc1.weight")
    # The tensors show which models are gated.
    if any(Piece.parse(name).axis or "glu" in layout.parameter_axes for name in first for layout in table[name]):
        known.pop("mlp.activation", None)
    return {name: value for name, value in known.items() if name not in _NOT_OF_FORMAT}


def _ignored_keys(format: Format, variant: str) -> dict[str, str]:
    """Return the keys that a variant of a built-in format ignores, without those that it has a line for."""
    layouts = [layout for several in format.table_layouts(variant).values() for layout in several]
    keys = [key for layout in layouts for key in layout.keys(dict.fromkeys(layout.key_axes, 1) | FIXED_SIZES)]
    patterns = format.with_variant(variant).ignored_keys_of_variant
    return {each: why for each, why in patterns.items() if not any(re.fullmatch(each, key) for key in keys)}


def _remarks(format: Format, variant: str) -> Iterator[str]:
    """Yield comments on what a file cannot say about a built-in format."""
    if format.definition:
        return
    others = [f"{format.name}:{each}" for each in format.tables if each not in ("", variant)]
    yield f"# Format {format.name}{f', variant {variant}' if variant else ''}, as a start for a format of your own."
    if others:
        yield f"# Other variants: {', '.join(others)}."
    features = {
        "other names of the same keys": format.aliases,
        "arrays of constants that are written": format.constants,
        "defaults that depend on which parameters there are": format.infer_assumed is not no_fields,
        "second copies of parameters": format.duplicates,
        "the config file of its library": format.library != LibraryFiles(),
    }
    if text := ", ".join(what for what, is_used in features.items() if is_used):
        yield f"# The built-in format also has what a file cannot say: {text}."
    yield "# No tensor shows the fields after `set:`; correct them for your model."
    yield "# A ? marks a parameter that a checkpoint may lack; remove the lines, or the ?, that do not fit your model."
