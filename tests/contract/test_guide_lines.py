"""The example lines of the user guide, to the letter: `kvpp check` says what the launch says.

The launch's own check is vLLM's: AsyncEngineArgs.create_engine_config with the plug-in loaded. The
model is a config.json alone. Field report 1.4.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.launches import write_memcache
from tests.contract.processes import run_python
from tests.contract.test_rules import GUIDE_LAYERWISE, GUIDE_MEMCACHE, GUIDE_MULTI, GUIDE_P2P
from tests.engine.tiny_models import MLA, V32, Tiny

# "Usage"
FIRST = """vllm serve <model-path> \\
    --tensor-parallel-size 2 \\
    --compilation-config '{"cudagraph_mode":"PIECEWISE"}' \\
    --additional-config '{"enable_kvpp": true}'
"""
# "To use eager execution, replace --compilation-config with --enforce-eager."
EAGER = """vllm serve <model-path> \\
    --tensor-parallel-size 2 \\
    --enforce-eager \\
    --additional-config '{"enable_kvpp": true}'
"""
# "Combining Features"
FEATURES = """vllm serve <model-path> \\
    --tensor-parallel-size 2 \\
    --enable-expert-parallel \\
    --enable-chunked-prefill \\
    --enable-prefix-caching \\
    --async-scheduling \\
    --max-num-batched-tokens 32768 \\
    --max-num-seqs 12 \\
    --compilation-config '{"cudagraph_mode":"PIECEWISE"}' \\
    --additional-config '{"enable_kvpp": true}'
"""
DECODE = "vllm serve <model-path> --tensor-parallel-size 2"
GUIDE_DECODE = '{"kv_connector":"MooncakeConnectorV2","kv_role":"kv_consumer","kv_port":37010}'


def transferring(line: str, transfer: str) -> str:
    """The line with a --kv-transfer-config of the guide."""
    return f"{line.rstrip()} --kv-transfer-config {shlex.quote(transfer)}"


LINES = {
    "usage": FIRST,
    "eager": EAGER,
    "features": FEATURES,
    "prefill": transferring(FIRST, GUIDE_P2P),
    "decode": transferring(DECODE, GUIDE_DECODE),
    "memcache": transferring(FIRST, GUIDE_MEMCACHE),
    "memcache, kv_both": transferring(FIRST, GUIDE_MEMCACHE.replace("kv_producer", "kv_both")),
    "layerwise": transferring(EAGER, GUIDE_LAYERWISE),
    "multi": transferring(FIRST, GUIDE_MULTI),
    # and what the guide says is not supported, or has to be configured besides
    "full graphs": FIRST.replace("PIECEWISE", "FULL_DECODE_ONLY"),
    "DCP": f"{FIRST.rstrip()} --decode-context-parallel-size 2",
    "decode with KVPP": transferring(FIRST, GUIDE_DECODE),
    "layerwise, MemCache": transferring(
        EAGER, GUIDE_MEMCACHE.replace('"use_layerwise":false', '"use_layerwise":true')
    ),
    "layerwise, between steps": transferring(
        EAGER, GUIDE_LAYERWISE.replace('"load_async":false', '"load_async":true')
    ),
    "memcache without its file": "MMC_LOCAL_CONFIG_PATH= " + transferring(FIRST, GUIDE_MEMCACHE),
    "mooncake without its file": "MOONCAKE_CONFIG_PATH=/none.json "
    + transferring(EAGER, GUIDE_LAYERWISE),
}
LOADS = {"decode", "memcache", "memcache, kv_both", "layerwise", "multi"}  # with vLLM's policy
REFUSED = {
    "full graphs": ["no-full-graphs"],
    "DCP": ["no-dcp"],
    "decode with KVPP": ["prefill-side-only"],
    "layerwise, MemCache": ["memcache-whole-blocks"],
    "layerwise, between steps": ["layerwise-loads-in-step"],
    "memcache without its file": ["connector-settings"],
    "mooncake without its file": ["connector-settings"],
}
OTHERS = {
    "PCP": f"{FIRST.rstrip()} --prefill-context-parallel-size 2",
    "no word of graphs": FIRST.replace(
        '--compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'', ""
    ),
    "level 1": FIRST.replace('--compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'', "-O1"),
}

# One process for all lines. It prints, for each, what the launch says and what `kvpp check` does.
PROGRAM = """
    import json, os, sys

    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from kvpp_connectors.cli.check import check_line
    from kvpp_connectors.cli.launch_line import NotALaunch
    from kvpp_connectors.launch.platforms import Platform
    from kvpp_connectors.launch.problems import LaunchRefused
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvpp_connectors.engine import configure

    logged = []
    configure.logger.warning = lambda text, *values: logged.append(f"warning: {text % values}")

    def launched(words):
        before = dict(os.environ)
        while "=" in words[0]:
            name, _, value = words[0].partition("=")
            os.environ[name], words = value, words[1:]
        logged.clear()
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
        arguments.model = arguments.model_tag
        try:
            AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
            return list(logged)
        except Exception as error:
            refusals = [d.get("ctx", {}).get("error") for d in error.errors()]
            (refusal,) = [r for r in refusals if isinstance(r, LaunchRefused)]
            return [f"{p.severity}: {p}" for p in refusal.problems]
        finally:
            os.environ.clear()
            os.environ.update(before)

    def checked(words, platform=None):
        try:
            return [f"{p.severity}: {p}" for p in check_line(words, platform).problems]
        except NotALaunch as error:
            return str(error)

    found = {}
    for name, words in json.loads(sys.argv[1]).items():
        found[name] = {
            "check": checked(words),
            "launch": None if name.startswith("PCP") else launched(words),
            **{platform.value: checked(words, platform) for platform in Platform},
        }
    print(json.dumps(found))
"""
MODELS = {"MLA": MLA, "sparse": V32}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What launch and command say of each line, by "line, model"."""
    folder = tmp_path_factory.mktemp("guide")
    master = folder / "mooncake.json"
    master.write_text('{"master_server_address": "127.0.0.1:50088"}')
    lines = {}
    for kind, model in MODELS.items():
        path = _write(folder / kind, model)
        for name, line in (LINES | OTHERS).items():
            one_line = line.replace("\\\n", " ").replace("<model-path>", str(path))
            lines[f"{name}; {kind}"] = shlex.split(one_line)
    environment = {
        "MOONCAKE_CONFIG_PATH": str(master),
        "MMC_LOCAL_CONFIG_PATH": str(write_memcache(folder)),
    }
    answer: Mapping[str, Any] = run_python(PROGRAM, folder, json.dumps(lines), **environment)
    return answer


def _write(folder: Path, model: Tiny) -> Path:
    folder.mkdir()
    config = {**model.config(), "num_hidden_layers": 27, "max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rules(said: list[str], severity: str) -> list[str]:
    """The rules of what was said, of one severity."""
    return [s.partition("[")[2].partition("]")[0] for s in said if s.startswith(f"{severity}: ")]


@pytest.mark.process
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", LINES)
def test_check_says_what_the_launch_says(found: Mapping[str, Any], name: str, kind: str) -> None:
    """The same problems and warnings in the same words, each once."""
    said = found[f"{name}; {kind}"]
    assert said["check"] == said["launch"] == said["cpu"]
    assert len(set(said["check"])) == len(said["check"])
    assert rules(said["check"], "refused") == REFUSED.get(name, [])
    if name in LOADS or name not in REFUSED:
        expected = ["failed-loads-end-requests"] if name in LOADS else []
        assert rules(said["check"], "warning") == expected


@pytest.mark.process
@pytest.mark.parametrize("name", LINES)
def test_cuda_refuses_sparse_models_besides(found: Mapping[str, Any], name: str) -> None:
    mla, sparse = (rules(found[f"{name}; {kind}"]["cuda"], "refused") for kind in MODELS)
    assert mla == REFUSED.get(name, [])
    off = [] if name == "decode" else ["no-sparse-attention-on-cuda-yet"]
    assert sorted(sparse) == sorted([*mla, *off])


@pytest.mark.process
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", LINES)
def test_npus_refuse_what_the_guide_does(found: Mapping[str, Any], name: str, kind: str) -> None:
    assert rules(found[f"{name}; {kind}"]["ascend"], "refused") == REFUSED.get(name, [])


@pytest.mark.process
@pytest.mark.parametrize("platform", ["cuda", "ascend"])
def test_pcp_is_judged_for_platforms_that_have_it(found: Mapping[str, Any], platform: str) -> None:
    """vLLM itself refuses it on this machine's."""
    assert found["PCP; MLA"][platform] == []
    assert "prefill context parallel" in found["PCP; MLA"]["check"]


@pytest.mark.process
def test_vllms_default_graph_mode_is_the_platforms(found: Mapping[str, Any]) -> None:
    """Full graphs where there are any; PIECEWISE at the optimization level below."""
    said = found["no word of graphs; MLA"]
    assert said["check"] == said["launch"] == said["cpu"] == []
    for platform in ("cuda", "ascend"):
        (problem,) = said[platform]
        assert "[no-full-graphs] --compilation-config.cudagraph_mode = FULL_AND_PIECEW" in problem
        assert found["level 1; MLA"][platform] == []
