"""Of several weight files in a folder, the one that transformers or timm reads is read."""

import importlib.util
import itertools
import json

import pytest

for package in ("torch", "torchvision", "timm", "transformers", "jax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

import tests.goldens.peers  # noqa: F401, I001  # first: it makes torchvision importable
from timm.models import _hub
from transformers import modeling_utils

from parity.checkpoints import containers
from tests.parity.checkpoints.test_folders import make_files

LEFTOVERS = ("ema_step_1000.safetensors", "last.safetensors", "training_args.bin", "optimizer.pt", "optimizer.safetensors")


def test_in_a_folder_of_transformers_the_file_that_transformers_reads_is_read(tmp_path):
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    for number, present in enumerate(each for n in (1, 2, 3, 4) for each in itertools.combinations(names, n)):
        folder = make_files(tmp_path / str(number), *present, *LEFTOVERS, config={"model_type": "vit"})
        for name in present:
            if name.endswith(".json"):
                (folder / name).write_text(
                    json.dumps({"metadata": {}, "weight_map": {"a": name.removesuffix(".index.json")}})
                )
        (expected, *_), _ = modeling_utils._get_resolved_checkpoint_files(
            str(folder),
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=None,
        )
        chosen = containers.find(folder)
        if chosen.name.endswith(".index.json"):  # transformers returns the shards of the index
            assert expected == str(folder / chosen.name.removesuffix(".index.json")), present
        else:
            assert expected == str(chosen), present


def test_in_a_folder_of_timm_the_file_that_timm_reads_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_hub, "load_state_dict", lambda path, **options: path)
    names = (*_hub._PREFERRED_FILES, "model.safetensors.index.json", "flax_model.msgpack")
    for number, present in enumerate(itertools.combinations(names, 2)):
        folder = make_files(tmp_path / str(number), *present, *LEFTOVERS, config={"architecture": "vit_tiny_patch16_224"})
        if set(present) & set(_hub._PREFERRED_FILES):
            assert containers.find(folder) == _hub.load_state_dict_from_path(folder), present
