"""What tells two sets of weights of one name apart, where they lie on a local disk.

A whole checkpoint takes minutes to read. A sample of each file takes milliseconds and differs for
weights that were trained, merged or quantized differently. It is a sample: an edit of few values
may escape it, so whoever edits weights in place gives them a revision of their own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["weights_identity"]

_PIECES = 64  # of each file
_PIECE = 4096  # bytes


def weights_identity(folder: Path) -> str:
    """32 hexadecimal digits over name, size and a sample of every ``*.safetensors`` file.

    "" where there is none: a name on a hub, weights of another format, a dummy load.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek((size - min(size, _PIECE)) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()[:32]
