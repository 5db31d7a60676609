"""examples/memcache/check.py, as far as it goes without an NPU.

Its moves run over the stand-in for MemCache's data plane, its processes against the real
MetaService.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvpp_connectors.pool.store.memcache import MemCacheStore
from tests.pool.metaservice import ROOT, memcache_path
from tests.pool.stores import MemCacheStandInStore

CHECK = ROOT / "examples" / "memcache" / "check.py"
KEYS = [f"kvpp1@check{i}" for i in range(5)]


def run(path: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), *options],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.process
def test_its_options_are_explained() -> None:
    ended = run(str(ROOT), "--help")
    assert ended.returncode == 0 and "--second-device" in ended.stdout


@pytest.mark.process
def test_its_dry_part_looks_up_in_a_metaservice_that_it_starts() -> None:
    ended = run(memcache_path(), "--dry")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 of 32 blocks" in ended.stdout and "all as expected" in ended.stdout


@pytest.mark.process
def test_without_an_npu_it_fails_and_says_what_is_needed() -> None:
    ended = run(memcache_path(), "--memory", "host", "--protocol", "host_shm", "--lend", "128MB")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED  saver" in ended.stdout and "needs an NPU" in ended.stdout


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memcache_check", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_steps_are_as_expected_over_the_stand_in(check: ModuleType, tmp_path: Path) -> None:
    store = MemCacheStandInStore(tmp_path)
    assert isinstance(store.backend, MemCacheStore)
    report = check.Report()
    check.save(store.backend, KEYS, check.Caches("cpu", len(KEYS), 3, 1000), report)
    check.load(store.second(), KEYS, check.Caches("cpu", len(KEYS), 3, 1000), report)
    assert report.failed == 0
    store.close()


def test_it_sees_one_wrong_byte_and_one_lost_block(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemCacheStandInStore(tmp_path)
    check.save(store.backend, KEYS, check.Caches("cpu", len(KEYS), 3, 1000), check.Report())
    data = bytearray(store.read(KEYS[3]))
    data[1500] ^= 1
    store.replace(KEYS[3], bytes(data))
    store.remove(KEYS[1])
    report = check.Report()
    check.load(store.backend, KEYS, check.Caches("cpu", len(KEYS), 3, 1000), report)
    assert report.failed == 2
    assert "4 wrong rows" in capsys.readouterr().out  # the lost block's 3, and 1
    store.close()
