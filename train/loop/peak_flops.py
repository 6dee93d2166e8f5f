"""Peak dense bfloat16 FLOP/s of devices, from their makers' data sheets."""

import re

PEAKS = {
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "GH200": 989.4e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "A100": 312e12,
    "A100 PCIe": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
}
_SAME_PEAK = re.compile(r"NVIDIA|\d+GB?|SXM\d?|HBM3e?")  # words of a name that do not tell devices of PEAKS apart


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a device by the name that its framework gives it; None if it is not known.

    A part of a device, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb", has a name that is not known.
    """
    words = re.split("[ -]", device.replace("PCIE", "PCIe"))  # as in "NVIDIA A100-PCIE-40GB"
    return PEAKS.get(" ".join(word for word in words if not _SAME_PEAK.fullmatch(word)))
