"""The models of timm and transformers that the harness has no output for: whose keys does a format take all the same?"""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from timm.models import list_models, list_modules
from torch import nn

import parity
from tests.peers.zoo import of_timm, of_transformers
from vit_spec import InputError

Build = Callable[[], nn.Module]


def of_all_timm() -> Iterator[tuple[str, Build]]:
    """Yield every model of timm's other modules, by name, and how it is built."""
    for module in list_modules():
        for name in list_models(module=module) if module not in of_timm.MODULES else ():
            yield name, lambda name=name: timm.create_model(name)  # type: ignore[misc]


def of_all_transformers() -> Iterator[tuple[str, Build]]:
    """Yield every other class of transformers that has weights, by name, and how it is built."""
    judged = {each.name for each in of_transformers.CLASSES.values()} | set(of_transformers.others())
    for name in dir(transformers):
        cls: Any = getattr(transformers, name, None) if name not in judged else None
        if inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel) and not name.startswith("Auto"):
            yield name, lambda cls=cls: cls(cls.config_class())  # type: ignore[misc]


def taken(build: Build, path: Path) -> str:
    """Return the format that takes a model's keys and shapes, at its full size; empty where none does.

    path: of the file to write, which takes no room on disk: all numbers are a hole.

    Raises:
        Exception: the library cannot build the model.
    """
    with torch.device("meta"):
        tensors = build().state_dict()
    header, end = {}, 0
    for key, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    try:
        return parity.load(path).format
    except InputError:
        return ""
