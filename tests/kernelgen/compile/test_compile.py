"""Compilers and the cache of compiled kernels: reuse, damage, several processes at once, missing tools."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernelgen import CacheError, CompileError, ToolMissingError, cuda_facts, device_facts
from kernelgen.compile import compiler as cache
from kernelgen.compile import gpu as nvrtc
from kernelgen.compile.compiler import cache_dir, compile_by, compile_many, compile_source
from kernelgen.compile.host import find_host_compiler
from kernelgen.compile.job import Job
from kernelgen.kernels.source import Source

HOST = device_facts("cpu")
ANSWER = Source(
    '#include <omp.h>\nextern "C" int equitune_kernel() { return 42 + 0 * omp_get_max_threads(); }\n', "c++"
)
BROKEN = Source("this is no C++", "c++")
CUDA = Source(
    'extern "C" __global__ void equitune_kernel(float* x) { __shared__ float s[64]; s[threadIdx.x] = *x;\n'
    "__syncthreads(); *x = s[63 - threadIdx.x]; }\n",
    "cuda",
)
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda.core is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "cache"))


def fail(*arguments: object, **options: object) -> None:
    raise AssertionError("the compiler was called")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the compilers, so that only the cache can provide a binary."""
    monkeypatch.setattr("kernelgen.compile.host.build", fail)


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).equitune_kernel()


def test_host_source_becomes_a_library() -> None:
    binary = compile_source(ANSWER, HOST)
    assert answer(binary.path) == 42
    assert 0 < binary.resources["code_bytes"] < 100_000
    assert (binary.path.parent / "kernel.cpp").read_text() == ANSWER.text
    assert cache_dir() in binary.path.parents


def test_second_call_comes_from_the_cache(request: pytest.FixtureRequest) -> None:
    first = compile_source(ANSWER, HOST)
    request.getfixturevalue("no_compiler")
    assert compile_source(ANSWER, HOST) == first


def test_other_source_and_other_flags_are_other_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = compile_source(ANSWER, HOST)
    other = compile_source(Source(ANSWER.text + "// more\n", "c++"), HOST)
    monkeypatch.setenv("EQUITUNE_DEBUG", "2")
    monkeypatch.setenv("EQUITUNE_DEBUG_DIR", str(tmp_path / "debug"))
    debug = compile_source(ANSWER, HOST)
    assert len({first.path, other.path, debug.path}) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "no-binary", "torn-json", "empty-json", "no-entry"])
def test_damaged_entry_is_compiled_again(damage: str) -> None:
    path = compile_source(ANSWER, HOST).path
    data, entry = path.read_bytes(), path.parent / "entry.json"
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no-binary":
        path.unlink()
    elif damage == "no-entry":
        entry.unlink()
    else:
        entry.write_text(entry.read_text()[:20] if damage == "torn-json" else "{}")
    again = compile_source(ANSWER, HOST)
    assert again.path == path
    assert path.read_bytes() == data
    assert json.loads(entry.read_text())["resources"] == again.resources
    assert answer(path) == 42


KEYS = [cache.digest(str(i)) for i in range(10)]
DATA = b"binary" * 1000


def store_damage_and_read(damages: bool) -> None:
    """A process of the test below; an exception sets its exit code."""
    for key in KEYS * 10:
        cache.publish(key, "kernel.so", DATA, "kernel.cpp", "source", {"code_bytes": 1})
        if damages:
            # Another process may be replacing the entry at this moment.
            with contextlib.suppress(OSError):
                (cache.cache_dir() / key[:2] / key / "kernel.so").write_bytes(b"torn")
        found = cache.find(key, "kernel.so")
        assert found is None or found.resources == {"code_bytes": 1}


def test_processes_that_store_and_damage_the_same_kernels_agree() -> None:
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=store_damage_and_read, args=(damages,)) for damages in (True, False, False)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0, 0]
    store_damage_and_read(False)
    assert all(cache.find(key, "kernel.so") is not None for key in KEYS)
    assert len(list(cache_dir().glob("*/*"))) == len(KEYS)
    assert not list(cache_dir().glob("*/.*")), "temporary directories were left behind"


def test_of_many_that_ask_together_one_compiles() -> None:
    begun: list[float] = []

    def compile_slowly(source: Source) -> tuple[bytes, dict]:
        begun.append(time.monotonic())
        time.sleep(0.2)
        return b"binary", {}

    job = Job("made up", (), "none", "kernel.bin", "kernel.txt", compile_slowly, lambda path, entry: None)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_by(job, Source("text", "entry")), range(4)))
    assert len(begun) == 1 and len({binary.path for binary in found}) == 1
    assert not list(cache_dir().glob(".lock-*"))


def test_without_a_lock_kernels_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(cache.filelock.FileLock, "acquire", refuse)
    assert compile_source(Source(ANSWER.text + "// unlocked\n", "c++"), HOST).path.exists()


def test_rejected_source_gives_the_log_and_stores_nothing() -> None:
    with pytest.raises(CompileError, match="kernel.cpp:1"):
        compile_source(BROKEN, HOST)
    assert not list(cache_dir().glob("*/*"))


def test_compile_many_keeps_order_and_returns_errors_as_values() -> None:
    sources = [Source(f'extern "C" int equitune_kernel() {{ return {i}; }}', "c++") for i in range(3)]
    found = compile_many([(sources[0], HOST), (BROKEN, HOST), (sources[1], HOST), (sources[2], HOST)], workers=2)
    assert isinstance(found[1], CompileError)
    assert [answer(b.path) for b in found if not isinstance(b, CompileError)] == [0, 1, 2]


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError, match=r"g\+\+, c\+\+ and clang\+\+; install one"):
        find_host_compiler()
    with pytest.raises(ToolMissingError):
        compile_many([(ANSWER, HOST)])
    monkeypatch.setenv("CXX", "/nowhere/c++ -Wall")
    with pytest.raises(ToolMissingError, match="/nowhere/c"):
        find_host_compiler()


def test_cxx_may_bring_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    path = find_host_compiler().path
    monkeypatch.setenv("CXX", f"{path} -DTHE_ANSWER=43")
    assert find_host_compiler().arguments == ("-DTHE_ANSWER=43",)
    source = Source('extern "C" int equitune_kernel() { return THE_ANSWER; }', "c++")
    assert answer(compile_source(source, HOST).path) == 43


def test_cache_that_cannot_be_written_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CacheError, match="set EQUITUNE_CACHE"):
        compile_source(ANSWER, HOST)


def test_kernels_share_the_threads_of_torch() -> None:
    function = ctypes.CDLL(str(compile_source(Source(ANSWER.text.replace("42 + 0 * ", ""), "c++"), HOST).path))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert function.equitune_kernel() == threads
    finally:
        torch.set_num_threads(before)


def test_debug_setting_writes_source_and_resources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_source(ANSWER, HOST)
    monkeypatch.setenv("EQUITUNE_DEBUG", "1")
    monkeypatch.setenv("EQUITUNE_DEBUG_DIR", str(tmp_path / "debug"))
    binary = compile_source(ANSWER, HOST)
    (source,) = (tmp_path / "debug").glob("*.cpp")
    (record,) = (tmp_path / "debug").glob("*.json")
    assert source.read_text() == ANSWER.text
    assert json.loads(record.read_text())["resources"] == binary.resources


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90'
ptxas info    : Function properties for other
ptxas         .     8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 11 registers, used 0 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'equitune_kernel' for 'sm_90'
ptxas info    : Function properties for equitune_kernel
ptxas         .     72 bytes stack frame, 96 bytes spill stores, 108 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 72 bytes cumulative stack size, 144 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 80.764 ms
"""


def test_assembler_report_is_read_for_the_entry_alone() -> None:
    expected = {"registers": 168, "spill_bytes": 204, "stack_bytes": 72, "shared_bytes": 144}
    assert nvrtc.parse_ptxas(PTXAS, "equitune_kernel") == expected
    assert nvrtc.parse_ptxas("no report", "equitune_kernel") == {}


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_cuda_compiles_without_a_device(arch: str) -> None:
    binary = compile_source(CUDA, cuda_facts(arch))
    assert binary.path.read_bytes()[:4] == b"\x7fELF"
    assert binary.resources["registers"] > 0
    assert binary.resources["shared_bytes"] >= 256
    assert binary.resources["code_bytes"] == 16 * binary.resources["instructions"] > 0
    assert binary.resources["spill_bytes"] == 0


@needs_nvrtc
def test_cuda_rejects_and_caches_like_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    first, failed, second = compile_many([(s, cuda_facts("sm_90")) for s in (CUDA, BROKEN, CUDA)])
    assert isinstance(failed, CompileError) and "error" in str(failed)
    assert first == second
    monkeypatch.setattr(nvrtc, "_compile_cuda", fail)
    assert compile_source(CUDA, cuda_facts("sm_90")) == first


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    nvrtc.nvrtc_version.cache_clear()
    try:
        with pytest.raises(ToolMissingError, match=r"pip install 'equitune\[gpu\]'"):
            compile_source(CUDA, cuda_facts("sm_90"))
    finally:
        nvrtc.nvrtc_version.cache_clear()


@needs_nvrtc
def test_first_compilations_in_threads_of_a_fresh_process(tmp_path: Path) -> None:
    """Threads that import cuda.core at the same time must not see a partial module."""
    script = (
        "from kernelgen.compile.compiler import compile_many\n"
        "from kernelgen.device import cuda_facts\n"
        "from kernelgen.kernels.source import Source\n"
        "text = 'extern \"C\" __global__ void equitune_kernel(float* p) {{ *p = {}; }}'\n"
        "found = compile_many([(Source(text.format(i), 'cuda'), cuda_facts('sm_90')) for i in range(16)], workers=16)\n"
        "assert all(binary.resources['registers'] for binary in found)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "EQUITUNE_CACHE": str(tmp_path)})
