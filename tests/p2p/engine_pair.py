"""A prefill and a decode engine, as tests start, ask and restart them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.harness import kvpp_off, kvpp_on
from tests.p2p.pull_faults import EXTENSION
from tests.p2p.remote_engine import RemoteEngine
from tests.p2p.sides import eventually

__all__ = ["LEASE", "MTP", "PREFILL", "TOKENS", "Pair", "transfer"]

MTP = {"method": "mtp", "num_speculative_tokens": 1}
PREFILL = {"do_remote_decode": True}
LEASE = 4.0  # seconds
TOKENS = 12


def transfer(role: str, port: int, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config of our connector."""
    return {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": role,
        "kv_port": port,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"control_timeout_s": 2.0, "pull_timeout_s": 150.0, **extra},
    }


@dataclass
class Pair:
    """Prefill of two ranks with KVPP, decode of one; each may be replaced by a new one.

    ``options`` are prefill's own; ``environment`` and ``extra`` are decode's.
    """

    folder: Path
    model: Path
    port: int  # the first of prefill's two
    decode_port: int
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # for kv_connector_extra_config
    policy: str = "recompute"  # decode's kv_load_failure_policy
    prefill: RemoteEngine = field(init=False)
    decode: RemoteEngine = field(init=False)

    def start_prefill(self) -> None:
        """Start a prefill engine, at the same ports as the one before."""
        self.prefill = RemoteEngine(
            self.model,
            self.folder / "prefill.log",
            additional_config=kvpp_on(),
            tp=2,
            speculative_config=MTP,
            kv_transfer_config=transfer("kv_producer", self.port, lease_seconds=LEASE),
            **self.options,
        )

    def start_decode(self) -> None:
        """Start a decode engine."""
        self.decode = RemoteEngine(
            self.model,
            self.folder / f"decode-{self.policy}.log",
            environment=self.environment,
            additional_config=kvpp_off(),
            tp=1,
            speculative_config=MTP,
            worker_extension_cls=EXTENSION,
            kv_transfer_config=transfer("kv_consumer", self.decode_port, self.policy, **self.extra),
        )

    def stop(self) -> None:
        """End what was started."""
        for name in ("prefill", "decode"):
            if hasattr(self, name):
                getattr(self, name).stop()

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """kv_transfer_params of a prompt."""
        answer = self.prefill.ask("generate", prompt=prompt, max_tokens=1, params=PREFILL)
        assert answer["params"]["do_remote_prefill"] is True
        params: dict[str, Any] = answer["params"]
        return params

    def decoded(self, prompt: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """Decode's answer."""
        return self.finished(self.started(prompt, params))

    def started(self, prompt: list[int], params: dict[str, Any] | None) -> str:
        """A request that decode has; its id."""
        name: str = self.decode.ask("add", prompt=prompt, max_tokens=TOKENS, params=params)
        return name

    def finished(self, name: str, seconds: float = 120) -> dict[str, Any]:
        """The answer to a request that decode has."""
        answer: dict[str, Any] = self.decode.ask("finish", seconds, name=name)
        return answer

    def held(self, what: str, prompt: list[int], params: dict[str, Any], after: int = 3) -> str:
        """A request whose pull stands before a read, or before it confirms; its id."""
        self.decode.call("fault_hold", what, after)
        name = self.started(prompt, params)
        eventually(self._stands)
        return name

    def expected(self, prompt: list[int]) -> list[int]:
        """What decode answers on its own, from an empty prefix cache."""
        self.decode.ask("reset")
        tokens: list[int] = self.decoded(prompt, None)["tokens"]
        self.decode.ask("reset")
        return tokens

    def _stands(self) -> Any:
        self.decode.ask("step")
        return self.decode.call("observe_held")

    def settled(self) -> tuple[dict[str, int], dict[str, int]]:
        """Free blocks and requests of both, as soon as no request is left."""
        return self.prefill.ask("settle"), self.decode.ask("settle")
