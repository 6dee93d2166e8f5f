"""diffusers below 0.36: Flax classes and PyTorch classes of the same models, `--source diffusers=FOLDER`."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_linen

PAIRS = Pairs("diffusers", ("diffusers",), ("diffusers",), needs=("diffusers",))
AUTOENCODER: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "sample_size": 16,
}
UNET: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "sample_size": 8,
    "in_channels": 4,
}


@PAIRS.pair("autoencoder", "diffusers FlaxAutoencoderKL", "diffusers AutoencoderKL")
def _() -> Built:
    import jax.numpy as jnp
    from diffusers import AutoencoderKL, FlaxAutoencoderKL

    model = FlaxAutoencoderKL(**AUTOENCODER, dtype=jnp.float64)
    module = TorchCall(AutoencoderKL(**AUTOENCODER), lambda module, x: module(x).sample)
    built = of_linen(model, module, floats(1, 3, 16, 16))
    return built._replace(flax_apply=lambda variables, x: model.apply(variables, x).sample)


def _unet(options: dict[str, Any]) -> Built:
    import jax.numpy as jnp
    from diffusers import FlaxUNet2DConditionModel, UNet2DConditionModel

    model = FlaxUNet2DConditionModel(**{**UNET, **options}, dtype=jnp.float64)
    module = TorchCall(UNet2DConditionModel(**{**UNET, **options}), lambda module, *inputs: module(*inputs).sample)
    inputs = (floats(2, 4, 8, 8), jnp.asarray([3, 50]), floats(2, 5, 24, seed=2))
    built = of_linen(model, module, inputs)
    return built._replace(flax_apply=lambda variables, *given: model.apply(variables, *given).sample)


PLAIN = {
    "down_block_types": ("DownBlock2D",) * 2,
    "up_block_types": ("UpBlock2D",) * 2,
    "mid_block_type": None,
}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
NAMES = ("diffusers FlaxUNet2DConditionModel", "diffusers UNet2DConditionModel")
PAIRS.add("unet", *NAMES, lambda: _unet({**PLAIN, "block_out_channels": (64, 128)}))
# Each of the 32 groups of the GroupNorms is one channel, so that gradients of biases before them are zero.
PAIRS.add("unet_with_zero_gradients", *NAMES, lambda: _unet(PLAIN))
PAIRS.add(
    "unet_with_attention",
    "diffusers FlaxUNet2DConditionModel",
    "diffusers UNet2DConditionModel",
    lambda: _unet(CROSS),
    disagreement="the Flax class applies the GELU by tanh (diffusers/models/attention_flax.py:494), PyTorch's by erf; "
    "the eps of the GroupNorm before the attention is 1e-5 (attention_flax.py:368) and 1e-6",
)
