"""Source enters, a binary on disk with its resource usage leaves: the host's C++ compiler, or NVRTC for CUDA.

Neither needs the device that it compiles for, nor a CUDA driver. Results are cached on disk (see ``cache``) under
source, flags, compiler version and architecture.

Environment: ``CXX`` names the host compiler (with arguments, if any); ``EQUITUNE_CACHE`` the cache's directory.
``EQUITUNE_DEBUG`` keeps what was generated, in ``$EQUITUNE_DEBUG_DIR`` or ``./equitune-debug``:

    0 or unset   nothing
    1            every kernel asked for: its source, and its resource usage and compile command as JSON
    2            the same, compiled with line information for debuggers and profilers
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelgen import cache
from kernelgen.cache import Binary
from kernelgen.device import DeviceFacts
from kernelgen.errors import CompileError, ToolMissingError
from kernelgen.source import Source

HOST_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
_LOG_LIMIT = 4000
# cuda.core picks its implementation while it is imported, and threads that import it meanwhile see half of it.
_import_lock = threading.Lock()


@dataclass(frozen=True)
class HostCompiler:
    """``path`` of the executable, the arguments that ``$CXX`` puts before ours, the first line of ``--version``."""

    path: str
    version: str
    arguments: tuple[str, ...] = ()

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()


@dataclass(frozen=True)
class _Job:
    """One compiler, its flags and what makes its output specific: all but the source of a cache key."""

    identity: str
    flags: tuple[str, ...]
    target: str
    binary_name: str
    source_name: str


def compile_source(source: Source, facts: DeviceFacts) -> Binary:
    """The binary of ``source`` for ``facts``, from the cache or the compiler.

    Raises CompileError with the compiler's log, ToolMissingError if there is no compiler.
    """
    job = _cuda_job(facts) if facts.backend == "cuda" else _host_job()
    key = cache.digest(source.text, source.entry, job.identity, *job.flags, job.target)
    binary = cache.find(key, job.binary_name)
    if binary is None:
        build = _compile_cuda if facts.backend == "cuda" else _compile_host
        data, resources = build(source, job, facts)
        binary = cache.publish(key, job.binary_name, data, job.source_name, source.text, resources)
    if _debug_level():
        _write_debug(source, job, key, binary)
    return binary


def compile_many(
    items: Sequence[tuple[Source, DeviceFacts]], workers: int | None = None
) -> list[Binary | CompileError]:
    """Compile in parallel, in order; source that a compiler rejects gives its CompileError as a value.

    Threads serve: g++ is a process of its own, and NVRTC runs without the interpreter's lock.
    """

    def attempt(item: tuple[Source, DeviceFacts]) -> Binary | CompileError:
        try:
            return compile_source(*item)
        except CompileError as error:
            return error

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(attempt, items))


def find_host_compiler() -> HostCompiler:
    """``$CXX``, else the first of g++, c++ and clang++ that runs; ToolMissingError if there is none."""
    return _host_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=16)
def _host_compiler(cxx: str, _path: str) -> HostCompiler:
    candidates = [shlex.split(cxx)] if cxx.strip() else [["g++"], ["c++"], ["clang++"]]
    for command in candidates:
        path = shutil.which(command[0])
        if path is None:
            continue
        try:
            shown = subprocess.run([path, *command[1:], "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return HostCompiler(path, (shown.stdout.splitlines() or ["unknown"])[0].strip(), tuple(command[1:]))
    tried = f"$CXX={cxx!r}" if cxx.strip() else "g++, c++ and clang++"
    raise ToolMissingError(
        f"no C++ compiler: tried {tried}; install one with OpenMP (for example: apt install g++) or set CXX to its path"
    )


def _debug_level() -> int:
    text = os.environ.get("EQUITUNE_DEBUG", "")
    return int(text) if text.isdigit() else int(bool(text))


def _write_debug(source: Source, job: _Job, key: str, binary: Binary) -> None:
    folder = Path(os.environ.get("EQUITUNE_DEBUG_DIR") or "equitune-debug")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key[:16]}{Path(job.source_name).suffix}").write_text(source.text)
    record = {
        "binary": str(binary.path),
        "compiler": job.identity,
        "flags": job.flags,
        "target": job.target,
        "resources": binary.resources,
    }
    (folder / f"{key[:16]}.json").write_text(json.dumps(record, indent=1))


def _host_job() -> _Job:
    compiler = find_host_compiler()
    flags = (*compiler.arguments, *HOST_FLAGS, *_openmp_flags(compiler), *(["-g"] if _debug_level() >= 2 else []))
    identity = f"{compiler.path} {compiler.version}"
    return _Job(identity, flags, _processor(), "kernel.so", "kernel.cpp")


def _openmp_flags(compiler: HostCompiler) -> tuple[str, ...]:
    """OpenMP through torch's own libgomp, where the wheel brings one.

    Kernel and torch then share a thread pool, and ``torch.set_num_threads`` holds for both. Clang's OpenMP does not
    run on libgomp.
    """
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if compiler.is_clang or not bundled:
        return ("-fopenmp",)
    library = bundled[0]
    # as-needed keeps the compiler's own libgomp, which -fopenmp appends, from being loaded beside torch's.
    return ("-fopenmp", str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--as-needed")


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """What -march=native depends on."""
    path = Path("/proc/cpuinfo")
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    lines = path.read_text().splitlines() if path.exists() else []
    return os.uname().machine + "".join(sorted({line for line in lines if line.partition("\t")[0].strip() in wanted}))


def _compile_host(source: Source, job: _Job, facts: DeviceFacts) -> tuple[bytes, dict[str, Any]]:
    compiler = find_host_compiler()
    with tempfile.TemporaryDirectory(prefix="equitune-") as folder:
        (Path(folder) / job.source_name).write_text(source.text)
        # The source comes before the libraries in job.flags: the linker resolves from left to right.
        command = [compiler.path, job.source_name, "-o", job.binary_name, *job.flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            data = (Path(folder) / job.binary_name).read_bytes()
            return data, {"code_bytes": len(section(data, ".text"))}
    if "omp.h" in done.stderr or "lomp" in done.stderr:
        raise ToolMissingError(f"{compiler.path} has no OpenMP; install libomp-dev, or use g++: set CXX=g++")
    raise CompileError(f"{shlex.join(command)} failed:\n{_shortened(done.stderr or done.stdout)}")


def section(elf: bytes, name: str) -> bytes:
    """A section of a 64-bit little-endian ELF file; empty if it has none of that name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_at, _, _, _, at, size in headers:
        start = names_at + name_at
        if elf[start : elf.index(b"\0", start)] == name.encode():
            return elf[at : at + size]
    return b""


def _cuda_job(facts: DeviceFacts) -> _Job:
    with _import_lock:
        version = nvrtc_version()
    flags = ("-std=c++17", "-lineinfo") if _debug_level() >= 2 else ("-std=c++17",)
    return _Job(f"nvrtc {version}", flags, facts.arch, "kernel.cubin", "kernel.cu")


@functools.lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Version of the NVRTC library found on this machine; ToolMissingError if there is none."""
    advice = "install it with: pip install 'equitune[gpu]' (no CUDA toolkit or driver is needed to compile)"
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions  # noqa: F401  (compiling needs them: say so now if they are missing)
    except ImportError as error:
        raise ToolMissingError(f"cuda.core cannot be imported ({error}); {advice}") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        first_line = (str(error).splitlines() or ["not found"])[0]
        raise ToolMissingError(f"NVRTC cannot be loaded ({first_line}); {advice}") from error
    return f"{major}.{minor}"


def _compile_cuda(source: Source, job: _Job, facts: DeviceFacts) -> tuple[bytes, dict[str, Any]]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=job.source_name,
        arch=facts.arch,
        std="c++17",
        lineinfo=True if "-lineinfo" in job.flags else None,
        ptxas_options=["-v"],
        no_cache=True,  # a hit in NVRTC's own cache comes without the assembler's report
    )
    try:
        code = bytes(Program(source.text, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:
        # cuda.core raises its own private types for NVRTC's errors; the message holds the compiler's log.
        raise CompileError(f"NVRTC for {facts.arch} failed:\n{_shortened(str(error))}") from error
    return code, parse_ptxas(log.getvalue(), source.entry)


def parse_ptxas(log: str, entry: str) -> dict[str, Any]:
    """Registers, spills, stack and static shared memory of ``entry`` from the assembler's ``-v`` report."""
    _, _, report = log.partition(f"Compiling entry function '{entry}'")
    report = report.split("Compiling entry function")[0]
    _, _, report = report.partition(f"Function properties for {entry}")

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    if "Used" not in report:
        return {}
    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "shared_bytes": number(r"(\d+) bytes smem"),
    }


def _shortened(log: str) -> str:
    return log if len(log) <= _LOG_LIMIT else log[:_LOG_LIMIT] + f"\n... {len(log) - _LOG_LIMIT} more characters"
