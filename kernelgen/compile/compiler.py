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
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.compile import cache
from kernelgen.compile.cache import Binary
from kernelgen.compile.host import build, check_library, find_host_compiler, is_whole, processor, section, shortened
from kernelgen.device import DeviceFacts
from kernelgen.emit.source import Source
from kernelgen.errors import CompileError, ToolMissingError

# cuda.core picks its implementation while it is imported, and threads that import it meanwhile see half of it.
_import_lock = threading.Lock()


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

    Raises CompileError with the compiler's log, ToolMissingError if there is no compiler that works, CacheError if the
    binary cannot be kept or another user could have put it there.
    """
    job = _cuda_job(facts) if facts.backend == "cuda" else _host_job()
    key = cache.digest(source.text, source.entry, job.identity, *job.flags, job.target)
    binary = cache.find(key, job.binary_name)
    if binary is None:
        compiled, check = (_compile_cuda, _check_cubin) if facts.backend == "cuda" else (_compile_host, check_library)
        data, resources = compiled(source, job, facts)
        checked = functools.partial(check, entry=source.entry)
        binary = cache.publish(key, job.binary_name, data, job.source_name, source.text, resources, checked)
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


def _debug_level() -> int:
    text = os.environ.get("EQUITUNE_DEBUG", "")
    return int(text) if text.isdecimal() else int(bool(text))


def _write_debug(source: Source, job: _Job, key: str, binary: Binary) -> None:
    folder = Path(os.environ.get("EQUITUNE_DEBUG_DIR") or "equitune-debug")
    record = {
        "binary": str(binary.path),
        "compiler": job.identity,
        "flags": job.flags,
        "target": job.target,
        "resources": binary.resources,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key[:16]}{Path(job.source_name).suffix}").write_text(source.text)
        (folder / f"{key[:16]}.json").write_text(json.dumps(record, indent=1))
    except OSError as error:  # the kernel itself is there and runs
        warnings.warn(
            f"EQUITUNE_DEBUG: nothing can be written to {folder} ({error}); set EQUITUNE_DEBUG_DIR to another folder",
            stacklevel=2,
        )


def _host_job() -> _Job:
    compiler = find_host_compiler()
    flags = (*compiler.flags, *(["-g"] if _debug_level() >= 2 else []))
    identity = f"{compiler.path} {compiler.version}"
    return _Job(identity, flags, processor(), "kernel.so", "kernel.cpp")


def _compile_host(source: Source, job: _Job, facts: DeviceFacts) -> tuple[bytes, dict[str, Any]]:
    data = build(find_host_compiler(), source.text, job.source_name, job.binary_name, job.flags)
    return data, {"code_bytes": len(section(data, ".text"))}


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
        raise CompileError(f"NVRTC for {facts.arch} failed:\n{shortened(str(error))}") from error
    return code, parse_ptxas(log.getvalue(), source.entry)


def _check_cubin(path: Path, entry: str) -> None:
    """ToolMissingError unless a cubin has the kernel ``entry``. Only a device can load it."""
    data = path.read_bytes()
    if not (is_whole(data) and section(data, f".text.{entry}")):
        raise ToolMissingError(
            f"NVRTC {nvrtc_version()} made {len(data)} bytes without the kernel {entry}; install another"
        )


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
