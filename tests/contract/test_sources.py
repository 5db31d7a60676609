"""Names and parameters of a package, read from a tree of files made here and never imported."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvpp_connectors.vllm_api.sources import Sources

FILES = {
    "vllm/__init__.py": "raise RuntimeError('imported')",
    "vllm/config/__init__.py": """
        from vllm.config.cache import CacheConfig
        from .parallel import ParallelConfig as Parallel
        from .. import nothing
        from .circle import Round
    """,
    "vllm/config/cache.py": "class CacheConfig: size: int = 1",
    "vllm/config/parallel.py": "class ParallelConfig: tp = 1",
    "vllm/config/circle.py": "from vllm.config import Round",
    "vllm/worker.py": """
        from __future__ import annotations
        import torch
        from typing import TYPE_CHECKING, Generic, TypeVar
        from dataclasses import dataclass

        if TYPE_CHECKING:
            from vllm.config import CacheConfig
        else:
            CacheConfig = object
        try:
            import fast
            def kernel(fast_input): ...
        except ImportError:
            def slow_kernel(slow_input): ...

        current: int
        T = TypeVar("T")

        class Base(Generic[T], torch.nn.Module):
            kind = "base"

            def __init__(self, config):
                self.config = config
                self.left, self.right = 1, 2

            async def load(self, path, /, *paths, dummy=False, **rest): ...

            @property
            def size(self): ...

        class Worker(Base[int]):
            kind = "worker"

            def start(self):
                if self.config:
                    with self.lock:
                        self.runner: Runner = None
                def inner():
                    self.late = 1
                other.stranger = 2
                return self.only_read

        class Plain: ...

        @dataclass
        class Request:
            req_id: str
            blocks: list[int]

            def first(self): ...

        @dataclass
        class Resumed(Request):
            at: int = 0
    """,
}


@pytest.fixture
def vllm(tmp_path: Path) -> Sources:
    """The files above."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return Sources(tmp_path, "vllm 0.99")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.worker", "Worker"),
        ("vllm.worker", "Worker.start"),
        ("vllm.worker", "Worker.load"),  # of a base with parameters in brackets
        ("vllm.worker", "Worker.size"),  # a property
        ("vllm.worker", "Worker.config"),  # set in the base's constructor
        ("vllm.worker", "Worker.right"),  # set in a tuple
        ("vllm.worker", "Worker.runner"),  # annotated, below if and with
        ("vllm.worker", "Worker.late"),  # set in an inner function
        ("vllm.worker", "current"),
        ("vllm.worker", "kernel"),
        ("vllm.worker", "slow_kernel"),
        ("vllm.worker", "CacheConfig.size"),  # imported for type checkers
        ("vllm.config", "CacheConfig.size"),  # exported again
        ("vllm.config", "Parallel.tp"),  # by a relative import, under another name
    ],
)
def test_a_name_is_found(vllm: Sources, module: str, name: str) -> None:
    assert vllm.find(module, name) is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.worker", "Missing"),
        ("vllm.worker", "Worker.missing"),
        ("vllm.worker", "Worker.only_read"),
        ("vllm.worker", "Worker.stranger"),  # set on another object
        ("vllm.worker", "Worker.start.inner"),  # functions have no members
        ("vllm.worker", "Worker.forward"),  # torch's, not vLLM's
        ("vllm.worker", "kernel.cache"),
        ("vllm.missing", "Worker"),
        ("vllm.config", "ParallelConfig"),  # imported under another name
        ("vllm.config", "nothing"),
        ("vllm.config", "Round"),  # two modules that import it from each other
        ("vllm.worker", "torch"),
    ],
)
def test_what_is_not_there_is_not_found(vllm: Sources, module: str, name: str) -> None:
    assert vllm.find(module, name) is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Worker.load", ("self", "path", "dummy")),
        ("Worker", ("config",)),  # the constructor that it inherits
        ("Request", ("req_id", "blocks")),
        ("Resumed", ("at", "req_id", "blocks")),
        ("Plain", ()),
        ("Worker.kind", ()),
        ("Worker.runner", ()),
    ],
)
def test_parameters_are_those_of_the_call(
    vllm: Sources, name: str, parameters: tuple[str, ...]
) -> None:
    found = vllm.find("vllm.worker", name)
    assert found is not None
    assert vllm.parameters(found) == parameters


def test_a_subclass_comes_before_its_base(vllm: Sources) -> None:
    mine, its = (vllm.find("vllm.worker", f"{name}.kind") for name in ("Worker", "Base"))
    assert mine is not None and its is not None
    assert mine != its


def test_only_classes_have_members(vllm: Sources) -> None:
    """Through a re-export, where a definition names the module that it stands in."""
    found = vllm.find("vllm.config", "Parallel")
    assert found is not None
    assert found.module == "vllm.config.parallel"
    assert set(vllm.members(found)) == {"tp"}
    function = vllm.find("vllm.worker", "kernel")
    assert function is not None
    assert vllm.members(function) == {}
