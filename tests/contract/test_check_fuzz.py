"""Whatever a launch line or a config.json says, `kvpp check` answers: a sentence, and 0, 1 or 2.

Lines and configurations are mutated at random from those of the user guide. All run in one process,
as they would one after another in a pipeline that checks its deployments. Field report 1.4.
FUZZ_LINES=2000 changes so many of each.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract import fuzzing
from tests.contract.launches import write_memcache
from tests.contract.test_guide_lines import LINES
from tests.engine.tiny_models import MLA, SHARED, V32

FEW = 20
MANY = int(os.environ.get("FUZZ_LINES", "150"))  # 2,000 take a quarter of an hour
ROOT = Path(__file__).parents[2]

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 65535, 65536, 1 << 31, 1 << 63, 10**30),
    *(0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "auto", "none", "1", "-5", "2GiB", "kv_both", "NixlConnector", "\u0000", "é" * 40),
    *("MultiConnector", "MooncakeConnectorV2", "AscendStoreConnector", "deepseek_v3", "a.b.c"),
    *([], [[]], [1, "a"], {}, {"a": 1}, {"connectors": [7]}, {"enable_kvpp": True}),
)
OPTIONS = (
    *("--pipeline-parallel-size", "--prefill-context-parallel-size", "--data-parallel-size"),
    *("--decode-context-parallel-size", "--speculative-config", "--kv-events-config", "--dtype"),
    *("--block-size", "--max-model-len", "--kv-cache-dtype", "--worker-cls", "--enable-dbo"),
    *("--additional-config", "--kv-transfer-config", "--compilation-config", "-O0", "-O", "--help"),
    *("--config", "--model", "--hf-overrides", "--attention-config", "--quantization", "-tp", "--"),
    *("--enforce-eager", "--no-enable-prefix-caching", "--async-scheduling", "--kv-port"),
)
COMMANDS = (
    ["vllm", "serve"],
    ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"],
    ["env", "VLLM_USE_V1=1", "vllm", "serve"],
    ["VLLM_MLA_DISABLE=1", "vllm", "serve"],
)

Lines = list[tuple[list[str], str | None]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and an environment in which the pools of the lines are configured."""
    master = tmp_path / "mooncake.json"
    master.write_text('{"master_server_address": "127.0.0.1:50088"}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(master))
    monkeypatch.setenv("MMC_LOCAL_CONFIG_PATH", str(write_memcache(tmp_path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def in_a_process(lines: Lines, folder: Path) -> Any:
    """`answer_all` in a process of its own: thousands of configurations are no small thing."""
    (folder / "lines.json").write_text(json.dumps(lines))
    command = [sys.executable, "-m", fuzzing.__name__, str(folder / "lines.json")]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2900, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


def assert_answered(found: Any) -> None:
    """Nothing went wrong, and every exit code is one that is documented."""
    assert found["wrong"] == []
    assert set(found["codes"]) <= {"0", "1", "2"}


def changed(value: Any, draw: random.Random) -> Any:
    """JSON with one thing changed, somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.3:
            return {(misspelt(k, draw) if k == key else k): v for k, v in value.items()}
        if kind < 0.4:
            return {**value, draw.choice(["kvpp", "x", "metrics_port"]): draw.choice(JUNK)}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], changed(value[at], draw), *value[at + draw.randrange(2) :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice([value + 1, value - 1, -value, value * 2, value << 20, str(value)])
    return draw.choice(JUNK)


def misspelt(text: str, draw: random.Random) -> str:
    """A text with a letter too few, too many, or another."""
    at = draw.randrange(len(text) + 1)
    return draw.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + draw.choice("aZ_-0{\"' ") + text[at:],
            text.upper(),
        ]
    )


def mutated(words: list[str], draw: random.Random) -> list[str]:
    """A launch line with one thing or two changed: most of all, something in its JSON."""
    words = [*words]
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(words)) if words else 0
        objects = [i for i, word in enumerate(words) if word.startswith("{")]
        kind = draw.random()
        if kind < 0.7 and objects:
            at = draw.choice(objects)
            words[at] = json.dumps(changed(_read(words[at]), draw))
        elif kind < 0.82:
            option = [draw.choice(OPTIONS)]
            if draw.random() < 0.8:
                junk = draw.choice(JUNK)
                option.append(junk if isinstance(junk, str) else json.dumps(junk))
            words[at + 1 : at + 1] = option
        elif kind < 0.86:
            del words[at : at + draw.randint(1, 2)]
        elif kind < 0.9:
            words[at:at] = words[at : at + 1]
        elif kind < 0.96 and words:
            words[at] = misspelt(words[at], draw)
        elif words:
            other = draw.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    return words


def _read(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return {}


def write_config(folder: Path, config: object) -> str:
    """A model folder with this config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def launch_lines(count: int, folder: Path) -> Lines:
    """Mutated lines of the user guide, for this machine's platform and others."""
    draw = random.Random(15)
    model = write_config(folder / "model", MLA.config())
    lines: Lines = []
    for _ in range(count):
        text = draw.choice(list(LINES.values())).replace("\\\n", " ").replace("<model-path>", model)
        words = shlex.split(text)
        start = words.index("serve") + 1
        line = mutated([*draw.choice(COMMANDS), *words[start:]], draw)
        lines.append((line, draw.choice([None, None, "cuda", "ascend", "cpu"])))
    return lines


def models(count: int, folder: Path) -> Lines:
    """Lines of the user guide with mutated config.json."""
    draw = random.Random(16)
    lines: Lines = []
    for number in range(count):
        config: Any = draw.choice([MLA, V32, SHARED]).config()
        for _ in range(draw.randint(1, 3)):
            config = changed(config, draw)
        model = write_config(folder / f"model{number}", config)
        text = draw.choice([LINES["usage"], LINES["eager"], LINES["multi"], LINES["decode"]])
        words = shlex.split(text.replace("\\\n", " ").replace("<model-path>", model))
        lines.append((words, draw.choice([None, None, "cuda", "ascend"])))
    return lines


def test_launch_lines_get_an_answer(site: Path) -> None:
    assert_answered(fuzzing.answer_all(launch_lines(FEW, site)))


def test_config_json_gets_an_answer(site: Path) -> None:
    assert_answered(fuzzing.answer_all(models(FEW, site)))


@pytest.mark.grid
@pytest.mark.timeout(3000)
def test_many_launch_lines_get_an_answer(site: Path) -> None:
    found = in_a_process(launch_lines(MANY, site), site)
    assert_answered(found)
    assert len(found["codes"]) == 3, "every exit code comes"


@pytest.mark.grid
@pytest.mark.timeout(3000)
def test_many_config_json_get_an_answer(site: Path) -> None:
    found = in_a_process(models(MANY, site), site)
    assert_answered(found)
    assert len(found["codes"]) == 3, "every exit code comes"
