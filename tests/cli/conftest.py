"""The `kvpp plan` command as a user runs it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpp_connectors.cli.plan import plan

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GLM = CONFIGS / "glm-5.2"

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """``run("--tp", 8)``: `kvpp plan` with these arguments, on GLM-5.2 unless --model is given."""
    app = typer.Typer()
    app.command()(plan)

    @app.callback()
    def root() -> None:  # keeps `plan` a subcommand, as in the real program
        pass

    def invoke(*args: object) -> Result:
        words = [str(arg) for arg in args]
        model = [] if "--model" in words else ["--model", str(GLM)]
        return CliRunner().invoke(app, ["plan", *model, *words])

    return invoke


@pytest.fixture
def figures(run: Run) -> Callable[..., Any]:
    """The JSON object of a plan that must work."""

    def invoke(*args: object) -> Any:
        result = run(*args, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return invoke


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """A config.json like GLM-5.2's with some fields changed; None takes a field out."""

    def write(**changes: object) -> Path:
        fields = json.loads((GLM / "config.json").read_text()) | changes
        file = tmp_path / "config.json"
        file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        return file

    return write
