"""The platforms that launches are judged for, and where KVPP has a worker."""

from __future__ import annotations

from enum import StrEnum

from kvpp_connectors.vllm_api.check import is_v023

__all__ = [
    "KVPP_DEVICES",
    "KVPP_DEVICES_023",
    "PLATFORM_WORKERS",
    "Platform",
    "installed_devices",
]


class Platform(StrEnum):
    """A platform by the name of its vLLM; the value of `device_type` is vLLM's own."""

    CPU = "cpu"
    CUDA = "cuda"
    ASCEND = "ascend"

    @property
    def device_type(self) -> str:
        """As in vLLM's device configuration."""
        return "npu" if self is Platform.ASCEND else self.value


KVPP_DEVICES: tuple[str, ...] = ("cpu", "cuda")
KVPP_DEVICES_023: tuple[str, ...] = ("npu",)  # on vLLM 0.23
PLATFORM_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
    "vllm_ascend.worker.worker.NPUWorker",
)


def installed_devices() -> tuple[str, ...]:
    """The device types that KVPP has a worker for, on the installed vLLM."""
    return KVPP_DEVICES_023 if is_v023() else KVPP_DEVICES
