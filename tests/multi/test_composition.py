"""What a MultiConnector may be made of: every fault is refused before weights and names the child.

Field report 1.3: a child inside MultiConnector gets a different identity or config than it would
get alone. The models are a config.json alone, so nothing here can have loaded weights.
Field report 1.4 for compositions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.launches import engine_config, refuse

PD: dict[str, Any] = {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer"}
POOL: dict[str, Any] = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "memcache"},
}
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SWITCHES = {"on": {"enable_kvpp": True}, "off": {}}
PATH = "kv_transfer_config.kv_connector_extra_config.connectors"

# children, the rule, the option that it names
BROKEN: dict[str, tuple[list[Any], str, str]] = {
    "no role": ([PD, {**POOL, "kv_role": None}], "child-has-a-role", "[1].kv_role"),
    "a role that is none": (
        [{**PD, "kv_role": "producer"}, POOL],
        "child-has-a-role",
        "[0].kv_role",
    ),
    "no type": ([PD, {"kv_role": "kv_both"}], "child-has-a-type", "[1].kv_connector"),
    "an engine id": ([{**PD, "engine_id": "mine"}, POOL], "one-engine-id", "[0].engine_id"),
    "a policy": (
        [PD, {**POOL, "kv_load_failure_policy": "fail"}],
        "one-failure-policy",
        "[1].kv_load_failure_policy",
    ),
    "two P/D children": ([PD, POOL, PD], "one-of-a-kind", "[2].kv_connector"),
    "two pools": ([POOL, PD, POOL], "one-of-a-kind", "[2].kv_connector"),
    "a misspelt key": ([{**PD, "kv_prot": 37000}, POOL], "child-keys", "[0].kv_prot"),
    "a wrong setting of a pool": (
        [PD, {**POOL, "kv_connector_extra_config": {"backend": "memcache", "load_asink": True}}],
        "connector-settings",
        "[1].kv_connector_extra_config.load_asink",
    ),
    "settings that are none": (
        [PD, {**POOL, "kv_connector_extra_config": ["backend"]}],
        "extra-is-an-object",
        "[1].kv_connector_extra_config",
    ),
    "a misspelt type": (
        [PD, {**POOL, "kv_connector": "AscendStoreConector"}],
        "connector-names",
        "[1].kv_connector",
    ),
    "a port that is none": ([{**PD, "kv_port": 70000}, POOL], "port-range", "[0].kv_port"),
    "a wrong setting of P/D": (
        [{**PD, "kv_connector_extra_config": {"lease": 3}}, POOL],
        "connector-settings",
        "[0].kv_connector_extra_config.lease",
    ),
    "a pool without its master": (
        [PD, {**POOL, "kv_connector_extra_config": {}}],
        "connector-settings",
        "[1].kv_connector_extra_config.mooncake",
    ),
}


def multi(children: list[Any], role: str = "kv_producer") -> dict[str, Any]:
    """A kv_transfer_config of a MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_composition_is_refused(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch, case: str, switch: str
) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    children, rule, option = BROKEN[case]
    refusal = refuse(mla_model, SWITCHES[switch], kv_transfer_config=multi(children))
    told = {p.option: p.rule for p in refusal.problems}
    assert PATH + option in told
    assert told[PATH + option] == rule
    assert len(told) == len(refusal.problems)  # each once


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_both_orders_are_taken_whatever_the_wrappers_role(
    mla_model: Path, switch: str, role: str
) -> None:
    """Both halves get the wrapper's engine id; each child its own role and our class."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for children in ([PD, POOL], [POOL, PD]):
        config = engine_config(
            mla_model, SWITCHES[switch], kv_transfer_config=multi(children, role)
        )
        wrapper = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        assert wrapper.__module__ == "kvpp_connectors.multi.connector"
        found = wrapper._get_connector_classes_and_configs(config)
        transfers = [child.kv_transfer_config for _, child in found]
        assert [t.kv_role for t in transfers] == [child["kv_role"] for child in children]
        assert {t.engine_id for t in transfers} == {config.kv_transfer_config.engine_id}
        assert all(kind.__module__.startswith("kvpp_connectors.") for kind, _ in found)


def test_a_wrapper_without_our_children_is_vllms_own(mla_model: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = engine_config(mla_model, {}, kv_transfer_config=multi([NIXL, NIXL]))
    assert config.kv_transfer_config.kv_connector_module_path is None
    wrapper = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert wrapper.__module__.startswith("vllm.")


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_kvpp_wants_a_producer_for_its_pd_child(mla_model: Path, role: str) -> None:
    refusal = refuse(
        mla_model, SWITCHES["on"], kv_transfer_config=multi([{**PD, "kv_role": role}, POOL])
    )
    assert [(p.rule, p.option) for p in refusal.problems] == [
        ("prefill-side-only", f"{PATH}[0].kv_role")
    ]
