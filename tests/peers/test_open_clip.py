"""Image towers of OpenCLIP: the folders that its push_to_hf_hub.py writes, with open_clip_config.json."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "open_clip", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.goldens.peers import fill, float64, rng_for  # noqa: I001  # first: it makes torchvision importable
import torch
import open_clip
from open_clip.push_to_hf_hub import save_for_hf

from tests.goldens.golden import noise
from tests.peers.proof import prove
from vit_spec.models import CLIP

TEXT = {"context_length": 7, "vocab_size": 11, "width": 8, "heads": 2, "layers": 1}
SIDE = 160  # of timm's small test models
# vision_cfg of a tower of timm -> its format
TIMM: dict[str, tuple[dict[str, Any], str]] = {
    "no projection": ({"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None}, "timm:vit"),
    "no classifier": ({"timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none"}, "timm:vit"),
    "linear": ({"timm_model_name": "test_vit2", "timm_pool": "", "timm_proj": "linear"}, "timm:vit"),
    "linear, bias": ({"timm_model_name": "test_vit4", "timm_proj": "linear", "timm_proj_bias": True}, "timm:vit"),
}
# vision_cfg of OpenCLIP's own tower, besides its sizes
OWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"ls_init_value": 0.1, "norm_kwargs": {"eps": 1e-3}, "act_kwargs": {"approximate": "tanh"}},
    "mean": {"pool_type": "avg"},
    "all tokens": {"pool_type": "none", "final_ln_after_pool": True},
    "no norm before the blocks": {"no_ln_pre": True, "final_ln_after_pool": True},
}


class NoTokenizer:
    def save_pretrained(self, folder: Any) -> None:
        """Write no files."""


def prove_folder(name: str, tower: dict[str, Any], format: str, tmp_path: Path) -> None:
    """Assert that both twins compute the outputs of an image tower from OpenCLIP's folder."""
    config = {"embed_dim": 5, "vision_cfg": tower, "text_cfg": TEXT}
    with float64():
        model = open_clip.CustomTextCLIP(**config).double().eval()
        fill(model, rng_for(name))
        height, width = model.visual.image_size
        images = noise(rng_for(name), (2, 3, height, width), 1.0)
        outputs = model.encode_image(torch.tensor(images), normalize=False).detach().numpy()
    open_clip.model.set_model_preprocess_cfg(model, {"mean": CLIP.mean, "std": CLIP.std})
    save_for_hf(model, NoTokenizer(), model_config=config, save_directory=tmp_path)
    found = prove(tmp_path, images, outputs, format=format, peer=f"open_clip {open_clip.__version__}")
    assert not found.assumed


@pytest.mark.parametrize("name", TIMM)
def test_the_twins_compute_the_outputs_of_a_tower_of_timm(name: str, tmp_path: Path) -> None:
    tower, format = TIMM[name]
    prove_folder(name, {**tower, "image_size": SIDE}, format, tmp_path)


@pytest.mark.parametrize("name", OWN)
def test_the_twins_compute_the_outputs_of_openclips_own_tower(name: str, tmp_path: Path) -> None:
    sizes = {"image_size": [32, 48], "layers": 2, "width": 12, "head_width": 6, "mlp_ratio": 1.5, "patch_size": 16}
    prove_folder(name, {**sizes, **OWN[name]}, "openai-clip:clip", tmp_path)
