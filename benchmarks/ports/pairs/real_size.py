"""Models of the sizes at which people port them: sums over all pixels, 50,257 tokens, 50 layers with batch norm."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, floats, of_linen, tokens

PAIRS = Pairs(
    "real_size", ("benchmarks.ports.real_size.flax_models",), ("benchmarks.ports.real_size.torch_models", "torchvision")
)
IMAGES = {"input_axes": "b y x c <-> b c y x"}


@PAIRS.pair("unet", "UNet, linen", "UNet")
def unet() -> Built:
    """A UNet of 128 x 128 pixels, which sums over 32,768 pixels."""
    from benchmarks.ports.real_size import flax_models, torch_models

    maps = {"output_axes": IMAGES["input_axes"]}
    return of_linen(flax_models.UNet(32, 2), torch_models.UNet(32, 2), floats(2, 128, 128, 3), **IMAGES, **maps)


@PAIRS.pair("decoder", "Decoder, linen", "Decoder")
def decoder() -> Built:
    """A causal language model with the vocabulary of GPT-2."""
    from benchmarks.ports.real_size import flax_models, torch_models

    sizes = {"vocabulary": 50257, "length": 128, "width": 256, "heads": 4, "depth": 2}
    model, module = flax_models.Decoder(**sizes), torch_models.Decoder(**sizes)
    return of_linen(model, module, tokens(2, 128, high=50257))


def _resnet(batch: int, size: int, train: bool) -> Built:
    from torchvision.models.resnet import Bottleneck, ResNet

    from benchmarks.ports.real_size import flax_models

    model, module = flax_models.ResNet((3, 4, 6, 3), 1000), ResNet(Bottleneck, [3, 4, 6, 3])
    built = of_linen(model, module, floats(batch, size, size, 3), call_options={"train": train}, **IMAGES)
    if not train:
        return built

    def apply(variables: Any, x: Any) -> Any:
        return model.apply(variables, x, train=True, mutable=["batch_stats"])

    return built._replace(flax_apply=apply, options={**built.options, "train": True, "outputs": "0 <-> output"})


@PAIRS.pair("resnet50", "ResNet-50, linen", "torchvision, ResNet-50")
def resnet50() -> Built:
    """ResNet-50 in evaluation."""
    return _resnet(2, 128, train=False)


@PAIRS.pair("resnet50_training", "ResNet-50, linen", "torchvision, ResNet-50")
def resnet50_training() -> Built:
    """ResNet-50 in training, whose last batch norms see 64 pixels: it amplifies rounding errors."""
    return _resnet(4, 128, train=True)
