"""Plant one fault in a copy of a twin, or of a column, for as long as a `with` block lasts; no file is touched."""

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
from tests.twins import perturbed, pictures, small
from vit_spec import ViTConfig


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake of somebody who ports a Vision Transformer.

    name: what is wrong.
    file: of which twin or column, from the repository's root.
    old, new: what stands there once, and what the mistake makes of it.
    part: the name that the check must give the part, a regular expression for the whole of `str(report.part)`.
    model, changes: the named model in which the mistake shows, made small, and what is changed of its config.
    size: of the images, where it is not the config's own.
    level: of the check that must fail.
    offset: what is added to the patches' bias, so that the tokens' mean is large.
    cause: what `diagnose` must name, a regular expression for the hypothesis; None where the catalogue has none.
    unnamed: why the check cannot tell the part, though it fails; empty where it must.
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
    unnamed: str = ""

    @property
    def id(self) -> str:
        """Where and what, for a table."""
        return f"{self.file}: {self.name}"

    @property
    def config(self) -> ViTConfig:
        """The model in which it shows."""
        return small(vit_spec.get(self.model)).replace(**self.changes)

    def params(self) -> dict[str, Any]:
        """Weights on which it cannot hide; read before it is planted."""
        params = perturbed(self.config)
        if self.offset:
            bias = params["patch_embed"]["proj"]["bias"]
            bias += np.float32(self.offset)
        return params

    def images(self) -> np.ndarray:
        """Two images, (2, H, W, C), float32."""
        return pictures(self.config, self.size)

    def mistaken(self) -> str:
        """The file with the mistake in it."""
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.id}: what it replaces stands in the file {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Make `import vit_torch`, `import vit_jax` and the formats' columns find the mistake."""
    package, _, rest = fault.file.partition("/")
    if package == "parity":
        with _column(fault):
            yield
        return
    with _imported_anew(package, f"{package}.{rest.removesuffix('.py')}", fault.mistaken()):
        yield


@contextmanager
def _column(fault: Fault) -> Iterator[None]:
    name = Path(fault.file).stem
    module = ModuleType(name)
    exec(compile(fault.mistaken(), fault.file, "exec"), vars(module))
    right = formats._FORMATS[name]
    formats._FORMATS[name] = replace(right, tables=module.FORMAT.tables)
    try:
        yield
    finally:
        formats._FORMATS[name] = right


@contextmanager
def _imported_anew(package: str, name: str, text: str) -> Iterator[None]:
    """Put a package out of sight and import it again, one module of it from `text`."""

    def belongs(module: str) -> bool:
        return module == package or module.startswith(f"{package}.")

    right = {module: sys.modules.pop(module) for module in list(sys.modules) if belongs(module)}
    finder = _Finder(name, text)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(package)
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in list(filter(belongs, sys.modules)):
            del sys.modules[module]
        sys.modules.update(right)


@dataclass(frozen=True)
class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module, whose source is `text`."""

    name: str
    text: str

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, f"<{fullname} with a mistake>", "exec")
