"""Formats that users define in a file: a line `parameter | key | axes` for each parameter, and facts about the model.

    # The ViT of our laboratory, one array for each head.
    name: mine
    description: the ViT of our laboratory
    set: norms.eps=1e-5
    set: num_heads=6
    words: qkv = q k v
    strip: net.vit.
    ignore: criterion[.].*   weights of the classes in the loss

    cls_token?              | token                                     | width
    patch_embed.proj.weight | to_patches.weight                         | width (ph pw rgb)
    blocks.attn.qkv.weight  | blocks.{block}.heads.{head}.{qkv}.weight  | dim width

`parity/checkpoints/layout.py` explains `key | axes`.  A `?` marks a parameter that a checkpoint may lack.  A parameter with
axes that depend on the config has a line for each case.  A parameter may have a line for each of several pieces, as
`parity/checkpoints/columns.py` explains.  The other lines are:

    name          the name of the format; by default that of the file without its suffix
    description   one line for the list of formats
    set           a field of the config that all models of the format have, and that no tensor shows
    words         the words for the indices of qkv, kv, glu, xy or yx in keys, if they are not 0, 1, 2
    strip         the beginning of the keys, if it is not a known wrapper; a checkpoint may lack it
    ignore        a regular expression for whole keys that are not parameters, and the reason
    constant      the same for arrays that must have certain values, whose digest is between the expression and the reason
    proven        a proof that the model is the one that the config describes: nothing about its behaviour is assumed then
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from parity.checkpoints.columns import SPLIT_AXES, Piece, check_pieces, parameter_of, pieces_of
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.formats import Fields, Format, get, register
from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.definition import Definition
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.layout import FIXED_SIZES, KERAS_GROUPS, NNX_VALUES, Layout, Spellings
from vit_spec import InputError, nearest
from vit_spec.config import coerce_field

MAX_BYTES = 1 << 20  # of a file
MAX_LINE = 2000  # characters
# The parameters that all models have.
REQUIRED = (PROJECTION, "blocks.norm1.weight", "blocks.attn.qkv.weight", "blocks.mlp.fc1.weight", "blocks.mlp.fc2.weight")
MAX_IGNORED = 64  # regular expressions: each is matched by a process of its own

_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode: characters that move or hide text, and line separators
_DIGEST = re.compile(r"[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")
_WORD_LINE = re.compile(r"([a-z_]+)\s*:\s*(.*)")
_WORDS = ("name", "description", "set", "words", "strip", "ignore", "constant", "proven")
_ONCE = ("name", "description", "proven")


def register_format(path: str | PathLike[str]) -> str:
    """Read the file of a format, and make the format known by its name, which is returned.

    Afterwards the name can be given wherever that of a built-in format can, for instance to `parity.load` and
    `parity.convert`, and checkpoints in the format are recognised.

    Raises:
        InputError: the file does not exist, or has a mistake; the message names the line and the remedy.
    """
    format = read_format(path)
    register(format)
    return format.name


def read_format(path: str | PathLike[str]) -> Format:
    """Return the format that a file defines.

    Raises:
        InputError: see `register_format`.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"format file {path} is a folder: give the file of a format")
    if not path.exists():
        folder = path.parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise InputError(f"format file {path} does not exist{nearest(path.name, names) or ': give the file of a format'}")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(f"format file {path} has more than {MAX_BYTES:,} bytes: it is not the file of a format")
    try:
        return parse_format(data.decode("utf-8-sig"), str(path), default_name=path.name.partition(".")[0])
    except UnicodeDecodeError:
        raise InputError(f"format file {path} is not text in UTF-8: give the file of a format") from None


@dataclass
class _Lines:
    """The lines of a file by their kind, each with its number.

    Attributes:
        words: the word before a colon -> the texts after it.
        parameters: parameter name, whether it is optional, key, axes.
    """

    words: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    parameters: list[tuple[int, str, bool, str, str]] = field(default_factory=list)


def parse_format(text: str, source: str, default_name: str = "") -> Format:
    """Return the format that a text defines.

    Args:
        text: the content of a file.
        source: the path of the file, for messages.
        default_name: the name of the format if the text gives none.

    Raises:
        InputError: the text has a mistake; the message names the line and the remedy.
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{source} has more than {MAX_BYTES:,} characters: it is not the table of a format")
    lines = _split_lines(text, source)
    name = _only(lines, "name") or default_name
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{source}: {name!r} is not a name of a format: add a line such as `name: mine`, of letters, digits, _, . and -"
        )
    spellings = _parse_words(lines, source)
    column = _parse_column(lines, spellings, source)
    fields, field_lines = dict[str, Any](), dict[str, int]()
    for number, value in lines.words["set"]:
        with _located(f"{source}:{number}"):
            given = {each: coerce_field(each, word) for each, word in parse_overrides([value], "set:").items()}
            if twice := fields.keys() & given.keys():
                raise InputError(f"{twice.pop()} is set twice: leave one of the lines out")
            fields |= given
            field_lines |= dict.fromkeys(given, number)
    numbers: dict[str, int] = {}
    for number, parameter, *_ in lines.parameters:
        numbers.setdefault(parameter, number)
    required = {parameter for _, parameter, is_optional, *_ in lines.parameters if not is_optional}
    for each in required:
        if mixed := [piece for piece in pieces_of(numbers, parameter_of(each)) if piece not in required]:
            raise InputError(f"{source}:{numbers[mixed[0]]}: {mixed[0]} has a ?, but {each} has none: correct one of them")
    table = "\n".join(f"{p}{'' if p in required else '?'} | {layout}" for p, layout in column)
    _check_lengths(table, source)
    proven, description = _only(lines, "proven"), _only(lines, "description") or f"defined in {source}"
    definition = Definition(
        source=source,
        table=_own_text(name, spellings, fields, table, proven),
        lines=numbers,
        optional=frozenset(numbers) - required,
        wrappers=tuple(value for _, value in lines.words["strip"] if value),
        ignored=_parse_ignored(lines, source),
        constants=_parse_constants(lines, source),
        fields=fields,
        field_lines=field_lines,
        proven=proven,
    )
    return Format(
        name=name,
        description=description,
        separator="/" if any("/" in layout.key for _, layout in column) else ".",
        tables={"": "\n".join(f"{parameter} | {layout}" for parameter, layout in column)},
        spellings=spellings,
        constraints={each: (value,) for each, value in fields.items()},  # one allowed value, which may itself be a tuple
        read_config=lambda evidence: fields,
        assumed_behaviour=(lambda evidence: {}) if proven else _assumed_behaviour,
        recognises=lambda evidence: True,
        definition=definition,
    )


def _assumed_behaviour(evidence: Evidence) -> dict[str, str]:
    """Return the assumptions about a model whose lines are not proven: they say where the gate is, in any order."""
    found = dict(common_behaviour(evidence))
    if "MLP gate" in found:
        found["MLP gate"] = "SiLU of glu=0"
    return found


def _own_text(name: str, spellings: Spellings, fields: dict[str, Any], table: str, proven: str) -> str:
    """Return what a file says about the models of a format, in one spelling."""
    lines = [f"name: {name}", *word_lines(spellings, fields), *([f"proven: {proven}"] if proven else []), table]
    return "\n".join(lines) + "\n"


def word_lines(spellings: Spellings, fields: Fields) -> Iterator[str]:
    """Yield the lines `words:` and `set:` of a file."""
    for axis, words in sorted(spellings.items()):
        yield f"words: {axis} = {' '.join(words)}"
    for name, value in sorted(fields.items()):
        yield f"set: {name}={value if isinstance(value, str) else repr(value)}"


# Parts of a file ------------------------------------------------------------------------------------------------------


def _split_lines(text: str, source: str) -> _Lines:
    """Return the lines of a file by their kind."""
    lines = _Lines()
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = line.replace("\t", " ").strip()
        if odd := next((each for each in line if unicodedata.category(each) in _CONTROL_CATEGORIES), ""):
            raise InputError(f"{source}:{number}: the character {odd!a} has no place in a line: remove it")
        if len(line) > MAX_LINE:
            raise InputError(f"{source}:{number}: a line of more than {MAX_LINE} characters: shorten it")
        if not line or line.startswith("#"):
            continue
        if word := _WORD_LINE.fullmatch(line):
            if word[1] not in _WORDS:
                hint = nearest(word[1], _WORDS) or f": the words are {', '.join(_WORDS)}"
                raise InputError(f"{source}:{number}: unknown word '{word[1]}:'{hint}")
            if word[1] in _ONCE and lines.words[word[1]]:
                raise InputError(f"{source}:{number}: a second line `{word[1]}:`: leave one of them out")
            if not word[2]:
                raise InputError(f"{source}:{number}: nothing follows `{word[1]}:`: complete the line, or leave it out")
            lines.words[word[1]].append((number, word[2]))
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 3 or not all(parts):
            words = ", ".join(f"`{word}:`" for word in _WORDS)
            raise InputError(
                f"{source}:{number}: {line[:80]!r} is not `parameter | key | axes`, and begins neither with # nor with one "
                f"of {words}"
            )
        parameter = parts[0].removesuffix("?").strip()
        lines.parameters.append((number, parameter, parts[0].endswith("?"), parts[1], parts[2]))
    return lines


def _only(lines: _Lines, word: str) -> str:
    """Return the text after a word that is given once, or ""."""
    return lines.words[word][0][1] if lines.words[word] else ""


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Put the file and the number of the line in front of the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _parse_words(lines: _Lines, source: str) -> Spellings:
    """Return the words for the indices of axes in keys."""
    spellings: dict[str, tuple[str, ...]] = {}
    for number, text in lines.words["words"]:
        axis, equals, words = (part.strip() for part in text.partition("="))
        found = tuple(words.split())
        if not equals or axis not in FIXED_SIZES:
            known = ", ".join(FIXED_SIZES)
            raise InputError(f"{source}:{number}: {text!r}: write it as `words: qkv = q k v`, for one of the axes {known}")
        if axis in spellings:
            raise InputError(f"{source}:{number}: a second line with words for {axis}: leave one of them out")
        if len(set(found)) != len(found) or len(found) != FIXED_SIZES[axis]:
            raise InputError(f"{source}:{number}: {axis} needs {FIXED_SIZES[axis]} different words, but has {words!r}")
        if any(re.search(r"[{}|]", word) for word in found):
            raise InputError(f"{source}:{number}: a word has a brace or a bar: leave it out")
        spellings[axis] = found
    return spellings


def _parse_ignored(lines: _Lines, source: str) -> dict[str, str]:
    """Return the regular expressions for keys to ignore, with their reasons."""
    found: dict[str, str] = {}
    constants = [(number, re.sub(r"\s+\S+", "", text, count=1)) for number, text in lines.words["constant"]]
    for number, text in [*lines.words["ignore"], *constants]:
        pattern, _, reason = text.partition(" ")
        if not reason.strip():
            raise InputError(
                f"{source}:{number}: no reason: write the expression, a blank, and why these keys are not parameters"
            )
        if pattern in found:
            raise InputError(f"{source}:{number}: a second line for {pattern}: leave one of them out")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{source}:{number}: {pattern!r} is not a regular expression ({error}): correct it") from None
        if len(found) == MAX_IGNORED:
            raise InputError(f"{source}:{number}: more than {MAX_IGNORED} regular expressions: join some with |")
        found[pattern] = reason.strip()
    return found


def _parse_constants(lines: _Lines, source: str) -> dict[str, str]:
    """Return the regular expressions for keys of constants, with the digests of their arrays."""
    found: dict[str, str] = {}
    for number, text in lines.words["constant"]:
        pattern, _, rest = text.partition(" ")
        value = rest.split()[0] if rest.split() else ""
        if not _DIGEST.fullmatch(value):
            raise InputError(f"{source}:{number}: {value!r} is not a digest of 12 hexadecimal digits, as --like writes it")
        found[pattern] = value
    return found


def _parse_column(lines: _Lines, spellings: Spellings, source: str) -> list[tuple[str, Layout]]:
    """Return every parameter with its layout, checked against the parameters and axes that a ViT can have."""
    places, column = dict[str, tuple[int, str, Layout]](), list[tuple[str, Layout]]()
    for number, parameter, _, key, axes in lines.parameters:
        where = f"{source}:{number}"
        layout = _parse_layout(parameter, f"{key} | {axes}", spellings, where)
        same = [
            each for name, each in column if name == parameter and set(each.parameter_axes) == set(layout.parameter_axes)
        ]
        if same:
            raise InputError(f"{where}: a second line for {parameter} with the same axes: leave one of them out")
        if parameter == PROJECTION and layout.key_axes:
            raise InputError(f"{where}: the key of {parameter} has braces: it must be one array")
        other_number, other, earlier = places.setdefault(layout.key, (number, parameter, layout))
        # A model may have one parameter for the whole array, or several for its parts.
        if other != parameter and not layout.is_part and not earlier.is_part:
            raise InputError(f"{where}: {key} is the key of {other} too, on line {other_number}: correct one of them")
        column.append((parameter, layout))
    if missing := [name for name in REQUIRED if name not in {parameter_of(parameter) for parameter, _ in column}]:
        raise InputError(f"{source}: no line for {', '.join(missing)}: add one, in the form `parameter | key | axes`")
    with _located(source):
        check_pieces(dict.fromkeys(parameter for parameter, _ in column))
    return column


def _parse_layout(parameter: str, text: str, spellings: Spellings, where: str) -> Layout:
    """Return the layout of a parameter, checked against the parameters and axes that a ViT can have.

    Args:
        parameter: its name, with the axes of a piece.
        text: its key and its axes.
        spellings: the spellings of axes in keys.
        where: the file and the line, for messages.
    """
    known = known_axes()
    if parameter_of(parameter) not in known:
        hint = nearest(parameter_of(parameter), known) or "; `python -m parity formats --show torch` lists all"
        raise InputError(f"{where}: no ViT has a parameter {parameter_of(parameter)!r}{hint}")
    with _located(where):
        piece, layout = Piece.parse(parameter), Layout.parse(text, spellings)
    of_parameter = known[piece.parameter]
    if piece.axis and not any(piece.axis in each for each in of_parameter):
        expected = " or ".join(" ".join(sorted(each)) for each in sorted(of_parameter, key=sorted))
        raise InputError(f"{where}: {piece.parameter} has the axes {expected}, and not {piece.axis}: correct the line")
    possible = {frozenset(piece.axes(each)) for each in of_parameter if not piece.axis or piece.axis in each}
    used = [*layout.key_axes, *(axis.name for axis in layout.array_axes), *layout.parameter_axes]
    used += [axis for segment in (*layout.before, *layout.after) for axis in segment]
    words = sorted({axis for sets in known.values() for axes in sets for axis in axes} | FIXED_SIZES.keys())
    if unknown := [axis for axis in used if axis not in words]:
        hint = nearest(unknown[0], words) or f": the axes are {', '.join(words)}"
        raise InputError(f"{where}: {unknown[0]!r} is not an axis of a ViT{hint}")
    if frozenset(layout.parameter_axes) not in possible:
        expected = " or ".join(" ".join(sorted(each)) for each in sorted(possible, key=sorted))
        given = " ".join(sorted(layout.parameter_axes))
        raise InputError(f"{where}: {parameter} has the axes {expected}, but the line has {given}: correct the line")
    for axis in layout.array_axes:
        length = FIXED_SIZES.get(axis.name)
        if length is not None and axis.start + FIXED_SIZES.get(axis.parameter_axis or "", 1) > length:
            raise InputError(f"{where}: {axis} is beyond the end of {axis.name}, which has {length} indices")
    _check_key(layout, where)
    return layout


def _check_key(layout: Layout, where: str) -> None:
    """Raise InputError if containers change a key of the layout when they are read, as of the state of an NNX module."""
    if "/" not in layout.key:
        return
    for key in layout.keys(dict.fromkeys(layout.key_axes, 1) | FIXED_SIZES):
        if key.rpartition("/")[2] in NNX_VALUES or key.startswith(KERAS_GROUPS):
            raise InputError(
                f"{where}: the key {key} ends or begins like the names that NNX and Keras add to keys, which are removed "
                f"when a file is read: leave that word out of the key, or store the arrays under other keys"
            )


def _check_lengths(table: str, source: str) -> None:
    """Raise InputError if a table is too long to be stored in a file and read again."""
    longest = max(table.splitlines(), key=len, default="")
    if len(longest) > MAX_LINE or len(table) > MAX_BYTES // 2:
        raise InputError(f"{source}: its table is too long, or its line {longest[:40]!r}...: shorten the keys")


@cache
def known_axes() -> dict[str, frozenset[frozenset[str]]]:
    """Return all parameters that a ViT can have, by name, each with the sets of axes that it can have."""
    table = get("torch").table_layouts("")  # the state dict of the twin stores every config
    found = {name: {frozenset(each.parameter_axes) for each in layouts} for name, layouts in table.items()}
    for axis, parts in SPLIT_AXES.items():
        for sets in found.values():
            sets |= {frozenset((axes - {axis}) | set(parts)) for axes in sets if axis in axes}
    return {name: frozenset(sets) for name, sets in found.items()}
