"""Find an image tower of timm in OpenCLIP's weights, and present it as timm's own folder: its keys and its config.json.

OpenCLIP stores timm's model as `visual.trunk`.  The projection to the shared embedding is timm's classifier, or the linear
layer `visual.head.proj` after it.  The text tower is not read.

Source: open_clip 3.3.0, src/open_clip/timm_model.py (TimmModel).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parity.checkpoints.containers.container import Contents, KeyPath, StoredArray
from parity.checkpoints.format_matching import first_of
from parity.checkpoints.formats import open_clip_config, openai_clip

_TRUNK, _PROJECTION = "visual.trunk.", "visual.head.proj."


@dataclass(frozen=True)
class TimmTower:
    """An image tower of timm in OpenCLIP's weights.

    Attributes:
        contents: the arrays with the keys of timm's model, without those of the text tower.
        config: timm's config.json for it.
        name: its architecture.
        left: one line, with the reason, for each part of the file that is not read.
    """

    contents: Contents
    config: Mapping[str, Any]
    name: str
    left: tuple[str, ...]


def find_tower(contents: Contents, notes: Mapping[str, Any]) -> TimmTower | None:
    """Return the image tower of timm that open_clip_config.json describes; None if there is none.

    Args:
        contents: the arrays and the metadata of the container.
        notes: the metadata of the container, and the parsed JSON files beside it, by their names.

    Raises:
        InputError: open_clip_config.json has an unknown field or value; names it.
    """
    if open_clip_config.FILE not in notes:
        return None
    matches = (re.match(rf"((?:.*\.)?){re.escape(_TRUNK)}", path[-1]) for path in contents.arrays if path)
    wrapper = next((match[1] for match in matches if match), None)
    if wrapper is None or not (config := open_clip_config.timm_config(notes)):
        return None
    arrays: dict[KeyPath, StoredArray] = {}
    unread: dict[str, list[str]] = {}  # reason -> keys
    for path, array in contents.arrays.items():
        renamed = path
        if path[-1].startswith(wrapper):
            key = path[-1].removeprefix(wrapper)
            reasons = (why for pattern, why in openai_clip.FORMAT.ignored_keys.items() if re.fullmatch(pattern, key))
            if reason := next(reasons, ""):
                unread.setdefault(reason, []).append(key)
                continue
            key = f"head.{key.removeprefix(_PROJECTION)}" if key.startswith(_PROJECTION) else key.removeprefix(_TRUNK)
            renamed = (*path[:-1], wrapper + key)
        arrays[path if renamed in arrays else renamed] = array  # a second classifier keeps its key, which is refused then
    left = tuple(f"{first_of(sorted(keys))}: {reason}" for reason, keys in unread.items())
    return TimmTower(replace(contents, arrays=arrays), config, config["architecture"], left)


def is_trunk(strip: str | None) -> bool:
    """Return whether a prefix that the user gave is that of timm's model in OpenCLIP's weights."""
    return strip is not None and f"{strip.removesuffix('.')}.".endswith(_TRUNK)
