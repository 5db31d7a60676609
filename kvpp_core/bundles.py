"""The KV cache of one transformer layer: its components, and their bundle.

Section 2.1 of the specification: a layer's main KV, indexer KV and quantization components form
one bundle with a single owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvpp_core.errors import PlanError

__all__ = ["Component", "LayerBundle", "group_bundles", "largest_bytes_per_block"]


@dataclass(frozen=True, slots=True, order=True)
class Component:
    """One cache tensor of a layer, by the engine's name for it."""

    name: str
    bytes_per_block: int

    def __post_init__(self) -> None:
        if self.bytes_per_block <= 0:
            raise PlanError(
                f"component {self.name!r} has {self.bytes_per_block} bytes per block; "
                "expected a positive number"
            )


@dataclass(frozen=True, slots=True)
class LayerBundle:
    """All components of transformer layer ``layer`` (the model-wide index), in layout order."""

    layer: int
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        if not self.components:
            raise PlanError(f"layer {self.layer} has no cache components")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise PlanError(f"layer {self.layer} names a component twice: {names}")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all components together."""
        return sum(component.bytes_per_block for component in self.components)


def group_bundles(components: Iterable[tuple[int, Component]]) -> tuple[LayerBundle, ...]:
    """Group (layer index, component) pairs into bundles, sorted by layer and component name.

    The result does not depend on the order of the input, so that every rank gets the same.

    Raises:
        PlanError: a component name occurs in two layers.
    """
    by_layer: defaultdict[int, list[Component]] = defaultdict(list)
    seen: dict[str, int] = {}
    for layer, component in components:
        if component.name in seen:
            raise PlanError(
                f"component {component.name!r} belongs to layer {seen[component.name]} "
                f"and to layer {layer}"
            )
        seen[component.name] = layer
        by_layer[layer].append(component)
    return tuple(LayerBundle(layer, tuple(sorted(by_layer[layer]))) for layer in sorted(by_layer))


def largest_bytes_per_block(bundles: Iterable[LayerBundle]) -> int:
    """Bytes per block of the largest bundle, 0 when there is none."""
    return max((bundle.bytes_per_block for bundle in bundles), default=0)
