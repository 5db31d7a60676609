"""`kvpp check --platform ascend`: the specification's launch lines, and what it does not support.

vLLM for CPU parses them, since vllm-ascend is nowhere without an NPU; the rules are those of NPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

from tests.contract.checking import Checked, check_all
from tests.contract.launches import write_mla, write_mtp
from tests.contract.test_launch_scripts import OFF, SCRIPTS, VLLM, line_of
from tests.contract.test_rules import GUIDE_LAYERWISE, GUIDE_MEMCACHE, GUIDE_P2P

POOL = "AscendStoreConnector"
EXTRA = "kv_connector_extra_config"
TRANSFER = "--kv-transfer-config"


def _changed(text: str, role: str | None = None, **extra: object) -> tuple[str, str]:
    """A connector of the user guide with one thing changed."""
    found = json.loads(text)
    found["kv_role"] = role or found["kv_role"]
    found[EXTRA] = {**found.get(EXTRA, {}), **extra}
    return TRANSFER, json.dumps(found)


def _two_of_a_kind() -> tuple[str, str]:
    children = {"connectors": [json.loads(GUIDE_P2P)] * 2}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", EXTRA: children}
    return TRANSFER, json.dumps(multi)


DYNAMIC = {
    "method": "mtp",
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1]],
}
REFUSED = {  # what breaks a rule: the rule is the first word
    "no-full-graphs": ("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'),
    "no-dcp": ("--decode-context-parallel-size", "2"),
    "group-larger-than-one": ("--tensor-parallel-size", "1"),
    "fixed-k-speculation": ("--speculative-config", json.dumps(DYNAMIC)),
    "no-kv-events": ("--kv-events-config", '{"enable_kv_cache_events": true}'),
    "prefill-side-only": _changed(GUIDE_P2P, "kv_consumer"),
    "ascend-transport": _changed(GUIDE_P2P, protocol="tcp"),
    "pool-role": _changed(GUIDE_MEMCACHE, "kv_consumer"),
    "memcache-whole-blocks": _changed(GUIDE_MEMCACHE, use_layerwise=True, load_async=False),
    "layerwise-loads-in-step": _changed(GUIDE_LAYERWISE, load_async=True),
    "connector-settings, part of a chunk": _changed(GUIDE_MEMCACHE, discard_partial_chunks=False),
    "no-consumer-write-back": _changed(GUIDE_MEMCACHE, consumer_is_to_put=True),
    "known-connector": (TRANSFER, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'),
    "one-of-a-kind": _two_of_a_kind(),
    "layerwise-without-pcp": (
        *_changed(GUIDE_LAYERWISE, mooncake={"master_server_address": "10.0.0.1:50051"}),
        *("--prefill-context-parallel-size", "2"),
    ),
    "no-full-graphs, vLLM's default": (),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checked]:
    """`kvpp check --platform ascend` of all lines, by script or by rule."""
    folder = tmp_path_factory.mktemp("ascend")
    (folder / "vllm").write_text(VLLM.format(python=sys.executable))
    (folder / "vllm").chmod(0o755)
    mla, mtp = write_mla(folder / "mla"), write_mtp(folder / "mtp")
    on = ("--tensor-parallel-size", "2", "--additional-config", '{"enable_kvpp": true}')
    lines = {
        rule: [
            *("vllm", "serve", str(mtp if "speculation" in rule else mla), *on, *options),
            *(() if "graphs" in rule else ("--enforce-eager",)),
        ]
        for rule, options in REFUSED.items()
    }
    lines |= {script.stem: line_of(script, folder) for script in SCRIPTS}
    return check_all(lines, folder, "--platform", "ascend")


@pytest.mark.process
@pytest.mark.parametrize("name", [script.stem for script in SCRIPTS])
def test_the_launch_lines_of_the_specification_are_taken(
    checked: Mapping[str, Checked], name: str
) -> None:
    """MLA, SFA with C8, MTP, PCP, P/D, MemCache, Mooncake layerwise, Multi: none is warned of."""
    (line,) = checked[name].lines
    assert checked[name].code == 0
    assert line.startswith("KVPP is off" if name in OFF else "KVPP takes this launch.")


@pytest.mark.process
@pytest.mark.parametrize("rule", REFUSED)
def test_each_restricted_combination_is_refused_by_its_rule(
    checked: Mapping[str, Checked], rule: str
) -> None:
    refusals = [line for line in checked[rule].lines if line.startswith("refused: ")]
    said = f"refused: [{rule.partition(',')[0]}] "
    assert checked[rule].code == 1
    assert any(line.startswith(said) for line in refusals), checked[rule].lines
    assert len(refusals) == len(set(refusals))
