"""The models of timm and transformers whose outputs are not compared, to test that no format accepts their keys."""

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


def timm_models() -> Iterator[tuple[str, Build]]:
    """Yield the name of each model in timm's other modules, and a function that builds it."""
    for module in list_modules():
        for name in list_models(module=module) if module not in of_timm.MODULES else ():
            yield name, lambda name=name: timm.create_model(name)  # type: ignore[misc]


def transformers_classes() -> Iterator[tuple[str, Build]]:
    """Yield the name of each other class of transformers with weights, and a function that builds it."""
    compared = {each.name for each in of_transformers.CLASSES.values()} | set(of_transformers.other_classes())
    for name in dir(transformers):
        cls: Any = getattr(transformers, name, None) if name not in compared else None
        if inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel) and not name.startswith("Auto"):
            yield name, lambda cls=cls: cls(cls.config_class())  # type: ignore[misc]


def accepting_format(build: Build, path: Path) -> str:
    """Return the format that accepts a model's keys and shapes at full size; "" if none does.

    path: the file to write.  It is sparse, so that its arrays take no disk space.

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
