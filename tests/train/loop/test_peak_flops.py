"""The peaks of devices, by names that PyTorch and JAX give them."""

import pytest

from train.loop.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA GH200 144G HBM3e", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
    ],
)
def test_each_variant_of_a_device_has_its_own_peak(device: str, peak: float) -> None:
    assert peak_flops(device) == peak


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA RTX A1000",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-10C",
        "NVIDIA H20",
        "TPU v4 lite",
        "TPU v5",
        "cpu",
    ],
)
def test_parts_of_devices_and_other_devices_have_no_known_peak(device: str) -> None:
    assert peak_flops(device) is None
