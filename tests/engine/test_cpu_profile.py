"""The CPU profile in real engines: a pipeline without KVPP, and a wrong rotary op refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.harness import Request, Script, kvpp_off, kvpp_on, random_tokens, start_engine

pytestmark = pytest.mark.engine

SCRIPT = Script((Request(random_tokens(1, 100), max_tokens=12),))


def test_two_pipeline_stages_answer_like_one(checkpoint: Callable[[int], Path]) -> None:
    """The profile allocates what the second stage receives its input in; answers are equal."""
    model = checkpoint(6)
    with start_engine(model, kvpp_off(), tp=1) as engine:
        expected = engine.run(SCRIPT).answers[0]
    with start_engine(model, kvpp_off(), tp=1, pipeline_parallel_size=2) as engine:
        answer = engine.run(SCRIPT).answers[0]
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_an_engine_with_the_wrong_rotary_op_does_not_serve(
    checkpoint: Callable[[int], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Asking for vLLM's rotary kernel ends the start-up with what to remove."""
    with (
        pytest.raises(Exception, match="WorkerProc initialization failed"),
        start_engine(
            checkpoint(6), kvpp_on(), compilation_config={"custom_ops": ["+rotary_embedding"]}
        ),
    ):
        pass
    captured = capfd.readouterr()
    assert "is wrong on strided inputs" in captured.out + captured.err
    assert "Remove '+rotary_embedding'" in captured.out + captured.err
