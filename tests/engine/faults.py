"""Faults for tests, mixed into the worker by --worker-extension-cls."""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerFaults"]


class WorkerFaults:
    """Methods that a test calls through ``collective_rpc``. ``self`` is the worker."""

    def fault_stop_broadcasts(self, _: Any = None) -> None:
        """Let every transfer do nothing from now on."""
        pipeline = self._kvpp_pipeline  # type: ignore[attr-defined]
        pipeline._transfer.start = lambda *args: None

    def fault_flip_byte(self, block: int) -> int:
        """Flip one bit of the exponent of one value that this rank's first owned layer keeps.

        Returns the layer's index, -1 when this rank owns nothing.
        """
        pipeline = self._kvpp_pipeline  # type: ignore[attr-defined]
        placement = pipeline.layout.placement
        if not placement.owned:
            return -1
        bundle = placement.bundles[placement.owned[0]]
        component = bundle.components[0]
        offset = pipeline.layout.components[component.name].offset
        pipeline._buffer[offset + block * component.bytes_per_block + 3] ^= 0x40
        return int(bundle.layer)

    def fault_raise_in_layer(self, layer: str) -> None:
        """Raise in the middle of the next forward, at the given layer, on every rank."""
        runner = self.model_runner  # type: ignore[attr-defined]
        module = runner.get_model().get_submodule(layer)

        def fail(*args: Any) -> None:
            handle.remove()
            raise RuntimeError(f"injected fault at {layer}")

        handle = module.register_forward_pre_hook(fail)

    def fault_missing_manifest(self, _: Any = None) -> str:
        """The digest of this rank's manifest."""
        return str(self.kvpp_layout()["manifest"])  # type: ignore[attr-defined]

    def observe_allocation(self, _: Any = None) -> dict[str, int]:
        """Bytes under the caches of this rank, as torch sees them."""
        layers = self.compilation_config.static_forward_context  # type: ignore[attr-defined]
        storages = {
            layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache.untyped_storage().nbytes()
            for layer in layers.values()
            if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.numel()
        }
        return {"buffers": len(storages), "bytes": sum(storages.values())}
