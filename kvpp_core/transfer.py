"""One bundle's broadcast over its group, in the mode that `kvpp_core.policy` chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from kvpp_core.device.base import Stream, Work
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.layout import RankLayout
from kvpp_core.policy import History, Mode, blocks_per_message
from kvpp_core.spans import BroadcastSpans, SpanRecorder

__all__ = ["BundleTransfer"]


class BundleTransfer:
    """Broadcasts bundles of one rank's buffer over its group, on one stream.

    ``buffer`` is the rank's whole KV memory, one-dimensional bytes; ``staging`` is memory of the
    same device for packed messages and may be empty. ``spans`` records when its pieces run.
    """

    def __init__(
        self,
        layout: RankLayout,
        buffer: torch.Tensor,
        staging: torch.Tensor,
        group: KvppGroup,
        stream: Stream,
        spans: SpanRecorder | None = None,
    ) -> None:
        if buffer.dim() != 1 or buffer.element_size() != 1 or buffer.numel() < layout.size:
            raise PlanError(
                f"the KV memory must be {layout.size:,} bytes in one dimension, not "
                f"{tuple(buffer.shape)} of {buffer.dtype}"
            )
        self._layout = layout
        self._buffer = buffer
        self._staging = staging
        self._group = group
        self._stream = stream
        self._spans = spans or SpanRecorder()

    def start(self, ordinal: int, mode: Mode, history: History, index: torch.Tensor) -> None:
        """Submit the broadcast of target bundle ``ordinal`` to the stream.

        ``index`` holds the active block ids (int64, on the buffer's device).
        """
        bundle = self._layout.placement.bundles[ordinal]
        spans = BroadcastSpans(self._spans, bundle.layer, self._owner(ordinal), mode)
        if mode is Mode.FULL:
            message = self._bytes(*self._layout.targets[ordinal])
            self._send([message], ordinal, "all blocks", spans, history.num_blocks)
        elif mode is Mode.RUNS:
            self._start_runs(ordinal, history, spans)
        elif mode is Mode.PACKED:
            self._start_packed(ordinal, index, spans)

    def _start_runs(self, ordinal: int, history: History, spans: BroadcastSpans) -> None:
        """All runs at once: no message waits for the end of another."""
        messages = [
            rows[first : first + length].view(-1)
            for rows in self._components(ordinal)
            for first, length in history.runs
        ]
        what = f"{len(history.runs)} runs"
        self._send(messages, ordinal, what, spans, len(history.blocks))

    def _start_packed(self, ordinal: int, index: torch.Tensor, spans: BroadcastSpans) -> None:
        bundle = self._layout.placement.bundles[ordinal]
        per_message = blocks_per_message(bundle, self._staging.numel())
        for ids in index.split(per_message):
            message = self._staging[: len(ids) * bundle.bytes_per_block]
            views = self._staged(ordinal, message, len(ids))
            part = f"{len(ids)} packed blocks"
            what = self._what(ordinal, part)
            if self._layout.placement.owners[ordinal] == self._group.rank:
                gather = spans.timed("pack", _gather(views, ids), message.numel(), len(ids))
                self._stream.run(gather, f"gathering for {what}")
                self._send([message], ordinal, part, spans, len(ids))
            else:
                self._send([message], ordinal, part, spans, len(ids))
                scatter = spans.timed("unpack", _scatter(views, ids), message.numel(), len(ids))
                self._stream.run(scatter, f"scattering {what}")

    def _staged(
        self, ordinal: int, message: torch.Tensor, blocks: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(cache rows, their place in the message) of every component."""
        places, offset = [], 0
        for rows in self._components(ordinal):
            size = blocks * rows.shape[1]
            place = message[offset : offset + size].view(blocks, rows.shape[1])
            places.append(_widened(rows, place))
            offset += size
        return places

    def _components(self, ordinal: int) -> list[torch.Tensor]:
        """Every component of a bundle as (blocks, bytes per block)."""
        components = self._layout.placement.bundles[ordinal].components
        return [
            self._bytes(*self._layout.components[c.name]).view(-1, c.bytes_per_block)
            for c in components
        ]

    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        return self._buffer[offset : offset + size]

    def _send(
        self,
        messages: Sequence[torch.Tensor],
        ordinal: int,
        part: str,
        spans: BroadcastSpans,
        blocks: int,
    ) -> None:
        owner = self._layout.placement.owners[ordinal]

        def launch() -> Work:
            ended = spans.sending(sum(map(torch.numel, messages)), blocks)
            works = [self._group.broadcast(message, owner) for message in messages]
            if ended is None:
                return _Together(works)
            if messages[0].is_cpu:  # nobody may look for long; elsewhere a future is the device's
                _ended(works).add_done_callback(lambda _: ended())
            return _Watched(_Together(works), ended)

        self._stream.collective(launch, self._what(ordinal, part))

    def _owner(self, ordinal: int) -> int:
        """The global rank that keeps a bundle."""
        return self._group.ranks[self._layout.placement.owners[ordinal]]

    def _what(self, ordinal: int, part: str) -> str:
        bundle = self._layout.placement.bundles[ordinal]
        return f"the broadcast of layer {bundle.layer} ({part}) from rank {self._owner(ordinal)}"


class _Together:
    """Several collectives as one Work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._failed = False

    def is_completed(self) -> bool:
        return self._failed or all(work.is_completed() for work in self._works)

    def wait(self, *timeout: Any) -> None:
        for work in self._works:
            try:
                work.wait(*timeout)
            except RuntimeError:
                self._failed = work.is_completed()  # not so when only the time ran out
                raise


class _Watched:
    """A Work that calls ``ended`` whenever it is seen to have ended."""

    def __init__(self, work: Work, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._ended()
        return completed

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        self._ended()


def _ended(works: Sequence[dist.Work]) -> torch.futures.Future[Any]:
    """Done, in a thread of the process group, as soon as all of them have ended."""
    return torch.futures.collect_all([work.get_future() for work in works])


def _widened(rows: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the widest integers that fit: torch scatters int8 rows 6 to 10 times slower.

    A view needs offsets that fit, a device addresses that fit: the storage may start anywhere.
    """
    starts = [(t.data_ptr(), t.storage_offset(), t.stride(0)) for t in (rows, place)]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(start % dtype.itemsize == 0 for start in chain.from_iterable(starts)):
            return rows.view(dtype), place.view(dtype)
    return rows, place


def _gather(
    views: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor
) -> Callable[[], None]:
    def gather() -> None:
        for rows, place in views:
            torch.index_select(rows, 0, ids, out=place)

    return gather


def _scatter(
    views: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor
) -> Callable[[], None]:
    def scatter() -> None:
        for rows, place in views:
            rows.index_copy_(0, ids, place)

    return scatter
