"""The `kvpp` command as a user meets it: help, exit codes, and nothing of vLLM's chatter."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpp_connectors.cli.doctor import examine
from kvpp_connectors.cli.main import app
from kvpp_connectors.vllm_api.names_vllm032 import HOOKS
from tests.contract.checking import WIDE, Checked, check_all
from tests.contract.processes import run

COMMANDS = sorted(
    command.callback.__name__ for command in app.registered_commands if command.callback
)
ON = '{"enable_kvpp": true}'
HERE = "Judged for cpu (detected here)."


@pytest.mark.process
def test_the_installed_command_lists_its_commands(tmp_path: Path) -> None:
    """The console script itself, outside of the repository."""
    assert {"plan", "check", "doctor", "demo"} <= set(COMMANDS)
    finished = run([Path(sys.executable).with_name("kvpp"), "--help"], tmp_path, **WIDE)
    assert finished.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env=WIDE)
    assert result.exit_code == 0
    assert f"Usage: root {command}" in result.stdout
    assert len(result.stdout.split()) > 20  # more than the usage line


def test_no_command_is_answered_with_the_help() -> None:
    result = CliRunner().invoke(app, [], env=WIDE)
    assert all(command in result.output for command in COMMANDS)
    unknown = CliRunner().invoke(app, ["chek"], env=WIDE)
    assert unknown.exit_code == 2 and "chek" in unknown.output


@pytest.fixture(scope="module")
def checked(
    mla_model: Path, llama_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Checked]:
    """`kvpp check` of the lines below."""
    mla = ["vllm", "serve", str(mla_model), "--tensor-parallel-size", "2"]
    on = [*mla, "--additional-config", ON]
    pool = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_consumer"}
    decode = {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_consumer", "kv_port": 0}
    extra = {"backend": "memcache"}
    memcache = {**pool, "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    foreign = {
        "kv_connector": "Mine",
        "kv_role": "kv_both",
        "kv_connector_module_path": "no.such.module",
    }
    folder = tmp_path_factory.mktemp("files")
    file, bad = folder / "launch.yaml", folder / "bad.yaml"
    file.write_text(
        f"model: {mla_model}\ntensor-parallel-size: 2\nenforce-eager: true\n"
        "additional-config:\n  enable_kvpp: true\n"
    )
    bad.write_text("model: [\n")
    lines = {
        "good": [*on, "--enforce-eager"],
        "guide": [
            *on,
            "--enable-chunked-prefill",
            "--enable-prefix-caching",
            "--async-scheduling",
            "--max-num-batched-tokens=32768",
            "--compilation-config",
            '{"cudagraph_mode":"PIECEWISE"}',
        ],
        "off": mla,
        "warned": [*on, "--enforce-eager", "--pipeline-parallel-size", "4"],
        "full graphs": [*on, "--compilation-config", '{"cudagraph_mode":"FULL_DECODE_ONLY"}'],
        "many": [
            *("vllm", "serve", str(llama_model), "--enforce-eager", "--enable-dbo"),
            *("--additional-config", '{"enable_kvpp": true, "kvpp": {"brodcast": "auto"}}'),
            *("--kv-transfer-config", json.dumps(pool)),
        ],
        "unknown option": [*on, "--tensor-parallel-sise", "2"],
        "bad value": ["vllm", "serve", str(mla_model), "--tensor-parallel-size", "two"],
        "no json": [*mla, "--additional-config", "{enable_kvpp"],
        "too long": [*on, "--max-model-len", "9999999"],
        "server module": [
            *("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", str(mla_model)),
            *(*on[3:], "--enforce-eager"),
        ],
        "config file": ["vllm", "serve", "--config", str(file)],
        "config file of a module": [
            *("/usr/bin/python3.11", "-m", "vllm.entrypoints.openai.api_server"),
            *("--config", str(file)),
        ],
        "variables": ["VLLM_MLA_DISABLE=1", *on, "--enforce-eager"],
        "after the variables": [*on, "--enforce-eager"],
        "level": [*mla, "--additional-config", '{"enable_kvpp": true, "metrics_port": 9400}'],
        "decode": [*mla, "--kv-transfer-config", json.dumps(decode)],
        "no memcache": [
            "MMC_LOCAL_CONFIG_PATH=",
            *on,
            "--kv-transfer-config",
            json.dumps(memcache),
        ],
        "another module": ["python", "-m", "http.server", "8000"],
        "foreign module": [*mla, "--kv-transfer-config", json.dumps(foreign)],
        "graph mode": [*on, "--compilation-config", '{"cudagraph_mode": "ALL"}'],
        "speculation": [*on, "--speculative-config", '"ngram"'],
        "no such file": ["vllm", "serve", "--config", str(file.with_name("none.yaml"))],
        "bad yaml": ["vllm", "serve", "--config", str(bad)],
        "null byte": ["A=\0", *on],
        "not serve": ["vllm", "bench"],
        "no vllm": [str(mla_model)],
    }
    return check_all(lines, tmp_path_factory.mktemp("check"))


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [
        *("good", "guide", "server module", "config file", "config file of a module"),
        "after the variables",
    ],
)
def test_a_good_launch_is_one_line_and_code_0(checked: Mapping[str, Checked], name: str) -> None:
    """Nothing of vLLM's own output on stdout: the whole text is ours."""
    assert checked[name] == Checked(0, [f"KVPP takes this launch. {HERE}"])


@pytest.mark.process
def test_a_launch_without_kvpp_is_said_to_be_one(checked: Mapping[str, Checked]) -> None:
    (line,) = checked["off"].lines
    assert checked["off"].code == 0
    assert line == f"KVPP is off in this launch (no enable_kvpp in --additional-config). {HERE}"


@pytest.mark.process
def test_a_warning_is_printed_and_refuses_nothing(checked: Mapping[str, Checked]) -> None:
    warning, verdict = checked["warned"].lines
    assert checked["warned"].code == 0
    assert warning.startswith("warning: [saves-nothing] --tensor-parallel-size = 2, 3 layers")
    assert verdict == f"KVPP takes this launch. {HERE}"


@pytest.mark.process
def test_full_graphs_are_refused_on_a_machine_that_has_none(
    checked: Mapping[str, Checked],
) -> None:
    """The CPU platform drops the graph mode; the line that is checked asks for it all the same."""
    refusal, verdict = checked["full graphs"].lines
    assert checked["full graphs"].code == 1
    assert refusal.startswith(
        "refused: [no-full-graphs] --compilation-config.cudagraph_mode = FULL_DECODE_ONLY: "
    )
    assert "PIECEWISE" in refusal
    assert verdict == f"1 refused. {HERE}"


@pytest.mark.process
def test_every_problem_is_a_line_and_the_code_is_1(checked: Mapping[str, Checked]) -> None:
    *refusals, verdict = checked["many"].lines
    rules = [line.split("]")[0] for line in refusals]
    assert sorted(rules) == sorted(
        f"refused: [{rule}"
        for rule in (
            "option-values",
            "group-larger-than-one",
            "mla-only",
            "no-dual-batch-overlap",
            "pool-role",
            "connector-settings",  # the pool has no master
        )
    )
    assert checked["many"].code == 1
    assert verdict == f"6 refused. {HERE}"


@pytest.mark.process
def test_variables_before_the_command_are_the_lines_alone(checked: Mapping[str, Checked]) -> None:
    assert checked["variables"].code == 1
    assert "[mla-only]" in checked["variables"].lines[0]


@pytest.mark.process
def test_the_warnings_of_a_launch_without_kvpp_are_printed(checked: Mapping[str, Checked]) -> None:
    """The launch itself logs them."""
    warning, verdict = checked["decode"].lines
    assert warning.startswith("warning: [failed-loads-end-requests] kv_transfer_config.")
    assert checked["decode"].code == 0 and verdict.startswith("KVPP is off")


@pytest.mark.process
def test_what_a_start_would_not_find_is_refused(checked: Mapping[str, Checked]) -> None:
    refusal, warning, verdict = checked["no memcache"].lines
    assert checked["no memcache"].code == 1 and verdict.startswith("1 refused.")
    assert "[connector-settings] MMC_LOCAL_CONFIG_PATH = nothing: " in refusal
    assert "[failed-loads-end-requests]" in warning


@pytest.mark.process
def test_an_option_one_level_too_high_is_refused(checked: Mapping[str, Checked]) -> None:
    assert checked["level"].code == 1
    assert (
        checked["level"]
        .lines[0]
        .startswith("refused: [options-in-kvpp] additional_config.metrics_port = 9400: ")
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown option", "vLLM cannot parse this line"),
        ("bad value", "vLLM cannot parse this line: argument --tensor-parallel-size"),
        ("no json", "vLLM does not take this launch: "),
        ("too long", "vLLM does not take this launch: "),
        ("not serve", "expected 'vllm serve MODEL ...' or 'python -m vllm.entrypoints"),
        ("no vllm", "expected 'vllm serve MODEL ...' or 'python -m vllm.entrypoints"),
        ("another module", "expected 'vllm serve MODEL ...' or 'python -m vllm.entrypoints"),
        ("foreign module", "vLLM does not take this launch: ModuleNotFoundError: No module named"),
        ("graph mode", "vLLM cannot parse this line: KeyError: 'ALL', in {\"cudagraph_mode\""),
        ("speculation", "--speculative-config = 'ngram': vLLM takes a JSON object"),
        ("no such file", "vLLM cannot parse this line: "),
        ("bad yaml", "vLLM cannot parse this line: "),
        ("null byte", "a variable of the line cannot be set"),
    ],
)
def test_a_line_that_vllm_does_not_take_is_code_2(
    checked: Mapping[str, Checked], name: str, text: str
) -> None:
    """Told apart from a refusal of ours, and without a traceback."""
    assert checked[name].code == 2
    # vLLM's own log comes first where it cannot read a file.
    assert any(line.startswith(text) for line in checked[name].lines), checked[name].lines
    assert not any("Traceback" in line for line in checked[name].lines)


@pytest.mark.process
def test_the_doctor_finds_this_machine_ready() -> None:
    result = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert result.exit_code == 0, result.output
    assert "WRONG" not in result.stdout
    (hooks,) = [line for line in result.stdout.splitlines() if f"hooks ({len(HOOKS)})" in line]
    assert "all found" in hooks and "ok" in hooks
    assert "kvpp_connectors.plugin:register" in result.stdout
    assert "kvpp_connectors.engine.cpu.worker.KvppCpuWorker" in result.stdout


@pytest.mark.process
def test_the_doctor_judges_the_rotary_embedding_with_the_profile_only() -> None:
    """Without the profile it may be wrong: that is why the profile switches it off."""
    findings = {finding.what: finding for finding in examine()}
    assert findings["rotary embedding with the CPU profile"].ok is True
    without = findings["rotary embedding without it"]
    assert without.ok is None
    assert bool(without.remedy) == (without.found != "right on strided inputs")


@pytest.mark.process
def test_the_doctor_says_why_ranks_do_not_reach_one_another() -> None:
    result = CliRunner().invoke(app, ["doctor"], env=WIDE | {"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "nosuch0" in result.output and "GLOO_SOCKET_IFNAME names" in result.output


@pytest.mark.process
def test_the_doctor_fails_where_a_hook_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpp_connectors.vllm_api import check
    from kvpp_connectors.vllm_api.hook import Hook

    missing = Hook("vllm.v1.worker.gpu_worker", "Worker.no_such_step")
    monkeypatch.setattr(check, "HOOKS", (*HOOKS, missing))
    result = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "no_such_step is missing" in line]
    assert "WRONG" in line and "0.32" in line
