"""A checkpoint format: the keys under which a library stores a ViT, and facts about the library's models.

To add a format, write a module with a `FORMAT` (`torchvision.py` is a short example), and list it in `__init__.py`.  Users
define formats in files; see `parity/checkpoints/format_file.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod
from types import MappingProxyType
from typing import Self

from parity.checkpoints.columns import (
    SPLIT_AXES,
    Column,
    Piece,
    check_parts,
    check_pieces,
    check_unique_keys,
    parameter_of,
    pieces_by_parameter,
)
from parity.checkpoints.formats.definition import Definition
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.layout import Array, Layout, Sizes, Spellings
from vit_spec import InputError, ViTConfig, nearest, rows
from vit_spec.config import coerce_field

PROJECTION = "patch_embed.proj.weight"  # every checkpoint has this parameter, as one array


def no_fields(evidence: Evidence) -> Fields:
    """Return no fields, as for a format that reads nothing besides the tensors."""
    return {}


def nothing_unsupported(config: ViTConfig, variant: str) -> str:
    """Return "": the default of a format that can store every config that satisfies its `constraints`."""
    return ""


@cache
def _parse_table(table: str, spellings: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, list[Layout]]:
    """Return the layouts in a table, by parameter.  Cached, because recognising a file needs all tables."""
    layouts: dict[str, list[Layout]] = {}
    for line in filter(str.strip, table.splitlines()):
        parameter, _, layout = line.partition("|")
        layouts.setdefault(parameter.strip(), []).append(Layout.parse(layout, dict(spellings)))
    return layouts


@cache
def _pieces_in_table(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return `pieces_by_parameter` of the names in a table.  Cached, because every config needs it."""
    return pieces_by_parameter(names)


@dataclass(frozen=True, eq=False)
class Format:
    """A checkpoint format.

    The tensors of a checkpoint determine most of its config: the sizes, and which tokens, biases and norms the model has.
    `tables` says where the tensors are.  The other attributes add facts that the tensors do not show, and say which configs
    the format cannot store.  Only the first four and `assumed_behaviour` are required.  A "field" below is a field
    of `ViTConfig`, named with dots as in "norms.eps".

    Where the parameters are:

    name: the name on the command line and in the metadata of files, e.g. "timm".
    description: one line for the list of formats.
    separator: the character that joins the keys of nested dictionaries into one key, "." or "/".
    tables: variant -> table.  Each variant is a set of keys that is in use for the models of the format, for example the
        keys of an old and of a new release.  A format with one set of keys names it "".  A table has a line
        `parameter | key | axes` for each parameter of `vit_spec.rows` that the models can have; `layout.py` explains
        `key | axes`, and `columns.py` lines for pieces of a parameter.  If the axes of a parameter depend on the config,
        the table has a line for each case, and the line with exactly the axes of the config is used.  Checkpoints are
        recognised by `patch_embed.proj.weight`, `blocks.mlp.fc1.weight` and `blocks.mlp.fc2.weight`, so every table has
        lines for these.
    default_variant: config -> the variant to write.  By default, the first.
    variant: the chosen variant, or "" for none.  Modules do not set it; `with_variant` does.
    spellings: axis -> the words for its indices in keys, if they are not 0, 1, 2, ...: {"qkv": ("query", "key", "value")}.
    variant_spellings: variant -> the spellings in which it differs from `spellings`.
    aliases: regular expression for another beginning of keys -> the beginning in the tables.  For reading only.
    ignored_keys: regular expression for whole keys of arrays that are not parameters -> the reason, which is reported to
        the user.
    ignored_values: an expression of `ignored_keys` whose reason is about the values of the arrays -> whether an array has
        these values in a model of a config.  An array with other values is refused.
    strict_variants: the variants to which `ignored_keys` does not apply.
    refused_keys: regular expression for a part of a key, which shows that the model computes another function -> a
        description of that function, for the error message.
    constants: arrays to write besides the parameters, because the format's library expects them.  Each is given as
        `key | axes`, or as a key alone for an array of any shape -> a function from the config to the array, or to None if
        the model has none.  If a key has braced axes, as in `{block}`, the array has one entry for each key, or one for all
        keys.  A line `variant: key | axes` applies to that variant only.  `ignored_keys` must match the keys, because
        reading refuses unknown keys.
    duplicates: a table of second keys under which parameters are also written, except in a variant whose table has the same
        key.  `ignored_keys` must match these keys.

    Which configs the format can store:

    constraints: field -> the values that it may have.  A config with another value is not written, and a checkpoint with
        another value is not of this format.  When a checkpoint is read, some of these values are taken as known:
        - A value: every model of the format's library has it, so it is known.  But no tensor shows a field of
          `field_defaults.DEFAULTS`, and other code with the same keys may have another value.  Such a field is known only
          if `config_file` beside the weights describes a model of the format.  Otherwise it is an assumption.
        - A tuple of values: a model has one of them, so the tensors or the attributes below must determine which.
        - A function from the config to one of these: not known.
    unsupported: (config, variant) -> the values that the variant cannot store together, although each field satisfies
        `constraints`; "" if it can store the config.  The text completes the sentence "format X cannot store ...", as in
        "norms.after_pool=True with norms.after_blocks=True".

    Facts that the tensors do not show:

    read_config: evidence -> the fields that the checkpoint states in JSON files, in the arguments of a training script or
        in arrays of constants.  They override values that are known from `constraints`.  A contradiction to the tensors is
        an error.  Raises InputError for a model of the format that `ViTConfig` cannot express.
    assumed: field -> its value in the published models, from the source that the docstring of the module names.  It is used
        if the checkpoint does not state the field, and reported to the user as an assumption.  If the value of "num_heads"
        is None, the user must give the number.
    infer_assumed: evidence -> the same for fields whose value depends on which tensors there are.  Overrides `assumed`.
    assumed_behaviour: evidence -> the assumed behaviour for each property in which models with these keys may differ, and
        which neither a tensor nor a field shows: {"patch extraction": "without overlap"}.  It is reported to the user as
        assumptions.  Return {} if the library's config file rules out any other behaviour.

    library: the JSON files of the format's library, and the folders that it opens.
    recognises: evidence -> whether a checkpoint belongs to this format, if its keys fit other formats too.
    definition: the file that defines the format, if a user defines it.
    """

    name: str
    description: str
    separator: str
    tables: Mapping[str, str]
    default_variant: Callable[[ViTConfig], str] | None = None
    variant: str = ""
    spellings: Spellings = field(default_factory=dict)
    variant_spellings: Mapping[str, Spellings] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored_keys: Mapping[str, str] = field(default_factory=dict)
    ignored_values: Mapping[str, Callable[[Array, ViTConfig], bool]] = field(default_factory=dict)
    strict_variants: tuple[str, ...] = ()
    refused_keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Callable[[ViTConfig], Array | None]] = field(default_factory=dict)
    duplicates: str = ""
    constraints: Fields = field(default_factory=dict)
    unsupported: Callable[[ViTConfig, str], str] = nothing_unsupported
    assumed: Fields = field(default_factory=dict)
    infer_assumed: Callable[[Evidence], Fields] = no_fields
    assumed_behaviour: Callable[[Evidence], Mapping[str, str]] = field(kw_only=True)
    read_config: Callable[[Evidence], Fields] = no_fields
    library: LibraryFiles = field(default_factory=LibraryFiles)
    recognises: Callable[[Evidence], bool] = lambda evidence: False
    definition: Definition | None = None

    @property
    def ignored_keys_of_variant(self) -> Mapping[str, str]:
        """`ignored_keys` as they apply to the chosen variant."""
        return {} if self.variant in self.strict_variants else self.ignored_keys

    def stated_fields(self, evidence: Evidence) -> Fields:
        """Return the result of `read_config` with every value checked against the type of its field.

        Raises:
            InputError: as `read_config`, or a JSON file does not have the structure that the format's library writes.
        """
        try:
            return {name: coerce_field(name, value) for name, value in self.read_config(evidence).items()}
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # JSON may have any types
            what = f"the files beside its weights do not describe a config ({type(error).__name__}: {error})"
            raise InputError(f"{what}: correct {self.library.config_file}, or remove it") from None

    @lru_cache(maxsize=256)  # noqa: B019  # formats are few; one object for each variant, so that `layouts` finds it again
    def with_variant(self, variant: str) -> Self:
        """Return the format with one of its variants chosen.

        Raises:
            InputError: there is no such variant; the message suggests the nearest name.
        """
        if variant not in self.tables:
            hint = nearest(variant, self.tables) or f": give one of {', '.join(self.tables)}"
            raise InputError(f"format {self.name!r} has no variant {variant!r}{hint}")
        return replace(self, variant=variant)

    def full_name(self, config: ViTConfig) -> str:
        """Return the name, and if the format has several variants, the variant for a config: "timm:vit".

        A format that a user defines has the version of its table: "mine@1f0c5a9e".
        """
        if self.definition:
            return f"{self.name}@{self.definition.version}"
        return self.name if len(self.tables) == 1 else f"{self.name}:{self._variant_for(config)}"

    def table_layouts(self, variant: str) -> dict[str, list[Layout]]:
        """Return the layouts in the table of a variant, by parameter or by piece of one."""
        spellings = {**self.spellings, **self.variant_spellings.get(variant, {})}
        return _parse_table(self.tables[variant], tuple(spellings.items()))

    def problems(self, config: ViTConfig) -> list[str]:
        """Return why the format cannot store a config, such as "has no key for reg_token"; an empty list if it can."""
        variant = self._variant_for(config)
        table, declared = self.table_layouts(variant), rows(config)
        pieces_in_table = _pieces_in_table(tuple(table))
        missing = [f"has no key for {name}" for name in declared if not pieces_in_table.get(name)]
        if self.definition:
            extra = [name for name in table if parameter_of(name) not in declared and name not in self.definition.optional]
            missing += [f"needs {name} ({self.definition.place(name)}), which the model lacks" for name in extra]
        found = [*self._violated_constraints(config), *missing]
        what = "" if found else self.unsupported(config, variant)
        return [*found, *([f"cannot store {what}"] if what else [])]

    def refusal(self, problems: Iterable[str], others: str = "", flags: Iterable[str] = ()) -> InputError:
        """Return the error for a config that the format cannot store.

        Args:
            problems: the reasons, see `problems`.
            others: a clause that names other formats; "" for none.
            flags: flags of `convert` after which the format can store the config.
        """
        own = [f"change {self.definition.source}"] if self.definition else []
        remedies = ", or ".join([f"choose another format{others}", *own, *flags])
        return InputError(f"format {self.name!r} {'; '.join(problems)}: {remedies}")

    @lru_cache(maxsize=256)  # noqa: B019  # formats are few, and a conversion asks several times for the same layouts
    def layouts(self, config: ViTConfig) -> Column:
        """Return the layout of each parameter of a config, or the layouts of its pieces.

        Raises:
            InputError: the format cannot store this config, or its table has a mistake.
        """
        if problems := self.problems(config):
            raise self.refusal(problems)
        table = self.table_layouts(self._variant_for(config))
        pieces_in_table = _pieces_in_table(tuple(table))
        pieces = [Piece.parse(piece) for name in rows(config) for piece in pieces_in_table[name]]
        check_pieces(map(str, pieces))
        column = {str(piece): self._fitting_layout(piece, table[str(piece)], config) for piece in pieces}
        owners: dict[str, Layout] = {}
        for layout in column.values():
            other = owners.setdefault(layout.key, layout)
            if other is not layout and not (other.is_part and layout.is_part):
                raise InputError(f"format {self.name!r} stores several parameters under one key: {layout.key}")
        return MappingProxyType(column)

    def check_column(self, column: Column, sizes: Sizes) -> None:
        """Check what only the lengths of axes show: no key is used twice, and parameters share no entries of an array.

        Raises:
            InputError: the table has a mistake; the message names the lines.
        """
        check_unique_keys(column, sizes)
        if self.definition:
            check_parts(column, sizes, {name: self.definition.place(name) for name in column})

    def constant_arrays(self, config: ViTConfig) -> dict[str, Array]:
        """Return the arrays of `constants` for a config, by key."""
        arrays = {}
        for line, values in self.constants.items():
            variant, _, line = line.rpartition(": ")
            array, any_shape = values(config) if variant in ("", self._variant_for(config)) else None, "|" not in line
            if array is None:
                continue
            layout = Layout.parse(f"{line} | 1" if any_shape else line, self.spellings)
            shape = layout.shape(config.sizes)
            entries = array if any_shape else array.reshape(array.size // max(1, prod(shape)) or 1, *shape)
            for n, key in enumerate(layout.keys(config.sizes)):
                arrays[key] = array if any_shape else entries[min(n, len(entries) - 1)]
        return arrays

    def duplicate_layouts(self, config: ViTConfig) -> Column:
        """Return the second layout of each parameter in `duplicates`."""
        found = {}
        for line in filter(str.strip, self.duplicates.splitlines()):
            name, _, layout = (part.strip() for part in line.partition("|"))
            found[name] = self._fitting_layout(Piece(name), [Layout.parse(layout)], config)
        first = self.layouts(config) if found else {}
        return {name: layout for name, layout in found.items() if layout.key != first[name].key}

    def _variant_for(self, config: ViTConfig) -> str:
        return self.variant or (self.default_variant(config) if self.default_variant else next(iter(self.tables)))

    def _violated_constraints(self, config: ViTConfig) -> Iterator[str]:
        """Yield a message for each field whose value violates `constraints`."""
        for name, allowed in self.constraints.items():
            allowed = allowed(config) if callable(allowed) else allowed
            values = allowed if isinstance(allowed, tuple) else (allowed,)
            if (value := config.at(name)) not in values:
                yield f"cannot store {name}={value!r}, only {' or '.join(map(repr, values))}"

    def _fitting_layout(self, piece: Piece, layouts: list[Layout], config: ViTConfig) -> Layout:
        """Return the one layout with exactly the axes of a parameter, or of a piece, so that no table can drop an axis."""
        axes = piece.axes(rows(config)[piece.parameter].axes)
        fitting = [layout for layout in layouts if sorted(layout.parameter_axes) == sorted(axes)]
        for axis, parts in SPLIT_AXES.items():
            split = sorted([*parts, *(each for each in axes if each != axis)])
            if grids := [layout for layout in layouts if sorted(layout.parameter_axes) == split]:
                if config.sizes[axis] != prod(config.sizes[part] for part in parts):
                    raise InputError(
                        f"format {self.name!r} stores {piece.parameter} as a grid, which has no place for prefix tokens, "
                        f"but positions.covers is {config.positions.covers!r}: choose another format"
                    )
                fitting += grids
        if len(fitting) != 1:
            given = "; ".join(map(str, layouts))
            raise InputError(
                f"format {self.name!r} has no key, or several, for {piece} with the axes {' '.join(axes)}: "
                f"its table has {given}"
            )
        for word in fitting[0].key_axes:
            spelling = fitting[0].spellings.get(word)
            if spelling is not None and len(spelling) != config.sizes[word]:
                raise InputError(
                    f"format {self.name!r} spells {word} as {spelling}, but it has {config.sizes[word]} indices"
                )
        return fitting[0]
