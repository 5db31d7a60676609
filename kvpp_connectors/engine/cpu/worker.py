"""The worker classes for vLLM on CPU."""

from __future__ import annotations

import gc
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvpp_connectors.engine.cpu import experts, rotary, spin
from kvpp_connectors.engine.cpu.profile import is_sparse
from kvpp_connectors.engine.worker import KvppWorkerMixin
from kvpp_connectors.log import get_logger

__all__ = ["CpuProfileWorker", "KvppCpuWorker"]

logger = get_logger(__name__)


class CpuProfileWorker(CPUWorker):
    """vLLM's CPU worker with the CPU profile: docs/cpu.md."""

    def init_device(self) -> None:
        """Before the queues between engine and rank are made."""
        spin.sleep_soon(self.parallel_config.local_world_size)
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model and refuse to go on if it would rotate wrongly.

        Models without MLA rotate rows of all heads, which vLLM's kernel does rightly.
        """
        if is_sparse(self.model_config):
            from kvpp_connectors.engine.cpu import sparse_mla

            sparse_mla.install(self.compilation_config.mode)
        if self.parallel_config.enable_expert_parallel:
            experts.install()
        super().load_model(load_dummy_weights=load_dummy_weights)
        # Weights that a draft model gave up for the target's leave oneDNN handles behind, in
        # cycles. Collected while Dynamo traces, such a handle calls item() on its fake tensors
        # until the stack overflows.
        gc.collect()
        if not self.model_config.use_mla:
            return
        rotary.check_model(self.model_runner.get_model())
        logger.info("CPU profile: the model's rotary embedding is right on strided inputs")

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the caches, and what a later pipeline stage receives its input in.

        vLLM allocates that in a dummy run, which the CPU worker leaves out in eager mode.
        """
        super().initialize_from_config(kv_cache_config)
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            logger.info("CPU profile: allocating the stage's intermediate tensors")
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )


class KvppCpuWorker(KvppWorkerMixin, CpuProfileWorker):
    """KVPP on CPU, over gloo."""
