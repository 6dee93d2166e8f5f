"""The data that a model is evaluated on: those of its run, at their old or a new place, or others.

The held-out images of a run are the same only while its data are.  If images were added, a share is drawn anew, and images
that the model was trained on may be among the held-out ones.  So the data are compared with the fingerprint of the run.
"""

from typing import NamedTuple

import numpy as np

from train.data.fingerprint import READ_ERRORS, Fingerprint, resolve_spec
from train.data.sources import TEST_OPTION, Dataset, Examples, open_dataset
from train.inference.model import TrainedModel
from train.loop.saved_run import DATA_FILE
from vit_spec import InputError

MAY_BE_SEEN = "images that it was trained on may be among the held-out ones"


class EvaluatedData(NamedTuple):
    """A data set to evaluate a model on.

    spec: `--data`, or the run's.
    is_own: whether the run was trained on this data set, as it is now or as it was.
    warnings: what is known of held-out images that the model was trained on, a sentence each.
    """

    spec: str
    source: Dataset
    is_own: bool
    warnings: tuple[str, ...]


def open_data(model: TrainedModel, weights: str, spec: str | None, held_out: float | str | None) -> EvaluatedData:
    """Open the data that a command line asks for; by default, those of the run with its held-out images.

    Args:
        model: the model.
        weights: its name, for messages.
        spec: the value of `--data`, if it was given.
        held_out: the value of `--held-out`, if it was given.

    Raises:
        InputError: as for `open_dataset`; the model names no data; or those of its run have changed, and so have the
            held-out images.
    """
    if model.data is None:
        if spec is None:
            raise InputError(f"{weights} does not name its training data: give --data, such as --data digits")
        return EvaluatedData(spec, open_dataset(spec, held_out), False, ())
    recorded, own = _recorded_fingerprint(model), _open_as_run(model, weights, spec)
    difference = None
    if recorded is not None and own is not None:
        difference = recorded.difference(Fingerprint.compute(own, version=recorded.version))
    *place, options = resolve_spec(model.data)
    spec_or_own = spec or model.data
    *given_place, given_options = resolve_spec(spec_or_own)
    is_same_place = given_place == place
    is_own = own is not None and (difference == "" or (is_same_place and given_options == options))
    if own is None or not is_own:
        source = open_dataset(spec_or_own, held_out)
        if is_same_place:
            return EvaluatedData(spec_or_own, source, False, (f"the run was trained on {model.data}: {MAY_BE_SEEN}",))
        shared = 0 if recorded is None else recorded.num_shared(source.held_out)
        warning = f"{shared:,} files of {spec_or_own} are among the data that {weights} was trained on: {MAY_BE_SEEN}"
        return EvaluatedData(spec_or_own, source, False, (warning,) * (shared > 0))
    warnings = []
    if difference:
        changed = f"the data have changed since {weights} was trained ({difference})"
        is_drawn = own.split is None or f"{TEST_OPTION}=" in options
        if is_drawn and spec is None:
            remedy = f"restore them, or give --data {model.data} to score the images that are held out now"
            raise InputError(f"{changed}, so {MAY_BE_SEEN}: {remedy}")
        warnings.append(f"{changed}: {MAY_BE_SEEN}" if is_drawn else changed)
    source = own if held_out is None else open_dataset(spec_or_own, held_out)
    if seen := _num_seen(source, own):
        warnings.append(f"the run was trained on {seen:,} of the {len(source.held_out):,} held-out images")
    return EvaluatedData(spec_or_own, source, True, tuple(warnings))


def _recorded_fingerprint(model: TrainedModel) -> Fingerprint | None:
    """Return the fingerprint of the data that the run was trained on; None for runs of versions that recorded none."""
    if model.run is None:
        return None
    try:
        return Fingerprint.read(model.run / DATA_FILE)
    except FileNotFoundError:
        return None
    except READ_ERRORS as error:
        file = model.run / DATA_FILE
        raise InputError(f"{file} cannot be read ({error}): move it away to evaluate without comparing the data") from None


def _open_as_run(model: TrainedModel, weights: str, spec: str | None) -> Dataset | None:
    """Open data with the held-out images of the run; None if other data than the run's cannot be opened like that."""
    assert model.data is not None
    try:
        return open_dataset(spec or model.data, model.held_out)
    except InputError as error:
        if spec is not None:
            return None
        remedy = "if they are at another place now, give it with --data"
        raise InputError(f"the data that {weights} was trained on cannot be opened ({error}): {remedy}") from None


def _num_seen(source: Dataset, own: Dataset) -> int:
    """Return how many held-out images the run was trained on, of the data set of the run with other held-out images."""
    if source.split is not None:  # another split than that of the training images
        return 0
    if own.split is not None:  # the run was trained on all images of which a share is held out now
        return len(source.held_out)
    return int(np.isin(_rows(source.held_out), _rows(own.train)).sum())


def _rows(examples: Examples) -> np.ndarray:
    return np.arange(len(examples)) if examples.rows is None else examples.rows
