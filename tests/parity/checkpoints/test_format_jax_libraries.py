"""Files as JAX's current libraries save them: NNX variables, Equinox modules, Keras state trees."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity
import vit_spec
from parity.checkpoints.conversion import converted_arrays
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


KERAS = CONFIG.replace(mlp={"activation": "gelu"})
BLOCK = "vit_encoder/transformer_block"


def keras_arrays() -> dict[str, np.ndarray]:
    found = converted_arrays(reproducible_init.weights(KERAS, 0), "keras-hub")
    return {key: np.ascontiguousarray(each) for key, each in found}


def test_blocks_of_keras_hub_are_numbered_from_one() -> None:
    assert {key.split("/")[1] for key in keras_arrays() if "block" in key} == {"transformer_block_1", "transformer_block_2"}


@pytest.mark.parametrize("frozen", [(), ("vit_patching_and_embedding", "vit_encoder"), ("predictions",)])
def test_groups_of_a_keras_state_tree_are_read_as_one(frozen: tuple[str, ...], tmp_path: Path) -> None:
    arrays = keras_arrays()
    stored = {f"{'non_' if key.startswith(frozen) else ''}trainable_variables/{key}": each for key, each in arrays.items()}
    stored["optimizer_variables/adam/iteration"] = np.ones(1, np.int64)
    stored["non_trainable_variables/vit_encoder/dropout/seed_generator/seed_generator_state"] = np.ones(2, np.uint32)
    np.savez(tmp_path / "state.npz", **stored)
    found = parity.load(tmp_path / "state.npz", given=GIVEN)
    assert found.format == "keras-hub" and len(found.left) == 2
    read = dict(converted_arrays(found, "keras-hub"))
    assert read.keys() == arrays.keys() and all((read[key] == arrays[key]).all() for key in arrays)


def test_a_missing_array_of_keras_is_named_by_its_key(tmp_path: Path) -> None:
    arrays = keras_arrays()
    np.savez(tmp_path / "x.npz", **{key: each for key, each in arrays.items() if key != f"{BLOCK}_2/ln_1/gamma"})
    with pytest.raises(InputError, match=f"missing {BLOCK}_2/ln_1/gamma"):
        parity.load(tmp_path / "x.npz", given=GIVEN)
    np.savez(tmp_path / "y.npz", **arrays, **{f"{BLOCK}_0/ln_1/gamma": arrays[f"{BLOCK}_1/ln_1/gamma"]})
    with pytest.raises(InputError, match=f"unexpected {BLOCK}_0/ln_1/gamma"):
        parity.load(tmp_path / "y.npz", given=GIVEN)


def test_files_of_keras_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    (tmp_path / "model.keras").write_bytes(b"PK\x03\x04" + bytes(64))
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "model.weights.h5").write_bytes((tmp_path / "model.weights.h5").read_bytes())
    for name in ("model.weights.h5", "model.keras", "preset"):
        with pytest.raises(InputError, match=r"HDF5.*variable\.path") as raised:
            parity.load(tmp_path / name)
        assert "\n" not in str(raised.value)


def test_another_activation_is_written_only_if_it_is_set(tmp_path: Path) -> None:
    config = vit_spec.get("dinov3_s16", depth=1)
    parity.write(reproducible_init.weights(config, 0), f"{tmp_path / 'published'}/", "hf-dinov3")
    with pytest.raises(InputError, match=r"cannot store mlp\.activation='gelu', only 'gelu_tanh'"):
        parity.convert(tmp_path / "published", tmp_path / "x.safetensors", "bonsai-dinov3")
    accepted = {"mlp.activation": "gelu_tanh"}
    parity.convert(tmp_path / "published", tmp_path / "x.safetensors", "bonsai-dinov3", given=accepted)
    assert parity.load(tmp_path / "x.safetensors").config.mlp.activation == "gelu_tanh"
