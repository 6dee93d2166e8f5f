"""flaxmodels (matthias-wright/flaxmodels), `--source flaxmodels=CLONE`, with torchvision and transformers."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_linen, tokens

PAIRS = Pairs("flaxmodels", ("flaxmodels",), ("torchvision", "transformers"), needs=("flaxmodels",))
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


GPT2 = {
    "vocab_size": 60,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "activation_function": "gelu_new",
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}


@PAIRS.pair("gpt2", "flaxmodels GPT2Model", "transformers GPT2Model")
def _() -> Built:
    import transformers

    gpt2 = load("gpt2.gpt2")
    model = gpt2.GPT2Model(config=SimpleNamespace(**GPT2))
    config = transformers.GPT2Config(**{**GPT2, "attn_implementation": "eager"})
    module = TorchCall(transformers.GPT2Model(config), lambda module, x: module(x).last_hidden_state)
    built = of_linen(model, module, tokens(2, 9, high=60), call_options={"training": False})
    return built._replace(flax_apply=lambda variables, x: built.flax_apply(variables, x)["last_hidden_state"])
