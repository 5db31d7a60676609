"""The worker class for vllm-ascend 0.23 on NPUs, over HCCL. Written against its source; not run.

The group is made with torch.distributed directly (`kvpp_connectors.engine.groups`): vllm-ascend
would give a group of its own kind the communicator of the TP group, and broadcasts would queue up
behind the model's collectives.
"""

from __future__ import annotations

from vllm_ascend.worker.worker import NPUWorker

from kvpp_connectors.engine.ascend.adapter_v023 import KvppWorkerMixin023
from kvpp_connectors.engine.ascend.first_touch import hook_fused_decode

__all__ = ["KvppNpuWorker"]


class KvppNpuWorker(KvppWorkerMixin023, NPUWorker):
    """KVPP on Ascend."""

    def _kvpp_hook(self) -> None:
        from vllm_ascend.device.device_op import DeviceOperator

        super()._kvpp_hook()
        hook_fused_decode(DeviceOperator)
