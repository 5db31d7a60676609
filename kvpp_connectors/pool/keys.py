"""Names of pool objects: what must be equal before two engines may share bytes.

    kvpp1@<fingerprint>@<topology>@<block hash>@pp0r3        a block's share of one shard
    kvpp1@<fingerprint>@<topology>@<block hash>@pp0r3@t12    one layer of it
    kvpp1@<fingerprint>@<topology>@<block hash>@pp0r3@done   all its layers are there

The fingerprint covers the engine's side: everything but tokens and ranks that decides the bytes.
vLLM's block hash covers the request's side: tokens, LoRA, multimodal inputs and salt. The topology
covers the ranks: who keeps which layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kvpp_connectors.connector.identity import canonical_digest
from kvpp_core.errors import KvppError
from kvpp_core.manifest import Manifest

__all__ = [
    "FORMAT_VERSION",
    "Fingerprint",
    "LayerId",
    "Namespace",
    "ObjectName",
    "Shard",
    "SpeculativeCache",
    "Topology",
    "hash_seed",
    "parse_key",
]

FORMAT_VERSION = 1  # of keys, headers and the order of bytes in an object
MAX_KEY = 224  # characters; the longest key of this module, with room below MemCache's 256
_DIGEST = 32  # hexadecimal digits: 128 bits
_SEEDED_HASHES = ("sha256", "sha256_cbor")  # vLLM gives these one seed for all processes
_RANDOM_HASHES = ("xxhash", "xxhash_cbor")  # and these one seed for each process
_DEFAULT_SEED = "vllm-none-hash"
_KEY = re.compile(
    rf"(?P<namespace>kvpp{FORMAT_VERSION}@[0-9a-f]{{{_DIGEST}}}"
    rf"@(?:kvpp|replicated)(?:-[0-9a-f]{{{_DIGEST}}})?)"
    r"@(?P<hash>(?:[0-9a-f]{2}){8,32})@pp(?P<stage>\d{1,6})r(?P<owner>\d{1,6})"
    r"(?:@(?:(?P<kind>[td])(?P<layer>\d{1,6})|(?P<done>done)))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class SpeculativeCache:
    """The draft caches that lie beside the target's. The number of draft tokens decides none."""

    method: str
    model: str
    weights: str  # as Fingerprint.weights
    components: tuple[tuple[str, int], ...]  # name, bytes per block; known with KVPP
    numbers: str = ""  # digest of the draft's configuration


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything of an engine that decides the bytes of a block, beside its tokens and ranks."""

    model: str  # the whole name or path, not its last part: two models may share that
    revision: str
    numbers: str  # digest of the model's configuration: see connector/identity.py
    weights: str  # what tells two sets of weights of one name apart; "" where not known
    model_dtype: str  # of the computation
    kv_cache_dtype: str  # resolved: never "auto"
    quantization: str  # of weights and activations; "" for none
    cache_layout: str  # order of the dimensions within a block
    block_size: int  # tokens
    hash_algorithm: str  # vLLM's prefix_caching_hash_algo
    hash_seed: str  # see hash_seed
    speculative: SpeculativeCache | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.kv_cache_dtype in ("", "auto"):
            raise KvppError(
                f"the KV cache dtype {self.kv_cache_dtype!r} does not say what the bytes are: "
                "give the model's dtype where vLLM says auto"
            )
        for name in ("model", "numbers", "hash_algorithm", "hash_seed"):
            if not getattr(self, name):
                raise KvppError(f"a pool's fingerprint needs {name}; it is empty")

    def digest(self) -> str:
        """32 hexadecimal digits that differ wherever a field does."""
        return canonical_digest(asdict(self))


class Shard(NamedTuple):
    """Whose share of a block: the owner's rank within the group of a pipeline stage."""

    stage: int
    owner: int

    @property
    def tag(self) -> str:
        """As it is written in a key."""
        return f"pp{self.stage}r{self.owner}"


@dataclass(frozen=True, slots=True, order=True)
class LayerId:
    """A transformer layer by its model-wide index; draft layers count for themselves."""

    draft: bool
    index: int

    @property
    def tag(self) -> str:
        """As it is written in a key."""
        return f"{'d' if self.draft else 't'}{self.index}"


@dataclass(frozen=True, slots=True)
class Topology:
    """How a block is split over ranks: the name of the split, and the shards that have bytes."""

    name: str
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if not self.shards:
            raise KvppError(f"topology {self.name} has no shards: every block would be a hit")

    @classmethod
    def replicated(
        cls, stage_layers: Sequence[Sequence[str]], heads_split_over: int = 1
    ) -> Topology:
        """No KVPP. ``stage_layers`` are the layer names of each pipeline stage.

        ``heads_split_over``: TP ranks that keep different heads; 1 where all keep the same (MLA).
        """
        shards = tuple(
            Shard(stage, rank)
            for stage in range(len(stage_layers))
            for rank in range(heads_split_over)
        )
        if len(shards) == 1:
            return cls("replicated", shards)
        split = {"stages": [sorted(names) for names in stage_layers], "heads": heads_split_over}
        return cls(f"replicated-{canonical_digest(split)}", shards)

    @classmethod
    def kvpp(
        cls, manifests: Sequence[Manifest], stages_with_drafts: Sequence[int] = ()
    ) -> Topology:
        """KVPP, from the manifest of each pipeline stage's group, in order.

        A rank that keeps no layer has no shard, unless its stage keeps drafts.

        Raises:
            KvppError: there is no manifest.
        """
        if not manifests:
            raise KvppError("a KVPP topology needs the manifest of every pipeline stage; got none")
        digests = [manifest.digest() for manifest in manifests]
        name = digests[0][:_DIGEST] if len(digests) == 1 else canonical_digest(digests)
        shards = tuple(
            Shard(stage, rank)
            for stage, manifest in enumerate(manifests)
            for rank in range(manifest.ranks)
            if rank in manifest.owners or stage in stages_with_drafts
        )
        return cls(f"kvpp-{name}", shards)


@dataclass(frozen=True, slots=True)
class Namespace:
    """All keys of one kind of engine. Unlike engines have unlike prefixes."""

    fingerprint: Fingerprint
    topology: Topology
    prefix: str = ""

    def __post_init__(self) -> None:
        name = f"kvpp{FORMAT_VERSION}@{self.fingerprint.digest()}@{self.topology.name}"
        object.__setattr__(self, "prefix", name)

    def block_key(self, block_hash: bytes, shard: Shard) -> str:
        """The key of one shard's share of a whole block. ``block_hash`` is vLLM's, 8 to 32 bytes.

        Raises:
            KvppError: that is no block hash.
        """
        if not 8 <= len(block_hash) <= 32:
            raise KvppError(
                f"a block hash of {len(block_hash)} bytes cannot name a pool object; "
                "expected 8 to 32 bytes"
            )
        return f"{self.prefix}@{block_hash.hex()}@{shard.tag}"

    def layer_key(self, block_hash: bytes, shard: Shard, layer: LayerId) -> str:
        """The key of one layer of a shard's share of a block."""
        return f"{self.block_key(block_hash, shard)}@{layer.tag}"

    def commit_key(self, block_hash: bytes, shard: Shard) -> str:
        """The key that exists once all layers of a shard's share of a block do."""
        return f"{self.block_key(block_hash, shard)}@done"

    def required_keys(self, block_hash: bytes, layerwise: bool) -> tuple[str, ...]:
        """What must exist for a block to be a hit: one key for each shard, never for each layer."""
        key = self.commit_key if layerwise else self.block_key
        return tuple(key(block_hash, shard) for shard in self.topology.shards)


class ObjectName(NamedTuple):
    """A key, taken apart."""

    namespace: str  # Namespace.prefix
    block_hash: bytes
    shard: Shard
    layer: LayerId | None  # of a layer's object
    marker: bool  # whether it is a commit marker, and has no bytes of a cache

    @property
    def kind(self) -> str:
        """``block``, ``layer`` or ``marker``."""
        return "marker" if self.marker else "block" if self.layer is None else "layer"


def parse_key(key: str) -> ObjectName | None:
    """What a key of `Namespace` says; None for a key of anybody else."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    layer = LayerId(found["kind"] == "d", int(found["layer"])) if found["layer"] else None
    return ObjectName(
        found["namespace"],
        bytes.fromhex(found["hash"]),
        Shard(int(found["stage"]), int(found["owner"])),
        layer,
        found["done"] is not None,
    )


def hash_seed(algorithm: str, environment: Mapping[str, str]) -> str:
    """The seed that vLLM's block hashes start from in every process with this environment.

    Raises:
        KvppError: each process would get its own, so that nothing saved is ever found.
    """
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm in _SEEDED_HASHES:
        return _DEFAULT_SEED
    kind = "is random in each process" if algorithm in _RANDOM_HASHES else "is not known to be one"
    raise KvppError(
        f"the seed of prefix_caching_hash_algo={algorithm} {kind}: what this engine saves into the "
        "pool no other would find. Set PYTHONHASHSEED to one value on all nodes, or use "
        f"{' or '.join(_SEEDED_HASHES)}."
    )
