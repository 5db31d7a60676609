"""The launch scripts of examples/proxy, run with stand-ins for vLLM that note their arguments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.processes import run
from tests.proxy.world import BOUND_S, looped, until

EXAMPLES = Path(__file__).parents[2] / "examples" / "proxy"

# Stands for `python`: notes the arguments; an engine becomes a stub, everything else is real.
PYTHON = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
if arguments[:2] != ["-m", "vllm.entrypoints.openai.api_server"]:
    os.execv({python!r}, [{python!r}, *arguments])
port = arguments[arguments.index("--port") + 1]
role = "prefill" if "enable_kvpp" in " ".join(arguments) else "decode"
with open({folder!r} + "/" + role, "w") as file:
    json.dump(dict(arguments=arguments, pid=os.getpid()), file)
if {dies!r} == role:
    sys.exit("no such model")
sys.path.insert(0, {repository!r})
import asyncio
from tests.proxy.backend import Backend, answers, offer

async def main():
    await Backend(offer() if role == "prefill" else answers, port=int(port)).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Whether a process that is not our child runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def option(arguments: list[str], name: str) -> Any:
    """The value of an option, as JSON."""
    return json.loads(arguments[arguments.index(name) + 1])


async def one_host(
    folder: Path, free: Sequence[int], dies: str = ""
) -> tuple[asyncio.subprocess.Process, str]:
    """Start one_host_cpu.sh with stub engines; where its proxy will listen."""
    python = folder / "python"
    values = {"python": sys.executable, "folder": str(folder), "dies": dies}
    python.write_text(PYTHON.format(repository=str(EXAMPLES.parents[1]), **values))
    python.chmod(0o755)
    names = ("PORT", "PREFILL_PORT", "DECODE_PORT")
    ports = dict(zip(names, map(str, free), strict=True))
    environment = {**os.environ, **ports, "PYTHON": str(python), "LOGS": str(folder)}
    script = await asyncio.create_subprocess_exec(
        *(EXAMPLES / "one_host_cpu.sh", "some/model", "--max-model-len", "512"),
        env=environment,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    return script, f"http://127.0.0.1:{ports['PORT']}"


@pytest.mark.process
@looped
async def test_one_host_serves_through_the_proxy_and_leaves_nothing_behind(
    tmp_path: Path, ports: Callable[[int], Sequence[int]]
) -> None:
    script, url = await one_host(tmp_path, ports(3))
    assert script.stderr is not None
    try:
        while b"listening on" not in (line := await script.stderr.readline()):
            assert line, "the script has ended"
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/v1/completions", json={"prompt": "x"}) as response,
        ):
            assert response.status == 200
        script.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(script.wait(), BOUND_S) == 143
    finally:
        if script.returncode is None:
            os.killpg(script.pid, signal.SIGKILL)
    notes = {role: json.loads((tmp_path / role).read_text()) for role in ("prefill", "decode")}
    await until(lambda: not any(alive(note["pid"]) for note in notes.values()))
    prefill, decode = notes["prefill"]["arguments"], notes["decode"]["arguments"]
    connector = {"kv_connector": "MooncakeConnectorV2"}
    assert option(prefill, "--kv-transfer-config") == {
        **connector,
        "kv_role": "kv_producer",
        "kv_port": 37000,
    }
    assert option(decode, "--kv-transfer-config") == {
        **connector,
        "kv_role": "kv_consumer",
        "kv_port": 37010,
        "kv_load_failure_policy": "recompute",
    }
    assert option(prefill, "--additional-config") == {"enable_kvpp": True}
    assert option(decode, "--additional-config") == {"kvpp": {"cpu_profile": True}}
    assert option(prefill, "--tensor-parallel-size") == 2
    for arguments in (prefill, decode):
        assert arguments[-2:] == ["--max-model-len", "512"]
        assert arguments[arguments.index("--host") + 1] == "127.0.0.1"


@pytest.mark.process
@looped
async def test_one_host_says_so_when_an_engine_dies(
    tmp_path: Path, ports: Callable[[int], Sequence[int]]
) -> None:
    """Its log's end is shown, and the other engine is stopped."""
    script, _ = await one_host(tmp_path, ports(3), dies="decode")
    _, text = await asyncio.wait_for(script.communicate(), BOUND_S)
    assert script.returncode == 1
    assert "decode has ended" in text.decode() and "no such model" in text.decode()
    pid = json.loads((tmp_path / "prefill").read_text())["pid"]
    await until(lambda: not alive(pid))


def test_the_roles_of_two_hosts(tmp_path: Path) -> None:
    """What each role starts, with the caller's own options at the end."""
    script = "two_hosts.sh"
    for name in ("vllm", "kvpp"):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
        stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def started(*arguments: str) -> list[str]:
        finished = run(["bash", EXAMPLES / script, *arguments], tmp_path, PATH=path, TP="4")
        assert finished.returncode == 0, finished.stderr
        words: list[str] = json.loads(finished.stdout)
        return [Path(words[0]).name, *words[1:]]

    prefill = started("prefill", "some/model", "--more")
    assert prefill[:3] == ["vllm", "serve", "some/model"] and prefill[-1] == "--more"
    assert option(prefill, "--kv-transfer-config")["kv_role"] == "kv_producer"
    assert option(prefill, "--kv-transfer-config")["kv_port"] == 37000
    assert option(prefill, "--additional-config") == {"enable_kvpp": True}
    decode = started("decode", "some/model")
    assert option(decode, "--kv-transfer-config")["kv_role"] == "kv_consumer"
    assert option(decode, "--kv-transfer-config")["kv_port"] == 37010
    assert "--additional-config" not in decode
    assert option(prefill, "--tensor-parallel-size") == option(decode, "--tensor-parallel-size")
    proxy = started("proxy", "10.0.0.1", "10.0.0.2")
    assert proxy[:2] == ["kvpp", "proxy"]
    assert proxy[proxy.index("--prefill") + 1] == "http://10.0.0.1:8100"
    assert proxy[proxy.index("--decode") + 1] == "http://10.0.0.2:8200"
    assert proxy[proxy.index("--host") + 1] == "127.0.0.1"
    usage = run(["bash", EXAMPLES / script, "no-role", "x"], tmp_path)
    assert usage.returncode == 2 and f"examples/proxy/{script} prefill MODEL" in usage.stderr
