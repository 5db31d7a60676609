"""The wheel as a user gets it: its content, its entry points, and vLLM finding them.

Built with `python -m build` (which fetches hatchling if it is not installed) and installed into a
fresh virtual environment that borrows vLLM from the one the tests run in.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes import run, run_python

pytestmark = [pytest.mark.process, pytest.mark.network]

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("kvpp_core", "kvpp_connectors")
EXAMPLE = REPOSITORY / "examples" / "configs" / "deepseek-v2-lite"

LAUNCH = """
    import inspect, json, sys
    from importlib.metadata import distribution, entry_points
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.import_utils import resolve_obj_by_qualname

    (point,) = entry_points(group="vllm.general_plugins", name="kvpp_connectors")
    config = EngineArgs(
        model=sys.argv[1], tensor_parallel_size=2, enforce_eager=True, dtype="float32",
        skip_tokenizer_init=True, max_model_len=512, additional_config={"enable_kvpp": True},
    ).create_engine_config()
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    print(json.dumps({
        "distribution": str(point.dist.locate_file("")),
        "version": point.dist.version,
        "plugin": inspect.getfile(point.load()),
        "worker_cls": config.parallel_config.worker_cls,
        "worker": inspect.getfile(worker),
        "core": inspect.getfile(sys.modules["kvpp_core"]),
        "vllm": inspect.getfile(sys.modules["vllm"]),
    }))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    isolation = [] if importlib.util.find_spec("hatchling") is None else ["--no-isolation"]
    command = [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", folder, REPOSITORY]
    built = run(command, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone; everything else comes after it on the path."""
    folder = tmp_path_factory.mktemp("venv")
    made = run([sys.executable, "-m", "venv", folder], folder)
    assert made.returncode == 0, made.stdout + made.stderr
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    installed = run(pip, folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def read(wheel: Path, name: str) -> str:
    """A text file of the wheel's dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Every module of the repository, and no tests, documents, caches or build files."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/")[0] for name in names - info} == set(PACKAGES)
    assert len({name.split("/")[0] for name in info}) == 1
    modules = {
        str(file.relative_to(REPOSITORY))
        for package in PACKAGES
        for file in (REPOSITORY / package).rglob("*.py")
    }
    assert names - info == modules


def test_the_wheel_is_pure_python_for_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Root-Is-Purelib: true" in read(wheel, "WHEEL")


def test_the_entry_points_are_the_command_and_the_plugin(wheel: Path) -> None:
    points = configparser.ConfigParser()
    points.read_string(read(wheel, "entry_points.txt"))
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"kvpp": "kvpp_connectors.cli.main:main"},
        "vllm.general_plugins": {"kvpp_connectors": "kvpp_connectors.plugin:register"},
    }


def test_the_metadata_names_no_vllm_as_a_requirement(wheel: Path) -> None:
    """vLLM has another distribution name on every platform, so it is an extra."""
    metadata = Parser().parsestr(read(wheel, "METADATA"))
    assert metadata["Name"] == "kvpp-connectors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"cpu", "cuda", "ascend"}
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert always and not any("vllm" in line for line in always)


def test_the_command_of_the_wheel_plans(venv: Path) -> None:
    """`kvpp plan` as a user runs it, on a model of the examples."""
    command = [venv / "bin" / "kvpp", "plan", "--model", EXAMPLE, "--tp", "4", "--json"]
    finished = run(command, venv)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert json.loads(finished.stdout)["ratio"] == 3.0


@pytest.fixture(scope="module")
def launch(venv: Path, mla_model: Path) -> Any:
    """What a launch with KVPP on finds in the environment of the wheel."""
    python = str(venv / "bin" / "python")
    return run_python(LAUNCH, venv, str(mla_model), python=python, PYTHONPATH=None)


def test_vllm_finds_the_plugin_of_the_wheel(launch: Any, venv: Path, wheel: Path) -> None:
    """Through importlib.metadata, from the new environment and not from the repository."""
    assert Path(launch["distribution"]).is_relative_to(venv)
    assert Path(launch["plugin"]).is_relative_to(venv)
    assert wheel.name.startswith(f"kvpp_connectors-{launch['version']}-")
    assert not Path(launch["vllm"]).is_relative_to(venv)  # borrowed


def test_a_launch_gets_the_worker_class_of_the_wheel(launch: Any, venv: Path) -> None:
    """Nobody but vLLM has loaded the plug-in in that process when the launch is configured."""
    assert launch["worker_cls"] == "kvpp_connectors.engine.cpu.worker.KvppCpuWorker"
    assert Path(launch["worker"]).is_relative_to(venv)
    assert Path(launch["core"]).is_relative_to(venv)
