"""One bundle's broadcast over its group, in the mode that `kvpp_core.policy` chose, and the staging
memory that packs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from kvpp_core.device.base import Stream, Work
from kvpp_core.errors import PlanError
from kvpp_core.group import KvppGroup
from kvpp_core.history import History
from kvpp_core.layout import RankLayout
from kvpp_core.policy import Mode, blocks_per_message
from kvpp_core.trace import BroadcastSpans, SpanRecorder

__all__ = ["BundleTransfer", "allocate_staging"]


_SLICES, _SLICE_BYTES = 4, 2 << 20  # at most so many, of at least so much

_Views = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some of the active blocks: their ids and their packed message."""

    ids: torch.Tensor
    message: torch.Tensor
    views: _Views

    def gather(self) -> None:
        """Copy the blocks into the message."""
        for rows, place in self.views:
            torch.index_select(rows, 0, self.ids, out=place)

    def scatter(self) -> None:
        """Copy the message into the same blocks."""
        for rows, place in self.views:
            rows.index_copy_(0, self.ids, place)


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
        spans = BroadcastSpans(self._spans, bundle.layer, self.owner(ordinal), mode)
        if mode is Mode.FULL:
            message = self._bytes(*self._layout.targets[ordinal])
            self._send([message], ordinal, "all blocks", spans, history.num_blocks)
        elif mode is Mode.RUNS:
            self._start_runs(ordinal, history, spans)
        elif mode is Mode.PACKED:
            self._start_packed(ordinal, index, spans)

    def _start_runs(self, ordinal: int, history: History, spans: BroadcastSpans) -> None:
        """Submit all runs at once: no message waits for the end of another."""
        messages = [
            rows[first : first + length].view(-1)
            for rows in self._components(ordinal)
            for first, length in history.runs
        ]
        what = f"{len(history.runs)} runs"
        self._send(messages, ordinal, what, spans, len(history.blocks))

    def _start_packed(self, ordinal: int, index: torch.Tensor, spans: BroadcastSpans) -> None:
        bundle = self._layout.placement.bundles[ordinal]
        owner = self._layout.placement.owners[ordinal]
        per_message = blocks_per_message(bundle, self._staging.numel())
        for ids in index.split(per_message):
            slices = self._slices(ordinal, ids)
            what = self._what(ordinal, f"{len(ids)} packed blocks")
            if owner == self._group.rank:
                self._stream.collective(partial(self._pack, slices, owner, spans), what)
            else:
                self._unpack(slices, owner, spans, what)

    def _pack(self, slices: Sequence[_Slice], owner: int, spans: BroadcastSpans) -> Work:
        """Gather each slice while the one before is sent."""
        works = []
        for piece in slices:
            spans.timed("pack", piece.gather, piece.message.numel(), len(piece.ids))()
            works.append(self._launch([piece.message], owner, spans, len(piece.ids)))
        return _Together(works)

    def _unpack(
        self, slices: Sequence[_Slice], owner: int, spans: BroadcastSpans, what: str
    ) -> None:
        """Receive all slices; scatter each while the next ones arrive."""
        works: list[Work] = []

        def receive() -> Work:
            works.extend(
                self._launch([piece.message], owner, spans, len(piece.ids)) for piece in slices
            )
            return works[0]

        self._stream.collective(receive, what)
        for number, piece in enumerate(slices):
            if number:
                self._stream.collective(partial(works.__getitem__, number), what)
            scatter = spans.timed("unpack", piece.scatter, piece.message.numel(), len(piece.ids))
            self._stream.run(scatter, f"scattering {what}")

    def _slices(self, ordinal: int, ids: torch.Tensor) -> list[_Slice]:
        """The slices in which staging memory is sent; the same on every rank."""
        bundle = self._layout.placement.bundles[ordinal]
        total = len(ids) * bundle.bytes_per_block
        count = min(max(total // _SLICE_BYTES, 1), _SLICES)
        slices, offset = [], 0
        for part in ids.split(-(-len(ids) // count)):
            message = self._staging[offset : offset + len(part) * bundle.bytes_per_block]
            slices.append(_Slice(part, message, self._staged(ordinal, message, len(part))))
            offset += message.numel()
        return slices

    def _staged(self, ordinal: int, message: torch.Tensor, blocks: int) -> _Views:
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
        launch = partial(self._launch, messages, owner, spans, blocks)
        self._stream.collective(launch, self._what(ordinal, part))

    def _launch(
        self, messages: Sequence[torch.Tensor], owner: int, spans: BroadcastSpans, blocks: int
    ) -> Work:
        """Start the broadcasts of ``messages``, from group rank ``owner``."""
        ended = spans.sending(sum(map(torch.numel, messages)), blocks)
        works = [self._group.broadcast(message, owner) for message in messages]
        if ended is None:
            return _Together(works)
        if messages[0].is_cpu:  # polls may come late; on a device a future is the device's
            _ended(works).add_done_callback(lambda _: ended())
        return _Watched(_Together(works), ended)

    def owner(self, ordinal: int) -> int:
        """The global rank that keeps a target bundle."""
        return self._group.ranks[self._layout.placement.owners[ordinal]]

    def _what(self, ordinal: int, part: str) -> str:
        bundle = self._layout.placement.bundles[ordinal]
        return f"the broadcast of layer {bundle.layer} ({part}) from rank {self.owner(ordinal)}"


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
                self._failed = work.is_completed()  # not if only the timeout expired
                raise


class _Watched:
    """A Work that calls ``ended`` whenever it is found to have ended."""

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


def allocate_staging(size: int, device: torch.device | str, alignment: int = 1) -> torch.Tensor:
    """``size`` bytes, every page of which is there: uint8 (size,), contiguous, from an address that
    is a multiple of ``alignment`` bytes.

    The kernel provides pages of zeroed memory at their first write. A server with such staging
    would grow under load, past what was measured at start-up, and could be killed for it instead
    of refused at start.
    """
    memory = torch.empty(size + alignment - 1, dtype=torch.uint8, device=device).fill_(0)
    start = -memory.data_ptr() % alignment
    return memory[start : start + size]
