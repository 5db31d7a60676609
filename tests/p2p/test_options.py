"""An engine's facts from vLLM's configuration.

Field reports 1.4 (misspelt keys) and 1.1 (an address that nobody can reach).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpp_connectors.connector.facts import RankPosition
from kvpp_connectors.p2p.facts import P2pFacts, p2p_facts
from kvpp_connectors.p2p.options import KEY_VARIABLE, listening_host, read_key, read_options
from kvpp_core.errors import KvppError

NUMBERS = {"num_hidden_layers": 5, "kv_lora_rank": 512, "rope_parameters": {"factor": 40.0}}


def facts(
    path: str = "/models/a",
    numbers: dict[str, Any] | None = None,
    revision: str | None = None,
    cache_dtype: str = "auto",
    dtype: str = "torch.bfloat16",
    **extra: Any,
) -> P2pFacts:
    """The facts of an engine with such a configuration."""
    hf = {
        **(numbers or NUMBERS),
        "_name_or_path": path,
        "_attn_implementation_autoset": path == "/models/a",
        "transformers_version": f"5.{len(path)}",
    }
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"host": "127.0.0.1", **extra},
            engine_id="E",
            is_kv_producer=True,
            is_kv_consumer=False,
            kv_port=37000,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_rank=1,
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            prefill_context_parallel_size=2,
        ),
        model_config=SimpleNamespace(
            model=path,
            revision=revision,
            dtype=dtype,
            quantization=None,
            hf_text_config=SimpleNamespace(to_dict=lambda: hf),
        ),
        cache_config=SimpleNamespace(block_size=16, cache_dtype=cache_dtype),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
    )
    return p2p_facts(config)


def test_ranks_and_ports_come_from_the_configuration() -> None:
    """1.1: the second data-parallel replica's last worker."""
    found = facts()
    assert found.engine.workers == 8
    assert found.handshake_port(RankPosition(1, 1, 1, 2, 2)) == 37000 + 8 + 7


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lease_second": 5}, ["lease_second", "There is no such key", "lease_seconds"]),
        ({"lease_seconds": 0}, ["lease_seconds = 0", "greater than 0", "how long prefill"]),
        ({"window": 0, "threads": 100}, ["window = 0", "threads = 100"]),
        ({"protocol": "infiniband"}, ["protocol = 'infiniband'", "'tcp', 'rdma' or 'ascend'"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_expected(
    extra: dict[str, Any], said: list[str]
) -> None:
    """1.4: all of them at once."""
    with pytest.raises(KvppError) as error:
        read_options(extra)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_keys_of_the_first_connector_on_ascend_are_legal() -> None:
    """docs: prefill and decode sizes are learnt from the peer."""
    assert read_options({"prefill": {"tp_size": 8}, "decode": {}, "use_ascend_direct": True})


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is too short to be one is refused, with its place."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(read_options({})) is None
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    assert read_key(read_options({"key_file": str(file)})) == b"0123456789abcdef"
    monkeypatch.setenv(KEY_VARIABLE, "fedcba9876543210")
    assert read_key(read_options({})) == b"fedcba9876543210"
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(KvppError, match=f"{KEY_VARIABLE} = set: The key has 5 bytes"):
        read_key(read_options({}))
    with pytest.raises(KvppError, match=r"key_file = .* cannot be read"):
        read_key(read_options({"key_file": str(tmp_path / "none")}))


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_nothing_listens_on_all_interfaces_by_itself(
    everywhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.1: and no peer is told an address that is everybody's."""
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: everywhere)
    assert listening_host(read_options({})) == "127.0.0.1"
    assert listening_host(read_options({"host": "10.1.2.3"})) == "10.1.2.3"
