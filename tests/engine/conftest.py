"""Checkpoints for the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpp_connectors.demo.model import TinyModel, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The tiny model with a given number of layers, written once."""
    written: dict[int, Path] = {}

    def write(layers: int) -> Path:
        if layers not in written:
            folder = tmp_path_factory.mktemp(f"model-{layers}")
            written[layers] = write_checkpoint(folder, TinyModel(num_hidden_layers=layers))
        return written[layers]

    return write
