"""What a mooncake_master says of its pool over HTTP. Asking grants no lease."""

from __future__ import annotations

import http.client
import random
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvpp_connectors.mooncake_admin.servers import MasterAddress
from kvpp_connectors.pool.keys import LayerId, ObjectName, Shard, parse_key
from kvpp_connectors.pool.store.base import PoolUnavailable, Store

__all__ = [
    "Contents",
    "MasterHttp",
    "Status",
    "by_namespace",
    "check_same_master",
    "count",
    "status_of",
]

T = TypeVar("T")

_ASKED = "master_batch_exist_key_items_total"  # counter: keys that were asked for

_KEYS_A_REQUEST = 200  # they are in the URL: some 30 KB
_SAMPLES = 64  # objects that both ports of one master must know
_PROBES = 512  # keys that nobody saves: the counter of one master rises by as many
_MOST_BYTES = 1 << 30  # of an answer: the names of 7 million objects


class _Replica(msgspec.Struct):
    size_: int


class _Object(msgspec.Struct):
    values: list[_Replica] | None = None  # replicas in memory


class _Objects(msgspec.Struct):
    data: dict[str, _Object]


class _Health(msgspec.Struct):
    ha_state: str


class MasterHttp:
    """The HTTP side of one master. Every call is bounded by ``timeout_s`` without a byte."""

    def __init__(self, master: MasterAddress, timeout_s: float = 5.0) -> None:
        self.master = master
        self._timeout_s = timeout_s

    def state(self) -> str:
        """``serving`` where all is well.

        Raises:
            PoolUnavailable: nobody answers, or something else than a master. So do all methods.
        """
        return self._decode("/health", _Health).ha_state

    def metrics(self) -> dict[str, int]:
        """The metrics that have no labels. Raises: as ``state``."""
        lines = (line.split() for line in self._ask("/metrics").decode().splitlines())
        pairs = (line for line in lines if len(line) == 2 and not line[0].startswith("#"))
        return {name: int(float(value)) for name, value in pairs if "{" not in name}

    def keys(self) -> list[str]:
        """The keys of all objects. Raises: as ``state``."""
        return self._ask("/get_all_keys").decode(errors="replace").splitlines()

    def segments(self) -> int:
        """How many pieces of memory processes lend. Raises: as ``state``."""
        return len(self._ask("/get_all_segments").splitlines())

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of memory under each key, replicas included; keys that are gone are left out.

        Args:
            keys: ours (`parse_key`): others may have characters that do not go into a URL.

        Raises: as ``state``.
        """
        sizes: dict[str, int] = {}
        for start in range(0, len(keys), _KEYS_A_REQUEST):
            names = ",".join(keys[start : start + _KEYS_A_REQUEST])
            found = self._decode(f"/batch_query_keys?keys={names}", _Objects).data
            for key, entry in found.items():
                if entry.values is not None:
                    sizes[key] = sum(replica.size_ for replica in entry.values)
        return sizes

    def _decode(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self._ask(path), type=kind)
        except msgspec.MsgspecError as error:
            raise self._no_master(path, str(error)) from error

    def _ask(self, path: str) -> bytes:
        host, port = self.master.host, self.master.http_port
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES + 1)
            status = answer.status
        except TimeoutError as error:
            raise PoolUnavailable(
                f"mooncake_master at http://{host}:{port} did not answer within "
                f"{self._timeout_s:g} s: it is stuck (stopped, or out of CPU or memory), or "
                "something between drops the packets. Engines go on without the pool; look at its "
                "process and its log, or restart it: what it kept is lost then."
            ) from error
        except http.client.HTTPException as error:
            raise self._no_master(path, f"{type(error).__name__} {error}") from error
        except OSError as error:
            raise PoolUnavailable(
                f"no mooncake_master answers at http://{host}:{port}: {error}. Start one "
                "(kvpp pool up), or correct --master and --http-port (its --metrics_port)."
            ) from error
        finally:
            connection.close()
        if status != http.client.OK or len(body) > _MOST_BYTES:
            raise self._no_master(path, f"HTTP {status}, {len(body):,} bytes")
        return body

    def _no_master(self, path: str, found: str) -> PoolUnavailable:
        return PoolUnavailable(
            f"what listens at http://{self.master.host}:{self.master.http_port} does not answer "
            f"{path} as a mooncake_master 0.3.13 does ({found}). --http-port is the master's "
            "--metrics_port."
        )


def check_same_master(http: MasterHttp, store: Store, keys: Sequence[str]) -> None:
    """Check that ``store`` is a client of the master whose HTTP side listed ``keys``.

    Both ports are options. What one master has listed is not to be removed from another.

    Raises:
        PoolUnavailable: it is another master, or one of the ports does not answer.
    """
    before = http.metrics().get(_ASKED, 0)
    asked = [*random.sample(keys, min(_SAMPLES, len(keys))), *_probes()]
    known = dict(zip(asked, store.exist(asked), strict=True))
    counted = http.metrics().get(_ASKED, 0) - before
    listed = set(http.keys())
    foreign = [key for key, there in known.items() if not there and key in listed]
    if foreign or counted < len(asked):
        raise PoolUnavailable(
            f"{http.master} and port {http.master.http_port} are not of one mooncake_master: "
            f"of {len(asked)} keys that the first was asked for the second counted {counted}, and "
            f"{len(foreign)} that it lists are not there. Nothing was removed. --http-port is the "
            "--metrics_port of the master that --master names."
        )


def _probes() -> list[str]:
    run = uuid.uuid4().hex
    return [f"kvpp-probe-{run}-{number}" for number in range(_PROBES)]


class Contents(msgspec.Struct):
    """The objects of one namespace, counted."""

    namespace: str
    blocks: int  # objects with a whole block of a shard
    layers: int  # with one layer of it
    markers: int  # without a payload
    bytes: int  # of memory, headers and replicas included


class Status(msgspec.Struct):
    """A pool. A counter that this Mooncake does not have is None."""

    master: str
    state: str
    stores: int  # pieces of memory that processes lend
    capacity_bytes: int | None
    used_bytes: int | None
    keys: int
    other_keys: int  # that are not of this connector
    lookups: int | None  # keys that were asked for; a save asks, too
    reads: int | None
    read_hits: int | None
    read_bytes: int | None
    evicted_keys: int | None
    evicted_bytes: int | None
    namespaces: list[Contents]


def status_of(http: MasterHttp) -> Status:
    """Ask for all of it. Raises: as ``MasterHttp.state``."""
    state, found, keys = http.state(), http.metrics(), http.keys()
    ours = by_namespace(keys)
    return Status(
        master=str(http.master),
        state=state,
        stores=http.segments(),
        capacity_bytes=found.get("master_total_capacity_bytes"),
        used_bytes=found.get("master_allocated_bytes"),
        keys=len(keys),
        other_keys=len(keys) - sum(len(names) for names in ours.values()),
        lookups=found.get(_ASKED),
        reads=found.get("total_get_nums_"),
        read_hits=found.get("valid_get_nums_"),
        read_bytes=found.get("mem_cache_hit_bytes_total"),
        evicted_keys=found.get("master_evicted_key_count"),
        evicted_bytes=found.get("master_evicted_size_bytes"),
        namespaces=[count(http, namespace, names) for namespace, names in ours.items()],
    )


def by_namespace(keys: Iterable[str]) -> dict[str, dict[str, ObjectName]]:
    """Our keys, taken apart, for each namespace; all sorted. What is not ours is left out."""
    ours = [(name, key) for key in keys if (name := parse_key(key)) is not None]
    found: dict[str, dict[str, ObjectName]] = {}
    for name, key in sorted(ours, key=lambda pair: _order(pair[0])):
        found.setdefault(name.namespace, {})[key] = name
    return found


def count(http: MasterHttp, namespace: str, names: Mapping[str, ObjectName]) -> Contents:
    """Count one namespace of `by_namespace`. Raises: as ``MasterHttp.state``."""
    kinds = Counter(name.kind for name in names.values())
    memory = sum(http.sizes(list(names)).values())
    return Contents(namespace, kinds["block"], kinds["layer"], kinds["marker"], memory)


def _order(name: ObjectName) -> tuple[str, bytes, Shard, bool, LayerId]:
    """What belongs together side by side, layers by number, the marker last."""
    layer = name.layer or LayerId(False, -1)
    return name.namespace, name.block_hash, name.shard, name.marker, layer
