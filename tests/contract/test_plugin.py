"""Disabled means absent: what the plug-in imports and changes in a launch that does not ask for it.

Questions about imports are asked in processes of their own.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import kvpp_connectors
import kvpp_core
from kvpp_connectors import plugin
from kvpp_connectors.launch.modules import CONNECTOR_MODULES
from tests.contract.processes import run_python

PACKAGES = {package.__name__: Path(package.__path__[0]) for package in (kvpp_connectors, kvpp_core)}
MAY_IMPORT_VLLM = {
    *(f"kvpp_connectors.engine.{name}" for name in ("cpu.worker", "cpu.sparse_mla", "cuda")),
    *(
        f"kvpp_connectors.{kind}.{name}"
        for kind in ("p2p", "pool")
        for name in ("connector", "messages", "metrics")
    ),
    "kvpp_connectors.multi.connector",
    *(f"kvpp_connectors.connector.{name}" for name in ("base", "stats")),  # of both connectors
}

LIGHT = [
    "kvpp_connectors",
    "kvpp_connectors.connector",
    "kvpp_connectors.connector.names",
    "kvpp_connectors.launch",
    "kvpp_connectors.launch.mention",
    "kvpp_connectors.launch.modules",
    "kvpp_connectors.plugin",
]

# One process, because importing vLLM costs 10 to 25 seconds: it registers the plug-in, then takes
# it away and configures launches that do not ask for KVPP without it and with it.
PROGRAM = """
    import json, re, sys, time
    import vllm.platforms

    platform = type(vllm.platforms.current_platform)  # vLLM finds its platform here
    names = ("apply_config_platform_defaults", "check_and_update_config")

    def hooks():
        return [platform.__dict__.get(name) for name in names]

    vllms_own = hooks()
    before = set(sys.modules)
    started = time.process_time()
    from kvpp_connectors import plugin
    plugin.register()
    found = {
        "seconds": time.process_time() - started,
        "new": sorted(set(sys.modules) - before),
    }
    wrappers = hooks()
    for _ in range(3):
        plugin.register()
    found["wrapped_once"] = not set(wrappers) & set(vllms_own) and hooks() == wrappers

    from vllm.engine.arg_utils import EngineArgs

    def launch(**options):
        config = EngineArgs(
            model=sys.argv[1], tensor_parallel_size=2, enforce_eager=True, dtype="float32",
            skip_tokenizer_init=True, max_model_len=512, seed=0, **options
        ).create_engine_config()
        unique = r"0x[0-9a-f]+|(?<=instance_id=)'[^']*'"
        return {
            "hash": config.compute_hash(),
            "repr": re.sub(unique, "", repr(config)),
            "text": str(config),
            "worker": config.parallel_config.worker_cls,
        }

    def launches():
        return [launch(), launch(additional_config={"enable_kv_nz": True})]

    for name, own in zip(names, vllms_own):
        delattr(platform, name) if own is None else setattr(platform, name, own)
    found["without"] = launches()
    found["loaded_by_vllm"] = hooks() != vllms_own
    plugin.register()
    found["with"] = launches()
    found["modules"] = sorted(module for module in sys.modules if module.startswith("kvpp"))
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, mla_model: Path) -> Any:
    """What the program found."""
    folder = tmp_path_factory.mktemp("plugin")
    return run_python(PROGRAM, folder, str(mla_model), VLLM_PLUGINS="")


@pytest.mark.process
def test_registering_imports_the_plugin_module_and_nothing_else(found: Any) -> None:
    assert found["new"] == LIGHT


@pytest.mark.process
def test_registering_costs_less_than_50_ms(found: Any) -> None:
    """Processor time of the process, so that other work on the machine does not count."""
    assert found["seconds"] < 0.05


@pytest.mark.process
def test_registering_again_wraps_nothing_again(found: Any) -> None:
    assert found["wrapped_once"] is True


@pytest.mark.process
@pytest.mark.parametrize("launch", [0, 1], ids=["nothing", "keys of others"])
def test_a_plain_launch_is_the_same_with_the_plugin(found: Any, launch: int) -> None:
    """Every field of the VllmConfig, without additional_config and with somebody else's."""
    assert found["loaded_by_vllm"] is False  # VLLM_PLUGINS='': the first launches lack it
    without = found["without"][launch]
    assert len(without["repr"]) > 1000
    assert without == found["with"][launch]
    assert without["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.mark.process
def test_a_plain_launch_imports_no_other_module_of_ours(found: Any) -> None:
    assert found["modules"] == LIGHT


def test_the_entry_point_is_registered() -> None:
    (found,) = {
        (point.name, point.value)
        for point in entry_points(group="vllm.general_plugins")
        if "kvpp" in point.value
    }
    assert found == ("kvpp_connectors", "kvpp_connectors.plugin:register")
    (point,) = entry_points(group="vllm.general_plugins", name="kvpp_connectors")
    assert point.load() is plugin.register


class Platform:
    """As much of a vLLM platform as the plug-in touches. Each test makes a subclass."""

    device_type = "npu"
    seen: ClassVar[list[Any]]

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Note the call."""
        cls.seen.append(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Note the call."""
        cls.seen.append(vllm_config)


HOOKS = ("apply_config_platform_defaults", "check_and_update_config")


def config_of(
    additional_config: object,
    worker_cls: str = "auto",
    connector: str | None = None,
    children: list[Any] | None = None,
) -> SimpleNamespace:
    """As much of a VllmConfig as the plug-in looks at."""
    transfer = SimpleNamespace(
        kv_connector=connector, kv_connector_extra_config={"connectors": children}
    )
    return SimpleNamespace(
        additional_config=additional_config,
        kv_transfer_config=None if connector is None else transfer,
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
    )


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type[Platform]:
    """A platform of this test alone, as vLLM's current one."""
    import vllm.platforms

    fresh = type("Fresh", (Platform,), {"seen": []})
    monkeypatch.setattr(vllm.platforms, "current_platform", fresh())
    return fresh


def install_ascend(monkeypatch: pytest.MonkeyPatch, folder: Path, config: str) -> None:
    """A vllm-ascend that must not be imported, with this text in its configuration."""
    package = folder / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "ascend_config.py").write_text(config)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("native", [True, False])
def test_the_plugin_steps_back_where_kvpp_is_native(
    platform: type[Platform],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    native: bool,
) -> None:
    """vllm-ascend >= 0.28 has a KVPP under the same switch; other platforms are not asked."""
    install_ascend(monkeypatch, tmp_path, f"config.get({'enable_kvpp' if native else 'other'!r})")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm"):
        plugin.register()
    assert all((name in vars(platform)) is not native for name in HOOKS)
    said = [record for record in caplog.records if "KVPP of its own" in record.message]
    assert len(said) == native
    assert all(module in said[0].message for module in CONNECTOR_MODULES.values() if native)
    platform.device_type = "cpu"
    plugin.register()
    assert all(name in vars(platform) for name in HOOKS)


@pytest.mark.parametrize(
    "additional_config",
    [{}, {"enable_kv_nz": True}, {1: 2, None: 3}, object(), None, "enable_kvpp", ["kvpp"]],
    ids=str,
)
@pytest.mark.parametrize("connector", [None, "NixlConnector", "MultiConnector"])
def test_what_is_not_for_us_goes_to_the_platform_untouched(
    platform: type[Platform], additional_config: object, connector: str | None
) -> None:
    """vLLM lets additional_config be any object with a hash."""
    plugin.register()
    config, same = (
        config_of(additional_config, connector=connector, children=[{"kv_connector": "Nixl"}, 7])
        for _ in range(2)
    )
    for name in HOOKS:
        getattr(platform, name)(config)
    assert platform.seen == [config, config]
    assert config == same


FOR_US = {
    **{
        key: config_of({key: True})
        for key in ("enable_kvpp", "kvpp", "enable_kvp", "KVPP_size", "Enable_KVPP", "enabel_kvpp")
    },
    **{
        name: config_of({}, connector=name)
        for name in ("MooncakeConnectorV2", "AscendStoreConnector", "MooncakeConectorV2")
    },
    "a child": config_of(
        {}, connector="MultiConnector", children=["x", {"kv_connector": "AscendStoreConector"}]
    ),
    "our worker class": config_of({}, "kvpp_connectors.engine.cpu.worker.KvppCpuWorker"),
    "our worker class with an object": config_of(object(), "kvpp_connectors.engine.cpu.worker.Any"),
}


@pytest.mark.parametrize("name", FOR_US)
def test_what_may_be_for_us_is_examined_and_configured_once(
    platform: type[Platform], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Misspelt keys too: who reads them says so. The platform's own hooks run as well."""
    from kvpp_connectors.engine import configure as setup

    calls: list[Any] = []

    def configure(config: Any, hook: Callable[[Any], None]) -> None:
        calls.append(("configure", config))
        hook(1)

    monkeypatch.setattr(setup, "examine", lambda config: calls.append(("examine", config)))
    monkeypatch.setattr(setup, "configure", configure)
    plugin.register()
    plugin.register()
    config = FOR_US[name]
    platform.apply_config_platform_defaults(config)
    assert (calls, platform.seen) == ([("examine", config)], [config])
    platform.check_and_update_config(config)
    assert calls[1:] == [("configure", config)]
    assert platform.seen == [config, 1]  # the platform's own hook was handed over


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module of both packages, by dotted name."""
    for name, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [name, *file.relative_to(folder).with_suffix("").parts]
            yield ".".join(parts).removesuffix(".__init__"), ast.parse(file.read_text())


def imported(node: ast.AST, functions: bool) -> Iterator[str]:
    """Modules that the code below ``node`` imports; inside functions only if asked for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports would escape this test"
            yield child.module or ""
        elif functions or not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            yield from imported(child, functions)


def packages_of(names: Iterator[str]) -> set[str]:
    """The top-level packages of module names."""
    return {name.partition(".")[0] for name in names}


def test_only_the_worker_classes_import_vllm_at_import_time() -> None:
    """`kvpp plan` and the core work without vLLM, and the plug-in does not pull it in."""
    found = {
        name for name, tree in sources() if "vllm" in packages_of(imported(tree, functions=False))
    }
    assert found == MAY_IMPORT_VLLM


def test_the_core_never_imports_vllm_or_the_connectors() -> None:
    for name, tree in sources():
        if name.startswith("kvpp_core"):
            assert not {"vllm", "kvpp_connectors"} & packages_of(imported(tree, functions=True))


def test_nothing_of_the_wheel_imports_what_is_not_in_it() -> None:
    for _, tree in sources():
        assert not {"benchmarks", "tests"} & packages_of(imported(tree, functions=True))


def test_the_plugin_imports_nothing_heavy_itself() -> None:
    light = {"__future__", "collections", "importlib", "pathlib", "typing"}
    trees = dict(sources())
    for name in LIGHT:
        found = set(imported(trees[name], functions=False)) - set(LIGHT)
        assert packages_of(iter(found)) <= light, name
