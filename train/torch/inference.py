"""Inference with the PyTorch twin."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import parity
import vit_torch
from parity.checkpoints.weights import Checkpoint


class TwinPredictor:
    """The predictor (`train.inference.model.Predictor`) of the PyTorch twin, on the first GPU or, without one, the CPU."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._pixels = checkpoint.config.pixels
        with torch.device("meta"):  # no weights are initialized: `load_state_dict` assigns them
            self._model = vit_torch.ViT(checkpoint.config).eval()
        weights = {name: tensor.to(self._device, torch.float32) for name, tensor in parity.to_torch(checkpoint).items()}
        self._model.load_state_dict(weights, assign=True)

    @torch.inference_mode()
    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return logits or features, (B, outputs)."""
        return self._model(self._to_input(images)).cpu().numpy()

    @torch.inference_mode()
    def attention_maps(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the attention weights of the last block, (B, heads, T, T)."""
        return vit_torch.attention_maps(self._model, self._to_input(images)).cpu().numpy()

    def _to_input(self, images: NDArray[np.uint8]) -> Tensor:
        return vit_torch.normalize(torch.tensor(images, device=self._device).permute(0, 3, 1, 2), self._pixels)
