"""Let the Flax classes of transformers v4 load what this project writes, and compare their logits bit by bit.

    python -m tests.goldens.check_transformers_flax      # in the environment of from_transformers_flax.py

Each golden file's own weights go through the format "jax" and back to a folder that `from_pretrained` opens, config.json
and all; PyTorch checkpoints of the same classes go to Flax, held to transformers' own conversion (`from_pt=True`).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict

import parity
from parity.checkpoints.writing import write as write_weights
from tests.goldens.golden import names, read

IMAGES = np.random.default_rng(0).standard_normal((2, 3, 12, 12)).astype(np.float32)
# Classes, the sizes that make them small, and the format that a PyTorch checkpoint of them is converted to.
COMMON = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12, "patch_size": 4}
CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "ViTForImageClassification": ({"intermediate_size": 18, "num_labels": 5}, "hf-flax"),
    "ViTModel": ({"intermediate_size": 18, "hidden_act": "gelu_new", "qkv_bias": False}, "hf-flax"),
    "Dinov2ForImageClassification": ({"mlp_ratio": 2, "num_labels": 5}, "hf-flax-dinov2"),
    "Dinov2Model": ({"mlp_ratio": 2, "use_swiglu_ffn": True}, "hf-flax-dinov2"),
    "CLIPVisionModel": ({"intermediate_size": 18}, "hf-flax-clip"),
}


def logits(name: str, folder: Path, **options: Any) -> np.ndarray:
    """Return what a Flax class makes of `IMAGES`, opened from a folder."""
    found = getattr(transformers, name).from_pretrained(folder, **options)(IMAGES)
    return np.asarray(found.logits if "logits" in found else found.pooler_output)


def strictly(name: str, folder: Path) -> np.ndarray:
    """As `logits`, after a check that no key is missing, unexpected or of another shape.

    Raises:
        ValueError: one is.
    """
    model, _ = getattr(transformers, name).from_pretrained(folder, _do_init=False)
    expected = {key: like.shape for key, like in flatten_dict(model.params_shape_tree, sep="/").items()}
    told = {key: array.shape for key, array in parity.load(folder / "flax_model.msgpack").arrays.items()}
    if told != expected:
        raise ValueError(f"{name}: {set(told.items()) ^ set(expected.items())}")
    return logits(name, folder)


def write(source: Path, folder: Path, format: str) -> None:
    """Write weights as Flax has them, with the JSON files of the format."""
    checkpoint = parity.load(source)
    write_weights(checkpoint, folder / "flax_model.msgpack", format)
    for name, content in parity.checkpoints.formats.get(format).files(checkpoint.config).items():
        (folder / name).write_text(json.dumps(content))


def returned(name: str) -> bool:
    """Whether a golden file's weights come back from the twins' format bit by bit, as the class sees them."""
    golden = read(name)
    cls = golden.provenance["class"].rpartition(".")[2]
    with tempfile.TemporaryDirectory() as here:
        theirs, ours, between = Path(here, "theirs"), Path(here, "ours"), Path(here, "jax.safetensors")
        theirs.mkdir(), ours.mkdir()
        for file, content in golden.files.items():
            (theirs / file).write_bytes(content)
        format = parity.load(theirs / "flax_model.msgpack").format
        parity.convert(theirs / "flax_model.msgpack", between, "jax")
        write(between, ours, format)
        return logits(cls, theirs).tobytes() == strictly(cls, ours).tobytes()


def crossed(name: str) -> bool:
    """Whether a PyTorch checkpoint comes to Flax bit by bit as transformers itself brings it there."""
    options, format = CLASSES[name]
    cls = getattr(transformers, name)
    with tempfile.TemporaryDirectory() as here:
        theirs, ours = Path(here, "theirs"), Path(here, "ours")
        ours.mkdir()
        torch.manual_seed(0)
        model = cls(cls.config_class(**COMMON, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(theirs)
        write(theirs, ours, format)
        return logits(f"Flax{name}", theirs, from_pt=True).tobytes() == strictly(f"Flax{name}", ours).tobytes()


def main() -> None:
    """Print a line for each class."""
    for name in names():
        golden = read(name)
        if golden.files and golden.provenance["class"] != "transformers.FlaxCLIPModel":  # which has a text tower too
            print(f"{name:24} {golden.provenance['class']:48} equal bits: {returned(name)}")
    for name in CLASSES:
        print(f"{'from PyTorch':24} {name:48} equal bits: {crossed(name)}")


if __name__ == "__main__":
    main()
