"""docs/operating.md and the dashboard have every metric of the code, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from prometheus_client import CollectorRegistry

from kvpp_connectors.engine.metrics import BroadcastCounters
from kvpp_connectors.p2p.metrics import P2pPromMetrics
from kvpp_connectors.pool.metrics import PoolPromMetrics
from kvpp_connectors.pool.store.base import StoreResult
from kvpp_connectors.proxy.errors import RequestOutcome
from kvpp_connectors.proxy.metrics import Metrics
from kvpp_core.stats import PipelineStats
from tests.contract.documents import DOCS, ROOT, table
from tests.contract.test_metrics import metrics

OPERATING = "operating.md"
DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "kvpp.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
DIFFERENCE = "Blocks held for decode"  # the panel that subtracts counters
LEFT_OUT: set[str] = set()  # of the code, not on the dashboard
METRIC = re.compile(r"(?:vllm:)?kvpp_\w+")


def names(families: Iterable[Any]) -> set[str]:
    """As Prometheus has them: counters with _total, histograms without _bucket."""
    return {f"{f.name}_total" if f.type == "counter" else f.name for f in families}


def of_connector(prom: Any) -> set[str]:
    """The metrics of a connector, as vLLM makes them."""
    registry = CollectorRegistry()
    metrics(prom, registry)
    return names(registry.collect())


CODE = {
    "### KVPP": names(BroadcastCounters(0, PipelineStats).collect()),
    "### Prefill and decode": of_connector(P2pPromMetrics),
    "### Pool": of_connector(PoolPromMetrics),
    "### Proxy": names(Metrics(()).registry.collect()),
}
ALL = set().union(*CODE.values())


def sources(folder: str) -> str:
    """The text of a package."""
    files = sorted((ROOT / "kvpp_connectors" / folder).rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def first_cells(heading: str, index: int = 0) -> set[str]:
    """What stands in code in the first column of a table."""
    cells = (row[0] for row in table(OPERATING, heading, index))
    return {word for cell in cells for word in re.findall(r"`(\S+)`", cell)}


def counted_events() -> set[str]:
    """What the pool counts by a name of its own; seconds are no events."""
    found = set(re.findall(r'_stats\.add\("(\w+)"', sources("pool")))
    return {name for name in found if not name.endswith(("_us", "_bytes"))}


def endings() -> set[str]:
    """How an operation on an object ends, as the metrics call it."""
    return {result.value.replace(" ", "_") for result in StoreResult}


def test_the_tables_have_every_metric() -> None:
    assert first_cells("### KVPP") == CODE["### KVPP"]
    assert first_cells("### Proxy") == CODE["### Proxy"]
    prefix = "vllm:kvpp_p2p_"
    assert {prefix + name for name in first_cells("### Prefill and decode")} == CODE[
        "### Prefill and decode"
    ]
    text = (DOCS / OPERATING).read_text()
    assert set(re.findall(r"`(vllm:kvpp_pool_\w+)`", text)) == CODE["### Pool"]


def test_the_tables_have_every_value_of_a_label() -> None:
    text = (DOCS / OPERATING).read_text()
    assert first_cells("### Pool") == counted_events()
    assert first_cells("### Pool", 1) == endings()
    given = re.findall(r'PullFailed\(\s*"(\w+)"(?: if \w+ else "(\w+)")?', sources("p2p"))
    assert first_cells("### Prefill and decode", 1) == {r for pair in given for r in pair if r} | {
        "internal"  # a fault of ours, which raises something else
    }
    assert all(f"`{outcome}`" in text for outcome in RequestOutcome)


def test_the_dashboard_has_every_metric() -> None:
    shown = {re.sub(r"_bucket$", "", name) for e in EXPRESSIONS for name in METRIC.findall(e)}
    assert shown <= ALL
    assert ALL - shown == LEFT_OUT


def test_the_dashboard_asks_for_values_that_there_are() -> None:
    known = counted_events() | {f"{op}_{end}" for op in ("put", "get") for end in endings()}
    for expression in EXPRESSIONS:
        for exact, pattern in re.findall(r'what=(?:"(\w+)"|~"([^"]+)")', expression):
            assert any(re.fullmatch(pattern or exact, name) for name in known), expression


def test_every_panel_is_whole() -> None:
    """What Grafana needs of one: a query with balanced brackets, of the chosen data source."""
    assert not [f"{panel['title']}: {wrong}" for panel in PANELS for wrong in _faults(panel)]


def _faults(panel: dict[str, Any]) -> Iterator[str]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    if panel["datasource"] != source or not panel["fieldConfig"]["defaults"]["unit"]:
        yield "another data source, or no unit"
    if not len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0:
        yield "no target, or two of one refId"
    for target in panel["targets"]:
        if target["datasource"] != source or not target["legendFormat"]:
            yield f"{target['refId']} has another data source, or no legend"
        expression = target["expr"]
        for opening, closing in ("()", "[]", "{}"):
            if expression.count(opening) != expression.count(closing):
                yield f"unbalanced {opening}{closing} in {expression}"
        if len(METRIC.findall(expression)) != expression.count('{instance=~"$instance"'):
            yield f"a metric without the instance in {expression}"
        counters = re.findall(r"\w+_total\{[^}]*\}(\[?)", expression)
        if panel["title"] != DIFFERENCE and not all(counters):
            yield f"a counter without a rate in {expression}"


def test_the_dashboard_fits_together() -> None:
    """Its name and variables are there, ids are unique, and no panel lies on another."""
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] > 0
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    places = [panel["gridPos"] for panel in every]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above
