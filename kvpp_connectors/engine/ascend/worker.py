"""The worker class for vllm-ascend 0.23 on NPUs, over HCCL. Written against its source; not run.

The group is made with torch.distributed directly (`kvpp_connectors.engine.groups`): vllm-ascend
would give a group of its own kind the communicator of the TP group, and broadcasts would queue up
behind the model's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_ascend.worker.worker import NPUWorker

from kvpp_connectors.engine.ascend.adapter_v023 import Adapter023
from kvpp_connectors.engine.ascend.first_touch import hook_fused_decode
from kvpp_connectors.engine.worker import KvppWorkerMixin

__all__ = ["KvppNpuWorker"]


class _NpuAdapter(Adapter023):
    """With the fused path of decode-only batches, which NPUs alone have."""

    def hook_layers(self, components: Iterable[str], acquire: Callable[[str], None]) -> None:
        from vllm_ascend.device.device_op import DeviceOperator

        super().hook_layers(components, acquire)
        hook_fused_decode(DeviceOperator)


class KvppNpuWorker(KvppWorkerMixin, NPUWorker):
    """KVPP on Ascend."""

    _kvpp_adapter = _NpuAdapter
