"""The formats of Hugging Face compared with transformers: equal outputs, and transformers opens folders written here."""

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import torch

import parity
from parity.checkpoints.formats import get
from tests.goldens.peers import float64
from tests.peers.hugging_face import CASES, PEER, Case
from tests.peers.proof import prove, record_block_outputs

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every
def test_the_twins_compute_the_outputs_of_transformers_from_its_folder(tmp_path, case):
    model, logits = case.exact()
    with float64(), record_block_outputs(model, 2) as hidden:
        case.run(model, case.images())
    case.model().save_pretrained(tmp_path)
    prove(tmp_path, case.images(), logits, format=f"{case.format}:{case.variant}", peer=PEER, hidden=hidden)


@every
def test_a_state_dict_of_transformers_5_is_the_same_model_as_its_folder(tmp_path, case):
    model = case.model()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pth")
    saved, state = parity.load(tmp_path / "model.safetensors"), parity.load(tmp_path / "state.pth")
    assert (state.format, state.config) == (f"{case.format}:{case.variant_in_memory}", saved.config)
    ours, theirs = parity.to_torch(state), parity.to_torch(saved)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def round_trip(case: Case, tmp_path, to: str):
    """Save a model, convert it to the JAX twin's format and then to a folder of `to`; return the model and the folder."""
    model = case.model()
    model.save_pretrained(tmp_path / "original")
    parity.convert(tmp_path / "original", tmp_path / "jax.safetensors", "jax")
    parity.convert(tmp_path / "jax.safetensors", f"{tmp_path / 'written'}/", to)
    return model, tmp_path / "written"


WRITTEN = [(case, layout) for layout in ("v4", "v5") for case in CASES if layout in get(case.format).tables]


@pytest.mark.parametrize("case, layout", WRITTEN, ids=[f"{layout}-{case.name}" for case, layout in WRITTEN])
def test_transformers_opens_a_written_folder_and_computes_the_same_bits(tmp_path, case, layout):
    variant = case.variant.replace("v4", layout).replace("v5", layout)
    model, folder = round_trip(case, tmp_path, f"{case.format}:{variant}" if layout == "v5" else case.format)
    auto = transformers.AutoModelForImageClassification if "Classification" in case.cls else transformers.AutoModel
    opener = getattr(transformers, case.cls) if "Projection" in case.cls else auto
    loaded, info = opener.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **case.build)
    assert type(loaded).__name__ == case.cls
    assert not any(info.values()), info
    for parameter in loaded.parameters():  # from memory-mapped to aligned memory, because kernels round differently on each
        parameter.data = parameter.data.clone()
    assert np.array_equal(case.run(loaded, case.images()), case.run(model, case.images()))
