"""The teacher of knowledge distillation in PyTorch."""

import torch
from torch import Tensor

import parity
import vit_torch
from train.loop.teacher import InputTransform, Teacher
from train.recipes import Recipe
from train.torch.losses import teacher_loss
from vit_spec import ViTConfig


class TeacherModel:
    """A trained model whose answers a student learns; its parameters are replicated.

    model: the model, in evaluation mode.
    """

    def __init__(
        self, teacher: Teacher, student: ViTConfig, recipe: Recipe, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        with torch.device("meta"):  # no weights are initialized: `load_state_dict` assigns them
            self.model = vit_torch.ViT(teacher.checkpoint.config, vit_torch.Execution(dtype=dtype))
        wide = torch.get_default_dtype()
        weights = {
            name: tensor.to(device, torch.promote_types(tensor.dtype, wide))
            for name, tensor in parity.to_torch(teacher.checkpoint).items()
        }
        self.model.load_state_dict(weights, assign=True)
        self.model.requires_grad_(False).eval()
        found = InputTransform.between(student, teacher.checkpoint.config)
        self._scale, self._shift = (torch.tensor(each, dtype=wide, device=device) for each in found[:2])
        self._resize = [torch.tensor(each, dtype=wide, device=device) for each in found[2:] if each is not None]
        self._columns = torch.tensor(teacher.columns, device=device)
        self._weight = recipe.distillation_weight
        self._temperature = recipe.distillation_temperature if recipe.distillation == "soft" else None

    def add_loss(self, loss: Tensor, images: Tensor, outputs: Tensor) -> Tensor:
        """Return the loss of each image with the teacher's share, (B,).

        Args:
            loss: that of the targets of the data, (B,).
            images: the student's, normalized and mixed, (B, C, H, W).
            outputs: the student's logits that learn from the teacher, (B, classes).
        """
        with torch.no_grad():
            answers = self.model(self._transformed(images))[:, self._columns]
        return (1 - self._weight) * loss + self._weight * teacher_loss(outputs, answers, self._temperature)

    def _transformed(self, x: Tensor) -> Tensor:
        if self._resize:
            rows, columns = self._resize
            x = torch.einsum("yh,bchw->bcyw", rows, x)
            x = torch.einsum("xw,bcyw->bcyx", columns, x)
        return x * self._scale[:, None, None] + self._shift[:, None, None]
