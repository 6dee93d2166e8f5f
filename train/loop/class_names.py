"""Names of classes, labels or values: the outputs of a classifier that they belong to, and names that differ."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from train.recipes import Task
from vit_spec import InputError
from vit_spec.printable import is_in_other_form

SINGULAR: dict[Task, str] = {"classes": "class", "labels": "label", "values": "value"}


def match_outputs(
    model: str, labels: Sequence[str] | None, num_outputs: int, task: Task, names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the output for each name, (names,).

    Outputs without names are those of the data, in its order, and so are outputs with the same names in the same order.

    Args:
        model: the model in messages, such as "the head".
        labels: the names of its outputs; None if they are not known.
        num_outputs: how many it has.
        task: what they are.
        names: those of the data.

    Raises:
        InputError: there is no output for a name, or there are several; or outputs without names are not as many.
    """
    if labels is None:
        if num_outputs != len(names):
            raise InputError(f"{model} has {num_outputs} outputs, and the data has {len(names)} {task}")
        return np.arange(len(names))
    if tuple(labels) == tuple(names):
        return np.arange(len(names))
    times, wanted = Counter(labels), Counter(names)
    if missing := [name for name in names if name not in times]:
        has_not = "has in another Unicode form (rename it)" if is_in_other_form(missing[0], labels) else "does not have"
        raise InputError(f"the data has the {SINGULAR[task]} {missing[0]!r}, which {model} {has_not}")
    if twice := [name for name in names if times[name] > 1 or wanted[name] > 1]:
        raise InputError(f"{twice[0]!r} names several {task}, so {model} cannot be matched by names")
    index = {label: i for i, label in enumerate(labels)}
    return np.array([index[name] for name in names])


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that all differ: a repeated one has its number behind it, as in "crane", "crane (2)".

    A number is skipped if another class has the name with that number.
    """
    taken, seen, unique = set(names), Counter[str](), list[str]()
    for name in names:
        seen[name] += 1
        new = name
        while seen[name] > 1 and (new := f"{name} ({seen[name]})") in taken:
            seen[name] += 1
        taken.add(new)
        unique.append(new)
    return tuple(unique)
