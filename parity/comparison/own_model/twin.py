"""The twins as functions of arrays by row, in float64 on CPU: only the twin of the user's framework is imported."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from parity.checkpoints.columns import align, parameter_of, row_column
from parity.checkpoints.conversion import nest
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array, Layout
from parity.comparison.framework_settings import QUICK_COMPILE, exact_jax
from parity.comparison.own_model.model import as_float64
from vit_spec import ViTConfig, rows

Rows = Mapping[str, Array]


class Twin:
    """A twin, "torch" or "jax"."""

    def __init__(self, name: str) -> None:
        self.name = name

    def arrays(self, config: ViTConfig, values: Rows) -> dict[str, Array]:
        """Return arrays by the keys of the twin, in the dtype of the values, from arrays by row."""
        sizes, found = config.sizes, {}
        for name, layout in get(self.name).layouts(config).items():
            axes = rows(config)[name].axes
            for key, indices in layout.indexed_keys(sizes, {}):
                array = np.empty(layout.shape(sizes), values[name].dtype)
                rest = [axis for axis in axes if axis not in layout.key_axes]
                view = layout.view(array, sizes, indices, rest)
                view[...] = values[name][tuple(indices.get(axis, slice(None)) for axis in axes)]
                found[key] = array
        return found

    def run(self, config: ViTConfig, values: Rows, images: Array, is_compiled: bool = False) -> Array:
        """Return the output for images (B, H, W, C).

        is_compiled: whether JAX compiles the config as a whole.  Otherwise it runs operations one by one, which it
            compiles too: this costs as much as ten configs at first, and for each further config a tenth of one.
        """
        arrays = {key: as_float64(array) for key, array in self.arrays(config, values).items()}
        return _run_torch(config, arrays, images) if self.name == "torch" else _run_jax(config, arrays, images, is_compiled)

    def gradients(self, config: ViTConfig, values: Rows, images: Array, target: Array) -> tuple[Array, dict[str, Array]]:
        """Return the output, and the gradients of its mean squared error from a target, by row."""
        arrays = {key: as_float64(array) for key, array in self.arrays(config, values).items()}
        gradients = _torch_gradients if self.name == "torch" else _jax_gradients
        output, found = gradients(config, arrays, images, target)
        return output, by_row(get(self.name).layouts(config), config, found)


def by_row(column: Mapping[str, Layout], config: ViTConfig, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays by row, with the axes of the row, from arrays by key."""
    sizes, found = config.sizes, dict[str, Array]()
    source, target = align(column, row_column(config, {parameter_of(name): None for name in column}))
    for name, layout in source.items():
        row, axes = rows(config)[parameter_of(name)], target[name].parameter_axes
        rest = [axis for axis in axes if axis not in layout.key_axes]
        for key, indices in layout.indexed_keys(sizes, {}):
            view = layout.view(np.asarray(arrays[key]), sizes, indices, rest)
            out = found.setdefault(row.name, np.empty(row.shape, view.dtype))
            target[name].view(out, sizes, {}, axes)[tuple(indices.get(axis, slice(None)) for axis in axes)] = view
    return found


@lru_cache(maxsize=64)
def _empty_torch_model(config: ViTConfig) -> Any:
    import torch

    import vit_torch

    with torch.device("meta"):
        return vit_torch.ViT(config).eval()


def _torch_model(config: ViTConfig, arrays: Mapping[str, Array]) -> Any:
    import torch

    model = _empty_torch_model(config)
    model.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, assign=True)
    return model


def _run_torch(config: ViTConfig, arrays: Mapping[str, Array], images: Array) -> Array:
    import torch

    with torch.no_grad():
        output: Array = _torch_model(config, arrays)(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    return output


def _torch_gradients(
    config: ViTConfig, arrays: Mapping[str, Array], images: Array, target: Array
) -> tuple[Array, dict[str, Array]]:
    import torch

    model = _torch_model(config, arrays).requires_grad_()
    with torch.enable_grad():
        output = model(torch.from_numpy(images).permute(0, 3, 1, 2))
        loss = (output - torch.from_numpy(target)).square().mean()
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters)
    return output.detach().numpy(), {name: each.numpy() for name, each in zip(names, found, strict=True)}


def _run_jax(config: ViTConfig, arrays: Mapping[str, Array], images: Array, is_compiled: bool) -> Array:
    import jax

    pairs = [images[[n, min(n + 1, len(images) - 1)]] for n in range(0, len(images), 2)]  # one program for all batches
    with exact_jax("float64"), nullcontext() if is_compiled else jax.disable_jit():
        run = _compiled_run(config) if is_compiled else _jax_function(config)
        tree = jax.device_put(nest(arrays.items()))
        outputs = [np.asarray(run(tree, jax.device_put(each))) for each in pairs]
    return np.concatenate(outputs)[: len(images)]


@lru_cache(maxsize=4)
def _compiled_run(config: ViTConfig) -> Any:
    import jax

    return jax.jit(_jax_function(config), compiler_options=QUICK_COMPILE)


@lru_cache(maxsize=4)
def _compiled_gradients(config: ViTConfig) -> Any:
    import jax
    import jax.numpy as jnp

    def loss(tree: Any, images: Any, target: Any) -> Any:
        output = _jax_function(config)(tree, images)
        return jnp.square(output - target).mean(), output

    return jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK_COMPILE)


def _jax_function(config: ViTConfig) -> Any:
    import vit_jax

    model = vit_jax.ViT(config, vit_jax.Execution(dtype="float64", precision="highest"))
    return lambda tree, images: model.apply({"params": tree}, images)


def _jax_gradients(
    config: ViTConfig, arrays: Mapping[str, Array], images: Array, target: Array
) -> tuple[Array, dict[str, Array]]:
    import jax

    with exact_jax("float64"):
        given = jax.device_put((nest(arrays.items()), images, target))
        found, output = _compiled_gradients(config)(*given)
    flat = {
        "/".join(str(each.key) for each in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }
    return np.asarray(output), flat
