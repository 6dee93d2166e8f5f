"""Class weights and balanced sampling reach the engine and the data loader, and are refused where they mean nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grain")

from train.data.class_weights import balanced_weights
from train.data.sources import Dataset, open_dataset
from train.loop.balance import Balance
from train.loop.request import Request
from train.loop.session import train
from train.recipes import Recipe
from vit_spec import InputError


@pytest.fixture(scope="module")
def rare_zero() -> Dataset:
    """The digits, with ten zeros among the training images."""
    source = open_dataset("digits")
    zeros = np.flatnonzero(source.train.targets == 0)
    others = np.flatnonzero(source.train.targets != 0)
    return replace(source, train=source.train.take(np.sort([*zeros[:10], *others])))


def test_a_run_passes_weights_to_its_engine(rare_zero: Dataset, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def make_engine(*_: Any, **options: Any) -> Any:
        given.update(options)
        raise InputError("enough")

    recipe = Recipe(run=str(tmp_path / "run"), class_weights="balanced")
    with pytest.raises(InputError, match="enough"):
        train(Request("test", recipe, rare_zero, ""), make_engine)
    expected = balanced_weights(rare_zero.train.targets.astype(np.int32), 10, binary=False)
    assert np.array_equal(given["class_weights"], expected) and expected.argmax() == 0


def test_the_table_names_the_rarest_and_the_most_frequent_class(rare_zero: Dataset) -> None:
    targets = rare_zero.train.targets.astype(np.int32)
    recipe = Recipe(class_weights="balanced", sampling="balanced")
    rows = Balance.from_recipe(recipe, rare_zero, "classes", targets).table_rows(rare_zero.classes)
    assert rows["class weights"].startswith("balanced, 0.89") and rows["class weights"].endswith(" to 13.1 (0)")
    assert rows["sampling"].startswith(
        "balanced, about 131 images of each class in an epoch, an image of '0' on average 13.1 times; with"
    )


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "values",
            {"class_weights": "balanced"},
            "--class-weights balanced is for classes and labels, and the task is values",
        ),
        ("labels", {"sampling": "balanced"}, "for data of classes, and the data has labels: give --class-weights balanced"),
        (
            "values",
            {"sampling": "balanced"},
            "--sampling balanced is for data of classes, and the data has values: leave it",
        ),
    ],
)
def test_they_are_refused_where_they_mean_nothing(task: Any, options: Any, message: str, rare_zero: Dataset) -> None:
    source = replace(rare_zero, task=task)
    with pytest.raises(InputError, match=message):
        Balance.from_recipe(Recipe(**options), source, task, np.zeros((5, 10), np.float32))
