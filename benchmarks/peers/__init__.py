"""The libraries whose ViTs `python -m benchmarks` measures: one module for each, and what is the same for all.

A module has a function `load(config, weights, dtype)`.  It builds the library's own model with the weights of a file in the
library's format, which `parity` writes, and returns a `TorchModel` or `JaxModel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vit_spec import ViTConfig

# So small that a step changes no weight by a bit of float32: outputs can be checked after any number of steps.
LEARNING_RATE = 1e-30
WEIGHT_DECAY = 0.05
CLIP = 1.0

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Library:
    """A library with a ViT, one of the two twins among them.

    Attributes:
        name: the name on the command line and of the module in `benchmarks.peers`.
        framework: "jax" or "torch".
        package: the package that must be importable.
        format: the name of its format in `parity`.
        install: how to get it, the end of the sentence "... is not installed: ".
        changes: changes of our config with which the twins compute its function, as for `ViTConfig.replace`.
        compiles: whether it also runs under torch.compile.
        bfloat16: whether it also runs in bfloat16 with float32 weights, as its own trainer does.
        by_source: whether it is imported only from a path that the user gives.
        suffix: of its weight files.
    """

    name: str
    framework: Literal["jax", "torch"]
    package: str
    format: str
    install: str = "pip install '.[peers]'"
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    compiles: bool = False
    bfloat16: bool = False
    by_source: bool = False
    suffix: str = ".safetensors"

    @property
    def is_clone(self) -> bool:
        """Whether it is imported from a clone, and not from an installed package."""
        return self.install.startswith("clone")


TANH = {"mlp": {"activation": "gelu_tanh"}}
CLONE = "clone its repository and give --source {}=PATH"
LIBRARIES = {
    library.name: library
    for library in (
        Library("vit_jax", "jax", "jax", "jax", "pip install '.[jax]'", bfloat16=True),
        Library("vit_torch", "torch", "torch", "torch", "pip install '.[torch]'", compiles=True, bfloat16=True),
        Library("timm", "torch", "timm", "timm:vit", compiles=True, bfloat16=True),
        Library("transformers", "torch", "transformers", "hf-vit:v5"),
        Library("torchvision", "torch", "torchvision", "torchvision:mlp"),
        Library(
            "vit_pytorch",
            "torch",
            "vit_pytorch",
            "lucidrains:vit",
            changes={
                "attention": {"qkv_bias": "none"},
                "norms": {"eps": 1e-5, "after_blocks": False, "after_pool": True},
            },
        ),
        Library(
            "big_vision",
            "jax",
            "big_vision",
            "big_vision:loop",
            CLONE.format("big_vision"),
            changes={**TANH, "positions": {"covers": "none"}},
            bfloat16=True,
            by_source=True,
            suffix=".npz",
        ),
        Library(
            "transformers4",
            "jax",
            "transformers",
            "hf-flax:classifier",
            "it needs versions of its own: pip install --target PATH --no-deps 'transformers<5' 'huggingface_hub<1' "
            "'tokenizers<0.23', and give --source transformers4=PATH",
            by_source=True,
            suffix=".msgpack",
        ),
        Library("equimo", "jax", "equimo", "equimo:mlp"),
        Library(
            "bonsai",
            "jax",
            "bonsai",
            "bonsai-vit",
            CLONE.format("bonsai"),
            changes=TANH,
            by_source=True,
        ),
    )
}


@dataclass(frozen=True)
class Contestant:
    """A library in one of the ways in which it is measured.

    Attributes:
        library: a name of `LIBRARIES`.
        compiled: under torch.compile.
        dtype: of the activations; weights are float32.
        function: for a twin, the library whose function it computes, if that is not the twin's own ("" for that).
    """

    library: str
    compiled: bool = False
    dtype: Dtype = "float32"
    function: str = ""

    @property
    def name(self) -> str:
        """The name of the contestant, such as "timm-compiled-bfloat16"."""
        parts = [self.library, "compiled" * self.compiled, "bfloat16" * (self.dtype == "bfloat16")]
        return "-".join(filter(None, parts)) + (f"-as-{self.function}" if self.function else "")

    @property
    def of(self) -> Library:
        """The library."""
        return LIBRARIES[self.library]

    @property
    def is_twin(self) -> bool:
        """Whether it is one of ours."""
        return self.library in ("vit_jax", "vit_torch")

    @property
    def reference(self) -> "Contestant":
        """The contestant that this one is compared with: our twin in the same framework, in the same way.

        It computes the same function.  The PyTorch twin, compiled or not, is compared with the JAX twin.  The JAX twin, and
        a twin with the function of another library, is compared with itself.
        """
        if self.library == "vit_jax" or self.function:
            return self
        if self.library == "vit_torch":
            return Contestant("vit_jax", dtype=self.dtype)
        twin = "vit_jax" if self.of.framework == "jax" else "vit_torch"
        return Contestant(twin, self.compiled, self.dtype, self.library if self.of.changes else "")

    @property
    def function_key(self) -> str:
        """The library whose function it computes, "" if that is the named model's own."""
        name = self.function or self.library
        return name if LIBRARIES[name].changes else ""

    def config(self, config: ViTConfig) -> ViTConfig:
        """Return the config of the function that it computes, given that of the named model."""
        return config.replace(**LIBRARIES[self.function or self.library].changes)


def contestants() -> list[Contestant]:
    """Return every contestant, except the twins with the functions of other libraries, which are added where needed."""
    everyone = [Contestant(name) for name in LIBRARIES]
    everyone += [Contestant(name, compiled=True) for name, library in LIBRARIES.items() if library.compiles]
    for compiled in (False, True):
        everyone += [
            Contestant(name, compiled, "bfloat16")
            for name, library in LIBRARIES.items()
            if library.bfloat16 and (library.compiles or not compiled)
        ]
    return everyone


@dataclass(frozen=True)
class Inputs:
    """The batch that all contestants of a model are given.

    Attributes:
        pixels: (B, H, W, C) uint8.
        targets: (B,) int32, class numbers.
        mean, std: of the normalization (pixels / 255 - mean) / std, one number or one for each channel.
    """

    pixels: NDArray[np.uint8]
    targets: NDArray[np.int32]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def images(self) -> NDArray[np.float32]:
        """The normalized images, (B, H, W, C) float32."""
        x = self.pixels.astype(np.float32) / np.float32(255)
        return (x - np.float32(self.mean)) / np.float32(self.std)


def make_inputs(config: ViTConfig, batch_size: int) -> Inputs:
    """Return random images and targets, the same in every process."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (batch_size, *config.image_size, config.in_channels), np.uint8)
    targets = rng.integers(0, config.num_classes, batch_size).astype(np.int32)
    return Inputs(pixels, targets, config.pixels.mean, config.pixels.std)
