"""Options of a proxy. Times are seconds; every wait has a timeout."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from yarl import URL

__all__ = ["ProxyOptions"]


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Nodes, timeouts and limits of one proxy.

    Raises:
        ValueError: a URL is not one, a leg has no node, or a timeout is not positive and finite.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    connect_timeout: float = 5.0
    prefill_timeout: float = 600.0  # the whole prefill leg
    decode_first_byte_timeout: float = 300.0  # a streamed answer: until its first token
    decode_timeout: float = 1800.0  # an answer that is not streamed: the whole of it
    stream_idle_timeout: float = 120.0  # between two chunks of a streamed answer
    client_timeout: float = 60.0  # for the client to send its body, or to take a chunk
    release_timeout: float = 10.0
    probe_interval: float = 5.0
    probe_timeout: float = 5.0
    shutdown_timeout: float = 30.0  # for running requests to end after SIGTERM
    retries: int = 2  # further tries after the first one, both legs together
    max_body_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            object.__setattr__(self, name, _clean(name, getattr(self, name)))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{_flag(field.name)} must be positive and finite, got {value}")
        if self.retries < 0:
            raise ValueError(f"--retries must not be negative, got {self.retries}")
        if self.max_body_bytes <= 0:
            raise ValueError(f"the limit of a body must be positive, got {self.max_body_bytes}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _clean(name: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    """The URLs without a trailing slash, each once."""
    cleaned = tuple(_clean_url(name, url) for url in urls)
    if not cleaned:
        raise ValueError(f"give at least one {_flag(name)} URL")
    if len(set(cleaned)) < len(cleaned):
        raise ValueError(f"{_flag(name)} names a node twice: {', '.join(cleaned)}")
    return cleaned


def _clean_url(name: str, text: str) -> str:
    example = "http://10.0.0.1:8100"
    try:
        url = URL(text)
    except ValueError as error:
        raise ValueError(f"{_flag(name)} {text}: {error}; expected e.g. {example}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{_flag(name)} {text}: no http URL; expected e.g. {example}")
    if url.user or url.password or url.query_string or url.fragment:
        raise ValueError(
            f"{_flag(name)} must not carry a user, a password, a query or a fragment: URLs are "
            f"logged and shown in errors; expected e.g. {example}"
        )
    return str(url).rstrip("/")
