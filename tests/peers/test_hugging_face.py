"""The formats of Hugging Face against transformers itself: its files in, its outputs; our folders in it, bit for bit."""

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import torch

import parity
from tests.goldens.peers import float64
from tests.peers.hugging_face import CASES, PEER, Case
from tests.peers.proof import overheard, prove

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every
def test_the_twins_compute_what_transformers_does_on_what_it_saved(tmp_path, case):
    model, logits = case.exact()
    with float64(), overheard(model, 2) as hidden:
        case.run(model, case.images())
    case.model().save_pretrained(tmp_path)
    prove(tmp_path, case.images(), logits, format=f"{case.format}:{case.table}", peer=PEER, hidden=hidden)


@every
def test_a_state_dict_of_transformers_5_is_read_as_the_same_model(tmp_path, case):
    model = case.model()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pth")
    saved, state = parity.load(tmp_path / "model.safetensors"), parity.load(tmp_path / "state.pth")
    expected = case.table if "Projection" in case.cls else case.table.replace("v4", "v5")
    assert (state.format, state.config) == (f"{case.format}:{expected}", saved.config)
    ours, theirs = parity.to_torch(state), parity.to_torch(saved)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def there_and_back(case: Case, tmp_path, to: str):
    """Save a model, convert it to JAX and then to a folder of its own format; return the model and the folder."""
    model = case.model()
    model.save_pretrained(tmp_path / "original")
    parity.convert(tmp_path / "original", tmp_path / "jax.safetensors", "jax")
    parity.convert(tmp_path / "jax.safetensors", f"{tmp_path / 'written'}/", to)
    return model, tmp_path / "written"


@every
@pytest.mark.parametrize("layout", ["v4", "v5"])
def test_a_folder_written_here_opens_as_it_is_and_computes_the_same_bits(tmp_path, case, layout):
    table = case.table.replace("v4", layout).replace("v5", layout)
    model, folder = there_and_back(case, tmp_path, f"{case.format}:{table}" if layout == "v5" else case.format)
    auto = transformers.AutoModelForImageClassification if "Classification" in case.cls else transformers.AutoModel
    opener = getattr(transformers, case.cls) if "Projection" in case.cls else auto
    loaded, info = opener.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **case.build)
    assert type(loaded).__name__ == case.cls
    assert not any(info.values()), info
    for parameter in loaded.parameters():  # from mapped memory to aligned, for kernels round differently on either
        parameter.data = parameter.data.clone()
    assert np.array_equal(case.run(loaded, case.images()), case.run(model, case.images()))
