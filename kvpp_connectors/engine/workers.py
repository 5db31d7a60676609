"""KVPP's worker class for each device type, by name: vLLM imports it in the worker's process."""

from __future__ import annotations

from collections.abc import Mapping

from kvpp_connectors.vllm_api.check import is_v023

__all__ = ["KVPP_WORKERS", "KVPP_WORKERS_023", "PROFILE_WORKER", "installed_workers"]

KVPP_WORKERS = {
    "cpu": "kvpp_connectors.engine.cpu.worker.KvppCpuWorker",
    "cuda": "kvpp_connectors.engine.cuda.KvppGpuWorker",
}
KVPP_WORKERS_023 = {"npu": "kvpp_connectors.engine.ascend.worker.KvppNpuWorker"}  # on vLLM 0.23
PROFILE_WORKER = "kvpp_connectors.engine.cpu.worker.CpuProfileWorker"  # without KVPP


def installed_workers() -> Mapping[str, str]:
    """Those of the installed vLLM."""
    return KVPP_WORKERS_023 if is_v023() else KVPP_WORKERS
