"""Addresses that peers are told can be connected to, over IPv6 as well."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvpp_connectors.connector.host import endpoint, own_host
from kvpp_connectors.p2p.options import read_options
from kvpp_core.errors import KvppError

READ_OVER_IPV6 = """
import json, sys, time
import torch
from kvpp_connectors.connector.transfer_engine import Read, TransferEngine

engine = TransferEngine("::1", "tcp")
memory = torch.full((4096,), int(sys.argv[1]), dtype=torch.uint8)
engine.register(memory.data_ptr(), memory.nbytes)
print(json.dumps([engine.session, memory.data_ptr()]), flush=True)
session, address = json.loads(sys.stdin.readline())
handle = engine.start_read(Read(session, address, memory.data_ptr(), 4096))
deadline = time.monotonic() + 20
while handle and engine.poll(handle) is None and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps(memory.unique().tolist()), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", ""])
def test_all_interfaces_is_no_address_to_publish(host: str) -> None:
    with pytest.raises(KvppError) as error:
        read_options({"host": host})
    for words in (f"host = {host!r}", "no peer can connect", "address to listen on and publish"):
        assert words in str(error.value)


def test_an_ipv6_address_may_stand_in_brackets() -> None:
    assert read_options({"host": "[fd00::2]"}).host == "fd00::2"
    assert read_options({"host": "10.1.2.3"}).host == "10.1.2.3"
    assert endpoint("fd00::2", 80) == "[fd00::2]:80"
    assert endpoint("10.1.2.3", 80) == "10.1.2.3:80"


@pytest.mark.parametrize("found", ["0.0.0.0", "::", "127.0.0.1"])
def test_where_vllm_finds_no_address_a_warning_says_what_to_set(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: found)
    assert own_host() == "127.0.0.1"
    [line] = caplog.messages
    for words in (found, "no other host reaches", "VLLM_HOST_IP", "kv_connector_extra_config.host"):
        assert words in line


@pytest.mark.parametrize(
    ("found", "asked"), [("10.1.2.3", None), ("127.0.0.1", "127.0.0.1"), ("fd00::2", None)]
)
def test_an_address_that_was_found_or_asked_for_is_taken_as_it_is(
    found: str,
    asked: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_HOST_IP", asked)
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: found)
    assert own_host() == found
    assert caplog.messages == []


@pytest.mark.process
def test_two_processes_read_from_each_other_over_ipv6() -> None:
    """Mooncake speaks IPv6 if it is told so before it is loaded, and sessions have brackets."""
    sides = [
        subprocess.Popen(
            [sys.executable, "-c", READ_OVER_IPV6, value],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in ("7", "9")
    ]
    try:
        published = [_next_line(side) for side in sides]
        assert all(session.startswith("[::1]:") for session, _ in published)
        reader, source = sides
        assert reader.stdin is not None
        reader.stdin.write(json.dumps(published[1]) + "\n")
        reader.stdin.flush()
        assert _next_line(reader) == [9]
        assert source.poll() is None
    finally:
        for side in sides:
            side.kill()
            side.wait()


def _next_line(side: subprocess.Popen[str]) -> Any:
    """The next answer of a process; Mooncake prints beside it."""
    assert side.stdout is not None
    while line := side.stdout.readline():
        if line.startswith("["):
            return json.loads(line)
    raise AssertionError("the process has ended")
