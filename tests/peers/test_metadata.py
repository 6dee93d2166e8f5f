"""One photograph has the same names and probabilities in timm, in transformers' pipeline, and by train.predict.

Pillow resizes in timm, in this project, and in transformers with backend="pil": there the pixels are the same, and what is
left is float32 through three blocks.  transformers' own choice is torchvision, whose kernels are others.
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

from tests.goldens.peers import fill, seeded  # noqa: I001  # first: it mends torchvision, which timm imports
import timm
import torch
import transformers
from sklearn.datasets import load_sample_images
from timm.models import save_for_hf

import parity
from train.data.augment import prepared
from train.loop.request import Request
from train.inference.model import network, opened
from train.jax.engine import JaxEngine
from train.predict import main
from train.recipes import Augment, Model, Recipe
from train.loop.session import train
from train.data.sources import open_source

NAMES = ("red fox", 'a "quoted" cat', "crane", "crane", "ünïcödé 猫", "x\x1b[31m", "7")
FLOAT32 = 3e-6  # of a probability: logits below 8 through 3 blocks, 2^-24 for each of some ten roundings
PRINTED = 5e-5  # train.predict prints four digits
SIZES: dict[str, Any] = {"patch_size": 16, "embed_dim": 96, "depth": 3, "num_heads": 3, "num_classes": len(NAMES)}
STATISTICS: dict[str, Any] = {"mean": (0.48, 0.45, 0.40), "std": (0.22, 0.23, 0.24)}

# What is given to timm's pretrained_cfg.
TIMM: dict[str, dict[str, Any]] = {
    "center": {"crop_pct": 0.875, "interpolation": "bicubic"},
    "whole": {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center"},
    "squash": {"crop_pct": 0.875, "interpolation": "lanczos", "crop_mode": "squash"},
    "moved": {
        "crop_pct": 0.9,
        "interpolation": "bicubic",
    },  # 71 pixels to 64: timm leaves out 4 and 3, transformers 3 and 4
    "oblong": {"crop_pct": 0.95, "input_size": (3, 48, 80)},
    "border": {"crop_pct": 0.9, "crop_mode": "border"},
    "own defaults": {},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
# Processors of transformers with their options.
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wide and a tall photograph."""
    folder = tmp_path_factory.mktemp("metadata")
    wide, other = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    wide.save(folder / "wide.png")  # 640x427
    other.crop((200, 0, 500, 411)).save(folder / "tall.png")
    return folder


PHOTOS = ("wide", "tall")


def photo(place: Path, name: str) -> Image.Image:
    return Image.open(place / f"{name}.png").convert("RGB")


@functools.cache
def from_timm(place: Path, name: str, names: tuple[str, ...] | None = NAMES) -> Path:
    """A folder that timm wrote."""
    overlay = {"input_size": (3, 64, 64), **STATISTICS, **TIMM[name]}
    overlay |= {} if name != "own defaults" else {"crop_pct": None, "interpolation": None, "mean": None, "std": None}
    sizes = {**SIZES, "img_size": overlay["input_size"][1:]}
    model = timm.create_model("vit_base_patch16_224", **sizes, pretrained_cfg_overlay=overlay).eval()
    with torch.no_grad():
        fill(model, seeded(name))
    folder = place / f"timm {name}"
    save_for_hf(model, folder, model_config={"label_names": list(names)} if names else {}, safe_serialization=True)
    return folder


@functools.cache
def from_transformers(place: Path, name: str, cls: str = "ViTForImageClassification", **options: Any) -> Path:
    """A folder that transformers wrote."""
    kind, how = PROCESSORS[name]
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {label: n for n, label in enumerate(NAMES)}}
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
    cls = getattr(transformers, cls)
    sizes |= {"intermediate_size": 192, "layer_norm_eps": 1e-6}  # of which timm's config.json has a word
    model = cls(cls.config_class(**{**sizes, **labels, **options})).eval()
    with torch.no_grad():
        fill(model, seeded(name))
    folder = place / f"transformers {name} {cls.__name__}"
    model.save_pretrained(folder)
    getattr(transformers, kind)(**how).save_pretrained(folder)
    return folder


# Who says what --------------------------------------------------------------------------------------------------------

Answer = tuple[tuple[str, ...], np.ndarray]  # names, and their probabilities in the order of the outputs


def by_timm(folder: Path, image: Image.Image) -> Answer:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    with torch.no_grad():
        chances = model(transform(image)[None]).softmax(-1)[0].numpy()
    return tuple(model.pretrained_cfg.get("label_names", ())), chances


def by_transformers(folder: Path, image: Image.Image, backend: str = "pil") -> Answer:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    pipeline = transformers.pipeline("image-classification", model=str(folder), image_processor=processor)
    count = pipeline.model.config.num_labels
    pipeline.model.config.id2label = {n: f"{n} {pipeline.model.config.id2label[n]}" for n in range(count)}  # all differ
    said = {each["label"]: each["score"] for each in pipeline(image, top_k=count)}
    ordered = sorted(said, key=lambda label: int(label.split()[0]))
    return tuple(label.split(" ", 1)[1] for label in ordered), np.array([said[label] for label in ordered])


def by_us(path: Path, image: Image.Image, twin: str = "torch") -> Answer:
    frozen = opened(str(path))
    pixels = prepared(image, frozen.preprocessing, frozen.checkpoint.config.pixels.mean)
    logits = network(frozen.checkpoint, twin).outputs(np.asarray(pixels)[None])[0].astype(np.float64)
    chances = np.exp(logits - logits.max())
    return frozen.names, chances / chances.sum()


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers have the same names, and chances that differ by float32 alone."""
    assert one[1].max() - one[1].min() > 0.1, "chances that are all alike show nothing"
    return one[0] == other[0] and float(np.abs(one[1] - other[1]).max()) < FLOAT32


# Each model where it comes from ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("which", PHOTOS)
def test_both_twins_say_what_timm_says(place: Path, name: str, which: str) -> None:
    folder, image = from_timm(place, name), photo(place, which)
    expected = by_timm(folder, image)
    assert expected[0] == NAMES
    assert same(expected, by_us(folder, image, "torch")) and same(expected, by_us(folder, image, "jax"))


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "smaller"])
@pytest.mark.parametrize("which", PHOTOS)
def test_both_twins_say_what_the_pipeline_says(place: Path, name: str, which: str) -> None:
    folder, image = from_transformers(place, name), photo(place, which)
    expected = by_transformers(folder, image)
    assert expected[0] == NAMES
    assert same(expected, by_us(folder, image, "torch")) and same(expected, by_us(folder, image, "jax"))


def test_images_smaller_than_the_model_are_shown_as_the_pipeline_shows_them(place: Path) -> None:
    folder = from_transformers(place, "smaller", "Dinov2ForImageClassification", image_size=98, patch_size=14, mlp_ratio=2)
    expected, checkpoint = by_transformers(folder, photo(place, "wide")), parity.load(folder)
    assert (checkpoint.config.image_size, checkpoint.preprocessing.size) == ((98, 98), (56, 56))
    assert same(expected, by_us(folder, photo(place, "wide")))


@pytest.mark.parametrize("both", [False, True])
def test_a_processor_that_is_nested_is_read_as_the_pipeline_reads_it(place: Path, both: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(from_transformers(place, "Bit"), tmp_path / "folder"))
    images = transformers.CLIPImageProcessor(size=91, crop_size=64, resample=2, **HALF)
    words = transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[])
    transformers.CLIPProcessor(images, words).save_pretrained(folder)
    if not both:
        (folder / "preprocessor_config.json").unlink()
    assert "image_processor" in json.loads((folder / "processor_config.json").read_text())
    expected = by_transformers(folder, photo(place, "wide"))
    assert parity.load(folder).preprocessing.resized == (91, 91)
    assert same(expected, by_us(folder, photo(place, "wide")))


def edited(source: Path, target: Path, file: str, *path: str, **fields: Any) -> Path:
    """A copy of a folder in whose JSON file an object, which `path` leads to, has other fields."""
    shutil.copytree(source, target)
    whole = part = json.loads((target / file).read_text())
    for name in path:
        part = part[name]
    part.update(fields)
    (target / file).write_text(json.dumps(whole))
    return target


@pytest.mark.parametrize("off", [None, 0])
def test_a_flag_that_is_not_true_is_off(place: Path, off: Any, tmp_path: Path) -> None:
    flags = {"do_rescale": off, "do_center_crop": off, "size": {"height": 64, "width": 64}}
    source = from_transformers(place, "CLIP")
    folder = edited(
        source, tmp_path / "folder", "preprocessor_config.json", **flags, image_mean=[99.0] * 3, image_std=[66.0] * 3
    )
    assert same(by_transformers(folder, photo(place, "wide")), by_us(folder, photo(place, "wide")))


def test_timm_shows_images_of_the_size_that_is_an_argument_of_the_model(place: Path, tmp_path: Path) -> None:
    source = from_timm(place, "center")
    folder = edited(source, tmp_path / "folder", "config.json", "pretrained_cfg", input_size=[3, 48, 48])
    assert same(by_timm(folder, photo(place, "wide")), by_us(folder, photo(place, "wide")))


# Through conversions --------------------------------------------------------------------------------------------------

# Formats and containers between the first folder and the last.
BETWEEN: dict[str, tuple[tuple[str, str], ...]] = {
    "straight": (),
    "npz": (("npz", "google"),),
    "pth": (("pth", "torch"),),
    "msgpack": (("msgpack", "google"),),
    "orbax": (("orbax", "jax"),),
    "dcp": (("dcp", "torch"),),
    "all": (("safetensors", "jax"), ("pth", "timm"), ("npz", "hf-vit"), ("orbax", "jax")),
}


def converted(source: Path, folder: Path, between: str, to: str) -> tuple[Path, list[str]]:
    """A folder at the end of a chain of conversions, and what was said to be lost in the last."""
    for number, (container, format) in enumerate(BETWEEN[between]):
        target = folder / f"{number}.{container}"
        parity.convert(source, target, format, container=container)
        source = target
    remarks = parity.convert(source, f"{folder / to}/", to).remarks
    return folder / to, [line for line in remarks if line.startswith("lost: ") and "label2id" not in line]


@pytest.mark.parametrize(("name", "between"), [("center", "all"), ("squash", "pth"), ("own defaults", "npz")])
def test_models_of_timm_say_the_same_in_transformers(place: Path, name: str, between: str, tmp_path: Path) -> None:
    source, image = from_timm(place, name), photo(place, "wide")
    folder, lost = converted(source, tmp_path, between, "hf-vit")
    expected = by_timm(source, image)
    assert same(expected, by_transformers(folder, image)) and same(expected, by_us(folder, image))
    assert not lost or "some images move by a pixel" in lost[0]  # of which this photograph is none


@pytest.mark.parametrize(
    ("name", "between"),
    [("ViT", "straight"), ("DeiT", "msgpack"), ("Bit", "all"), ("CLIP", "orbax"), ("Siglip", "dcp"), ("factor", "pth")],
)
def test_models_of_transformers_say_the_same_in_timm(place: Path, name: str, between: str, tmp_path: Path) -> None:
    source, image = from_transformers(place, name), photo(place, "wide")
    folder, lost = converted(source, tmp_path, between, "timm")
    expected = by_transformers(source, image)
    assert same(expected, by_timm(folder, image)) and same(expected, by_us(folder, image))
    assert not lost or "some images move by a pixel" in lost[0]


@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm_come_back_as_they_were(place: Path, name: str, tmp_path: Path) -> None:
    folder, lost = converted(from_timm(place, name), tmp_path, "all", "timm")
    image = photo(place, "tall")
    (names, before), (others, after) = by_timm(from_timm(place, name), image), by_timm(folder, image)
    assert names == others and np.array_equal(before, after) and not lost


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Bit", "no factor", "as it is"])
def test_models_of_transformers_come_back_as_they_were(place: Path, name: str, tmp_path: Path) -> None:
    folder, lost = converted(from_transformers(place, name), tmp_path, "all", "hf-vit")
    image = photo(place, "tall")
    before, after = by_transformers(from_transformers(place, name), image), by_transformers(folder, image)
    assert same(before, after) and not lost


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """The folder of a run that was trained on tiles of the photographs."""
    rng = np.random.default_rng(0)
    for which, label in zip(PHOTOS, ("temple", "dahlia"), strict=True):
        (place / "tiles" / label).mkdir(parents=True)
        for number, (left, top) in enumerate(rng.integers(0, 200, (8, 2))):
            box = (left, top, left + 96, top + 72)
            photo(place, which).crop(box).save(place / "tiles" / label / f"{number}.png")
    sizes = ("patch_size=16", "width=64", "depth=2", "num_heads=2", "mlp_dim=96")
    recipe = Recipe(
        model=Model(name="vit_ti16", image_size=(64, 64), changes=sizes),
        augment=Augment(share=0.875, held_out_filter="bilinear"),
        data=f"folder:{place / 'tiles'}",
        held_out=0.25,
        epochs=1,
        batch_size=4,
        workers=0,
        run=str(place / "run"),
    )
    assert train(Request("test", recipe, open_source(recipe.data, recipe.held_out), "train"), JaxEngine) == 0
    return place / "run"


def test_a_run_says_the_same_in_timm_and_in_transformers(run: Path, place: Path, tmp_path: Path) -> None:
    image, source = photo(place, "wide"), run / "best.safetensors"
    expected = by_us(run, image)
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "weights.safetensors"
    alone.write_bytes(source.read_bytes())
    assert expected[0] == ("dahlia", "temple") and same(expected, by_us(alone, image, "jax"))
    there, _ = converted(alone, tmp_path, "all", "hf-vit")
    back, _ = converted(there, tmp_path, "pth", "timm")
    assert same(expected, by_transformers(there, image)) and same(expected, by_timm(back, image))


@pytest.mark.parametrize("twin", ["torch", "jax"])
def test_the_command_prints_what_timm_says(place: Path, twin: str, tmp_path: Path, capsys: Any) -> None:
    parity.convert(from_timm(place, "center"), tmp_path / "weights.npz", "google")
    assert main([str(tmp_path / "weights.npz"), str(place / "wide.png"), "--twin", twin, "--json", "--top", "7"]) == 0
    found = json.loads(capsys.readouterr().out)["classes"]
    names, chances = by_timm(from_timm(place, "center"), photo(place, "wide"))
    order = np.argsort(-chances)
    assert [each["name"] for each in found] == [names[n] for n in order]
    np.testing.assert_allclose([each["probability"] for each in found], chances[order], atol=PRINTED + FLOAT32)


# What does not go -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [("border", "no processor of transformers prepares images like this"), ("moved", "all images move by a pixel")],
)
def test_what_transformers_cannot_prepare_is_said_and_true(place: Path, name: str, part: str, tmp_path: Path) -> None:
    source, image = from_timm(place, name), photo(place, "wide")
    folder, lost = converted(source, tmp_path, "npz", "hf-vit")
    assert len(lost) == 1 and part in lost[0]
    expected = by_timm(source, image)
    assert not same(expected, by_transformers(folder, image))
    assert same(expected, by_us(folder, image))  # our own notes keep it
    back, lost = converted(folder, tmp_path, "pth", "timm")
    assert not lost and same(expected, by_timm(back, image))


@pytest.mark.parametrize("name", ["read", "written"])
def test_an_odd_margin_is_where_torchvision_has_it_and_that_is_said(place: Path, name: str, tmp_path: Path) -> None:
    if name == "read":
        source = from_transformers(place, "CLIP")
        folder = edited(source, tmp_path / "folder", "preprocessor_config.json", size={"shortest_edge": 49})
        said: Any = parity.load(folder).left
    else:
        cfg = {"crop_pct": 1.3, "crop_mode": "squash"}
        source = edited(from_timm(place, "center"), tmp_path / "timm", "config.json", "pretrained_cfg", **cfg)
        folder, said = converted(source, tmp_path, "npz", "hf-vit")
    assert any("padded by an odd number of pixels" in each for each in said)
    ours, image = by_us(folder, photo(place, "wide")), photo(place, "wide")
    near, far = (by_transformers(folder, image, backend)[1] for backend in ("torchvision", "pil"))
    assert np.abs(near - ours[1]).max() < 3e-4 < 1e-3 < np.abs(far - ours[1]).max()  # torchvision's kernels are others


def test_torchvision_resizes_otherwise_by_a_level_here_and_there(place: Path) -> None:
    folder, image = from_transformers(place, "Bit"), photo(place, "wide")
    pil, other = (transformers.AutoImageProcessor.from_pretrained(folder, backend=each) for each in ("pil", "torchvision"))
    mine, theirs = (each(images=image, return_tensors="pt")["pixel_values"].numpy() for each in (pil, other))
    std = np.array(other.image_std)[:, None, None]
    levels = np.abs(mine - theirs) * std * 255
    assert 0.5 < levels.max() < 1.5 and (levels > 0.5).mean() < 0.01
    frozen = opened(str(folder))
    mean = np.array(other.image_mean)[:, None, None]
    pixels = np.rint((theirs[0] * std + mean) * 255).astype(np.uint8).transpose(1, 2, 0)[None]
    logits = network(frozen.checkpoint, "torch").outputs(pixels)[0].astype(np.float64)
    chances = np.exp(logits - logits.max())
    expected = by_transformers(folder, image, "torchvision")
    assert same(expected, (frozen.names, chances / chances.sum()))  # given its pixels, its answer
