"""Checkpoints of other libraries, by the hundred: each is read as the function that its library computes, or refused.

`of_timm` and `of_transformers` build models with random weights and save them as their libraries do; `judging` reads
what they saved through public names and holds it to the library's own output in float64.  `tests/peers/test_zoo.py`
takes one of each distinct configuration, `benchmarks/zoo.py` all of them.
"""

import tests.goldens.peers  # noqa: F401  # mends torchvision, which both libraries import
