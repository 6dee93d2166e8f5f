"""Peak rates of devices, in dense bfloat16 operations a second, as their makers' data sheets state them."""

PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "TPU v4": 275e12, "TPU v5 lite": 197e12}


def peak_rate(device: str) -> float | None:
    """Return the peak rate of a device by the name that its framework gives it; None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
