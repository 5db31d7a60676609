"""What one process knows of itself, for those of its parts that vLLM makes apart from one another.

vLLM creates the worker and the connector independently; the worker puts down here what it laid out.
"""

from __future__ import annotations

from kvpp_core.layout import RankLayout

__all__ = ["KvppFacts", "publish_layout", "published_layout"]


class KvppFacts:
    """The KVPP layout of this process's worker; None without KVPP."""

    def __init__(self) -> None:
        self.layout: RankLayout | None = None


_FACTS = KvppFacts()


def publish_layout(layout: RankLayout | None) -> None:
    """The worker's word, before connectors are made."""
    _FACTS.layout = layout


def published_layout() -> RankLayout | None:
    """The layout of this process's worker, or None without KVPP."""
    return _FACTS.layout
