"""A format: one column of layouts, and the few facts that a column cannot say."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from parity.layout import Column, Layout, Spellings
from vit_spec import InputError, Row, ViTConfig, rows


@dataclass(frozen=True, eq=False)
class Format:
    """A way to keep a ViT's weights.

    name: what it is called on the command line and in files.
    what: one line for a person.
    separator: what stands between the words of a key; nested dictionaries are joined by it.
    table: a line `parameter | key | axes` for each parameter of `vit_spec.rows`.  Where a parameter has an axis
        in some configs only, it has a line for each case: the one that holds the config's own axes counts.
    spellings: how an axis is spelled in keys where it does not count from zero: {"qkv": ("query", "key", "value")}.
    ignored: patterns of keys that hold no parameter, each with the reason.
    """

    name: str
    what: str
    separator: str
    table: str
    spellings: Spellings = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    def layouts(self, config: ViTConfig) -> Column:
        """Return where each parameter of this config lives.

        Raises:
            InputError: a parameter that the format has no place for, or a mistake in the format's own table.
        """
        lines: dict[str, list[str]] = {}
        for line in filter(str.strip, self.table.splitlines()):
            parameter, _, layout = line.partition("|")
            lines.setdefault(parameter.strip(), []).append(layout)

        column = {name: self._layout(row, lines.get(name, [])) for name, row in rows(config).items()}
        times = Counter(key for layout in column.values() for key in layout.keys(config.sizes))
        if shared := [key for key, n in times.items() if n > 1]:
            raise InputError(f"format {self.name!r} keeps several parameters under one key: {', '.join(shared)}")
        return column

    def ignored_keys(self, config: ViTConfig) -> set[str]:
        """Return the keys that may be there and hold no parameter."""
        return {key for pattern in self.ignored for key in Layout(pattern, (), self.spellings).keys(config.sizes)}

    def _layout(self, row: Row, lines: list[str]) -> Layout:
        """Return the one line that holds exactly the axes of `row`: so no format can drop an axis."""
        layouts = [Layout.parse(line, self.spellings) for line in lines]
        fitting = [layout for layout in layouts if sorted(layout.words) == sorted(row.axes)]
        if not layouts:
            raise InputError(
                f"format {self.name!r} has no place for {row.name}: choose another format, or a config without it"
            )
        if len(fitting) != 1:
            given = "; ".join(map(str, layouts))
            raise InputError(f"format {self.name!r}, {row.name}: of {given}, one must hold the axes {' '.join(row.axes)}")
        lengths = dict(zip(row.axes, row.shape, strict=True))
        for word in fitting[0].spelled:
            if len(self.spellings.get(word, range(lengths[word]))) != lengths[word]:
                raise InputError(
                    f"format {self.name!r} spells {word} as {self.spellings[word]}: it has {lengths[word]} places"
                )
        return fitting[0]
