"""Hundreds of models of other libraries: each checkpoint is read as the function that its library computes, or refused.

`of_timm` and `of_transformers` build models with random weights and save them with their libraries.  `outcomes` reads the
checkpoints through the public API and compares the outputs with the library's in float64.  `tests/peers/test_zoo.py` checks
one model of each distinct configuration, `benchmarks/zoo.py` checks all of them.
"""

import tests.goldens.peers  # noqa: F401  # makes torchvision importable, which both libraries import
