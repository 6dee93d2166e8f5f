"""Runs of a PyTorch module for `parity.invariance`: in a dtype, on a device, on a number of threads."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from parity.checkpoints.arrays import as_array
from parity.checkpoints.layout import Array
from parity.comparison.any_model.outputs import named_arrays
from parity.comparison.any_model.torch_runner import cast_tensor, copy_in_dtype
from parity.comparison.monte_carlo_arithmetic import perturb_operands
from parity.comparison.torch_settings import full_float32

Run = Callable[[Sequence[Array]], Mapping[str, Array]]


class TorchRunner:
    """A PyTorch module whose copies run in several dtypes and on several devices; the module itself stays as it is.

    Attributes:
        device: the device of the module, on which runs in the lower precision take place; those in float64 are on CPU.
    """

    framework = "torch"

    def __init__(self, module: Any) -> None:
        import torch

        self._module = module
        tensors = [*module.parameters(), *module.buffers()]
        self.device = str(tensors[0].device) if tensors else str(torch.get_default_device())

    @property
    def versions(self) -> dict[str, str]:
        """Versions of PyTorch and NumPy, and the machine type."""
        import torch

        return {"torch": torch.__version__, "numpy": np.__version__, "machine": platform.machine()}

    def other_devices(self) -> list[str]:
        """Return the names of the devices on which the module can run beside `device`."""
        import torch

        names = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        here = str(torch.device("cuda:0")) if self.device == "cuda" else self.device
        return [name for name in names if name != here]

    def prepare(self, dtype: str, device: str | None = None, perturbation: tuple[str, int] | None = None) -> Run:
        """Return a function that runs a copy of the module, in its mode, on arrays that are cast to `dtype`.

        Buffers, such as running statistics, are the same at the start of each run.

        perturbation: a type and a seed: all operands are perturbed by a few unit roundoffs of that type; see
            `parity.comparison.monte_carlo_arithmetic`.
        """
        import torch

        device = device or ("cpu" if dtype == "float64" else self.device)
        own = copy_in_dtype(self._module, dtype, device)
        buffers = {key: buffer.clone() for key, buffer in own.named_buffers()}

        def run(inputs: Sequence[Array]) -> Mapping[str, Array]:
            # The generator is not seeded: random numbers that the module draws must differ from run to run.
            with torch.no_grad(), full_float32(torch):
                for key, buffer in own.named_buffers():
                    buffer.copy_(buffers[key])
                tensors = [cast_tensor(torch.tensor(x), dtype).to(device) for x in inputs]
                with perturb_operands(*perturbation) if perturbation else nullcontext():
                    returned = own(*tensors)
                return {name: as_array(tensor.contiguous()) for name, tensor in named_arrays(returned)}

        return run

    def run_on_threads(self, dtype: str, inputs: Sequence[Array]) -> tuple[str, Mapping[str, Array], Mapping[str, Array]]:
        """Return what was compared, and the outputs on one thread and on several.

        Raises:
            NotTestedError: the module is not on CPU.
        """
        import torch

        if self.device != "cpu":
            raise NotTestedError(f"the module is on {self.device}, and threads are those of the CPU")
        before = torch.get_num_threads()
        several, run = max(before, 2), self.prepare(dtype)
        try:
            found = []
            for count in (1, several):
                torch.set_num_threads(count)
                found.append(run(inputs))
        finally:
            torch.set_num_threads(before)
        return f"on 1 and on {several} threads", found[0], found[1]


class NotTestedError(Exception):
    """A condition cannot be tested; the message says why."""
