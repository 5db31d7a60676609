"""Faults for tests, mixed into the worker by --worker-extension-cls."""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerFaults"]


class WorkerFaults:
    """Methods that a test calls through ``collective_rpc``. ``self`` is the worker."""

    def fault_stop_broadcasts(self, _: Any = None) -> None:
        """Let every transfer do nothing from now on."""
        pipeline = self._kvpp.driver.pipeline  # type: ignore[attr-defined]
        pipeline._transfer.start = lambda *args: None

    def fault_decode_here(self) -> None:
        """Let decode tokens attend to this rank's memory, as if their history had been sent."""
        driver = self._kvpp.driver  # type: ignore[attr-defined]
        begin = driver.begin

        def begin_here() -> None:
            begin()
            if driver._step is not None:
                driver._step.decode_tokens = None

        driver.begin = begin_here

    def fault_stop_component(self, suffix: str) -> None:
        """Leave components whose name ends so out of every transfer in parts from now on."""
        transfer = self._kvpp.driver.pipeline._transfer  # type: ignore[attr-defined]
        bundles, original = transfer._layout.placement.bundles, transfer._components
        transfer._components = lambda ordinal: [
            rows
            for rows, component in zip(original(ordinal), bundles[ordinal].components, strict=True)
            if not component.name.endswith(suffix)
        ]

    def fault_flip_bit(self, block: int, suffix: str = "", bit: int = 0) -> None:
        """Flip one bit of one byte that rank 0 keeps of ``block``, in its first owned layer.

        The component is the layer's first whose name ends with ``suffix``, the byte the last of
        the block's first float32: bits 0 to 6 are of its exponent.
        """
        pipeline = self._kvpp.driver.pipeline  # type: ignore[attr-defined]
        placement = pipeline.layout.placement
        if placement.rank == 0:
            components = placement.bundles[placement.owned[0]].components
            component = next(c for c in components if c.name.endswith(suffix))
            offset = pipeline.layout.components[component.name].offset
            pipeline._buffer[offset + block * component.bytes_per_block + 3] ^= 1 << bit

    def observe_history(self, _: Any = None) -> list[str]:
        """Requests whose blocks this rank mirrors; none without KVPP."""
        kvpp = getattr(self, "_kvpp", None)
        return sorted(kvpp.driver.history.blocks) if kvpp is not None else []

    def observe_allocation(self, _: Any = None) -> dict[str, int]:
        """Bytes under the caches of this rank, as torch sees them."""
        layers = self.compilation_config.static_forward_context  # type: ignore[attr-defined]
        storages = {
            layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache.untyped_storage().nbytes()
            for layer in layers.values()
            if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.numel()
        }
        return {"buffers": len(storages), "bytes": sum(storages.values())}

    def observe_blocks(self, blocks: list[int]) -> list[dict[str, bytes]]:
        """What this rank's caches hold of some blocks, by layer name; without KVPP."""
        layers = self.compilation_config.static_forward_context  # type: ignore[attr-defined]
        caches = {
            name: layer.kv_cache
            for name, layer in layers.items()
            if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.numel()
        }
        return [
            {name: cache[block].numpy().tobytes() for name, cache in caches.items()}
            for block in blocks
        ]
