"""Transfer engines that all tests of this folder share: each takes a second to end."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kvpp_connectors.connector.transfer_engine import TransferEngine
from tests.p2p.kv_memory import new_arena


class Machine(NamedTuple):
    """Engines with the arenas that they serve: arena i belongs to prefill engine i modulo 4."""

    prefill: tuple[TransferEngine, ...]
    arenas: tuple[torch.Tensor, ...]
    decode: TransferEngine
    decode_arenas: tuple[torch.Tensor, ...]


def new_machine() -> Machine:
    """Eight prefill workers' and four decode workers' memory."""
    prefill = tuple(TransferEngine("127.0.0.1", "tcp") for _ in range(4))
    arenas = tuple(new_arena() for _ in range(8))
    for number, arena in enumerate(arenas):
        prefill[number % 4].register(arena.data_ptr(), arena.nbytes)
    decode = TransferEngine("127.0.0.1", "tcp")
    return Machine(prefill, arenas, decode, tuple(new_arena() for _ in range(4)))


@pytest.fixture(scope="package")
def machine() -> Machine:
    """One for the whole folder."""
    return new_machine()
