"""Peak dense bfloat16 FLOP/s of devices, from their makers' data sheets."""

PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "TPU v4": 275e12, "TPU v5 lite": 197e12}


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device by the name that its framework gives it; None if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
