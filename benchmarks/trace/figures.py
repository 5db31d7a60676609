"""Figures of a run's spans: times of each layer, and the parts of a step's waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpp_core.trace import Lane, Recording, Span, StepSpans

__all__ = [
    "PARTS",
    "ExchangeFigures",
    "LayerFigures",
    "RankFigures",
    "TracedStep",
    "by_kind",
    "exchanges",
    "layers",
    "ranks",
]

# Parts of a wait, in the order in which they happen.
PARTS = ("load", "owner", "transport", "unpack", "rest")
_LOADING = " that loads"


@dataclass(frozen=True)
class TracedStep:
    """One step that used layers of other ranks, as recorded by all ranks."""

    number: int
    ranks: tuple[StepSpans, ...]

    @cached_property
    def whole(self) -> tuple[Span, ...]:
        """The span of the whole step, by rank."""
        return tuple(_whole(step) for step in self.ranks)

    @cached_property
    def kind(self) -> str:
        """Prefill or decode, and whether layers were loaded."""
        loads = any(
            span.lane is Lane.LOAD and span.layer is not None
            for step in self.ranks
            for span in step.spans
        )
        return self.whole[0].name + (_LOADING if loads else "")

    @cached_property
    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(span.seconds for span in self.whole)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that were waited for."""
        return tuple(wait.layer for wait in self.find(0, Lane.WAIT) if wait.layer is not None)

    def find(
        self, rank: int, lane: Lane, layer: int | None = None, name: str | None = None
    ) -> list[Span]:
        """A rank's spans in the order in which they began."""
        found = [
            span
            for span in self.ranks[rank].spans
            if span.lane is lane and layer in (None, span.layer) and name in (None, span.name)
        ]
        return sorted(found, key=lambda span: span.begin)

    def owner(self, layer: int) -> int:
        """The layer's owner: a rank, an index of ``ranks``."""
        return int(self.find(0, Lane.WAIT, layer)[0].facts["owner"])

    def transport(self, layer: int) -> float:
        """Seconds from the owner's first byte to the last rank's last one, without packing."""
        sends = [self.find(rank, Lane.BROADCAST, layer, "send") for rank in range(len(self.ranks))]
        ns = 0
        for first, *every in zip(sends[self.owner(layer)], *sends, strict=True):
            ns += max(send.end for send in every) - first.begin
        return ns / 1e9

    def waited(self, rank: int) -> dict[str, float]:
        """Seconds that a rank waited in this step, by PARTS."""
        total = dict.fromkeys(PARTS, 0.0)
        for wait in self.find(rank, Lane.WAIT):
            for part, seconds in self._split(rank, wait).items():
                total[part] += seconds
        return total

    def _split(self, rank: int, wait: Span) -> dict[str, float]:
        layer = wait.layer
        assert layer is not None
        owner = self.owner(layer)
        loads = [load.end for load in self.find(owner, Lane.LOAD, layer)]
        loaded = min(max([wait.begin, *loads]), wait.end)
        pairs = list(
            zip(
                self.find(rank, Lane.BROADCAST, layer, "send"),
                self.find(owner, Lane.BROADCAST, layer, "send"),
                strict=True,
            )
        )

        def within(begin: int, end: int) -> float:
            return max(0, min(end, wait.end) - max(begin, loaded)) / 1e9

        unpacks = self.find(rank, Lane.BROADCAST, layer, "unpack")
        packs = self.find(rank, Lane.BROADCAST, layer, "pack")
        parts = {
            "load": (loaded - wait.begin) / 1e9,
            "owner": sum(within(own.begin, min(its.begin, own.end)) for own, its in pairs)
            + sum(within(pack.begin, pack.end) for pack in packs),
            "transport": sum(within(max(own.begin, its.begin), own.end) for own, its in pairs),
            "unpack": sum(within(unpack.begin, unpack.end) for unpack in unpacks),
        }
        return parts | {"rest": wait.seconds - sum(parts.values())}


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Median seconds of one layer over steps of one kind."""

    layer: int
    owner: int  # rank
    compute: float  # over all ranks
    pack: float
    transport: float
    unpack: float
    owner_waits: float
    others_wait: float  # the slowest of them

    @property
    def broadcast(self) -> float:
        """Seconds of the whole broadcast, which computing must hide."""
        return self.pack + self.transport + self.unpack


@dataclass(frozen=True, slots=True)
class ExchangeFigures:
    """Median seconds of one layer's decode at its owner over steps of one kind."""

    layer: int
    owner: int  # rank
    queries: float  # the slowest rank's: from its call until it has all heads
    attention: float  # the owner's, for all heads
    results: float  # the owner's: the others wait for its attention first
    whole: float  # from the first rank's call to the last rank's result


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's steps of one kind: median seconds, and shares of all of them together."""

    rank: int
    steps: int
    step: float  # s
    waits: float  # s
    share: float  # of the steps' time that was waiting
    launch: float  # of the steps' time in which the forward's thread started broadcasts
    parts: dict[str, float]  # of the waits, by PARTS


def by_kind(recordings: Sequence[Recording], lane: Lane = Lane.WAIT) -> dict[str, list[TracedStep]]:
    """The steps that every rank has kept, by their kind.

    ``lane`` selects them: WAIT for steps that broadcast, EXCHANGE for decode at the owner.
    """
    kinds: dict[str, list[TracedStep]] = {}
    for step in _steps(recordings, lane):
        kinds.setdefault(step.kind, []).append(step)
    return kinds


def layers(steps: Sequence[TracedStep]) -> list[LayerFigures]:
    """Figures of each layer over steps of one kind."""
    first = steps[0]
    ranks = range(len(first.ranks))

    def median(figure: Callable[[TracedStep], float]) -> float:
        return statistics.median(figure(step) for step in steps)

    def figures(layer: int) -> LayerFigures:
        owner = first.owner(layer)

        def longest(lane: Lane, name: str, which: Iterable[int]) -> float:
            return median(lambda s: max(_sum(s.find(r, lane, layer, name)) for r in which))

        others = [rank for rank in ranks if rank != owner]
        return LayerFigures(
            layer,
            owner,
            compute=longest(Lane.COMPUTE, "layer", ranks),
            pack=longest(Lane.BROADCAST, "pack", [owner]),
            transport=median(lambda s: s.transport(layer)),
            unpack=longest(Lane.BROADCAST, "unpack", others),
            owner_waits=longest(Lane.WAIT, "wait", [owner]),
            others_wait=longest(Lane.WAIT, "wait", others),
        )

    return [figures(layer) for layer in first.layers]


def exchanges(steps: Sequence[TracedStep]) -> list[ExchangeFigures]:
    """Figures of each layer's decode at its owner over steps of one kind."""
    every = range(len(steps[0].ranks))

    def figures(sample: Span) -> ExchangeFigures:
        layer, owner = sample.layer, int(sample.facts["owner"])
        assert layer is not None

        def median(name: str, which: Iterable[int]) -> float:
            return statistics.median(
                max(_sum(step.find(rank, Lane.EXCHANGE, layer, name)) for rank in which)
                for step in steps
            )

        return ExchangeFigures(
            layer,
            owner,
            queries=median("queries", every),
            attention=median("attention", [owner]),
            results=median("results", [owner]),
            whole=statistics.median(_extent(step, layer) for step in steps),
        )

    return [figures(span) for span in steps[0].find(0, Lane.EXCHANGE, name="queries")]


def _extent(step: TracedStep, layer: int) -> float:
    spans = [
        span for rank in range(len(step.ranks)) for span in step.find(rank, Lane.EXCHANGE, layer)
    ]
    return (max(span.end for span in spans) - min(span.begin for span in spans)) / 1e9


def ranks(steps: Sequence[TracedStep]) -> list[RankFigures]:
    """Figures of each rank over steps of one kind."""
    return [_rank(steps, rank) for rank in range(len(steps[0].ranks))]


def _rank(steps: Sequence[TracedStep], rank: int) -> RankFigures:
    times = [step.whole[rank].seconds for step in steps]
    waits = [_sum(step.find(rank, Lane.WAIT)) for step in steps]
    launches = [_sum(step.find(rank, Lane.COMPUTE, name="launch")) for step in steps]
    parts = [step.waited(rank) for step in steps]
    return RankFigures(
        rank,
        len(steps),
        statistics.median(times),
        statistics.median(waits),
        share=sum(waits) / sum(times),
        launch=sum(launches) / sum(times),
        parts={part: sum(p[part] for p in parts) / (sum(waits) or 1) for part in PARTS},
    )


def _steps(recordings: Sequence[Recording], lane: Lane) -> Iterator[TracedStep]:
    kept = [{step.number: step for step in recording.steps} for recording in recordings]
    for number in sorted(set.intersection(*map(set, kept))):
        step = TracedStep(number, tuple(steps[number] for steps in kept))
        if all(any(span.lane is lane for span in s.spans) for s in step.ranks):
            yield step


def _whole(step: StepSpans) -> Span:
    (whole,) = (s for s in step.spans if s.lane is Lane.COMPUTE and s.layer is None)
    return whole


def _sum(spans: Iterable[Span]) -> float:
    return sum(span.seconds for span in spans)
