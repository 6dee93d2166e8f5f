"""A check of a data set before training: `python -m train.jax --data folder:photos --check-data findings.csv`.

Similar images are found by the correlation of their thumbnails, 16x16 grey pixels.  `benchmarks.similar_images` measures
it: of 100 photographs of ImageNet, all are found as a JPEG of quality 40, at half the size and in grey, and 74 when a
fiftieth of each side is cut off; two different photographs correlate by 0.77 at most.  Of the handwritten digits, 2 of
359 held-out images are similar to a training image.

With weights (`--init`), images whose class is doubtful are found by their features, see
`train.inference.doubtful_classes`.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from parity.checkpoints.preprocessing import center_crop
from parity.checkpoints.surgery import drop_head
from parity.checkpoints.weights import Checkpoint
from parity.terminal import console
from train.data.batches import DataLoader
from train.data.sources import Dataset, Examples, open_test_split
from train.data.sources.examples import shared_groups
from train.data.workers import default_workers
from train.inference.doubtful_classes import NUM_FOLDS, find_doubtful
from train.inference.model import load_predictor, predict_batches, require_pooling
from train.inference.prediction_files import check_output, open_rows
from train.inference.progress import progress_bar
from train.loop.init_from import load_weights
from train.loop.run_tables import first_names, print_table
from train.recipes import Recipe
from vit_spec import InputError

THUMBNAIL = 16  # pixels of a side
MIN_CORRELATION = 0.99
MAX_COMPARED = 50_000  # images of a set up to which they are compared with each other: the time grows as the square
CHUNK = 1 << 12  # images of a set that are compared at once
FEW_IMAGES = 10  # of a class
SMALL_SIDE, LONG_RATIO = 32, 3
BATCH_SIZE = 64  # of features
MAX_NAMED = 3  # in a printed line
MIN_CONTRAST = 1e-3  # norm below which a thumbnail is of one colour, and correlates with nothing

Array = NDArray[Any]


class Finding(NamedTuple):
    """A row of the table of findings.

    kind: "unreadable", "same image", "different targets" (of the same image), "similar image",
        "similar with different targets", "same group", "doubtful class", "long" or "small".
    image, other: names of images; `other` is "" if the finding is about one image.
    set, other_set: "training", "held out" or "test".
    detail: the error, the correlation, the targets, the class that the other images give it, or the size.
    """

    kind: str
    set: str
    image: str
    other_set: str = ""
    other: str = ""
    detail: str = ""


class _Scanned(NamedTuple):
    """Facts about the images of a set: (N,) each, thumbnails (N, 256) float16 of mean 0 and norm 1, or 0.

    errors: errors by the row of an image that cannot be read.
    digests: digests of the pixels; b"" for an unreadable image.
    """

    name: str
    examples: Examples
    sizes: Array
    digests: list[bytes]
    thumbnails: Array
    errors: dict[int, str]


def check_data(source: Dataset, recipe: Recipe, path: Path, twin: str) -> int:
    """Read all images of a data set, print what is odd about them, and write all findings to a CSV file.

    They are the training and the held-out images, and those of a test split.

    Args:
        source: the data set.
        recipe: names it in `data`, and weights to look for wrong classes with in `init`.
        path: the file.
        twin: "jax" or "torch", for these weights.

    Returns:
        0; 1 if images are unreadable, or if the same image or group is in two sets, or an image has several targets.

    Raises:
        InputError: the file cannot be written, or exists; or the weights cannot be used.
    """
    check_output("--check-data", path, (".csv",))
    weights = _load_weights(source, recipe) if recipe.init else None
    named = {"training": source.train, "held out": source.held_out}
    rows = {"data": f"{recipe.data}: {len(source.train):,} training images, {len(source.held_out):,} held out"}
    try:
        test = None if source.split == "test" else open_test_split(recipe.data)
    except InputError as error:  # such as a test split without targets
        rows["not read"] = f"the split test: {error}"
    else:
        if test is not None:
            named["test"] = test
            rows["data"] += f", {len(test):,} test"
    scanned = [_scan(name, examples) for name, examples in named.items()]
    findings = [finding for each in scanned for finding in (*_unreadable(each), *_of_shapes(each))]
    for one, other in ((one, other) for i, one in enumerate(scanned) for other in scanned[: i + 1]):
        findings += _pairs(one, other, source)
        if one is not other:
            findings += _same_groups(one, other)
    if weights is not None:
        doubtful, remarks = _doubtful(scanned, source, weights, twin)
        findings += doubtful
        rows |= remarks
    with open_rows(path, force=False, header=Finding._fields) as write:
        for finding in findings:
            write(finding._asdict())
    rows |= dict(_summary(source, scanned, findings)) | {"findings": f"{len(findings):,}, in {path}"}
    print_table(console(), rows.items())
    return int(
        any(
            each.kind in ("unreadable", "different targets", "same group")
            or (each.kind == "same image" and each.set != each.other_set)
            for each in findings
        )
    )


# Reading --------------------------------------------------------------------------------------------------------------


def _scan(name: str, examples: Examples) -> _Scanned:
    count = len(examples)
    sizes, digests = np.zeros((count, 2), np.int64), [b""] * count
    thumbnails, errors = np.zeros((count, THUMBNAIL**2), np.float16), dict[int, str]()

    def read(row: int) -> None:
        try:
            image = examples.read(row)
        except InputError as error:
            errors[row] = str(error)
            return
        sizes[row] = image.size
        digests[row] = blake2b(np.asarray(image.convert("RGB")).tobytes(), digest_size=16, salt=_salt(image)).digest()
        thumbnails[row] = thumbnail(image)

    with progress_bar(count, f"{name} images", False) as advance, ThreadPoolExecutor() as threads:
        for start in range(0, count, CHUNK):  # a task for each of a million images would take a gigabyte
            for _ in threads.map(read, range(start, min(start + CHUNK, count))):
                advance(1)
    return _Scanned(name, examples, sizes, digests, thumbnails, errors)


def _salt(image: Image.Image) -> bytes:
    """Return bytes that tell images of the same pixels in rows of another length apart."""
    return image.width.to_bytes(8, "little")


def thumbnail(image: Image.Image) -> Array:
    """Return the grey thumbnail of an image, (256,) float32 of mean 0 and norm 1; 0 for an image of one colour."""
    filter = Image.Resampling.BOX if min(image.size) >= THUMBNAIL else Image.Resampling.BILINEAR
    pixels = np.asarray(image.convert("L").resize((THUMBNAIL, THUMBNAIL), filter), np.float32).ravel()
    pixels = pixels - pixels.mean()
    norm = np.linalg.norm(pixels)
    return pixels / norm if norm > MIN_CONTRAST else np.zeros_like(pixels)


# Findings -------------------------------------------------------------------------------------------------------------


def _unreadable(scanned: _Scanned) -> Iterator[Finding]:
    for row, error in sorted(scanned.errors.items()):
        yield Finding("unreadable", scanned.name, scanned.examples.names[row], detail=error)


def _of_shapes(scanned: _Scanned) -> Iterator[Finding]:
    for row, (width, height) in enumerate(scanned.sizes.tolist()):
        size = f"{height}x{width}"
        if width and max(width, height) > LONG_RATIO * min(width, height):
            yield Finding("long", scanned.name, scanned.examples.names[row], detail=size)
        # In a data set of small images, such as the digits, no image is odd for being small.
        if width and min(width, height) < SMALL_SIDE and scanned.sizes.max() >= SMALL_SIDE:
            yield Finding("small", scanned.name, scanned.examples.names[row], detail=size)


def _pairs(one: _Scanned, other: _Scanned, source: Dataset) -> Iterator[Finding]:
    """Yield the pairs of the same or similar images of two sets, or of one, and whether their targets differ."""
    for row, match, correlation in _similar(one, other):
        is_same = one.digests[row] == other.digests[match]
        names = one.name, one.examples.names[row], other.name, other.examples.names[match]
        targets = [scanned.examples.targets[i] for scanned, i in ((one, row), (other, match))]
        shown = "" if np.array_equal(*targets) else " and ".join(_target(target, source) for target in targets)
        if is_same:
            yield Finding("same image", *names)
        else:
            yield Finding("similar image", *names, detail=f"correlation {correlation:.3f}")
        if shown:
            yield Finding("different targets" if is_same else "similar with different targets", *names, detail=shown)


def _same_groups(one: _Scanned, other: _Scanned) -> Iterator[Finding]:
    """Yield an image of each of two sets, for each group that is in both."""
    for row, match in shared_groups(one.examples, other.examples):
        yield Finding("same group", one.name, one.examples.names[row], other.name, other.examples.names[match])


def _similar(one: _Scanned, other: _Scanned) -> Iterator[tuple[int, int, float]]:
    """Yield for each image of a set the most similar one of another set, or of those before it in the same set.

    Only pairs with the same pixels, or with a correlation of `MIN_CORRELATION` and more.
    """
    is_same_set = one is other
    first = {digest: row for row, digest in reversed(list(enumerate(other.digests))) if digest}
    compares = not is_same_set or len(one.examples) <= MAX_COMPARED
    for start in range(0, len(one.examples), CHUNK):
        rows = range(start, min(start + CHUNK, len(one.examples)))
        best, where = np.full(len(rows), -1.0), np.zeros(len(rows), np.int64)
        for begin in range(0, len(other.examples) if compares else 0, CHUNK):
            if is_same_set and begin > rows[-1]:
                break
            products = one.thumbnails[rows.start : rows.stop].astype(np.float32) @ (
                other.thumbnails[begin : begin + CHUNK].astype(np.float32).T
            )
            if is_same_set:  # with earlier images only
                products[np.arange(begin, begin + products.shape[1]) >= np.array(rows)[:, None]] = -1
            better = products.max(1) > best
            where[better], best[better] = begin + products.argmax(1)[better], products.max(1)[better]
        for i, row in enumerate(rows):
            match = first.get(one.digests[row])
            if match is not None and not (is_same_set and match >= row):
                yield row, match, 1.0
            elif best[i] >= MIN_CORRELATION:
                yield row, int(where[i]), float(best[i])


def _load_weights(source: Dataset, recipe: Recipe) -> Checkpoint:
    """Return the weights whose features tell which classes are doubtful."""
    if source.task != "classes":
        raise InputError(
            f"--check-data with --init looks for wrong classes, and the data has {source.task}: leave --init out"
        )
    _, checkpoint, _ = load_weights(recipe.init or "", recipe.init_set, "--init-set")
    require_pooling(checkpoint)
    if checkpoint.config.in_channels not in (1, 3):
        raise InputError(
            f"--init {recipe.init} takes images of {checkpoint.config.in_channels} channels: give other weights"
        )
    return drop_head(checkpoint)[0] if checkpoint.config.num_classes else checkpoint


def _doubtful(
    sets: Sequence[_Scanned], source: Dataset, weights: Checkpoint, twin: str
) -> tuple[list[Finding], dict[str, str]]:
    """Return the images of all sets whose class is doubtful, the most doubtful first, and rows for the table."""
    predictor = load_predictor(weights, twin)
    preprocessing = weights.preprocessing or center_crop(weights.config.image_size)
    config = weights.config.replace(image_size=preprocessing.size)
    places, features, classes = list[tuple[_Scanned, int]](), [], []
    for scanned in sets:
        rows = [row for row in range(len(scanned.examples)) if row not in scanned.errors]
        if not rows:
            continue
        examples = scanned.examples.take(rows)
        targets = examples.targets.astype(np.int32)
        size, workers = min(BATCH_SIZE, len(rows)), default_workers(source)
        loader = DataLoader(examples, targets, config, size, workers=workers, preprocessing=preprocessing)
        with progress_bar(len(rows), f"features of {scanned.name} images", False) as advance:
            for outputs in predict_batches(loader, lambda batch: predictor.predict(batch.images)):
                features.append(outputs)
                advance(len(outputs))
        places += [(scanned, row) for row in rows]
        classes.append(targets)
    joined = np.concatenate(classes)
    doubtful, accuracy = find_doubtful(np.concatenate(features), joined)
    remarks = {"classifier": f"fitted to the features of other images; it gives {accuracy:.1%} of the images their class"}
    counts = np.bincount(joined)
    if few := int(np.sum((counts > 0) & (counts < NUM_FOLDS))):
        images = int(counts[counts < NUM_FOLDS].sum())
        remarks["not classified"] = f"{images:,} images of {few:,} classes with fewer than {NUM_FOLDS} images"
    findings = []
    for found in doubtful:
        scanned, row = places[found.row]
        names = [source.classes[number] for number in (found.other, int(joined[found.row]))]
        detail = f"{names[0]} ({found.of_other:.2f}) rather than {names[1]} ({found.probability:.2f})"
        findings.append(Finding("doubtful class", scanned.name, scanned.examples.names[row], detail=detail))
    return findings, remarks


def _target(target: Any, source: Dataset) -> str:
    if source.task == "classes":
        return source.classes[int(target)]
    if source.task == "labels":
        return ", ".join(name for name, has in zip(source.classes, target, strict=True) if has) or "no label"
    return ", ".join(f"{value:g}" for value in target)


# Summary --------------------------------------------------------------------------------------------------------------


def _summary(source: Dataset, sets: Sequence[_Scanned], findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the printed table."""
    sizes = np.concatenate([scanned.sizes[scanned.sizes[:, 0] > 0] for scanned in sets])
    if len(sizes):
        (least_w, least_h), (most_w, most_h), (w, h) = sizes.min(0), sizes.max(0), np.median(sizes, axis=0).astype(int)
        yield "sizes", f"{least_h}x{least_w} to {most_h}x{most_w} pixels, median {h}x{w} (height x width)"
    if source.task == "classes":
        yield from _of_classes(source)
    for name, kind, is_in_both, text in (
        ("unreadable", "unreadable", False, "images that cannot be read"),
        ("long", "long", False, f"images with a side more than {LONG_RATIO} times the other, of which a crop shows little"),
        ("small", "small", False, f"images with a side below {SMALL_SIDE} pixels"),
        ("twice", "same image", False, "images with the pixels of an earlier one of their set"),
        ("similar", "similar image", False, "images that are similar to an earlier one of their set"),
        (
            "in both sets",
            "same image",
            True,
            "held-out or test images with the pixels of an image of another set, which make scores too good",
        ),
        ("similar in both", "similar image", True, "held-out or test images that are similar to an image of another set"),
        ("groups in both", "same group", True, "groups with images in two sets, which make scores too good"),
        ("targets differ", "different targets", None, "pairs of the same image with different targets"),
        ("similar differ", "similar with different targets", None, "pairs of similar images with different targets"),
        ("doubtful", "doubtful class", None, "images that the classifier gives another class"),
    ):
        found = [
            each
            for each in findings
            if each.kind == kind and is_in_both in (None, bool(each.other_set) and each.set != each.other_set)
        ]
        if found:
            pairs = [f"{each.image}{f' and {each.other}' * bool(each.other)}" for each in found[:MAX_NAMED]]
            yield name, f"{text}: {len(found):,} ({', '.join(pairs)}{', ...' * (len(found) > MAX_NAMED)})"
    if large := [scanned.name for scanned in sets if len(scanned.examples) > MAX_COMPARED]:
        which = " and ".join(large)
        yield "not compared", f"{which} images with each other, except for equal pixels: more than {MAX_COMPARED:,}"


def _of_classes(source: Dataset) -> Iterator[tuple[str, str]]:
    counts, held_out = (
        np.bincount(examples.targets, minlength=len(source.classes)) for examples in (source.train, source.held_out)
    )
    yield (
        "classes",
        f"{len(counts):,}, with {counts.min():,} to {counts.max():,} training images: {first_names(source.classes)}",
    )
    for name, chosen, text in (
        ("few images", np.flatnonzero(counts < FEW_IMAGES), f"classes with fewer than {FEW_IMAGES} training images"),
        ("not held out", np.flatnonzero(held_out == 0), "classes without held-out images"),
    ):
        if len(chosen):
            shown = ", ".join(f"{source.classes[c]}: {counts[c]}" for c in chosen[:MAX_NAMED].tolist())
            yield name, f"{text}: {len(chosen):,} ({shown}{', ...' * (len(chosen) > MAX_NAMED)})"
