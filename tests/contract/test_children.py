"""Children of the demo: what they print is kept, how they end is told, and nothing stays behind."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kvpp_connectors.demo.children import ChildFailed, run_module

PATIENCE_S = 8  # for a process to be gone; less than the grace that a child gets

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(code, *arguments)``: the code as a module of its own, under run_module."""

    def start(code: str, *arguments: str, console: Console | None = None) -> Path:
        (tmp_path / "child_of_test.py").write_text(code)
        log = tmp_path / "child.log"
        run_module(
            "child_of_test",
            arguments,
            title="a child",
            log=log,
            environment={"PYTHONPATH": str(tmp_path), "CHILD_SETTING": "set"},
            console=console or Console(file=io.StringIO()),
        )
        return log

    return start


def spawn(*, stubborn: bool = False) -> str:
    """A child that starts a grandchild and writes both pids into the file of its argument.

    The grandchild holds the child's output open. A stubborn one ignores SIGTERM.
    """
    handler = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else "pass"
    return f"""
import os, pathlib, subprocess, sys, time
ready = pathlib.Path(sys.argv[1] + ".ready")
sleep = "import pathlib, signal, time; {handler}; pathlib.Path(%r).touch(); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", sleep % str(ready)])
while not ready.exists():
    time.sleep(0.01)
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(f"{{os.getpid()}} {{grandchild.pid}}")
part.rename(sys.argv[1])
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has collected yet has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def assert_gone(pids: Path) -> None:
    """The child and the grandchild have ended, or do so soon."""
    both = [int(word) for word in pids.read_text().split()]
    assert len(both) == 2
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(is_gone, both)):
        assert time.monotonic() < deadline, f"still there: {both}"
        time.sleep(0.05)


def test_everything_that_a_child_prints_is_kept(run: Run) -> None:
    """Both streams in the order of writing, in the environment that was asked for."""
    log = run(
        "import os, sys\n"
        "print('argument', sys.argv[1], flush=True)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "print(os.environ['CHILD_SETTING'], 'PATH' in os.environ)\n",
        "one",
    )
    assert log.read_text().splitlines() == ["argument one", "to stderr", "set True"]


def test_progress_lines_are_shown_while_the_child_runs(run: Run) -> None:
    screen = io.StringIO()
    run(
        "import time\nprint('noise', flush=True)\nprint('step 7 of 9', flush=True)\ntime.sleep(1)",
        console=Console(file=screen, force_terminal=True, width=80),
    )
    assert "a child: step 7 of 9" in screen.getvalue()
    assert "noise" not in screen.getvalue()


def test_a_failed_child_is_told_with_code_log_and_its_end(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ChildFailed) as caught:
        run("import sys\nfor n in range(100): print('line', n)\nsys.exit(3)")
    text = str(caught.value)
    assert "a child: exit code 3" in text
    assert str(tmp_path / "child.log") in text
    tail = text.splitlines()[1:]
    assert tail == [f"line {n}" for n in range(75, 100)]
    assert len((tmp_path / "child.log").read_text().splitlines()) == 100


def test_a_traceback_is_in_the_message(run: Run) -> None:
    with pytest.raises(ChildFailed, match="ValueError: the reason"):
        run("raise ValueError('the reason')")


def test_a_child_that_is_killed_is_told(run: Run) -> None:
    with pytest.raises(ChildFailed, match=f"exit code -{signal.SIGKILL.value}"):
        run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize("stubborn", [False, True], ids=["plain", "ignores SIGTERM"])
def test_a_failed_child_takes_its_children_with_it(
    run: Run, tmp_path: Path, stubborn: bool
) -> None:
    """A worker that outlives its engine holds the output open; it must not hold us up as well."""
    pids, started = tmp_path / "pids", time.monotonic()
    with pytest.raises(ChildFailed, match="exit code 3"):
        run(spawn(stubborn=stubborn) + "sys.exit(3)", str(pids))
    assert_gone(pids)
    assert time.monotonic() - started < 60  # the grandchild sleeps for ten minutes


def test_a_good_child_leaves_nothing_behind_either(run: Run, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    run(spawn(), str(pids))
    assert_gone(pids)


@pytest.mark.parametrize("stubborn", [False, True], ids=["plain", "ignores SIGTERM"])
def test_ctrl_c_ends_the_whole_group(run: Run, tmp_path: Path, stubborn: bool) -> None:
    """The child has a session of its own, so that the terminal's signal does not reach it."""
    pids = tmp_path / "pids"
    # A test run in the background of a shell script is started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(spawn(stubborn=stubborn) + "time.sleep(600)", str(pids))
    finally:
        signal.signal(signal.SIGINT, before)
    assert_gone(pids)


def test_ctrl_c_while_the_watching_thread_starts_ends_the_group(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine a thread's start takes long, and the signal may come just then."""
    pids = tmp_path / "pids"

    def interrupted(_: threading.Thread) -> None:
        while not pids.exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(spawn() + "time.sleep(600)", str(pids))
    assert_gone(pids)


def test_an_error_on_our_side_ends_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "child_of_test.py").write_text(spawn() + "time.sleep(600)")

    class Screen(Console):
        """Fails once the child runs."""

        def status(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            """As if the terminal had gone away."""
            while not pids.exists():
                time.sleep(0.02)
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        run_module(
            "child_of_test",
            [str(pids)],
            title="a child",
            log=tmp_path / "child.log",
            environment={"PYTHONPATH": str(tmp_path)},
            console=Screen(file=io.StringIO()),
        )
    assert_gone(pids)
