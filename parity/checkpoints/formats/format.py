"""A format: columns of layouts, and what is known of the models that people keep in it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Self

from parity.checkpoints.containers.container import Stored
from parity.checkpoints.layout import Array, Column, Layout, Spellings
from vit_spec import InputError, Row, ViTConfig, nearest, rows
from vit_spec.config import typed

Fields = Mapping[str, Any]  # config field, dotted as in "norms.eps" -> value


@dataclass(frozen=True)
class Evidence:
    """What a file shows of its model beside the numbers.

    notes: what is kept with the weights: "config.json" (parsed), "args/...", and so on.
    beside: keys of the file that are not the model's: other towers, decoders, wrappers around it.
    ignored: the model's arrays that hold no parameter, by key.
    axes: the parameters that are there, and the axes that each has.
    sizes: how long their axes are, as far as shapes tell; "inner" is heads times their width.
    variant: the format's table that the keys are of.
    """

    notes: Fields
    beside: frozenset[str]
    ignored: Mapping[str, Stored]
    axes: Mapping[str, frozenset[str]]
    sizes: Mapping[str, int]
    variant: str = ""


# What on the command line changes a field without which the format would do.
_SURGERY = {
    "positions.covers": ("--fold-class-position", "--unfold-class-position"),
    "attention.qkv_bias": ("--add-key-bias", "--drop-key-bias"),
    "num_classes": ("--drop-head",),
    "image_size": ("--image-size",),
}


def nothing(evidence: Evidence) -> Fields:
    """What is read off a file that says nothing of its model."""
    return {}


def no_objection(config: ViTConfig, table: str) -> str:
    """What of a config a format cannot say, where every field for itself says it all."""
    return ""


def no_files(config: ViTConfig) -> Mapping[str, Any]:
    """What is written beside weights whose readers look for nothing else."""
    return {}


@cache
def _parsed(table: str, spellings: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, list[Layout]]:
    """The layouts of a table's lines, by parameter; every file that is recognised asks for all of them."""
    lines: dict[str, list[Layout]] = {}
    for line in filter(str.strip, table.splitlines()):
        parameter, _, layout = line.partition("|")
        lines.setdefault(parameter.strip(), []).append(Layout.parse(layout, dict(spellings)))
    return lines


@dataclass(frozen=True, eq=False)
class Format:
    """A way to keep a ViT's weights.

    name: what it is called on the command line and in files.
    what: one line for a person.
    separator: what stands between the words of a key; nested dictionaries are joined by it.
    tables: by name, the sets of keys that are in use for it, each a line `parameter | key | axes` for each parameter of
        `vit_spec.rows`.  Where a parameter has an axis in some configs only, it has a line for each case: the one that
        holds the config's own axes counts.
    usual: the name of the table that is written for a config; by default the first.
    variant: the one table that is meant, of a file that was read or where the user asked for it.
    spellings: how an axis is spelled in keys where it does not count from zero: {"qkv": ("query", "key", "value")}.
    respelled: by table, what it spells otherwise.
    aliases: regular expressions of what else stands at the beginning of keys that are read -> what the tables have there.
    ignored: regular expressions of keys that hold no parameter, each with the reason.
    alone: the tables of files that hold parameters and nothing else, in which no key is ignored.
    refused: regular expressions of keys of models that compute something else, each with what that is.
    constants: `key | axes`, or a key alone -> the array that readers expect there, or one for each of several keys, as it
        follows from the config; None where they expect none.  `table: key | axes` where one table alone has the key.
    copies: a table of second places that parameters are written to; on reading those keys are among the ignored.
    always: fields that are the same for every model of the format, or a tuple of values that they may have, or a
        function from the config to these; a config with another value cannot be written.  A tuple of one value is for what
        others with the same keys may have otherwise: without the JSON file of the format's library it is an assumption.
    objection: what of a config a table cannot hold though each field is allowed: "norms.after_pool=True with ...".
    assumed: fields of the published models that neither tensors nor the file tell, as the source that the module
        names documents them.
    likely: the same, where it depends on which tensors a file holds; goes before `assumed`, and before what these tensors
        make likely in any format.
    untold: what the classes of the format can be that changes neither keys nor shapes and that `ViTConfig` has no word for,
        with what is assumed of it: {"order of a block": "each norm ahead of its half"}.  Without a config.json it is named.
    settings: what the files beside the weights and other notes say of the config.
    says: the fields that `files` writes, so that any reader has them.
    files: JSON files, by name, with which the format's own library opens a folder.
    recognises: whether a file of these very keys is this format's rather than another's.
    model_types: what Hugging Face's config.json calls the format's models.
    described_in: the JSON file in which the format's library describes a model.
    """

    name: str
    what: str
    separator: str
    tables: Mapping[str, str]
    usual: Callable[[ViTConfig], str] | None = None
    variant: str = ""
    spellings: Spellings = field(default_factory=dict)
    respelled: Mapping[str, Spellings] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Callable[[ViTConfig], Array | None]] = field(default_factory=dict)
    copies: str = ""
    always: Fields = field(default_factory=dict)
    objection: Callable[[ViTConfig, str], str] = no_objection
    assumed: Fields = field(default_factory=dict)
    likely: Callable[[Evidence], Fields] = nothing
    untold: Callable[[Evidence], Mapping[str, str]] = nothing
    settings: Callable[[Evidence], Fields] = nothing
    says: frozenset[str] = frozenset()
    files: Callable[[ViTConfig], Mapping[str, Any]] = no_files
    recognises: Callable[[Evidence], bool] = lambda evidence: False
    model_types: tuple[str, ...] = ()
    described_in: str = "config.json"

    @property
    def passed(self) -> Mapping[str, str]:
        """What of `ignored` holds for the chosen table."""
        return {} if self.variant in self.alone else self.ignored

    def owns(self, notes: Fields) -> bool:
        """Whether a JSON file beside weights describes a model of this format.

        A config.json does where its `model_type` is of the format's, or where it is timm's.
        """
        config = notes.get(self.described_in) or {}
        if self.described_in != "config.json":
            return bool(config)
        if "model_type" in config:
            return config["model_type"] in self.model_types
        return self.name == "timm" and "architecture" in config

    def told(self, evidence: Evidence) -> Fields:
        """Return what the file, and the files beside it, say of its config.

        Raises:
            InputError: JSON that is not as the format's library writes it; as `settings` says.
        """
        try:
            return {name: typed(name, value) for name, value in self.settings(evidence).items()}
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # as many as JSON has types
            what = f"what lies beside its weights cannot be a config ({type(error).__name__}: {error})"
            raise InputError(f"{what}: correct {self.described_in}, or take it away") from None

    def of(self, variant: str) -> Self:
        """Return the format with one of its tables chosen.

        Raises:
            InputError: it has no such table; says the nearest.
        """
        if variant not in self.tables:
            hint = nearest(variant, self.tables) or f": give one of {', '.join(self.tables)}"
            raise InputError(f"format {self.name!r} has no variant {variant!r}{hint}")
        return replace(self, variant=variant)

    def full_name(self, config: ViTConfig) -> str:
        """Return the name with the variant, where there are several."""
        return self.name if len(self.tables) == 1 else f"{self.name}:{self._table(config)}"

    def lines(self, variant: str) -> dict[str, list[Layout]]:
        """Return the layouts that a table has for each parameter."""
        spellings = {**self.spellings, **self.respelled.get(variant, {})}
        return _parsed(self.tables[variant], tuple(spellings.items()))

    def layouts(self, config: ViTConfig) -> Column:
        """Return where each parameter of this config lives.

        Raises:
            InputError: a model that the format cannot say, a parameter that it has no place for, or a mistake in its table.
        """
        table = self._table(config)
        lines = self.lines(table)
        if unsaid := [*self._never(config), *(f"has no place for {name}" for name in rows(config) if name not in lines)]:
            flags = (flag for name, flags in _SURGERY.items() for flag in flags if f" {name}=" in "".join(unsaid))
            remedy = "".join(f", or {flag}" for flag in flags)
            raise InputError(f"format {self.name!r} {'; '.join(unsaid)}: choose another format{remedy}")
        if what := self.objection(config, table):
            raise InputError(f"format {self.name!r} cannot hold {what}: choose another format")
        column = {name: self._layout(row, lines.get(name, [])) for name, row in rows(config).items()}
        owners: dict[str, Layout] = {}
        for layout in column.values():
            other = owners.setdefault(layout.key, layout)
            if other is not layout and not (other.is_part and layout.is_part):
                raise InputError(f"format {self.name!r} keeps several parameters under one key: {layout.key}")
        return column

    def fixed(self, config: ViTConfig) -> dict[str, Array]:
        """Return the arrays that are written beside the parameters, by key."""
        arrays = {}
        for line, values in self.constants.items():
            table, _, line = line.rpartition(": ")
            array, free = values(config) if table in ("", self._table(config)) else None, "|" not in line
            if array is None:
                continue
            layout = Layout.parse(f"{line} | 1" if free else line, self.spellings)
            shape = layout.shape(config.sizes)
            whole = array if free else array.reshape(array.size // max(1, prod(shape)) or 1, *shape)
            for n, key in enumerate(layout.keys(config.sizes)):
                arrays[key] = array if free else whole[min(n, len(whole) - 1)]
        return arrays

    def copied(self, config: ViTConfig) -> Column:
        """Return the second places of parameters that the format keeps twice."""
        lines = [line.partition("|") for line in filter(str.strip, self.copies.splitlines())]
        return {name.strip(): self._layout(rows(config)[name.strip()], [Layout.parse(line)]) for name, _, line in lines}

    def _table(self, config: ViTConfig) -> str:
        return self.variant or (self.usual(config) if self.usual else next(iter(self.tables)))

    def _never(self, config: ViTConfig) -> Iterator[str]:
        """Say which fields no model of the format has as the config has them."""
        for name, allowed in self.always.items():
            allowed = allowed(config) if callable(allowed) else allowed
            values = allowed if isinstance(allowed, tuple) else (allowed,)
            if (value := config.at(name)) not in values:
                yield f"cannot hold {name}={value!r}, only {' or '.join(map(repr, values))}"

    def _layout(self, row: Row, layouts: list[Layout]) -> Layout:
        """Return the one line that holds exactly the axes of `row`: so no format can drop an axis."""
        fitting = [layout for layout in layouts if sorted(layout.words) == sorted(row.axes)]
        if len(fitting) != 1:
            given = "; ".join(map(str, layouts))
            raise InputError(
                f"format {self.name!r} has no place for {row.name}: of {given}, one must hold the axes {' '.join(row.axes)}"
            )
        lengths = dict(zip(row.axes, row.shape, strict=True))
        for word in fitting[0].spelled:
            spelling = fitting[0].spellings.get(word)
            if spelling is not None and len(spelling) != lengths[word]:
                raise InputError(f"format {self.name!r} spells {word} as {spelling}: it has {lengths[word]} places")
        return fitting[0]
