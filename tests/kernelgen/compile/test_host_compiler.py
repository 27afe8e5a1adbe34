"""Compilers that hang, write bad output or are none: each raises a typed error and leaves nothing in the cache."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import doctor
from kernelgen import CacheError, CompileError, ToolMissingError, cuda_facts, device_facts
from kernelgen.compile import gpu as nvrtc
from kernelgen.compile import host as host_compiler
from kernelgen.compile import job as leftovers
from kernelgen.compile.compiler import cache_dir, compile_source
from kernelgen.compile.host import find_host_compiler
from kernelgen.compile.job import is_whole
from kernelgen.kernels.source import Source

HOST = device_facts("cpu")
ANSWER = Source('extern "C" int equitune_kernel() { return 42; }\n', "c++")
Script = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """A fake compiler: shell code for ``--version`` and for a compilation. ``$real`` is the real compiler."""
    real = find_host_compiler().path

    def write(compilation: str, version: str = "echo compiler 1.0") -> Path:
        path = tmp_path / "compiler"
        path.write_text(
            f'#!/bin/sh\nreal={real}\nif [ "$1" = --version ]; then\n{version}\nelse\n{compilation}\nfi\n',
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        host_compiler._host_compiler.cache_clear()
        return path

    return write


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process ended; it may wait for a parent that never asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_process_leaves_neither_compiler_nor_folder(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler proper is a child of what is called."""
    script(f"sleep 600 & echo $! $$ > {tmp_path}/started.new\nmv {tmp_path}/started.new {tmp_path}/started\nwait")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(temporary))
    process = multiprocessing.get_context("fork").Process(target=compile_source, args=(ANSWER, HOST))
    process.start()
    wait_until((tmp_path / "started").exists)
    assert [folder.name.startswith(f"equitune-{process.pid}-") for folder in temporary.iterdir()] == [True]
    process.kill()
    process.join()
    for pid in map(int, (tmp_path / "started").read_text().split()):
        wait_until(lambda pid=pid: is_gone(pid))
    wait_until(lambda: not list(temporary.iterdir()))


def test_folders_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache and the folder for temporary files, by the next process that compiles."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(temporary))
    swept, kept = [], []
    for kind, parent in (("equitune", temporary), (".new", cache_dir())):
        parent.mkdir(mode=0o700)
        for pid, age_s, found in (
            (ended.pid, leftovers.SWEPT_AFTER_S + 60, swept),
            (ended.pid, 60, kept),  # perhaps of another machine that shares the folder
            (os.getpid(), leftovers.SWEPT_AFTER_S + 60, kept),
        ):
            found.append(parent / f"{kind}-{pid}-{age_s:.0f}")
            found[-1].mkdir()
            (found[-1] / "kernel.cpp").write_text("int x;")
            os.utime(found[-1], (time.time() - age_s,) * 2)
        kept.append(parent / f"{kind}-of-a-user")
        kept[-1].mkdir()
        os.utime(kept[-1], (0, 0))
    (tmp_path / "elsewhere").mkdir()
    (temporary / f"equitune-{ended.pid}-link").symlink_to(tmp_path / "elsewhere")
    leftovers.sweep_once.cache_clear()
    assert compile_source(ANSWER, HOST).path.exists()
    assert not any(folder.exists() for folder in swept) and all(folder.exists() for folder in kept)
    assert (tmp_path / "elsewhere").exists()
    mine = {folder.name for folder in (*temporary.iterdir(), *cache_dir().glob(".*"))}
    assert mine == {folder.name for folder in kept} | {f"equitune-{ended.pid}-link"}, "and none of its own stays"


def stored() -> list[Path]:
    return list(cache_dir().glob("*/*"))


@pytest.mark.parametrize("cxx", ["g++ 'x", 'g++ "', "g++ \\"])
def test_a_setting_that_no_shell_would_read(monkeypatch: pytest.MonkeyPatch, cxx: str) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ToolMissingError, match="is no command .*set it to a C"):
        compile_source(ANSWER, HOST)


def test_a_program_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(ToolMissingError, match="reports success, but its output .0 bytes"):
        compile_source(ANSWER, HOST)
    assert not stored()
    (row,) = [finding for finding in doctor.examine() if finding.name in ("C++", "host_compiler")]
    assert row.state == "problem" and "reports success" in row.value


SPOILED = {
    "text": "echo no library > kernel.so",
    "half": '$real "$@" && head -c 9000 kernel.so > half && mv half kernel.so',
    "header": '$real "$@" && head -c 40 kernel.so > half && mv half kernel.so',
    "another function": "echo 'extern \"C\" int other() { return 1; }' | $real -shared -fPIC -x c++ - -o kernel.so",
    "missing symbol": (
        "echo 'int missing(); extern \"C\" int equitune_kernel() { return missing(); }'"
        " | $real -shared -fPIC -x c++ - -o kernel.so"
    ),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_output_that_cannot_be_loaded_is_not_kept(script: Script, kind: str) -> None:
    script(SPOILED[kind])
    for _ in range(2):
        with pytest.raises(ToolMissingError, match=r"is no whole library|cannot be loaded"):
            compile_source(ANSWER, HOST)
    assert not stored()
    script('exec $real "$@"')
    assert ctypes.CDLL(str(compile_source(ANSWER, HOST).path)).equitune_kernel() == 42


def test_checked_libraries_do_not_stay_loaded() -> None:
    path = compile_source(ANSWER, HOST).path
    assert str(path.parent.parent) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("data", [b"", b"no ELF", b"\x7fELF\x02\x01\x01"])
def test_a_cubin_without_the_kernel_is_not_kept(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "1.0")
    monkeypatch.setattr(nvrtc, "_compile_cuda", lambda source, **options: (data, {}))
    with pytest.raises(ToolMissingError, match="without the kernel equitune_kernel"):
        compile_source(Source("any", "cuda"), cuda_facts("sm_90"))
    assert not stored()


def test_a_file_cut_anywhere_is_not_whole() -> None:
    data = compile_source(ANSWER, HOST).path.read_bytes()
    assert is_whole(data)
    assert not any(is_whole(data[:size]) for size in range(0, len(data), 97))


# It starts another process and waits, as a compiler's driver does.
HANGS = "sleep 1000 & echo $! > {pid}; wait"


def ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not yet have collected it."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.timeout(60)
def test_a_compiler_that_hangs_is_stopped(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_compiler, "COMPILE_LIMIT_S", 0.5)
    script(HANGS.format(pid=tmp_path / "pid"))
    with pytest.raises(CompileError, match=r"compiler kernel.cpp -o kernel.so .* did not end within 0.5 s"):
        compile_source(ANSWER, HOST)
    while not ended(int((tmp_path / "pid").read_text())):
        time.sleep(0.01)
    assert not stored()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["version", "compilation"])
def test_doctor_says_that_a_compiler_hangs(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.setattr(host_compiler, "VERSION_LIMIT_S", 0.5)
    hangs = HANGS.format(pid=tmp_path / "pid")
    path = script("exit 1", version=hangs) if where == "version" else script(hangs)
    (row,) = [finding for finding in doctor.examine() if finding.name in ("C++", "host_compiler")]
    assert row.state == "problem"
    assert "did not end within 0.5 s" in row.value and str(path) in row.value


def test_a_compiler_without_room_is_no_fault_of_the_source(script: Script) -> None:
    script(f"echo 'fatal error: error writing to /tmp/x.s: {os.strerror(errno.ENOSPC)}' >&2; exit 1")
    with pytest.raises(CacheError, match="set TMPDIR"):
        compile_source(ANSWER, HOST)


def test_a_compiler_that_is_gone(script: Script) -> None:
    path = script('exec $real "$@"')
    find_host_compiler()
    path.unlink()
    with pytest.raises(ToolMissingError, match="cannot be run .*set CXX") as raised:
        compile_source(ANSWER, HOST)
    assert str(raised.value).count(str(path)) == 1


def test_a_debug_folder_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQUITUNE_DEBUG", "1")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("EQUITUNE_DEBUG_DIR", str(folder))
        with pytest.warns(UserWarning, match="set EQUITUNE_DEBUG_DIR"):
            binary = compile_source(ANSWER, HOST)
        assert ctypes.CDLL(str(binary.path)).equitune_kernel() == 42
