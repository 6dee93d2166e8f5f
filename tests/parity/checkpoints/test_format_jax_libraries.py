"""Files as JAX's current libraries save them: NNX variables, Equinox modules, Keras state trees."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity
import vit_spec
from parity.checkpoints.weights import converted_arrays
from parity.comparison import reproducible_init
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16", depth=2, num_classes=7, image_size=(48, 48), mlp={"activation": "gelu_tanh"})
GIVEN = {"num_heads": 3, "image_size": (48, 48)}


def arrays_of(format: str) -> dict[str, np.ndarray]:
    return {key: np.ascontiguousarray(each) for key, each in converted_arrays(reproducible_init.weights(CONFIG, 0), format)}


@pytest.mark.parametrize("suffix", ["/value", "/raw_value", ".value"])
@pytest.mark.parametrize("format", ["bonsai-vit", "jax"])
def test_the_arrays_of_nnx_variables_are_read_under_the_keys_of_the_variables(
    format: str, suffix: str, tmp_path: Path
) -> None:
    arrays = arrays_of(format)
    stored = {key.replace("/", suffix[0]) + suffix: array for key, array in arrays.items()}
    save_file(stored, tmp_path / "state.safetensors")
    found = parity.load(tmp_path / "state.safetensors", given=GIVEN)
    assert found.format == format and found.arrays.keys() == arrays.keys()
    read = dict(converted_arrays(found, format))
    assert all(read[key].tobytes() == array.tobytes() for key, array in arrays.items())


def test_a_variable_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    arrays = arrays_of("bonsai-vit")
    save_file({**arrays, "ln/scale/value": arrays["ln/scale"]}, tmp_path / "state.safetensors")
    with pytest.raises(InputError, match=r"unexpected ln/scale/value"):
        parity.load(tmp_path / "state.safetensors", given=GIVEN)


def test_files_of_equinox_and_equimo_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "array.npy", np.ones(3))
    for name in ("model.eqx", "folder/weights.eqx"):
        (tmp_path / name).write_bytes(2 * (tmp_path / "array.npy").read_bytes())
    (tmp_path / "model.tar.lz4").write_bytes(b"\x04\x22\x4d\x18" + bytes(64))
    for name in ("model.eqx", "folder", "folder/weights.eqx", "model.tar.lz4"):
        with pytest.raises(InputError, match=r"without names.*tree_leaves_with_path") as raised:
            parity.load(tmp_path / name)
        assert "\n" not in str(raised.value)
