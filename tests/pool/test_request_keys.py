"""Who asks is part of a key: vLLM's own block hashes carry adapter, image, prompt and salt.

Field report 3.6, with vLLM's real requests and hashes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvpp_connectors.pool.keys import Namespace, Shard
from tests.pool.test_keys import BASE, KVPP

BLOCK = 16
TOKENS = list(range(3 * BLOCK))


def adapter(name: str, number: int) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, number, f"/adapters/{name}")}


def image(name: str) -> dict[str, Any]:
    place = PlaceholderRange(offset=4, length=8)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", name, place)]}


VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "adapter A": adapter("A", 1),
    "adapter B": adapter("B", 2),
    "image 1": image("1"),
    "image 2": image("2"),
    "salt x": {"cache_salt": "x"},
    "salt y": {"cache_salt": "y"},
    "adapter A, salt x": adapter("A", 1) | {"cache_salt": "x"},
    "adapter A, image 1": adapter("A", 1) | image("1"),
}


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    init_none_hash(sha256)


def keys(name: str, **variant: Any) -> list[str]:
    """Of each of the prompt's blocks, as scheduler and worker make them."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(
        name, TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher, **variant
    )
    space = Namespace(BASE, KVPP)
    return [space.block_key(block_hash, Shard(0, 0)) for block_hash in request.block_hashes]


@pytest.mark.parametrize(("one", "other"), itertools.combinations(VARIANTS, 2))
def test_requests_of_one_prompt_that_ask_for_other_bytes_share_no_block(
    one: str, other: str
) -> None:
    found = [keys("r", **VARIANTS[which]) for which in (one, other)]
    assert len(found[0]) == len(found[1]) == 3
    assert not set(found[0]) & set(found[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_that_ask_for_the_same_share_all_blocks(variant: str) -> None:
    assert keys("r1", **VARIANTS[variant]) == keys("r2", **VARIANTS[variant])


def test_other_prompt_embeddings_share_no_block() -> None:
    def of(value: float) -> list[str]:
        embeds = torch.full((len(TOKENS), 8), value)
        return keys(f"{value}", prompt_embeds=embeds)

    assert not set(of(1.0)) & set(of(2.0)) and of(1.0) == of(1.0)
