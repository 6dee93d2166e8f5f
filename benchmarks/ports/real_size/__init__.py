"""Models of the sizes at which people port them, in Flax and in PyTorch."""
