"""Initial values of the PyTorch twin's parameters: the distributions in `vit_spec.rows`, sampled with its generator."""

import numpy as np
import torch
from torch import Tensor, nn

from vit_spec import Law, position_table, rows
from vit_spec.initialisation import TRUNCATED_STD
from vit_spec.positions import rotary_frequencies
from vit_torch.layers import ViTModule


@torch.no_grad()
def initialise(model: ViTModule) -> None:
    """Set every parameter to initial values from the distributions in `vit_spec.rows`, with torch's global generator.

    Parameters on the meta device have no values and are not changed.
    """
    if next(model.parameters()).is_meta:
        return
    declared = rows(model.config)
    for name, parameter in model.named_parameters():
        words = name.split(".")
        row = declared[".".join(word for word in words if not word.isdigit())]
        if row.law is None:
            parameter.copy_(torch.tensor(position_table(model.config, model.config.grid)[0]).view(parameter.shape))
        else:
            _sample(row.law, parameter)


def _sample(law: Law, parameter: Tensor) -> None:
    match law.kind:
        case "constant":
            parameter.fill_(law.arguments[0])
        case "normal":
            parameter.normal_(0, law.std)
        case "uniform":
            parameter.uniform_(*law.arguments)
        case "rotary":
            magnitude, angle = map(torch.tensor, rotary_frequencies(parameter.shape[2], *law.arguments))
            angle = angle + torch.rand(parameter.shape[1], 1).mul(2 * np.pi)
            parameter.copy_(magnitude * torch.stack([angle.cos(), angle.sin()]))
        case "trunc_normal":
            parent = law.std / TRUNCATED_STD
            nn.init.trunc_normal_(parameter, 0, parent, -2 * parent, 2 * parent)
        case _:
            raise ValueError(f"unknown distribution {law.kind!r}: give a kind of `vit_spec.Law`, or add it to both twins")
