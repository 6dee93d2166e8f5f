"""What is measured of a PyTorch model: the same functions for every library, and a training step like timm's."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tests.goldens.peers  # noqa: F401  # makes torchvision importable, which timm and transformers import after this
from benchmarks.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, Inputs

Scalars = tuple[Tensor, Tensor]  # the loss, and the norm of its gradient


def device() -> torch.device:
    """Return the first GPU that PyTorch sees, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> list[str]:
    """Return the packages whose versions decide the results."""
    return ["torch"]


def device_name() -> str:
    """Return the name of the device, "cpu" for CPUs."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def synchronize(_: object = None) -> None:
    """Wait until everything is computed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_memory() -> int | None:
    """Return the peak of the bytes that PyTorch allocated on the GPU; None without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def compilations() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class TorchModel:
    """A module with its batch.  Each measured function returns a tensor that may not be computed yet.

    The training step is that of timm's train.py: normalization on the device, autocast for bfloat16, the gradient, clipping
    of its norm, torch's fused AdamW.  Matrices decay, and biases, norms and tokens do not.
    """

    def __init__(self, module: nn.Module, logits: Callable[[Any], Tensor] = lambda output: output) -> None:
        """Take the library's module in float32.

        logits: (output of the module) -> (B, num_classes).
        """
        self.module, self._logits = module.to(device()), logits
        self._call: Callable[[Tensor], Any] = self.module
        self._bfloat16 = False

    def prepare(self, inputs: Inputs, compiled: bool, bfloat16: bool) -> None:
        """Make everything that a step needs."""
        if compiled:
            self._call = torch.compile(self.module, dynamic=False)
        self._bfloat16 = bfloat16
        self._place(inputs)
        decays = [p for p in self.module.parameters() if p.ndim > 1]
        others = [p for p in self.module.parameters() if p.ndim <= 1]
        groups = [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def _place(self, inputs: Inputs) -> None:
        """Place the batch on the device."""
        self._images = torch.tensor(inputs.images, device=device()).permute(0, 3, 1, 2).contiguous()
        self._pixels = torch.tensor(inputs.pixels, device=device()).permute(0, 3, 1, 2).contiguous()
        self._targets = torch.tensor(inputs.targets, device=device()).long()
        mean, std = (torch.tensor(each, device=device()) * 255 for each in (inputs.mean, inputs.std))
        self._mean, self._std = mean[:, None, None], std[:, None, None]

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(device().type, torch.bfloat16) if self._bfloat16 else nullcontext()

    def _loss(self, images: Tensor) -> Tensor:
        with self._precision():
            return nn.functional.cross_entropy(self._logits(self._call(images)), self._targets)

    def compared(self, what: str, result: Any) -> np.ndarray:
        """Return the logits that a measured function returned, or its loss and the norm of its gradient."""
        if what == "gradient":  # in float64: PyTorch adds the squares of a matrix in float32 with an error of up to 1e-4
            gradients = (p.grad for p in self.module.parameters() if p.grad is not None)
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
            result = result, torch.stack(norms).norm()
        return np.stack([each.float().cpu().numpy() for each in result])

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Return the logits of the normalized batch, (B, num_classes)."""
        self.module.eval()
        with self._precision():
            return self._logits(self._call(self._images))

    @torch.no_grad()
    def latency(self) -> Tensor:
        """Return the logits of one normalized image, (1, num_classes)."""
        self.module.eval()
        with self._precision():
            return self._logits(self._call(self._images[:1]))

    def gradient(self) -> Tensor:
        """Compute the loss of the normalized batch and its gradient, and return the loss."""
        self.module.train()
        self.module.zero_grad()
        loss = self._loss(self._images)
        loss.backward()
        return loss.detach()

    def step(self) -> Scalars:
        """Do a training step on the batch of uint8 images; return the loss, and the norm of its gradient."""
        self.module.train()
        loss = self._loss(self._pixels.float().sub_(self._mean).div_(self._std))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm
