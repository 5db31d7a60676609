"""Loggers that vLLM's own logging configuration reaches: children of the logger ``vllm``."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger for a module of this project, by its last two words: ``vllm.kvpp.<name>``."""
    return logging.getLogger(f"vllm.kvpp.{name.rsplit('.', 1)[-1]}")
