"""Command that loads checkpoints of this project into the Flax classes of transformers v4 and compares logits bit by bit.

    python -m tests.goldens.check_transformers_flax      # in the environment of from_transformers_flax.py

The weights of each golden file are converted to the format "jax" and back to a folder that `from_pretrained` opens.
PyTorch checkpoints of the same classes are converted to Flax and compared with transformers' own conversion
(`from_pt=True`).
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
# Class -> options that make it small, and the format that its PyTorch checkpoint is converted to.
COMMON = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12, "patch_size": 4}
CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "ViTForImageClassification": ({"intermediate_size": 18, "num_labels": 5}, "hf-flax"),
    "ViTModel": ({"intermediate_size": 18, "hidden_act": "gelu_new", "qkv_bias": False}, "hf-flax"),
    "Dinov2ForImageClassification": ({"mlp_ratio": 2, "num_labels": 5}, "hf-flax-dinov2"),
    "Dinov2Model": ({"mlp_ratio": 2, "use_swiglu_ffn": True}, "hf-flax-dinov2"),
    "CLIPVisionModel": ({"intermediate_size": 18}, "hf-flax-clip"),
}


def logits(name: str, folder: Path, **options: Any) -> np.ndarray:
    """Return the logits of a Flax class, opened from a folder, for `IMAGES`."""
    found = getattr(transformers, name).from_pretrained(folder, **options)(IMAGES)
    return np.asarray(found.logits if "logits" in found else found.pooler_output)


def strict_logits(name: str, folder: Path) -> np.ndarray:
    """Return the result of `logits`, after a check of the keys and shapes in the folder.

    Raises:
        ValueError: a key is missing, unexpected or of another shape.
    """
    model, _ = getattr(transformers, name).from_pretrained(folder, _do_init=False)
    expected = {key: like.shape for key, like in flatten_dict(model.params_shape_tree, sep="/").items()}
    found = {key: array.shape for key, array in parity.load(folder / "flax_model.msgpack").arrays.items()}
    if found != expected:
        raise ValueError(f"{name}: {set(found.items()) ^ set(expected.items())}")
    return logits(name, folder)


def write_folder(source: Path, folder: Path, format: str) -> None:
    """Convert a checkpoint to a folder with flax_model.msgpack and the JSON files of the format."""
    checkpoint = parity.load(source)
    write_weights(checkpoint, folder / "flax_model.msgpack", format)
    for name, content in parity.checkpoints.formats.get(format).library.contents(checkpoint.config).items():
        (folder / name).write_text(json.dumps(content))


def round_trip_is_exact(name: str) -> bool:
    """Return whether a golden file gives the same logits, bit by bit, after a conversion to the JAX twin and back."""
    golden = read(name)
    cls = golden.provenance["class"].rpartition(".")[2]
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours, between = Path(folder, "theirs"), Path(folder, "ours"), Path(folder, "jax.safetensors")
        theirs.mkdir(), ours.mkdir()
        for file, content in golden.files.items():
            (theirs / file).write_bytes(content)
        format = parity.load(theirs / "flax_model.msgpack").format
        parity.convert(theirs / "flax_model.msgpack", between, "jax")
        write_folder(between, ours, format)
        return logits(cls, theirs).tobytes() == strict_logits(cls, ours).tobytes()


def conversion_is_exact(name: str) -> bool:
    """Return whether a PyTorch checkpoint converted to Flax gives the same logits as transformers' own conversion."""
    options, format = CLASSES[name]
    cls = getattr(transformers, name)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        ours.mkdir()
        torch.manual_seed(0)
        model = cls(cls.config_class(**COMMON, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(theirs)
        write_folder(theirs, ours, format)
        return logits(f"Flax{name}", theirs, from_pt=True).tobytes() == strict_logits(f"Flax{name}", ours).tobytes()


def main() -> None:
    """Print for each golden file and each class whether the logits are equal."""
    for name in names():
        golden = read(name)
        if golden.files and golden.provenance["class"] != "transformers.FlaxCLIPModel":  # it also has a text tower
            print(f"{name:24} {golden.provenance['class']:48} equal bits: {round_trip_is_exact(name)}")
    for name in CLASSES:
        print(f"{'from PyTorch':24} {name:48} equal bits: {conversion_is_exact(name)}")


if __name__ == "__main__":
    main()
