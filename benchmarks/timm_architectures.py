"""Write what timm's functions fix of each Vision Transformer: the table with which its config.json is read.

    python -m benchmarks.timm_architectures            compares the table in parity/formats with the timm that is installed
    python -m benchmarks.timm_architectures --write    replaces it

Each architecture's function is called with the building of the model replaced by a recorder, so nothing is constructed.
A line of the table holds the class and the arguments as JSON; an argument that is a class is named, with the arguments
that are bound to it: "LayerNorm(eps=1e-05)".
"""

import argparse
import functools
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import tests.goldens.peers  # noqa: F401  # mends torchvision, which timm imports

import timm  # isort: skip

RELATED = ("vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam")
MODULES = ("vision_transformer", "deit", "eva", "beit", "naflexvit", *RELATED)
TABLE = Path(__file__).parents[1] / "parity/checkpoints/formats/timm_architectures.json"
TRAINING = {"drop_rate", "weight_init", "fix_init", "head_init_scale"}  # arguments that leave the trained function alone


def table() -> dict[str, list[Any]]:
    """Return class and arguments of each architecture, by name."""
    found: dict[str, list[Any]] = {}
    for module in (import_module(f"timm.models.{name}") for name in MODULES):
        for name in timm.list_models(module=module.__name__.rpartition(".")[2]):
            found[name] = recorded(module, name)
    return dict(sorted(found.items()))


def recorded(module: Any, name: str) -> list[Any]:
    """Return the class that an architecture's function builds, and the arguments that it hands over."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def build(model_cls: Any, variant: str, pretrained: bool, **options: Any) -> Any:
        calls.append((model_cls, options))
        return mock.MagicMock()

    function = getattr(module, name)
    with mock.patch.dict(function.__globals__, build_model_with_cfg=build):
        function()
    (cls, options) = calls[0]
    ours = (
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "pretrained_filter_fn",
        "pretrained_strict",
        "feature_cfg",
        "cache_dir",
    )
    arguments = {key: plain(value) for key, value in options.items() if key not in (*ours, *TRAINING)}
    return [getattr(cls, "__name__", str(cls)), arguments]


def plain(value: Any) -> Any:
    """Return an argument as JSON has it; a class by its name."""
    if isinstance(value, functools.partial):
        bound = ", ".join(f"{key}={plain(bound)}" for key, bound in value.keywords.items())
        return f"{value.func.__name__}({bound})"
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if hasattr(value, "__dataclass_fields__"):
        return repr(value)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the table")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in table().items())
    text = f"{{\n{lines}\n}}\n"
    if parser.parse_args().write:
        TABLE.write_text(text)
    same = TABLE.is_file() and TABLE.read_text() == text
    print(
        f"timm {timm.__version__}: {text.count(chr(10)) - 2} architectures, the table {'has them' if same else 'DIFFERS'}"
    )
    sys.exit(not same)


if __name__ == "__main__":
    main()
