"""Durations are converted to steps, and invalid ones are refused."""

import pytest

from train.recipes.durations import duration_in_steps
from vit_spec import InputError

DURATIONS = {
    "90 epochs": 900.0,
    "1epoch": 10.0,
    "2000steps": 2000.0,
    "1e3 examples": 20.0,
    "10%": 50.0,
    "2.5 percent": 12.5,
    "3": 30.0,
    4: 40.0,
    0.5: 5.0,
    "1_000 STEPS": 1000.0,
}


@pytest.mark.parametrize("text", DURATIONS)
def test_a_duration_is_converted_to_steps(text: float | str) -> None:
    assert duration_in_steps(text, default_unit="epochs", batch_size=50, images=500, total=500) == DURATIONS[text]


def test_a_number_alone_may_be_a_share_of_the_run() -> None:
    assert duration_in_steps(0.1, default_unit="share", batch_size=50, images=500, total=500) == 50


INVALID = {
    "many": "not a duration: write, for example, 90epochs, 2000steps, 1e6examples or 10%",
    "": "not a duration",
    "3 epocs": "unknown unit; did you mean 'epochs'?",
    "3 weeks": "unknown unit: steps, epochs, examples or %",
    "-3 steps": "give 0 or more",
    "1e999 steps": "give 0 or more",
    "3 steps 4": "not a duration",
}


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        duration_in_steps(text, default_unit="epochs", batch_size=50, images=500, total=500)
    assert INVALID[text] in str(error.value) and repr(text) in str(error.value)


def test_the_length_of_a_run_cannot_be_a_share_of_the_run() -> None:
    with pytest.raises(InputError, match="give epochs, steps or examples"):
        duration_in_steps("10%", default_unit="epochs", batch_size=50, images=500)
