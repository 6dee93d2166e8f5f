"""What the recipes for golden files share: running a peer in float64, filling it with noise, renaming its weights."""

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
    """Register a recipe: its name is the golden file's, its docstring says what the file anchors."""
    CASES[build.__name__] = build
    return build


def tiny(**changes: Any) -> ViTConfig:
    """Return a ViT of two blocks on a grid of 3 x 5 patches, with some fields changed as `ViTConfig.replace` does."""
    config = ViTConfig(image_size=(12, 20), patch_size=(4, 4), width=12, depth=2, num_heads=3, mlp_dim=18, num_classes=5)
    return config.replace(**changes)


# In float64 ---------------------------------------------------------------------------------------------------------


class Float64(TorchFunctionMode):
    """Under this mode a peer that asks for float32 gets float64.

    Peers fix the precision of parts: timm and Facebook resample positions in `.float()`, transformers takes its softmax
    and its rotary tables in float32.  That is a choice of precision and not of formula; changing it lets the whole peer
    be held to what float64 can tell.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*(_wide(value) for value in args), **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Build and run PyTorch peers here: every number is float64."""
    before, narrow = torch.get_default_dtype(), torch.FloatTensor
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc]  # a constructor that no mode can see
    try:
        with Float64(), torch.no_grad():
            yield
    finally:
        torch.FloatTensor = narrow  # type: ignore[misc]
        torch.set_default_dtype(before)


# Noise --------------------------------------------------------------------------------------------------------------


def seeded(name: str) -> np.random.Generator:
    """Return the generator of a case: its seed is its name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def fill(model: nn.Module, rng: np.random.Generator) -> None:
    """Draw every parameter that is trained; matrices keep the size of what passes through, scales lie around one."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # a frozen one is a fixed table, and belongs to the peer's function
            parameter.copy_(torch.tensor(drawn(rng, name, tuple(parameter.shape))))


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Return noise for one parameter, given in PyTorch's order of axes."""
    if re.search(r"(gamma\w*|lambda1)$", name) or (name.endswith(("weight", "scale")) and len(shape) == 1):
        return noise(rng, shape, 0.25, around=1.0)
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
    """Fill a PyTorch peer, run it, and return what it did; call this inside `float64`.

    rename: the peer's state dict to the names of our PyTorch twin; it must use every key or name it as dropped.
    run: the peer and images to its outputs, by the names of our intermediates.
    peer: the package and its version.
    size: of the images; the config's own if not given.
    """
    rng, model = seeded(name), model.double().eval()
    fill(model, rng)
    images = noise(rng, (2, config.in_channels, *(size or config.image_size)), 1.0)
    outputs = {key: value.numpy() for key, value in run(model, torch.tensor(images)).items()}
    weights = {key: value.detach().numpy() for key, value in rename(dict(model.state_dict())).items()}
    where = f"{type(model).__module__}.{type(model).__qualname__}"
    return Golden(config, weights, images, outputs, {"peer": peer, "class": where, "torch": torch.__version__})


# Names --------------------------------------------------------------------------------------------------------------


def renamed(state: State, rules: Mapping[str, str | None]) -> State:
    """Apply each rule (a pattern and what takes its place; None drops the key) to every key, in order.

    KeyError: a rule that no key met, so that a peer's new spelling cannot pass unseen.
    """
    for pattern, replacement in rules.items():
        if not any(re.search(pattern, key) for key in state):
            raise KeyError(f"no key matches {pattern!r}: {', '.join(state)}")
        kept = {key: value for key, value in state.items() if replacement is not None or not re.search(pattern, key)}
        state = {re.sub(pattern, replacement or "", key): value for key, value in kept.items()}
    return state


def joined(state: State, parts: Iterable[str], whole: str) -> State:
    """Stack the rows of split projections: keys with `.PART.` of every block into one with `.WHOLE.`."""
    first, *others = parts
    result: State = {}
    for key, value in state.items():
        if f".{first}." in key:
            rest = [state[key.replace(f".{first}.", f".{other}.")] for other in others]
            result[key.replace(f".{first}.", f".{whole}.")] = torch.cat([value, *rest])
        elif not any(f".{other}." in key for other in others):
            result[key] = value
    return result


def reshaped(state: State, **shapes: tuple[int, ...]) -> State:
    """View some entries in another shape; a peer may leave out the axes of length one that ours has."""
    return {key: value.reshape(shapes[key]) if key in shapes else value for key, value in state.items()}


# Peers --------------------------------------------------------------------------------------------------------------


def mend_torchvision() -> None:
    """Let torchvision load where it was built for another PyTorch; timm and transformers import it.

    On loading it gives shapes to operators of its binary part.  Declared here they exist, and are never called.
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


TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")  # what it defines lasts as long as it does
mend_torchvision()

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


def at(repository: str) -> str:
    """Return a repository with the commit that its clone must stand at."""
    return f"{repository} {COMMITS[repository]}"


CLONES: list[Path] = []  # the folder that `make` was given


@contextlib.contextmanager
def clone(folder: str) -> Iterator[None]:
    """Import from a folder of the clones as if it were where Python was started; afterwards all of it is forgotten.

    Several of them have a top-level module `utils`.
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
