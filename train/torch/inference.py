"""The object twin as it is used: weights in, and numbers for images out."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import parity
import vit_torch
from parity.checkpoints.weights import Checkpoint


class Twin:
    """See `train.inference.model.Network`; it runs on a GPU where there is one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._pixels = checkpoint.config.pixels
        with torch.device("meta"):  # the weights are about to be replaced
            self._model = vit_torch.ViT(checkpoint.config).eval()
        weights = {name: tensor.to(self._device, torch.float32) for name, tensor in parity.to_torch(checkpoint).items()}
        self._model.load_state_dict(weights, assign=True)

    @torch.inference_mode()
    def outputs(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return logits or features, (B, outputs)."""
        return self._model(self._seen(images)).cpu().numpy()

    @torch.inference_mode()
    def attention(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the last block's attention weights, (B, heads, T, T)."""
        return vit_torch.attention_maps(self._model, self._seen(images)).cpu().numpy()

    def _seen(self, images: NDArray[np.uint8]) -> Tensor:
        mean, std = (torch.tensor(values, device=self._device) for values in (self._pixels.mean, self._pixels.std))
        x = torch.tensor(images, device=self._device).float() / 255
        return ((x - mean) / std).permute(0, 3, 1, 2)
