"""Helpers for the recipes of golden files: run a peer in float64, fill it with noise, rename its weights."""

import contextlib
import importlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.goldens.golden import Array, Golden, noise
from vit_spec import ViTConfig

Outputs = Mapping[str, Tensor]
State = dict[str, Tensor]
Build = Callable[[], Golden]

CASES: dict[str, Build] = {}


def case(build: Build) -> Build:
    """Register a recipe, and return it.  Its name is the golden file's name, and its docstring says what the file tests."""
    CASES[build.__name__] = build
    return build


def tiny_config(**changes: Any) -> ViTConfig:
    """Return the config of a ViT with two blocks and a grid of 3 x 5 patches; `changes` as in `ViTConfig.replace`."""
    config = ViTConfig(image_size=(12, 20), patch_size=(4, 4), width=12, depth=2, num_heads=3, mlp_dim=18, num_classes=5)
    return config.replace(**changes)


# In float64 ---------------------------------------------------------------------------------------------------------


class Float64(TorchFunctionMode):
    """A mode in which code that asks for float32 gets float64.

    Some peers compute parts in float32: timm and Facebook resample positions in `.float()`, transformers computes its
    softmax and its rotary tables in float32.  This changes the precision and not the formula.  In float64 throughout, the
    peer can be compared with the tolerance of float64.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(
            *(_float64_for_float32(value) for value in args),
            **{key: _float64_for_float32(value) for key, value in (kwargs or {}).items()},
        )


def _float64_for_float32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Return a context within which PyTorch peers are built and run in float64, without gradients."""
    before, narrow = torch.get_default_dtype(), torch.FloatTensor
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc]  # a mode does not intercept this constructor
    try:
        with Float64(), torch.no_grad():
            yield
    finally:
        torch.FloatTensor = narrow  # type: ignore[misc]
        torch.set_default_dtype(before)


# Noise --------------------------------------------------------------------------------------------------------------


def rng_for(name: str) -> np.random.Generator:
    """Return the random number generator of a case, seeded by its name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def fill(model: nn.Module, rng: np.random.Generator) -> None:
    """Draw every trained parameter of a model: matrices preserve the magnitude of activations, scales are near one."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # a frozen parameter is a fixed table, which is part of the peer's function
            parameter.copy_(torch.tensor(random_parameter(rng, name, tuple(parameter.shape))))


def random_parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Return noise for one parameter, whose shape has PyTorch's order of axes."""
    if re.search(r"(gamma\w*|lambda1)$", name) or (name.endswith(("weight", "scale")) and len(shape) == 1):
        return noise(rng, shape, 0.25, mean=1.0)
    fan_in = int(np.prod(shape[1:]))
    if name.endswith(("weight", "proj")) and len(shape) > 1:
        return noise(rng, shape, 1.2 * fan_in**-0.5)
    return noise(rng, shape, 0.5)


def golden(
    name: str,
    model: nn.Module,
    config: ViTConfig,
    rename: Callable[[State], State],
    run: Callable[[Any, Tensor], Outputs],
    *,
    peer: str,
    size: tuple[int, int] | None = None,
) -> Golden:
    """Fill a PyTorch peer with noise, run it, and return its golden file.  Call this inside `float64`.

    rename: the peer's state dict -> the names of the PyTorch twin.  It must use every key or drop it explicitly.
    run: (peer, images) -> its outputs, under the names of the twins' intermediates.
    peer: the package and its version.
    size: height and width of the images; by default the config's.
    """
    rng, model = rng_for(name), model.double().eval()
    fill(model, rng)
    images = noise(rng, (2, config.in_channels, *(size or config.image_size)), 1.0)
    outputs = {key: value.numpy() for key, value in run(model, torch.tensor(images)).items()}
    weights = {key: value.detach().numpy() for key, value in rename(dict(model.state_dict())).items()}
    where = f"{type(model).__module__}.{type(model).__qualname__}"
    return Golden(config, weights, images, outputs, {"peer": peer, "class": where, "torch": torch.__version__})


# Names --------------------------------------------------------------------------------------------------------------


def rename_keys(state: State, rules: Mapping[str, str | None]) -> State:
    """Apply each rule to every key, in order.

    rules: pattern -> its replacement, or None to drop the key.

    Raises:
        KeyError: a rule matches no key, which reveals that a peer has new names.
    """
    for pattern, replacement in rules.items():
        if not any(re.search(pattern, key) for key in state):
            raise KeyError(f"no key matches {pattern!r}: {', '.join(state)}")
        remaining = {key: value for key, value in state.items() if replacement is not None or not re.search(pattern, key)}
        state = {re.sub(pattern, replacement or "", key): value for key, value in remaining.items()}
    return state


def merge_projections(state: State, parts: Iterable[str], whole: str) -> State:
    """Concatenate the rows of separate projections: in every block, keys with `.PART.` become one key with `.WHOLE.`."""
    first, *others = parts
    result: State = {}
    for key, value in state.items():
        if f".{first}." in key:
            rest = [state[key.replace(f".{first}.", f".{other}.")] for other in others]
            result[key.replace(f".{first}.", f".{whole}.")] = torch.cat([value, *rest])
        elif not any(f".{other}." in key for other in others):
            result[key] = value
    return result


def reshape_entries(state: State, **shapes: tuple[int, ...]) -> State:
    """Reshape some entries, because a peer may not have the axes of length one that the twins have."""
    return {key: value.reshape(shapes[key]) if key in shapes else value for key, value in state.items()}


# Peers --------------------------------------------------------------------------------------------------------------


def make_torchvision_importable() -> None:
    """Make it possible to import a torchvision that was built for another PyTorch; timm and transformers import it.

    On import, torchvision registers shape functions for operators of its compiled part, which cannot be loaded then.  This
    function declares the operators; they are never called.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for module in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        for operator in ("nms", "qnms"):
            TORCHVISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")  # its definitions last as long as this object
make_torchvision_importable()

COMMITS = {
    "facebookresearch/dino": "7c446df5b9f45747937fb0d72314eb9f7b66930a",
    "facebookresearch/dinov2": "b8931f7bf91576930313be2c6d6af376033b35f0",
    "facebookresearch/dinov3": "6876159a11b4df116f30f667f8c9888617df0751",
    "google-research/vision_transformer": "c6de1e5378c9831a8477feb30994971bdc409e46",
    "google-research/big_vision": "0127fb6b337ee2a27bf4e54dea79cff176527356",
    "openai/CLIP": "d05afc436d78f1c48dc0dbf8e5980a9d471f35f6",
    "s-chh/2D-Positional-Encoding-Vision-Transformer": "dc2a98fca2943d8097d75a82821ba1e2ef4e36a0",
    "lanl/vision_transformers_explained": "3cdf23fb1c52c273191b6ed731405b808bbecdf2",
}


def at_commit(repository: str) -> str:
    """Return a repository with the commit that its clone must be at."""
    return f"{repository} {COMMITS[repository]}"


CLONES: list[Path] = []  # empty, or the one folder that `make` was given


@contextlib.contextmanager
def clone(folder: str) -> Iterator[None]:
    """Return a context within which imports find the modules of a folder of the clones first.

    Its modules are removed from `sys.modules` afterwards, because several clones have a top-level module `utils`.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not CLONES or not (CLONES[0] / folder).is_dir():
        raise FileNotFoundError(f"this case needs a clone of {folder}: see the head of make.py, and pass --clones DIR")
    root, before = CLONES[0] / folder, set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(root)):
                del sys.modules[name]
