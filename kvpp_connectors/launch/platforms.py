"""The platforms that launches are judged for, and KVPP's worker class on each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from kvpp_connectors.vllm_api.check import is_v023

__all__ = [
    "KVPP_WORKERS",
    "KVPP_WORKERS_023",
    "PLATFORM_WORKERS",
    "Platform",
    "installed_workers",
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


KVPP_WORKERS = {
    "cpu": "kvpp_connectors.engine.cpu.worker.KvppCpuWorker",
    "cuda": "kvpp_connectors.engine.cuda.KvppGpuWorker",
}
KVPP_WORKERS_023 = {"npu": "kvpp_connectors.engine.ascend.worker.KvppNpuWorker"}  # on vLLM 0.23
PLATFORM_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
    "vllm_ascend.worker.worker.NPUWorker",
)


def installed_workers() -> Mapping[str, str]:
    """KVPP's worker class for each device type of the installed vLLM."""
    return KVPP_WORKERS_023 if is_v023() else KVPP_WORKERS
