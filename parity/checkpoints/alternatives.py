"""What to do if a format cannot store a config: surgery after which it can, or other formats."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from parity.checkpoints import formats
from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.formats.format import Format
from vit_spec import InputError, ViTConfig


def check_can_store(format: Format, config: ViTConfig) -> None:
    """Raise InputError if a format cannot store a config.

    The message names the surgery after which it can, and the formats that can store the config as it is, or after surgery
    that keeps the function.
    """
    if not (problems := format.problems(config)):
        return
    names, after = _capable_formats(config)
    listed = "; ".join([", ".join(names), *(f"with {flag} also {', '.join(more)}" for flag, more in after.items())])
    raise format.refusal(problems, f" ({listed})", _helpful_flags(format, config))


def _capable_formats(config: ViTConfig) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the formats that can store a config, and by flag of `_SAME_FUNCTION` those that then can too."""
    names, after = list(_storing(config)), {}
    for group in _SAME_FUNCTION:
        for flag, change in group.items():
            changed = _changed(config, change)
            if changed and (more := [name for name in _storing(changed) if name not in names]):
                after[flag] = more
    return names, after


def _storing(config: ViTConfig) -> Iterator[str]:
    """Yield the names of the formats that can store a config."""
    return (name for name in formats.formats() if _can_store(formats.get(name), config))


def _can_store(format: Format, config: ViTConfig) -> bool:
    if format.problems(config):
        return False
    try:
        format.layouts(config)
    except InputError:
        return False
    return True


def _helpful_flags(format: Format, config: ViTConfig) -> Iterator[str]:
    """Yield flags, or several that belong together, after which the format can store the config; the fewest first."""
    choices = product(*([None, *group.items()] for group in (*_OTHER_FUNCTION, *_SAME_FUNCTION)))
    several = [[each for each in choice if each] for choice in choices]
    found: list[set[str]] = []
    for changes in sorted(several, key=len):
        flags = [flag for flag, _ in changes]
        if not flags or any(fewer <= set(flags) for fewer in found):
            continue
        after: ViTConfig | None = config
        for _, change in changes:
            after = after and _changed(after, change)
        if after and _can_store(format, after):
            found.append(set(flags))
            yield " with ".join(flag.format(side=config.image_size[0]) for flag in flags)


def _changed(config: ViTConfig, change: Callable[[ViTConfig], Fields | None]) -> ViTConfig | None:
    """Return the config after surgery; None if the surgery does not apply to it."""
    try:
        return config.replace(**changes) if (changes := change(config)) else None
    except InputError:
        return None


def _learned(config: ViTConfig) -> Fields | None:
    return {"positions": {"kind": "learned"}} if config.positions.kind == "fixed" else None


def _folded(config: ViTConfig) -> Fields | None:
    return {"positions": {"covers": "none"}} if config.positions.kind == "learned" and config.num_covered else None


def _unfolded(config: ViTConfig) -> Fields | None:
    covers = "class" if config.tokens.registers else "all"
    after = config.replace(positions={"covers": covers})
    return {"positions": {"covers": covers}} if after.num_covered > config.num_covered else None


def _with_key_bias(config: ViTConfig) -> Fields | None:
    return {"attention": {"qkv_bias": "qkv"}} if config.attention.qkv_bias != "qkv" else None


def _without_key_bias(config: ViTConfig) -> Fields | None:
    is_constant = config.attention.qk_norm is False and config.positions.rotary == "none"
    return {"attention": {"qkv_bias": "qv"}} if config.attention.qkv_bias == "qkv" and is_constant else None


def _without_head(config: ViTConfig) -> Fields | None:
    return {"num_classes": 0} if config.num_classes else None


def _square(config: ViTConfig) -> Fields | None:
    side = config.image_size[0]
    return {"image_size": (side, side)} if config.positions.relative == "none" else None


# Flags of `convert`, and the fields that they change.  Those of a group exclude each other.
_Group = Mapping[str, Callable[[ViTConfig], Fields | None]]
_OTHER_FUNCTION: tuple[_Group, ...] = ({"--image-size {side}": _square}, {"--drop-head": _without_head})
_SAME_FUNCTION: tuple[_Group, ...] = (
    {"--learn-positions": _learned},
    {"--fold-class-position": _folded, "--unfold-class-position": _unfolded},
    {"--add-key-bias": _with_key_bias, "--drop-key-bias": _without_key_bias},
)
