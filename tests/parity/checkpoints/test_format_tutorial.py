"""The format "tutorial": a module of torch.nn.MultiheadAttention, and a file that was trained on CIFAR-10.

The file comes with the outputs of the code that trained it.  It has no licence and is not part of the project; without it,
its tests are skipped.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
from tests import DATA
from vit_spec import InputError

WEIGHTS = DATA / "weights" / "cifar10_vit" / "best_vit.pth"
FLOAT32_TOLERANCE = 5e-6  # as in parity.comparison.tolerances
ACCURACY = 0.5182  # of the code that trained the file, on the test images of CIFAR-10

needs_the_file = pytest.mark.skipif(not WEIGHTS.is_file(), reason=f"needs {WEIGHTS}, which is not part of the project")


def torch_logits(checkpoint: parity.Checkpoint, images: np.ndarray) -> np.ndarray:
    """Return the logits of the PyTorch twin in float32, for images (B, H, W, C) in [0, 255]."""
    torch = pytest.importorskip("torch")
    import vit_torch

    model = vit_torch.ViT(checkpoint.config).eval()
    model.load_state_dict(parity.to_torch(checkpoint))
    with torch.no_grad():
        return model(torch.tensor(normalize(images).transpose(0, 3, 1, 2))).numpy()


def jax_logits(checkpoint: parity.Checkpoint, images: np.ndarray) -> np.ndarray:
    """Return the logits of the JAX twin in float32, for images (B, H, W, C) in [0, 255]."""
    jax = pytest.importorskip("jax")
    import vit_jax

    model = vit_jax.ViT(checkpoint.config)
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model.apply)({"params": parity.to_jax(checkpoint)}, normalize(images)))


def normalize(images: np.ndarray) -> np.ndarray:
    """Return images in [0, 255] as float32 in [-1, 1]."""
    return ((images / 255 - 0.5) / 0.5).astype(np.float32)


def test_the_twins_compute_the_outputs_of_torchs_multihead_attention(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    from tests.goldens.golden import noise
    from tests.peers.proof import prove

    rng = np.random.default_rng(0)
    with torch.device("cpu"):
        model = tutorial_model(torch).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(noise(rng, tuple(parameter.shape), 0.4)))
        images = noise(rng, (2, 3, 16, 16), 1.0)
        logits = model(torch.tensor(images)).numpy()
    torch.save(model.state_dict(), tmp_path / "a.pth")
    peer = f"a module of torch.nn.MultiheadAttention, torch {torch.__version__.partition('+')[0]}"
    prove(tmp_path / "a.pth", images, logits, format="tutorial", peer=peer, given={"num_heads": 3})


def tutorial_model(torch: Any) -> Any:
    """Return a ViT as in tutorials: width 12, two blocks, patches of 4 pixels."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
            self.attn = nn.MultiheadAttention(12, 3, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, 12), nn.Dropout(0.1))

        def forward(self, x: Any) -> Any:
            y = self.norm1(x)
            x = x + self.attn(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    class ViT(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Module()
            self.patch_embed.proj = nn.Conv2d(3, 12, 4, 4)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 12))
            self.pos_embed = nn.Module()
            self.pos_embed.pos_embedding = nn.Parameter(torch.zeros(1, 17, 12))
            self.transformer = nn.ModuleList(Block() for _ in range(2))
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

        def forward(self, images: Any) -> Any:
            x = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed.pos_embedding
            for block in self.transformer:
                x = block(x)
            return self.head(self.norm(x)[:, 0])

    return ViT()


@pytest.fixture(scope="module")
def checkpoint() -> parity.Checkpoint:
    return parity.load(WEIGHTS, given={"num_heads": 4})


@pytest.fixture(scope="module")
def recorded() -> Any:
    """Return images, and the logits that the code that trained the file computes for them."""
    return np.load(WEIGHTS.with_name("oracle_logits.npz"))


@needs_the_file
def test_the_number_of_heads_must_be_given() -> None:
    with pytest.raises(InputError, match="num_heads=N"):
        parity.load(WEIGHTS)


@needs_the_file
def test_the_file_is_recognised_and_its_config_inferred(checkpoint: parity.Checkpoint) -> None:
    config = checkpoint.config
    assert checkpoint.format == "tutorial"
    assert (config.image_size, config.patch_size, config.norms.eps) == ((32, 32), (4, 4), 1e-5)
    assert (config.width, config.depth, config.mlp_dim, config.num_classes) == (128, 6, 256, 10)


@needs_the_file
@pytest.mark.parametrize("run", [torch_logits, jax_logits])
def test_a_twin_computes_the_logits_of_the_code_that_trained_the_file(
    run: Any, checkpoint: parity.Checkpoint, recorded: Any
) -> None:
    found = run(checkpoint, recorded["images"])
    assert np.linalg.norm(found - recorded["logits"]) <= FLOAT32_TOLERANCE * np.linalg.norm(recorded["logits"])


@needs_the_file
def test_conversion_to_the_jax_twin_and_back_preserves_every_bit(checkpoint: parity.Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    parity.convert(WEIGHTS, tmp_path / "ours.safetensors", "jax", given={"num_heads": 4})
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", "tutorial")
    back = parity.load(tmp_path / "back.safetensors").arrays
    assert back.keys() == checkpoint.arrays.keys()
    assert all(np.array_equal(back[key], checkpoint.arrays[key]) for key in back)


@pytest.fixture(scope="module")
def cifar10_test_images() -> tuple[np.ndarray, np.ndarray]:
    """Return the test images of CIFAR-10, (10000, 32, 32, 3), and their labels."""
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    table = parquet.read_table(DATA / "cifar10" / "test-00000-of-00001.parquet").to_pydict()
    images = [np.asarray(image.open(io.BytesIO(each["bytes"]))) for each in table["image"]]
    return np.stack(images), np.array(table["label"])


@needs_the_file
@pytest.mark.slow
def test_the_accuracy_on_cifar10_is_that_of_the_code_that_trained_the_file(
    checkpoint: parity.Checkpoint, cifar10_test_images: Any
) -> None:
    images, labels = cifar10_test_images
    found = np.concatenate([torch_logits(checkpoint, part).argmax(1) for part in np.split(images, 100)])
    assert np.mean(found == labels) == ACCURACY
    first = slice(0, 100)
    assert np.array_equal(jax_logits(checkpoint, images[first]).argmax(1), found[first])
