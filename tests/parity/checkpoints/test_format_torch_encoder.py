"""ViTs around `torch.nn.TransformerEncoder` are read as PyTorch computes them, under the names that tutorials give them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from torch import nn

import parity
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.peers.proof import jax_logits, prove, prove_gradients, relrms, torch_logits
from vit_spec import InputError


class Encoder(nn.Module):
    """A ViT whose blocks are PyTorch's own; `names` are its attributes for projection, encoder and classifier."""

    def __init__(self, width: int, heads: int, depth: int, names: tuple[str, str, str], **options: Any) -> None:
        super().__init__()
        self.names, side = names, 8
        projection, encoder, head = names
        self.add_module(projection, nn.Conv2d(3, width, side, side))
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 13, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, **options)
        self.add_module(encoder, nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))
        self.add_module(head, nn.Linear(width, 5))

    def forward(self, images: Any) -> Any:
        projection, encoder, head = (getattr(self, name) for name in self.names)
        patches = projection(images).flatten(2).transpose(1, 2)
        x = encoder(torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed)
        return head(x[:, 0])


def saved(path: Path, *sizes: int, names: tuple[str, str, str], **options: Any) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return a state dict of an `Encoder` in float64, images, and its logits for them."""
    torch.manual_seed(0)
    model = Encoder(*sizes, names=names, **options).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        images = torch.randn(2, 3, 24, 32, dtype=torch.float64)
        logits = model(images)
    torch.save(model.state_dict(), path)
    return path, images.numpy(), logits.numpy()


NAMES = ("patch_embed", "encoder", "head")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_twins_compute_the_outputs_and_gradients_of_torchs_encoder(
    tmp_path: Path, norm_first: bool, activation: str, bias: bool
) -> None:
    options = {"norm_first": norm_first, "activation": activation, "bias": bias}
    path, images, logits = saved(tmp_path / "a.pth", 24, 3, 2, names=NAMES, **options)
    given = {"norms.order": "pre" if norm_first else "post", "mlp.activation": activation, "num_heads": 3}
    given |= {"image_size": (24, 32), "norms.kind": "layer"}
    peer = f"torch {torch.__version__.partition('+')[0]}"
    found = prove(path, images, logits, format="torch-encoder", peer=peer, given=given)
    model = Encoder(24, 3, 2, NAMES, **options).double().eval()
    model.load_state_dict(torch.load(path, weights_only=True))
    prove_gradients(found, images, model)


def test_pytorchs_defaults_are_assumed_and_named(tmp_path: Path) -> None:
    path, images, logits = saved(tmp_path / "a.pth", 384, 6, 3, names=NAMES)
    found = parity.load(path, given={"image_size": (24, 32)})
    assumed = {each.field: each.value for each in found.assumed}
    assert assumed["norms.order"] == "post" and assumed["mlp.activation"] == "relu" and assumed["norms.eps"] == 1e-5
    assert relrms(torch_logits(found, images), logits) < FLOAT64_TOLERANCE
    assert relrms(jax_logits(found, images), logits) < FLOAT64_TOLERANCE


@pytest.mark.parametrize(
    "names",
    [
        ("conv_proj", "transformer", "fc"),
        ("patch_embedding", "transformer_encoder", "classifier"),
        ("proj", "blocks", "mlp_head"),
    ],
)
def test_names_of_other_tutorials_are_read(tmp_path: Path, names: tuple[str, str, str]) -> None:
    path, images, logits = saved(tmp_path / "a.pth", 24, 3, 2, names=names)
    found = parity.load(path, given={"image_size": (24, 32), "num_heads": 3})
    assert found.format == "torch-encoder"
    assert relrms(torch_logits(found, images), logits) < FLOAT64_TOLERANCE


def test_a_written_state_dict_is_opened_by_torch(tmp_path: Path) -> None:
    path, images, logits = saved(tmp_path / "a.pth", 24, 3, 2, names=NAMES)
    given = {"image_size": (24, 32), "num_heads": 3}
    parity.convert(path, tmp_path / "b.npz", "jax", given=given)
    parity.convert(tmp_path / "b.npz", tmp_path / "c.pth", "torch-encoder")
    model = Encoder(24, 3, 2, NAMES).double().eval()
    model.load_state_dict(torch.load(tmp_path / "c.pth", weights_only=True), strict=True)
    with torch.no_grad():
        assert np.array_equal(model(torch.tensor(images)).numpy(), logits)


def test_another_layer_beside_the_encoder_is_refused(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path / "a.pth", 24, 3, 2, names=NAMES)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "adapter.weight": torch.zeros(24, 24)}, path)
    with pytest.raises(InputError, match=r"unexpected adapter\.weight"):
        parity.load(path)
