"""Generator of the table of timm's Vision Transformers; parity needs the table to read the config.json of timm.

    python -m benchmarks.timm_architectures            # compares the table with the installed timm
    python -m benchmarks.timm_architectures --write    # writes parity/checkpoints/formats/timm_architectures.json

It measures nothing, so it has no page.  The table has the arguments that the function of each architecture passes to the
model's class.  Each function is called with timm's model builder replaced by a recorder, so no model is constructed.  A
line of the table has the class and the arguments as JSON.  An argument that is a class is written as its name, with the
arguments that are bound to it: "LayerNorm(eps=1e-05)".
"""

import argparse
import functools
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import tests.goldens.peers  # noqa: F401  # makes torchvision importable, which timm imports

import timm  # isort: skip

RELATED_MODULES = ("vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam")
MODULES = ("vision_transformer", "deit", "eva", "beit", "naflexvit", *RELATED_MODULES)
TABLE = Path(__file__).parents[1] / "parity/checkpoints/formats/timm_architectures.json"
# Arguments that do not change the trained model's function.
TRAINING_ARGUMENTS = {"drop_rate", "weight_init", "fix_init", "head_init_scale"}


def table() -> dict[str, list[Any]]:
    """Return the class and the arguments of each architecture, by name."""
    architectures: dict[str, list[Any]] = {}
    for module in (import_module(f"timm.models.{name}") for name in MODULES):
        for name in timm.list_models(module=module.__name__.rpartition(".")[2]):
            architectures[name] = record_arguments(module, name)
    return dict(sorted(architectures.items()))


def record_arguments(module: Any, name: str) -> list[Any]:
    """Return the class that an architecture's function builds, and the arguments that it passes to the class."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def build(model_cls: Any, variant: str, pretrained: bool, **options: Any) -> Any:
        calls.append((model_cls, options))
        return mock.MagicMock()

    function = getattr(module, name)
    with mock.patch.dict(function.__globals__, build_model_with_cfg=build):
        function()
    (cls, options) = calls[0]
    if "cfg" in options:  # of NaFlexVit, whose other arguments override its fields
        options |= vars(options.pop("cfg"))
    builder_arguments = (
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "pretrained_filter_fn",
        "pretrained_strict",
        "feature_cfg",
        "cache_dir",
    )
    arguments = {
        key: to_json(value) for key, value in options.items() if key not in (*builder_arguments, *TRAINING_ARGUMENTS)
    }
    return [getattr(cls, "__name__", str(cls)), arguments]


def to_json(value: Any) -> Any:
    """Return an argument as a JSON value; a class as its name."""
    if isinstance(value, functools.partial):
        bound = ", ".join(f"{key}={to_json(bound)}" for key, bound in value.keywords.items())
        return f"{value.func.__name__}({bound})"
    if isinstance(value, tuple | list):
        return [to_json(each) for each in value]
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return value


def main() -> None:
    """Compare the table with the installed timm; exit with 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table first")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in table().items())
    text = f"{{\n{lines}\n}}\n"
    if parser.parse_args().write:
        TABLE.write_text(text)
    is_current = TABLE.is_file() and TABLE.read_text() == text
    print(
        f"timm {timm.__version__}: {text.count(chr(10)) - 2} architectures, "
        f"the table {'is up to date' if is_current else 'DIFFERS'}"
    )
    sys.exit(not is_current)


if __name__ == "__main__":
    main()
