"""The worker class for vLLM on CUDA, over NCCL. Written against vLLM 0.32; not run here.

Two communicators on one device deadlock when their kernels spin on each other in different orders
on different ranks. NCCL gives them one order, that of the host's launches, when
NCCL_LAUNCH_ORDER_IMPLICIT is set before its communicators are made, and only kernels of NCCL keep
it: all-reduce implementations of their own (custom, FlashInfer, symmetric memory) must be off.
"""

from __future__ import annotations

import os

from vllm.v1.worker.gpu_worker import Worker

from kvpp_connectors.engine.worker import KvppWorkerMixin
from kvpp_connectors.log import get_logger

__all__ = ["KvppGpuWorker"]

logger = get_logger(__name__)


class KvppGpuWorker(KvppWorkerMixin, Worker):
    """KVPP on CUDA."""

    def init_device(self) -> None:
        """Order NCCL's launches before the first communicator exists."""
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        self.parallel_config.disable_custom_all_reduce = True
        logger.info("KVPP on CUDA: NCCL launches in host order; all-reduce through NCCL alone")
        super().init_device()
