"""Labels, task, preprocessing and assumptions are stored with weights; metadata that cannot be stored is reported."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
from parity.__main__ import main
from parity.checkpoints import metadata, surgery
from parity.checkpoints.assumptions import Assumption, Override
from parity.checkpoints.formats import timm_config
from parity.checkpoints.loading import load_for_model
from parity.checkpoints.preprocessing import Preprocessing, center_crop, infer_share, size_before_crop
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from parity.comparison import reproducible_init
from vit_spec import InputError, get

CONFIG = get("vit_ti16", image_size=(32, 48), patch_size=8, width=24, depth=2, num_heads=3, mlp_dim=40, num_classes=4)
SQUARE = CONFIG.replace(image_size=(32, 32))
LABELS = ("red fox", "crane", "crane", 'ünïcödé 猫 "x"\x1b[31m')
PREPROCESSING = Preprocessing(size=(32, 48), resize="squash", resized=(36, 54), filter="lanczos", rounding="down")
ASSUMED = (Assumption("mlp.activation", "gelu", "as most models"), Assumption("image_size", (32, 48), "since it is so"))
CONTAINERS = [
    ("safetensors", "jax"),
    ("npz", "torch"),
    ("pth", "timm"),
    ("msgpack", "jax"),
    ("orbax", "jax"),
    ("dcp", "torch"),
]


def with_metadata(config: Any = CONFIG, **more: Any) -> Checkpoint:
    """Return random weights with all metadata."""
    fields = {"labels": LABELS, "preprocessing": PREPROCESSING, "task": "labels", "assumed": ASSUMED, **more}
    return replace(reproducible_init.weights(config, 0), **fields)


def metadata_of(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return the labels, preprocessing, task and assumptions of a checkpoint."""
    return checkpoint.labels, checkpoint.preprocessing, checkpoint.task, checkpoint.assumed


# Through files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("container", "format"), CONTAINERS)
def test_every_container_stores_metadata(container: str, format: str, tmp_path: Path) -> None:
    if needed := {"orbax": "orbax.checkpoint", "dcp": "torch", "pth": "torch"}.get(container):
        pytest.importorskip(needed)
    write(with_metadata(), tmp_path / "weights", format, container=container)
    found = parity.load(tmp_path / "weights")
    assert metadata_of(found) == metadata_of(with_metadata()) and not found.left


def test_a_sharded_folder_stores_labels(tmp_path: Path) -> None:
    write(with_metadata(SQUARE, preprocessing=None), f"{tmp_path / 'folder'}/", "hf-vit", shard=30_000)
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    assert parity.load(tmp_path / "folder").labels == LABELS


@pytest.mark.parametrize(("name", "to"), [("vit.safetensors", "hf-vit"), ("vit.npz", "jax"), ("flax/", "hf-flax")])
def test_shards_of_what_has_none_are_refused(name: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave --shard"):
        write(with_metadata(SQUARE, preprocessing=None), f"{tmp_path}/{name}", to, shard=30_000)
    assert not list(tmp_path.iterdir())


def test_a_file_with_the_name_of_a_shard_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the name of one of several shards"):
        write(reproducible_init.weights(CONFIG, 0), tmp_path / "model-00001-of-00002.safetensors", "jax")
    assert not list(tmp_path.iterdir())


def test_a_file_without_metadata_is_read(tmp_path: Path) -> None:
    write(reproducible_init.weights(CONFIG, 0), tmp_path / "weights.npz", "jax")
    assert metadata_of(parity.load(tmp_path / "weights.npz")) == (None, None, "classes", ())


def test_assumptions_are_stored_until_the_user_sets_the_field(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(parity.to_torch(reproducible_init.weights(SQUARE, 0)), tmp_path / "bare.pth")
    first = parity.load(tmp_path / "bare.pth", given={"num_heads": 3, "norms.eps": 1e-5})
    fields = {each.field for each in first.assumed}
    assert {"mlp.activation", "head.pool"} <= fields and not {"num_heads", "norms.eps"} & fields
    for number, (format, container) in enumerate((("jax", "npz"), ("google", "safetensors"), ("torch", "pth"))):
        write(first, tmp_path / f"{number}.{container}", format)
        again = parity.load(tmp_path / f"{number}.{container}")
        assert again.assumed == first.assumed and again.config == first.config
        first = again
    assert [each for each in first.assumed if "." not in each.field]  # without a field in the config
    smaller, _ = surgery.apply(first, {"drop_head": True})
    assert smaller.assumed == first.assumed
    corrected = parity.load(tmp_path / "2.pth", given={"mlp.activation": "relu"})
    write(corrected, tmp_path / "corrected.npz", "jax")
    found = parity.load(tmp_path / "corrected.npz")
    assert found.config.mlp.activation == "relu" and {each.field for each in found.assumed} == fields - {"mlp.activation"}


@pytest.mark.parametrize("is_of_library", [False, True])
def test_an_override_of_a_stated_field_is_told_with_both_values(
    is_of_library: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{tmp_path}/vit/"
    write(reproducible_init.weights(SQUARE, 0), path, "hf-vit")
    if is_of_library:  # without our metadata: config.json states the fields
        save_file(load_file(f"{path}model.safetensors"), f"{path}model.safetensors", {"format": "pt"})
    expected = (Override("norms.eps", 0.5, 1e-6),)
    assert parity.load(path, given={"norms.eps": 0.5, "num_heads": 3}).overridden == expected
    assert main(["inspect", path, "--set", "norms.eps=0.5", "num_heads=3"]) == 0
    assert "overridden: norms.eps is 0.5 by --set; the file states 1e-06\n" in capsys.readouterr().out
    assert main(["inspect", path, "--json", "--set", "norms.eps=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["overridden"] == [{"field": "norms.eps", "value": 0.5, "stated": 1e-6}]
    with pytest.warns(parity.AssumptionWarning, match="norms.eps is 0.5 by given; the file states 1e-06"):
        load_for_model(path, given={"norms.eps": 0.5})


def test_an_override_of_an_assumption_replaces_nothing_that_the_file_states(tmp_path: Path) -> None:
    write(with_metadata(), tmp_path / "ours.npz", "jax")  # its metadata says that mlp.activation was assumed
    assert parity.load(tmp_path / "ours.npz", given={"mlp.activation": "relu"}).overridden == ()
    path = tmp_path / "bare.safetensors"
    write(with_metadata(SQUARE), path, "torch")
    save_file(load_file(path), path)  # removes the metadata
    bare = parity.load(path, given={"num_heads": 3, "norms.eps": 0.5, "mlp.activation": "relu"})
    assert bare.config.norms.eps == 0.5 and bare.overridden == ()


def test_the_labels_of_21843_classes_are_stored(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = SQUARE.replace(num_classes=21_843)
    names = tuple(f"class number {n} with a name of some forty letters" for n in range(21_843))
    write(with_metadata(config, labels=names, task="classes", assumed=()), f"{tmp_path / 'folder'}/", "hf-vit")
    for path in tmp_path.glob("folder/model.safetensors"):
        parity.convert(path, tmp_path / "weights.pth", "torch")
        parity.convert(tmp_path / "weights.pth", tmp_path / "weights.npz", "jax")
    assert parity.load(tmp_path / "weights.npz").labels == names
    (tmp_path / "folder" / "model.safetensors").unlink()
    write(replace(reproducible_init.weights(config, 0)), tmp_path / "folder" / "model.pth", "hf-vit")
    (tmp_path / "folder" / "model.pth.parity.json").unlink()
    assert parity.load(tmp_path / "folder").labels == names  # from config.json, 3 MB


EDITS = {
    "names of timm": ("timm", "config.json", {"label_names": ["a", "b", "c", "d"]}),
    "crop of timm": ("timm", "config.json", {"pretrained_cfg": {"crop_pct": 0.7}}),
    "names of transformers": ("hf-vit", "config.json", {"id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}}),
    "filter of transformers": ("hf-vit", "preprocessor_config.json", {"resample": 0}),
}


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Replace fields of a JSON file, and of the objects in it."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        nested = isinstance(value, dict) and name in content and name != "id2label"
        content[name] = {**content[name], **value} if nested else value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("case", EDITS)
@pytest.mark.parametrize("known", [True, False])
def test_an_edited_file_of_the_library_beside_our_metadata_is_obeyed_or_refused(
    case: str, known: bool, tmp_path: Path
) -> None:
    format, file, changes = EDITS[case]
    what = "labels" if "names" in case else "preprocessing"
    how = {"labels": tuple("wxyz"), "preprocessing": center_crop((32, 32), 0.9, "bicubic")} if known else {}
    write(replace(reproducible_init.weights(SQUARE, 0), **how), f"{tmp_path / 'folder'}/", format)
    as_written = parity.load(tmp_path / "folder")
    assert (as_written.labels, as_written.preprocessing) == (how.get("labels"), how.get("preprocessing"))
    edit_json(tmp_path / "folder" / file, changes)
    if known:
        with pytest.raises(InputError, match=rf"its {what} in the library's files .* differ: correct the library's files"):
            parity.load(tmp_path / "folder")
    else:
        found = parity.load(tmp_path / "folder")
        preprocessing = found.preprocessing
        assert found.labels == (tuple("abcd") if what == "labels" else None)
        assert (preprocessing is None) == (what == "labels")
        assert preprocessing is None or preprocessing.filter == "nearest" or preprocessing.resized == (45, 45)  # 32 / 0.7


def test_files_of_another_model_or_processor_beside_our_metadata_are_refused(tmp_path: Path) -> None:
    write(reproducible_init.weights(SQUARE, 0), f"{tmp_path / 'folder'}/", "hf-vit")
    config, processor = tmp_path / "folder/config.json", tmp_path / "folder/preprocessor_config.json"
    edit_json(processor, {"image_mean": [0.1, 0.1, 0.1]})
    with pytest.raises(
        InputError, match=r"its preprocessor_config\.json says pixels\.mean=.*: correct preprocessor_config"
    ):
        parity.load(tmp_path / "folder")
    edit_json(processor, {"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True})
    with pytest.raises(
        InputError, match=r"its library's files are not those that were written with the weights: .*Efficient"
    ):
        parity.load(tmp_path / "folder")
    processor.unlink()
    edit_json(config, {"model_type": "vit_msn", "architectures": ["ViTMSNForImageClassification"]})
    with pytest.raises(
        InputError, match=r"its config\.json is not one of format 'hf-vit.*', the format of model\.safetensors: give"
    ):
        parity.load(tmp_path / "folder")
    config.write_text(json.dumps({"compilerOptions": {}}))  # a file of another program
    assert parity.load(tmp_path / "folder").config == SQUARE
    write(reproducible_init.weights(SQUARE, 0), tmp_path / "folder/jax.npz", "jax")
    config.write_text(json.dumps({"model_type": "vit_msn"}))
    assert parity.load(tmp_path / "folder/jax.npz").config == SQUARE  # no library opens this file with config.json


def test_an_image_size_given_by_the_user_is_no_contradiction(tmp_path: Path) -> None:
    rotary = get("dinov3_s16", depth=1, image_size=(64, 64))
    write(
        replace(reproducible_init.weights(rotary, 0), preprocessing=center_crop((64, 64), 0.9)),
        f"{tmp_path}/folder/",
        "timm",
    )
    assert parity.load(tmp_path / "folder", given={"image_size": (32, 32)}).preprocessing == center_crop((32, 32), 0.9)


# Files of other libraries ---------------------------------------------------------------------------------------------


def write_folder(path: Path, format: str = "hf-vit", **files: Any) -> Path:
    """Write a folder of transformers or timm, without the metadata of this project and with more JSON files."""
    write(reproducible_init.weights(SQUARE, 0), f"{path}/", format)
    weights = {key: np.asarray(array) for key, array in parity.load(path).arrays.items()}
    (path / "model.safetensors").unlink()
    np.savez(path / "model.npz", **weights)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Return a function that writes a folder of transformers or timm, changes fields of its JSON files, and reads it.

    The folder does not have the metadata of this project.
    """

    def read(format: str = "hf-vit", processor: Any = None, **changes: Any) -> Checkpoint:
        path = write_folder(tmp_path / "folder", format)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        if processor is not None:
            (path / "preprocessor_config.json").write_text(json.dumps(processor))
        return parity.load(path)

    return read


NESTED = {"image_processor_type": "ViTImageProcessor", "size": {"height": 40, "width": 40}, "image_mean": [0.1] * 3}


@pytest.mark.parametrize("config", [{"image_processor": NESTED}, {"processor_class": "AutoProcessor"}])
def test_a_processor_in_processor_config_has_precedence_over_preprocessor_config(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = write_folder(tmp_path / "folder", processor_config=config)
    found, nested = parity.load(path), "image_processor" in config
    assert found.preprocessing is not None and found.preprocessing.resized == ((40, 40) if nested else (32, 32))
    assert (found.config.pixels.mean == (0.1,)) == nested


def test_errors_in_processor_config_name_that_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"processor_config\.json says image_processor 'ViT': an object was expected"):
        parity.load(write_folder(tmp_path / "text", processor_config={"image_processor": "ViT"}))
    path = write_folder(
        tmp_path / "class", processor_config={"image_processor": NESTED | {"image_processor_type": "NewProcessor"}}
    )
    assert any(line.startswith("processor_config.json is of a NewProcessor") for line in parity.load(path).left)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({"0": "a", "1": "b", "2": "c", "3": "a"}, ("a", "b", "c", "a")),
        ({"3": "d", "0": "a", "2": "c", "1": "b"}, ("a", "b", "c", "d")),
        ({"0": 5, "1": 6.5, "2": "", "3": "x\n"}, ("5", "6.5", "", "x\n")),
        ({str(n): f"LABEL_{n}" for n in range(4)}, None),
    ],
)
def test_id2label_is_read(folder: Any, names: Any, found: Any) -> None:
    assert folder(id2label=names).labels == found


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ({"0": "a", "1": "b"}, "2 names, but the model has 4 outputs"),
        ({str(n): "x" for n in range(100_000)}, "100,000 names, but the model has 4 outputs"),
        ({"0": "a", "1": "b", "2": "c", "4": "e"}, "its keys are not the numbers from 0 to 3"),
        ({"0": "a", "1": "b", "2": ["c"], "3": "d"}, "one of the names is a list"),
        ({"0": "a", "1": "b", "2": None, "3": "d"}, "one of the names is a NoneType"),
        ({"0": "a", "1": "b", "2": True, "3": "d"}, "one of the names is a bool"),
        ({"0": "a", "1": "b", "2": "c", "3": "d" * (5 << 20)}, "the names take more than 4 MiB"),
        ("abcd", "a str, but a list was expected"),
    ],
)
def test_unreadable_labels_are_reported_and_the_weights_are_read(folder: Any, names: Any, line: str) -> None:
    found = folder(id2label=names)
    assert found.labels is None and [each for each in found.left if "id2label of config.json: " in each and line in each]


@pytest.mark.parametrize(
    ("names", "found"), [(["a", "b", "c", "d"], tuple("abcd")), ({"0": "a", "1": "b", "2": "c", "3": "d"}, tuple("abcd"))]
)
def test_label_names_are_read_and_descriptions_reported_as_unread(folder: Any, names: Any, found: Any) -> None:
    checkpoint = folder("timm", label_names=names, label_descriptions={"a": "the first letter"})
    assert checkpoint.labels == found and any("label_descriptions" in line for line in checkpoint.left)


@pytest.mark.parametrize(
    ("problem", "task"),
    [(None, "classes"), ("regression", "values"), ("multi_label_classification", "labels")],
)
def test_the_task_is_read_and_written(folder: Any, problem: Any, task: str, tmp_path: Path) -> None:
    found = folder(problem_type=problem)
    assert found.task == task
    write(found, f"{tmp_path / 'back'}/", "hf-vit")
    assert json.loads((tmp_path / "back" / "config.json").read_text()).get("problem_type") == problem
    remarks = write(found, f"{tmp_path / 'timm'}/", "timm").remarks
    assert sum("express that outputs are" in line for line in remarks) == (task != "classes")


VIT = {"image_processor_type": "ViTImageProcessor"}


@pytest.mark.parametrize(
    ("processor", "how"),
    [
        (VIT, Preprocessing(size=(224, 224), resize="squash", resized=(224, 224), filter="bilinear", rounding="down")),
        (
            {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 3},
            Preprocessing(size=(32, 32), resize="squash", resized=(32, 32), rounding="down"),
        ),
        (
            {"image_processor_type": "CLIPImageProcessorFast", "size": 40, "crop_size": 32},
            Preprocessing(size=(32, 32), resize="shortest", resized=(40, 40), rounding="down"),
        ),
        (
            {**VIT, "do_resize": False, "do_center_crop": True, "crop_size": {"height": 32, "width": 40}},
            Preprocessing(size=(32, 40), resize="none", resized=(32, 40), filter="bilinear", rounding="down"),
        ),
    ],
)
def test_image_processors_of_transformers_are_read_with_their_defaults(
    folder: Any, processor: Any, how: Preprocessing
) -> None:
    assert folder(processor=processor).preprocessing == how


@pytest.mark.parametrize(
    ("processor", "line"),
    [
        ({"image_processor_type": "ConvNextImageProcessor", "size": 32}, "of a ConvNextImageProcessor"),
        ({**VIT, "size": {"shortest_edge": 32}}, "does not crop"),
        ({**VIT, "size": {"shortest_edge": 32, "longest_edge": 40}}, "one side, or height and width"),
        ({**VIT, "do_resize": False}, "neither resizes nor crops"),
        ({**VIT, "size": 32, "do_pad": True, "pad_size": 40}, "do_pad=True"),
        ({**VIT, "size": 32, "resample": 9}, "resample 9"),
        ({**VIT, "size": 32, "resample": [1]}, "cannot be read"),
        ({**VIT, "size": -1}, "preprocessing.size is (-1, -1)"),
        ({**VIT, "size": 10**9}, "preprocessing.size is"),
        ({"image_processor_type": "DINOv3ViTImageProcessor", "size": 32}, "resizes in float32"),
    ],
)
def test_an_unsupported_image_processor_is_reported(folder: Any, processor: Any, line: str) -> None:
    found = folder(processor={**processor, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    assert [each for each in found.left if line in each]


STATISTICS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3}
EFFICIENT_NET = {"image_processor_type": "EfficientNetImageProcessor", "size": 32}


@pytest.mark.parametrize("file", ["preprocessor_config", "processor_config"])
@pytest.mark.parametrize(
    ("processor", "line"),
    [
        ({**EFFICIENT_NET, "rescale_offset": True}, "is of a EfficientNetImageProcessor"),  # subtracts 1
        ({**EFFICIENT_NET, "include_top": True}, "is of a EfficientNetImageProcessor"),  # divides by std twice
        (EFFICIENT_NET, "is of a EfficientNetImageProcessor"),  # the defaults of an unknown class are unknown too
        ({"image_processor_type": "VivitImageProcessor", "offset": True}, "is of a VivitImageProcessor"),
        ({**VIT, "rescale_offset": True}, "rescale_offset=True"),
        ({**VIT, "rescale_offset": True, "do_normalize": False}, "rescale_offset=True"),
        ({**VIT, "do_flip_channel_order": 1}, "do_flip_channel_order=True"),
        ({**VIT, "an_option_of_next_year": "BGR"}, "an_option_of_next_year='BGR'"),
    ],
)
def test_pixel_statistics_of_a_processor_that_is_not_read_are_assumptions(
    tmp_path: Path, file: str, processor: Any, line: str
) -> None:
    content = {**STATISTICS, **processor}
    path = write_folder(
        tmp_path / "folder", **{file: content if file == "preprocessor_config" else {"image_processor": content}}
    )
    found = parity.load(path)
    assert {"pixels.mean", "pixels.std"} <= {each.field for each in found.assumed} and found.preprocessing is None
    assert [each for each in found.left if line in each and "--set pixels.mean=M,M,M --set pixels.std=S,S,S" in each]
    stated = parity.load(path, given={"pixels.mean": (0.1, 0.2, 0.3), "pixels.std": (0.4,)})
    assert not {"pixels.mean", "pixels.std"} & {each.field for each in stated.assumed}


@pytest.mark.parametrize("neutral", [{"rescale_offset": False}, {"rescale_offset": None}, {"do_flip_channel_order": None}])
def test_an_unknown_option_that_is_off_leaves_the_pixel_statistics_known(folder: Any, neutral: Any) -> None:
    found = folder(processor={**VIT, **STATISTICS, **neutral})
    assert found.config.pixels.mean == (0.1, 0.2, 0.3) and not {"pixels.mean"} & {each.field for each in found.assumed}


@pytest.mark.parametrize(
    ("processor", "known", "line"),
    [
        ({}, True, "names no image_processor_type"),  # the known classes have the same defaults of these fields
        ({"rescale_factor": 1 / 127.5}, True, "names no image_processor_type"),
        (
            {"rescale_offset": True},
            False,
            "says rescale_offset=True, which is not supported: its mean and std are not read",
        ),
    ],
)
def test_a_processor_without_a_class_states_the_pixel_statistics_if_all_its_options_are_known(
    tmp_path: Path, processor: Any, known: bool, line: str
) -> None:
    path = write_folder(tmp_path / "folder", preprocessor_config={**STATISTICS, **processor})
    (path / "config.json").unlink()
    found = parity.load(path, given={"num_heads": 3})
    assert ("pixels.mean" not in {each.field for each in found.assumed}) == known
    assert found.preprocessing is None and any(f"preprocessor_config.json {line}" in each for each in found.left)


def test_a_rescale_factor_is_folded_into_mean_and_std(folder: Any) -> None:
    pixels = folder(
        processor={**VIT, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.5] * 3}
    ).config.pixels
    x = np.arange(256)
    np.testing.assert_allclose((x / 255 - pixels.mean[0]) / pixels.std[0], (x / 127.5 - 1) / 0.5, atol=1e-14)


@pytest.mark.parametrize("off", [False, None, 0])
def test_a_flag_that_is_null_or_zero_is_off(folder: Any, off: Any) -> None:
    clip = {"image_processor_type": "CLIPImageProcessor", "size": {"height": 32, "width": 32}}
    found = folder(processor={**clip, "do_normalize": off, "do_center_crop": off, "do_pad": off})
    assert (found.config.pixels.mean, found.config.pixels.std) == ((0.0,), (1.0,))
    assert found.preprocessing == Preprocessing(size=(32, 32), resize="squash", resized=(32, 32), rounding="down")


@pytest.mark.parametrize(("size", "reported"), [(31, True), (30, False), (32, False), (33, False)])
def test_padding_by_an_odd_number_is_reported(folder: Any, size: int, reported: bool) -> None:
    found = folder(processor={**VIT, "size": size, "do_center_crop": True, "crop_size": 32})
    assert any("padded by an odd number" in each for each in found.left) == reported


@pytest.mark.parametrize(
    ("arguments", "data", "size"),
    [
        ({"img_size": 32}, {"fixed_input_size": True, "input_size": [3, 224, 224]}, 32),
        ({"img_size": [32, 32]}, {"fixed_input_size": True}, 32),
        ({"img_size": 32}, {"fixed_input_size": False, "input_size": [3, 48, 48]}, 48),
        ({"img_size": 32, "dynamic_img_size": True}, {"fixed_input_size": True, "input_size": [3, 48, 48]}, 48),
    ],
)
def test_the_image_size_follows_timms_rules(folder: Any, arguments: Any, data: Any, size: int) -> None:
    given = timm_config.json_files(SQUARE)["config.json"]["model_args"] | arguments
    found = folder("timm", model_args=given, pretrained_cfg={**data, "crop_pct": 1.0, "num_classes": 4})
    assert (found.config.image_size, found.preprocessing) == ((32, 32), center_crop((size, size)))


def test_timms_defaults_are_used_for_missing_fields(folder: Any) -> None:
    found = folder("timm", pretrained_cfg={"input_size": [3, 32, 32]})
    assert found.preprocessing == center_crop((32, 32), 0.875) and found.config.pixels.mean == (0.485, 0.456, 0.406)
    assert not [each for each in found.assumed if each.field.startswith("pixels")]


# Metadata that cannot be written --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "more", "line"),
    [
        ("hf-vit", {"preprocessing": None}, "the preprocessing of images is unknown"),
        ("timm", {"preprocessing": None}, "the preprocessing of images is unknown"),
        ("hf-vit", {"preprocessing": center_crop((32, 48))}, "no processor of transformers can express this preprocessing"),
        ("timm", {"preprocessing": replace(PREPROCESSING, resized=(36, 60))}, "timm cannot express this preprocessing"),
        ("timm", {"preprocessing": replace(PREPROCESSING, resize="none")}, "timm cannot express this preprocessing"),
        ("timm", {"preprocessing": PREPROCESSING.for_size((16, 24))}, "--image-size 16x24"),
        ("hf-vit", {"preprocessing": replace(PREPROCESSING, filter="bilinear_aliased")}, "has no filter bilinear_aliased"),
        ("timm", {"preprocessing": replace(PREPROCESSING, filter="bilinear_aliased")}, "has no filter bilinear_aliased"),
        ("hf-vit", {"preprocessing": replace(PREPROCESSING, filter="box")}, 'backend="pil"'),
        ("hf-vit", {"preprocessing": replace(PREPROCESSING, resized=(29, 54))}, "padded by an odd number of pixels"),
        ("hf-vit", {}, "1 classes have the name of an earlier class"),
        ("timm", {}, "cannot express that outputs are labels"),
    ],
)
def test_metadata_that_a_library_cannot_express_is_reported_in_a_line(
    format: str, more: Any, line: str, tmp_path: Path
) -> None:
    written = write(with_metadata(**more), f"{tmp_path / 'folder'}/", format)
    assert len([each for each in written.remarks if each.startswith("lost: ") and line in each and "\n" not in each]) == 1
    assert metadata_of(parity.load(tmp_path / "folder")) == metadata_of(with_metadata(**more))  # from our own metadata


def test_nothing_is_reported_if_nothing_is_lost(tmp_path: Path) -> None:
    checkpoint = with_metadata(labels=tuple("abcd"), task="classes", assumed=())
    for format in ("hf-vit", "timm"):
        assert not [each for each in write(checkpoint, f"{tmp_path / format}/", format).remarks if "lost" in each]
    for format in ("jax", "torch"):
        assert not write(checkpoint, tmp_path / f"{format}.npz", format).remarks


def test_a_weights_file_of_another_library_has_labels_in_our_metadata_only(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    remarks = write(with_metadata(), tmp_path / "weights.pth", "hf-vit").remarks
    assert any("labels and preprocessing: only in our own metadata" in each for each in remarks)


@pytest.mark.parametrize("entry", ["labels", "preprocessing", "task"])
def test_malformed_metadata_entries_are_reported(entry: str) -> None:
    checkpoint, stored = reproducible_init.weights(CONFIG, 0), {"config": CONFIG.to_json(), "format": "jax"}
    texts = ["", "{", "[" * 100_000, '{"a": 1}', "[1, 2]", '"x"', "null", "NaN", "7"]
    found = {text: metadata.attach_metadata(checkpoint, stored | {entry: text}, {}, True) for text in texts}
    assert not [text[:40] for text in texts if metadata_of(found[text])[:3] != (None, None, "classes")]
    unreported = ["null"] if entry == "labels" else []  # as labels, null means that there are none
    assert [text[:40] for text in texts if not found[text].left] == unreported


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, "[1]", '[{"field": "nothing", "why": ""}]', '[{"field": "width"}]']
)
def test_malformed_assumptions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*metadata entry[^\n]*$"):
        metadata.read_assumptions({"assumed": text}, CONFIG)


def test_entries_of_other_programs_with_the_names_of_our_metadata_are_not_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    write(reproducible_init.weights(CONFIG, 0), tmp_path / "ours.npz", "timm")
    weights = {key: np.asarray(array) for key, array in parity.load(tmp_path / "ours.npz").arrays.items()}
    save_file(weights, tmp_path / "theirs.safetensors", {"labels": json.dumps(LABELS), "task": "labels", "format": "pt"})
    found = parity.load(tmp_path / "theirs.safetensors", given={"num_heads": 3, "image_size": (32, 48)})
    assert found.labels is None and found.task == "classes"


def test_another_number_of_labels_than_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 names, but the model has 4 outputs"):
        parity.save(tmp_path / "w.npz", reproducible_init.weights(CONFIG, 0).arrays, CONFIG, "jax", labels=["a", "b"])


def test_a_label_that_no_file_can_store_is_refused(tmp_path: Path) -> None:
    labels = ["a", "b", "c", "caf\udce9"]
    with pytest.raises(InputError, match=r"labels: 'caf\\udce9' is not valid Unicode"):
        parity.save(tmp_path / "w.npz", reproducible_init.weights(CONFIG, 0).arrays, CONFIG, "jax", labels=labels)


@pytest.mark.parametrize("target", ["w.safetensors", "folder/"])
def test_an_unknown_task_is_not_written(target: str, tmp_path: Path) -> None:
    checkpoint = replace(reproducible_init.weights(SQUARE, 0), task="label")
    with pytest.raises(
        InputError, match=r"^task: 'label', but one of classes, labels, values was expected; did you mean 'labels'"
    ):
        write(checkpoint, f"{tmp_path}/{target}", "hf-vit")
    assert not list(tmp_path.iterdir())


# Surgery --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operations", "count"), [({"drop_head": True}, 0), ({"num_classes": 4}, 4), ({"num_classes": 9}, 9)]
)
def test_a_new_head_has_no_labels_and_the_lost_labels_are_reported(operations: Any, count: int) -> None:
    found, lines = surgery.apply(with_metadata(), operations)
    assert (found.config.num_classes, found.labels, found.task) == (count, None, "classes")
    assert "its 4 labels are lost" in lines[0]


def test_a_new_image_size_scales_the_preprocessing_and_reports_it() -> None:
    found, lines = surgery.apply(with_metadata(), {"image_size": (64, 96)})
    assert found.preprocessing == replace(PREPROCESSING, size=(64, 96), resized=(72, 108))
    assert "images: resized to 72x108" in lines[0]
    assert found.labels == LABELS and surgery.apply(with_metadata(), {"in_channels": 1})[0].preprocessing == PREPROCESSING


# Printed output -------------------------------------------------------------------------------------------------------


def test_inspect_prints_metadata_and_escapes_control_characters(tmp_path: Path, capsys: Any) -> None:
    write(with_metadata(labels=(LABELS[3], *LABELS[:3])), tmp_path / "weights.npz", "jax")
    assert main(["inspect", str(tmp_path / "weights.npz")]) == 0
    shown = capsys.readouterr().out
    assert r'labels: 4, ünïcödé 猫 "x"\x1b[31m, red fox, crane, ...' in shown and "\x1b" not in shown
    assert "images: resized to 36x54 regardless of the aspect ratio (lanczos), then center crop 32x48" in shown
    assert "assumed, as most models: mlp.activation='gelu'" in shown
    assert main(["inspect", str(tmp_path / "weights.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found["labels"]) == (LABELS[3], *LABELS[:3]) and found["preprocessing"]["resized"] == [36, 54]


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_every_crop_pct_that_timm_uses_is_inferred_from_sizes() -> None:
    sides = (16, 64, 98, 224, 240, 256, 336, 378, 384, 448, 512, 518)
    for side in sides:
        for part in (0.7, 0.8, 0.875, 0.89, 0.9, 0.94, 0.95, 0.96, 0.965, 0.98, 1.0, 1.1):
            for size in ((side, side), (side, side + 32)):
                resized = size_before_crop(size, part)
                found = infer_share(size, resized)
                assert (
                    found is not None and size_before_crop(size, found) == resized and len(str(found)) <= len(str(part)) + 2
                )
    assert infer_share((224, 224), (256, 300)) is None


@pytest.mark.parametrize("share", [0.875, 0.9, 0.95, 0.965, 1.0])
def test_another_size_shows_the_share_of_an_image_that_timm_shows(share: float) -> None:
    sizes = [(224, 224), (256, 256), (384, 384), (160, 352), (352, 160)]
    for old, new in itertools.permutations(sizes, 2):
        assert center_crop(old, share).for_size(new) == center_crop(new, share)


def test_another_aspect_ratio_needs_no_padding() -> None:
    """Transformers' resize of the shorter side, to a size for which timm has no share."""
    how = Preprocessing(size=(224, 224), resize="shortest", resized=(227, 227), filter="bilinear", rounding="down")
    for size in ((160, 352), (352, 160)):
        other = how.for_size(size)
        resized = other.resized_to(300, 300)
        assert min(other.crop_corner(*resized)) >= 0 and min(resized) == max(resized) == round(227 * 352 / 224)


@pytest.mark.parametrize(
    ("how", "image", "resized", "corner"),
    [
        (center_crop((224, 224), 0.875), (427, 640), (256, 383), (16, 80)),  # margins 32 and 159: half is 79.5
        (replace(center_crop((224, 224), 0.875), rounding="down"), (427, 640), (256, 383), (16, 79)),
        (center_crop((224, 224), 1.0), (224, 200), (250, 224), (13, 0)),
        (center_crop((48, 80), 1.0), (427, 640), (53, 80), (2, 0)),  # 53.375 rows; half of 5 rounds to even
        (center_crop((40, 40), 1.25), (100, 100), (32, 32), (-4, -4)),
        (replace(center_crop((40, 40)), resize="border"), (100, 50), (40, 20), (0, -10)),
        (PREPROCESSING, (100, 100), (36, 54), (2, 3)),
    ],
)
def test_sizes_and_crop_corners_are_rounded_as_in_the_libraries(
    how: Preprocessing, image: Any, resized: Any, corner: Any
) -> None:
    assert how.resized_to(*image) == resized and how.crop_corner(*resized) == corner


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", (0, 4)),
        ("size", (4,)),
        ("resized", (4, 1 << 20)),
        ("resize", "stretch"),
        ("filter", "x"),
        ("rounding", "up"),
    ],
)
def test_a_field_out_of_range_is_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^preprocessing\.{field} is [^\n]*: give [^\n]*$"):
        replace(PREPROCESSING, **{field: value})
