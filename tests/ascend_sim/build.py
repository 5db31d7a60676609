"""Builds the simulated CANN beside an unmodified torch-npu: shared libraries of CANN's names.

torch-npu links against six libraries of CANN and needs some 80 C functions of them to be loaded.
What the tests use is written in cann/, against the headers that torch-npu brings. For every other
function that torch-npu names the build makes one that says so on stderr and ends the process.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["build"]

SOURCES = Path(__file__).parent / "cann"
COMPILER = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
EMPTY = ("libge_runner", "libgraph", "libacl_tdt_channel")
CANN = re.compile(r"(acl[a-z]*|Hccl|Msprof|rt)[A-Z]\w+")  # CANN's C functions

REFUSAL = """\
#include <cstdio>
#include <cstdlib>
static int refuse(const char* name) {
    std::fprintf(stderr, "simulated CANN: %s is not simulated\\n", name);
    std::abort();
}
"""


def build(torch_npu: Path, folder: Path) -> None:
    """Compile everything into ``folder``, unless it is newer than all sources.

    ``torch_npu`` is the installed package.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its words are on stderr.
    """
    ready = folder / "ready"
    sources = [*SOURCES.iterdir(), Path(__file__), torch_npu]
    if ready.exists() and all(s.stat().st_mtime < ready.stat().st_mtime for s in sources):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _compile(torch_npu, folder)
    ready.touch()


def _compile(torch_npu: Path, folder: Path) -> None:
    include = torch_npu / "include"
    flags = [f"-I{include}", f"-I{include / 'third_party/acl/inc'}", f"-I{SOURCES}", f"-L{folder}"]

    def library(name: str, *parts: str | Path) -> None:
        output = folder / f"{name}.so"
        soname = f"-Wl,-soname,{output.name}"
        subprocess.run([*COMPILER, *flags, *map(str, parts), soname, "-o", output], check=True)

    for name in EMPTY:
        library(name, "-x", "c++", "/dev/null")
    runtime = [SOURCES / "streams.cpp", SOURCES / "runtime.cpp"]
    library("libascendcl", *runtime)
    link = ["-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    library("libacl_op_compiler", SOURCES / "compiler.cpp", *link)
    library("libopapi", SOURCES / "opapi.cpp", *link)
    library("libhccl", SOURCES / "hccl.cpp", SOURCES / "mesh.cpp", *link)
    missing = sorted(_needed(torch_npu) - _symbols("--defined-only", folder.glob("*.so")))
    refusals = folder / "refusals.cpp"
    refusals.write_text(
        REFUSAL + "".join(f'extern "C" int {n}() {{ return refuse("{n}"); }}\n' for n in missing)
    )
    library("libascendcl", *runtime, refusals)


def _needed(torch_npu: Path) -> set[str]:
    """The C functions of CANN that torch-npu's libraries want when they are loaded."""
    libraries = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    return {name for name in _symbols("--undefined-only", libraries) if CANN.fullmatch(name)}


def _symbols(which: str, libraries: Iterable[Path]) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", which, *map(str, libraries)], check=True, capture_output=True, text=True
    )
    return {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " " in line}
