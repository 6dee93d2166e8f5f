"""Constants of the optimizers that are not fields of `Optimizer`, for the trainers of both frameworks."""

ADAFACTOR_MAX_DECAY = 0.999  # of the mean squared gradient; arXiv 2106.04560, 3.4
# Adafactor factors an array whose second longest axis has at least this length: big_vision/optax.py, scale_by_adafactor.
MIN_FACTORED_SIZE = 32
MUON_MOMENTUM = 0.95  # of the matrices; arXiv 2502.16982
