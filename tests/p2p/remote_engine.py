"""The test's end of an engine process: start it, ask it, stop or kill it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.p2p.engine_process import ANSWER

__all__ = ["RemoteEngine"]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    # Two decode ranks spin on two cores while they wait: a read may starve for a while.
    "MC_TCP_STATUS_TIMEOUT_SEC": "60",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "60",
    "MC_TRANSFER_TIMEOUT": "120",
}
_ENDED = "the engine process ended"


class RemoteEngine:
    """An engine process and its process group. Every answer has a bound."""

    def __init__(self, model: Path, log: Path, **options: Any) -> None:
        self._log = log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("w") as target:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.p2p.engine_process",
                    json.dumps({"model": str(model), **options}),
                ],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=target,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_ready(self, seconds: float = 240) -> Self:
        """Wait for the engine to start."""
        assert self._answer(seconds) == "ready"
        return self

    def ask(self, do: str, seconds: float = 120, **arguments: Any) -> Any:
        """Run a command and return its answer."""
        self.tell(do, **arguments)
        return self._answer(seconds)

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command; the answer is fetched by `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 120) -> Any:
        """The answer to a command that was told."""
        return self._answer(seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the engine and all its workers."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End the engine; kill what is left."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(_ENDED)

    def _answer(self, seconds: float) -> Any:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            answer = f"no answer within {seconds} s"
        if answer in (_ENDED, f"no answer within {seconds} s"):
            end = self._log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{answer}; the log ends:\n{end}")
        return json.loads(answer)
