"""What must be equal before one engine may use the KV of another: the same for every connector.

The same tokens give other KV where the weights, the numbers of the configuration or the arithmetic
differ. A name proves none of that: a folder may hold another checkpoint on another host, and a
branch on a hub moves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from kvpp_core.errors import KvppError

__all__ = [
    "DraftIdentity",
    "ModelIdentity",
    "canonical_digest",
    "kv_cache_dtype",
    "model_identity",
    "model_numbers",
    "weights_identity",
]

_DIGEST = 32  # hexadecimal digits: 128 bits
_SAMPLES = 64  # of each file of weights
_SAMPLE = 4096  # bytes
_LONGEST_NAME = 200  # characters that are sent of a model's name or path
_NOT_KNOWN = "not known"
# Where the configuration lies and who read it decide no bytes.
_NO_NUMBERS = ("transformers_version", "name_or_path")
_CACHE_DTYPES = {"fp8": "fp8_e4m3"}  # names of one dtype


@dataclass(frozen=True, slots=True)
class DraftIdentity:
    """The draft model of speculative decoding. How many tokens it drafts decides no byte."""

    method: str
    name: str  # "" where its weights are known: they say more than a path
    weights: str
    numbers: str

    def __str__(self) -> str:
        return f"{self.method}:{canonical_digest(asdict(self))}"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything of a model that decides the bytes of its KV, beside tokens and ranks."""

    name: str  # the whole name or path, or the operator's model_id
    revision: str  # the commit where it is known
    numbers: str  # digest of the configuration: see `model_numbers`
    weights: str  # see `weights_identity`
    dtype: str  # of the computation
    quantization: str  # of weights and activations; "" for none
    draft: DraftIdentity | None

    def __str__(self) -> str:
        """One line of less than 512 characters: `differences` compares two of them."""
        return "; ".join(f"{name}={value}" for name, value in self._values().items())

    def _values(self) -> dict[str, str]:
        values = {f.name: str(getattr(self, f.name)) for f in fields(self)}
        values["name"] = _shortened(self.name)
        values["weights"] = self.weights or _NOT_KNOWN
        values["draft"] = "none" if self.draft is None else str(self.draft)
        return values

    @staticmethod
    def differences(ours: str, theirs: str) -> list[tuple[str, str, str]]:
        """What differs between two identities that were made into text: name, ours, theirs.

        Where we have no draft model it does not matter whether they have one.
        """
        mine, other = _values_of(ours), _values_of(theirs)
        if mine.get("draft") == "none":
            other["draft"] = "none"
        return [
            (name, mine.get(name, _NOT_KNOWN), other.get(name, _NOT_KNOWN))
            for name in dict.fromkeys((*mine, *other))
            if mine.get(name) != other.get(name)
        ]


def model_identity(vllm_config: Any, model_id: str | None) -> ModelIdentity:
    """The identity of the model that an engine serves.

    Args:
        vllm_config: vLLM's VllmConfig.
        model_id: what the operator calls the weights, in place of their name or path.

    Raises:
        KvppError: a number of the configuration differs by process; names it.
        OSError: a file of weights cannot be read.
    """
    model = vllm_config.model_config
    folder, revision = _checkpoint(str(model.model), model.revision)
    return ModelIdentity(
        name=model_id or str(model.model),
        revision=revision,
        numbers=model_numbers(model.hf_text_config.to_dict()),
        weights=weights_identity(folder),
        dtype=_plain_dtype(model.dtype),
        quantization=str(model.quantization or ""),
        draft=_draft_identity(vllm_config.speculative_config),
    )


def kv_cache_dtype(vllm_config: Any) -> str:
    """The dtype of the KV cache by value: ``auto`` means the model's, which may differ between two
    engines, and one dtype may have two names.
    """
    named = str(vllm_config.cache_config.cache_dtype)
    if named == "auto":
        return _plain_dtype(vllm_config.model_config.dtype)
    return _CACHE_DTYPES.get(named, named)


def model_numbers(config: Mapping[str, Any]) -> str:
    """The digest of a model's own configuration: sizes, RoPE scaling, experts, all of it.

    Args:
        config: ``hf_text_config.to_dict()``, after the user's overrides.

    Raises:
        KvppError: a value has no text that is the same in every process; names the value.
    """
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in _NO_NUMBERS}
    return canonical_digest(kept)


def weights_identity(folder: Path) -> str:
    """32 hexadecimal digits over name, size and a sample of every ``*.safetensors`` file.

    A whole checkpoint takes minutes to read. A sample of each file takes milliseconds and differs
    for weights that were trained, merged or quantized differently. An edit of few values may escape
    it: whoever edits weights in place gives them a revision of their own.

    "" where there is none: a name on a hub that is not in this host's cache, weights of another
    format, a dummy load.

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
            for sample in range(_SAMPLES):
                file.seek((size - min(size, _SAMPLE)) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:_DIGEST]


def canonical_digest(document: Any) -> str:
    """32 hexadecimal digits of the SHA-256 of a document's canonical JSON.

    Raises:
        KvppError: a value has no text that is the same in every process.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def _draft_identity(speculative: Any) -> DraftIdentity | None:
    if speculative is None or speculative.draft_model_config is None:
        return None
    draft = speculative.draft_model_config
    folder, _ = _checkpoint(str(draft.model), draft.revision)
    weights = weights_identity(folder)
    return DraftIdentity(
        method=str(speculative.method),
        name="" if weights else str(draft.model),
        weights=weights,
        numbers=model_numbers(draft.hf_text_config.to_dict()),
    )


def _checkpoint(name: str, revision: str | None) -> tuple[Path, str]:
    """Where the weights lie on this host, if anywhere, and which revision they are."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:  # the name is of no hub: an address of an object store
            found = None
        if isinstance(found, str):
            folder = Path(found).parent
    commit = folder.name if folder.parent.name == "snapshots" else None
    return folder, commit or revision or "main"


def _plain_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shortened(name: str) -> str:
    """A name without what separates the values of an identity, and of bounded length."""
    name = name.replace("; ", ";")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"...{name[-_LONGEST_NAME // 2 :]}#{canonical_digest(name)}"


def _values_of(identity: str) -> dict[str, str]:
    pairs = (value.partition("=") for value in identity.split("; "))
    return {name: value for name, _, value in pairs}


def _plain(value: object) -> Any:
    """What JSON does not know, as text that is the same in every process."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise KvppError(
        f"a value of type {type(value).__name__} ({value!r:.80}) decides the bytes of KV but has "
        "no text that is the same in every process; expected what JSON can say"
    )
