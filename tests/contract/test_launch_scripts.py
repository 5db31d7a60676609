"""examples/launch: the launch lines of the user guide, as `kvpp check` sees them on this machine.

Each script runs with a stand-in for vLLM that prints its arguments. They are checked with a model
that is a config.json alone, under the rules of the CPU platform: a sparse model, which CUDA's
rules refuse, passes here; PCP needs Model Runner V2, which vLLM does not run here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpp_connectors.demo.model import TinyModel
from kvpp_connectors.launch.facts import Launch
from kvpp_connectors.launch.rules import check
from tests.contract.checking import Checked, check_all
from tests.contract.documents import DOCS, table
from tests.contract.processes import run
from tests.engine.tiny_models import MLA, V32, Tiny

SCRIPTS = sorted((DOCS.parent / "examples" / "launch").glob("*.sh"))
OFF, PCP = ("decode",), "context"
EXPERTS = Tiny(MLA.architecture, MLA.model_type, layers=61, experts=True, drafts=1)
SPARSE = Tiny(V32.architecture, V32.model_type, layers=61, experts=True, topk=2048)
VLLM = "#!{python}\nimport json, sys\nprint(json.dumps(['vllm', *sys.argv[1:]]))\n"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checked]:
    """`kvpp check` of every script's line, by the script's name."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "vllm").write_text(VLLM.format(python=sys.executable))
    (folder / "vllm").chmod(0o755)
    return check_all({script.stem: line_of(script, folder) for script in SCRIPTS}, folder)


def line_of(script: Path, folder: Path) -> list[str]:
    """The launch line of a script, for a model of the kind that its own default is of."""
    text = script.read_text()
    if "V2-Lite" in text:
        config = TinyModel(num_hidden_layers=27).config()
    else:
        model = SPARSE if "V3.2" in text else EXPERTS
        config = {**model.config(), "num_attention_heads": 16, "num_key_value_heads": 16}
    model_folder = folder / f"{script.stem}-model"
    model_folder.mkdir()
    (model_folder / "config.json").write_text(json.dumps(config))
    path = f"{folder}:{os.environ['PATH']}"
    finished = run([script, "--max-model-len", "512"], folder, PATH=path, MODEL=str(model_folder))
    assert finished.returncode == 0, finished.stderr
    words: list[str] = json.loads(finished.stdout)
    assert words[-2:] == ["--max-model-len", "512"], "the caller's own options come last"
    return words


@pytest.mark.process
@pytest.mark.parametrize("name", [script.stem for script in SCRIPTS if script.stem != PCP])
def test_check_takes_the_line(checked: Mapping[str, Checked], name: str) -> None:
    """No refusal, no warning."""
    (line,) = checked[name].lines
    assert checked[name].code == 0
    assert line.startswith("KVPP is off" if name in OFF else "KVPP takes this launch.")


@pytest.mark.process
def test_only_vllm_refuses_prefill_context_parallelism_here(
    checked: Mapping[str, Checked],
) -> None:
    """And KVPP's own rules take the launch."""
    assert checked[PCP].code == 2
    assert "Model Runner V1 does not support: prefill context parallel" in checked[PCP].lines[1]
    assert check(Launch(tp=8, pcp=2, num_layers=61)) == []


def test_every_script_is_in_the_quick_start() -> None:
    rows = table("quickstart.md", "## Launch lines")
    assert [row[0].strip("`") for row in rows] == [script.name for script in SCRIPTS]
