"""Faults, each planted in a copy of a twin or of a format for the duration of a `with` block; no file is changed."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np

import vit_spec
from parity.checkpoints import formats
from tests import ROOT
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import ViTConfig


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A typical mistake in an implementation of a Vision Transformer.

    name: a description of the mistake.
    file: the source file of a twin, a format or an optimizer, relative to the repository root.
    old: a piece of its source that occurs once.
    new: the wrong code that replaces it.
    part: a regular expression for `str(report.part)`, the part that the check must name.
    model: the name of a model whose small version shows the mistake.
    changes: changes of its config, as for `ViTConfig.replace`.
    size: (height, width) of the images, if not the config's own.
    level: the level of the check that must fail.
    offset: a number that is added to the bias of the patch embedding, so that the tokens have a large mean.
    cause: a regular expression for the cause that `diagnose` must name; None if the catalogue has none.
    ambiguity: why the check fails but cannot identify the part; "" if it must identify it.
    """

    name: str
    file: str
    old: str
    new: str
    part: str
    model: str = "vit_s16"
    changes: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    level: str = "function"
    offset: float = 0.0
    cause: str | None = None
    ambiguity: str = ""

    @property
    def id(self) -> str:
        """The file and the name, which identify the fault."""
        return f"{self.file}: {self.name}"

    @property
    def config(self) -> ViTConfig:
        """The config of the model that shows the mistake."""
        return small_config(vit_spec.get(self.model)).replace(**self.changes)

    def params(self) -> dict[str, Any]:
        """Return weights that show the mistake; call it before the fault is planted."""
        params = perturbed_params(self.config)
        if self.offset:
            bias = params["patch_embed"]["proj"]["bias"]
            bias += np.float32(self.offset)
        return params

    def images(self) -> np.ndarray:
        """Return two images, (2, H, W, C), float32."""
        return random_images(self.config, self.size)

    def faulty_source(self) -> str:
        """Return the source of the file with the mistake.

        Raises:
            ValueError: the code to replace does not occur exactly once.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.id}: the code to replace occurs {text.count(self.old)} times in the file, expected once"
            )
        return text.replace(self.old, self.new)


@contextmanager
def plant_fault(fault: Fault) -> Iterator[None]:
    """Plant a fault: `import vit_torch`, `import vit_jax` and the registry of formats then return the faulty code."""
    package, _, rest = fault.file.partition("/")
    if package == "parity":
        with _plant_in_format(fault):
            yield
        return
    with _plant_in_package(package, f"{package}.{rest.removesuffix('.py')}", fault.faulty_source()):
        yield


@contextmanager
def _plant_in_format(fault: Fault) -> Iterator[None]:
    """Register the faulty layouts of a format, and restore the original layouts at the end."""
    name = Path(fault.file).stem
    module = ModuleType(name)
    exec(compile(fault.faulty_source(), fault.file, "exec"), vars(module))
    original = formats._FORMATS[name]
    formats._FORMATS[name] = replace(original, tables=module.FORMAT.tables)
    try:
        yield
    finally:
        formats._FORMATS[name] = original


@contextmanager
def _plant_in_package(package: str, name: str, text: str) -> Iterator[None]:
    """Import a package again with the source of one module replaced by `text`, and restore it at the end."""

    def is_in_package(module: str) -> bool:
        return module == package or module.startswith(f"{package}.")

    originals = {module: sys.modules.pop(module) for module in list(sys.modules) if is_in_package(module)}
    finder = _SourceFinder(name, text)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(package)
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in list(filter(is_in_package, sys.modules)):
            del sys.modules[module]
        sys.modules.update(originals)


@dataclass(frozen=True)
class _SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """An importer that finds one module and loads it from the source `text`."""

    name: str
    text: str

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, f"<{fullname} with a mistake>", "exec")
