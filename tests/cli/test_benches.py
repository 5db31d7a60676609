"""Options that several benchmarks have. `make bench ARGS=--quick` runs them all."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


@pytest.mark.parametrize("wrong", ["", "64,", "64,many", "0", "-1", "1.5", "²"])
@pytest.mark.parametrize(
    ("bench", "option"),
    [
        ("step", "--contexts"),
        ("p2p", "--megabytes"),
        ("broadcast", "--layer-mib"),
        ("capacity", "--layers"),
    ],
)
def test_a_list_that_is_none_is_named(bench: str, option: str, wrong: str) -> None:
    result = CliRunner().invoke(app, [bench, f"{option}={wrong}"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert option in result.output and "positive whole numbers" in result.output
