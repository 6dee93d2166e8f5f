"""An image gets the same class names and probabilities in timm, in transformers' pipeline and in train.predict.

timm, this project and transformers with backend="pil" resize with Pillow, so the pixels are equal, and the difference is
the rounding error of float32 in three blocks.  By default, transformers resizes with torchvision, whose kernels differ.
"""

import functools
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

for package in ("torch", "torchvision", "timm", "transformers", "jax", "grain", "sklearn"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.goldens.peers import fill, rng_for  # noqa: I001  # first: it makes torchvision importable
import timm
import torch
import transformers
from sklearn.datasets import load_sample_images
from timm.models import save_for_hf

import parity
from train.data.augment import preprocess
from train.loop.class_names import unique_names
from train.loop.request import Request
from train.inference.model import load_predictor, load_trained_model
from train.jax.engine import JaxEngine
from train.predict import main
from train.recipes import Augment, Model, Recipe
from train.loop.session import train
from train.data.sources import open_dataset

NAMES = ("red fox", 'a "quoted" cat', "crane", "crane", "ünïcödé 猫", "x\x1b[31m", "7")
ROUNDING_ERROR = 3e-6  # of a probability in float32: logits below 8, three blocks, some ten roundings of 2^-24 each
PRINT_ERROR = 5e-5  # train.predict prints four digits
SIZES: dict[str, Any] = {"patch_size": 16, "embed_dim": 96, "depth": 3, "num_heads": 3, "num_classes": len(NAMES)}
STATISTICS: dict[str, Any] = {"mean": (0.48, 0.45, 0.40), "std": (0.22, 0.23, 0.24)}

# Name -> fields of timm's pretrained_cfg.
TIMM: dict[str, dict[str, Any]] = {
    "center": {"crop_pct": 0.875, "interpolation": "bicubic"},
    "whole": {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center"},
    "squash": {"crop_pct": 0.875, "interpolation": "lanczos", "crop_mode": "squash"},
    # Crops 71 pixels to 64: timm removes 4 and 3 pixels, transformers 3 and 4.
    "moved": {"crop_pct": 0.9, "interpolation": "bicubic"},
    "oblong": {"crop_pct": 0.95, "input_size": (3, 48, 80)},
    "border": {"crop_pct": 0.9, "crop_mode": "border"},
    "own defaults": {},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
# Name -> processor of transformers and its options.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTImageProcessor", {"size": 64}),
    "DeiT": ("DeiTImageProcessor", {"size": 73, "crop_size": 64, **HALF}),
    "Bit": ("BitImageProcessor", {"size": {"shortest_edge": 73}, "crop_size": 64, "resample": 2}),
    "CLIP": ("CLIPImageProcessor", {"size": 73, "crop_size": 64}),
    "Siglip": ("SiglipImageProcessor", {"size": {"height": 64, "width": 64}}),
    "factor": (
        "ViTImageProcessor",
        {"size": 64, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
    ),
    "no factor": (
        "ViTImageProcessor",
        {"size": 64, "do_rescale": False, "image_mean": [120.0] * 3, "image_std": [60.0] * 3},
    ),
    "smaller": ("BitImageProcessor", {"size": {"shortest_edge": 64}, "crop_size": 56}),
    "as it is": ("ViTImageProcessor", {"size": 64, "do_normalize": False, "resample": 3}),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a wide and a tall photograph."""
    folder = tmp_path_factory.mktemp("metadata")
    wide, other = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    wide.save(folder / "wide.png")  # 427 high, 640 wide
    other.crop((200, 0, 500, 411)).save(folder / "tall.png")
    return folder


PHOTOS = ("wide", "tall")


def photo(photos: Path, name: str) -> Image.Image:
    """Open one of the photographs as RGB."""
    return Image.open(photos / f"{name}.png").convert("RGB")


@functools.cache
def from_timm(photos: Path, name: str, names: tuple[str, ...] | None = NAMES) -> Path:
    """Return a folder that timm wrote.

    name: a key of `TIMM`.
    names: the class names; None to save none.
    """
    overlay = {"input_size": (3, 64, 64), **STATISTICS, **TIMM[name]}
    overlay |= {} if name != "own defaults" else {"crop_pct": None, "interpolation": None, "mean": None, "std": None}
    sizes = {**SIZES, "img_size": overlay["input_size"][1:]}
    model = timm.create_model("vit_base_patch16_224", **sizes, pretrained_cfg_overlay=overlay).eval()
    with torch.no_grad():
        fill(model, rng_for(name))
    folder = photos / f"timm {name}"
    save_for_hf(model, folder, model_config={"label_names": list(names)} if names else {}, safe_serialization=True)
    return folder


@functools.cache
def from_transformers(photos: Path, name: str, cls: str = "ViTForImageClassification", **options: Any) -> Path:
    """Return a folder that transformers wrote.

    name: a key of `PROCESSORS`.
    options: fields of the config of `cls`.
    """
    processor, settings = PROCESSORS[name]
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {label: n for n, label in enumerate(NAMES)}}
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
    cls = getattr(transformers, cls)
    sizes |= {"intermediate_size": 192, "layer_norm_eps": 1e-6}  # values that timm's config.json can express
    model = cls(cls.config_class(**{**sizes, **labels, **options})).eval()
    with torch.no_grad():
        fill(model, rng_for(name))
    folder = photos / f"transformers {name} {cls.__name__}"
    model.save_pretrained(folder)
    getattr(transformers, processor)(**settings).save_pretrained(folder)
    return folder


# Predictions ----------------------------------------------------------------------------------------------------------

Prediction = tuple[tuple[str, ...], np.ndarray]  # class names and probabilities, both in the order of the outputs


def predict_timm(folder: Path, image: Image.Image) -> Prediction:
    """Return the prediction of timm, with the preprocessing that its folder states."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    with torch.no_grad():
        probabilities = model(transform(image)[None]).softmax(-1)[0].numpy()
    return tuple(model.pretrained_cfg.get("label_names", ())), probabilities


def predict_transformers(folder: Path, image: Image.Image, backend: str = "pil") -> Prediction:
    """Return the prediction of transformers' pipeline."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    pipeline = transformers.pipeline("image-classification", model=str(folder), image_processor=processor)
    count = pipeline.model.config.num_labels
    pipeline.model.config.id2label = {n: f"{n} {pipeline.model.config.id2label[n]}" for n in range(count)}  # unique names
    scores = {each["label"]: each["score"] for each in pipeline(image, top_k=count)}
    ordered = sorted(scores, key=lambda label: int(label.split()[0]))
    return tuple(label.split(" ", 1)[1] for label in ordered), np.array([scores[label] for label in ordered])


def predict_twin(path: Path, image: Image.Image, twin: str = "torch") -> Prediction:
    """Return the prediction of a twin, with the preprocessing that the checkpoint states."""
    model = load_trained_model(str(path))
    pixels = preprocess(image, model.preprocessing, model.checkpoint.config.pixels.mean)
    logits = load_predictor(model.checkpoint, twin).predict(np.asarray(pixels)[None])[0].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    return model.names, probabilities / probabilities.sum()


def is_same(one: Prediction, other: Prediction) -> bool:
    """Return whether two predictions have the same names, and probabilities that differ by float32 rounding only."""
    assert one[1].max() - one[1].min() > 0.1, "a comparison of equal probabilities would show nothing"
    return one[0] == other[0] and float(np.abs(one[1] - other[1]).max()) < ROUNDING_ERROR


# Without conversion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("which", PHOTOS)
def test_both_twins_predict_the_same_as_timm(photos: Path, name: str, which: str) -> None:
    folder, image = from_timm(photos, name), photo(photos, which)
    expected = predict_timm(folder, image)
    assert expected[0] == NAMES
    assert is_same(expected, predict_twin(folder, image, "torch")) and is_same(expected, predict_twin(folder, image, "jax"))


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "smaller"])
@pytest.mark.parametrize("which", PHOTOS)
def test_both_twins_predict_the_same_as_transformers_pipeline(photos: Path, name: str, which: str) -> None:
    folder, image = from_transformers(photos, name), photo(photos, which)
    expected = predict_transformers(folder, image)
    assert expected[0] == NAMES
    assert is_same(expected, predict_twin(folder, image, "torch")) and is_same(expected, predict_twin(folder, image, "jax"))


def test_images_smaller_than_the_models_size_are_preprocessed_as_in_the_pipeline(photos: Path) -> None:
    folder = from_transformers(photos, "smaller", "Dinov2ForImageClassification", image_size=98, patch_size=14, mlp_ratio=2)
    expected, checkpoint = predict_transformers(folder, photo(photos, "wide")), parity.load(folder)
    assert (checkpoint.config.image_size, checkpoint.preprocessing.size) == ((98, 98), (56, 56))
    assert is_same(expected, predict_twin(folder, photo(photos, "wide")))


@pytest.mark.parametrize("both", [False, True])
def test_a_nested_processor_is_read_as_in_the_pipeline(photos: Path, both: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(from_transformers(photos, "Bit"), tmp_path / "folder"))
    images = transformers.CLIPImageProcessor(size=91, crop_size=64, resample=2, **HALF)
    words = transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[])
    transformers.CLIPProcessor(images, words).save_pretrained(folder)
    if not both:
        (folder / "preprocessor_config.json").unlink()
    assert "image_processor" in json.loads((folder / "processor_config.json").read_text())
    expected = predict_transformers(folder, photo(photos, "wide"))
    assert parity.load(folder).preprocessing.resized == (91, 91)
    assert is_same(expected, predict_twin(folder, photo(photos, "wide")))


def copy_with_changes(source: Path, target: Path, file: str, *path: str, **fields: Any) -> Path:
    """Copy a folder, and change fields of an object in one of its JSON files; `path` leads to the object."""
    shutil.copytree(source, target)
    whole = part = json.loads((target / file).read_text())
    for name in path:
        part = part[name]
    part.update(fields)
    (target / file).write_text(json.dumps(whole))
    return target


@pytest.mark.parametrize("off", [None, 0])
def test_a_processor_flag_that_is_null_or_zero_is_off(photos: Path, off: Any, tmp_path: Path) -> None:
    flags = {"do_rescale": off, "do_center_crop": off, "size": {"height": 64, "width": 64}}
    source = from_transformers(photos, "CLIP")
    folder = copy_with_changes(
        source, tmp_path / "folder", "preprocessor_config.json", **flags, image_mean=[99.0] * 3, image_std=[66.0] * 3
    )
    assert is_same(
        predict_transformers(folder, photo(photos, "wide")),
        predict_twin(folder, photo(photos, "wide")),
    )


OFFSET = {"rescale_factor": 1 / 127.5, "rescale_offset": True, "do_normalize": False, "include_top": False}


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("EfficientNetImageProcessor", OFFSET),
        ("EfficientNetImageProcessor", {"include_top": True, **HALF}),
        ("ConvNextImageProcessor", {"do_resize": False, **HALF}),
        ("ViTImageProcessor", HALF),
    ],
)
def test_pixel_statistics_are_assumed_or_give_the_pixels_of_the_processor(
    photos: Path, tmp_path: Path, processor: str, options: Any
) -> None:
    folder = Path(shutil.copytree(from_transformers(photos, "ViT"), tmp_path / "folder"))
    getattr(transformers, processor)(size={"height": 64, "width": 64}, **options).save_pretrained(folder)
    found = parity.load(folder)
    is_assumed = {"pixels.mean", "pixels.std"} <= {each.field for each in found.assumed}
    assert is_assumed == (processor != "ViTImageProcessor") and bool(found.preprocessing) != is_assumed
    image = photo(photos, "wide").resize((64, 64))
    theirs = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(image, return_tensors="np")
    ours = (np.asarray(image) / 255 - found.config.pixels.mean) / found.config.pixels.std
    assert is_assumed or np.allclose(theirs["pixel_values"][0].transpose(1, 2, 0), ours, atol=1e-6)


def test_the_image_size_in_timms_model_arguments_overrides_the_data_config(photos: Path, tmp_path: Path) -> None:
    source = from_timm(photos, "center")
    folder = copy_with_changes(source, tmp_path / "folder", "config.json", "pretrained_cfg", input_size=[3, 48, 48])
    assert is_same(predict_timm(folder, photo(photos, "wide")), predict_twin(folder, photo(photos, "wide")))


# With conversions -----------------------------------------------------------------------------------------------------

# Name -> the (container, format) pairs between the first folder and the last.
CHAINS: dict[str, tuple[tuple[str, str], ...]] = {
    "straight": (),
    "npz": (("npz", "google"),),
    "pth": (("pth", "torch"),),
    "msgpack": (("msgpack", "google"),),
    "orbax": (("orbax", "jax"),),
    "dcp": (("dcp", "torch"),),
    "all": (("safetensors", "jax"), ("pth", "timm"), ("npz", "hf-vit"), ("orbax", "jax")),
}


def convert_along(source: Path, folder: Path, chain: str, to: str) -> tuple[Path, list[str]]:
    """Convert a folder along one of `CHAINS` to the format `to`; return the last folder and the losses reported for it."""
    for number, (container, format) in enumerate(CHAINS[chain]):
        target = folder / f"{number}.{container}"
        parity.convert(source, target, format, container=container)
        source = target
    remarks = parity.convert(source, f"{folder / to}/", to).remarks
    return folder / to, [line for line in remarks if line.startswith("lost: ") and "label2id" not in line]


@pytest.mark.parametrize(("name", "chain"), [("center", "all"), ("squash", "pth"), ("own defaults", "npz")])
def test_a_model_of_timm_predicts_the_same_in_transformers(photos: Path, name: str, chain: str, tmp_path: Path) -> None:
    source, image = from_timm(photos, name), photo(photos, "wide")
    folder, lost = convert_along(source, tmp_path, chain, "hf-vit")
    expected = predict_timm(source, image)
    assert is_same(expected, predict_transformers(folder, image)) and is_same(expected, predict_twin(folder, image))
    assert not lost or "some images move by a pixel" in lost[0]  # this photograph does not


@pytest.mark.parametrize(
    ("name", "chain"),
    [("ViT", "straight"), ("DeiT", "msgpack"), ("Bit", "all"), ("CLIP", "orbax"), ("Siglip", "dcp"), ("factor", "pth")],
)
def test_a_model_of_transformers_predicts_the_same_in_timm(photos: Path, name: str, chain: str, tmp_path: Path) -> None:
    source, image = from_transformers(photos, name), photo(photos, "wide")
    folder, lost = convert_along(source, tmp_path, chain, "timm")
    expected = predict_transformers(source, image)
    assert is_same(expected, predict_timm(folder, image)) and is_same(expected, predict_twin(folder, image))
    assert not lost or "some images move by a pixel" in lost[0]


@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_timm_predicts_the_same_after_conversions_and_back(photos: Path, name: str, tmp_path: Path) -> None:
    folder, lost = convert_along(from_timm(photos, name), tmp_path, "all", "timm")
    image = photo(photos, "tall")
    (names, before), (others, after) = (
        predict_timm(from_timm(photos, name), image),
        predict_timm(folder, image),
    )
    assert names == others and np.array_equal(before, after) and not lost


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Bit", "no factor", "as it is"])
def test_a_model_of_transformers_predicts_the_same_after_conversions_and_back(
    photos: Path, name: str, tmp_path: Path
) -> None:
    folder, lost = convert_along(from_transformers(photos, name), tmp_path, "all", "hf-vit")
    image = photo(photos, "tall")
    before, after = (
        predict_transformers(from_transformers(photos, name), image),
        predict_transformers(folder, image),
    )
    assert is_same(before, after) and not lost


@pytest.fixture(scope="module")
def run(photos: Path) -> Path:
    """Return the folder of a run that was trained on crops of the photographs."""
    rng = np.random.default_rng(0)
    for which, label in zip(PHOTOS, ("temple", "dahlia"), strict=True):
        (photos / "tiles" / label).mkdir(parents=True)
        for number, (left, top) in enumerate(rng.integers(0, 200, (8, 2))):
            box = (left, top, left + 96, top + 72)
            photo(photos, which).crop(box).save(photos / "tiles" / label / f"{number}.png")
    sizes = ("patch_size=16", "width=64", "depth=2", "num_heads=2", "mlp_dim=96")
    recipe = Recipe(
        model=Model(name="vit_ti16", image_size=(64, 64), changes=sizes),
        augment=Augment(share=0.875, held_out_filter="bilinear"),
        data=f"folder:{photos / 'tiles'}",
        held_out=0.25,
        epochs=1,
        batch_size=4,
        workers=0,
        run=str(photos / "run"),
    )
    assert train(Request("test", recipe, open_dataset(recipe.data, recipe.held_out), "train"), JaxEngine) == 0
    return photos / "run"


def test_a_trained_run_predicts_the_same_in_timm_and_in_transformers(run: Path, photos: Path, tmp_path: Path) -> None:
    image, source = photo(photos, "wide"), run / "best.safetensors"
    expected = predict_twin(run, image)
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "weights.safetensors"
    alone.write_bytes(source.read_bytes())
    assert expected[0] == ("dahlia", "temple") and is_same(expected, predict_twin(alone, image, "jax"))
    there, _ = convert_along(alone, tmp_path, "all", "hf-vit")
    back, _ = convert_along(there, tmp_path, "pth", "timm")
    assert is_same(expected, predict_transformers(there, image)) and is_same(expected, predict_timm(back, image))


@pytest.mark.parametrize("twin", ["torch", "jax"])
def test_the_command_prints_timms_prediction(photos: Path, twin: str, tmp_path: Path, capsys: Any) -> None:
    parity.convert(from_timm(photos, "center"), tmp_path / "weights.npz", "google")
    assert main([str(tmp_path / "weights.npz"), str(photos / "wide.png"), "--twin", twin, "--json", "--top", "7"]) == 0
    found = json.loads(capsys.readouterr().out)["classes"]
    names, probabilities = predict_timm(from_timm(photos, "center"), photo(photos, "wide"))
    names = unique_names(names)  # two are "crane"
    order = np.argsort(-probabilities)
    assert [each["name"] for each in found] == [names[n] for n in order]
    np.testing.assert_allclose(
        [each["probability"] for each in found], probabilities[order], atol=PRINT_ERROR + ROUNDING_ERROR
    )


# Reported losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [("border", "no processor of transformers can express this preprocessing"), ("moved", "all images move by a pixel")],
)
def test_a_preprocessing_that_transformers_cannot_express_is_reported_and_changes_its_prediction(
    photos: Path, name: str, part: str, tmp_path: Path
) -> None:
    source, image = from_timm(photos, name), photo(photos, "wide")
    folder, lost = convert_along(source, tmp_path, "npz", "hf-vit")
    assert len(lost) == 1 and part in lost[0]
    expected = predict_timm(source, image)
    assert not is_same(expected, predict_transformers(folder, image))
    assert is_same(expected, predict_twin(folder, image))  # parity.json in the folder has it
    back, lost = convert_along(folder, tmp_path, "pth", "timm")
    assert not lost and is_same(expected, predict_timm(back, image))


@pytest.mark.parametrize("name", ["read", "written"])
def test_an_odd_padding_is_placed_as_in_torchvision_and_reported(photos: Path, name: str, tmp_path: Path) -> None:
    if name == "read":
        source = from_transformers(photos, "CLIP")
        folder = copy_with_changes(source, tmp_path / "folder", "preprocessor_config.json", size={"shortest_edge": 49})
        remarks: Any = parity.load(folder).left
    else:
        cfg = {"crop_pct": 1.3, "crop_mode": "squash"}
        source = copy_with_changes(from_timm(photos, "center"), tmp_path / "timm", "config.json", "pretrained_cfg", **cfg)
        folder, remarks = convert_along(source, tmp_path, "npz", "hf-vit")
    assert any("padded by an odd number of pixels" in each for each in remarks)
    ours, image = predict_twin(folder, photo(photos, "wide")), photo(photos, "wide")
    near, far = (predict_transformers(folder, image, backend)[1] for backend in ("torchvision", "pil"))
    assert np.abs(near - ours[1]).max() < 3e-4 < 1e-3 < np.abs(far - ours[1]).max()  # torchvision's kernels are others


def test_torchvision_differs_from_pillow_by_one_level_in_few_pixels(photos: Path) -> None:
    folder, image = from_transformers(photos, "Bit"), photo(photos, "wide")
    pil, other = (transformers.AutoImageProcessor.from_pretrained(folder, backend=each) for each in ("pil", "torchvision"))
    mine, theirs = (each(images=image, return_tensors="pt")["pixel_values"].numpy() for each in (pil, other))
    std = np.array(other.image_std)[:, None, None]
    levels = np.abs(mine - theirs) * std * 255
    assert 0.5 < levels.max() < 1.5 and (levels > 0.5).mean() < 0.01
    model = load_trained_model(str(folder))
    mean = np.array(other.image_mean)[:, None, None]
    pixels = np.rint((theirs[0] * std + mean) * 255).astype(np.uint8).transpose(1, 2, 0)[None]
    logits = load_predictor(model.checkpoint, "torch").predict(pixels)[0].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    expected = predict_transformers(folder, image, "torchvision")
    assert is_same(expected, (model.names, probabilities / probabilities.sum()))  # equal for equal pixels
