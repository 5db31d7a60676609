"""The errors of the core. Each message says what happened, where, and what was expected."""

from __future__ import annotations

__all__ = [
    "AcquireOrderError",
    "KvppError",
    "LoadFailed",
    "ManifestMismatch",
    "PipelineClosed",
    "PlanError",
    "TransferFailed",
    "TransferTimeout",
]


class KvppError(RuntimeError):
    """Base of every error that kvpp_core raises on purpose."""


class PlanError(KvppError):
    """The caches cannot be placed: wrong sizes, ranks, names, or too little memory."""


class ManifestMismatch(KvppError):
    """The ranks of one group do not agree on what they are about to do."""


class AcquireOrderError(KvppError):
    """A layer was acquired out of order, twice, or not at all."""


class TransferFailed(KvppError):
    """A collective ended with an error: a rank of the group is gone, or its connection is."""


class TransferTimeout(KvppError):
    """A bounded wait for a transfer, a fence or an event ran out."""


class LoadFailed(KvppError):
    """The owner could not load a layer from a KV connector; every rank of the group gets this."""


class PipelineClosed(KvppError):
    """The pipeline was used after close(), or after a step that broke it."""
