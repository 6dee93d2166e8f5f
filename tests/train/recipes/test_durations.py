"""How long something takes, in steps, as a person says it."""

import pytest

from train.recipes.durations import steps
from vit_spec import InputError

SAID = {
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


@pytest.mark.parametrize("text", SAID)
def test_a_duration_comes_to_steps(text: float | str) -> None:
    assert steps(text, alone="epochs", batch_size=50, images=500, total=500) == SAID[text]


def test_a_number_alone_may_be_a_share_of_the_run() -> None:
    assert steps(0.1, alone="share", batch_size=50, images=500, total=500) == 50


WRONG = {
    "many": "no duration: write such as 90epochs, 2000steps, 1e6examples or 10%",
    "": "no duration",
    "3 epocs": "unknown unit; did you mean 'epochs'?",
    "3 weeks": "unknown unit: steps, epochs, examples or %",
    "-3 steps": "give 0 or more",
    "1e999 steps": "give 0 or more",
    "3 steps 4": "no duration",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_duration_is_told(text: str) -> None:
    with pytest.raises(InputError) as told:
        steps(text, alone="epochs", batch_size=50, images=500, total=500)
    assert WRONG[text] in str(told.value) and repr(text) in str(told.value)


def test_a_run_is_not_as_long_as_a_share_of_itself() -> None:
    with pytest.raises(InputError, match="give epochs, steps or examples"):
        steps("10%", alone="epochs", batch_size=50, images=500)
