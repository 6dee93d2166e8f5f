"""Memory, communication and expected efficiency of training on 8 to 256 devices: see `benchmarks.scaling.__main__`."""
