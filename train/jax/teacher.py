"""The teacher of knowledge distillation in JAX."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

import parity
import vit_jax
from train.jax.cluster import check_same_on_all_processes
from train.jax.losses import teacher_loss
from train.jax.parameter_tree import Tree
from train.jax.sharding import place
from train.loop.teacher import InputTransform, Teacher
from train.recipes import Recipe
from vit_spec import ViTConfig


class TeacherModel:
    """A trained model whose answers a student learns; its parameters are replicated.

    params: the parameters, an argument of the compiled step.
    """

    def __init__(self, teacher: Teacher, student: ViTConfig, recipe: Recipe, replicated: NamedSharding) -> None:
        dtype = jnp.bfloat16 if recipe.dtype == "bfloat16" else None
        precision = "highest" if dtype is None else None  # as the student
        self._model = vit_jax.ViT(teacher.checkpoint.config, vit_jax.Execution(dtype=dtype, precision=precision))
        self._transform = InputTransform.between(student, teacher.checkpoint.config)
        self._columns = teacher.columns
        self._weight = recipe.distillation_weight
        self._temperature = recipe.distillation_temperature if recipe.distillation == "soft" else None
        wide = jnp.zeros(()).dtype  # float32, or float64 in JAX's x64 mode
        params = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, wide)), parity.to_jax(teacher.checkpoint))
        check_same_on_all_processes(params, "the weights of the teacher")
        self.params: Tree = place(params, replicated)

    def add_loss(self, params: Tree, loss: Array, images: Array, outputs: Array) -> Array:
        """Return the loss of each image with the teacher's share, (B,).

        Args:
            params: parameters of the teacher.
            loss: that of the targets of the data, (B,).
            images: the student's, normalized and mixed, (B, H, W, C).
            outputs: the student's logits that learn from the teacher, (B, classes).
        """
        logits: Array = self._model.apply({"params": params}, self._transformed(images))  # type: ignore[assignment]
        answers = jax.lax.stop_gradient(logits)[:, self._columns]
        return (1 - self._weight) * loss + self._weight * teacher_loss(outputs, answers, self._temperature)

    def _transformed(self, x: Array) -> Array:
        scale, shift, rows, columns = self._transform
        if rows is not None and columns is not None:
            x = jnp.einsum("yh,bhwc->bywc", jnp.asarray(rows, x.dtype), x, precision="highest")
            x = jnp.einsum("xw,bywc->byxc", jnp.asarray(columns, x.dtype), x, precision="highest")
        return x * jnp.asarray(scale, x.dtype) + jnp.asarray(shift, x.dtype)
