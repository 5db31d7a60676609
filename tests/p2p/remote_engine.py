"""The test's end of an engine process: start it, ask it, stop or kill it."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.fork_server import CONTEXT
from tests.p2p.engine_process import Served, serve
from tests.signals import signal_group

__all__ = ["RemoteEngine"]


class RemoteEngine:
    """An engine process and its process group. Every answer has a bound."""

    _kind: ClassVar[type[Served]] = Served  # whose methods are the commands

    def __init__(
        self, model: Path, log: Path, *, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self._log = log
        self._commands, theirs = CONTEXT.Pipe()
        arguments = (theirs, log, model, environment or {}, options, self._kind)
        self.process = CONTEXT.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def wait_ready(self, seconds: float = 240) -> Self:
        """Wait for the engine to start."""
        assert self.answer(seconds) == "ready"
        return self

    def ask(self, do: str, seconds: float = 120, **arguments: Any) -> Any:
        """Run a command and return its answer."""
        self.tell(do, **arguments)
        return self.answer(seconds)

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command; the answer is fetched by `answer`."""
        self._commands.send((do, arguments))

    def answer(self, seconds: float = 120) -> Any:
        """The answer to a command that was told."""
        try:
            if self._commands.poll(seconds):
                return self._commands.recv()
            problem = f"no answer within {seconds} s"
        except EOFError:
            problem = "the engine process ended"
        raise AssertionError(f"{problem}; the log ends:\n{self.log()[-3000:]}")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first worker."""
        return self.ask("call", method=method, arguments=arguments)

    def log(self) -> str:
        """What the engine has logged."""
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the engine and all its workers."""
        assert self.process.pid is not None
        signal_group(self.process.pid, number)

    def stop(self) -> None:
        """End the engine; kill what is left."""
        if self._commands.closed:
            return
        self._commands.close()
        self.process.join(30)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
