"""KVPP in a vLLM worker: a mixin over the platform's worker class.

Four seams: the memory that the worker reports, the placement of its caches, the first touch of
each layer, and the begin and end of a step. Everything else stays vLLM's. What is done there
stands in `kvpp_connectors.engine.rank` and `kvpp_connectors.engine.step_driver`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kvpp_connectors.engine.adapter import Adapter032, VllmAdapter
from kvpp_connectors.engine.rank import KvppRank
from kvpp_connectors.launch.validate import validate
from kvpp_connectors.vllm_api.scheduler_output import read_step
from kvpp_core.policy import BroadcastPolicy
from kvpp_core.trace import Recording

__all__ = ["KvppWorkerMixin"]


class KvppWorkerMixin:
    """Mix in before a subclass of vLLM's Worker."""

    vllm_config: Any
    device: torch.device

    _kvpp_adapter: ClassVar[type[VllmAdapter]] = Adapter032
    _kvpp: KvppRank | None = None

    def init_device(self) -> None:
        """Check launch and seams and make the group before anything costly is done.

        Raises:
            LaunchRefused: what vLLM made of the launch breaks rules, or this vLLM lacks something
                that KVPP hooks.
        """
        options = validate(self.vllm_config).accepted().settings.options
        super().init_device()  # type: ignore[misc]
        self._kvpp = KvppRank(self, self._kvpp_adapter(self), options)

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's planner: see `KvppRank.budget`."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return self._kvpp_rank.budget(available)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate by the KVPP layout: see `KvppRank.lay_out` and `KvppRank.start`."""
        super().initialize_from_config(self._kvpp_rank.lay_out(kv_cache_config))  # type: ignore[misc]
        self._kvpp_rank.start()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step; it begins in the model's forward."""
        driver = self._kvpp_rank.driver
        assert driver is not None
        driver.announce(read_step(scheduler_output))
        try:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        except BaseException:
            driver.abort()
            raise
        driver.end()
        return output

    def shutdown(self) -> None:
        """Leave nothing in flight, then let vLLM shut down."""
        kvpp, self._kvpp = self._kvpp, None
        if kvpp is not None:
            kvpp.close()
        super().shutdown()  # type: ignore[misc]

    # For ``collective_rpc``, which reaches every rank between the same two steps.

    def kvpp_stats(self) -> dict[str, Any]:
        """This rank's counters: steps, broadcasts, bytes, and exposed waits in seconds."""
        return self._kvpp_rank.stats()

    def kvpp_layout(self) -> dict[str, Any]:
        """This rank's layout: owned layers, blocks, and bytes per block."""
        return self._kvpp_rank.describe_layout()

    def kvpp_set_broadcast(self, policy: str) -> None:
        """Change the broadcast policy between steps, to measure it."""
        driver = self._kvpp_rank.driver
        assert driver is not None
        driver.pipeline.set_policy(BroadcastPolicy(policy))

    def kvpp_trace_start(self, steps: int) -> None:
        """Record when what runs, of the last ``steps`` steps; forget what was recorded before."""
        self._kvpp_rank.spans.start(steps)

    def kvpp_trace_take(self) -> Recording:
        """What was recorded since ``kvpp_trace_start``; recording ends."""
        return self._kvpp_rank.spans.take()

    @property
    def _kvpp_rank(self) -> KvppRank:
        assert self._kvpp is not None, "init_device has not run, or shutdown has"
        return self._kvpp
