"""The scheduler's process needs nothing of what moves bytes, and messages stand below both."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvpp_connectors.p2p

FOLDER = Path(kvpp_connectors.p2p.__file__).parent
MACHINERY = {"worker", "pull_worker", "prefill_peers", "peer_sharing", "read_plan", "read_window"}


def imports(module: str) -> set[str]:
    """The modules of the room that this one imports, directly or not."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        tree = ast.parse((FOLDER / f"{waiting.pop()}.py").read_text())
        names = {
            node.module.rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("kvpp_connectors.p2p.")
        }
        waiting += names - found
        found |= names
    return found


@pytest.mark.parametrize("module", ["scheduler", "messages", "protocol", "transfer_params"])
def test_nothing_that_moves_bytes_is_imported(module: str) -> None:
    assert not imports(module) & MACHINERY
    assert imports("worker") >= MACHINERY - {"worker"}


def test_messages_import_no_half() -> None:
    assert imports("messages") == {"protocol", "transfer_params"}
