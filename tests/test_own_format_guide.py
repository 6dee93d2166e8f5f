"""The file and the commands of docs/guides/own_format.md read and write the checkpoints of another program."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import parity
from parity.__main__ import main
from parity.checkpoints import formats
from tests import ROOT

torch = pytest.importorskip("torch")

from torch import Tensor, nn

GUIDE = (ROOT / "docs" / "guides" / "own_format.md").read_text()
TABLE = re.search(r"```text\n(.*?)```", GUIDE, re.DOTALL)[1]
COMMANDS = re.findall(r"^python (-m parity .*)$", GUIDE, re.MULTILINE)


class Head(nn.Module):
    """One head of attention, as a beginner writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(48, 16), nn.Linear(48, 16), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        return torch.softmax(scores, -1) @ self.v(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(48), nn.LayerNorm(48)
        self.heads = nn.ModuleList([Head() for _ in range(3)])
        self.merge, self.up, self.down = nn.Linear(48, 48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_a(x)
        x = x + self.merge(torch.cat([head(y) for head in self.heads], -1))
        return x + self.down(torch.relu(self.up(self.norm_b(x))))


class Lab(nn.Module):
    """The model that the guide supposes."""

    def __init__(self) -> None:
        super().__init__()
        self.to_tokens = nn.Linear(49, 48)
        self.token, self.positions = nn.Parameter(torch.zeros(48)), nn.Parameter(torch.zeros(17, 48))
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.last, self.classes = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        n = len(images)
        patches = images.reshape(n, 1, 4, 7, 4, 7).permute(0, 2, 4, 1, 3, 5).reshape(n, 16, 49)
        x = torch.cat([self.token.expand(n, 1, 48), self.to_tokens(patches)], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.classes(self.last(x)[:, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the guide names: a trained checkpoint, and outputs of its program."""
    folder = tmp_path_factory.mktemp("lab")
    torch.manual_seed(0)
    model = Lab().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
        images = torch.randn(4, 1, 28, 28)
        np.savez(folder / "expected.npz", images=images.numpy(), logits=model(images).numpy())
    torch.save(model.state_dict(), folder / "theirs.pth")
    (folder / "lab.txt").write_text(TABLE)
    return folder


@pytest.fixture(autouse=True)
def _in_a_copy_of_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def command(words: str) -> list[str]:
    """Return the arguments of the command in the guide that has these words."""
    [found] = [line for line in COMMANDS if words in line]
    return shlex.split(found)[2:]


def test_the_conversions_of_the_guide_return_the_same_file(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.load("theirs.pth")
    assert main(command("theirs.pth ours")) == 0
    [version] = re.findall(r"lab@\w+", GUIDE)
    assert f"format {version}," in capsys.readouterr().out
    assert main(command("ours.safetensors back")) == 0
    after = torch.load("back.pth")
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    Lab().load_state_dict(after)


def test_the_diagnosis_of_the_guide_matches_and_finds_a_wrong_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("diagnose")) == 0
    assert "MATCH" in capsys.readouterr().out
    Path("wrong.txt").write_text(TABLE.replace("width (head dim)", "width (dim head)"))  # every shape is the same
    assert main([word.replace("lab.txt", "wrong.txt") for word in command("diagnose")]) == 1
    assert "FOUND" in (out := capsys.readouterr().out) and "rearranged to (dim head)" in out


def test_the_start_that_the_guide_prints_is_a_format_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--show timm")[:3]) == 0
    Path("start.txt").write_text(capsys.readouterr().out)
    assert main(["formats", "--format-file", "start.txt"]) == 0
    assert "my_timm" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::parity.AssumptionWarning")
def test_the_code_of_the_guide_works_after_its_commands() -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert main(command("theirs.pth ours")) == main(command("ours.safetensors back")) == 0
    names: dict[str, object] = {}
    with formats.registered(), np.load("expected.npz") as expected:
        exec(code, names)
        logits = names["model"](torch.tensor(expected["images"])).detach().numpy()
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)
    assert parity.load("again.pth").format.startswith("lab@")
