"""Streams and events: one small protocol, implemented for the CPU and for accelerators."""

from kvpp_core.device.accelerator import AcceleratorDevice
from kvpp_core.device.base import Device, Event, Stream, Work
from kvpp_core.device.cpu import CpuDevice, CpuStream

__all__ = [
    "AcceleratorDevice",
    "CpuDevice",
    "CpuStream",
    "Device",
    "Event",
    "Stream",
    "Work",
    "make_device",
]


def make_device(device_type: str, timeout: float) -> Device:
    """The device implementation for torch's ``device_type``; waits are bounded by ``timeout`` s."""
    return CpuDevice(timeout) if device_type == "cpu" else AcceleratorDevice(device_type, timeout)
