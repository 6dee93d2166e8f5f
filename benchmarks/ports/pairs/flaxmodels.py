"""flaxmodels (matthias-wright/flaxmodels), `--source flaxmodels=CLONE`, and torchvision."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, floats, of_linen

PAIRS = Pairs("flaxmodels", ("flaxmodels",), ("torchvision",), needs=("flaxmodels",))
AXES = {"input_axes": "b y x c <-> b c y x"}
PLAIN: dict[str, Any] = {"output": "logits", "pretrained": None, "normalize": False, "num_classes": 5}


def load(name: str) -> Any:
    """Import a module of flaxmodels; h5py and requests, which only downloads need, are replaced by empty classes."""
    for package in ("h5py", "requests"):
        sys.modules.setdefault(package, SimpleNamespace(Group=object, File=object))  # type: ignore[arg-type]
    return importlib.import_module(f"flaxmodels.{name}")


def _resnet(name: str) -> Built:
    import torchvision

    resnet = load("resnet.resnet")
    model = getattr(resnet, name)(**PLAIN)
    return of_linen(
        model,
        getattr(torchvision.models, name.lower())(num_classes=5),
        floats(1, 32, 32, 3),
        call_options={"train": False},
        **AXES,
    )


PAIRS.add("resnet18", "flaxmodels ResNet18", "torchvision resnet18", lambda: _resnet("ResNet18"))


@PAIRS.pair("vgg16", "flaxmodels VGG16 without its head", "torchvision vgg16 features")
def _() -> Built:
    import torchvision

    model = load("vgg.vgg").VGG16(**{**PLAIN, "output": "activations", "include_head": False})
    module = torchvision.models.vgg16().features[:-1]
    built = of_linen(
        model, module, floats(1, 32, 32, 3), call_options={"train": False}, output_axes="b y x c <-> b c y x", **AXES
    )
    return built._replace(flax_apply=lambda variables, x: list(built.flax_apply(variables, x).values())[-1])
