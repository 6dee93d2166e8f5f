"""The commands of README.md and of docs/guides/convert.md work as these pages say."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import parity
import vit_spec
from parity.__main__ import main
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from tests import ROOT

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guides" / "convert.md"
COMMANDS = re.findall(r"^python (-m parity convert .* --to (?:jax|hf-vit|google))$", GUIDE.read_text(), re.MULTILINE)

CONFIG = vit_spec.get("vit_s16", depth=2, num_classes=10)


@pytest.fixture(scope="module")
def weights():
    """Return random weights of a small ViT in the torch format."""
    rng = np.random.default_rng(0)
    return {
        key: rng.standard_normal(layout.shape(CONFIG.sizes), np.float32)
        for layout in get("torch").layouts(CONFIG).values()
        for key in layout.keys(CONFIG.sizes)
    }


def run(command, folder):
    """Run Python with the arguments in a line of a page in a folder, and assert that it succeeds; return its output."""
    env = os.environ | {"PYTHONPATH": str(README.parent)}
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_weights(path, weights):
    """Return whether a checkpoint of any format has exactly these weights."""
    found = dict(converted_arrays(parity.load(path), "torch"))
    return found.keys() == weights.keys() and all(found[key].tobytes() == weights[key].tobytes() for key in weights)


def test_the_guide_has_three_conversions():
    assert len(COMMANDS) == 3


def test_timm_to_flax(tmp_path, weights):
    command = next(line for line in COMMANDS if "timm" in line)
    write(Checkpoint(CONFIG, "torch", weights), f"{tmp_path}/timm-vit/", "timm")
    run(command, tmp_path)
    assert has_weights(tmp_path / "vit.msgpack", weights)
    serialization = pytest.importorskip("flax.serialization")
    params = serialization.msgpack_restore((tmp_path / "vit.msgpack").read_bytes())
    kernel = np.stack([weights[f"blocks.{i}.mlp.fc1.weight"].T for i in range(2)])
    np.testing.assert_array_equal(params["blocks"]["mlp"]["fc1"]["kernel"], kernel)


def test_flax_msgpack_to_hugging_face(tmp_path, weights):
    command = next(line for line in COMMANDS if "flax" in line)
    (tmp_path / "flax-vit").mkdir()
    write(Checkpoint(CONFIG, "torch", weights), tmp_path / "flax-vit" / "flax_model.msgpack", "hf-flax")
    run(command, tmp_path)
    assert has_weights(tmp_path / "vit-hf", weights)
    if not all(map(find_spec, ("torch", "torchvision", "transformers"))):
        pytest.skip("needs transformers and torchvision")
    import tests.goldens.peers  # noqa: F401, I001  # patches torchvision, which transformers imports
    import transformers

    model, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "vit-hf", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.num_labels == 10


def test_fine_tuned_pytorch_to_google(tmp_path, weights):
    torch = pytest.importorskip("torch")
    command = next(line for line in COMMANDS if "google" in line)
    torch.save({key: torch.from_numpy(array) for key, array in weights.items()}, tmp_path / "finetuned.pth")
    assert "mlp.activation" in run(command, tmp_path)  # a note says that Google's code uses another GELU
    assert has_weights(tmp_path / "finetuned.npz", weights)
    with np.load(tmp_path / "finetuned.npz") as found:
        query = found["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"]
    np.testing.assert_array_equal(query, weights["blocks.1.attn.qkv.weight"][:384].T.reshape(384, 6, 64))


PARITY = "-m parity "
README_LINES = re.findall(rf"^\$ python {PARITY}(.*)$", README.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def ported(tmp_path_factory, weights):
    """Return a folder with a model whose eps and GELU differ from timm's, and its weights in a file without a config."""
    torch, vit_torch = pytest.importorskip("torch"), pytest.importorskip("vit_torch")
    folder = tmp_path_factory.mktemp("ported")
    config = CONFIG.replace(image_size=(32, 32), norms={"eps": 1e-5}, mlp={"activation": "gelu_tanh"})
    torch.manual_seed(0)
    model = vit_torch.ViT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
        images = torch.randn(4, 3, 32, 32)
        np.savez(folder / "expected.npz", images=images.numpy(), logits=model(images).numpy())
    parity.save(folder / "trained.safetensors", model.state_dict(), config, "torch")
    torch.save(model.state_dict(), folder / "ported.pth")
    return folder


@pytest.fixture
def run_parity(ported, monkeypatch, capsys):
    """Return a function that runs `parity` in the folder in this process, which has imported both frameworks.

    The function takes the arguments of the command, in one text, and returns its exit code and its output.
    """
    monkeypatch.chdir(ported)

    def run(arguments):
        code = main(shlex.split(arguments))
        return code, capsys.readouterr().out

    return run


def test_the_failing_check_of_the_readme_fails_at_the_part_shown_there(run_parity):
    pytest.importorskip("jax")
    code, out = run_parity(next(line for line in README_LINES if line.startswith("check")))
    assert code == 1
    assert "the first part that differs is blocks.0.norm1, by" in out.splitlines()[-1]


def test_the_diagnosis_of_the_readme_finds_the_cause_shown_there_and_its_fix_works(run_parity):
    command = next(line for line in README_LINES if line.startswith("diagnose"))
    text = README.read_text()
    (cause,) = re.findall(r"^(cause: .*) \(", text, re.M)
    (fix,) = re.findall(rf"^  fix: python {PARITY}(.*)$", text, re.M)
    code, out = run_parity(command)
    assert code == 1
    assert f"\n{cause} (" in out and f"\n  fix: python {PARITY}{fix}\n" in out
    guide = (ROOT / "docs" / "guides" / "port.md").read_text()
    shown = re.findall(r"^(runner-up: .*) \(relRMS", guide, re.M)
    assert shown and all(f"\n{line} (" in out for line in shown), out
    assert run_parity(fix)[0] == 0
    code, out = run_parity(command.replace("ported.pth", "FIXED.safetensors"))
    assert code == 0 and "MATCH: nothing is wrong" in out
