"""benchmarks.ports: declared pairs, and faults planted in the code of models."""

import inspect
import random

import pytest

jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
import numpy as np

from benchmarks.ports.declaration import Pair, of_linen
from benchmarks.ports.mutator import Executed, draw, planted
from benchmarks.ports.pairs import sources
from benchmarks.ports.verdicts import judge
from tests import pairs_of_models

FILE = inspect.getsourcefile(pairs_of_models)


def executed_lines(function) -> Executed:
    """Return all lines of a function, as if they had been executed."""
    lines, first = inspect.getsourcelines(function)
    out = Executed()
    for line in range(first, first + len(lines)):
        out.lines[FILE][line].add("")
    return out


OF_CONV_NET = executed_lines(pairs_of_models.ConvNet.__call__)


def build():
    model, module = pairs_of_models.ConvNet(), pairs_of_models.torch_conv_net()
    images = np.random.default_rng(0).standard_normal((2, 8, 8, 2)).astype(np.float32)
    return of_linen(model, module, images, input_axes="b y x c <-> b c y x")


def test_names_of_pairs_are_unique():
    names = [pair.name for source in sources() for pair in source]
    assert len(names) == len(set(names))


def test_faults_are_the_same_for_a_seed():
    first, second = (list(draw(OF_CONV_NET, random.Random("seed"))) for _ in range(2))
    assert first == second and len(first) > 10


def test_a_fault_keeps_file_and_line_numbers():
    function = inspect.unwrap(pairs_of_models.ConvNet.__call__)
    original = function.__code__
    candidate = next(draw(OF_CONV_NET, random.Random(0)))
    with planted(candidate, OF_CONV_NET) as fault:
        mutated = function.__code__
        assert mutated is not original and mutated.co_filename == FILE and fault.line in OF_CONV_NET.lines[FILE]
        assert {line for *_, line in mutated.co_lines()} == {line for *_, line in original.co_lines()}
    assert function.__code__ is original


def test_a_mutant_of_a_flax_model_is_rejected_at_its_line():
    code = ("tests.pairs_of_models",)
    pair = Pair("tests/conv_net", "", "", build, code, code)
    right, *faults = judge(pair, 1, 0)
    assert right["passed"] and right["automatic"], right
    [fault] = faults
    assert fault["side"] == "flax" and fault["change"] > 1e-9
    assert not fault["passed"] and fault["region_hit"], fault
